//! Times of single kernels on a card: `cargo bench -p carat-cuda --bench kernels [-- NAME ...]`.
//!
//! A name selects every table whose name holds it. Kernels are no public interface, so this program is a second root over
//! the crate's files; it shares operands with the kernels' tests. Without a card it says so, and fails if `GPU_REQUIRED=1`.
#![allow(
    dead_code,
    unused_imports,
    unfulfilled_lint_expectations,
    unreachable_pub,
    reason = "a second root over the crate's files, without its tests and its callers"
)]
#![expect(
    clippy::print_stdout,
    clippy::print_stderr,
    reason = "printing figures is its purpose"
)]

#[path = "../../src/backend.rs"]
mod backend;
#[path = "../../src/bus.rs"]
mod bus;
#[path = "../../src/choices.rs"]
mod choices;
#[path = "../../src/compile/mod.rs"]
mod compile;
#[path = "../../src/config.rs"]
mod config;
#[path = "../../src/device/mod.rs"]
mod device;
#[path = "../../src/error.rs"]
mod error;
#[path = "../../src/jit/mod.rs"]
mod jit;
#[path = "../../src/kernel/mod.rs"]
mod kernel;
#[path = "../../src/placement.rs"]
mod placement;
#[path = "../../src/planned.rs"]
mod planned;
#[path = "../../src/run/mod.rs"]
mod run;
#[path = "../../src/testing.rs"]
mod testing;
#[path = "../../src/tuned_models.rs"]
mod tuned_models;

mod cublaslt;
mod elementwise;
mod flash_decode;
mod flash_prefill;
mod fused_norm;
mod gemm;
mod gemm_medium;
mod gemm_packed;
mod gemv;
mod load;
mod permute;
mod qkv_norm_rope;
mod sample;

use std::process::ExitCode;

const TABLES: [(&str, fn()); 24] = [
    ("gemv.shapes", gemv::shapes),
    ("gemv.blocks", gemv::blocks),
    ("gemv.experts", gemv::experts),
    ("gemm.e4b_q8", gemm::e4b_q8),
    ("gemm.12b_q4", gemm::dense_12b_q4),
    ("gemm.others", gemm::others),
    ("gemm.grouped", gemm::grouped),
    ("gemm_medium.e4b", gemm_medium::e4b),
    ("gemm_medium.12b", gemm_medium::dense_12b),
    ("gemm_medium.others", gemm_medium::others),
    ("gemm_packed.grouped", gemm_packed::grouped),
    ("gemm_packed.dense", gemm_packed::dense),
    ("cublaslt", cublaslt::all),
    ("flash_decode", flash_decode::all),
    ("flash_prefill", flash_prefill::all),
    ("qkv_norm_rope", qkv_norm_rope::all),
    ("fused_norm", fused_norm::all),
    ("permute", permute::all),
    ("geglu", elementwise::geglu),
    ("convert", elementwise::convert),
    ("sample", sample::all),
    ("dequantize", load::dequantize),
    ("pack", load::pack),
    ("upload", load::upload),
];

fn main() -> ExitCode {
    // Cargo adds `--bench`.
    let names: Vec<String> = std::env::args().skip(1).collect();
    let names: Vec<&str> = names
        .iter()
        .map(String::as_str)
        .filter(|n| *n != "--bench")
        .collect();
    let is_asked = |table: &str| names.is_empty() || names.iter().any(|n| table.contains(n));
    let asked: Vec<(&str, fn())> = TABLES
        .into_iter()
        .filter(|(name, _)| is_asked(name))
        .collect();
    if asked.is_empty() {
        let all = TABLES.map(|(name, _)| name).join(", ");
        eprintln!("no table is named {}; there are {all}", names.join(" or "));
        return ExitCode::FAILURE;
    }
    if let Err(problem) = device::Device::open(0, None) {
        eprintln!("no CUDA, so there is nothing to time: {problem}");
        return if testing::is_card_required() {
            ExitCode::FAILURE
        } else {
            ExitCode::SUCCESS
        };
    }
    for (name, table) in asked {
        println!("== {name}");
        table();
    }
    ExitCode::SUCCESS
}
