//! Times of whole steps on a card, 64 sequences decoding side by side, by how they are sampled: what masks, truncation of the
//! whole vocabulary and log-probabilities add to a step. `cargo bench -p carat-cuda --bench steps`. The model is tiny but for its vocabulary, so that the rest does not hide it.
//!
//! Steps go as the engine's do: a batch is submitted ahead, fed by the one before it, where the executor says that it can be.

#[path = "../tests/harness/mod.rs"]
#[allow(dead_code, reason = "cases are for the tests")]
mod harness;

use std::{process::ExitCode, sync::Arc, time::Instant};

use carat_cuda::CudaBackend;
use carat_gguf::QuantType;
use carat_model::{
    TokenId,
    backend::{
        Backend, BackendError, Batch, Batching, CompileOptions, Draw, Executor, Feed, Outputs,
        RowOutput, Run, Ticket,
    },
    gemma4,
    kv::{PAGE_TOKENS, PageId, PerGroup},
    sampling::{Sampling, TokenMask},
};
use carat_testkit::tiny::{Tiny, Variant};

const STREAMS: usize = 64;
const VOCAB: usize = 262_144;
const STEPS: usize = 300;
/// Steps before the clock starts: graphs are captured in them.
const WARM: usize = 20;

#[expect(clippy::print_stderr, reason = "why there is no table")]
fn main() -> ExitCode {
    let (problem, fails) = match harness::open(|_| ()).map(|card| table(&card)) {
        Ok(Ok(())) => return ExitCode::SUCCESS,
        Ok(Err(problem)) => (problem, true),
        Err(problem) => (format!("no CUDA: {problem}"), harness::required()),
    };
    eprintln!("{problem}");
    if fails {
        ExitCode::FAILURE
    } else {
        ExitCode::SUCCESS
    }
}

#[expect(clippy::print_stdout, reason = "a table of times")]
fn table(card: &CudaBackend) -> Result<(), String> {
    let mut tiny = Tiny::new(Variant::E2b, QuantType::Q8_0);
    tiny.dimensions.vocab = VOCAB;
    tiny.dimensions.context = WARM + STEPS;
    let model = tiny.model();
    let pages = STREAMS * (WARM + STEPS).div_ceil(PAGE_TOKENS);
    let options = CompileOptions {
        pages: PerGroup {
            full: pages,
            sliding: pages,
        },
        chunk_pages: 0,
        host_pages: PerGroup::default(),
        kv: PerGroup::default(),
        max_rows: STREAMS,
        max_sampled: STREAMS,
        probe: false,
        batching: Batching::Fast,
    };
    let plan = gemma4::plan(&model);
    let compiled = card.compile(&plan, Arc::clone(&model.weights), &options);
    let mut executor = compiled.map_err(|error| error.to_string())?;
    let truncated = |top_k, top_p| Sampling {
        top_k,
        top_p,
        ..Sampling::default()
    };
    let mask = TokenMask::of(VOCAB, (0..VOCAB as TokenId).filter(|t| t % 5 < 2));
    let (token, logprobs) = (RowOutput::Token, RowOutput::Logprobs { top: 5 });
    let cases = [
        ("greedy", Sampling::greedy(), None, token),
        ("greedy, masks", Sampling::greedy(), Some(&mask), token),
        (
            "greedy, 5 log-probabilities",
            Sampling::greedy(),
            None,
            logprobs,
        ),
        ("top-k 64, top-p 0.95", Sampling::default(), None, token),
        (
            "top-k 64, top-p 0.95, masks",
            Sampling::default(),
            Some(&mask),
            token,
        ),
        ("top-p 0.9", truncated(0, 0.9), None, token),
        ("top-p 0.9, masks", truncated(0, 0.9), Some(&mask), token),
        ("whole vocabulary", truncated(0, 1.0), None, token),
    ];
    for (name, sampling, mask, output) in cases {
        let draw = Draw {
            sampling: &sampling,
            history: &[],
            mask,
            output,
        };
        let taken = steps(executor.as_mut(), &draw).map_err(|error| error.to_string())?;
        println!("step of {STREAMS} sequences, {name}: {taken:.1} us");
    }
    Ok(())
}

/// Microseconds per step, once everything is warm.
fn steps(executor: &mut dyn Executor, draw: &Draw<'_>) -> Result<f64, BackendError> {
    let pages_each = (WARM + STEPS).div_ceil(PAGE_TOKENS);
    let pages: Vec<Vec<PageId>> = (0..STREAMS)
        .map(|s| {
            (0..pages_each)
                .map(|i| PageId((i * STREAMS + s) as u32))
                .collect()
        })
        .collect();
    let draws = vec![*draw; STREAMS];
    let mut outputs = Outputs::default();
    let mut before: Option<Ticket> = None;
    let mut started = Instant::now();
    for position in 0..WARM + STEPS {
        if position == WARM {
            started = Instant::now();
        }
        let run = |s: usize| Run {
            rows: s..s + 1,
            position,
            pages: PerGroup {
                full: &pages[s],
                sliding: &pages[s],
            },
            sampled: 1,
            visible_end: None,
            table: None,
        };
        let runs: Vec<Run<'_>> = (0..STREAMS).map(run).collect();
        // What the host draws is there before anything can be fed by it.
        if before
            .as_ref()
            .is_some_and(|ticket| !executor.lookahead(ticket))
        {
            let ticket = before.take().expect("looked at above");
            executor.collect(ticket, &mut outputs)?;
        }
        let feed = |s: usize| match (&before, outputs.rows.get(s)) {
            (Some(_), _) => Feed::Sampled(s as u32),
            (None, Some(row)) => Feed::Token(row.token),
            (None, None) => Feed::Token(30 + 17 * s as TokenId),
        };
        let feeds: Vec<Feed<'_>> = (0..STREAMS).map(feed).collect();
        let batch = Batch {
            feeds: &feeds,
            runs: &runs,
        };
        let ticket = executor.submit(&batch)?;
        if let Some(before) = before.take() {
            executor.collect(before, &mut outputs)?;
        }
        executor.draw(&ticket, &draws)?;
        before = Some(ticket);
    }
    if let Some(ticket) = before {
        executor.collect(ticket, &mut outputs)?;
    }
    Ok(started.elapsed().as_secs_f64() * 1e6 / STEPS as f64)
}
