//! Starts the program in the surroundings of a person who has set nothing: whoever runs the tests may have settings, models and
//! tokens of their own, and no test may depend on them.

use std::{
    fs,
    io::Write,
    path::{Path, PathBuf},
    process::{self, Child, Command, Stdio},
};

use serde_json::Value;

pub(crate) const PROGRAM: &str = env!("CARGO_BIN_EXE_carat");

/// A home without settings. It stays from run to run, as does what the program itself keeps there, such as compiled kernels.
const HOME: &str = concat!(env!("CARGO_TARGET_TMPDIR"), "/home");

/// Variables that lead the program to other folders, hubs and words than a home does.
const OF_THE_PERSON: [&str; 9] = [
    "XDG_CONFIG_HOME",
    "XDG_CACHE_HOME",
    "HF_HOME",
    "HF_HUB_CACHE",
    "HUGGINGFACE_HUB_CACHE",
    "HF_TOKEN",
    "HF_ENDPOINT",
    "HF_HUB_OFFLINE",
    "NO_COLOR",
];

/// A command that starts the program, or is it.
pub(crate) fn command(name: &str) -> Command {
    let mut command = Command::new(name);
    for variable in OF_THE_PERSON {
        command.env_remove(variable);
    }
    command.env("HOME", HOME);
    command
}

/// The program itself.
pub(crate) fn program(arguments: &[&str]) -> Command {
    let mut command = command(PROGRAM);
    command.args(arguments);
    command
}

/// A program that has ended, and the texts it wrote.
#[derive(Debug)]
pub(crate) struct Output {
    pub(crate) code: Option<i32>,
    pub(crate) stdout: String,
    pub(crate) stderr: String,
}

impl From<process::Output> for Output {
    fn from(output: process::Output) -> Output {
        Output {
            code: output.status.code(),
            stdout: String::from_utf8(output.stdout).expect("text"),
            stderr: String::from_utf8(output.stderr).expect("text"),
        }
    }
}

/// Runs a command to its end.
pub(crate) fn end_of(command: &mut Command) -> Output {
    command.output().expect("the program starts").into()
}

/// Runs `carat` without input.
pub(crate) fn carat(arguments: &[&str]) -> Output {
    end_of(&mut program(arguments))
}

/// Runs `carat`, with its input from `stdin`.
pub(crate) fn carat_with(stdin: impl AsRef<[u8]>, arguments: &[&str]) -> Output {
    let mut child = spawn(program(arguments).stdin(Stdio::piped()));
    // A program that refuses its arguments does not read on.
    let _ = child.stdin.take().expect("piped").write_all(stdin.as_ref());
    child.wait_with_output().expect("the program ends").into()
}

/// Starts a command, with its outputs piped.
pub(crate) fn spawn(command: &mut Command) -> Child {
    command.stdout(Stdio::piped()).stderr(Stdio::piped());
    command.spawn().expect("the program starts")
}

/// Runs `carat` where it must succeed, and returns what it prints.
pub(crate) fn stdout(arguments: &[&str]) -> String {
    let output = carat(arguments);
    assert_eq!(output.code, Some(0), "{arguments:?}: {}", output.stderr);
    output.stdout
}

/// Runs `carat` where it must fail, and returns its one sentence.
pub(crate) fn refusal(arguments: &[&str]) -> String {
    let output = carat(arguments);
    assert_eq!(output.code, Some(1), "{arguments:?}: {}", output.stderr);
    let (_, complaint) = output
        .stderr
        .split_once("carat: ")
        .expect("a sentence of the program's");
    let complaint = complaint.to_owned();
    assert!(!output.stderr.contains("panicked"), "{}", output.stderr);
    complaint
}

pub(crate) fn json(output: &Output) -> Value {
    assert_eq!(output.code, Some(0), "{}", output.stderr);
    serde_json::from_str(&output.stdout).expect("one JSON object")
}

pub(crate) fn asset(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("../../assets")
        .join(name)
}

pub(crate) fn text(path: &Path) -> &str {
    path.to_str().expect("paths here are text")
}

/// A file in a folder that goes away with the test.
pub(crate) fn file(folder: &tempfile::TempDir, name: &str, content: impl AsRef<[u8]>) -> PathBuf {
    let path = folder.path().join(name);
    fs::write(&path, content).expect("temporary files can be written");
    path
}
