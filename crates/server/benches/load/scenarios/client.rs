//! HTTP over bare sockets: light enough to hold a thousand streams beside the server.

use std::{io, net::SocketAddr, time::Duration};

use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{TcpSocket, TcpStream},
    time::{Instant, timeout},
};

use super::{options::Failure, report::Times};

/// The longest that anything may take before it counts as hung.
pub(super) const PATIENCE: Duration = Duration::from_mins(2);

/// The beginning of a response.
#[derive(Clone, Debug)]
pub(super) struct Head {
    pub(super) status: u16,
    headers: Vec<(String, String)>,
}

impl Head {
    pub(super) fn header(&self, name: &str) -> Option<&str> {
        let named = self.headers.iter().find(|(n, _)| n == name);
        named.map(|(_, value)| value.as_str())
    }
}

/// Rest of the response under way.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Framing {
    Ended,
    Length(usize),
    Chunked,
    UntilClose,
}

/// A connection that asks one thing at a time.
pub(super) struct Connection {
    pub(super) stream: TcpStream,
    buffer: Vec<u8>,
    framing: Framing,
}

impl Connection {
    pub(super) async fn open(address: SocketAddr) -> io::Result<Connection> {
        let stream = timeout(PATIENCE, TcpStream::connect(address)).await??;
        stream.set_nodelay(true)?;
        Ok(Connection::over(stream))
    }

    /// With so little room that a reader who does not read is soon felt.
    pub(super) async fn narrow(address: SocketAddr) -> io::Result<Connection> {
        let socket = TcpSocket::new_v4()?;
        socket.set_recv_buffer_size(2048)?;
        Ok(Connection::over(
            timeout(PATIENCE, socket.connect(address)).await??,
        ))
    }

    fn over(stream: TcpStream) -> Connection {
        Connection {
            stream,
            buffer: Vec::new(),
            framing: Framing::Ended,
        }
    }

    pub(super) async fn send(&mut self, bytes: &[u8]) -> io::Result<()> {
        timeout(PATIENCE, self.stream.write_all(bytes)).await?
    }

    /// More bytes into the buffer; `false` at the end.
    async fn fill(&mut self) -> io::Result<bool> {
        self.buffer.reserve(1024);
        let read = timeout(PATIENCE, self.stream.read_buf(&mut self.buffer)).await??;
        Ok(read > 0)
    }

    /// The next response's head; `None` if the server hangs up instead.
    pub(super) async fn head(&mut self) -> io::Result<Option<Head>> {
        let end = loop {
            if let Some(end) = find(&self.buffer, b"\r\n\r\n") {
                break end;
            }
            if !self.fill().await? {
                return Ok(None);
            }
        };
        let text = String::from_utf8_lossy(&self.buffer[..end]).into_owned();
        self.buffer.drain(..end + 4);
        let mut lines = text.split("\r\n");
        let status = lines
            .next()
            .and_then(|line| line.split(' ').nth(1)?.parse().ok())
            .ok_or_else(|| io::Error::other("no status line"))?;
        let headers = lines
            .filter_map(|line| line.split_once(':'))
            .map(|(name, value)| (name.to_ascii_lowercase(), value.trim().to_owned()))
            .collect();
        let head = Head { status, headers };
        let length = head.header("content-length").and_then(|l| l.parse().ok());
        self.framing = match length {
            _ if status == 204 || status == 304 => Framing::Ended,
            _ if head.header("transfer-encoding") == Some("chunked") => Framing::Chunked,
            Some(length) => Framing::Length(length),
            None => Framing::UntilClose,
        };
        Ok(Some(head))
    }

    /// The next piece of the body, as the server wrote it where it is chunked; `None` after the last.
    pub(super) async fn piece(&mut self) -> io::Result<Option<Vec<u8>>> {
        let broken = || io::Error::from(io::ErrorKind::UnexpectedEof);
        match self.framing {
            Framing::Ended => Ok(None),
            Framing::UntilClose => {
                while self.fill().await? {}
                self.framing = Framing::Ended;
                Ok(Some(std::mem::take(&mut self.buffer)))
            }
            Framing::Length(length) => {
                while self.buffer.len() < length {
                    if !self.fill().await? {
                        return Err(broken());
                    }
                }
                self.framing = Framing::Ended;
                Ok(Some(self.buffer.drain(..length).collect()))
            }
            Framing::Chunked => {
                let (begin, length) = loop {
                    if let Some(end) = find(&self.buffer, b"\r\n") {
                        let size = std::str::from_utf8(&self.buffer[..end]).ok();
                        let size = size.and_then(|size| usize::from_str_radix(size, 16).ok());
                        let size = size.ok_or_else(|| io::Error::other("no size of a chunk"))?;
                        break (end + 2, size);
                    }
                    if !self.fill().await? {
                        return Err(broken());
                    }
                };
                while self.buffer.len() < begin + length + 2 {
                    if !self.fill().await? {
                        return Err(broken());
                    }
                }
                let piece = self.buffer[begin..begin + length].to_vec();
                self.buffer.drain(..begin + length + 2);
                if length == 0 {
                    self.framing = Framing::Ended;
                    return Ok(None);
                }
                Ok(Some(piece))
            }
        }
    }

