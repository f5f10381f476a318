//! `--repack`: answers stay the same, and sizes and processors that it cannot be used with are named.

use std::process::{Command, Output};

fn carat(arguments: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_carat"))
        .args(arguments)
        .output()
        .expect("the program starts")
}

fn complaint(arguments: &[&str]) -> String {
    let output = carat(arguments);
    assert_eq!(output.status.code(), Some(1), "{arguments:?}");
    String::from_utf8(output.stderr).expect("text")
}

#[test]
fn answers_stay_the_same_where_there_are_tiles() {
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
    let plain = carat(&ask);
    assert!(plain.status.success() && !plain.stdout.is_empty());
    for size in ["300KB", "1GiB"] {
        let kept = carat(&[&ask[..], &["--repack", size]].concat());
        if kept.status.success() {
            assert_eq!(kept.stdout, plain.stdout, "with {size}");
        } else {
            let refused = String::from_utf8_lossy(&kept.stderr);
            assert!(refused.contains("AMX"), "{refused}");
        }
    }
}

#[test]
fn what_it_cannot_be_used_with_is_named() {
    let wrong = complaint(&["run", "--repack", "plenty", "Hi"]);
    assert!(
        wrong.contains("plenty") && wrong.contains("12GiB"),
        "{wrong}"
    );
    let wrong = complaint(&["run", "--backend", "cpu", "--repack", "900000GB", "Hi"]);
    assert!(wrong.contains("--repack 900000GB"), "{wrong}");
    let level = ["--backend", "cpu", "--isa", "scalar"];
    let wrong = complaint(&[&["run", "--repack", "1GiB", "Hi"], &level[..]].concat());
    assert!(
        wrong.contains("--repack 1GiB") && wrong.contains("AMX"),
        "{wrong}"
    );
}
