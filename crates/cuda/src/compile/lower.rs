//! Ops to calls: which kernels, on which operands, with which scratch. Pure: the plan, the weights' formats and what kind of
//! card it is are all it looks at.
//!
//! Ops are lowered for a class of batches: [`narrow`] for the few rows of decode, where a product streams its weights once and
//! everything around it happens inside the same kernel; [`wide`] for the many rows of prompts, where products are matrix
//! multiplications over activations in the form those want. [`steps`] has the plain kernel of every step: what
//! [`Fusion::Off`] runs, and what an op falls back to that the fast kernels do not take.

mod experts;
mod narrow;
mod own;
mod steps;
mod wide;

use std::fmt::Write;

use carat_gguf::QuantType;
use carat_model::{
    backend::BackendError,
    phase::{Origin, Phase},
    plan::{Labelled, Plan, Rows},
    weights::{Weight, Weights},
};

use crate::{
    compile::{
        fuse::{self, Op, Part, fuse},
        weights::Packed,
    },
    config::Fusion,
    device::cublaslt::Out,
    kernel::{Kernel, LayerInputs, Place},
};

/// The most rows of a narrow batch: the columns of one tensor-core tile.
pub(crate) const NARROW_ROWS: usize = 8;

/// What kind of batch calls are for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Class {
    /// Up to [`NARROW_ROWS`] rows.
    Narrow,
    Wide,
}

impl Class {
    pub(crate) fn of(rows: usize) -> Class {
        if rows <= NARROW_ROWS {
            Class::Narrow
        } else {
            Class::Wide
        }
    }
}

/// What lowering must know of the card.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Target {
    pub(crate) multiprocessors: usize,
    /// The most shared memory a block may have.
    pub(crate) shared_bytes: usize,
    /// Whether code is made for Hopper alone.
    pub(crate) hopper: bool,
    /// Whether launches may start before those before them are over.
    pub(crate) overlap: bool,
    pub(crate) products: Products,
    /// The most rows of a batch.
    pub(crate) max_rows: usize,
    pub(crate) fusion: Fusion,
}

impl Target {
    /// A Hopper card of full size whose products are our own.
    pub(crate) fn hopper(fusion: Fusion, max_rows: usize) -> Target {
        Target {
            multiprocessors: 132,
            shared_bytes: 227 << 10,
            hopper: true,
            overlap: true,
            products: Products::Own,
            max_rows,
            fusion,
        }
    }
}

/// Who multiplies matrices in wide batches.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Products {
    /// NVIDIA's library, in half precision over expanded weights.
    Library,
    /// Our own kernels: bytes over packed weights, or halves.
    Own,
}

/// One launch, not yet bound to a device.
#[derive(Debug)]
pub(crate) struct Call {
    /// Label of the step or steps it computes, such as `L12.attn.q+k+v`; what it does for them where it is one launch of several.
    pub(crate) label: String,
    pub(crate) origin: Origin,
    pub(crate) rows: Rows,
    pub(crate) launch: Launch,
}

#[derive(Debug)]
pub(crate) enum Launch {
    Kernel(Box<dyn Kernel>),
    Library(LibraryProduct),
}

/// `out = alpha * x . w^T` by NVIDIA's library.
#[derive(Clone, Debug)]
pub(crate) struct LibraryProduct {
    /// Halves.
    pub(crate) x: Place,
    /// Halves, too.
    pub(crate) w: Packed,
    pub(crate) out: Place,
    pub(crate) kind: Out,
    pub(crate) alpha: f32,
    pub(crate) outputs: usize,
    pub(crate) columns: usize,
    /// Columns of a row of `out`.
    pub(crate) stride: usize,
    /// What comes out must still be multiplied by a factor a row: it is no value of the plan yet.
    pub(crate) scaled: bool,
}

impl Call {
    pub(crate) fn kernel(&self) -> Option<&dyn Kernel> {
        match &self.launch {
            Launch::Kernel(kernel) => Some(kernel.as_ref()),
            Launch::Library(_) => None,
        }
    }

    /// What it reads, except weights and KV.
    pub(crate) fn reads(&self) -> Vec<Place> {
        match &self.launch {
            Launch::Kernel(kernel) => kernel.reads(),
            Launch::Library(product) => vec![product.x],
        }
    }

    /// What it writes, except KV.
    pub(crate) fn writes(&self) -> Vec<Place> {
        match &self.launch {
            Launch::Kernel(kernel) => kernel.writes(),
            Launch::Library(product) => vec![product.out],
        }
    }

    pub(crate) fn weights(&self) -> Vec<Packed> {
        match &self.launch {
            Launch::Kernel(kernel) => kernel.weights(),
            Launch::Library(product) => vec![product.w.clone()],
        }
    }
}

/// Buffers that live within an op, or between neighbours, by name.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Scratch {
    buffers: Vec<(&'static str, ScratchBytes)>,
}

/// How large a scratch buffer must be.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct ScratchBytes {
    pub(crate) per_row: usize,
    pub(crate) fixed: usize,
}

