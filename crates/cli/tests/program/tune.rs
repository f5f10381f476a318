//! `carat tune`: what it says without a card, and what it measures, keeps and forgets on an emulated one.

use std::{fs, path::Path};

use carat_testkit::fixtures;

use crate::{
    cuda_errors::{ADA, emulator},
    start::{Output, carat, end_of, json, program, text},
};

#[test]
fn without_a_card_there_is_nothing_to_tune() {
    // No machine has so many.
    let output = carat(&["tune", "--device", "99"]);
    assert_eq!(output.code, Some(1), "{}", output.stderr);
    let complaint = output.stderr.trim_end();
    let expected = "carat: there is nothing to tune without an NVIDIA card that computes: ";
    assert!(complaint.starts_with(expected), "{complaint}");
    assert_eq!(output.stdout, "");
}

#[test]
fn what_cannot_be_meant_exits_with_2() {
    for (arguments, expected) in [
        (&["--backend", "cpu"][..], "leave --backend out"),
        (&["--only", "tiles"], "prepared-from"),
        (&["--reset", "--dry-run"], "--dry-run"),
        (&["--rounds", "1"], "3..=100"),
    ] {
        let output = carat(&[&["tune"], arguments].concat());
        assert_eq!(output.code, Some(2), "{arguments:?}: {}", output.stderr);
        assert!(output.stderr.contains(expected), "{}", output.stderr);
    }
}

/// Runs `carat` with an emulated card and a home.
fn on_a_card(home: &Path, arguments: &[&str]) -> Output {
    let mut command = program(arguments);
    command.env("LD_LIBRARY_PATH", emulator()).env("HOME", home);
    end_of(command.envs([ADA]))
}

/// One choice, in as few rounds and tokens as there may be.
const QUICKLY: [&str; 6] = ["--only", "prepared-from", "-r", "3", "-n", "1"];

#[test]
#[ignore = "needs the CUDA emulator"]
fn what_was_measured_is_kept_shown_and_forgotten() {
    let home = tempfile::tempdir().unwrap();
    let model = fixtures::ALL[1].path(".gguf");
    let model = text(&model);
    let kept = home.path().join(".cache/carat/kernels/choices.json");
    let tune = |flags: &[&str]| {
        let output = on_a_card(
            home.path(),
            &[&["tune", model], &QUICKLY[..], flags].concat(),
        );
        assert_eq!(output.code, Some(0), "{}", output.stderr);
        output
    };
    let show = || {
        let output = on_a_card(home.path(), &["tune", model, "--show"]);
        assert_eq!(output.code, Some(0), "{}", output.stderr);
        output
    };
    assert!(show().stdout.contains("not tuned; `carat tune` measures"));
    let report = json(&tune(&["--dry-run", "--json"]));
    assert!(report["kept_in"].is_null(), "{report}");
    let [section] = report["choices"].as_array().unwrap().as_slice() else {
        panic!("{report}");
    };
    let candidates = section["candidates"].as_array().unwrap();
    let values: Vec<&str> = (candidates.iter())
        .map(|c| c["value"].as_str().unwrap())
        .collect();
    assert_eq!(values, ["3", "2", "5"], "the model's of the card first");
    for candidate in candidates {
        let speeds = candidate["tokens_per_second"].as_array().unwrap();
        assert_eq!(speeds.len(), 3, "{report}");
    }
    assert!(!kept.exists(), "nothing is kept by a dry run");
    // Kept, whatever an emulator's clock may say.
    let page = tune(&[]).stdout;
    assert!(
        page.contains("| 3 |") && page.contains("choices.json"),
        "{page}"
    );
    let told = show().stdout;
    assert!(told.contains(": tuned, "), "{told}");
    let file = fs::read_to_string(&kept).unwrap();
    assert!(file.contains("capability 8.9"), "{file}");
    // Such as a person or another program may leave behind.
    fs::write(&kept, "{").unwrap();
    let warned = show();
    assert!(warned.stdout.contains("not tuned"), "{}", warned.stdout);
    let path = kept.display().to_string();
    for part in [path.as_str(), "`carat tune` writes a new file"] {
        assert!(warned.stderr.contains(part), "{}", warned.stderr);
    }
    tune(&["--reset"]);
    let after = show();
    assert!(after.stdout.contains("not tuned"), "{}", after.stdout);
    assert!(!after.stderr.contains("left aside"), "{}", after.stderr);
}

/// Kept choices are in force for whatever runs the model.
#[test]
#[ignore = "needs the CUDA emulator"]
fn kept_choices_are_in_force_and_change_no_answer() {
    let home = tempfile::tempdir().unwrap();
    let model = fixtures::ALL[1].path(".gguf");
    let model = text(&model);
    let tokens = home.path().join("tokens.json");
    fs::write(&tokens, "[2, 5, 7, 11, 13, 17, 19]").unwrap();
    let logits = |name: &str| {
        let out = home.path().join(name);
        let arguments = [
            "eval",
            "logits",
            "-m",
            model,
            "--tokens",
            text(&tokens),
            "--out",
            text(&out),
            "--chunk",
            "4",
        ];
        let output = on_a_card(
            home.path(),
            &[&arguments[..], &["--backend", "cuda"]].concat(),
        );
        assert_eq!(output.code, Some(0), "{}", output.stderr);
        fs::read(out).unwrap()
    };
    let usual = logits("usual");
    let output = on_a_card(home.path(), &[&["tune", model], &QUICKLY[..]].concat());
    assert_eq!(output.code, Some(0), "{}", output.stderr);
    // Whatever won, another value is in force from here on.
    let kept = home.path().join(".cache/carat/kernels/choices.json");
    let mut file: serde_json::Value =
        serde_json::from_str(&fs::read_to_string(&kept).unwrap()).unwrap();
    let card = file.as_object_mut().unwrap().values_mut().next().unwrap();
    let entry = card.as_object_mut().unwrap().values_mut().next().unwrap();
    entry["prepared-from"] = "5".into();
    fs::write(&kept, file.to_string()).unwrap();
    let told = on_a_card(home.path(), &["tune", model, "--show"]).stdout;
    assert!(told.contains("tuned, prepared-from 5"), "{told}");
    assert!(told.contains("where the model of the card has 3"), "{told}");
    let bench = [
        "bench",
        "-m",
        model,
        "-p",
        "0",
        "-n",
        "1",
        "-r",
        "1",
        "--backend",
        "cuda",
        "-o",
        "json",
    ];
    let report = json(&on_a_card(home.path(), &bench));
    assert_eq!(report["tuning"], "tuned, prepared-from 5");
    assert_eq!(logits("tuned"), usual, "the same bits");
}
