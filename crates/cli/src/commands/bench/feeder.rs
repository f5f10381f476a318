//! Some sequences, fed straight to the executor.

use std::ops::Range;

use anyhow::Result;
use carat_model::{
    TokenId,
    backend::{Batch, Draw, Executor, LaunchTime, Outputs, RowOutput, Run, token_feeds},
    kv::{PageId, PerGroup, pages_of},
    sampling::Sampling,
};

pub(super) struct Feeder<'a> {
    executor: &'a mut dyn Executor,
    sequences: Vec<Sequence>,
    outputs: Outputs,
}

struct Sequence {
    pages: PerGroup<Vec<PageId>>,
    history: Vec<TokenId>,
}

impl<'a> Feeder<'a> {
    /// Sequences of at most this many tokens each. Of the pages that each holds, those of sliding layers are used in turns.
    pub(super) fn new(
        executor: &'a mut dyn Executor,
        tokens: usize,
        sequences: usize,
        held: PerGroup<usize>,
    ) -> Feeder<'a> {
        let table = |sequence: u32, held: usize| {
            let held = held as u32;
            let turns = (0..pages_of(tokens) as u32).map(move |page| page % held);
            turns.map(|turn| PageId(sequence * held + turn)).collect()
        };
        let sequence = |i: u32| Sequence {
            pages: PerGroup {
                full: table(i, held.full),
                sliding: table(i, held.sliding),
            },
            history: Vec::new(),
        };
        Feeder {
            executor,
            sequences: (0..sequences as u32).map(sequence).collect(),
            outputs: Outputs::default(),
        }
    }

    /// Forgets all tokens from a position on. Keys and values need not be cleared: each is written before it is read.
    pub(super) fn rewind(&mut self, position: usize) {
        for sequence in &mut self.sequences {
            sequence.history.truncate(position);
        }
    }

    /// A chunk of one sequence's prompt.
    pub(super) fn feed(
        &mut self,
        sequence: usize,
        tokens: &[TokenId],
        sampled: usize,
    ) -> Result<()> {
        self.run(sequence..sequence + 1, tokens, sampled, compute)
    }

    /// A token of each sequence, all of them sampled.
    pub(super) fn generate(&mut self, tokens: &[TokenId]) -> Result<()> {
        self.run(0..self.sequences.len(), tokens, 1, compute)
    }

    /// The time of each launch that feeding each sequence its share of these would take, the last of each share sampled; nothing
    /// is fed.
    pub(super) fn profile(&mut self, tokens: &[TokenId]) -> Result<Option<Vec<LaunchTime>>> {
        let position = self.sequences[0].history.len();
        let all = 0..self.sequences.len();
        let times = self.run(all, tokens, 1, |executor, _, batch| {
            let sampling = Sampling::greedy();
            Ok(executor.profile(batch, &draws(&sampling, batch))?)
        });
        self.rewind(position);
        times
    }

    /// Runs a batch in which each of some sequences has an equal share of the tokens.
    fn run<R>(
        &mut self,
        sequences: Range<usize>,
        tokens: &[TokenId],
        sampled: usize,
        work: impl FnOnce(&mut dyn Executor, &mut Outputs, &Batch<'_>) -> Result<R>,
    ) -> Result<R> {
        let rows = tokens.len() / sequences.len();
        let feeds = token_feeds(tokens);
        let mut runs = Vec::new();
        for (i, (sequence, tokens)) in self.sequences[sequences]
            .iter_mut()
            .zip(tokens.chunks(rows))
            .enumerate()
        {
            let position = sequence.history.len();
            sequence.history.extend_from_slice(tokens);
            runs.push(Run {
                rows: i * rows..(i + 1) * rows,
                position,
                pages: PerGroup {
                    full: sequence.pages.full.as_slice(),
                    sliding: sequence.pages.sliding.as_slice(),
                },
                sampled,
                visible_end: None,
                table: None,
            });
        }
        let batch = Batch {
            feeds: &feeds,
            runs: &runs,
        };
        work(self.executor, &mut self.outputs, &batch)
    }
}

fn compute(executor: &mut dyn Executor, outputs: &mut Outputs, batch: &Batch<'_>) -> Result<()> {
    let sampling = Sampling::greedy();
    let ticket = executor.submit(batch)?;
    let draws = draws(&sampling, batch);
    if !draws.is_empty() {
        executor.draw(&ticket, &draws)?;
    }
    Ok(executor.collect(ticket, outputs)?)
}

/// The likeliest token of every sampled row.
fn draws<'a>(sampling: &'a Sampling, batch: &Batch<'_>) -> Vec<Draw<'a>> {
    let draw = Draw {
        output: RowOutput::Token,
        ..Draw::logits(sampling)
    };
    vec![draw; batch.sampled_count()]
}
