//! One sequence, fed straight to the executor.

use std::time::Duration;

use anyhow::Result;
use carat_model::{
    TokenId,
    backend::{Batch, Executor, Outputs, PAGE_TOKENS, PageId, PerGroup, RowOutput, Run},
    sampling::Sampling,
};

pub(super) struct Feeder<'a> {
    executor: &'a mut dyn Executor,
    pages: Vec<PageId>,
    history: Vec<TokenId>,
    outputs: Outputs,
}

impl<'a> Feeder<'a> {
    /// A sequence of at most this many tokens.
    pub(super) fn new(executor: &'a mut dyn Executor, tokens: usize) -> Feeder<'a> {
        Feeder {
            executor,
            pages: (0..tokens.div_ceil(PAGE_TOKENS) as u32)
                .map(PageId)
                .collect(),
            history: Vec::new(),
            outputs: Outputs::default(),
        }
    }

    /// Forgets all tokens from a position on. Keys and values need not be cleared: each is written before it is read.
    pub(super) fn rewind(&mut self, position: usize) {
        self.history.truncate(position);
    }

    pub(super) fn feed(&mut self, tokens: &[TokenId], sampled: usize) -> Result<()> {
        self.run(tokens, sampled, |executor, outputs, batch| {
            let ticket = executor.submit(batch)?;
            Ok(executor.collect(ticket, outputs)?)
        })
    }

    /// The time of each launch that feeding these would take; nothing is fed.
    pub(super) fn profile(
        &mut self,
        tokens: &[TokenId],
        sampled: usize,
    ) -> Result<Option<Vec<(String, Duration)>>> {
        let position = self.history.len();
        let times = self.run(tokens, sampled, |executor, _, batch| {
            Ok(executor.profile(batch)?)
        });
        self.rewind(position);
        times
    }

    fn run<R>(
        &mut self,
        tokens: &[TokenId],
        sampled: usize,
        work: impl FnOnce(&mut dyn Executor, &mut Outputs, &Batch<'_>) -> Result<R>,
    ) -> Result<R> {
        let position = self.history.len();
        self.history.extend_from_slice(tokens);
        let run = Run {
            rows: 0..tokens.len(),
            position,
            pages: PerGroup {
                full: &self.pages,
                sliding: &self.pages,
            },
            sampled,
            sampling: &Sampling::greedy(),
            history: &self.history,
            output: RowOutput::Token,
        };
        let batch = Batch {
            tokens,
            runs: &[run],
        };
        work(self.executor, &mut self.outputs, &batch)
    }
}
