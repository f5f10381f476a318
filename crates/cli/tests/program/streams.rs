//! Standard input and output: what is piped in, `-` for a file, a stdout that is not there.

use std::{fs::File, io::Write, process::Stdio};

use crate::start::{self, Output, PROGRAM, carat, carat_with, end_of, json, program, spawn};

/// Tokens of the prompt that these arguments come to.
fn prompt_tokens(output: &Output) -> u64 {
    json(output)["usage"]["prompt_tokens"]
        .as_u64()
        .expect("a number")
}

#[test]
fn a_prompt_and_what_is_piped_in_are_both_used() {
    let ask = [
        "run",
        "--backend",
        "cpu",
        "--json",
        "-n",
        "1",
        "Summarize this:",
    ];
    let alone = prompt_tokens(&carat(&ask));
    let text = "The fox went home through the snow. ".repeat(4);
    let both = prompt_tokens(&carat_with(&text, &ask));
    assert!(both > alone + 20, "{both} with, {alone} without");
    let file = tempfile::NamedTempFile::new().expect("a file");
    file.as_file().write_all(text.as_bytes()).expect("written");
    let from_file = end_of(program(&ask).stdin(File::open(file.path()).expect("open")));
    assert_eq!(prompt_tokens(&from_file), both);
    // Nothing piped in, or not wanted.
    assert_eq!(prompt_tokens(&carat_with("", &ask)), alone);
    let without = carat_with(&text, &[&ask[..], &["--no-stdin"]].concat());
    assert_eq!(prompt_tokens(&without), alone);
}

#[test]
fn a_silent_stdin_is_mentioned() {
    let ask = ["run", "--backend", "cpu", "-n", "1", "Hi"];
    let mut child = spawn(program(&ask).stdin(Stdio::piped()));
    let stdin = child.stdin.take().expect("piped");
    let mut stderr = child.stderr.take().expect("piped");
    let mut note = [0; 7];
    std::io::Read::read_exact(&mut stderr, &mut note).expect("a note");
    assert_eq!(&note, b"waiting");
    drop(stdin);
    assert_eq!(child.wait().expect("it ends").code(), Some(0));
}

#[test]
fn a_dash_is_stdin_or_stdout_wherever_a_file_is_taken() {
    let ask = ["run", "--backend", "cpu", "--temp", "0"];
    let messages = r#"[{"role": "user", "content": "What is 1 + 1?"}]"#;
    let answer = carat_with(messages, &[&ask[..], &["--messages", "-"]].concat());
    assert_eq!(answer.stdout, "1 + 1 = 2.\n", "{}", answer.stderr);
    let answer = carat_with("What is 1 + 1?", &[&ask[..], &["-f", "-"]].concat());
    assert_eq!(answer.stdout, "1 + 1 = 2.\n", "{}", answer.stderr);
    let schema = carat_with(
        r#"{"const": 7}"#,
        &[&ask[..], &["--schema", "-", "--no-stdin", "Hi"]].concat(),
    );
    assert_eq!(schema.stdout, "7\n", "{}", schema.stderr);
    let logits = ["eval", "logits", "--backend", "cpu", "--tokens", "-"];
    let mut child = spawn(program(&logits).args(["--out", "-"]).stdin(Stdio::piped()));
    let _ = child.stdin.take().expect("piped").write_all(b"[2, 5, 9]");
    let logits = child.wait_with_output().expect("it ends");
    assert_eq!(logits.stdout.len(), 3 * 4096 * 4, "{logits:?}");
    let twice = carat_with(
        messages,
        &[&ask[..], &["--messages", "-", "--tools", "-"]].concat(),
    );
    assert_eq!(twice.code, Some(2));
    assert!(twice.stderr.contains("once"), "{}", twice.stderr);
}

#[test]
fn input_without_end_stops_at_a_limit() {
    let zeros = File::open("/dev/zero").expect("there is one");
    let output = end_of(program(&["run", "--backend", "cpu", "-"]).stdin(zeros));
    assert_eq!(output.code, Some(1));
    assert!(output.stderr.contains("64.00 MiB"), "{}", output.stderr);
}

#[test]
fn a_closed_stdout_is_a_failure() {
    let script = "exec \"$0\" run --backend cpu -n 1 Hi >&-";
    let output = end_of(start::command("sh").args(["-c", script, PROGRAM]));
    assert_eq!(output.code, Some(1), "{}", output.stderr);
    assert!(
        output.stderr.contains("stdout is closed"),
        "{}",
        output.stderr
    );
    // Thrown away is not closed.
    let null = File::options().read(true).write(true).open("/dev/null");
    let status = program(&["run", "-q", "--backend", "cpu", "-n", "1", "Hi"])
        .stdin(Stdio::null())
        .stdout(null.expect("there is one"))
        .status();
    assert_eq!(status.expect("it starts").code(), Some(0));
}
