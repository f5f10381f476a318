//! Ten thousand requests that wait for a slot: all accepted, all gone when their clients go.

use std::time::Duration;

use carat_server::Config;
use tokio::time::Instant;

use super::{
    client::{Connection, idle_after, metric, request},
    host::Hosted,
    options::{Failure, Options},
    process::open_files_limit,
    report::Report,
    server::Server,
    synthetic::Pace,
    wire::chat,
};

/// Files of a process that are no connections.
const OTHER_FILES: usize = 200;
const PATIENCE: Duration = Duration::from_mins(2);

/// Requests: those wanted, and those that open files allow.
fn counts(options: &Options) -> (usize, usize) {
    let wanted = options.count(10_000, 50);
    let allowed = open_files_limit().saturating_sub(OTHER_FILES);
    (wanted, wanted.min(allowed))
}

pub(super) fn server(options: &Options) -> Result<Server, Failure> {
    let (_, count) = counts(options);
    let config = Config {
        max_connections: count + 16,
        ..Config::default()
    };
    let pace = Pace {
        step: Duration::from_millis(50),
        ..Pace::default()
    };
    Server::synthetic(4, 4096, pace, config, |engine| {
        engine.max_unfinished = count;
    })
}

pub(super) async fn run(options: &Options, report: &mut Report) -> Result<(), Failure> {
    let (wanted, count) = counts(options);
    let server = Hosted::new("queued", options)?;
    let address = server.address;
    let before = server.resident_kib();
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
        format_args!(
            "{count} of {wanted}, with {} open files allowed",
            open_files_limit()
        ),
    );
    report.figure(
        "all accepted after",
        format_args!("{:.2} s", took.as_secs_f64()),
    );
    if let (Some(before), Some(now)) = (before, server.resident_kib()) {
        let each = (now - before) / count as f64;
        report.figure("memory per request", format_args!("{each:.1} KiB"));
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
    report.must(server.end()?, "nothing in the server panicked");
    Ok(())
}
