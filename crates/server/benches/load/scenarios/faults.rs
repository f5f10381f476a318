//! An executor that refuses, fails, stalls or panics: everybody hears the truth, and health says what is so.

use std::time::Duration;

use carat_server::Config;
use tokio::time::Instant;

use super::{
    client::{ask, read_stream, unfinished},
    options::Failure,
    report::Report,
    server::Server,
    synthetic::{Fault, Pace},
    wire::chat,
};

const STEP: Duration = Duration::from_millis(10);
const STALL_LIMIT: Duration = Duration::from_millis(500);
const STREAMS: usize = 4;
const PATIENCE: Duration = Duration::from_secs(20);

pub(super) async fn run(report: &mut Report) -> Result<(), Failure> {
    let stall = STALL_LIMIT * 4;
    for (name, fault, survives) in [
        ("a batch refused", Fault::Refused, true),
        ("a lost device", Fault::Device, false),
        ("a stall", Fault::Stall(stall), false),
        ("a panic", Fault::Panic, false),
        (
            "a pause within the limit",
            Fault::Stall(STALL_LIMIT / 5),
            true,
        ),
    ] {
        one(name, fault, survives, report).await?;
    }
    Ok(())
}

async fn one(name: &str, fault: Fault, survives: bool, report: &mut Report) -> Result<(), Failure> {
    let pace = Pace {
        step: STEP,
        ..Pace::default()
    };
    let server = Server::synthetic(STREAMS, 1024, pace, Config::default(), |engine| {
        engine.stall_limit = STALL_LIMIT;
    })?;
    let address = server.address;
    let streamed: &'static str = chat("Hello!", 200, true).to_string().leak();
    let whole: &'static str = chat("Hello!", 3, false).to_string().leak();
    let streams: Vec<_> = (0..STREAMS)
        .map(|_| tokio::spawn(read_stream(address, streamed)))
        .collect();
    let begun = Instant::now();
    // All slots have begun to answer, and one more waits.
    while unfinished(address).await? < STREAMS as f64 && begun.elapsed() < PATIENCE {
        tokio::time::sleep(STEP).await;
    }
    tokio::time::sleep(STEP * 10).await;
    let waiting = tokio::spawn(ask(address, "POST", "/v1/chat/completions", whole));
    while unfinished(address).await? <= STREAMS as f64 && begun.elapsed() < PATIENCE {
        tokio::time::sleep(STEP).await;
    }
    server.controls.inject(fault);
    let (mut told, mut complete) = (0, 0);
    for stream in streams {
        let stream = stream.await??;
        told += usize::from(stream.status == 200 && stream.told && !stream.whole);
        complete += usize::from(stream.status == 200 && stream.whole && !stream.told);
    }
    // A batch that is refused once is run in two halves, so nobody is harmed.
    let expected = if survives { (0, STREAMS) } else { (STREAMS, 0) };
    report.must(
        (told, complete) == expected,
        format_args!("{name}: {told} streams told, {complete} complete"),
    );
    let waited = waiting.await??;
    let status = waited.head.status;
    report.must(
        status == if survives { 200 } else { 500 },
        format_args!("{name}: who waited gets {status}"),
    );
    if !survives {
        let error = waited.json()?;
        let is_said = error["error"]["message"]
            .as_str()
            .is_some_and(|m| !m.is_empty());
        report.must(is_said, format_args!("{name}: with a reason"));
    }
    let health = ask(address, "GET", "/health", "").await?;
    let ready = ask(address, "GET", "/ready", "").await?;
    let (health_status, ready_status) = (health.head.status, ready.head.status);
    let right = if survives { (200, 200) } else { (503, 503) };
    report.must(
        (health_status, ready_status) == right,
        format_args!("{name}: /health {health_status}, /ready {ready_status}"),
    );
    let state = health.json()?["status"].clone();
    report.must(
        state == if survives { "ok" } else { "failed" },
        format_args!("{name}: /health says {state}"),
    );
    let next = ask(address, "POST", "/v1/chat/completions", whole).await?;
    let status = next.head.status;
    report.must(
        status == if survives { 200 } else { 500 },
        format_args!("{name}: the next request gets {status}"),
    );
    Ok(())
}
