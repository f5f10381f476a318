//! Attention over paged keys and values, the same to the last bit however a sequence is fed.
//!
//! Positions are cut into KV splits at fixed multiples. A row's result is made split by split (scores, softmax and weighted
//! sum relative to the split's largest score) and the partials are merged in order. A prompt chunk works through blocks of
//! queries, each over its splits; a few decode rows are spread over splits instead (split-KV), so that one long sequence keeps
//! all threads busy. Both do the same arithmetic in the same order. All query heads of a KV head go together, and only pages
//! inside the window are looked at.

use std::ops::Range;

use carat_model::backend::{PAGE_TOKENS, PageId};

use super::partial::SplitPartial;
use crate::{
    op::{
        kv::PagedKv,
        workers::{AttentionScratch, TiedScratch, Workers},
    },
    pool::Grid,
};
use carat_cpu_kernels::{
    attention::{MAX_QUERIES, PageScores},
    table::Kernels,
};

/// Positions of a KV split.
pub(super) const SPLIT_TOKENS: usize = 4 * PAGE_TOKENS;
/// Queries (rows times heads) that share a pass over the keys, where there are as many.
const BLOCK_QUERIES: usize = 32;
/// Splits computed before they are merged, when a block's splits are spread over threads.
const WAVE_SPLITS: usize = 64;

/// Rows of one sequence in a matrix of queries.
#[derive(Clone, Debug)]
pub(crate) struct QuerySpan<'a> {
    pub(crate) rows: Range<usize>,
    /// Of the first row.
    pub(crate) position: usize,
    /// The sequence's pages in the slot's group.
    pub(crate) pages: &'a [PageId],
    /// Per row, the position behind the last that it sees; `None` where each sees up to itself.
    pub(crate) visible_end: Option<&'a [u32]>,
}

/// Memory for spreading KV splits over threads.
#[derive(Default)]
pub(crate) struct SplitKvScratch {
    partials: Vec<f32>,
    totals: Vec<f32>,
}

/// One attention step: queries, and the keys they look at.
pub(crate) struct Attention<'a> {
    kv: &'a PagedKv,
    chunk_pages: &'a [u8],
    /// Positions a row sees, itself included.
    window: Option<usize>,
    /// `[rows, heads * head_dim]`.
    queries: &'a [f32],
    columns: usize,
    /// Query heads of a KV head.
    gqa_group: usize,
    query_blocks: Vec<QuerySpan<'a>>,
}

impl<'a> Attention<'a> {
    pub(crate) fn new(
        (kv, chunk_pages): (&'a PagedKv, &'a [u8]),
        window: Option<usize>,
        (queries, columns): (&'a [f32], usize),
        spans: impl Iterator<Item = QuerySpan<'a>>,
    ) -> Attention<'a> {
        let gqa_group = columns / (kv.spec.kv_heads * kv.spec.head_dim);
        let block_rows = (BLOCK_QUERIES / gqa_group).max(1);
        let query_blocks = spans
            .flat_map(|span| {
                span.rows.clone().step_by(block_rows).map(move |first| {
                    let rows = first..span.rows.end.min(first + block_rows);
                    let start = first - span.rows.start;
                    QuerySpan {
                        position: span.position + start,
                        pages: span.pages,
                        visible_end: span.visible_end.map(|e| &e[start..][..rows.len()]),
                        rows,
                    }
                })
            })
            .collect();
        Attention {
            kv,
            chunk_pages,
            window,
            queries,
            columns,
            gqa_group,
            query_blocks,
        }
    }

    /// Fills `out`, shaped as the queries.
    pub(crate) fn run(&self, workers: &mut Workers, scratch: &mut SplitKvScratch, out: &mut [f32]) {
        let items = self.query_blocks.len() * self.kv.spec.kv_heads;
        if items < 2 * workers.pool.threads() && workers.pool.threads() > 1 {
            self.by_kv_splits(workers, scratch, out);
        } else {
            self.by_query_blocks(workers, out);
        }
    }

    /// Every query block on one thread, split after split.
    fn by_query_blocks(&self, workers: &mut Workers, out: &mut [f32]) {
        let mut row_bounds: Vec<usize> = self
            .query_blocks
            .iter()
            .map(|block| block.rows.start)
            .collect();
        row_bounds.extend(self.query_blocks.last().map(|block| block.rows.end));
        let grid = Grid {
            data: out,
            columns: self.columns,
            row_bounds: &row_bounds,
            tile_columns: self.gqa_group * self.kv.spec.head_dim,
            interleave: 1,
        };
        let kernels = workers.kernels;
        workers
            .pool
            .for_each_tile(vec![grid], &mut workers.scratch, |scratch, _, mut tile| {
                let kv_head = tile.columns.start / (self.gqa_group * self.kv.spec.head_dim);
                let block = &self.query_blocks[tile.row_group];
                let AttentionScratch {
                    scores,
                    tied,
                    split,
                    total,
                } = &mut scratch.attention;
                let elements = self.partial_elements(block);
                total.resize(elements, 0.0);
                split.resize(elements, 0.0);
                let mut total = self.partial(total, block);
                total.clear();
                for index in self.splits(block) {
                    let mut partial = self.partial(split, block);
                    let scratch = (&mut *scores, &mut *tied);
                    self.attend_split(kernels, block, kv_head, index, scratch, &mut partial);
                    total.merge(kernels, &partial);
                }
                total.finish();
                for row in block.rows.clone() {
                    self.copy_row(&total, row - block.rows.start, tile.row_mut(row));
                }
            });
    }

