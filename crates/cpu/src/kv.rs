//! Keys and values in pages, in F16.
//!
//! A page of a slot holds, head after head, the keys as `[head_dim, tokens]` and the values as `[tokens, width]`: the two
//! layouts that let attention run without adding across lanes. `width` is the head size rounded up to whole vectors.

use carat_model::{
    backend::{Batch, KvGroup, PAGE_TOKENS, PerGroup},
    plan::SlotSpec,
};

use crate::{simd::LANES, workers::Workers};

/// The cache of one slot.
pub(crate) struct Slot {
    pub(crate) spec: SlotSpec,
    /// Elements of a value row.
    pub(crate) width: usize,
    pages: Vec<u16>,
}

impl Slot {
    /// Memory comes from the system untouched, so pages cost nothing until they are written.
    pub(crate) fn new(spec: &SlotSpec, pages: usize) -> Slot {
        let width = spec.head_dim.next_multiple_of(LANES);
        Slot {
            spec: spec.clone(),
            width,
            pages: vec![0; pages * page_elements(spec)],
        }
    }

    fn head_elements(&self) -> usize {
        (self.spec.head_dim + self.width) * PAGE_TOKENS
    }

    /// Keys `[head_dim, tokens]` and values `[tokens, width]` of one head in one page.
    pub(crate) fn head(&self, page: usize, kv_head: usize) -> (&[u16], &[u16]) {
        let start = (page * self.spec.kv_heads + kv_head) * self.head_elements();
        self.pages[start..start + self.head_elements()].split_at(self.spec.head_dim * PAGE_TOKENS)
    }

    /// Stores rows `[rows, kv_heads * head_dim]` where `writes` says.
    pub(crate) fn store(&mut self, workers: &Workers, writes: &Writes, k: &[f32], v: &[f32]) {
        let (head_dim, width) = (self.spec.head_dim, self.width);
        let (columns, head_elements) = (self.spec.kv_heads * head_dim, self.head_elements());
        let page_elements = page_elements(&self.spec);
        let kernels = workers.kernels;
        let store = |item: usize, page: &mut [u16]| {
            let write = &writes.rows[item];
            for (h, head) in page.chunks_exact_mut(head_elements).enumerate() {
                let (keys, values) = head.split_at_mut(head_dim * PAGE_TOKENS);
                for token in 0..write.tokens {
                    let place = write.first_token + token;
                    let start = (write.first_row + token) * columns + h * head_dim;
                    let value = &mut values[place * width..][..width];
                    kernels.to_half(&v[start..start + head_dim], value);
                    for (d, k) in k[start..start + head_dim].chunks(LANES).enumerate() {
                        let mut half = [0; LANES];
                        kernels.to_half(k, &mut half);
                        for (j, key) in half.iter().enumerate().take(k.len()) {
                            keys[(LANES * d + j) * PAGE_TOKENS + place] = *key;
                        }
                    }
                }
            }
        };
        workers
            .pool
            .for_each_chosen_chunk(&mut self.pages, page_elements, &writes.pages, store);
    }
}

/// Elements of one page of a slot.
pub(crate) fn page_elements(spec: &SlotSpec) -> usize {
    spec.kv_heads * (spec.head_dim + spec.head_dim.next_multiple_of(LANES)) * PAGE_TOKENS
}

/// Where the rows of a batch go in one group of slots, in order of pages.
#[derive(Default)]
pub(crate) struct Writes {
    pages: Vec<usize>,
    rows: Vec<PageRows>,
}

/// Consecutive rows that go to one page.
#[derive(Clone, Copy)]
struct PageRows {
    first_row: usize,
    first_token: usize,
    tokens: usize,
}

/// Sorts the rows of a batch by the pages they are stored in, for each group that the plan uses.
pub(crate) fn writes(batch: &Batch<'_>, uses: impl Fn(KvGroup) -> bool) -> PerGroup<Writes> {
    let mut all = PerGroup::default();
    for group in KvGroup::ALL.into_iter().filter(|group| uses(*group)) {
        let mut writes: Vec<(usize, PageRows)> = Vec::new();
        for run in batch.runs {
            let pages = run.pages.get(group);
            let (mut row, mut position) = (run.rows.start, run.position);
            while row < run.rows.end {
                let first_token = position % PAGE_TOKENS;
                let tokens = (PAGE_TOKENS - first_token).min(run.rows.end - row);
                let rows = PageRows {
                    first_row: row,
                    first_token,
                    tokens,
                };
                writes.push((pages[position / PAGE_TOKENS].0 as usize, rows));
                row += tokens;
                position += tokens;
            }
        }
        writes.sort_unstable_by_key(|(page, _)| *page);
        let (pages, rows) = writes.into_iter().unzip();
        *all.get_mut(group) = Writes { pages, rows };
    }
    all
}
