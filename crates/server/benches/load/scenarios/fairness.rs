//! One who asks much and one who asks little: the second is served as if the first were not there.
//!
//! With a slot for everybody that is so. With fewer slots a short request waits for one to come free, since nobody who runs is
//! stopped; then it is next, and the figure says how long that takes.

use std::{net::SocketAddr, time::Duration};

use carat_server::{Config, Lanes};
use serde_json::json;
use tokio::time::{Instant, interval};

use super::{
    client::read_stream,
    options::{Failure, Options},
    report::{Report, Times},
    server::Server,
    synthetic::Pace,
    wire::{chat, with},
};

const STEP: Duration = Duration::from_millis(10);
const SLOTS_FOR_ALL: usize = 64;
const FEW_SLOTS: usize = 8;
const LONG_TOKENS: usize = 200;
/// Of the time to the first token beside the others, over that alone.
const SLOWER: f64 = 3.0;

pub(super) async fn run(options: &Options, report: &mut Report) -> Result<(), Failure> {
    let long = options.count(50, 4);
    let time = options.time(10);
    let server = |slots| {
        let config = Config {
            lanes: Lanes::User,
            ..Config::default()
        };
        let pace = Pace {
            step: STEP,
            row: Duration::from_micros(20),
        };
        Server::synthetic(slots, 1024, pace, config, |engine| {
            engine.max_unfinished = 4 * SLOTS_FOR_ALL;
        })
    };
    let roomy = server(SLOTS_FOR_ALL)?;
    let alone = short(roomy.address, time).await?;
    let beside = beside(roomy.address, long, time).await?;
    drop(roomy);
    report.figure("first token alone", &alone);
    report.figure(
        format_args!("beside {long} long requests, {SLOTS_FOR_ALL} slots"),
        &beside,
    );
    report.at_most(
        "p95 beside others",
        beside.percentile(0.95),
        alone.percentile(0.95) * SLOWER,
        "ms",
    );
    let tight = server(FEW_SLOTS.min(long / 2).max(1))?;
    let waited = self::beside(tight.address, long, time).await?;
    report.figure(
        format_args!("beside {long} long requests, fewer slots"),
        &waited,
    );
    // One long request is in front of it, the one that holds the slot; two if that has just begun late on a busy machine.
    let longest = STEP.as_secs_f64() * 1e3 * LONG_TOKENS as f64;
    report.at_most(
        "p95 with fewer slots: the rest of one long request",
        waited.percentile(0.95),
        longest * 1.1,
        "ms",
    );
    Ok(())
}

/// One short request every second, and the time to each one's first token.
async fn short(address: SocketAddr, time: Duration) -> Result<Times, Failure> {
    let body: &'static str = with(chat("Hello!", 4, true), &json!({"user": "brief"}))
        .to_string()
        .leak();
    let begun = Instant::now();
    let mut seconds = interval(Duration::from_secs(1));
    let mut asked = Vec::new();
    while begun.elapsed() < time {
        seconds.tick().await;
        asked.push(tokio::spawn(read_stream(address, body)));
    }
    let mut firsts = Times::default();
    for one in asked {
        let streamed = one.await??;
        if !streamed.whole {
            return Err(format!("a short request got status {}", streamed.status).into());
        }
        firsts.add(streamed.first);
    }
    Ok(firsts)
}

/// The same while another lane keeps so many long requests unfinished.
async fn beside(address: SocketAddr, long: usize, time: Duration) -> Result<Times, Failure> {
    let body: &'static str = with(chat("Hello!", LONG_TOKENS, true), &json!({"user": "busy"}))
        .to_string()
        .leak();
    let others: Vec<_> = (0..long)
        .map(|_| {
            tokio::spawn(async move {
                loop {
                    // Ends with the task.
                    if read_stream(address, body).await.is_err() {
                        return;
                    }
                }
            })
        })
        .collect();
    // Until all of them are there.
    tokio::time::sleep(STEP * 20).await;
    let firsts = short(address, time).await;
    for other in others {
        other.abort();
    }
    firsts
}