    /// KV splits of all query blocks spread over the threads, merged in order after each wave.
    fn by_kv_splits(&self, workers: &mut Workers, scratch: &mut SplitKvScratch, out: &mut [f32]) {
        let kv_heads = self.kv.spec.kv_heads;
        let items: Vec<(usize, usize)> = (0..self.query_blocks.len())
            .flat_map(|block| (0..kv_heads).map(move |head| (block, head)))
            .collect();
        let work: Vec<(usize, usize)> = items
            .iter()
            .enumerate()
            .flat_map(|(item, (block, _))| {
                self.splits(&self.query_blocks[*block])
                    .map(move |index| (item, index))
            })
            .collect();
        // One size for all, so that partials are equal chunks.
        let elements = self
            .query_blocks
            .iter()
            .map(|b| self.partial_elements(b))
            .max();
        let elements = elements.unwrap_or(0);
        scratch.totals.resize(items.len() * elements, 0.0);
        scratch
            .partials
            .resize(WAVE_SPLITS.min(work.len()) * elements, 0.0);
        for (total, (block, _)) in scratch.totals.chunks_mut(elements).zip(&items) {
            self.partial(total, &self.query_blocks[*block]).clear();
        }
        let kernels = workers.kernels;
        for wave in work.chunks(WAVE_SPLITS) {
            let partials = &mut scratch.partials[..wave.len() * elements];
            let grid = Grid {
                data: partials,
                columns: elements,
                row_bounds: &(0..=wave.len()).collect::<Vec<_>>(),
                tile_columns: elements,
                interleave: 1,
            };
            workers
                .pool
                .for_each_tile(vec![grid], &mut workers.scratch, |scratch, _, mut tile| {
                    let (item, index) = wave[tile.row_group];
                    let (block, kv_head) = items[item];
                    let block = &self.query_blocks[block];
                    let row = tile.rows.start;
                    let mut partial = self.partial(tile.row_mut(row), block);
                    let AttentionScratch { scores, tied, .. } = &mut scratch.attention;
                    let scratch = (scores, tied);
                    self.attend_split(kernels, block, kv_head, index, scratch, &mut partial);
                });
            for ((item, _), partial) in wave.iter().zip(partials.chunks_mut(elements)) {
                let block = &self.query_blocks[items[*item].0];
                let total = &mut scratch.totals[item * elements..][..elements];
                self.partial(total, block)
                    .merge(kernels, &self.partial(partial, block));
            }
        }
        let width = self.gqa_group * self.kv.spec.head_dim;
        for ((block, kv_head), total) in items.iter().zip(scratch.totals.chunks_mut(elements)) {
            let block = &self.query_blocks[*block];
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

    fn queries_of(&self, block: &QuerySpan<'_>) -> usize {
        block.rows.len() * self.gqa_group
    }

    fn partial<'m>(&self, memory: &'m mut [f32], block: &QuerySpan<'_>) -> SplitPartial<'m> {
        SplitPartial::new(memory, self.queries_of(block), self.kv.width)
    }

    fn partial_elements(&self, block: &QuerySpan<'_>) -> usize {
        self.queries_of(block) * (2 + self.kv.width)
    }

    /// Positions that a row of a block sees.
    fn visible(&self, block: &QuerySpan<'_>, row: usize) -> Range<usize> {
        let window = self.window.unwrap_or(usize::MAX);
        let own = block.position + row + 1;
        let end = block.visible_end.map_or(own, |ends| ends[row] as usize);
        own.saturating_sub(window)..end
    }

    /// Positions that any row of a block sees.
    fn visible_to_block(&self, block: &QuerySpan<'_>) -> Range<usize> {
        let ends = (0..block.rows.len()).map(|row| self.visible(block, row).end);
        self.visible(block, 0).start..ends.max().unwrap_or(0)
    }

    /// KV splits that any row of a block sees.
    fn splits(&self, block: &QuerySpan<'_>) -> Range<usize> {
        let seen = self.visible_to_block(block);
        seen.start / SPLIT_TOKENS..seen.end.div_ceil(SPLIT_TOKENS)
    }

    /// One KV split of one block and KV head: query `row * gqa_group + head` of the block.
    fn attend_split(
        &self,
        kernels: &Kernels,
        block: &QuerySpan<'_>,
        kv_head: usize,
        index: usize,
        (scores, tied_scratch): (&mut Vec<f32>, &mut TiedScratch),
        partial: &mut SplitPartial<'_>,
    ) {
        let seen = self.visible_to_block(block);
        let start = index * SPLIT_TOKENS;
        let pages = seen.start.max(start) / PAGE_TOKENS
            ..seen.end.min(start + SPLIT_TOKENS).div_ceil(PAGE_TOKENS);
        let first = pages.start * PAGE_TOKENS;
        let length = pages.len() * PAGE_TOKENS;
        let queries = self.queries_of(block);
        let head_dim = self.kv.spec.head_dim;
        scores.resize(queries * SPLIT_TOKENS, 0.0);
        let page = |page: usize| {
            let page = block.pages[page].0 as usize;
            self.kv.head(self.chunk_pages, page, kv_head)
        };

        let own_query = |i: usize| {
            let (row, head) = (block.rows.start + i / self.gqa_group, i % self.gqa_group);
            let start = row * self.columns + (kv_head * self.gqa_group + head) * head_dim;
            &self.queries[start..start + head_dim]
        };
        let TiedScratch { made, split } = tied_scratch;
        if let Some(tied) = &self.kv.tied {
            made.resize(tied.page_elements(), 0.0);
            split.resize(queries * tied.query_elements(), 0.0);
            for (i, split) in split.chunks_exact_mut(tied.query_elements()).enumerate() {
                tied.split_query(own_query(i), split);
            }
        }
        let query = |i: usize| match &self.kv.tied {
            None => own_query(i),
            Some(tied) => &split[i * tied.query_elements()..][..tied.query_elements()],
        };
        for (page_index, index) in pages.clone().enumerate() {
            let (keys, values) = page(index);
            if let Some(tied) = &self.kv.tied {
                kernels.make_keys(tied, values, index * PAGE_TOKENS, made);
            }
            for (block, scores) in scores.chunks_mut(MAX_QUERIES * SPLIT_TOKENS).enumerate() {
                let count = scores.len() / SPLIT_TOKENS;
                let of_block: [&[f32]; MAX_QUERIES] =
                    std::array::from_fn(|i| query(block * MAX_QUERIES + i.min(count - 1)));
                let mut out = scores
                    .chunks_mut(SPLIT_TOKENS)
                    .map(|row| &mut row.as_chunks_mut().0[page_index]);
                let mut spare: [PageScores; MAX_QUERIES] = [[0.0; PAGE_TOKENS]; MAX_QUERIES];
                let mut spares = spare.iter_mut();
                let mut out: [&mut PageScores; MAX_QUERIES] = std::array::from_fn(|_| {
                    out.next().or_else(|| spares.next()).expect("eight in all")
                });
                let (of_block, out) = (&of_block[..count], &mut out[..count]);
                match &self.kv.tied {
                    None => kernels.scores(of_block, keys, out),
                    Some(tied) => kernels.tied_scores(tied, of_block, values, made, out),
                }
            }
        }

        for i in 0..queries {
            let visible = self.visible(block, i / self.gqa_group);
            let visible = visible.start.max(first)..visible.end.min(first + length);
            let scores = &mut scores[i * SPLIT_TOKENS..][..length];
            (partial.largest[i], partial.sums[i]) = if visible.is_empty() {
                scores.fill(0.0);
                (f32::NEG_INFINITY, 0.0)
            } else {
                kernels.partial_softmax(scores, visible.start - first..visible.end - first)
            };
        }

        partial.values.fill(0.0);
        for (page_index, index) in pages.enumerate() {
            let (_, values) = page(index);
            for (scores, out) in scores
                .chunks(MAX_QUERIES * SPLIT_TOKENS)
                .zip(partial.values.chunks_mut(MAX_QUERIES * self.kv.width))
            {
                let count = scores.len() / SPLIT_TOKENS;
                let weights: [&PageScores; MAX_QUERIES] = std::array::from_fn(|i| {
                    let row = &scores[i.min(count - 1) * SPLIT_TOKENS..][..SPLIT_TOKENS];
                    &row.as_chunks().0[page_index]
                });
                kernels.accumulate_values(&weights[..count], values, out);
            }
        }
    }

    /// The heads of one row, without the padding of their vectors.
    fn copy_row(&self, total: &SplitPartial<'_>, row: usize, out: &mut [f32]) {
        let (head_dim, width) = (self.kv.spec.head_dim, self.kv.width);
        let heads = total.values[row * self.gqa_group * width..].chunks(width);
        for (out, head) in out.chunks_exact_mut(head_dim).zip(heads) {
            out.copy_from_slice(&head[..head_dim]);
        }
    }
}
