//! Logits of every position of a text, through any backend: what `eval` prints and what tests compare.

use std::ops::Range;

use crate::{
    TokenId,
    backend::{
        BackendError, Batch, Batching, CompileOptions, Draw, Executor, Feed, Outputs, RowResult,
        Run, token_feeds,
    },
    kv::{PageId, PerGroup, first_visible_page, pages_of},
    plan::Plan,
    sampling::Sampling,
};

/// Options to compile with for a text of `tokens`, fed `chunk` at a time.
pub fn options(tokens: usize, chunk: usize) -> CompileOptions {
    let pages = pages_of(tokens).max(1);
    let chunk = chunk.clamp(1, tokens.max(1));
    CompileOptions {
        // One more, so that no page has the same number in both groups.
        pages: PerGroup {
            full: pages,
            sliding: pages + 1,
        },
        chunk_pages: 0,
        host_pages: PerGroup::default(),
        kv: PerGroup::default(),
        max_rows: chunk,
        max_sampled: chunk,
        probe: false,
        batching: Batching::Fast,
    }
}

/// The pages of one text that has all pages to itself.
///
/// The groups name different pages, none of them its place, and sliding entries behind the window are freed: what would go
/// unnoticed with one plain table for both is wrong in every result.
pub struct Pages {
    tables: PerGroup<Vec<PageId>>,
    window: Option<usize>,
}

impl Pages {
    /// Of an executor compiled for `plan` with so many pages.
    pub fn new(plan: &Plan, pages: PerGroup<usize>) -> Pages {
        let backwards = |count: usize| (0..count as u32).rev().map(PageId).collect::<Vec<_>>();
        let mut sliding = backwards(pages.sliding);
        if pages.full == pages.sliding && pages.full > 0 {
            sliding.rotate_left(1);
        }
        Pages {
            tables: PerGroup {
                full: backwards(pages.full),
                sliding,
            },
            window: plan.window(),
        }
    }

    /// Before the row at `position` is fed: frees the sliding entries behind its window.
    pub fn advance(&mut self, position: usize) {
        if let Some(window) = self.window {
            let seen = first_visible_page(position, window).min(self.tables.sliding.len());
            self.tables.sliding[..seen].fill(PageId::FREED);
        }
    }

    /// As a run's tables.
    pub fn tables(&self) -> PerGroup<&[PageId]> {
        PerGroup {
            full: &self.tables.full,
            sliding: &self.tables.sliding,
        }
    }
}

/// One text, fed part by part; every row is sampled greedily and reports its logits.
pub struct Evaluation<'a> {
    executor: &'a mut dyn Executor,
    pages: Pages,
}

impl<'a> Evaluation<'a> {
    /// Of a text whose pages are `pages`. The executor has so many at least, and nobody else uses them meanwhile.
    pub fn new(executor: &'a mut dyn Executor, plan: &Plan, pages: PerGroup<usize>) -> Self {
        Evaluation {
            executor,
            pages: Pages::new(plan, pages),
        }
    }

    /// Runs rows at `positions` as one batch after what has been fed before.
    pub fn feed(
        &mut self,
        feeds: &[Feed<'_>],
        positions: Range<usize>,
        visible_end: Option<&[u32]>,
        outputs: &mut Outputs,
    ) -> Result<(), BackendError> {
        self.pages.advance(positions.start);
        let run = Run {
            rows: 0..positions.len(),
            position: positions.start,
            pages: self.pages.tables(),
            sampled: positions.len(),
            visible_end,
            table: None,
        };
        let batch = Batch {
            feeds,
            runs: &[run],
        };
        let sampling = Sampling::greedy();
        let ticket = self.executor.submit(&batch)?;
        let drawn = self
            .executor
            .draw(&ticket, &vec![Draw::logits(&sampling); positions.len()]);
        self.executor.collect(ticket, outputs)?;
        drawn
    }

    /// The executor that it is fed to.
    pub fn executor(&self) -> &dyn Executor {
        self.executor
    }
}

/// Feeds `tokens` in chunks from an empty cache and hands over each position's row, in order, with its logits. The executor is
/// compiled for `plan` with [`options`] of as many tokens.
pub fn for_each_position(
    executor: &mut dyn Executor,
    plan: &Plan,
    tokens: &[TokenId],
    chunk: usize,
    mut each: impl FnMut(usize, &RowResult),
) -> Result<(), BackendError> {
    let mut evaluation = Evaluation::new(executor, plan, options(tokens.len(), chunk).pages);
    let mut outputs = Outputs::default();
    let feeds = token_feeds(tokens);
    for start in (0..tokens.len()).step_by(chunk.max(1)) {
        let end = tokens.len().min(start.saturating_add(chunk.max(1)));
        evaluation.feed(&feeds[start..end], start..end, None, &mut outputs)?;
        for (offset, row) in outputs.rows.iter().enumerate() {
            each(start + offset, row);
        }
    }
    Ok(())
}

/// All positions' logits, `[positions, vocab]`.
pub fn logits(
    executor: &mut dyn Executor,
    plan: &Plan,
    tokens: &[TokenId],
    chunk: usize,
) -> Result<Vec<f32>, BackendError> {
    let mut all = Vec::new();
    for_each_position(executor, plan, tokens, chunk, |_, row| {
        all.extend_from_slice(&row.logits);
    })?;
    Ok(all)
}
