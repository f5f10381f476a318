//! Requests that are wrong in every way a generator knows: refused in a moment, and nothing breaks.

use std::{collections::BTreeMap, net::SocketAddr, time::Duration};

use carat_server::Config;
use tokio::{
    io::AsyncWriteExt,
    time::{Instant, timeout},
};

use super::{
    broken::{Broken, broken},
    client::{Connection, ask, idle_after},
    host::Hosted,
    options::{Failure, Options},
    random::Random,
    report::{Report, Times},
    server::Server,
    synthetic::Pace,
    wire::chat,
};

const CLIENTS: usize = 4;
/// Of the full count, where nobody says otherwise.
const USUAL_SHARE: f64 = 0.1;
/// Longer than any limit of the server that such a request runs into.
const HUNG: Duration = Duration::from_mins(1);
/// After which an idle server has tidied up.
const REST: Duration = Duration::from_secs(3);
const REFUSED_MILLIS: f64 = 5.0;
const GROWTH_MIB: f64 = 10.0;

/// Results of some requests.
#[derive(Default)]
struct Tally {
    statuses: BTreeMap<u16, usize>,
    closed: usize,
    refused: BTreeMap<&'static str, Times>,
    wrong: Vec<String>,
}

pub(super) fn server() -> Result<Server, Failure> {
    let config = Config {
        max_body: 1 << 20,
        ..Config::default()
    };
    Server::synthetic(8, 512, Pace::default(), config, |_| {})
}

pub(super) async fn run(options: &Options, report: &mut Report) -> Result<(), Failure> {
    let full = 100_000.0 * options.scale.unwrap_or(USUAL_SHARE);
    let each = (full / CLIENTS as f64).ceil() as usize;
    let server = Hosted::new("malformed", options)?;
    let address = server.address;
    // Caches and the allocator's pools fill up first.
    client(address, 1000, (each / 5).max(20)).await?;
    tokio::time::sleep(REST).await;
    let before = server.resident_kib();
    let clients: Vec<_> = (0..CLIENTS)
        .map(|n| tokio::spawn(client(address, n as u64, each)))
        .collect();
    let mut tally = Tally::default();
    for one in clients {
        let one = one.await??;
        for (status, count) in one.statuses {
            *tally.statuses.entry(status).or_default() += count;
        }
        tally.closed += one.closed;
        for (kind, times) in one.refused {
            tally.refused.entry(kind).or_default().append(times);
        }
        tally.wrong.extend(one.wrong);
    }
    tokio::time::sleep(REST).await;
    let grown = server
        .resident_kib()
        .zip(before)
        .map(|(after, before)| (after - before) / 1024.0);
    report.figure("requests", each * CLIENTS);
    report.figure("statuses", format_args!("{:?}", tally.statuses));
    report.figure("hung up on without one", tally.closed);
    let mut refused = Times::default();
    for (kind, times) in tally.refused {
        report.figure(format_args!("refused after, {kind}"), &times);
        refused.append(times);
    }
    report.figure("refused after", &refused);
    let count = tally.wrong.len();
    report.must(count == 0, format_args!("{count} wrong answers"));
    for wrong in tally.wrong.iter().take(10) {
        report.figure("wrong", wrong);
    }
    let body = chat("Hello!", 4, false).to_string();
    let after = ask(address, "POST", "/v1/chat/completions", &body).await?;
    let health = ask(address, "GET", "/health", "").await?;
    report.must(
        after.head.status == 200 && health.head.status == 200,
        "the server answers as before",
    );
    let idle = idle_after(address, Duration::from_secs(10)).await?;
    report.must(idle.is_some(), "nothing of them runs on");
    report.at_most(
        "p99 of refusals",
        refused.percentile(0.99),
        REFUSED_MILLIS,
        "ms",
    );
    if let Some(grown) = grown {
        report.at_most("memory grown by", grown, GROWTH_MIB, "MiB");
    }
    report.must(server.end()?, "nothing in the server panicked");
    Ok(())
}

async fn client(address: SocketAddr, seed: u64, count: usize) -> Result<Tally, Failure> {
    let mut random = Random(seed);
    let mut tally = Tally::default();
    let mut kept: Option<Connection> = None;
    for _ in 0..count {
        // Elsewhere: the largest take longer to make than to refuse, and the clients would seem to wait.
        let made = tokio::task::spawn_blocking(move || (broken(&mut random), random));
        let broken;
        (broken, random) = made.await?;
        let connection = match kept.take() {
            // One that is to break off has a connection of its own.
            Some(connection) if !broken.breaks_off => connection,
            _ => Connection::open(address).await?,
        };
        let sent = Instant::now();
        match timeout(HUNG, exchange(connection, &broken)).await {
            Err(_) => tally.wrong.push(format!("hung: {}", broken.shown())),
            Ok((None, _)) => {
                tally.closed += 1;
                if !broken.may_close {
                    tally.wrong.push(format!("hung up on: {}", broken.shown()));
                }
            }
            Ok((Some(status), connection)) => {
                *tally.statuses.entry(status).or_default() += 1;
                // 501 is wanted where it is said that a route is not built.
                if status >= 500 && status != 501 {
                    tally.wrong.push(format!("{status}: {}", broken.shown()));
                }
                if status >= 400 {
                    let times = tally.refused.entry(broken.kind).or_default();
                    times.add(sent.elapsed());
                }
                kept = connection;
            }
        }
    }
    Ok(tally)
}

/// The status, if one comes, and the connection if it can be used again.
async fn exchange(
    mut connection: Connection,
    broken: &Broken,
) -> (Option<u16>, Option<Connection>) {
    // A server that has read enough hangs up while the rest is sent; what it said can still be read.
    let _ = connection.send(&broken.bytes).await;
    if broken.breaks_off {
        let _ = connection.stream.shutdown().await;
    }
    let Ok(Some(head)) = connection.head().await else {
        return (None, None);
    };
    let read = connection.body().await;
    let closes = head.header("connection") == Some("close");
    let again = !broken.breaks_off && !broken.may_close && !closes && read.is_ok();
    (Some(head.status), again.then_some(connection))
}