impl Scratch {
    fn place(&mut self, name: &'static str, bytes: ScratchBytes) -> Place {
        let known = self.buffers.iter().position(|(n, _)| *n == name);
        let index = known.unwrap_or_else(|| {
            self.buffers.push((name, ScratchBytes::default()));
            self.buffers.len() - 1
        });
        let held = &mut self.buffers[index].1;
        held.per_row = held.per_row.max(bytes.per_row);
        held.fixed = held.fixed.max(bytes.fixed);
        Place::Scratch(index)
    }

    pub(crate) fn sizes(&self) -> impl Iterator<Item = ScratchBytes> {
        self.buffers.iter().map(|(_, bytes)| *bytes)
    }
}

/// Lowers ops for one class. Scratch is shared by all that are lowered with the same.
pub(crate) fn lower(
    plan: &Plan,
    weights: &Weights,
    ops: &[Op],
    class: Class,
    target: Target,
    scratch: &mut Scratch,
) -> Result<Vec<Call>, BackendError> {
    let mut lowering = Lowering {
        plan,
        weights,
        ops,
        target,
        origin: Origin {
            layer: None,
            phase: Phase::Other,
        },
        calls: Vec::new(),
        scratch,
        wide: wide::State::of(plan, ops),
    };
    for op in ops {
        lowering.origin = op.origin;
        match (target.fusion, class) {
            (Fusion::Off, _) => lowering.plainly(op)?,
            (Fusion::On, Class::Narrow) => lowering.narrow(op)?,
            (Fusion::On, Class::Wide) => lowering.wide(op)?,
        }
    }
    Ok(lowering.calls)
}

/// What a plan becomes on CUDA, one line a launch: label, kernel, operands. As on a Hopper card without NVIDIA's library.
pub fn listing(
    plan: &Plan,
    weights: &Weights,
    fusion: Fusion,
    rows: usize,
) -> Result<String, BackendError> {
    list(plan, weights, Target::hopper(fusion, rows))
}

/// As [`listing`], of the most rows a target may have.
fn list(plan: &Plan, weights: &Weights, target: Target) -> Result<String, BackendError> {
    let rows = target.max_rows;
    let ops = fuse(plan, target.fusion);
    let mut scratch = Scratch::default();
    let calls = lower(plan, weights, &ops, Class::of(rows), target, &mut scratch)?;
    let mut out = String::new();
    for call in &calls {
        let list = |places: Vec<Place>| {
            let names: Vec<String> = places.iter().map(Place::to_string).collect();
            names.join(" ")
        };
        let which = match call.rows {
            Rows::All => "all",
            Rows::Sampled => "sampled",
        };
        let name = match &call.launch {
            Launch::Kernel(kernel) => {
                let specialization = kernel.specialization();
                let entry = specialization.entries[kernel.grid(rows).entry];
                let constants = specialization.constants.iter();
                // Formats and kinds; numbers are sizes of tiles and buffers.
                let named = constants.map(|(_, value)| value.as_str());
                let named = named.filter(|value| value.parse::<usize>().is_err());
                [entry]
                    .into_iter()
                    .chain(named)
                    .collect::<Vec<_>>()
                    .join(".")
            }
            Launch::Library(_) => "cublaslt".to_owned(),
        };
        let label = &call.label;
        let (reads, writes) = (list(call.reads()), list(call.writes()));
        let line = format!("{label:<26} {which:<7} {name:<26} {reads} -> {writes}");
        writeln!(out, "{}", line.trim_end()).expect("strings take all writes");
    }
    Ok(out)
}

struct Lowering<'a> {
    plan: &'a Plan,
    weights: &'a Weights,
    ops: &'a [Op],
    target: Target,
    /// Of the calls that follow.
    origin: Origin,
    calls: Vec<Call>,
    scratch: &'a mut Scratch,
    wide: wide::State,
}

impl<'a> Lowering<'a> {
    /// Scratch of so many bytes a row.
    fn scratch(&mut self, name: &'static str, per_row: usize) -> Place {
        let bytes = ScratchBytes { per_row, fixed: 0 };
        self.scratch.place(name, bytes)
    }

    /// Scratch of so many floats a row.
    fn scratch_floats(&mut self, name: &'static str, columns: usize) -> Place {
        self.scratch(name, columns * size_of::<f32>())
    }

    fn call(&mut self, label: &str, rows: Rows, kernel: impl Kernel + 'static) {
        self.calls.push(Call {
            label: label.to_owned(),
            origin: self.origin,
            rows,
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
    fn product_label(&self, op: &Op, parts: &[Part]) -> String {
        let linears = fuse::linears_of(&self.plan.steps[op.steps.clone()]);
        let named = linears.filter(|s| parts.iter().any(|part| s.step.out() == Some(part.out)));
        fuse::joined_label(named)
    }

    fn layer_inputs(&mut self, op: &Op, inputs: &fuse::LayerInputs) {
        let kernel = LayerInputs {
            context: Place::Value(inputs.context),
            context_scale: inputs.context_scale,
            weight: inputs.weight,
            eps: inputs.eps,
            table: inputs.table,
            quant: self.quant(inputs.table),
            table_scale: inputs.table_scale,
            by: inputs.by,
            columns: self.plan.columns(inputs.out),
            group: inputs.group,
            out: Place::Value(inputs.out),
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
