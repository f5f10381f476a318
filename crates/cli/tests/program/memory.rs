//! Use of memory. `--kv-type` reaches every command that computes, memory is planned with its bytes, and wrong ones
//! are refused. With `--repack` answers stay the same, and sizes and processors that it cannot be used with are named.

use std::{fs, process::Stdio};

use carat_testkit::{
    close,
    fixtures::{self, Fixture},
};
use serde_json::Value;

use crate::start::{self, Output, PROGRAM, carat, end_of, stdout, text};

fn complaint(arguments: &[&str], code: i32) -> String {
    let output = carat(arguments);
    assert_eq!(output.code, Some(code), "{arguments:?}");
    output.stderr
}

/// The bytes before ` for keys and values` in the notes of a run with the whole context.
fn planned(kv_type: &str) -> String {
    let output = carat(&[
        "run",
        "--backend",
        "cpu",
        "--kv-type",
        kv_type,
        "-n",
        "1",
        "Hi",
    ]);
    let notes = output.stderr;
    let (before, _) = notes
        .split_once(" for keys and values")
        .expect("a note on memory");
    before.rsplit(", ").next().expect("a size").to_owned()
}

fn number(size: &str) -> f64 {
    let (number, unit) = size.split_once(' ').expect("a number and its unit");
    assert_eq!(unit, "MiB", "{size}");
    number.parse().expect("a number")
}

/// The most memory that a process had, asked for as long as it runs.
#[cfg(target_os = "linux")]
fn most_resident_mib(arguments: &[&str]) -> f64 {
    let mut command = std::process::Command::new(PROGRAM);
    command.args(arguments).stdout(Stdio::null());
    let mut running = command.stderr(Stdio::null()).spawn().expect("it starts");
    let status = format!("/proc/{}/status", running.id());
    let mut most = 0.0_f64;
    let ended = loop {
        let text = fs::read_to_string(&status).unwrap_or_default();
        if let Some(line) = text.lines().find_map(|line| line.strip_prefix("VmHWM:")) {
            let kib = line.trim().trim_end_matches(" kB");
            most = most.max(kib.parse::<f64>().expect("a number") / 1024.0);
        }
        if let Some(ended) = running.try_wait().expect("its end") {
            break ended;
        }
    };
    assert!(ended.success(), "{arguments:?}: {ended}");
    assert!(most > 0.0, "nothing was seen of it");
    most
}

/// What the program says it needs is enough, and more than it takes.
#[test]
#[cfg(target_os = "linux")]
fn the_machines_memory_is_used_up_to_a_limit() {
    let run = [
        "run",
        "--backend",
        "cpu",
        "-n",
        "64",
        "Tell me a story.",
        "--ram",
    ];
    let refused = complaint(&[&run[..], &["1MiB"]].concat(), 1);
    assert!(refused.contains("1.00 MiB are allowed"), "{refused}");
    let (_, needed) = refused.split_once(" needs ").expect("what it needs");
    let (needed, _) = needed.split_once(" of memory").expect("a size");
    let limit = number(needed) + 0.01;
    let most = most_resident_mib(&[&run[..], &[&format!("{limit}MiB")]].concat());
    assert!(most <= limit, "{most} of {limit} MiB");

    complaint(&[&run[..], &[&format!("{}MiB", limit - 1.0)]].concat(), 1);
    let benched = complaint(&["bench", "--backend", "cpu", "--ram", "20MiB"], 1);
    assert!(benched.contains("--ram allows 20.00 MiB"), "{benched}");
}

/// A group of 32 takes 34 bytes instead of 64.
#[test]
fn memory_is_planned_with_the_bytes_of_the_type() {
    let [half, codes] = ["f16", "q8_0"].map(|kv_type| number(&planned(kv_type)));
    let ratio = codes / half;
    assert!((ratio - 34.0 / 64.0).abs() < 0.01, "{codes} of {half} MiB");

    let folder = tempfile::tempdir().expect("a folder");
    let model = fixtures::ALL[5].written(folder.path());
    let line = |kv_type: &str| {
        let summary = stdout(&["inspect", "-m", text(&model), "--kv-type", kv_type]);
        let line = summary
            .lines()
            .find(|line| line.contains("a token in full"));
        line.expect("a line on keys and values").to_owned()
    };
    let [half, codes] = ["f16", "q8_0"].map(line);
    assert!(half.contains("(F16)"), "{half}");
    assert!(codes.contains("(Q8_0)"), "{codes}");
    assert_ne!(half.replace("F16", ""), codes.replace("Q8_0", ""));
}

fn logits(fixture: &Fixture, kv_type: &str) -> Vec<f32> {
    let folder = tempfile::tempdir().expect("a folder");
    let out = folder.path().join("logits.f32");
    stdout(&[
        "eval",
        "logits",
        "--backend",
        "cpu",
        "--kv-type",
        kv_type,
        "-m",
        text(&fixture.written(folder.path())),
        "--tokens",
        text(&fixture.path(".json")),
        "--out",
        text(&out),
    ]);
    let bytes = fs::read(out).expect("written");
    let (numbers, _) = bytes.as_chunks();
    numbers.iter().map(|b| f32::from_le_bytes(*b)).collect()
}

#[test]
fn logits_are_others_and_near() {
    let fixture = &fixtures::ALL[2];
    let [half, codes] = ["f16", "q8_0"].map(|kv_type| logits(fixture, kv_type));
    let error = close::relative_l2(&codes, &half);
    // A random model makes much of little: 0.02 to 0.04, by the instructions that the processor has.
    assert!(error > 0.0 && error < 0.08, "{error}");
}

