//! `-n` is a most, and a chat goes on when its context is full.

use std::{
    fs,
    io::Write,
    process::{Command, Output, Stdio},
};

fn carat(stdin: &str, arguments: &[&str]) -> Output {
    let mut child = Command::new(env!("CARGO_BIN_EXE_carat"))
        .args(arguments)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .expect("the program starts");
    child
        .stdin
        .take()
        .expect("piped")
        .write_all(stdin.as_bytes())
        .expect("it reads");
    child.wait_with_output().expect("it ends")
}

fn told(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

#[test]
fn a_most_beyond_the_context_is_answered() {
    for most in ["4096", "-1"] {
        let output = carat(
            "",
            &[
                "run",
                "--backend",
                "cpu",
                "--temp",
                "0",
                "-n",
                most,
                "What is 1 + 1?",
            ],
        );
        assert_eq!(output.status.code(), Some(0), "{}", told(&output));
        assert_eq!(output.stdout, b"1 + 1 = 2.\n");
    }
}

/// Twelve turns in a context that holds a few of them.
#[test]
fn a_chat_whose_context_is_full_goes_on() {
    let turns: Vec<String> = (0..12).map(|n| format!("What is {n} + 1?\n")).collect();
    let turns = turns.concat();
    let output = carat(
        &turns,
        &[
            "chat",
            "--backend",
            "cpu",
            "--temp",
            "0",
            "-c",
            "192",
            "-n",
            "1800",
            "--no-history",
            "--system",
            "You are Pip.",
        ],
    );
    let (answers, notes) = (String::from_utf8_lossy(&output.stdout), told(&output));
    assert_eq!(output.status.code(), Some(0), "{notes}");
    assert!(answers.contains("11 + 1 = 12"), "{answers}\n{notes}");
    assert_eq!(
        answers.lines().filter(|l| l.contains(" = ")).count(),
        12,
        "{answers}"
    );
    assert_eq!(notes.matches("oldest turns").count(), 1, "{notes}");
    // What stays in front is computed once: most turns find it.
    assert!(notes.matches("reused").count() >= 6, "{notes}");
}

#[test]
fn a_long_conversation_is_refused_or_cut_by_choice() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("messages.json");
    let mut messages = Vec::new();
    for n in 0..40 {
        messages.push(serde_json::json!({"role": "user", "content": format!("What is {n} + 1?")}));
        messages.push(
            serde_json::json!({"role": "assistant", "content": format!("{n} + 1 = {}.", n + 1)}),
        );
    }
    messages.push(serde_json::json!({"role": "user", "content": "What is 50 + 1?"}));
    fs::write(&path, serde_json::to_string(&messages).expect("JSON")).expect("written");
    let path = path.to_str().expect("text");
    let ask = [
        "run",
        "--backend",
        "cpu",
        "--temp",
        "0",
        "-c",
        "256",
        "--messages",
        path,
    ];
    let refused = carat("", &ask);
    assert_eq!(refused.status.code(), Some(1));
    let told_why = told(&refused);
    assert!(
        told_why.contains("context of 256") && told_why.contains("up to 2048"),
        "{told_why}"
    );
    let cut = carat("", &[&ask[..], &["--overflow", "drop-oldest"]].concat());
    assert_eq!(cut.status.code(), Some(0), "{}", told(&cut));
    assert!(told(&cut).contains("oldest turns"), "{}", told(&cut));
    assert!(
        String::from_utf8_lossy(&cut.stdout).contains("50 + 1 = 51"),
        "{}",
        String::from_utf8_lossy(&cut.stdout)
    );
}

#[test]
fn advice_is_given_where_it_helps() {
    let long = "word ".repeat(3000);
    let full = carat(&long, &["run", "--backend", "cpu", "-"]);
    assert_eq!(full.status.code(), Some(1));
    // The model knows no more.
    assert!(!told(&full).contains("-c"), "{}", told(&full));
    assert!(told(&full).contains("shorten"), "{}", told(&full));
    let short = carat(&long, &["run", "--backend", "cpu", "-c", "512", "-"]);
    assert!(
        told(&short).contains("-c N, up to 2048"),
        "{}",
        told(&short)
    );
}
