//! Attention over paged keys and values, the same to the last bit however a sequence is fed.
//!
//! Positions are cut into segments at fixed places. A row's result is made segment by segment (scores, softmax and
//! weighted sum relative to the segment's largest score) and the segments are merged in order. A prompt chunk works
//! through blocks of rows, each block over its segments; a few decode rows are spread over segments instead, so that one
//! long sequence keeps all threads busy. Both do the same arithmetic in the same order. All query heads of a KV head go
//! together, and only pages inside the window are looked at.

#[cfg(test)]
mod tests;

use std::ops::Range;

use carat_model::backend::{PAGE_TOKENS, PageId};

use super::{kv::Slot, workers::Workers};
use crate::{
    kernel::{
        attention::{MOST_QUERIES, PageScores},
        table::Kernels,
    },
    pool::Grid,
};

/// Positions of a segment.
const SEGMENT: usize = 4 * PAGE_TOKENS;
/// Queries (rows times heads) that share a pass over the keys, where there are as many.
const BLOCK_QUERIES: usize = 32;
/// Segments computed before they are merged, when a block's segments are spread over threads.
const WAVE: usize = 64;

/// Rows of one sequence in a matrix of queries.
#[derive(Clone, Debug)]
pub(crate) struct Span<'a> {
    pub(crate) rows: Range<usize>,
    /// Of the first row.
    pub(crate) position: usize,
    /// The sequence's pages in the slot's group.
    pub(crate) pages: &'a [PageId],
}

/// Memory of one thread.
#[derive(Default)]
pub(crate) struct AttendScratch {
    scores: Vec<f32>,
    segment: Vec<f32>,
    total: Vec<f32>,
}

/// Memory for spreading segments over threads.
#[derive(Default)]
pub(crate) struct SpreadScratch {
    parts: Vec<f32>,
    totals: Vec<f32>,
}

/// One attention step: which queries look at which keys.
pub(crate) struct Attention<'a> {
    slot: &'a Slot,
    /// `[rows, heads * head_dim]`.
    queries: &'a [f32],
    columns: usize,
    /// Query heads of a KV head.
    group: usize,
    blocks: Vec<Span<'a>>,
}

