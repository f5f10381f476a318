//! A little of every load scenario. Bars of time and memory do not count here, beside other tests on the same cores; errors, statuses
//! and what is left behind do.

#[path = "../examples/load/scenarios/mod.rs"]
mod scenarios;

use scenarios::{NAMES, Options, run};

#[test]
fn every_scenario_holds_in_small() {
    let options = Options {
        scale: Some(0.01),
        seconds: Some(1),
        url: None,
        strict: false,
    };
    let mut missed = String::new();
    // One after the other: they count panics and memory of the whole process.
    for name in NAMES {
        let report = run(name, &options);
        if !report.missed().is_empty() {
            missed.push_str(&report.to_string());
        }
    }
    assert!(missed.is_empty(), "{missed}");
}
