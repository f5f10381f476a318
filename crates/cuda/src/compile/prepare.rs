//! A whole plan compiled: fused, lowered for every class of batches, with its weights and memory laid out.

use std::collections::BTreeSet;

use carat_model::{
    backend::{BackendError, Batching, CompileOptions},
    host_steps::HostNetwork,
    layout::Layout,
    plan::{Plan, Rows, Value},
    weights::Weights,
};

use super::{
    call::Call,
    fuse::{Op, fuse},
    host_networks::{HostNetworks, SharedMemory},
    lower::lower,
    memory::{MemoryPlan, Parts},
    rows::{ByClass, MEDIUM_ROWS, RowClass, SMALL_ROWS},
    scratch::Scratch,
    stream::Streams,
    target::Target,
    weights::{HostWeights, WeightLayout},
};
use crate::kernel::{Operand, WeightOperand};

/// A plan, ready to take memory.
pub(crate) struct Prepared {
    /// The steps of all rows, and those of sampled rows alone.
    pub(crate) front: ByClass<Vec<Call>>,
    pub(crate) tail: ByClass<Vec<Call>>,
    pub(crate) weights: WeightLayout,
    pub(crate) streams: Streams,
    pub(crate) parts: Parts,
    pub(crate) memory: MemoryPlan,
    pub(crate) target: Target,
    /// Where groups of rows run one after another: the values that outlive the pass of their group, in memory of their own.
    pub(crate) kept: Vec<Value>,
    /// Networks that the host has a part in, and the memory for that.
    pub(crate) host_networks: Vec<HostNetwork>,
    pub(crate) shared_memory: SharedMemory,
}

impl Prepared {
    pub(crate) fn calls(&self) -> impl Iterator<Item = &Call> {
        let programs = [self.front.all(), self.tail.all()];
        programs.into_iter().flatten().flatten()
    }
}

/// Everything that can be known without a device.
pub(crate) fn prepare(
    plan: &Plan,
    weights: &Weights,
    options: &CompileOptions,
    host: impl Into<HostWeights>,
    target: Target,
) -> Result<Prepared, BackendError> {
    let plan = &plan.with_products_gathered();
    let ops = fuse(plan, target.fusion);
    // Unsampled rows end once, so the ops of sampled rows are the last.
    let cut = ops.iter().position(|op| op.rows == Rows::Sampled);
    let (front, tail) = ops.split_at(cut.unwrap_or(ops.len()));
    let mut scratch = Scratch::default();
    let host = host.into();
    let mut networks = HostNetworks::new(&host);
    let mut by_class = |ops: &[Op], max_rows: usize| -> Result<ByClass<Vec<Call>>, BackendError> {
        // Rows that are the same in any company all go through the small programs.
        let max_rows = match options.batching {
            Batching::Fast => max_rows,
            Batching::Invariant => max_rows.min(SMALL_ROWS),
        };
        let mut lowered = |class, least_rows: usize| match max_rows {
            _ if max_rows < least_rows => Ok(Vec::new()),
            _ => {
                let shared = (&mut scratch, &mut networks);
                lower(plan, weights, ops, class, target, shared)
            }
        };
        Ok(ByClass {
            small: lowered(RowClass::Small, 0)?,
            medium: lowered(RowClass::Medium, SMALL_ROWS + 1)?,
            large: lowered(RowClass::Large, MEDIUM_ROWS + 1)?,
        })
    };
    let (front, tail) = (
        by_class(front, options.max_rows)?,
        by_class(tail, options.max_sampled)?,
    );
    let mut kept = Vec::new();
    let layout = if options.probe {
        kept.extend(plan.steps.iter().filter_map(|s| s.step.out()));
        Layout::separate(plan)
    } else {
        let groups: Vec<_> = ops.iter().map(|op: &Op| op.steps.clone()).collect();
        let stored = stored_values(plan, [&front, &tail]);
        let mut layout = Layout::grouped(plan, &groups, |value| stored[value.index()]);
        if options.batching == Batching::Invariant {
            kept = values_between(plan, &tail.small);
            for value in &kept {
                layout.set_apart(plan, *value);
            }
        }
        layout
    };
    let parts = Parts::new(plan, options, layout, &scratch);
    let named_by = |p: &ByClass<Vec<Call>>| -> BTreeSet<WeightOperand> {
        let calls = p.all().into_iter().flatten();
        calls.flat_map(Call::weights).collect()
    };
    let mut named = &named_by(&front) | &named_by(&tail);
    if target.borrowed_table.is_some() {
        named.retain(|operand| !operand.parts.iter().all(|w| weights.is_borrowed(*w)));
    }
    let shared_memory = SharedMemory::new(weights, &networks.list);
    let weights = WeightLayout::new(weights, &named, &host);
    let streams = Streams::new(&front.large, &tail.large, &weights);
    Ok(Prepared {
        memory: MemoryPlan {
            streaming: streams.buffers.bytes,
            ..MemoryPlan::new(plan, options, &weights, &parts, target.gemm)
        },
        front,
        tail,
        weights,
        streams,
        parts,
        target,
        kept,
        host_networks: networks.list,
        shared_memory,
    })
}

/// Values of all rows that calls of the sampled ones read, and what they leave at the end.
fn values_between(plan: &Plan, tail: &[Call]) -> Vec<Value> {
    let read = tail.iter().flat_map(Call::reads);
    let mut between: Vec<Value> = read
        .filter_map(|operand| match operand {
            Operand::Value(value) if plan.rows(value) == Rows::All => Some(value),
            Operand::Value(_) | Operand::Scratch(_) => None,
        })
        .chain([plan.hidden, plan.logits])
        .collect();
    between.sort_unstable_by_key(|value| value.index());
    between.dedup();
    between
}

/// By a value's number, whether some call reads or writes it.
fn stored_values(plan: &Plan, programs: [&ByClass<Vec<Call>>; 2]) -> Vec<bool> {
    let mut stored = vec![false; plan.value_count()];
    let calls = programs.into_iter().flat_map(ByClass::all).flatten();
    let operands = calls.flat_map(|call| [call.reads(), call.writes()].concat());
    for operand in operands {
        if let Operand::Value(value) = operand {
            stored[value.index()] = true;
        }
    }
    for value in [plan.hidden, plan.logits] {
        stored[value.index()] = true;
    }
    stored
}