#[test]
fn answers_and_figures_say_what_was_asked_for() {
    let ask = [
        "run",
        "Hello!",
        "--temp",
        "0",
        "-n",
        "12",
        "--backend",
        "cpu",
    ];
    let with = |threads| stdout(&[&ask[..], &["--kv-type", "q8_0", "-t", threads]].concat());
    assert!(!with("1").trim().is_empty());
    assert_eq!(with("1"), with("3"));

    let figures = stdout(&[
        "bench",
        "-p",
        "8",
        "-n",
        "2",
        "-r",
        "1",
        "-o",
        "json",
        "--backend",
        "cpu",
        "--kv-type",
        "q8_0",
    ]);
    for line in figures.lines() {
        let report: Value = serde_json::from_str(line).expect("an object a line");
        assert_eq!(report["kv_type"], "Q8_0", "{line}");
    }
}

#[test]
fn a_wrong_type_is_named_with_those_there_are() {
    let wrong = complaint(&["run", "--kv-type", "q4_0", "Hi"], 2);
    for part in ["q4_0", "--kv-type", "f16", "q8_0"] {
        assert!(wrong.contains(part), "{wrong}");
    }

    let folder = tempfile::tempdir().expect("a folder");
    let settings = folder.path().join("settings.toml");
    fs::write(&settings, "kv_type = 'q8_0'").expect("written");
    let printed = stdout(&["run", "--config", text(&settings), "--print-config", "Hi"]);
    assert!(printed.contains("kv_type = \"q8_0\""), "{printed}");
    fs::write(&settings, "kv_type = 'q4_0'").expect("written");
    let wrong = complaint(&["run", "--config", text(&settings), "Hi"], 1);
    for part in ["line 1", "q4_0", "f16", "q8_0"] {
        assert!(wrong.contains(part), "{wrong}");
    }
}

#[test]
fn weights_that_stay_unpacked_change_no_answer() {
    let question =
        "Tell me a story about a small fox who lost its way home in the snow. ".repeat(4);
    let ask = [
        "run",
        &question,
        "--temp",
        "0",
        "-n",
        "12",
        "--backend",
        "cpu",
    ];
    let plain = stdout(&ask);
    assert!(!plain.trim().is_empty());
    for size in ["300KB", "1GiB"] {
        let kept = carat(&[&ask[..], &["--repack", size]].concat());
        if kept.code == Some(0) {
            assert_eq!(kept.stdout, plain, "with {size}");
        } else {
            // A processor without tiles has nothing to keep.
            let refused = kept.stderr;
            assert!(refused.contains("AMX"), "{refused}");
        }
    }
}

#[test]
fn what_repack_cannot_be_used_with_is_named() {
    let wrong = complaint(&["run", "--repack", "plenty", "Hi"], 2);
    assert!(
        wrong.contains("plenty") && wrong.contains("12GiB"),
        "{wrong}"
    );
    for (size, level) in [("900000GB", "amx"), ("1GiB", "scalar")] {
        let cpu = ["run", "--backend", "cpu", "--isa", level, "Hi"];
        let wrong = complaint(&[&cpu[..], &["--repack", size]].concat(), 1);
        // Without AMX, the level that the first asks for is refused.
        let named = wrong.contains(&format!("--repack {size}")) || wrong.contains("--isa");
        assert!(named, "{wrong}");
    }
}

/// Runs with a limit on address space, in KiB.
fn limited(kilobytes: u64, arguments: &[&str]) -> Output {
    let script = format!("ulimit -v {kilobytes}; exec \"$0\" \"$@\"");
    let mut command = start::command("sh");
    end_of(command.args(["-c", &script, PROGRAM]).args(arguments))
}

/// The room that a limit on address space leaves is all there is: a smaller context is taken, or a sentence says what is missing.
#[test]
fn a_limit_on_address_space_ends_in_a_sentence() {
    let folder = tempfile::tempdir().expect("a folder");
    let tokens = folder.path().join("tokens.json");
    let ids: Vec<u32> = (0..2000).map(|n| n % 4000).collect();
    fs::write(&tokens, serde_json::to_string(&ids).expect("JSON")).expect("written");
    let mib = 1024;
    for (kilobytes, arguments) in [
        (
            400 * mib,
            &[
                "bench",
                "--backend",
                "cpu",
                "-t",
                "1",
                "--sequences",
                "4000",
                "-p",
                "0",
                "-n",
                "16",
                "-r",
                "1",
            ][..],
        ),
        (
            150 * mib,
            &[
                "eval",
                "logits",
                "--backend",
                "cpu",
                "-t",
                "1",
                "--chunk",
                "2000",
                "--out",
                "/dev/null",
                "--tokens",
                text(&tokens),
            ],
        ),
    ] {
        let output = limited(kilobytes, arguments);
        let told = output.stderr;
        assert_eq!(output.code, Some(1), "{arguments:?}: {told}");
        assert!(told.contains("not enough memory"), "{arguments:?}: {told}");
    }
    // With room to spare the same limit is no hindrance.
    let output = limited(
        2048 * mib,
        &[
            "run",
            "-q",
            "--backend",
            "cpu",
            "-t",
            "1",
            "--temp",
            "0",
            "What is 1 + 1?",
        ],
    );
    let told = output.stderr;
    assert_eq!(output.stdout, "1 + 1 = 2.\n", "{told}");
}
