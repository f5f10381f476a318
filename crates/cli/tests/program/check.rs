//! `carat check` and `carat doctor`: verdicts about a model, and about this machine.

use std::fs;

use carat_testkit::fixtures;

use crate::start::{self, PROGRAM, asset, carat, end_of, file, json, text};

#[test]
fn the_demo_passes_every_check() {
    let output = carat(&["check", "--backend", "cpu"]);
    assert_eq!(output.code, Some(0), "{}{}", output.stdout, output.stderr);
    for line in [
        "pass  tokenizer",
        "pass  template",
        "pass  cpu against the reference",
        "pass  perplexity on cpu",
        "all checks passed",
    ] {
        assert!(output.stdout.contains(line), "{line}: {}", output.stdout);
    }
}

/// A fixture per kind of layer: shared keys and values, per-layer inputs, experts.
#[test]
fn every_kind_of_model_agrees_with_the_reference() {
    let folder = tempfile::tempdir().unwrap();
    for fixture in [0, 2, 3, 4] {
        let fixture = &fixtures::ALL[fixture];
        let model = file(&folder, "model.gguf", fixture.file());
        let output = carat(&["check", "--backend", "cpu", text(&model)]);
        assert!(
            output.stdout.contains("pass  cpu against the reference"),
            "{}: {}{}",
            fixture.name,
            output.stdout,
            output.stderr
        );
    }
}

#[test]
fn damaged_weights_fail() {
    let folder = tempfile::tempdir().unwrap();
    let mut bytes = fs::read(asset("pip-q8_0.gguf")).unwrap();
    let end = bytes.len();
    // The weights stand behind everything else.
    for (i, byte) in bytes[end / 4..].iter_mut().enumerate() {
        *byte = (i as u8).wrapping_mul(37) & 0x3f;
    }
    let damaged = file(&folder, "damaged.gguf", bytes);
    let output = carat(&["check", "--backend", "cpu", text(&damaged)]);
    assert_eq!(output.code, Some(1), "{}{}", output.stdout, output.stderr);
    assert!(output.stdout.contains("FAIL"), "{}", output.stdout);
    assert!(output.stdout.contains("failed: "), "{}", output.stdout);
}

#[test]
fn the_reference_is_not_checked_against_itself() {
    let output = carat(&["check", "--backend", "reference"]);
    assert_eq!(output.code, Some(1));
    assert!(
        output.stderr.contains("give another --backend"),
        "{}",
        output.stderr
    );
}

#[test]
fn doctor_tells_of_the_machine_and_of_each_model() {
    let model = fixtures::ALL[1].path(".gguf");
    let report = json(&carat(&["doctor", "--json", "-m", text(&model)]));
    assert!(report["processor"]["threads"].as_u64().unwrap() > 0);
    let free = report["memory"]["free_bytes"].as_u64().unwrap();
    assert!(free <= report["memory"]["total_bytes"].as_u64().unwrap());
    let models = report["models"].as_array().unwrap();
    assert_eq!(models[0]["name"], "demo");
    assert_eq!(models[1]["name"], text(&model));
    for model in &models[..2] {
        assert!(model["context"].as_u64().unwrap() > 0, "{model}");
        assert!(model["problem"].is_null(), "{model}");
        if !report["memory"]["read_bytes_per_second"].is_null() {
            assert!(model["tokens_per_second_bound"].as_f64().unwrap() > 0.0);
        }
    }
    let page = carat(&["doctor", "-m", "no/such.gguf"]).stdout;
    assert!(page.contains("\nmodels\n  demo ("), "{page}");
    assert!(page.contains("no/such.gguf"), "{page}");
}

/// Measuring takes 512 MiB; what runs must not end where there is less.
#[test]
fn a_small_machine_is_told_that_rates_are_not_measured() {
    for arguments in ["bench -p 0 -n 2 -r 1 --backend cpu -t 1", "doctor -t 1"] {
        let script = format!("ulimit -v 400000; exec \"$0\" {arguments}");
        let output = end_of(start::command("sh").args(["-c", &script, PROGRAM]));
        let told = output.stderr;
        assert_eq!(output.code, Some(0), "{arguments}: {told}");
        assert!(
            told.contains("512.00 MiB") && told.contains("are free"),
            "{arguments}: {told}"
        );
    }
}
