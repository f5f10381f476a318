//! Fusion: runs of steps that one kernel does in decode, and a few in prefill, become one op.
//!
//! Rules look at the head of the steps that are left, in order; the first that matches takes its steps. A rule is a pattern
//! and nothing else: it may drop a step's output only if nobody else reads it. Every fused op has a twin in single
//! steps, which is what [`Fusion::Off`] gives, and the two are compared in tests.

use std::ops::Range;

use carat_model::{
    phase::Origin,
    plan::{KvSlot, Labelled, Plan, RopeId, Rows, Step, Value},
    weights::Weight,
};

use crate::{config::Fusion, kernel::MAX_GROUP};

/// The most matrices of one product: q, k and v.
const MAX_PARTS: usize = 3;

/// One or more consecutive steps of a plan, done as one.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Op {
    /// Label of the step that names it; of a product, those of its matrices, such as `L3.attn.q+k+v`.
    pub(crate) label: String,
    pub(crate) origin: Origin,
    pub(crate) steps: Range<usize>,
    pub(crate) rows: Rows,
    pub(crate) work: Work,
}

#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Work {
    Step(Step),
    Product(Product),
    ResidualNorm(ResidualNorm),
    StoreKv(StoreKv),
    Attend(Attend),
    LayerInputs(LayerInputs),
    Route(Routing),
    Experts(Experts),
}

/// Matrices with one input, with prologue and epilogue.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Product {
    pub(crate) input: Prologue,
    pub(crate) parts: Vec<LinearPart>,
    pub(crate) epilogue: Epilogue,
}

#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Prologue {
    Value(Value),
    /// Normed, and read by the product alone.
    Norm(RowNorm),
    /// The sum, or its norm where there is one, which is then read by the product alone.
    ResidualNorm(ResidualNorm),
}

/// One matrix of a product.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct LinearPart {
    pub(crate) w: Weight,
    pub(crate) out: Value,
}

#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Epilogue {
    Nothing,
    /// `gelu(first) * second`, of the product's two parts, which exist nowhere else.
    Geglu {
        out: Value,
    },
    /// `gelu(part) * other[column ..]`, of the product's one part.
    GeluMulSlice {
        other: Value,
        column: usize,
        out: Value,
    },
}

/// A branch's post-norm, the residual add, perhaps the layer's scale, perhaps the next branch's norm.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct ResidualNorm {
    pub(crate) norm: RowNorm,
    /// The two branches that `norm.x` is the sum of, where it exists nowhere else.
    pub(crate) branches: Option<Branches>,
    /// The value that the normed branch is added to.
    pub(crate) residual: Value,
    /// Of the sum.
    pub(crate) scale: f32,
    pub(crate) sum: Value,
    pub(crate) following: Option<FollowingNorm>,
}

/// Two branches of a layer, each under a norm of its own, summed.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Branches {
    pub(crate) first: RowNorm,
    pub(crate) second: RowNorm,
}

/// A norm of the sum.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct FollowingNorm {
    pub(crate) weight: Option<Weight>,
    pub(crate) eps: f32,
    pub(crate) out: Value,
}

/// Keys are normed and rotated, values normed, and both go into their page without being written anywhere else.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct StoreKv {
    pub(crate) k: RowNorm,
    pub(crate) v: RowNorm,
    pub(crate) rope: RopeId,
    pub(crate) slot: KvSlot,
}

/// Queries are normed and rotated, then attend; perhaps to keys and values that the same rows store first.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Attend {
    pub(crate) store: Option<StoreKv>,
    pub(crate) q: RowNorm,
    pub(crate) rope: RopeId,
    pub(crate) slot: KvSlot,
    pub(crate) out: Value,
}

/// Per-layer inputs from a token and its embedding's projection: `(norm(context * scale) + table[token]) * by`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct LayerInputs {
    pub(crate) context: Value,
    pub(crate) context_scale: f32,
    pub(crate) weight: Option<Weight>,
    pub(crate) group: usize,
    pub(crate) eps: f32,
    pub(crate) table: Weight,
    pub(crate) table_scale: f32,
    pub(crate) by: f32,
    pub(crate) out: Value,
}

/// A router's norm, its scores times `scale`, and the top-k of them.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Routing {
    pub(crate) norm: RowNorm,
    pub(crate) scale: f32,
    pub(crate) w: Weight,
    pub(crate) expert_scale: Option<Weight>,
    pub(crate) top_k: usize,
    pub(crate) out: Value,
}

