//! A hundred thousand tokens: what is captured once must give the same bits each time it is replayed, and memory must not
//! grow.
//!
//! A round decodes one to four sequences side by side, each from its start, in batches that are fed ahead as the engine feeds
//! them. All rounds must come to what the first did, and to what launches without graphs do. `SOAK_TOKENS` asks for fewer
//! tokens, for the emulator.

mod harness;

use std::{
    hash::{DefaultHasher, Hash, Hasher},
    sync::Arc,
};

use carat_cuda::{CudaBackend, Graphs};
use carat_gguf::QuantType;
use carat_model::{
    TokenId,
    backend::{
        Backend, BackendError, Batch, Batching, CompileOptions, Draw, Executor, Feed, Outputs,
        RowOutput, Run, Ticket,
    },
    gemma4,
    kv::{PAGE_TOKENS, PageId, PerGroup},
    sampling::Sampling,
};
use carat_testkit::tiny::{Tiny, Variant};
use libtest_mimic::{Failed, Trial};

const TOKENS: usize = 100_000;
const ROUNDS: usize = 20;
const MAX_SEQUENCES: usize = 4;
/// Sequences of a round: one alone, then two together, and so on.
const SEQUENCES: usize = MAX_SEQUENCES * (MAX_SEQUENCES + 1) / 2;

fn main() {
    let captured = harness::open(|config| config.graphs = Graphs::On);
    let eager = harness::open(|config| config.graphs = Graphs::Off);
    let opened = captured.and_then(|captured| Ok((captured, eager?)));
    let cards = opened.as_ref().ok().cloned();
    let ignored = cards.is_none();
    let trial = Trial::test("a hundred thousand tokens", move || {
        let (captured, eager) = cards.ok_or("no card")?;
        soak(&captured, &eager, tokens() / ROUNDS / SEQUENCES).map_err(Failed::from)
    });
    harness::run(opened.map(drop), vec![trial.with_ignored_flag(ignored)]);
}

#[expect(
    clippy::disallowed_methods,
    reason = "settings of the test harness, not of the program"
)]
fn tokens() -> usize {
    let given = std::env::var("SOAK_TOKENS").ok();
    given.and_then(|n| n.parse().ok()).unwrap_or(TOKENS)
}

/// Bytes held, by purpose, and bytes free.
type Held = (Vec<(&'static str, u64)>, u64);

fn held(card: &CudaBackend) -> Result<Held, String> {
    let memory = card.memory().map_err(|e| e.to_string())?;
    Ok((card.held_bytes().collect(), memory.free_bytes))
}

fn soak(captured: &CudaBackend, eager: &CudaBackend, length: usize) -> Result<(), String> {
    let expected = {
        let mut executor = compile(eager, length)?;
        round(executor.as_mut(), length).map_err(|e| e.to_string())?
    };
    let mut executor = compile(captured, length)?;
    let mut after_first = None;
    for number in 0..ROUNDS {
        let found = round(executor.as_mut(), length).map_err(|e| e.to_string())?;
        if found != expected {
            return Err(format!(
                "round {number} came to {found:x?}, launches without graphs to {expected:x?}"
            ));
        }
        let now = held(captured)?;
        let first = after_first.get_or_insert_with(|| now.clone());
        if *first != now {
            return Err(format!(
                "memory after round {number} is {now:?}, after the first it was {first:?}"
            ));
        }
    }
    Ok(())
}

fn compile(card: &CudaBackend, length: usize) -> Result<Box<dyn Executor>, String> {
    let mut tiny = Tiny::new(Variant::E4b, QuantType::Q8_0);
    tiny.dimensions.context = length.max(tiny.dimensions.context);
    let model = tiny.model();
    let pages = MAX_SEQUENCES * length.div_ceil(PAGE_TOKENS);
    let options = CompileOptions {
        pages: PerGroup {
            full: pages,
            sliding: pages,
        },
        chunk_pages: 0,
        host_pages: PerGroup::default(),
        kv: PerGroup::default(),
        max_rows: MAX_SEQUENCES,
        max_sampled: MAX_SEQUENCES,
        probe: false,
        batching: Batching::Fast,
    };
    card.compile(&gemma4::plan(&model), Arc::clone(&model.weights), &options)
        .map_err(|e| e.to_string())
}

/// A checksum of all tokens and of the last logits, for each number of sequences.
fn round(executor: &mut dyn Executor, length: usize) -> Result<[u64; MAX_SEQUENCES], BackendError> {
    let mut sums = [0; MAX_SEQUENCES];
    for (i, sum) in sums.iter_mut().enumerate() {
        *sum = together(executor, i + 1, length)?;
    }
    Ok(sums)
}

fn together(
    executor: &mut dyn Executor,
    sequences: usize,
    length: usize,
) -> Result<u64, BackendError> {
    let starts: Vec<TokenId> = (0..sequences).map(|s| 30 + 17 * s as TokenId).collect();
    let settings: Vec<Sampling> = (0..sequences)
        .map(|s| match s {
            0 => Sampling::greedy(),
            _ => Sampling {
                seed: s as u64,
                ..Sampling::default()
            },
        })
        .collect();
    let pages_each = length.div_ceil(PAGE_TOKENS);
    let pages: Vec<Vec<PageId>> = (0..sequences)
        .map(|s| {
            (0..pages_each)
                .map(|i| PageId((i * MAX_SEQUENCES + s) as u32))
                .collect()
        })
        .collect();
    let mut sum = DefaultHasher::new();
    let mut outputs = Outputs::default();
    let mut collect = |executor: &mut dyn Executor, ticket: Ticket| {
        executor.collect(ticket, &mut outputs)?;
        for row in &outputs.rows {
            row.token.hash(&mut sum);
            row.logits.iter().for_each(|x| x.to_bits().hash(&mut sum));
        }
        Ok::<(), BackendError>(())
    };
    let mut before: Option<Ticket> = None;
    for position in 0..length {
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
        let draw = |s: usize| Draw {
            sampling: &settings[s],
            history: &[],
            mask: None,
            output: if position + 1 == length {
                RowOutput::Logits
            } else {
                RowOutput::Token
            },
        };
        // All but the first are those that the batch before draws.
        let feed = |s: usize| match before {
            None => Feed::Token(starts[s]),
            Some(_) => Feed::Sampled(s as u32),
        };
        let runs: Vec<Run<'_>> = (0..sequences).map(run).collect();
        let feeds: Vec<Feed<'_>> = (0..sequences).map(feed).collect();
        let ticket = executor.submit(&Batch {
            feeds: &feeds,
            runs: &runs,
        })?;
        if let Some(before) = before.take() {
            collect(executor, before)?;
        }
        let draws: Vec<Draw<'_>> = (0..sequences).map(draw).collect();
        executor.draw(&ticket, &draws)?;
        before = Some(ticket);
    }
    if let Some(ticket) = before {
        collect(executor, ticket)?;
    }
    Ok(sum.finish())
}
