//! Models by name, from the command line's point of view: against a stand-in of the hub on this machine, which `HF_ENDPOINT` names.

use std::{
    fs,
    io::{BufRead, BufReader, Write},
    net::{SocketAddr, TcpListener, TcpStream},
    path::Path,
    sync::{Arc, Mutex},
    thread,
};

use sha2::{Digest, Sha256};

use crate::start::{Output, end_of, program};

const COMMIT: &str = "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa";
/// The file that `gemma4:12b-q4_0` stands for.
const REPO: &str = "google/gemma-4-12B-it-qat-q4_0-gguf";
const FILE: &str = "gemma-4-12b-it-qat-q4_0.gguf";

/// First lines of requests, each with its `Authorization`.
type Log = Mutex<Vec<(String, Option<String>)>>;

/// A hub with one repository, whose file is the demo model.
struct Hub {
    address: SocketAddr,
    requests: Arc<Log>,
}

impl Hub {
    fn start() -> Hub {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a free port");
        let address = listener.local_addr().expect("bound");
        let requests = Arc::<Log>::default();
        let log = Arc::clone(&requests);
        // Ends with the test's process.
        thread::spawn(move || {
            for stream in listener.incoming().flatten() {
                // A client that goes away is not this side's concern.
                let _ = answer(stream, &log);
            }
        });
        Hub { address, requests }
    }

    fn lines(&self) -> Vec<String> {
        let requests = self.requests.lock().expect("nobody panics");
        requests.iter().map(|(line, _)| line.clone()).collect()
    }
}

fn demo() -> Vec<u8> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../assets/pip-q8_0.gguf");
    fs::read(path).expect("the demo is part of the source")
}

fn answer(mut stream: TcpStream, log: &Log) -> std::io::Result<()> {
    let mut lines = BufReader::new(stream.try_clone()?).lines();
    let first = lines.next().transpose()?.unwrap_or_default();
    let mut token = None;
    for line in lines {
        let line = line?;
        if line.is_empty() {
            break;
        }
        if let Some((name, value)) = line.split_once(": ")
            && name.eq_ignore_ascii_case("authorization")
        {
            token = Some(value.to_owned());
        }
    }
    log.lock()
        .expect("nobody panics")
        .push((first.clone(), token));
    let listing = format!("GET /api/models/{REPO}/revision/main ");
    let content = format!("/{REPO}/resolve/{COMMIT}/{FILE} ");
    let (status, body) = if first.starts_with(&listing) {
        let text = format!("{{\"sha\":\"{COMMIT}\",\"siblings\":[{{\"rfilename\":\"{FILE}\"}}]}}");
        (200, text.into_bytes())
    } else if first.contains(&content) {
        (200, demo())
    } else {
        (404, Vec::new())
    };
    let digest = Sha256::digest(&body);
    let hex: Vec<String> = digest.iter().map(|byte| format!("{byte:02x}")).collect();
    let etag = hex.concat();
    write!(
        stream,
        "HTTP/1.1 {status} Stand-in\r\nConnection: close\r\nETag: \"{etag}\"\r\nContent-Length: {}\r\n\r\n",
        body.len()
    )?;
    if !first.starts_with("HEAD") {
        stream.write_all(&body)?;
    }
    Ok(())
}

/// A machine of its own: an empty cache, no settings, and only these variables.
struct Machine {
    home: tempfile::TempDir,
}

impl Machine {
    fn new() -> Machine {
        let home = tempfile::tempdir().expect("a folder");
        Machine { home }
    }

    fn carat(&self, variables: &[(&str, &str)], arguments: &[&str]) -> Output {
        let mut command = program(arguments);
        command.env_clear().env("HOME", self.home.path());
        end_of(command.envs(variables.iter().copied()))
    }
}

fn stdout(output: &Output) -> String {
    assert_eq!(output.code, Some(0), "{}", output.stderr);
    output.stdout.clone()
}