/// Routed experts of a value that is normed for them alone.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Experts {
    pub(crate) norm: RowNorm,
    pub(crate) route: Value,
    pub(crate) gate: Weight,
    pub(crate) up: Weight,
    pub(crate) down: Weight,
    pub(crate) out: Value,
}

/// A norm without its output.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct RowNorm {
    pub(crate) x: Value,
    pub(crate) weight: Option<Weight>,
    pub(crate) eps: f32,
}

/// The plan as ops, in order, covering every step.
pub(crate) fn fuse(plan: &Plan, fusion: Fusion) -> Vec<Op> {
    let readers = Readers::of(plan);
    let rules: &[Rule] = match fusion {
        Fusion::On => &[
            product,
            attend,
            store,
            lone_residual_norm,
            ple_inputs,
            route,
            experts,
        ],
        Fusion::Off => &[],
    };
    let mut ops = Vec::new();
    let mut at = 0;
    while at < plan.steps.len() {
        let cursor = Cursor {
            plan,
            steps: &plan.steps[at..],
            readers: &readers,
        };
        let (work, taken) = rules
            .iter()
            .find_map(|rule| rule(&cursor))
            .unwrap_or_else(|| (Work::Step(plan.steps[at].step.clone()), 1));
        let steps = at..at + taken;
        let within = &plan.steps[steps.clone()];
        let last = &within[taken - 1];
        let naming: Vec<&Labelled> = match work {
            Work::Product(_) => linears_of(within).collect(),
            Work::ResidualNorm(_) => vec![&within[0]],
            _ => vec![last],
        };
        ops.push(Op {
            label: Labelled::joined(naming.iter().copied()),
            origin: plan.origin(naming[0]),
            steps,
            rows: plan.step_rows(&last.step),
            work,
        });
        at += taken;
    }
    ops
}

/// The products among some steps.
pub(crate) fn linears_of(steps: &[Labelled]) -> impl Iterator<Item = &Labelled> {
    let is_linear = |s: &&Labelled| matches!(s.step, Step::Linear { .. });
    steps.iter().filter(is_linear)
}

/// The steps of a plan that are left, and the readers of each value.
struct Cursor<'a> {
    plan: &'a Plan,
    steps: &'a [Labelled],
    readers: &'a Readers,
}

