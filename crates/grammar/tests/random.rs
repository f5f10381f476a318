//! Random schemas, random walks through their masks: every answer that comes to its end parses and fits.
//!
//! A thousand of each kind through the demo model's vocabulary; ten thousand, and those through the published vocabulary, for whoever
//! asks for the ignored ones.

mod support;

use support::walks::{Kind, run};

#[test]
fn json_answers_fit_their_schemas() {
    let report = run(&support::DEMO, Kind::Json, 0..1000);
    report.check(0.8);
}

#[test]
fn arguments_of_calls_fit_the_schemas_of_their_tools() {
    let report = run(&support::DEMO, Kind::Calls, 0..1000);
    report.check(0.8);
}

#[test]
#[ignore = "takes minutes: cargo test --release -p carat-grammar --test random -- --ignored"]
fn ten_thousand_of_each_fit() {
    for kind in [Kind::Json, Kind::Calls] {
        run(&support::DEMO, kind, 0..10_000).check(0.8);
    }
}

#[test]
#[ignore = "takes minutes: cargo test --release -p carat-grammar --test random -- --ignored"]
fn ten_thousand_of_each_fit_in_the_published_vocabulary() {
    for kind in [Kind::Json, Kind::Calls] {
        run(&support::GEMMA, kind, 0..10_000).check(0.8);
    }
}
