//! Ten thousand requests that wait for a slot: all accepted, all gone when their clients go.

use std::time::Duration;

use carat_server::Config;
use tokio::time::Instant;

use super::{
    client::{Connection, idle_after, metric, request},
    options::{Failure, Options},
    process::{open_files_limit, resident_kib},
    report::Report,
    server::Server,
    synthetic::Pace,
    wire::chat,
};

/// Files that are neither end of a connection.
const OTHER_FILES: usize = 200;
const PATIENCE: Duration = Duration::from_mins(2);

pub(super) async fn run(options: &Options, report: &mut Report) -> Result<(), Failure> {
    let wanted = options.count(10_000, 50);
    let limit = open_files_limit();
    let count = wanted.min(limit.saturating_sub(OTHER_FILES) / 2);
    let config = Config {
        max_connections: count + 16,
        ..Config::default()
    };
    let pace = Pace {
        step: Duration::from_millis(50),
        ..Pace::default()
    };
    let server = Server::synthetic(4, 4096, pace, config, |engine| {
        engine.max_unfinished = count;
    })?;
    let address = server.address;
    let before = resident_kib();
    let body = chat("Hello!", 4000, true).to_string();
    let asked = request("POST", "/v1/chat/completions", &body);
    let begun = Instant::now();
    let mut connections = Vec::with_capacity(count);
    for _ in 0..count {
        let mut connection = Connection::open(address).await?;
        connection.send(&asked).await?;
        connections.push(connection);
    }
    let accepted = async {
        loop {
            let waiting = metric(address, "num_requests_waiting", "").await?;
            let running = metric(address, "num_requests_running", "").await?;
            if waiting + running >= count as f64 || begun.elapsed() > PATIENCE {
                return Ok::<f64, Failure>(waiting + running);
            }
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    };
    let accepted = accepted.await?;
    let took = begun.elapsed();
    report.figure(
        "requests",
        format_args!("{count} of {wanted}, with {limit} open files allowed"),
    );
    report.figure(
        "all accepted after",
        format_args!("{:.2} s", took.as_secs_f64()),
    );
    if let (Some(before), Some(now)) = (before, resident_kib()) {
        let each = (now - before) / count as f64;
        report.figure(
            "memory per request, its client's included",
            format_args!("{each:.1} KiB"),
        );
    }
    report.must(
        accepted == count as f64,
        format_args!("{accepted} of {count} run or wait"),
    );
    drop(connections);
    let idle = idle_after(address, PATIENCE).await?;
    report.must(idle.is_some(), "nothing is left when the clients have gone");
    if let Some(idle) = idle {
        report.figure("gone after", format_args!("{:.2} s", idle.as_secs_f64()));
    }
    Ok(())
}
