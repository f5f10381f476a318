//! Limits on connections, over real sockets.

use std::{net::SocketAddr, sync::Arc, time::Duration};

use crate::support::{PATIENCE, model};
use carat_server::{App, Config, serve};
use serde_json::json;
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{TcpListener, TcpSocket, TcpStream},
    sync::oneshot,
    task::JoinHandle,
    time::{Instant, sleep, timeout},
};

struct Running {
    app: Arc<App>,
    address: SocketAddr,
    stop: oneshot::Sender<()>,
    served: JoinHandle<()>,
}

async fn start(config: Config) -> Running {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let app = App::new(config);
    app.ready(model(|_| {}));
    let (stop, told) = oneshot::channel::<()>();
    let served = tokio::spawn(serve(Arc::clone(&app), listener, async move {
        let _ = told.await;
    }));
    Running {
        app,
        address,
        stop,
        served,
    }
}

fn post(body: &str) -> String {
    format!(
        "POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n\
         Content-Length: {}\r\n\r\n{body}",
        body.len()
    )
}

fn story(tokens: usize) -> String {
    json!({
        "messages": [{"role": "user", "content": "Tell me a story about a fox."}],
        "max_tokens": tokens, "ignore_eos": true, "stream": true, "temperature": 0,
    })
    .to_string()
}

async fn connect(running: &Running) -> TcpStream {
    TcpStream::connect(running.address).await.unwrap()
}

/// Everything until the other side closes.
async fn rest(stream: &mut TcpStream) -> String {
    let mut bytes = Vec::new();
    // A reset after the answer is a close too.
    let _ = timeout(PATIENCE, stream.read_to_end(&mut bytes))
        .await
        .expect("the server closes");
    String::from_utf8_lossy(&bytes).into_owned()
}

async fn ask(running: &Running, text: &str) -> String {
    let mut stream = connect(running).await;
    // What is refused is not read to its end, and the rest then cannot be written.
    let _ = stream.write_all(text.as_bytes()).await;
    rest(&mut stream).await
}

/// Whether all requests end in a while.
async fn becomes_idle(app: &App) -> bool {
    let end = Instant::now() + PATIENCE;
    while Instant::now() < end {
        if app.unfinished() == 0 {
            return true;
        }
        sleep(Duration::from_millis(5)).await;
    }
    false
}

#[tokio::test]
async fn heads_have_limits() {
    let running = start(Config::default()).await;
    let many = "X: y\r\n".repeat(200);
    let answer = ask(
        &running,
        &format!("GET /health HTTP/1.1\r\nHost: localhost\r\n{many}\r\n"),
    )
    .await;
    assert!(answer.starts_with("HTTP/1.1 431"), "{answer}");
    let long = "x".repeat(100_000);
    let answer = ask(
        &running,
        &format!(
            "GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nX: {long}\r\n\r\n"
        ),
    )
    .await;
    // The answer is lost where the connection is reset under what was still being sent.
    assert!(
        answer.is_empty() || answer.starts_with("HTTP/1.1 431"),
        "{answer}"
    );
    let answer = ask(&running, "nonsense\r\n\r\n").await;
    assert!(answer.starts_with("HTTP/1.1 400"), "{answer}");
}

#[tokio::test]
async fn a_head_that_does_not_come_is_not_waited_for() {
    let running = start(Config {
        header_timeout: Duration::from_millis(100),
        ..Config::default()
    })
    .await;
    // It returns when the server has closed.
    ask(&running, "GET /health HTTP/1.1\r\nHost: loc").await;
}

#[tokio::test]
async fn a_body_that_does_not_come_is_not_waited_for() {
    let running = start(Config {
        body_timeout: Duration::from_millis(100),
        ..Config::default()
    })
    .await;
    let head = "POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Length: 1000\r\n\r\n{";
    let answer = ask(&running, head).await;
    assert!(answer.starts_with("HTTP/1.1 400"), "{answer}");
    assert!(answer.contains("did not arrive"), "{answer}");
}

