//! Logits of every position of a text, through any backend: what `eval` prints and what tests compare.

use crate::{
    TokenId,
    backend::{
        BackendError, Batch, CompileOptions, Executor, Outputs, PAGE_TOKENS, PageId, PerGroup,
        RowOutput, RowResult, Run,
    },
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
        max_rows: chunk,
        max_sampled: chunk,
        probe: false,
    }
}

/// Feeds `tokens` in chunks from an empty cache and hands over each position's row, in order, with its logits.
pub fn for_each_position(
    executor: &mut dyn Executor,
    tokens: &[TokenId],
    chunk: usize,
    mut each: impl FnMut(usize, &RowResult),
) -> Result<(), BackendError> {
    let pages: Vec<PageId> = (0..tokens.len().div_ceil(PAGE_TOKENS) as u32)
        .map(PageId)
        .collect();
    let sampling = Sampling::greedy();
    let mut outputs = Outputs::default();
    for start in (0..tokens.len()).step_by(chunk.max(1)) {
        let end = tokens.len().min(start + chunk.max(1));
        let run = Run {
            rows: 0..end - start,
            position: start,
            pages: PerGroup {
                full: &pages,
                sliding: &pages,
            },
            sampled: end - start,
            sampling: &sampling,
            history: &tokens[..end],
            output: RowOutput::Logits,
        };
        let batch = Batch {
            tokens: &tokens[start..end],
            runs: &[run],
        };
        let ticket = executor.submit(&batch)?;
        executor.collect(ticket, &mut outputs)?;
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
