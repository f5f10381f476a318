//! Runs of steps that belong together: what one kernel does in decode, and a few in prefill.
//!
//! Rules look at the head of what is left of the plan, in order; the first that matches takes its steps. A rule is a pattern
//! and nothing else: it may take a step's output away only if nobody else reads it. Every fused op has a twin in single
//! steps, which is what [`Fusion::Off`] gives, and the two are compared in tests.

use std::ops::Range;

use carat_model::{
    phase::Origin,
    plan::{KvSlot, Labelled, Plan, RopeId, Rows, Step, Value},
    weights::Weight,
};

use crate::{config::Fusion, kernel::MOST_GROUP};

/// The most matrices that one product reads its input with: q, k and v.
const MOST_PARTS: usize = 3;

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
    NormAdd(NormAdd),
    StoreKv(StoreKv),
    Attend(Attend),
    LayerInputs(LayerInputs),
}

/// Matrices with one input, what comes before and what comes after.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Product {
    pub(crate) input: Input,
    pub(crate) parts: Vec<Part>,
    pub(crate) then: Then,
}

#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Input {
    Value(Value),
    /// Normed, and read by the product alone.
    Norm(RowNorm),
    /// The sum, or its norm where there is one, which is then read by the product alone.
    NormAdd(NormAdd),
}

/// One matrix of a product.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Part {
    pub(crate) w: Weight,
    pub(crate) out: Value,
}

#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Then {
    Nothing,
    /// `gelu(first) * second`, of the product's two parts, which exist nowhere else.
    GeluPair {
        out: Value,
    },
    /// `gelu(part) * other[column ..]`, of the product's one part.
    GeluSlice {
        other: Value,
        column: usize,
        out: Value,
    },
}

/// A branch's post-norm, the residual add, perhaps the layer's scale, perhaps the next branch's norm.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct NormAdd {
    pub(crate) norm: RowNorm,
    pub(crate) a: Value,
    pub(crate) by: f32,
    pub(crate) sum: Value,
    pub(crate) next: Option<Next>,
}

/// A norm of the sum.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Next {
    pub(crate) weight: Option<Weight>,
    pub(crate) eps: f32,
    pub(crate) out: Value,
}

/// Keys are normed and turned, values normed, and both go into their page without being written anywhere else.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct StoreKv {
    pub(crate) k: RowNorm,
    pub(crate) v: RowNorm,
    pub(crate) rope: RopeId,
    pub(crate) slot: KvSlot,
}

/// Queries are normed and turned, then attend; perhaps to what the same rows store first.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Attend {
    pub(crate) store: Option<StoreKv>,
    pub(crate) q: RowNorm,
    pub(crate) rope: RopeId,
    pub(crate) slot: KvSlot,
    pub(crate) out: Value,
}

