//! The program's words about itself: its version, its completions, its manual.

use std::{fs, process::Command};

use crate::start::{carat, stdout};

#[test]
fn the_version_names_the_commit_and_a_level_that_can_be_asked_for() {
    let line = stdout(&["--version"]);
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
    stdout(&[
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

#[test]
fn a_shell_completes_commands_flags_and_values() {
    let script = stdout(&["completions", "bash"]);
    let complete = |words: &[&str]| {
        let last = words.len() - 1;
        let program = format!(
            "{script}\nCOMP_WORDS=({}); COMP_CWORD={last}; _carat carat '{}' '{}'; echo \"${{COMPREPLY[*]}}\"",
            words.join(" "),
            words[last],
            words[last - 1],
        );
        let output = Command::new("bash")
            .args(["-c", &program])
            .output()
            .expect("bash");
        String::from_utf8(output.stdout)
            .expect("text")
            .trim()
            .to_owned()
    };
    assert_eq!(complete(&["carat", "inspe"]), "inspect");
    assert_eq!(complete(&["carat", "run", "--hide-th"]), "--hide-thinking");
    assert_eq!(
        complete(&["carat", "run", "--isa", "avx5"]),
        "avx512",
        "a value"
    );
    for shell in ["zsh", "fish", "elvish", "powershell"] {
        assert!(
            stdout(&["completions", shell]).contains("hide-thinking"),
            "{shell}"
        );
    }
    assert_eq!(carat(&["completions", "soup"]).code, Some(2));
}

#[test]
fn every_command_has_a_manual_page() {
    let page = stdout(&["man"]);
    assert!(page.contains(".TH carat 1"), "{page}");
    assert!(page.contains("carat\\-run(1)"), "{page}");
    assert!(stdout(&["man", "eval", "logits"]).contains("little\\-endian"));
    // It is made once for all machines.
    assert!(!page.contains("commit"), "{page}");

    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path().join("man1");
    stdout(&["man", "--out", folder.to_str().unwrap()]);
    assert_eq!(
        fs::read_to_string(folder.join("carat-eval-logits.1")).unwrap(),
        stdout(&["man", "eval", "logits"])
    );
    let help = stdout(&["--help"]);
    let (_, commands) = help.split_once("Commands:").expect("a list of commands");
    let (commands, _) = commands.split_once("\n\n").unwrap_or((commands, ""));
    let names = commands.lines().filter_map(|line| {
        let name = line.strip_prefix("  ")?;
        name.split(' ').next().filter(|name| !name.is_empty())
    });
    for name in names.filter(|name| *name != "help") {
        let page = folder.join(format!("carat-{name}.1"));
        assert!(page.is_file(), "{name} has no page");
    }
}
