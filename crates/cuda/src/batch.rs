//! What changes from batch to batch, as one array of words that goes to the device in one copy. Mirrors `lib/batch.cuh`.
//!
//! Its parts lie at fixed places, so launches need not change: counts, tokens, positions, runs, sampled rows, a table base a
//! run and group; last, because their number varies, the pages themselves. Only what is used is copied.

use carat_model::{
    backend::{BackendError, Batch, CompileOptions, KvGroup, PAGE_TOKENS, PerGroup},
    plan::Plan,
};

use crate::{
    device::Address,
    kernel::{BatchAt, PlacesAt, RowsAt, TablesAt},
};

const WORD: usize = 4;
/// Pages that runs may name beyond those that exist, because sequences share them.
const SHARED_ENTRIES: usize = 1 << 20;

/// Where each part starts, in words.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct BatchLayout {
    all_count: usize,
    sampled_count: usize,
    tokens: usize,
    positions: usize,
    runs: usize,
    sampled: usize,
    bases: PerGroup<usize>,
    pages: usize,
    /// All of it.
    pub(crate) words: usize,
    /// Behind it: 0, 1, 2, ..., which never change.
    identity: usize,
    max_rows: usize,
}

impl BatchLayout {
    pub(crate) fn new(options: &CompileOptions) -> BatchLayout {
        let mut next = 0;
        // Parts start at 16 bytes, which is what vector loads want.
        let mut part = |words: usize| {
            let start = next;
            next = (next + words).next_multiple_of(4);
            start
        };
        // A run has a row at least.
        let (rows, runs) = (options.max_rows, options.max_rows);
        let held = options.pages.full + options.pages.sliding;
        let entries = (runs * held).min(held + SHARED_ENTRIES);
        BatchLayout {
            all_count: part(1),
            sampled_count: part(1),
            tokens: part(rows),
            positions: part(rows),
            runs: part(rows),
            sampled: part(options.max_sampled),
            bases: PerGroup {
                full: part(runs),
                sliding: part(runs),
            },
            pages: part(entries),
            words: part(0),
            identity: part(rows),
            max_rows: rows,
        }
    }

    /// Bytes on the device.
    pub(crate) fn bytes(&self) -> usize {
        (self.identity + self.max_rows) * WORD
    }

    /// What is written once: which row the rows of a whole batch are, namely themselves.
    pub(crate) fn constant(&self) -> (usize, Vec<u32>) {
        (self.identity * WORD, (0..self.max_rows as u32).collect())
    }

    pub(crate) fn at(&self, start: Address) -> BatchAt {
        let word = |index: usize| start.offset(index * WORD);
        let tables = |base: usize| TablesAt {
            base: word(base),
            pages: word(self.pages),
        };
        BatchAt {
            tokens: word(self.tokens),
            places: PlacesAt {
                position: word(self.positions),
                run: word(self.runs),
            },
            all: RowsAt {
                count: word(self.all_count),
                index: word(self.identity),
            },
            sampled: RowsAt {
                count: word(self.sampled_count),
                index: word(self.sampled),
            },
            tables: self.bases.map(tables),
        }
    }

    /// Writes a checked batch. Returns how many words are in use, from the start.
    pub(crate) fn write(
        &self,
        plan: &Plan,
        batch: &Batch<'_>,
        words: &mut [u32],
    ) -> Result<usize, BackendError> {
        words[self.all_count] = batch.tokens.len() as u32;
        words[self.tokens..][..batch.tokens.len()].copy_from_slice(batch.tokens);
        for place in batch.all_rows() {
            words[self.positions + place.row] = place.position as u32;
            words[self.runs + place.row] = place.run as u32;
        }
        let mut sampled = 0;
        for place in batch.sampled_rows() {
            words[self.sampled + sampled] = place.row as u32;
            sampled += 1;
        }
        words[self.sampled_count] = sampled as u32;
        let mut entries = 0;
        for (r, run) in batch.runs.iter().enumerate() {
            let end = (run.position + run.rows.len()).div_ceil(PAGE_TOKENS);
            for group in KvGroup::ALL {
                if !plan.uses(group) {
                    continue;
                }
                // Entries behind the window of the run's first row are not looked at, and may be freed.
                let first = match (group, plan.window()) {
                    (KvGroup::Sliding, Some(window)) => {
                        (run.position + 1).saturating_sub(window) / PAGE_TOKENS
                    }
                    _ => 0,
                };
                let seen = &run.pages.get(group)[first..end];
                if self.pages + entries + seen.len() > self.words {
                    return Err(BackendError::Unsupported {
                        what: format!(
                            "the page tables of {} runs have more than {} entries together",
                            batch.runs.len(),
                            self.words - self.pages
                        ),
                    });
                }
                words[self.bases.get(group) + r] = (entries as i32 - first as i32).cast_unsigned();
                for page in seen {
                    words[self.pages + entries] = page.0;
                    entries += 1;
                }
            }
        }
        Ok(self.pages + entries)
    }
}
