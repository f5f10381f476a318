//! What the program says of itself.

use std::process::{Command, Output};

fn carat(arguments: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_carat"))
        .args(arguments)
        .output()
        .expect("the program starts")
}

fn text(arguments: &[&str]) -> String {
    let output = carat(arguments);
    let told = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(0), "{arguments:?}: {told}");
    String::from_utf8(output.stdout).expect("text")
}

#[test]
fn the_version_names_the_commit_and_a_level_that_can_be_asked_for() {
    let line = text(&["--version"]);
    let rest =
        line.trim_end()
            .strip_prefix(concat!("carat ", env!("CARGO_PKG_VERSION"), " (commit "));
    let facts = rest
        .and_then(|rest| rest.strip_suffix(')'))
        .unwrap_or_else(|| panic!("`{line}` is not a version"));
    let facts: Vec<&str> = facts.split(", ").collect();
    let [commit, architecture, level] = facts[..] else {
        panic!("`{line}` has not three facts")
    };
    let history = Command::new("git")
        .args(["rev-parse", "HEAD"])
        .output()
        .ok()
        .filter(|o| o.status.success());
    match history {
        // Commits made after the build stand in front of it, so only the form is known.
        Some(_) => assert!(
            commit.len() == 12 && commit.chars().all(|c| c.is_ascii_hexdigit()),
            "{commit}"
        ),
        None => assert_eq!(commit, "unknown"),
    }
    assert_eq!(architecture, std::env::consts::ARCH);
    // This machine has it, or it would be refused.
    text(&[
        "run",
        "-q",
        "-n",
        "1",
        "--backend",
        "cpu",
        "--isa",
        level,
        "Hi",
    ]);
}
