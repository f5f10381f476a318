//! A thousand streams at 20 tokens per second: even gaps, little memory, no errors.

use std::time::Duration;

use carat_server::Config;
use tokio::time::Instant;

use super::{
    client::{metric, read_stream},
    host::Hosted,
    options::{Failure, Options},
    report::{Report, Times},
    server::Server,
    synthetic::Pace,
    wire::chat,
};

const STEP: Duration = Duration::from_millis(50);
/// The largest gap at p99, in steps.
const STRETCH: f64 = 1.6;
const KIB_PER_STREAM: f64 = 25.0;

/// Streams, and the tokens of each.
fn counts(options: &Options) -> (usize, usize) {
    let tokens = (options.time(10).as_millis() / STEP.as_millis()).max(2) as usize;
    (options.count(1000, 10), tokens)
}

pub(super) fn server(options: &Options) -> Result<Server, Failure> {
    let (streams, tokens) = counts(options);
    let pace = Pace {
        step: STEP,
        ..Pace::default()
    };
    Server::synthetic(streams, tokens + 256, pace, Config::default(), |_| {})
}

pub(super) async fn run(options: &Options, report: &mut Report) -> Result<(), Failure> {
    let (streams, tokens) = counts(options);
    let server = Hosted::new("held", options)?;
    let address = server.address;
    // One before, so that what is made once is not counted with the streams.
    let warm = chat("Hello!", 2, true).to_string();
    read_stream(address, &warm).await?;
    let before = server.resident_kib();
    let body: &'static str = chat("Hello!", tokens, true).to_string().leak();
    let readers: Vec<_> = (0..streams)
        .map(|_| tokio::spawn(read_stream(address, body)))
        .collect();
    // Memory is that of all of them at once.
    let mut max_running = 0.0_f64;
    let mut max_kib = before;
    let mut all_begun = None;
    while readers.iter().any(|reader| !reader.is_finished()) {
        tokio::time::sleep(Duration::from_millis(250)).await;
        let running = metric(address, "num_requests_running", "").await?;
        if running >= max_running {
            max_running = running;
            max_kib = server.resident_kib().or(max_kib);
            if running >= streams as f64 {
                all_begun.get_or_insert_with(|| Instant::now() + STEP);
            }
        }
    }
    let (mut gaps, mut held) = (Times::default(), Times::default());
    let (mut whole, mut firsts) = (0, Times::default());
    for reader in readers {
        if let Ok(streamed) = reader.await? {
            whole += usize::from(streamed.status == 200 && streamed.whole && !streamed.told);
            firsts.add(streamed.first);
            let is_held =
                |place: usize| all_begun.is_some_and(|b| streamed.gap_ends[place] > b + STEP);
            held.append(streamed.gaps.kept(is_held));
            gaps.append(streamed.gaps);
        }
    }
    report.figure("streams, tokens each", format_args!("{streams}, {tokens}"));
    report.figure("most at once", max_running);
    report.figure("time to the first token", firsts);
    report.figure("gap, while they arrive too", &gaps);
    report.figure("gap, once all are there", &held);
    report.must(
        whole == streams,
        format_args!("{whole} of {streams} streams without an error"),
    );
    let limit = STEP.as_secs_f64() * 1e3 * STRETCH;
    report.at_most("p99 gap", held.percentile(0.99), limit, "ms");
    if let (Some(before), Some(most)) = (before, max_kib) {
        let each = (most - before) / streams as f64;
        report.at_most("memory per stream", each, KIB_PER_STREAM, "KiB");
    }
    report.must(server.end()?, "nothing in the server panicked");
    Ok(())
}
