//! Logits of every position of a text, through any backend: what `eval` prints and what tests compare.

use crate::{
    TokenId,
    backend::{BackendError, Batch, CompileOptions, Executor, Outputs, RowOutput, RowResult, Run},
    kv::{KvType, PAGE_TOKENS, PageId, PerGroup},
    sampling::Sampling,
};

/// What to compile with for a text of `tokens`, fed `chunk` at a time.
pub fn options(tokens: usize, chunk: usize) -> CompileOptions {
    let pages = tokens.div_ceil(PAGE_TOKENS).max(1);
    let chunk = chunk.clamp(1, tokens.max(1));
    CompileOptions {
        pages: PerGroup {
            full: pages,
            sliding: pages,
        },
        kv: KvType::default(),
        max_rows: chunk,
        max_sampled: chunk,
        probe: false,
    }
}

/// Runs the rows `tokens[start..]` as one batch after what has been fed before, all of them sampled greedily.
/// Page tables are the plain ones: place `i` is page `i`.
pub fn feed(
    executor: &mut dyn Executor,
    tokens: &[TokenId],
    start: usize,
    outputs: &mut Outputs,
) -> Result<(), BackendError> {
    let pages: Vec<PageId> = (0..tokens.len().div_ceil(PAGE_TOKENS) as u32)
        .map(PageId)
        .collect();
    let rows = tokens.len() - start;
    let run = Run {
        rows: 0..rows,
        position: start,
        pages: PerGroup {
            full: &pages,
            sliding: &pages,
        },
        sampled: rows,
        sampling: &Sampling::greedy(),
        history: tokens,
        output: RowOutput::Logits,
    };
    let batch = Batch {
        tokens: &tokens[start..],
        runs: &[run],
    };
    let ticket = executor.submit(&batch)?;
    executor.collect(ticket, outputs)
}

/// Feeds `tokens` in chunks from an empty cache and hands over each position's row, in order, with its logits.
pub fn for_each_position(
    executor: &mut dyn Executor,
    tokens: &[TokenId],
    chunk: usize,
    mut each: impl FnMut(usize, &RowResult),
) -> Result<(), BackendError> {
    let mut outputs = Outputs::default();
    for start in (0..tokens.len()).step_by(chunk.max(1)) {
        let end = tokens.len().min(start.saturating_add(chunk.max(1)));
        feed(executor, &tokens[..end], start, &mut outputs)?;
        for (offset, row) in outputs.rows.iter().enumerate() {
            each(start + offset, row);
        }
    }
    Ok(())
}

/// All positions' logits, `[positions, vocab]`.
pub fn logits(
    executor: &mut dyn Executor,
    tokens: &[TokenId],
    chunk: usize,
) -> Result<Vec<f32>, BackendError> {
    let mut all = Vec::new();
    for_each_position(executor, tokens, chunk, |_, row| {
        all.extend_from_slice(&row.logits);
    })?;
    Ok(all)
}
