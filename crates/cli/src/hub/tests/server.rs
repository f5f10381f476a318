//! A hub on the loopback interface: just enough HTTP for the client, with every request on record.

use std::{
    io::{BufRead, BufReader, Write},
    net::{Shutdown, SocketAddr, TcpListener, TcpStream},
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, Ordering},
    },
    thread::{self, JoinHandle},
    time::Duration,
};

use sha2::{Digest, Sha256};

use super::super::transfer::hex;

/// No test needs more; a client that loops fails instead of hanging.
const MAX_REQUESTS: usize = 64;

#[derive(Clone, Debug)]
pub(super) struct Request {
    pub(super) method: String,
    pub(super) path: String,
    /// Names in lower case.
    headers: Vec<(String, String)>,
}

impl Request {
    pub(super) fn header(&self, name: &str) -> Option<&str> {
        let (_, value) = self.headers.iter().find(|(key, _)| key == name)?;
        Some(value)
    }

    /// The first byte asked for by a `Range` header.
    pub(super) fn range_start(&self) -> Option<usize> {
        let range = self.header("range")?;
        range
            .strip_prefix("bytes=")?
            .strip_suffix('-')?
            .parse()
            .ok()
    }
}

#[derive(Clone, Debug)]
pub(super) struct Reply {
    pub(super) status: u16,
    pub(super) headers: Vec<(&'static str, String)>,
    pub(super) body: Vec<u8>,
    /// Closes the connection after this much of the body, whatever was announced.
    pub(super) cut_at: Option<usize>,
}

impl Reply {
    pub(super) fn status(status: u16) -> Reply {
        Reply {
            status,
            headers: Vec::new(),
            body: Vec::new(),
            cut_at: None,
        }
    }

    pub(super) fn with(mut self, name: &'static str, value: impl Into<String>) -> Reply {
        self.headers.push((name, value.into()));
        self
    }

    pub(super) fn body(self, body: impl Into<Vec<u8>>) -> Reply {
        Reply {
            body: body.into(),
            ..self
        }
    }

    fn send(&self, method: &str, stream: &mut TcpStream) -> std::io::Result<()> {
        let length = ("Content-Length", self.body.len().to_string());
        write!(
            stream,
            "HTTP/1.1 {} Mock\r\nConnection: close\r\n",
            self.status
        )?;
        for (name, value) in self.headers.iter().chain([&length]) {
            write!(stream, "{name}: {value}\r\n")?;
        }
        write!(stream, "\r\n")?;
        if method != "HEAD" {
            stream.write_all(&self.body[..self.cut_at.unwrap_or(self.body.len())])?;
        }
        stream.flush()?;
        stream.shutdown(Shutdown::Write)
    }
}

type Answer = dyn Fn(&Request) -> Reply + Send + Sync;

pub(super) struct Server {
    address: SocketAddr,
    requests: Arc<Mutex<Vec<Request>>>,
    stopping: Arc<AtomicBool>,
    acceptor: Option<JoinHandle<()>>,
}

impl Server {
    pub(super) fn start(answer: impl Fn(&Request) -> Reply + Send + Sync + 'static) -> Server {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let requests = Arc::<Mutex<Vec<Request>>>::default();
        let stopping = Arc::<AtomicBool>::default();
        let answer: Arc<Answer> = Arc::new(answer);
        let (log, stop) = (Arc::clone(&requests), Arc::clone(&stopping));
        let acceptor = thread::spawn(move || {
            let mut connections = Vec::new();
            for stream in listener.incoming().take(MAX_REQUESTS) {
                if stop.load(Ordering::SeqCst) {
                    break;
                }
                let (log, answer) = (Arc::clone(&log), Arc::clone(&answer));
                connections.push(thread::spawn(move || {
                    // A client that goes away early is part of some tests.
                    let _ = serve(stream?, &log, &*answer);
                    Ok::<_, std::io::Error>(())
                }));
            }
            for connection in connections {
                let _ = connection.join();
            }
        });
        Server {
            address,
            requests,
            stopping,
            acceptor: Some(acceptor),
        }
    }

    pub(super) fn base(&self) -> String {
        format!("http://{}", self.address)
    }

