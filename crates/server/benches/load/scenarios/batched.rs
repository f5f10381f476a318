//! The demo model for 32 at once: as fast over HTTP as the engine by itself.

use std::time::Duration;

use carat_engine::{Event, chat::Conversation, chat::Generation};
use carat_model::sampling::Sampling;
use carat_text::Message;
use tokio::time::Instant;

use super::{
    client::read_stream,
    options::{Failure, Options},
    report::{Report, Times},
    server::Server,
    wire::chat,
};

const THREADS: usize = 2;
/// Of the engine's own tokens per second.
const SHARE: f64 = 90.0;
/// Of the median gap.
const UNEVEN: f64 = 3.0;
const PROMPT: &str = "Tell me a story about a fox.";

pub(super) async fn run(options: &Options, report: &mut Report) -> Result<(), Failure> {
    let streams = options.count(32, 4);
    let tokens = options.count(256, 16);
    let rounds = 3;
    let server = Server::demo(streams, THREADS, |engine| {
        engine.max_unfinished = 2 * streams;
    })?;
    let (mut engine, mut http) = (Duration::MAX, Duration::MAX);
    let mut gaps = Times::default();
    let mut whole = 0;
    // In turns, and the best of each: what else runs here slows both.
    for _ in 0..rounds {
        engine = engine.min(by_itself(&server, streams, tokens)?);
        let body: &'static str = chat(PROMPT, tokens, true).to_string().leak();
        let begun = Instant::now();
        let readers: Vec<_> = (0..streams)
            .map(|_| tokio::spawn(read_stream(server.address, body)))
            .collect();
        for reader in readers {
            let streamed = reader.await??;
            whole += usize::from(streamed.whole && !streamed.told);
            gaps.append(streamed.gaps);
        }
        http = http.min(begun.elapsed());
    }
    let rate = |time: Duration| (streams * tokens) as f64 / time.as_secs_f64();
    report.figure("streams, tokens each", format_args!("{streams}, {tokens}"));
    report.figure(
        "engine by itself",
        format_args!("{:.0} tokens/s", rate(engine)),
    );
    report.figure("over HTTP", format_args!("{:.0} tokens/s", rate(http)));
    report.figure("gap", &gaps);
    report.must(whole == rounds * streams, "every stream came to its end");
    report.at_least(
        "share of the engine's own rate",
        rate(http) / rate(engine) * 100.0,
        SHARE,
        "%",
    );
    report.at_most(
        "p99 gap over p50",
        gaps.percentile(0.99) / gaps.percentile(0.5).max(1e-3),
        UNEVEN,
        "x",
    );
    Ok(())
}

/// The same requests without HTTP.
fn by_itself(server: &Server, streams: usize, tokens: usize) -> Result<Duration, Failure> {
    let conversation = Conversation {
        messages: vec![Message::user(PROMPT)],
        ..Conversation::default()
    };
    let generation = Generation {
        sampling: Sampling::greedy(),
        max_tokens: Some(tokens),
        ignore_eos: true,
        ..Generation::default()
    };
    let prompt = server.chat.prompt(&conversation)?;
    let begun = Instant::now();
    let mut under_way = Vec::new();
    for _ in 0..streams {
        let prepared = server
            .chat
            .prepare(prompt.clone(), &conversation, &generation);
        under_way.push(server.chat.engine().submit(prepared.request)?);
    }
    for stream in under_way {
        let mut generated = 0;
        for event in stream {
            generated += usize::from(matches!(event?, Event::Token { .. }));
        }
        if generated != tokens {
            return Err(format!("{generated} tokens of {tokens}").into());
        }
    }
    Ok(begun.elapsed())
}