#[test]
fn a_short_name_is_explained_fetched_listed_used_and_removed() {
    let (hub, machine) = (Hub::start(), Machine::new());
    let base = format!("http://{}/", hub.address);
    let variables = [("HF_ENDPOINT", base.as_str()), ("HF_TOKEN", "hf_secret")];
    let pulled = machine.carat(&variables, &["pull", "gemma4:12b-q4_0"]);
    let path = stdout(&pulled).trim().to_owned();
    assert_eq!(fs::read(&path).expect("the printed path"), demo());
    let name = format!("hf:{REPO}:{FILE}");
    assert!(pulled.stderr.contains(&name), "{}", pulled.stderr);
    let requests = hub.requests.lock().expect("nobody panics").clone();
    assert!(!requests.is_empty());
    for (line, token) in requests {
        assert_eq!(token.as_deref(), Some("Bearer hf_secret"), "{line}");
    }

    let listed = stdout(&machine.carat(&[], &["list"]));
    assert!(listed.contains(&name), "{listed}");
    let asked = hub.lines().len();
    let run = ["run", "-n", "2", "-m", "gemma4:12b-q4_0", "Hi"];
    let answered = machine.carat(&variables, &run);
    assert!(!stdout(&answered).is_empty());
    assert!(answered.stderr.contains(&name), "{}", answered.stderr);
    assert_eq!(hub.lines().len(), asked, "what is there is not asked for");

    let removed = machine.carat(&[], &["rm", &name]);
    assert!(stdout(&removed).contains(FILE));
    assert!(removed.stderr.contains("11.02 MiB"), "{}", removed.stderr);
    assert!(!Path::new(&path).exists());
    assert!(!stdout(&machine.carat(&[], &["list"])).contains(FILE));
    let again = machine.carat(&[], &["rm", "gemma4:12b-q4_0"]);
    assert_eq!(again.code, Some(1));
    assert!(again.stderr.contains("carat list"), "{}", again.stderr);
}

#[test]
fn a_cached_model_is_pulled_without_a_network() {
    let (hub, machine) = (Hub::start(), Machine::new());
    let base = format!("http://{}", hub.address);
    let pull = ["pull", "gemma4:12b-q4_0"];
    let nothing = machine.carat(&[("HF_ENDPOINT", &base), ("HF_HUB_OFFLINE", "1")], &pull);
    assert_eq!(nothing.code, Some(1));
    assert!(
        nothing.stderr.contains("HF_HUB_OFFLINE"),
        "{}",
        nothing.stderr
    );
    assert!(hub.lines().is_empty(), "{:?}", hub.lines());

    let path = stdout(&machine.carat(&[("HF_ENDPOINT", &base)], &pull));
    let asked = hub.lines().len();
    let offline = machine.carat(&[("HF_ENDPOINT", &base), ("HF_HUB_OFFLINE", "true")], &pull);
    assert_eq!(stdout(&offline), path);
    let flag = machine.carat(
        &[("HF_ENDPOINT", &base)],
        &[&["--offline"], &pull[..]].concat(),
    );
    assert_eq!(stdout(&flag), path);
    assert_eq!(hub.lines().len(), asked);

    // A port that nobody listens on is as good as no network.
    let gone = TcpListener::bind("127.0.0.1:0").and_then(|l| l.local_addr());
    let gone = format!("http://{}", gone.expect("a free port"));
    let unreached = machine.carat(&[("HF_ENDPOINT", &gone)], &pull);
    assert_eq!(stdout(&unreached), path);
    assert!(
        unreached.stderr.contains("may be old"),
        "{}",
        unreached.stderr
    );
}

#[test]
fn an_endpoint_that_cannot_be_used_is_named() {
    let machine = Machine::new();
    let plain = [("HF_ENDPOINT", "http://mirror.example")];
    let output = machine.carat(&plain, &["pull", "gemma4:12b"]);
    assert_eq!(output.code, Some(1));
    let told = output.stderr;
    assert!(
        told.contains("HF_ENDPOINT") && told.contains("https://"),
        "{told}"
    );
}

/// The proxy sees whom the program wants to talk to, and nothing else is asked.
#[test]
fn a_proxy_is_used() {
    let machine = Machine::new();
    let proxy = TcpListener::bind("127.0.0.1:0").expect("a free port");
    let address = format!("http://{}", proxy.local_addr().expect("bound"));
    let seen = thread::spawn(move || {
        let (mut stream, _) = proxy.accept().expect("a client");
        let mut line = String::new();
        BufReader::new(stream.try_clone().expect("a second handle"))
            .read_line(&mut line)
            .expect("a request");
        let _ = stream.write_all(b"HTTP/1.1 403 No\r\nContent-Length: 0\r\n\r\n");
        line
    });
    let endpoint = ("HF_ENDPOINT", "https://hub.invalid");
    let proxied = machine.carat(
        &[endpoint, ("HTTPS_PROXY", &address)],
        &["pull", "gemma4:12b"],
    );
    assert_eq!(proxied.code, Some(1));
    let line = seen.join().expect("the proxy was asked");
    assert!(line.starts_with("CONNECT hub.invalid:443"), "{line}");
}
