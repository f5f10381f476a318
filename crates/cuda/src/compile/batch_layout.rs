//! Words that describe a batch to kernels, at fixed offsets of one array, so that launches need not change. Mirrors
//! `lib/batch.cuh`; `run/batch.rs` writes them.
//!
//! Counts, tokens, embeddings, positions, runs, ends of what rows see, sampled rows and their settings, each run's first row among all and among the sampled, a
//! table base per run and group; last, because their number varies, the pages that the batch brings and changes of logits. Behind
//! all that lie page tables that stay (`run/tables.rs`).

use carat_model::{
    backend::{Batching, CompileOptions},
    kv::{KvGroup, PerGroup},
};

use super::rows::{SMALL_ROWS, padded_rows, small_groups};
use crate::{
    device::Address,
    kernel::{
        BatchAt, CHANGE_WORDS, InputsAt, MAX_DRAWN_ROWS, RowRefsAt, RowsAt, RunsAt, SETTING_WORDS,
        SamplerInputs, TablesAt, UPDATE_WORDS, UpdateTablesParams,
    },
};

pub(crate) const WORD: usize = 4;
/// Pages that runs may name beyond those that exist, because sequences share them.
const SHARED_ENTRIES: usize = 1 << 20;

/// Offset of each part, in words.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct BatchLayout {
    pub(crate) tokens: usize,
    pub(crate) all_count: usize,
    pub(crate) sampled_count: usize,
    /// Of batch-invariant batches: rows of each group, of all and of the sampled ones.
    pub(crate) group_counts: GroupCounts,
    pub(crate) run_count: usize,
    pub(crate) positions: usize,
    pub(crate) runs: usize,
    pub(crate) sliding_ends: usize,
    /// Numbers of the embeddings that rows are fed, and their address.
    pub(crate) inputs: usize,
    pub(crate) inputs_at: usize,
    pub(crate) sampled: usize,
    /// One more than there are runs: the last is the end of the last run.
    pub(crate) first_rows: usize,
    pub(crate) first_sampled: usize,
    /// The batch's slot in flight, which selects its results.
    pub(crate) in_flight: usize,
    pub(crate) settings: usize,
    pub(crate) bases: PerGroup<usize>,
    pub(crate) pages: usize,
    pub(crate) page_entries: usize,
    /// All of it.
    pub(crate) words: usize,
    /// Behind it: 0, 1, 2, ..., which never change.
    pub(crate) identity: usize,
    /// Behind that: the tokens that sampling leaves for the batch after it.
    pub(crate) samples: usize,
    /// Behind that: page tables that stay from batch to batch.
    pub(crate) kept: usize,
    pub(crate) kept_entries: usize,
    pub(crate) max_rows: usize,
    /// Rows that may be sampled on the device.
    pub(crate) max_drawn: usize,
}

/// Offsets of the row counts of groups that go through the programs of small batches.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct GroupCounts {
    pub(crate) all: usize,
    pub(crate) sampled: usize,
    /// Groups that each of them has room for; none where batches run as a whole.
    pub(crate) max_all: usize,
    pub(crate) max_sampled: usize,
}

/// Whether page tables stay on the device, or come whole with each batch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum PageTables {
    Stay,
    ComeWhole,
}

impl BatchLayout {
    pub(crate) fn new(options: &CompileOptions, tables: PageTables) -> BatchLayout {
        let mut next = 0;
        // Parts start at 16 bytes, which is what vector loads want.
        let mut part = |words: usize| {
            let start = next;
            next = (next + words).next_multiple_of(4);
            start
        };
        // A run has a row at least.
        let (rows, runs) = (padded_rows(options.max_rows), options.max_rows);
        let held = options.pages.full + options.named_pages(KvGroup::Sliding);
        let entries = (runs * held).min(held + SHARED_ENTRIES);
        let max_drawn = options.max_sampled.min(MAX_DRAWN_ROWS);
        let (kept_entries, max_updates) = match tables {
            PageTables::Stay => (entries, runs * KvGroup::ALL.len()),
            PageTables::ComeWhole => (0, 0),
        };
        let (max_all, max_sampled) = match options.batching {
            Batching::Fast => (0, 0),
            Batching::Invariant => (
                small_groups(options.max_rows),
                small_groups(options.max_sampled),
            ),
        };
        BatchLayout {
            tokens: part(rows),
            all_count: part(1),
            sampled_count: part(1),
            group_counts: GroupCounts {
                all: part(max_all),
                sampled: part(max_sampled),
                max_all,
                max_sampled,
            },
            run_count: part(1),
            positions: part(rows),
            runs: part(rows),
            sliding_ends: part(rows),
            inputs: part(rows),
            inputs_at: part(2),
            sampled: part(padded_rows(options.max_sampled)),
            first_rows: part(runs + 1),
            first_sampled: part(runs + 1),
            in_flight: part(1),
            settings: part(max_drawn * SETTING_WORDS),
            bases: PerGroup {
                full: part(runs),
                sliding: part(runs),
            },
            // Updates of tables that stay follow the pages in use, and changes of logits those.
            pages: part(entries + max_updates * UPDATE_WORDS + CHANGE_WORDS),
            page_entries: entries,
            words: part(0),
            identity: part(rows),
            samples: part(max_drawn),
            kept: part(kept_entries),
            kept_entries,
            max_rows: rows,
            max_drawn,
        }
    }

