//! Model files that change while they are in use, and paths that lead to something else.

use std::{
    fs,
    io::{BufRead, BufReader, Read, Write},
    net::TcpStream,
    path::{Path, PathBuf},
    process::{Command, Stdio},
    sync::mpsc,
    thread,
    time::Duration,
};

use crate::start::{Output, asset, carat, program, spawn, text};

fn copy_of_the_demo(folder: &Path) -> PathBuf {
    let path = folder.join("model.gguf");
    fs::copy(asset("pip-q8_0.gguf"), &path).expect("copied");
    path
}

/// Starts an answer that takes long, changes the file in its middle, and returns the exit code and what was said.
fn changed_during_an_answer(backend: &str, change: impl FnOnce(&Path)) -> (Option<i32>, String) {
    let folder = tempfile::tempdir().expect("a folder");
    let model = copy_of_the_demo(folder.path());
    let mut child = spawn(
        program(&["run", "--backend", backend, "--ignore-eos", "-n", "1900"])
            .args(["-m", text(&model), "Tell me a story."])
            .stdin(Stdio::null()),
    );
    let mut stdout = child.stdout.take().expect("piped");
    let mut first = [0; 4];
    stdout.read_exact(&mut first).expect("an answer");
    change(&model);
    let rest = thread::spawn(move || {
        let mut rest = Vec::new();
        let _ = stdout.read_to_end(&mut rest);
    });
    let output = child.wait_with_output().expect("it ends");
    rest.join().expect("no panic");
    let output = Output::from(output);
    (output.code, output.stderr)
}

#[test]
fn a_file_that_is_cut_short_ends_in_a_sentence() {
    for backend in ["cpu", "reference"] {
        let (code, told) = changed_during_an_answer(backend, |path| {
            let file = fs::File::options().write(true).open(path).expect("open");
            file.set_len(4096).expect("shortened");
        });
        assert_eq!(code, Some(1), "{told}");
        assert!(told.contains("model.gguf` was changed"), "{told}");
    }
}

#[test]
fn a_file_that_is_overwritten_ends_in_a_sentence() {
    let (code, told) = changed_during_an_answer("cpu", |path| {
        let other = fs::read(path).expect("read");
        fs::write(path, other).expect("written");
    });
    assert_eq!(code, Some(1), "{told}");
    assert!(told.contains("model.gguf` was changed"), "{told}");
}

/// A server answers its clients before it ends, and ends by itself.
#[test]
fn a_server_fails_the_requests_that_need_the_file() {
    let folder = tempfile::tempdir().expect("a folder");
    let model = copy_of_the_demo(folder.path());
    let serve = ["serve", "--port", "0", "--backend", "cpu", "-m"];
    let mut child = spawn(
        program(&serve)
            .arg(text(&model))
            .args(["--draft", "off"])
            .stdin(Stdio::null()),
    );
    let mut stderr = BufReader::new(child.stderr.take().expect("piped"));
    let mut told = String::new();
    while !told.contains("ready after") {
        let length = stderr.read_line(&mut told).expect("text");
        assert!(length > 0, "{told}");
    }
    let (_, address) = told.rsplit_once("http://").expect("its address");
    let address = address.trim().trim_end_matches("/v1").to_owned();
    let ask = || {
        let body =
            r#"{"messages": [{"role": "user", "content": "Tell me a story."}], "max_tokens": 50}"#;
        let mut stream = TcpStream::connect(&address).expect("it listens");
        write!(
            stream,
            "POST /v1/chat/completions HTTP/1.1\r\nHost: {address}\r\nConnection: close\r\n\
             Content-Type: application/json\r\nContent-Length: {}\r\n\r\n{body}",
            body.len()
        )
        .expect("sent");
        let mut answer = String::new();
        stream.read_to_string(&mut answer).expect("an answer");
        answer
    };
    let answer = ask();
    assert!(answer.starts_with("HTTP/1.1 200"), "{answer}");
    let file = fs::File::options().write(true).open(&model).expect("open");
    file.set_len(4096).expect("shortened");
    let answer = ask();
    assert!(answer.starts_with("HTTP/1.1 5"), "{answer}");
    assert!(answer.contains("was changed"), "{answer}");
    let _ = stderr.read_to_string(&mut told);
    let status = child.wait().expect("it ends");
    assert!(
        status.code().is_some_and(|code| code != 0),
        "{status}: {told}"
    );
    assert!(told.contains("model.gguf` was changed"), "{told}");
}

#[test]
fn what_is_no_file_is_named_at_once() {
    let folder = tempfile::tempdir().expect("a folder");
    let pipe = folder.path().join("pipe");
    let made = Command::new("mkfifo").arg(&pipe).status();
    assert!(made.expect("mkfifo is there").success());
    for (path, kind) in [
        (pipe.as_path(), "a pipe"),
        (Path::new("/dev/zero"), "a device"),
        (folder.path(), "a folder"),
    ] {
        let path = path.to_str().expect("text").to_owned();
        let (sender, ended) = mpsc::channel();
        thread::spawn(move || {
            let _ = sender.send(carat(&["run", "-m", &path, "Hi"]));
        });
        let output = ended
            .recv_timeout(Duration::from_mins(1))
            .expect("it does not wait for a writer");
        let told = output.stderr;
        assert_eq!(output.code, Some(1), "{told}");
        assert!(told.contains(kind), "{told}");
    }
}
