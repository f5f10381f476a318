//! A long prompt among answers under way: their tokens keep coming.

use std::time::Duration;

use carat_server::Config;

use super::{
    client::{ask, read_stream},
    options::{Failure, Options},
    report::{Report, Times},
    server::Server,
    synthetic::Pace,
    wire::chat,
};

const DECODERS: usize = 8;
const PREFILL_ROWS: usize = 256;
const PROMPT_TOKENS: usize = 2000;
const STEP: Duration = Duration::from_millis(10);
const ROW: Duration = Duration::from_micros(100);

pub(super) async fn run(options: &Options, report: &mut Report) -> Result<(), Failure> {
    let joins = options.count(10, 2);
    let pace = Pace {
        step: STEP,
        row: ROW,
    };
    let server = Server::synthetic(DECODERS + 1, 4096, pace, Config::default(), |engine| {
        engine.prefill_rows = PREFILL_ROWS;
    })?;
    let address = server.address;
    let tokens = 50 * joins + 50;
    let body: &'static str = chat("Hello!", tokens, true).to_string().leak();
    let decoders: Vec<_> = (0..DECODERS)
        .map(|_| tokio::spawn(read_stream(address, body)))
        .collect();
    tokio::time::sleep(STEP * 20).await;
    let mut prompt_tokens = 0;
    for n in 0..joins {
        // Each begins differently, so that none continues from another.
        let text = format!("{n}{}", " fox".repeat(PROMPT_TOKENS));
        let body = chat(&text, 1, false).to_string();
        let answer = ask(address, "POST", "/v1/chat/completions", &body).await?;
        let usage = &answer.json()?["usage"]["prompt_tokens"];
        prompt_tokens = usage.as_u64().unwrap_or(0);
    }
    let mut gaps = Times::default();
    let mut whole = 0;
    for decoder in decoders {
        let streamed = decoder.await??;
        whole += usize::from(streamed.whole);
        gaps.append(streamed.gaps);
    }
    let joined = server.controls.joined_rows();
    report.figure("tokens of the long prompt", prompt_tokens);
    report.figure("gap of the decoders", &gaps);
    report.must(whole == DECODERS, "all decoders came to their end");
    report.must(
        prompt_tokens as usize >= PROMPT_TOKENS,
        "the prompt is as long as it should be",
    );
    report.must(
        joined > 0 && joined <= PREFILL_ROWS,
        format_args!("{joined} rows of a prompt beside decoders, at most {PREFILL_ROWS}"),
    );
    let chunk = STEP + ROW * PREFILL_ROWS as u32;
    let limit = (chunk + STEP).as_secs_f64() * 1e3;
    report.at_most(
        "p99 gap: a chunk and a step",
        gaps.percentile(0.99),
        limit,
        "ms",
    );
    Ok(())
}
