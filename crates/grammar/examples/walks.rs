//! Random schemas and random walks through their masks, as many as wanted: `walks [COUNT] [--gemma]`.
//!
//! The same walks as the test `random`, which takes a tenth of them. With `--gemma` they go through the published vocabulary
//! instead of the demo model's.

#[path = "../tests/support/mod.rs"]
mod support;

use std::time::Instant;

use support::walks::{Kind, run};

#[expect(clippy::print_stdout, reason = "a program for people")]
fn main() {
    let arguments: Vec<_> = std::env::args().skip(1).collect();
    let count = arguments.iter().find_map(|argument| argument.parse().ok());
    let model = if arguments.iter().any(|argument| argument == "--gemma") {
        &support::GEMMA
    } else {
        &support::DEMO
    };
    for (name, kind) in [("json", Kind::Json), ("calls", Kind::Calls)] {
        let start = Instant::now();
        let report = run(model, kind, 0..count.unwrap_or(10_000));
        println!("{name}: {report:?} in {:.1?}", start.elapsed());
        report.check();
    }
}
