//! Lowered programs as text, one line per launch.

use std::fmt::Write;

use carat_model::{
    backend::BackendError,
    plan::{Plan, Rows},
    weights::Weights,
};

use super::{
    call::Launch, fuse::fuse, lower::lower, rows::RowClass, scratch::Scratch, target::Target,
};
use crate::{config::Fusion, kernel::Operand};

/// The launches of a plan on CUDA, one per line: label, kernel, operands. As on a Hopper card without cuBLASLt.
pub fn listing(
    plan: &Plan,
    weights: &Weights,
    fusion: Fusion,
    rows: usize,
) -> Result<String, BackendError> {
    list(plan, weights, Target::hopper(fusion, rows))
}

/// As [`listing`], of the most rows a target may have.
pub(super) fn list(plan: &Plan, weights: &Weights, target: Target) -> Result<String, BackendError> {
    let rows = target.max_rows;
    let ops = fuse(plan, target.fusion);
    let mut scratch = Scratch::default();
    let calls = lower(
        plan,
        weights,
        &ops,
        RowClass::of(rows),
        target,
        &mut scratch,
    )?;
    let mut out = String::new();
    for call in &calls {
        let list = |operands: Vec<Operand>| {
            let names: Vec<String> = operands.iter().map(Operand::to_string).collect();
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
            Launch::CublasLt(_) => "cublaslt".to_owned(),
        };
        let label = &call.label;
        let (reads, writes) = (list(call.reads()), list(call.writes()));
        let line = format!("{label:<26} {which:<7} {name:<26} {reads} -> {writes}");
        writeln!(out, "{}", line.trim_end()).expect("strings take all writes");
    }
    Ok(out)
}
