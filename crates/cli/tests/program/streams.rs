//! Standard input and output: what is piped in, `-` for a file, a stdout that is not there.

use std::{
    fs::File,
    io::Write,
    process::{Command, Output, Stdio},
};

use serde_json::Value;

fn carat(stdin: impl Into<Stdio>, arguments: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_carat"))
        .args(arguments)
        .stdin(stdin)
        .output()
        .expect("the program starts")
}

fn piped(stdin: &str, arguments: &[&str]) -> Output {
    let mut child = Command::new(env!("CARGO_BIN_EXE_carat"))
        .args(arguments)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .expect("the program starts");
    let _ = child
        .stdin
        .take()
        .expect("piped")
        .write_all(stdin.as_bytes());
    child.wait_with_output().expect("it ends")
}

fn told(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

/// Tokens of the prompt that these arguments come to.
fn prompt_tokens(output: &Output) -> u64 {
    assert_eq!(output.status.code(), Some(0), "{}", told(output));
    let report: Value = serde_json::from_slice(&output.stdout).expect("one object");
    report["usage"]["prompt_tokens"].as_u64().expect("a number")
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
    let alone = prompt_tokens(&carat(Stdio::null(), &ask));
    let text = "The fox went home through the snow. ".repeat(4);
    let both = prompt_tokens(&piped(&text, &ask));
    assert!(both > alone + 20, "{both} with, {alone} without");
    let file = tempfile::NamedTempFile::new().expect("a file");
    file.as_file().write_all(text.as_bytes()).expect("written");
    let from_file = carat(File::open(file.path()).expect("open"), &ask);
    assert_eq!(prompt_tokens(&from_file), both);
    // Nothing piped in, or not wanted.
    assert_eq!(prompt_tokens(&piped("", &ask)), alone);
    let without = piped(&text, &[&ask[..], &["--no-stdin"]].concat());
    assert_eq!(prompt_tokens(&without), alone);
}

#[test]
fn a_silent_stdin_is_mentioned() {
    let mut child = Command::new(env!("CARGO_BIN_EXE_carat"))
        .args(["run", "--backend", "cpu", "-n", "1", "Hi"])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .expect("the program starts");
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
    let answer = piped(messages, &[&ask[..], &["--messages", "-"]].concat());
    assert_eq!(answer.stdout, b"1 + 1 = 2.\n", "{}", told(&answer));
    let answer = piped("What is 1 + 1?", &[&ask[..], &["-f", "-"]].concat());
    assert_eq!(answer.stdout, b"1 + 1 = 2.\n", "{}", told(&answer));
    let schema = piped(
        r#"{"const": 7}"#,
        &[&ask[..], &["--schema", "-", "--no-stdin", "Hi"]].concat(),
    );
    assert_eq!(schema.stdout, b"7\n", "{}", told(&schema));
    let logits = piped(
        "[2, 5, 9]",
        &[
            "eval",
            "logits",
            "--backend",
            "cpu",
            "--tokens",
            "-",
            "--out",
            "-",
        ],
    );
    assert_eq!(logits.stdout.len(), 3 * 4096 * 4, "{}", told(&logits));
    let twice = piped(
        messages,
        &[&ask[..], &["--messages", "-", "--tools", "-"]].concat(),
    );
    assert_eq!(twice.status.code(), Some(1));
    assert!(told(&twice).contains("once"), "{}", told(&twice));
}

#[test]
fn input_without_end_stops_at_a_limit() {
    let zeros = File::open("/dev/zero").expect("there is one");
    let output = carat(zeros, &["run", "--backend", "cpu", "-"]);
    assert_eq!(output.status.code(), Some(1));
    assert!(told(&output).contains("64.00 MiB"), "{}", told(&output));
}

#[test]
fn a_closed_stdout_is_a_failure() {
    let output = Command::new("sh")
        .args(["-c", "exec \"$0\" run --backend cpu -n 1 Hi >&-"])
        .arg(env!("CARGO_BIN_EXE_carat"))
        .stdin(Stdio::null())
        .output()
        .expect("a shell");
    assert_eq!(output.status.code(), Some(1), "{}", told(&output));
    assert!(
        told(&output).contains("stdout is closed"),
        "{}",
        told(&output)
    );
    // Thrown away is not closed.
    let null = File::options().read(true).write(true).open("/dev/null");
    let status = Command::new(env!("CARGO_BIN_EXE_carat"))
        .args(["run", "-q", "--backend", "cpu", "-n", "1", "Hi"])
        .stdin(Stdio::null())
        .stdout(null.expect("there is one"))
        .status();
    assert_eq!(status.expect("it starts").code(), Some(0));
}
