//! `-n` is a most, and a chat goes on when its context is full.

use std::fs;

use crate::start::{carat, carat_with};

#[test]
fn a_most_beyond_the_context_is_answered() {
    for most in ["4096", "-1"] {
        let output = carat(&[
            "run",
            "--backend",
            "cpu",
            "--temp",
            "0",
            "-n",
            most,
            "What is 1 + 1?",
        ]);
        assert_eq!(output.code, Some(0), "{}", output.stderr);
        assert_eq!(output.stdout, "1 + 1 = 2.\n");
    }
}

/// Twelve turns in a context that holds a few of them.
#[test]
fn a_chat_whose_context_is_full_goes_on() {
    let turns: Vec<String> = (0..12).map(|n| format!("What is {n} + 1?\n")).collect();
    let turns = turns.concat();
    let output = carat_with(
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
    let (answers, notes) = (output.stdout, output.stderr);
    assert_eq!(output.code, Some(0), "{notes}");
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
    let refused = carat(&ask);
    assert_eq!(refused.code, Some(1));
    let told_why = refused.stderr;
    assert!(
        told_why.contains("context of 256") && told_why.contains("up to 2048"),
        "{told_why}"
    );
    let cut = carat(&[&ask[..], &["--overflow", "drop-oldest"]].concat());
    assert_eq!(cut.code, Some(0), "{}", cut.stderr);
    assert!(cut.stderr.contains("oldest turns"), "{}", cut.stderr);
    assert!(cut.stdout.contains("50 + 1 = 51"), "{}", cut.stdout);
}

#[test]
fn advice_is_given_where_it_helps() {
    let long = "word ".repeat(3000);
    let full = carat_with(&long, &["run", "--backend", "cpu", "-"]);
    assert_eq!(full.code, Some(1));
    // The model knows no more.
    assert!(!full.stderr.contains("-c"), "{}", full.stderr);
    assert!(full.stderr.contains("shorten"), "{}", full.stderr);
    let short = carat_with(&long, &["run", "--backend", "cpu", "-c", "512", "-"]);
    assert!(
        short.stderr.contains("-c N, up to 2048"),
        "{}",
        short.stderr
    );
}