impl Cursor<'_> {
    fn step(&self, i: usize) -> Option<&Step> {
        self.steps.get(i).map(|s| &s.step)
    }

    /// Step `i`, if it is a norm over groups of this width.
    fn norm(&self, i: usize, width: impl Fn(Value) -> usize) -> Option<(RowNorm, Value)> {
        match *self.step(i)? {
            Step::Norm {
                x,
                weight,
                group,
                eps,
                out,
            } if group == width(x) => Some((RowNorm { x, weight, eps }, out)),
            _ => None,
        }
    }

    fn whole_row_norm(&self, i: usize) -> Option<(RowNorm, Value)> {
        self.norm(i, |x| self.plan.columns(x))
    }

    /// The matrices that steps from `i` on multiply the same value with, and that value.
    fn linears(&self, i: usize) -> Option<(Value, Vec<LinearPart>)> {
        let mut input = None;
        let mut parts = Vec::new();
        while let Some(&Step::Linear { x, w, out }) = self.step(i + parts.len())
            && *input.get_or_insert(x) == x
            && parts.len() < MAX_PARTS
        {
            parts.push(LinearPart { w, out });
        }
        input.map(|x| (x, parts))
    }

    /// Two norms and their sum, which is their only reader: three steps.
    fn branches(&self) -> Option<(Branches, Value)> {
        let (first, first_out) = self.whole_row_norm(0)?;
        let (second, second_out) = self.whole_row_norm(1)?;
        let &Step::Add { a, b, out } = self.step(2)? else {
            return None;
        };
        let alone = |v: Value| self.readers.count(v) == 1;
        let summed = (a, b) == (first_out, second_out) || (b, a) == (first_out, second_out);
        let apart = second.x != first_out;
        (summed && apart && alone(first_out) && alone(second_out))
            .then_some((Branches { first, second }, out))
    }

    /// Post-norm (of two summed branches perhaps), add, scale and next norm from the first step on, and how many steps they are.
    fn residual_norm(&self) -> Option<(ResidualNorm, usize)> {
        self.residual_norm_of_branches()
            .or_else(|| self.residual_norm_from(0, None))
    }

    fn residual_norm_of_branches(&self) -> Option<(ResidualNorm, usize)> {
        let (branches, summed) = self.branches()?;
        let (found, taken) = self.residual_norm_from(3, Some(branches))?;
        let own = found.norm.x == summed && self.readers.count(summed) == 1;
        own.then_some((found, taken))
    }

    fn residual_norm_from(
        &self,
        first: usize,
        branches: Option<Branches>,
    ) -> Option<(ResidualNorm, usize)> {
        let (norm, normed) = self.whole_row_norm(first)?;
        let &Step::Add { a, b, out } = self.step(first + 1)? else {
            return None;
        };
        let residual = match (a == normed, b == normed) {
            (true, false) => b,
            (false, true) => a,
            _ => return None,
        };
        if self.readers.count(normed) != 1 {
            return None;
        }
        let (mut sum, mut scale, mut taken) = (out, 1.0, first + 2);
        if let Some(&Step::Scale { x, by, out }) = self.step(taken)
            && x == sum
            && self.readers.count(sum) == 1
        {
            (sum, scale, taken) = (out, by, taken + 1);
        }
        let following = self.whole_row_norm(taken).filter(|(n, _)| n.x == sum);
        taken += usize::from(following.is_some());
        let following = following.map(|(norm, out)| FollowingNorm {
            weight: norm.weight,
            eps: norm.eps,
            out,
        });
        let found = ResidualNorm {
            norm,
            branches,
            residual,
            scale,
            sum,
            following,
        };
        Some((found, taken))
    }

    /// A norm of heads at step `i` and the RoPE that follows it, with its output.
    fn norm_rope(&self, i: usize) -> Option<(RowNorm, RopeId, Value)> {
        let &Step::Rope { x, rope, out } = self.step(i + 1)? else {
            return None;
        };
        let head_dim = self.plan.rope(rope).head_dim;
        let (norm, normed) = self.norm(i, |_| head_dim)?;
        (normed == x && self.readers.count(normed) == 1).then_some((norm, rope, out))
    }

    /// Key norm, RoPE, value norm and store: four steps.
    fn store(&self) -> Option<StoreKv> {
        let (k, rope, k_out) = self.norm_rope(0)?;
        let head_dim = self.plan.rope(rope).head_dim;
        let (v, v_out) = self.norm(2, |_| head_dim)?;
        let &Step::StoreKv {
            k: stored_k,
            v: stored_v,
            slot,
        } = self.step(3)?
        else {
            return None;
        };
        let fits =
            stored_k == k_out && stored_v == v_out && self.plan.slot(slot).head_dim == head_dim;
        // The kernels norm values without a weight.
        let alone = self.readers.count(k_out) == 1 && self.readers.count(v_out) == 1;
        (fits && alone && v.weight.is_none()).then_some(StoreKv { k, v, rope, slot })
    }
}