#[tokio::test]
async fn a_client_that_hangs_up_frees_its_place_streamed_or_not() {
    let running = start(Config::default()).await;
    for whole in [false, true] {
        let body = story(900).replace("\"stream\":true", &format!("\"stream\":{}", !whole));
        let mut stream = connect(&running).await;
        stream.write_all(post(&body).as_bytes()).await.unwrap();
        while running.app.unfinished() == 0 {
            sleep(Duration::from_millis(2)).await;
        }
        if !whole {
            let mut some = [0; 64];
            stream.read_exact(&mut some).await.unwrap();
        }
        drop(stream);
        assert!(becomes_idle(&running.app).await, "whole: {whole}");
    }
}

#[tokio::test]
async fn the_head_comes_with_the_first_token() {
    let running = start(Config::default()).await;
    let mut stream = connect(&running).await;
    stream.write_all(post(&story(3)).as_bytes()).await.unwrap();
    let mut bytes = vec![0; 64 << 10];
    let count = stream.read(&mut bytes).await.unwrap();
    let first = String::from_utf8_lossy(&bytes[..count]).into_owned();
    assert!(first.starts_with("HTTP/1.1 200 OK\r\n"), "{first}");
    assert!(
        first.contains("\"role\":\"assistant\""),
        "in one write: {first}"
    );
    assert!(
        first.matches("\"content\":").count() >= 2,
        "with the first text: {first}"
    );
}

#[tokio::test]
async fn a_reader_that_takes_nothing_is_cut_off() {
    let running = start(Config {
        write_timeout: Duration::from_millis(300),
        ..Config::default()
    })
    .await;
    let socket = TcpSocket::new_v4().unwrap();
    socket.set_recv_buffer_size(4096).unwrap();
    let mut stream = socket.connect(running.address).await.unwrap();
    // Many answers in a row on one connection fill every buffer on the way.
    let body = json!({
        "messages": [{"role": "user", "content": "Tell me a story about a fox."}],
        "max_tokens": 800, "ignore_eos": true, "stream": true, "temperature": 0, "logprobs": true, "top_logprobs": 20,
    })
    .to_string();
    stream
        .write_all(post(&body).repeat(4).as_bytes())
        .await
        .unwrap();
    let end = Instant::now() + PATIENCE;
    loop {
        let page = crate::support::get(&running.app, "/metrics").await.text;
        if page.contains("carat:slow_clients_total{model_name=\"pip\"} 1") {
            break;
        }
        assert!(Instant::now() < end, "it is cut off");
        sleep(Duration::from_millis(50)).await;
    }
    assert!(becomes_idle(&running.app).await);
}

#[tokio::test]
async fn a_server_that_stops_ends_what_it_has_begun() {
    let running = start(Config::default()).await;
    let mut idle = connect(&running).await;
    let mut busy = connect(&running).await;
    busy.write_all(post(&story(60)).as_bytes()).await.unwrap();
    let mut some = [0; 64];
    busy.read_exact(&mut some).await.unwrap();
    running.stop.send(()).unwrap();
    let answer = rest(&mut busy).await;
    assert!(
        answer.contains("data: [DONE]"),
        "the answer is whole: {answer}"
    );
    assert_eq!(rest(&mut idle).await, "", "who asked nothing is let go");
    timeout(PATIENCE, running.served)
        .await
        .expect("it ends")
        .unwrap();
    assert!(TcpStream::connect(running.address).await.is_err());
}

#[tokio::test]
async fn a_server_that_stops_waits_no_longer_than_told() {
    // On a busy machine an answer may be over before anybody looks; one that is not shows that it was not waited for.
    for _ in 0..5 {
        let running = start(Config {
            drain: Duration::from_millis(100),
            ..Config::default()
        })
        .await;
        let mut busy = connect(&running).await;
        busy.write_all(post(&story(900)).as_bytes()).await.unwrap();
        let mut some = [0; 64];
        busy.read_exact(&mut some).await.unwrap();
        running.stop.send(()).unwrap();
        running.served.await.unwrap();
        if running.app.unfinished() == 1 {
            return;
        }
    }
    panic!("the server waits for its answers to end");
}