impl<'a> Attention<'a> {
    pub(crate) fn new(
        slot: &'a Slot,
        queries: &'a [f32],
        columns: usize,
        spans: impl Iterator<Item = Span<'a>>,
    ) -> Attention<'a> {
        let group = columns / (slot.spec.kv_heads * slot.spec.head_dim);
        let block_rows = (BLOCK_QUERIES / group).max(1);
        let blocks = spans
            .flat_map(|span| {
                span.rows
                    .clone()
                    .step_by(block_rows)
                    .map(move |first| Span {
                        rows: first..span.rows.end.min(first + block_rows),
                        position: span.position + (first - span.rows.start),
                        pages: span.pages,
                    })
            })
            .collect();
        Attention {
            slot,
            queries,
            columns,
            group,
            blocks,
        }
    }

    /// Fills `out`, shaped as the queries.
    pub(crate) fn run(&self, workers: &mut Workers, spread: &mut SpreadScratch, out: &mut [f32]) {
        let items = self.blocks.len() * self.slot.spec.kv_heads;
        if items < 2 * workers.pool.threads() && workers.pool.threads() > 1 {
            self.by_segments(workers, spread, out);
        } else {
            self.by_blocks(workers, out);
        }
    }

    /// Every block on one thread, segment after segment.
    fn by_blocks(&self, workers: &mut Workers, out: &mut [f32]) {
        let mut row_bounds: Vec<usize> = self.blocks.iter().map(|block| block.rows.start).collect();
        row_bounds.extend(self.blocks.last().map(|block| block.rows.end));
        let grid = Grid {
            data: out,
            columns: self.columns,
            row_bounds: &row_bounds,
            cell_columns: self.group * self.slot.spec.head_dim,
            strands: 1,
        };
        let kernels = workers.kernels;
        workers
            .pool
            .for_each_cell(vec![grid], &mut workers.scratch, |scratch, _, mut cell| {
                let kv_head = cell.columns.start / (self.group * self.slot.spec.head_dim);
                let block = &self.blocks[cell.band];
                let AttendScratch {
                    scores,
                    segment,
                    total,
                } = &mut scratch.attend;
                let elements = self.partial_elements(block);
                total.resize(elements, 0.0);
                segment.resize(elements, 0.0);
                let mut total = self.partial(total, block);
                total.clear();
                for index in self.segments(block) {
                    let mut part = self.partial(segment, block);
                    self.segment(kernels, block, kv_head, index, scores, &mut part);
                    total.merge(kernels, &part);
                }
                total.finish();
                for row in block.rows.clone() {
                    self.copy_row(&total, row - block.rows.start, cell.row_mut(row));
                }
            });
    }

    /// Segments of all blocks spread over the threads, merged in order after each wave.
    fn by_segments(&self, workers: &mut Workers, spread: &mut SpreadScratch, out: &mut [f32]) {
        let kv_heads = self.slot.spec.kv_heads;
        let items: Vec<(usize, usize)> = (0..self.blocks.len())
            .flat_map(|block| (0..kv_heads).map(move |head| (block, head)))
            .collect();
        let work: Vec<(usize, usize)> = items
            .iter()
            .enumerate()
            .flat_map(|(item, (block, _))| {
                self.segments(&self.blocks[*block])
                    .map(move |index| (item, index))
            })
            .collect();
        // One size for all, so that parts are equal chunks.
        let elements = self.blocks.iter().map(|b| self.partial_elements(b)).max();
        let elements = elements.unwrap_or(0);
        spread.totals.resize(items.len() * elements, 0.0);
        spread.parts.resize(WAVE.min(work.len()) * elements, 0.0);
        for (total, (block, _)) in spread.totals.chunks_mut(elements).zip(&items) {
            self.partial(total, &self.blocks[*block]).clear();
        }
        let kernels = workers.kernels;
        for wave in work.chunks(WAVE) {
            let parts = &mut spread.parts[..wave.len() * elements];
            let grid = Grid {
                data: parts,
                columns: elements,
                row_bounds: &(0..=wave.len()).collect::<Vec<_>>(),
                cell_columns: elements,
                strands: 1,
            };
            workers
                .pool
                .for_each_cell(vec![grid], &mut workers.scratch, |scratch, _, mut cell| {
                    let (item, index) = wave[cell.band];
                    let (block, kv_head) = items[item];
                    let block = &self.blocks[block];
                    let row = cell.rows.start;
                    let mut part = self.partial(cell.row_mut(row), block);
                    let scores = &mut scratch.attend.scores;
                    self.segment(kernels, block, kv_head, index, scores, &mut part);
                });
            for ((item, _), part) in wave.iter().zip(parts.chunks_mut(elements)) {
                let block = &self.blocks[items[*item].0];
                let total = &mut spread.totals[item * elements..][..elements];
                self.partial(total, block)
                    .merge(kernels, &self.partial(part, block));
            }
        }
        let width = self.group * self.slot.spec.head_dim;
        for ((block, kv_head), total) in items.iter().zip(spread.totals.chunks_mut(elements)) {
            let block = &self.blocks[*block];
            let mut total = self.partial(total, block);
            total.finish();
            for row in block.rows.clone() {
                let start = row * self.columns + kv_head * width;
                self.copy_row(
                    &total,
                    row - block.rows.start,
                    &mut out[start..start + width],
                );
            }
        }
    }

    fn queries_of(&self, block: &Span<'_>) -> usize {
        block.rows.len() * self.group
    }

    fn partial<'m>(&self, memory: &'m mut [f32], block: &Span<'_>) -> Partial<'m> {
        Partial::new(memory, self.queries_of(block), self.slot.width)
    }

    fn partial_elements(&self, block: &Span<'_>) -> usize {
        self.queries_of(block) * (2 + self.slot.width)
    }

    /// Positions a row sees.
    fn visible(&self, position: usize) -> Range<usize> {
        let window = self.slot.spec.window.unwrap_or(usize::MAX);
        (position + 1).saturating_sub(window)..position + 1
    }

    /// Positions that any row of a block sees.
    fn visible_to_block(&self, block: &Span<'_>) -> Range<usize> {
        let last = block.position + block.rows.len() - 1;
        self.visible(block.position).start..self.visible(last).end
    }

    /// Segments that any row of a block sees.
    fn segments(&self, block: &Span<'_>) -> Range<usize> {
        let seen = self.visible_to_block(block);
        seen.start / SEGMENT..seen.end.div_ceil(SEGMENT)
    }

    /// One segment of one block and KV head: query `row * group + head` of the block.
    fn segment(
        &self,
        kernels: &Kernels,
        block: &Span<'_>,
        kv_head: usize,
        index: usize,
        scores: &mut Vec<f32>,
        part: &mut Partial<'_>,
    ) {
        let seen = self.visible_to_block(block);
        let start = index * SEGMENT;
        let pages = seen.start.max(start) / PAGE_TOKENS
            ..seen.end.min(start + SEGMENT).div_ceil(PAGE_TOKENS);
        let first = pages.start * PAGE_TOKENS;
        let length = pages.len() * PAGE_TOKENS;
        let queries = self.queries_of(block);
        let head_dim = self.slot.spec.head_dim;
        scores.resize(queries * SEGMENT, 0.0);
        let page = |page: usize| self.slot.head(block.pages[page].0 as usize, kv_head);

        let query = |i: usize| {
            let (row, head) = (block.rows.start + i / self.group, i % self.group);
            let start = row * self.columns + (kv_head * self.group + head) * head_dim;
            &self.queries[start..start + head_dim]
        };
        for (place, index) in pages.clone().enumerate() {
            let (keys, _) = page(index);
            for (block, scores) in scores.chunks_mut(MOST_QUERIES * SEGMENT).enumerate() {
                let count = scores.len() / SEGMENT;
                let of_block: [&[f32]; MOST_QUERIES] =
                    std::array::from_fn(|i| query(block * MOST_QUERIES + i.min(count - 1)));
                let mut out = scores
                    .chunks_mut(SEGMENT)
                    .map(|row| &mut row.as_chunks_mut().0[place]);
                let mut spare: [PageScores; MOST_QUERIES] = [[0.0; PAGE_TOKENS]; MOST_QUERIES];
                let mut spares = spare.iter_mut();
                let mut out: [&mut PageScores; MOST_QUERIES] = std::array::from_fn(|_| {
                    out.next().or_else(|| spares.next()).expect("eight in all")
                });
                kernels.scores(&of_block[..count], keys, &mut out[..count]);
            }
        }

        for i in 0..queries {
            let visible = self.visible(block.position + i / self.group);
            let visible = visible.start.max(first)..visible.end.min(first + length);
            let scores = &mut scores[i * SEGMENT..][..length];
            (part.largest[i], part.sums[i]) = if visible.is_empty() {
                scores.fill(0.0);
                (f32::NEG_INFINITY, 0.0)
            } else {
                kernels.soften(scores, visible.start - first..visible.end - first)
            };
        }

        part.values.fill(0.0);
        for (place, index) in pages.enumerate() {
            let (_, values) = page(index);
            for (scores, out) in scores
                .chunks(MOST_QUERIES * SEGMENT)
                .zip(part.values.chunks_mut(MOST_QUERIES * self.slot.width))
            {
                let count = scores.len() / SEGMENT;
                let weights: [&PageScores; MOST_QUERIES] = std::array::from_fn(|i| {
                    let row = &scores[i.min(count - 1) * SEGMENT..][..SEGMENT];
                    &row.as_chunks().0[place]
                });
                kernels.weigh(&weights[..count], values, out);
            }
        }
    }

    /// The heads of one row, without the padding of their vectors.
    fn copy_row(&self, total: &Partial<'_>, row: usize, out: &mut [f32]) {
        let (head_dim, width) = (self.slot.spec.head_dim, self.slot.width);
        let heads = total.values[row * self.group * width..].chunks(width);
        for (out, head) in out.chunks_exact_mut(head_dim).zip(heads) {
            out.copy_from_slice(&head[..head_dim]);
        }
    }
}

