//! Random schemas, random walks through their masks: every answer that comes to its end parses and fits.
//!
//! A thousand of each kind here; `cargo run --release --example walks` takes as many as it is told.

mod support;

use support::walks::{Kind, run};

#[test]
fn json_answers_fit_their_schemas() {
    let report = run(&support::DEMO, Kind::Json, 0..1000);
    report.check();
}

#[test]
fn arguments_of_calls_fit_the_schemas_of_their_tools() {
    let report = run(&support::DEMO, Kind::Calls, 0..1000);
    report.check();
}