    /// Words that a draw takes on their way to the device.
    pub(crate) fn draw_words(&self) -> usize {
        self.settings - self.in_flight + self.max_drawn * SETTING_WORDS + CHANGE_WORDS
    }

    /// Bytes on the device.
    pub(crate) fn bytes(&self) -> usize {
        (self.kept + self.kept_entries) * WORD
    }

    /// Written once: the index of each row of a whole batch, namely its own number.
    pub(crate) fn constant(&self) -> (usize, Vec<u32>) {
        (self.identity * WORD, (0..self.max_rows as u32).collect())
    }

    pub(crate) fn at(&self, start: Address) -> BatchAt {
        let word = |index: usize| start.offset(index * WORD);
        let tables = |base: usize| TablesAt {
            base: word(base),
            pages: word(self.pages),
        };
        let runs = |first: usize| RunsAt {
            count: word(self.run_count),
            first: word(first),
        };
        BatchAt {
            tokens: word(self.tokens),
            row_refs: RowRefsAt {
                position: word(self.positions),
                run: word(self.runs),
                sliding_end: word(self.sliding_ends),
            },
            inputs: InputsAt {
                index: word(self.inputs),
                start: word(self.inputs_at),
            },
            all: RowsAt {
                count: word(self.all_count),
                index: word(self.identity),
            },
            sampled: RowsAt {
                count: word(self.sampled_count),
                index: word(self.sampled),
            },
            all_runs: runs(self.first_rows),
            sampled_runs: runs(self.first_sampled),
            tables: self.bases.map(tables),
        }
    }

    /// The same for a group of all rows, which is a batch to the programs that compute them.
    pub(crate) fn all_group_at(&self, start: Address, group: usize) -> BatchAt {
        let whole = self.at(start);
        let first = |rows: Address| rows.offset(group * SMALL_ROWS * WORD);
        BatchAt {
            tokens: first(whole.tokens),
            row_refs: RowRefsAt {
                position: first(whole.row_refs.position),
                run: first(whole.row_refs.run),
                sliding_end: first(whole.row_refs.sliding_end),
            },
            inputs: InputsAt {
                index: first(whole.inputs.index),
                ..whole.inputs
            },
            all: RowsAt {
                count: start.offset((self.group_counts.all + group) * WORD),
                ..whole.all
            },
            ..whole
        }
    }

    /// The same for a group of sampled rows, which are still rows of the whole batch.
    pub(crate) fn sampled_group_at(&self, start: Address, group: usize) -> BatchAt {
        let whole = self.at(start);
        BatchAt {
            sampled: RowsAt {
                count: start.offset((self.group_counts.sampled + group) * WORD),
                index: whole.sampled.index.offset(group * SMALL_ROWS * WORD),
            },
            ..whole
        }
    }

    /// Addresses for the kernel that updates the tables that stay, of the updates from this word on.
    pub(crate) fn update_tables(&self, start: Address, updates: usize) -> UpdateTablesParams {
        UpdateTablesParams {
            words: start,
            updates: start.offset(updates * WORD),
            tables: start.offset(self.kept * WORD),
        }
    }

    /// Addresses that the sampler reads, and where it leaves tokens for the batch after this one.
    pub(crate) fn sampler_inputs(&self, start: Address, logits: Address) -> SamplerInputs {
        SamplerInputs {
            rows: self.at(start).sampled,
            logits,
            settings: start.offset(self.settings * WORD),
            words: start,
            in_flight: start.offset(self.in_flight * WORD),
            samples: start.offset(self.samples * WORD),
        }
    }
}