/// The softmax of some positions, not yet divided: for each query the largest score, the sum of exponentials relative to
/// it, and the weighted sum of values.
struct Partial<'a> {
    largest: &'a mut [f32],
    sums: &'a mut [f32],
    /// `[queries, width]`.
    values: &'a mut [f32],
}

impl<'a> Partial<'a> {
    /// The memory may have room for more queries.
    fn new(memory: &'a mut [f32], queries: usize, width: usize) -> Partial<'a> {
        let (largest, rest) = memory.split_at_mut(queries);
        let (sums, values) = rest.split_at_mut(queries);
        Partial {
            largest,
            sums,
            values: &mut values[..queries * width],
        }
    }

    /// Nothing seen yet.
    fn clear(&mut self) {
        self.largest.fill(f32::NEG_INFINITY);
        self.sums.fill(0.0);
        self.values.fill(0.0);
    }

    /// Adds the positions of `next`, which come after ours.
    fn merge(&mut self, kernels: &Kernels, next: &Partial<'_>) {
        let queries = self.largest.len();
        let width = self.values.len() / queries;
        for i in 0..queries {
            if next.largest[i] == f32::NEG_INFINITY {
                continue;
            }
            let largest = self.largest[i].max(next.largest[i]);
            let ours = (self.largest[i] - largest).exp();
            let theirs = (next.largest[i] - largest).exp();
            self.largest[i] = largest;
            self.sums[i] = self.sums[i] * ours + next.sums[i] * theirs;
            let values = &mut self.values[i * width..][..width];
            for value in values.iter_mut() {
                *value *= ours;
            }
            kernels.add_weighted(&next.values[i * width..][..width], theirs, values);
        }
    }

    fn finish(&mut self) {
        let width = self.values.len() / self.sums.len();
        for (values, sum) in self.values.chunks_mut(width).zip(self.sums.iter()) {
            let by = 1.0 / sum;
            for value in values {
                *value *= by;
            }
        }
    }
}
