//! Ops to calls: which kernels, on which operands, with which scratch. Pure: plan, weight formats and target are all it looks
//! at.
//!
//! Ops are lowered for a class of batches: [`small_batch`] for the few rows of decode, where a product streams its weights once
//! and everything around it is its prologue or epilogue; [`large_batch`] for the many rows of prompts, where products are GEMMs
//! over activations in the format those want. Medium batches are lowered as large ones, but for what [`medium_batch`] has: products
//! that read packed weights, and attention that splits keys. [`plain`] has the plain kernel of every step: what [`Fusion::Off`] runs, and what
//! an op falls back to that the fast kernels do not take.

mod cluster_head;
mod experts;
mod host_networks;
mod large_attention;
mod large_batch;
mod medium_batch;
mod native_gemm;
mod packed_gemm;
mod plain;
mod small_batch;

use std::collections::HashMap;

use carat_gguf::QuantType;
use carat_model::{
    backend::BackendError,
    kv::{KvGroup, KvType},
    phase::{Origin, Phase},
    plan::{KvSlot, Labelled, Plan, Rows, SlotSpec, Value},
    weights::{Weight, Weights},
};

pub(crate) use large_batch::weights_from_layer;

use super::{
    call::{Buckets, Call, Launch},
    fuse::{self, LinearPart, Op},
    host_networks::HostNetworks,
    rows::{MEDIUM_ROWS, RowClass},
    scratch::{Scratch, ScratchBytes},
    target::{MAX_WEIGHTS_FOR_PDL, Target, turning_pairs},
};
use crate::{
    choices::Choices,
    config::Fusion,
    kernel::{Kernel, KeysFromValues, Operand, PleInputs, PreparedRows},
};

/// Lowers ops for one class. Programs lowered with the same scratch share its buffers.
pub(crate) fn lower(
    plan: &Plan,
    weights: &Weights,
    ops: &[Op],
    class: RowClass,
    target: Target,
    (scratch, host): (&mut Scratch, &mut HostNetworks),
) -> Result<Vec<Call>, BackendError> {
    let mut lowering = Lowering {
        plan,
        weights,
        ops,
        target,
        class,
        origin: Origin {
            layer: None,
            phase: Phase::Other,
        },
        buckets: Buckets::ALL,
        calls: Vec::new(),
        scratch,
        host,
        begun: HashMap::new(),
        large: large_batch::State::of(plan, ops, target),
        prepared: HashMap::new(),
        routes: HashMap::new(),
        unsummed: HashMap::new(),
        settled: None,
        turning_pairs: turning_pairs(plan).or(target.borrowed_turning_pairs),
        choices: Choices::new(plan, weights, target.alternatives),
    };
    for op in ops {
        lowering.origin = op.origin;
        match (target.fusion, class) {
            (Fusion::Off, _) => lowering.plainly(op)?,
            (Fusion::On, RowClass::Small) => lowering.small_batch(op)?,
            (Fusion::On, RowClass::Medium | RowClass::Large) => lowering.large_batch(op)?,
        }
    }
    Ok(lowering.calls)
}

/// Window of a layer that sees everything up to the end that is written for a row.
const UNBOUNDED: usize = 1 << 30;

struct Lowering<'a> {
    plan: &'a Plan,
    weights: &'a Weights,
    ops: &'a [Op],
    target: Target,
    class: RowClass,
    /// Origin of the calls that follow.
    origin: Origin,
    /// Buckets that the calls that follow are launched for.
    buckets: Buckets,
    calls: Vec<Call>,
    scratch: &'a mut Scratch,
    /// Networks that the host has a part in.
    host: &'a mut HostNetworks,
    /// Dense ones whose down is still to come, by what it reads.
    begun: HashMap<Value, host_networks::Begun>,
    large: large_batch::State,
    /// Values that are prepared rows of the product that reads them.
    prepared: HashMap<Value, PreparedRows>,
    /// Routes that are in scratch.
    routes: HashMap<Value, Operand>,
    /// Experts' outputs that their reader sums up itself.
    unsummed: HashMap<Value, experts::Unsummed>,
    /// A value that is complete before the launches behind the last one start.
    settled: Option<Value>,
    /// Of full-attention slots.
    turning_pairs: Option<usize>,
    choices: Choices,
}

impl<'a> Lowering<'a> {
    /// Scratch of so many bytes per row.
    fn scratch(&mut self, name: &'static str, per_row: usize) -> Operand {
        let bytes = ScratchBytes { per_row, fixed: 0 };
        self.scratch.operand(name, bytes)
    }

    /// Scratch of so many floats per row.
    fn scratch_floats(&mut self, name: &'static str, columns: usize) -> Operand {
        self.scratch(name, columns * size_of::<f32>())
    }

    fn call(&mut self, label: &str, rows: Rows, kernel: impl Kernel + 'static) {
        self.calls.push(Call {
            label: label.to_owned(),
            origin: self.origin,
            rows,
            buckets: self.buckets,
            launch: Launch::Kernel(Box::new(kernel)),
        });
    }

    /// A call under the label and origin of a step of the plan, in the middle of an op that is counted elsewhere.
    fn call_for_step(&mut self, step: &Labelled, rows: Rows, kernel: impl Kernel + 'static) {
        let origin = std::mem::replace(&mut self.origin, self.plan.origin(step));
        self.call(&step.label, rows, kernel);
        self.origin = origin;
    }

