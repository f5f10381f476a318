//! Readers of a byte per second among others: the others do not notice, and the slow ones are cut off.

use std::{net::SocketAddr, time::Duration};

use carat_server::Config;
use serde_json::json;
use tokio::{io::AsyncReadExt, time::Instant};

use super::{
    client::{Connection, idle_after, metric, read_stream, request},
    options::{Failure, Options},
    report::{Report, Times},
    server::Server,
    synthetic::Pace,
    wire::{chat, with},
};

const STEP: Duration = Duration::from_millis(50);
/// In place of a minute.
const WRITE_TIMEOUT: Duration = Duration::from_secs(3);
/// Until the buffers of a connection are full, and the server has noticed.
const PATIENCE: Duration = Duration::from_mins(1);
/// Of the others' p99 gap, over that without slow readers.
const SLOWER: f64 = 1.1;

pub(super) async fn run(options: &Options, report: &mut Report) -> Result<(), Failure> {
    let each = options.count(200, 5);
    let tokens = (options.time(10).as_millis() / STEP.as_millis()) as usize;
    let config = Config {
        write_timeout: WRITE_TIMEOUT,
        ..Config::default()
    };
    let pace = Pace {
        step: STEP,
        ..Pace::default()
    };
    let server = Server::synthetic(2 * each, 4096, pace, config, |_| {})?;
    let address = server.address;
    let alone = readers(address, each, tokens).await?;
    let slow: Vec<_> = (0..each)
        .map(|_| tokio::spawn(slow_reader(address)))
        .collect();
    let beside = readers(address, each, tokens).await?;
    let mut cut_off = Times::default();
    for reader in slow {
        if let Some(time) = reader.await?? {
            cut_off.add(time);
        }
    }
    report.figure("slow readers, others", format_args!("{each}, {each}"));
    report.figure("gap without slow readers", &alone);
    report.figure("gap beside them", &beside);
    report.figure("cut off after", &cut_off);
    report.must(
        alone.len() == each * (tokens - 1) && beside.len() == alone.len(),
        "the others got every token in a piece of its own",
    );
    let gone = cut_off.len();
    report.must(
        gone == each,
        format_args!("{gone} of {each} slow readers cut off"),
    );
    let counted = metric(address, "slow_clients_total", "").await?;
    report.must(
        counted == each as f64,
        format_args!("{counted} counted as slow"),
    );
    let idle = idle_after(address, Duration::from_secs(10)).await?;
    report.must(idle.is_some(), "their slots are free");
    report.at_most(
        "others' p99 gap beside slow readers",
        beside.percentile(0.99),
        alone.percentile(0.99) * SLOWER,
        "ms",
    );
    Ok(())
}

async fn readers(address: SocketAddr, count: usize, tokens: usize) -> Result<Times, Failure> {
    let body: &'static str = chat("Hello!", tokens, true).to_string().leak();
    let readers: Vec<_> = (0..count)
        .map(|_| tokio::spawn(read_stream(address, body)))
        .collect();
    let mut gaps = Times::default();
    for reader in readers {
        gaps.append(reader.await??.gaps);
    }
    Ok(gaps)
}

/// Time for which the server put up with it; `None` if it did to the end.
async fn slow_reader(address: SocketAddr) -> Result<Option<Duration>, Failure> {
    // Large events, so that what the system takes in for the reader is soon full.
    let more = json!({"logprobs": true, "top_logprobs": 20});
    let body = with(chat("Hello!", 4000, true), &more).to_string();
    let mut connection = Connection::narrow(address).await?;
    let asked = request("POST", "/v1/chat/completions", &body);
    connection.send(&asked).await?;
    let begun = Instant::now();
    while begun.elapsed() < PATIENCE {
        let mut byte = [0; 1];
        match connection.stream.read(&mut byte).await {
            Ok(1) => {}
            Ok(_) | Err(_) => return Ok(Some(begun.elapsed())),
        }
        tokio::time::sleep(Duration::from_secs(1)).await;
        // What has arrived can still be read after a connection is lost; that it is lost shows when there is something to send.
        if connection.stream.try_write(b" ").is_err() {
            return Ok(Some(begun.elapsed()));
        }
    }
    Ok(None)
}
