//! Random schemas, random walks through their masks: every answer that comes to its end parses and fits.
//!
//! A thousand of each kind through the demo model's vocabulary; ten thousand, and those through the published vocabulary, for whoever
//! asks for the ignored ones.

mod support;

use std::io::{self, Write};

use carat_grammar::BUCKET_MICROS;
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

#[test]
#[ignore = "a measurement: cargo test --release -p carat-grammar --test random -- --ignored --nocapture masks"]
fn masks_in_the_published_vocabulary_take_less_than_a_millisecond() {
    let counts = || support::GEMMA.grammars.meter().mask.counts();
    for kind in [Kind::Json, Kind::Calls] {
        let before = counts();
        run(&support::GEMMA, kind, 0..1000).check(0.8);
        let after = counts();
        let masks = after
            .iter()
            .zip(before)
            .map(|(after, before)| after - before);
        let masks: Vec<u64> = masks.collect();
        let limits = BUCKET_MICROS.iter().map(ToString::to_string);
        let limits = limits.chain(["more".to_owned()]);
        let shown: Vec<_> = limits
            .zip(&masks)
            .map(|(limit, n)| format!("{limit}: {n}"))
            .collect();
        let _ = writeln!(
            io::stdout(),
            "{kind:?}, masks by microseconds: {}",
            shown.join(", ")
        );
        let slow: u64 = BUCKET_MICROS
            .iter()
            .map(|limit| *limit > 1000)
            .chain([true])
            .zip(&masks)
            .filter_map(|(is_slow, masks)| is_slow.then_some(masks))
            .sum();
        let all: u64 = masks.iter().sum();
        assert!(slow * 100 < all, "{slow} of {all} took longer");
    }
}