    /// All of the body.
    pub(super) async fn body(&mut self) -> io::Result<Vec<u8>> {
        let mut body = Vec::new();
        while let Some(piece) = self.piece().await? {
            body.extend(piece);
        }
        Ok(body)
    }
}

fn find(bytes: &[u8], what: &[u8]) -> Option<usize> {
    bytes.windows(what.len()).position(|window| window == what)
}

pub(super) fn contains(bytes: &[u8], what: &str) -> bool {
    find(bytes, what.as_bytes()).is_some()
}

/// A whole request.
pub(super) fn request(method: &str, path: &str, body: &str) -> Vec<u8> {
    format!(
        "{method} {path} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\ncontent-length: {}\r\n\r\n{body}",
        body.len()
    )
    .into_bytes()
}

/// A response, all of it.
#[derive(Clone, Debug)]
pub(super) struct Answer {
    pub(super) head: Head,
    pub(super) body: Vec<u8>,
}

impl Answer {
    pub(super) fn text(&self) -> String {
        String::from_utf8_lossy(&self.body).into_owned()
    }

    pub(super) fn json(&self) -> Result<serde_json::Value, Failure> {
        Ok(serde_json::from_slice(&self.body)?)
    }
}

/// Asks on a connection of its own.
pub(super) async fn ask(
    address: SocketAddr,
    method: &str,
    path: &str,
    body: &str,
) -> Result<Answer, Failure> {
    let mut connection = Connection::open(address).await?;
    connection.send(&request(method, path, body)).await?;
    let head = connection.head().await?.ok_or("no response")?;
    let body = connection.body().await?;
    Ok(Answer { head, body })
}

/// A stream as its reader saw it.
#[derive(Clone, Debug, Default)]
pub(super) struct Streamed {
    pub(super) status: u16,
    /// From the request to the first piece.
    pub(super) first: Duration,
    /// Between pieces with something in them, with the time that each ended at.
    pub(super) gaps: Times,
    pub(super) gap_ends: Vec<Instant>,
    /// It ended as streams do, without an error.
    pub(super) whole: bool,
    /// It was told of a failure.
    pub(super) told: bool,
}

/// Reads a stream of OpenAI's chat to its end.
pub(super) async fn read_stream(address: SocketAddr, body: &str) -> Result<Streamed, Failure> {
    let mut connection = Connection::open(address).await?;
    let sent = Instant::now();
    connection
        .send(&request("POST", "/v1/chat/completions", body))
        .await?;
    let mut streamed = Streamed::default();
    let head = connection.head().await?.ok_or("no response")?;
    streamed.status = head.status;
    let mut last: Option<Instant> = None;
    while let Some(piece) = connection.piece().await? {
        let now = Instant::now();
        streamed.told |= contains(&piece, "\"error\"");
        streamed.whole |= contains(&piece, "data: [DONE]");
        if !contains(&piece, "\"content\"") {
            continue;
        }
        match last.replace(now) {
            None => streamed.first = now - sent,
            Some(before) => {
                streamed.gaps.add(now - before);
                streamed.gap_ends.push(now);
            }
        }
    }
    Ok(streamed)
}

/// A series of `/metrics`, summed over its labels, where they begin with `labels`.
pub(super) async fn metric(address: SocketAddr, name: &str, labels: &str) -> Result<f64, Failure> {
    let page = ask(address, "GET", "/metrics", "").await?.text();
    let values = page.lines().filter_map(|line| {
        let (series, value) = line.rsplit_once(' ')?;
        let rest = series.strip_prefix("carat:")?.strip_prefix(name)?;
        (rest.starts_with('{') && rest.contains(labels)).then(|| value.parse::<f64>().ok())?
    });
    Ok(values.sum())
}

/// Requests that run or wait.
pub(super) async fn unfinished(address: SocketAddr) -> Result<f64, Failure> {
    let running = metric(address, "num_requests_running", "").await?;
    Ok(running + metric(address, "num_requests_waiting", "").await?)
}

/// Time until nothing runs or waits; `None` if something still does after `most`.
pub(super) async fn idle_after(
    address: SocketAddr,
    most: Duration,
) -> Result<Option<Duration>, Failure> {
    let begun = Instant::now();
    while begun.elapsed() < most {
        if unfinished(address).await? == 0.0 {
            return Ok(Some(begun.elapsed()));
        }
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    Ok(None)
}
