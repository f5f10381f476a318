//! Lowered programs for people: every launch with its kernel, grid and bytes. No card is needed.

use std::collections::HashMap;

use carat_model::{
    backend::{BackendError, Batching, CompileOptions},
    kv::PerGroup,
    phase::Phase,
    plan::Plan,
    weights::Weights,
};

use super::{
    call::{Call, Launch},
    prepare::prepare,
    rows::{RowClass, RowCounts, padded_rows},
    target::Target,
};
use crate::{
    choices::{self, Alternatives, ChoiceInForce, Kernels},
    config::{Fusion, TableMemory, Tier},
    kernel::{Operand, WeightFormat},
};

/// One launch of a program.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ProgramLaunch {
    /// Label of the step or steps it computes.
    pub label: String,
    /// Rows it is launched for: those of its bucket.
    pub rows: usize,
    /// Entry point and the constants it was compiled with; `cublaslt` for that library's products.
    pub kernel: String,
    /// Blocks, threads per block and dynamic shared memory; empty where a library chooses.
    pub grid: String,
    /// Bytes of the matrices and vectors it reads. Rows that are looked up do not count.
    pub weight_bytes: usize,
    /// Values and scratch it reads and writes.
    pub operands: String,
}

/// Launches of a batch with `rows` rows of which `sampled` are sampled, in order: as on an H200 with cuBLASLt, or, for
/// [`Tier::Portable`], as on a card of its size with native GEMM.
pub fn program(
    plan: &Plan,
    weights: &Weights,
    ((tier, fusion), alternatives): ((Tier, Fusion), Alternatives),
    (rows, sampled): (usize, usize),
) -> Result<Vec<ProgramLaunch>, BackendError> {
    let target = Target {
        alternatives,
        ..Target::assumed((tier, fusion), rows.max(sampled))
    };
    let options = CompileOptions {
        pages: PerGroup {
            full: 1,
            sliding: 1,
        },
        chunk_pages: 0,
        host_pages: PerGroup::default(),
        kv: PerGroup::default(),
        max_rows: rows,
        max_sampled: sampled.max(1),
        probe: false,
        batching: Batching::Fast,
    };
    let prepared = prepare(plan, weights, &options, TableMemory::Device, target)?;
    let bytes: HashMap<_, _> = (prepared.weights.named())
        .map(|(operand, placement)| (operand.clone(), placement.bytes()))
        .collect();
    let counts = RowCounts { all: rows, sampled };
    let front = prepared.front.get(RowClass::of(rows));
    let tail = prepared.tail.get(RowClass::of(sampled));
    let launches = front.iter().chain(tail);
    let launch = |call: &Call| {
        let rows = match counts.get(call.rows) {
            0 => return None,
            rows if RowClass::of(rows) == RowClass::Small => rows,
            rows => padded_rows(rows),
        };
        if !call.buckets.hold(rows) {
            return None;
        }
        let read = call.weights().into_iter();
        let looked_up = call.origin.phase == Phase::Embed;
        let matrices = read.filter(|w| w.format != WeightFormat::Table && !looked_up);
        Some(ProgramLaunch {
            label: call.label.clone(),
            rows,
            kernel: kernel_name(call, rows),
            grid: call.kernel().map_or(String::new(), |kernel| {
                let grid = kernel.grid(rows);
                let (x, y) = grid.blocks;
                let shared = match grid.shared_bytes {
                    0 => String::new(),
                    bytes => format!(" +{bytes} B"),
                };
                let pdl = if grid.pdl { " pdl" } else { "" };
                format!("{x}x{y} x {}{shared}{pdl}", grid.threads)
            }),
            weight_bytes: matrices.map(|w| bytes[&w]).sum(),
            operands: operands(call),
        })
    };
    Ok(launches.filter_map(launch).collect())
}

/// Choices that make a difference on the card of [`program`], as they are made there.
pub fn program_choices(
    plan: &Plan,
    weights: &Weights,
    (kernels, alternatives): ((Tier, Fusion), Alternatives),
) -> Vec<ChoiceInForce> {
    let target = Target::assumed(kernels, 1);
    let kernels = Kernels {
        fusion: target.fusion,
        pdl: target.pdl,
        gemm: target.gemm,
    };
    let others = (Alternatives::default(), alternatives);
    choices::in_force(plan, weights, kernels, others)
}

/// Entry point with its formats; numbers among the constants are sizes of tiles and buffers, and left out.
pub(super) fn kernel_name(call: &Call, rows: usize) -> String {
    match &call.launch {
        Launch::Kernel(kernel) => {
            let specialization = kernel.specialization();
            let entry = specialization.entries[kernel.grid(rows).entry];
            let constants = specialization.constants.iter();
            let named = constants.map(|(_, value)| value.as_str());
            let named = named.filter(|value| value.parse::<usize>().is_err());
            let parts: Vec<&str> = [entry].into_iter().chain(named).collect();
            parts.join(".")
        }
        Launch::CublasLt(_) => "cublaslt".to_owned(),
    }
}

pub(super) fn operands(call: &Call) -> String {
    let list = |operands: Vec<Operand>| {
        let names: Vec<String> = operands.iter().map(Operand::to_string).collect();
        names.join(" ")
    };
    format!("{} -> {}", list(call.reads()), list(call.writes()))
}
