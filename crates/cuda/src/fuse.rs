//! Runs of steps that one kernel does together.
//!
//! Rules look at the head of what is left of the plan, in order; the first that matches takes its steps. A rule is a pattern
//! and nothing else: it may take a step's output away only if nobody else reads it. Every fused op has a twin in single
//! steps, which is what [`Fusion::Off`] gives, and the two are compared in tests.

use std::ops::Range;

use carat_model::{
    plan::{KvSlot, Labelled, Plan, RopeId, Step, Value},
    weights::Weight,
};

use crate::{config::Fusion, kernel::MOST_HEAD_DIM};

/// One or more consecutive steps of a plan, done as one.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Op {
    /// Of the last step: the value it writes is the one that is kept for sure.
    pub(crate) label: String,
    pub(crate) steps: Range<usize>,
    pub(crate) work: Work,
}

#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Work {
    Step(Step),
    /// A branch's post-norm, the residual add, perhaps the layer's scale, perhaps the next branch's norm.
    NormAdd {
        norm: RowNorm,
        a: Value,
        by: f32,
        sum: Value,
        next: Option<(RowNorm, Value)>,
    },
    NormRope {
        norm: RowNorm,
        rope: RopeId,
        out: Value,
    },
    NormRopeStore {
        k: RowNorm,
        rope: RopeId,
        v: RowNorm,
        slot: KvSlot,
    },
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
        Fusion::On => &[norm_rope_store, norm_rope, norm_add],
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
        ops.push(Op {
            label: plan.steps[at + taken - 1].label.clone(),
            steps: at..at + taken,
            work,
        });
        at += taken;
    }
    ops
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
}

/// A fused op and how many steps it takes, if it matches.
type Rule = fn(&Rest<'_>) -> Option<(Work, usize)>;

/// Keys and values go into their page without being written anywhere else.
fn norm_rope_store(rest: &Rest<'_>) -> Option<(Work, usize)> {
    let (Work::NormRope { norm, rope, out }, 2) = norm_rope(rest)? else {
        return None;
    };
    let head_dim = rest.plan.rope(rope).head_dim;
    let (v_norm, v_out) = rest.norm(2, |_| head_dim)?;
    let &Step::StoreKv { k, v, slot } = rest.step(3)? else {
        return None;
    };
    let fits = k == out && v == v_out && rest.plan.slot(slot).head_dim == head_dim;
    let alone = rest.readers.only_one(out) && rest.readers.only_one(v_out);
    (fits && alone).then_some((
        Work::NormRopeStore {
            k: norm,
            rope,
            v: v_norm,
            slot,
        },
        4,
    ))
}

/// Queries are normed and turned in one pass.
fn norm_rope(rest: &Rest<'_>) -> Option<(Work, usize)> {
    let &Step::Rope { x, rope, out } = rest.step(1)? else {
        return None;
    };
    let head_dim = rest.plan.rope(rope).head_dim;
    let (norm, normed) = rest.norm(0, |_| head_dim)?;
    let fits = normed == x && head_dim <= MOST_HEAD_DIM && rest.readers.only_one(normed);
    fits.then_some((Work::NormRope { norm, rope, out }, 2))
}

/// Post-norm, residual add, layer scale, next norm: one read and one write of the stream instead of up to four.
fn norm_add(rest: &Rest<'_>) -> Option<(Work, usize)> {
    let (norm, normed) = rest.whole_row_norm(0)?;
    let &Step::Add { a, b, out } = rest.step(1)? else {
        return None;
    };
    let a = match (a == normed, b == normed) {
        (true, false) => b,
        (false, true) => a,
        _ => return None,
    };
    if !rest.readers.only_one(normed) {
        return None;
    }
    let (mut sum, mut by, mut taken) = (out, 1.0, 2);
    if let Some(&Step::Scale { x, by: factor, out }) = rest.step(taken)
        && x == sum
        && rest.readers.only_one(sum)
    {
        (sum, by, taken) = (out, factor, taken + 1);
    }
    let next = rest.whole_row_norm(taken).filter(|(n, _)| n.x == sum);
    taken += usize::from(next.is_some());
    let work = Work::NormAdd {
        norm,
        a,
        by,
        sum,
        next,
    };
    Some((work, taken))
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

    fn only_one(&self, value: Value) -> bool {
        self.0[value.index()] == 1
    }
}