    pub(super) fn requests(&self) -> Vec<Request> {
        self.requests.lock().unwrap().clone()
    }

    /// `METHOD path` of all requests, with `@start` for ranges.
    pub(super) fn log(&self) -> Vec<String> {
        let line = |request: &Request| {
            let range = request.range_start().map(|start| format!("@{start}"));
            format!(
                "{} {}{}",
                request.method,
                request.path,
                range.unwrap_or_default()
            )
        };
        self.requests().iter().map(line).collect()
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.stopping.store(true, Ordering::SeqCst);
        // Wakes the acceptor, which then sees the flag.
        let _ = TcpStream::connect(self.address);
        if let Some(acceptor) = self.acceptor.take() {
            let _ = acceptor.join();
        }
    }
}

fn serve(mut stream: TcpStream, log: &Mutex<Vec<Request>>, answer: &Answer) -> std::io::Result<()> {
    stream.set_read_timeout(Some(Duration::from_mins(2)))?;
    stream.set_write_timeout(Some(Duration::from_mins(2)))?;
    let mut lines = BufReader::new(stream.try_clone()?).lines();
    let first = lines.next().transpose()?.unwrap_or_default();
    let mut words = first.split(' ').map(str::to_owned);
    let (Some(method), Some(path)) = (words.next(), words.next()) else {
        return Ok(());
    };
    let mut headers = Vec::new();
    for line in lines {
        let line = line?;
        let Some((name, value)) = line.split_once(": ") else {
            break;
        };
        headers.push((name.to_ascii_lowercase(), value.to_owned()));
    }
    let request = Request {
        method,
        path,
        headers,
    };
    log.lock().unwrap().push(request.clone());
    answer(&request).send(&request.method, &mut stream)
}

/// The content of a repository, and how the hub would serve it.
#[derive(Clone)]
pub(super) struct Repository {
    pub(super) commit: String,
    pub(super) files: Vec<(String, Vec<u8>)>,
    /// Address that content is served from, when not by the hub itself.
    pub(super) cdn: Option<String>,
}

impl Repository {
    pub(super) fn new(files: &[(&str, &[u8])]) -> Repository {
        Repository {
            commit: "a".repeat(40),
            files: files
                .iter()
                .map(|(name, body)| ((*name).to_owned(), body.to_vec()))
                .collect(),
            cdn: None,
        }
    }

    /// Answers for `o/r`: the file list, descriptions and redirects of files, and their content.
    pub(super) fn answer(&self, request: &Request) -> Reply {
        let path = request.path.as_str();
        if path == "/api/models/o/r/revision/main" {
            let siblings: Vec<_> = self
                .files
                .iter()
                .map(|(name, _)| serde_json::json!({ "rfilename": name }))
                .collect();
            let model =
                serde_json::json!({ "id": "o/r", "sha": self.commit, "siblings": siblings });
            return Reply::status(200).body(model.to_string());
        }
        let found = |path: &str| {
            let mut files = self.files.iter();
            files.find(|(name, _)| name.replace(' ', "%20") == path)
        };
        let resolve = format!("/o/r/resolve/{}/", self.commit);
        if let Some((name, body)) = path.strip_prefix(&resolve).and_then(found) {
            let cdn = self.cdn.as_deref().unwrap_or("");
            return Reply::status(302)
                .with("Location", format!("{cdn}/cdn/{name}"))
                .with("X-Repo-Commit", &self.commit)
                .with("X-Linked-Etag", format!("\"{}\"", sha256(body)))
                .with("X-Linked-Size", body.len().to_string())
                .body("Found. Redirecting");
        }
        match path.strip_prefix("/cdn/").and_then(found) {
            None => Reply::status(404),
            Some((_, body)) => match request.range_start() {
                None => Reply::status(200).body(body.as_slice()),
                Some(start) if start < body.len() => Reply::status(206)
                    .with(
                        "Content-Range",
                        format!("bytes {start}-{}/{}", body.len() - 1, body.len()),
                    )
                    .body(&body[start..]),
                Some(_) => Reply::status(416),
            },
        }
    }
}

pub(super) fn sha256(bytes: &[u8]) -> String {
    hex(&Sha256::digest(bytes))
}
