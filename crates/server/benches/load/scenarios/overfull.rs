//! More requests than slots and queue hold: the rest is turned away at once, and is answered when it comes back.

use std::{net::SocketAddr, time::Duration};

use carat_server::Config;
use tokio::time::Instant;

use super::{
    client::{Connection, ask, request},
    options::{Failure, Options},
    report::{Report, Times},
    server::Server,
    synthetic::Pace,
    wire::chat,
};

const SLOTS: usize = 4;
const QUEUE: usize = 16;
const REFUSED_MILLIS: f64 = 20.0;
/// Attempts of a client that comes back when it is told to.
const ATTEMPTS: usize = 40;

pub(super) async fn run(options: &Options, report: &mut Report) -> Result<(), Failure> {
    let count = options.count(200, 40);
    let room = SLOTS + QUEUE;
    let pace = Pace {
        step: Duration::from_millis(10),
        ..Pace::default()
    };
    let server = || {
        Server::synthetic(SLOTS, 2048, pace, Config::default(), |engine| {
            engine.max_unfinished = SLOTS + QUEUE;
        })
    };
    let crowded = server()?;
    let address = crowded.address;
    // None of those taken ends before the last is turned away.
    let body: &'static str = chat("Hello!", 200, false).to_string().leak();
    ask(
        address,
        "POST",
        "/v1/chat/completions",
        &chat("Hello!", 1, false).to_string(),
    )
    .await?;
    let mut connections = Vec::with_capacity(count);
    for _ in 0..count {
        connections.push(Connection::open(address).await?);
    }
    let asked: Vec<_> = connections
        .into_iter()
        .map(|connection| tokio::spawn(once(connection, body)))
        .collect();
    let (mut answered, mut refused, mut told) = (0, Times::default(), 0);
    for one in asked {
        match one.await?? {
            (200, ..) => answered += 1,
            (429, time, retry_after) => {
                refused.add(time);
                told += usize::from(retry_after.is_some_and(|s| (1..=60).contains(&s)));
            }
            (status, ..) => report.must(false, format_args!("status {status} is 200 or 429")),
        }
    }
    let turned_away = refused.len();
    report.figure("requests", count);
    report.figure("turned away after", &refused);
    report.must(
        answered == room && turned_away == count - room,
        format_args!("{answered} answered, {turned_away} turned away; there is room for {room}"),
    );
    report.must(told == turned_away, "each was told when to come back");
    report.at_most(
        "turned away after at most",
        refused.percentile(1.0),
        REFUSED_MILLIS,
        "ms",
    );
    drop(crowded);
    let patient = server()?;
    let body: &'static str = chat("Hello!", 10, false).to_string().leak();
    let asked: Vec<_> = (0..count)
        .map(|_| tokio::spawn(until_answered(patient.address, body)))
        .collect();
    let mut attempts = Vec::new();
    for one in asked {
        attempts.extend(one.await??);
    }
    let most = attempts.iter().max().copied().unwrap_or(0);
    report.must(
        attempts.len() == count,
        format_args!("all who came back were answered, after {most} attempts at most"),
    );
    Ok(())
}

/// Status, time until it came, and when to come back.
async fn once(
    mut connection: Connection,
    body: &str,
) -> Result<(u16, Duration, Option<u64>), Failure> {
    let sent = Instant::now();
    let asked = request("POST", "/v1/chat/completions", body);
    connection.send(&asked).await?;
    let head = connection.head().await?.ok_or("no response")?;
    let time = sent.elapsed();
    connection.body().await?;
    let retry_after = head.header("retry-after").and_then(|s| s.parse().ok());
    Ok((head.status, time, retry_after))
}

/// Attempts that it took; `None` if it was never answered.
async fn until_answered(address: SocketAddr, body: &str) -> Result<Option<usize>, Failure> {
    for attempt in 1..=ATTEMPTS {
        let answer = ask(address, "POST", "/v1/chat/completions", body).await?;
        if answer.head.status == 200 {
            return Ok(Some(attempt));
        }
        let wait = answer
            .head
            .header("retry-after")
            .and_then(|s| s.parse().ok());
        tokio::time::sleep(Duration::from_secs(wait.unwrap_or(1))).await;
    }
    Ok(None)
}