    /// The first step of an op.
    fn first_step(&self, op: &Op) -> &'a Labelled {
        &self.plan.steps[op.steps.start]
    }

    /// The last step of an op.
    fn last_step(&self, op: &Op) -> &'a Labelled {
        &self.plan.steps[op.steps.end - 1]
    }

    /// Label of some of a product's matrices.
    fn product_label(&self, op: &Op, parts: &[LinearPart]) -> String {
        let linears = fuse::linears_of(&self.plan.steps[op.steps.clone()]);
        let named = linears.filter(|s| parts.iter().any(|part| s.step.out() == Some(part.out)));
        Labelled::joined(named)
    }

    /// Has the last launch, of every bucket, hold back the next one until a value, which an earlier launch writes, is complete. False if the last
    /// launch writes it itself, or does not hold back others.
    fn settle(&mut self, value: Value) -> bool {
        // Buckets may differ in their last launch.
        let last_of = |rows| self.calls.iter().rposition(|c| c.buckets.hold(rows));
        let mut last: Vec<Option<usize>> = (1..=MEDIUM_ROWS).map(last_of).collect();
        last.dedup();
        let settled = last.into_iter().all(|at| {
            let Some(at) = at else { return false };
            let call = &mut self.calls[at];
            let writes = call.writes().contains(&Operand::Value(value));
            match &mut call.launch {
                Launch::Kernel(kernel) if !writes => kernel.delay_trigger(),
                _ => false,
            }
        });
        self.settled = settled.then_some(value);
        settled
    }

    /// Whether launches use PDL: where they are short enough to gain from it.
    fn pdl(&self) -> bool {
        self.target.pdl
            && match self.class {
                RowClass::Small => self.choices.small_pdl,
                RowClass::Medium => self.choices.medium_pdl,
                RowClass::Large => false,
            }
    }

    /// The same for a product with so many weights.
    fn product_pdl(&self, weights: usize) -> bool {
        self.pdl() && weights <= MAX_WEIGHTS_FOR_PDL
    }

    fn ple_inputs(&mut self, op: &Op, inputs: &fuse::LayerInputs) {
        let kernel = PleInputs {
            context: Operand::Value(inputs.context),
            context_scale: inputs.context_scale,
            weight: inputs.weight,
            eps: inputs.eps,
            table: inputs.table,
            quant: self.quant(inputs.table),
            table_scale: inputs.table_scale,
            by: inputs.by,
            columns: self.plan.columns(inputs.out),
            group: inputs.group,
            out: Operand::Value(inputs.out),
        };
        self.call(&op.label, op.rows, kernel);
    }

    /// Every step of an op by its plain kernel.
    fn plainly(&mut self, op: &Op) -> Result<(), BackendError> {
        for labelled in &self.plan.steps[op.steps.clone()] {
            self.step(labelled)?;
        }
        Ok(())
    }

    /// Pairs of a slot's keys that turn, where they are made from its values; `None` where it has keys.
    fn turning_pairs(&self, slot: KvSlot) -> Option<usize> {
        match self.plan.slot(slot).group {
            KvGroup::Full => self.turning_pairs,
            KvGroup::Sliding => None,
        }
    }

    /// Whether attention of few rows takes a slot's keys in wide steps: where they are made of values, most time is not the memory's. A Hopper
    /// card has room for that with many heads, whose block has a multiprocessor to itself.
    fn wide_steps(&self, slot: KvSlot, heads: usize) -> bool {
        let spec = self.plan.slot(slot);
        let is_tied = self.turning_pairs(slot).is_some();
        let is_long = spec.head_dim > 256 && heads / spec.kv_heads > 8;
        self.target.hopper && is_long && is_tied
    }

    /// Before attention that reads keys from pages: makes them where a slot has values alone.
    fn make_keys(&mut self, label: &str, rows: Rows, slot: KvSlot) {
        if let Some(turning_pairs) = self.turning_pairs(slot) {
            let kernel = KeysFromValues {
                rows,
                slot,
                kv: self.kv(slot),
                turning_pairs,
                window: self.window(self.plan.slot(slot)),
            };
            self.call(&format!("{label} keys"), rows, kernel);
        }
    }

    /// The type of a slot's keys and values.
    fn kv(&self, slot: KvSlot) -> KvType {
        *self.target.kv.get(self.plan.slot(slot).group)
    }

    /// Window of a slot, for kernels: they see up to a row's position or, within a window, up to the end that is written for the
    /// row. A drafter's rows stand at the position they turn as, behind all that is cached, so they see up to their end in every
    /// layer, from as far back as their window reaches from there.
    fn window(&self, slot: &SlotSpec) -> Option<usize> {
        let shift = self.plan.ropes.iter().map(|rope| rope.shift).max();
        match slot.borrowed {
            None => slot.window,
            Some(_) => Some(
                slot.window
                    .map_or(UNBOUNDED, |window| window + shift.unwrap_or(0)),
            ),
        }
    }

    fn quant(&self, w: Weight) -> QuantType {
        self.weights.matrix(w).quant
    }
}

#[cfg(test)]
#[expect(
    clippy::needless_raw_string_hashes,
    reason = "as expect-test writes them"
)]
mod tests;
