//! The demo model for 32 at once whose answers a schema holds: nearly as fast as free ones, because masks are computed beside the
//! forward pass.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use carat_engine::{ConstraintSource, Event, Request};
use carat_grammar::{Answer, Format, Grammars, Settings};
use carat_model::sampling::Sampling;
use carat_text::Specials;
use serde_json::json;

use super::{
    options::{Failure, Options},
    report::Report,
    server::Server,
};

const THREADS: usize = 2;
/// Of the tokens per second of free answers.
const SHARE: f64 = 90.0;

pub(super) fn run(options: &Options, report: &mut Report) -> Result<(), Failure> {
    let streams = options.count(32, 4);
    let tokens = options.count(256, 16);
    let server = Server::demo(streams, THREADS, |engine| {
        engine.max_unfinished = 2 * streams;
    })?;
    let tokenizer = server.chat.tokenizer();
    let ahead = Grammars::new(Arc::clone(tokenizer))?;
    let asked = Settings {
        masks_ahead: false,
        ..Settings::default()
    };
    let plain = Grammars::with(asked, Arc::clone(tokenizer))?;
    let sources = [None, Some(held_by(&plain)?), Some(held_by(&ahead)?)];
    let mut best = [Duration::MAX; 3];
    // In turns, and the best of each: what else runs here slows all.
    for _ in 0..5 {
        for (best, source) in best.iter_mut().zip(&sources) {
            *best = (*best).min(crowd(&server, source.as_ref(), streams, tokens)?);
        }
    }
    let [free, one_by_one, beside] =
        best.map(|time| (streams * tokens) as f64 / time.as_secs_f64());
    report.figure("streams, tokens each", format_args!("{streams}, {tokens}"));
    report.figure("free", format_args!("{free:.0} tokens/s"));
    report.figure("masks one by one", format_args!("{one_by_one:.0} tokens/s"));
    report.figure("masks beside", format_args!("{beside:.0} tokens/s"));
    for (name, meter) in [("one by one", plain.meter()), ("beside", ahead.meter())] {
        let count = meter.mask.counts().iter().sum::<u64>().max(1);
        let each = |total: Duration| total.as_secs_f64() * 1e6 / count as f64;
        report.figure(
            format_args!("a mask {name}"),
            format_args!(
                "{:.1} us to compute, {:.1} us waited for",
                each(meter.mask.total()),
                each(meter.mask_wait.total())
            ),
        );
    }
    report.at_least(
        "share of the rate of free answers",
        beside / free * 100.0,
        SHARE,
        "%",
    );
    Ok(())
}

/// Short strings: each character counts, so each mask walks through the vocabulary.
fn held_by(grammars: &Grammars) -> Result<ConstraintSource, Failure> {
    let answer = Answer {
        format: Some(Format::JsonSchema {
            schema: json!({"type": "array", "minItems": 300, "items": {"type": "string", "maxLength": 20}}),
            strict: true,
        }),
        ..Answer::default()
    };
    let compiled = grammars.compile(&answer)?;
    Ok(compiled.ok_or("a schema constrains nothing")?.source)
}

fn crowd(
    server: &Server,
    source: Option<&ConstraintSource>,
    streams: usize,
    tokens: usize,
) -> Result<Duration, Failure> {
    let prompt = server
        .chat
        .tokenizer()
        .encode("Once upon a time", Specials::Ignore);
    let begun = Instant::now();
    let mut under_way = Vec::new();
    for seed in 0..streams {
        let request = Request {
            max_tokens: Some(tokens),
            sampling: Sampling {
                temperature: 2.0,
                seed: seed as u64,
                ..Sampling::default()
            },
            constraint: source.cloned(),
            ..Request::new(prompt.clone())
        };
        under_way.push(server.chat.engine().submit(request)?);
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