/// What a token and its embedding's projection give to some layers: `(norm(context * scale) + table[token]) * by`.
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
        Fusion::On => &[product, attend, store, lone_norm_add, layer_inputs],
        Fusion::Off => &[],
    };
    let mut ops = Vec::new();
    let mut at = 0;
    while at < plan.steps.len() {
        let rest = Rest {
            plan,
            steps: &plan.steps[at..],
            readers: &readers,
        };
        let (work, taken) = rules
            .iter()
            .find_map(|rule| rule(&rest))
            .unwrap_or_else(|| (Work::Step(plan.steps[at].step.clone()), 1));
        let steps = at..at + taken;
        let within = &plan.steps[steps.clone()];
        let last = &within[taken - 1];
        let naming: Vec<&Labelled> = match work {
            Work::Product(_) => linears_of(within).collect(),
            Work::NormAdd(_) => vec![&within[0]],
            _ => vec![last],
        };
        ops.push(Op {
            label: joined_label(naming.iter().copied()),
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

/// One label for steps of one section: `L3.attn.q+k+v` of `L3.attn.q`, `L3.attn.k` and `L3.attn.v`.
pub(crate) fn joined_label<'a>(steps: impl Iterator<Item = &'a Labelled>) -> String {
    let mut joined = String::new();
    for Labelled { label, .. } in steps {
        if joined.is_empty() {
            joined.push_str(label);
        } else {
            joined.push('+');
            joined.push_str(label.rsplit('.').next().unwrap_or(label));
        }
    }
    joined
}

/// What is left of a plan, and who reads what.
struct Rest<'a> {
    plan: &'a Plan,
    steps: &'a [Labelled],
    readers: &'a Readers,
}

impl Rest<'_> {
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
    fn linears(&self, i: usize) -> Option<(Value, Vec<Part>)> {
        let mut input = None;
        let mut parts = Vec::new();
        while let Some(&Step::Linear { x, w, out }) = self.step(i + parts.len())
            && *input.get_or_insert(x) == x
            && parts.len() < MOST_PARTS
        {
            parts.push(Part { w, out });
        }
        input.map(|x| (x, parts))
    }

    /// Post-norm, add, scale and next norm from the first step on, and how many steps they are.
    fn norm_add(&self) -> Option<(NormAdd, usize)> {
        let (norm, normed) = self.whole_row_norm(0)?;
        let &Step::Add { a, b, out } = self.step(1)? else {
            return None;
        };
        let a = match (a == normed, b == normed) {
            (true, false) => b,
            (false, true) => a,
            _ => return None,
        };
        if self.readers.count(normed) != 1 {
            return None;
        }
        let (mut sum, mut by, mut taken) = (out, 1.0, 2);
        if let Some(&Step::Scale { x, by: factor, out }) = self.step(taken)
            && x == sum
            && self.readers.count(sum) == 1
        {
            (sum, by, taken) = (out, factor, taken + 1);
        }
        let next = self.whole_row_norm(taken).filter(|(n, _)| n.x == sum);
        taken += usize::from(next.is_some());
        let next = next.map(|(norm, out)| Next {
            weight: norm.weight,
            eps: norm.eps,
            out,
        });
        let found = NormAdd {
            norm,
            a,
            by,
            sum,
            next,
        };
        Some((found, taken))
    }

    /// A norm of heads and the turn that follows it at step `i`, with what comes out.
    fn norm_rope(&self, i: usize) -> Option<(RowNorm, RopeId, Value)> {
        let &Step::Rope { x, rope, out } = self.step(i + 1)? else {
            return None;
        };
        let head_dim = self.plan.rope(rope).head_dim;
        let (norm, normed) = self.norm(i, |_| head_dim)?;
        (normed == x && self.readers.count(normed) == 1).then_some((norm, rope, out))
    }

    /// Four steps.
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
type Rule = fn(&Rest<'_>) -> Option<(Work, usize)>;

/// Matrices that read one value, with the norm before them and the activation after them.
fn product(rest: &Rest<'_>) -> Option<(Work, usize)> {
    let before = || -> Option<(Input, Value, usize)> {
        if let Some((norm_add, taken)) = rest.norm_add() {
            let x = norm_add.next.map_or(norm_add.sum, |next| next.out);
            return Some((Input::NormAdd(norm_add), x, taken));
        }
        let (norm, out) = rest.whole_row_norm(0)?;
        Some((Input::Norm(norm), out, 1))
    };
    let (input, parts, mut taken) = if let Some((input, x, taken)) = before() {
        let (read, parts) = rest.linears(taken)?;
        // A sum is written in any case; a norm only for this product.
        let own = matches!(input, Input::NormAdd(NormAdd { next: None, .. }))
            || rest.readers.count(x) == parts.len() as u32;
        if read != x || !own {
            return None;
        }
        (input, parts, taken)
    } else {
        let (x, parts) = rest.linears(0)?;
        (Input::Value(x), parts, 0)
    };
    taken += parts.len();
    let only_here = |part: &Part| rest.readers.count(part.out) == 1;
    let then = match (rest.step(taken), parts.as_slice()) {
        (
            Some(&Step::GeluMul {
                gate,
                up,
                up_column: 0,
                out,
            }),
            [first, second],
        ) if gate == first.out && up == second.out && parts.iter().all(only_here) => {
            Then::GeluPair { out }
        }
        (
            Some(&Step::GeluMul {
                gate,
                up,
                up_column,
                out,
            }),
            [part],
        ) if gate == part.out && up != part.out && only_here(part) => Then::GeluSlice {
            other: up,
            column: up_column,
            out,
        },
        _ => Then::Nothing,
    };
    taken += usize::from(then != Then::Nothing);
    let product = Product { input, parts, then };
    Some((Work::Product(product), taken))
}

fn attend(rest: &Rest<'_>) -> Option<(Work, usize)> {
    let store = rest.store();
    let first = if store.is_some() { 4 } else { 0 };
    let (q, rope, turned) = rest.norm_rope(first)?;
    let &Step::Attend { q: read, slot, out } = rest.step(first + 2)? else {
        return None;
    };
    let fits = read == turned
        && rest.readers.count(turned) == 1
        && store.is_none_or(|s| {
            (s.slot, s.rope, rest.plan.rows(s.k.x)) == (slot, rope, rest.plan.rows(out))
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

fn store(rest: &Rest<'_>) -> Option<(Work, usize)> {
    rest.store().map(|store| (Work::StoreKv(store), 4))
}

/// Post-norm, residual add, layer scale, next norm: one read and one write of the stream instead of up to four.
fn lone_norm_add(rest: &Rest<'_>) -> Option<(Work, usize)> {
    let (norm_add, taken) = rest.norm_add()?;
    Some((Work::NormAdd(norm_add), taken))
}

fn layer_inputs(rest: &Rest<'_>) -> Option<(Work, usize)> {
    let steps = [0, 1, 2, 3, 4].map(|i| rest.step(i));
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
    let chained = (read, a, b, read_sum) == (scaled, normed, embedded, sum);
    let within = [scaled, normed, embedded, sum];
    let alone = within.iter().all(|v| rest.readers.count(*v) == 1);
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
    (chained && alone && group <= MOST_GROUP).then_some((Work::LayerInputs(inputs), 5))
}

/// How many steps read each value; what a plan hands over has a reader outside.
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