/// A fused op and how many steps it takes, if it matches.
type Rule = fn(&Cursor<'_>) -> Option<(Work, usize)>;

/// Matrices that read one value, with the norm before them and the activation after them.
fn product(cursor: &Cursor<'_>) -> Option<(Work, usize)> {
    let before = || -> Option<(Prologue, Value, usize)> {
        if let Some((residual_norm, taken)) = cursor.residual_norm() {
            let x = residual_norm
                .following
                .map_or(residual_norm.sum, |next| next.out);
            return Some((Prologue::ResidualNorm(residual_norm), x, taken));
        }
        let (norm, out) = cursor.whole_row_norm(0)?;
        Some((Prologue::Norm(norm), out, 1))
    };
    let (input, parts, mut taken) = if let Some((input, x, taken)) = before() {
        let (read, parts) = cursor.linears(taken)?;
        // A sum is written in any case; a norm only for this product.
        let own = matches!(
            input,
            Prologue::ResidualNorm(ResidualNorm {
                following: None,
                ..
            })
        ) || cursor.readers.count(x) == parts.len() as u32;
        if read != x || !own {
            return None;
        }
        (input, parts, taken)
    } else {
        let (x, parts) = cursor.linears(0)?;
        (Prologue::Value(x), parts, 0)
    };
    taken += parts.len();
    let only_here = |part: &LinearPart| cursor.readers.count(part.out) == 1;
    let epilogue = match (cursor.step(taken), parts.as_slice()) {
        (
            Some(&Step::GeluMul {
                gate,
                up,
                up_column: 0,
                out,
            }),
            [first, second],
        ) if gate == first.out && up == second.out && parts.iter().all(only_here) => {
            Epilogue::Geglu { out }
        }
        (
            Some(&Step::GeluMul {
                gate,
                up,
                up_column,
                out,
            }),
            [part],
        ) if gate == part.out && up != part.out && only_here(part) => Epilogue::GeluMulSlice {
            other: up,
            column: up_column,
            out,
        },
        _ => Epilogue::Nothing,
    };
    taken += usize::from(epilogue != Epilogue::Nothing);
    let product = Product {
        input,
        parts,
        epilogue,
    };
    Some((Work::Product(product), taken))
}

fn attend(cursor: &Cursor<'_>) -> Option<(Work, usize)> {
    let store = cursor.store();
    let first = if store.is_some() { 4 } else { 0 };
    let (q, rope, rotated) = cursor.norm_rope(first)?;
    let &Step::Attend { q: read, slot, out } = cursor.step(first + 2)? else {
        return None;
    };
    let fits = read == rotated
        && cursor.readers.count(rotated) == 1
        && store.is_none_or(|s| {
            (s.slot, s.rope, cursor.plan.rows(s.k.x)) == (slot, rope, cursor.plan.rows(out))
        });
    let attend = Attend {
        store,
        q,
        rope,
        slot,
        out,
    };
    fits.then_some((Work::Attend(attend), first + 3))
}

fn store(cursor: &Cursor<'_>) -> Option<(Work, usize)> {
    cursor.store().map(|store| (Work::StoreKv(store), 4))
}

/// Post-norm, residual add, layer scale, next norm: one read and one write of the stream instead of up to four.
fn lone_residual_norm(cursor: &Cursor<'_>) -> Option<(Work, usize)> {
    let (residual_norm, taken) = cursor.residual_norm()?;
    Some((Work::ResidualNorm(residual_norm), taken))
}

/// The router's norm and scale, scores and top-k.
fn route(cursor: &Cursor<'_>) -> Option<(Work, usize)> {
    let (norm, mut normed) = cursor.whole_row_norm(0)?;
    let (mut scale, mut taken) = (1.0, 1);
    if let Some(&Step::Scale { x, by, out }) = cursor.step(1)
        && x == normed
        && cursor.readers.count(normed) == 1
    {
        (scale, normed, taken) = (by, out, 2);
    }
    let &Step::Route {
        x,
        w,
        expert_scale,
        top_k,
        out,
    } = cursor.step(taken)?
    else {
        return None;
    };
    let routing = Routing {
        norm,
        scale,
        w,
        expert_scale,
        top_k,
        out,
    };
    (x == normed && cursor.readers.count(normed) == 1).then_some((Work::Route(routing), taken + 1))
}

/// Experts and the norm that only they read.
fn experts(cursor: &Cursor<'_>) -> Option<(Work, usize)> {
    let (norm, normed) = cursor.whole_row_norm(0)?;
    let &Step::Experts {
        x,
        route,
        gate,
        up,
        down,
        out,
    } = cursor.step(1)?
    else {
        return None;
    };
    let experts = Experts {
        norm,
        route,
        gate,
        up,
        down,
        out,
    };
    (x == normed && cursor.readers.count(normed) == 1).then_some((Work::Experts(experts), 2))
}

fn ple_inputs(cursor: &Cursor<'_>) -> Option<(Work, usize)> {
    let steps = [0, 1, 2, 3, 4].map(|i| cursor.step(i));
    let [
        Some(&Step::Scale {
            x: context,
            by: context_scale,
            out: scaled,
        }),
        Some(&Step::Norm {
            x: read,
            weight,
            group,
            eps,
            out: normed,
        }),
        Some(&Step::Embed {
            table,
            scale: table_scale,
            out: embedded,
        }),
        Some(&Step::Add { a, b, out: sum }),
        Some(&Step::Scale {
            x: read_sum,
            by,
            out,
        }),
    ] = steps
    else {
        return None;
    };
    let linked = (read, a, b, read_sum) == (scaled, normed, embedded, sum);
    let within = [scaled, normed, embedded, sum];
    let alone = within.iter().all(|v| cursor.readers.count(*v) == 1);
    let inputs = LayerInputs {
        context,
        context_scale,
        weight,
        group,
        eps,
        table,
        table_scale,
        by,
        out,
    };
    (linked && alone && group <= MAX_GROUP).then_some((Work::LayerInputs(inputs), 5))
}

/// Number of steps that read each value; a plan's outputs have one more reader outside.
struct Readers(Vec<u32>);

impl Readers {
    fn of(plan: &Plan) -> Readers {
        let mut counts = vec![0; plan.value_count()];
        let inputs = plan.steps.iter().flat_map(|s| s.step.inputs());
        for value in inputs.chain([plan.hidden, plan.logits]) {
            counts[value.index()] += 1;
        }
        Readers(counts)
    }

    fn count(&self, value: Value) -> u32 {
        self.0[value.index()]
    }
}

#[cfg(test)]
mod tests;
