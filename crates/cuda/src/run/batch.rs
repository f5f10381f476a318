//! A batch as words for kernels, which go to the device in one copy. Only the words in use are copied.

use std::ops::Range;

use carat_model::{
    backend::{BackendError, Batch, Feed},
    kv::{KvGroup, pages_of},
    plan::Plan,
};

use super::{
    sample::SettingsAt,
    tables::{KeptTables, Placed},
};
use crate::{
    compile::{batch_layout::BatchLayout, rows::SMALL_ROWS},
    device::Address,
    kernel::{FROM_SAMPLE, NONE},
};

impl BatchLayout {
    /// Writes a checked batch, with those entries of its page tables that the device lacks. Returns how many words are in use, from
    /// the start, and which of them are updates of the tables that stay.
    pub(crate) fn write(
        &self,
        plan: &Plan,
        batch: &Batch<'_>,
        mut kept: Option<&mut KeptTables>,
        words: &mut [u32],
    ) -> Result<(usize, Range<usize>), BackendError> {
        words[self.all_count] = batch.feeds.len() as u32;
        for (word, feed) in words[self.tokens..].iter_mut().zip(batch.feeds) {
            *word = match *feed {
                Feed::Token(token) | Feed::Embedding { token, .. } => token,
                // The device puts the token in its place.
                Feed::Sampled(sample) => FROM_SAMPLE + sample,
            };
        }
        let mut inputs = 0;
        for (word, feed) in words[self.inputs..].iter_mut().zip(batch.feeds) {
            *word = NONE;
            if matches!(feed, Feed::Embedding { .. }) {
                *word = inputs;
                inputs += 1;
            }
        }
        for row in batch.all_rows() {
            words[self.positions + row.row] = row.position as u32;
            words[self.runs + row.row] = row.run as u32;
            words[self.sliding_ends + row.row] = batch.runs[row.run].sliding_end(row.row) as u32;
        }
        let mut sampled = 0;
        for row in batch.sampled_rows() {
            words[self.sampled + sampled] = row.row as u32;
            sampled += 1;
        }
        words[self.sampled_count] = sampled as u32;
        let groups = self.group_counts;
        write_groups(
            batch.feeds.len(),
            &mut words[groups.all..][..groups.max_all],
        );
        write_groups(sampled, &mut words[groups.sampled..][..groups.max_sampled]);
        words[self.run_count] = batch.runs.len() as u32;
        // Every run follows the one before it, and its sampled rows are its last.
        let (mut row, mut sampled) = (0, 0);
        words[self.first_rows] = 0;
        words[self.first_sampled] = 0;
        for (r, run) in batch.runs.iter().enumerate() {
            row += run.rows.len();
            sampled += run.sampled;
            words[self.first_rows + r + 1] = row as u32;
            words[self.first_sampled + r + 1] = sampled as u32;
        }
        if let Some(kept) = &mut kept {
            kept.begin();
        }
        let mut used = self.pages;
        let mut updates = Vec::new();
        for (r, run) in batch.runs.iter().enumerate() {
            let end = pages_of(run.position + run.rows.len());
            for group in KvGroup::ALL {
                if !plan.uses(group) {
                    continue;
                }
                // Entries behind the window of the run's first row are not looked at, and may be freed.
                let seen = plan.first_visible_page(group, run.position)..end;
                let kept = kept.as_mut();
                let (base, brought) = match kept.and_then(|k| k.place(run, group, seen.clone())) {
                    Some(Placed { start, missing }) => {
                        if !missing.is_empty() {
                            let at = start + missing.start;
                            updates.push([at, used, missing.len()].map(|word| word as u32));
                        }
                        ((self.kept + start) as i32, missing)
                    }
                    None => (used as i32 - seen.start as i32, seen),
                };
                if used + brought.len() > self.pages + self.page_entries {
                    return Err(BackendError::Unsupported {
                        what: format!(
                            "the page tables of {} runs have more than {} entries together",
                            batch.runs.len(),
                            self.page_entries
                        ),
                    });
                }
                words[self.bases.get(group) + r] = (base - self.pages as i32).cast_unsigned();
                for page in &run.pages.get(group)[brought] {
                    words[used] = page.0;
                    used += 1;
                }
            }
        }
        let first_update = used;
        for word in updates.into_iter().flatten() {
            words[used] = word;
            used += 1;
        }
        Ok((used, first_update..used))
    }

    /// Writes where the embeddings of a batch lie, those of its rows one after another.
    pub(crate) fn write_inputs_at(&self, inputs: Address, words: &mut [u32]) {
        for (word, bytes) in words[self.inputs_at..]
            .iter_mut()
            .zip(inputs.0.to_ne_bytes().as_chunks().0)
        {
            *word = u32::from_ne_bytes(*bytes);
        }
    }

    /// Addresses of the settings of sampled rows, with what happens to logits behind the `used` words of [`BatchLayout::write`].
    pub(crate) fn settings_at(&self, used: usize) -> SettingsAt {
        SettingsAt {
            settings: self.settings,
            max_rows: self.max_drawn,
            changes: used,
        }
    }
}

/// Writes how many of the rows each group has.
fn write_groups(rows: usize, words: &mut [u32]) {
    for (group, word) in words.iter_mut().enumerate() {
        *word = rows.saturating_sub(group * SMALL_ROWS).min(SMALL_ROWS) as u32;
    }
}

#[cfg(test)]
mod tests {
    use carat_gguf::QuantType;
    use carat_model::{
        backend::{Batching, CompileOptions, Run, TableRef, token_feeds},
        gemma4,
        kv::{PAGE_TOKENS, PageId, PerGroup},
    };
    use carat_testkit::tiny::{Tiny, Variant};

    use super::*;
    use crate::{
        compile::batch_layout::{PageTables, WORD},
        kernel::UPDATE_WORDS,
    };

    fn plan() -> Plan {
        // Windows of 8 positions.
        gemma4::plan(&Tiny::new(Variant::Dense12b, QuantType::Q8_0).model())
    }

    fn options(pages: usize) -> CompileOptions {
        CompileOptions {
            pages: PerGroup {
                full: pages,
                sliding: pages,
            },
            chunk_pages: 0,
            host_pages: PerGroup::default(),
            kv: PerGroup::default(),
            max_rows: 6,
            max_sampled: 3,
            probe: false,
            batching: Batching::Fast,
        }
    }

    /// Looks a page up the way kernels do.
    fn page(layout: &BatchLayout, words: &[u32], group: KvGroup, run: usize, at: usize) -> u32 {
        let base = words[layout.bases.get(group) + run].cast_signed();
        let entry = base + (at / PAGE_TOKENS) as i32;
        words[layout.pages + entry as usize]
    }

    #[test]
    fn groups_of_an_invariant_batch_have_rows_of_their_own() {
        let options = CompileOptions {
            max_rows: 20,
            max_sampled: 9,
            batching: Batching::Invariant,
            ..options(10)
        };
        let layout = BatchLayout::new(&options, PageTables::Stay);
        let tokens: Vec<u32> = (0..18).collect();
        let pages: Vec<PageId> = (0..1).map(PageId).collect();
        let batch = Batch {
            feeds: &token_feeds(&tokens),
            runs: &[Run {
                rows: 0..18,
                position: 3,
                pages: PerGroup {
                    full: &pages,
                    sliding: &pages,
                },
                sampled: 9,
                visible_end: None,
                table: None,
            }],
        };
        let mut words = vec![u32::MAX; layout.words];
        layout.write(&plan(), &batch, None, &mut words).unwrap();
        // As a kernel reads it: from the address of a part, the row's word.
        let start = Address(1 << 20);
        let word = |at: Address, row: usize| words[(at.0 - start.0) as usize / WORD + row];
        for (group, count) in [(0, 8), (1, 8), (2, 2)] {
            let at = layout.all_group_at(start, group);
            assert_eq!(word(at.all.count, 0), count);
            for row in 0..count as usize {
                assert_eq!(word(at.tokens, row), (8 * group + row) as u32);
                assert_eq!(
                    word(at.row_refs.position, row),
                    (3 + 8 * group + row) as u32
                );
                assert_eq!(word(at.row_refs.run, row), 0);
                assert_eq!(word(at.inputs.index, row), NONE);
            }
            assert_eq!(at.all.index, layout.at(start).all.index);
        }
        for (group, count) in [(0, 8), (1, 1)] {
            let at = layout.sampled_group_at(start, group);
            assert_eq!(word(at.sampled.count, 0), count);
            for row in 0..count as usize {
                let of_batch = word(at.sampled.index, row);
                assert_eq!(of_batch, (9 + 8 * group + row) as u32);
                assert_eq!(word(at.tokens, of_batch as usize), of_batch);
            }
        }
    }

    #[test]
    fn a_ragged_batch_is_written_for_kernels() {
        let plan = plan();
        let options = options(10);
        let pages = |ids: &[u32]| -> Vec<PageId> { ids.iter().copied().map(PageId).collect() };
        let (full, mut sliding) = (pages(&[4, 2, 9, 7]), pages(&[0, 1, 8, 5]));
        sliding[..2].fill(PageId::FREED);
        let short = pages(&[6]);
        let run = |rows, position, pages, sampled| Run {
            rows,
            position,
            pages,
            sampled,
            visible_end: None,
            table: None,
        };
        let both = PerGroup {
            full: full.as_slice(),
            sliding: sliding.as_slice(),
        };
        let one = PerGroup {
            full: short.as_slice(),
            sliding: short.as_slice(),
        };
        let batch = Batch {
            feeds: &token_feeds(&[10, 11, 12, 13, 14]),
            runs: &[run(0..3, 95, both, 2), run(3..5, 0, one, 1)],
        };
        batch.check(&plan, &options, 0).unwrap();
        let layout = BatchLayout::new(&options, PageTables::Stay);
        let mut words = vec![0; layout.words];
        let (used, updates) = layout.write(&plan, &batch, None, &mut words).unwrap();
        assert!(updates.is_empty());
        let part = |start: usize, count: usize| words[start..start + count].to_vec();
        assert_eq!(part(layout.all_count, 1), [5]);
        assert_eq!(part(layout.sampled_count, 1), [3]);
        assert_eq!(part(layout.tokens, 5), [10, 11, 12, 13, 14]);
        assert_eq!(part(layout.positions, 5), [95, 96, 97, 0, 1]);
        assert_eq!(part(layout.runs, 5), [0, 0, 0, 1, 1]);
        assert_eq!(part(layout.sliding_ends, 5), [96, 97, 98, 1, 2]);
        assert_eq!(part(layout.inputs, 5), [NONE; 5]);
        assert_eq!(part(layout.sampled, 3), [1, 2, 4]);
        assert_eq!(part(layout.run_count, 1), [2]);
        assert_eq!(part(layout.first_rows, 3), [0, 3, 5]);
        assert_eq!(part(layout.first_sampled, 3), [0, 2, 3]);
        for (at, id) in [(0, 4), (40, 2), (95, 9), (96, 7)] {
            assert_eq!(page(&layout, &words, KvGroup::Full, 0, at), id);
        }
        for (at, id) in [(88, 8), (97, 5)] {
            assert_eq!(page(&layout, &words, KvGroup::Sliding, 0, at), id);
        }
        assert_eq!(page(&layout, &words, KvGroup::Sliding, 1, 1), 6);
        // Two sliding entries are behind the window.
        assert_eq!(used, layout.pages + 4 + 2 + 1 + 1);
    }

    /// Page tables as the device has them: a batch's words are copied there, then the tables that stay are updated from them.
    fn bring(layout: &BatchLayout, device: &mut [u32], words: &[u32], updates: Range<usize>) {
        device[..updates.end].copy_from_slice(&words[..updates.end]);
        for update in device[updates].to_vec().chunks_exact(UPDATE_WORDS) {
            let [at, from, count] = [update[0], update[1], update[2]].map(|word| word as usize);
            device.copy_within(from..from + count, layout.kept + at);
        }
    }

    #[test]
    fn tables_that_stay_are_those_of_every_batch() {
        // Too little for all of them, so that it is full every other batch, and enough.
        history_of_tables(200);
        let (brought, seen) = history_of_tables(300);
        assert!(10 * brought < seen, "{brought} of {seen} entries came");
    }

    /// A sequence as an engine tells of it.
    #[derive(Default)]
    struct Sequence {
        position: usize,
        /// Rows in the next batch; none leaves it out.
        rows: usize,
        pages: PerGroup<Vec<PageId>>,
        /// Entries as they were in the last batch.
        known: PerGroup<usize>,
    }

    impl Sequence {
        /// Another sequence takes its name, or it has other pages from somewhere on.
        fn goes_back(&mut self, from: usize, below: &mut impl FnMut(usize) -> usize) {
            self.position = self.position.min(from * PAGE_TOKENS);
            self.pages.full.truncate(from);
            self.known.full = self.known.full.min(from);
            // Those behind the window were freed, so there are others now.
            self.pages.sliding = (0..from).map(|_| PageId(below(40) as u32)).collect();
            self.known.sliding = 0;
        }

        /// Gets the pages of its next rows; those behind the window are freed.
        fn grows(&mut self, plan: &Plan, below: &mut impl FnMut(usize) -> usize) {
            for group in KvGroup::ALL {
                let table = self.pages.get_mut(group);
                while table.len() < pages_of(self.position + self.rows) {
                    table.push(PageId(below(40) as u32));
                }
                table[..plan.first_visible_page(group, self.position)].fill(PageId::FREED);
            }
        }

        fn run(&self, id: usize, first_row: usize) -> Run<'_> {
            Run {
                rows: first_row..first_row + self.rows,
                position: self.position,
                pages: PerGroup {
                    full: self.pages.full.as_slice(),
                    sliding: self.pages.sliding.as_slice(),
                },
                sampled: 1,
                visible_end: None,
                table: Some(TableRef {
                    id: id as u32,
                    unchanged: self.known,
                }),
            }
        }

        /// The batch was taken.
        fn goes_on(&mut self) {
            if self.rows > 0 {
                self.position += self.rows;
                self.known = PerGroup {
                    full: self.pages.full.len(),
                    sliding: self.pages.sliding.len(),
                };
            }
            if self.position > 900 {
                *self = Sequence::default();
            }
        }
    }

    /// Sequences come, go on, go back and end, in batches that have some of them. Returns how many entries of page tables batches
    /// brought, and how many they had.
    fn history_of_tables(room: usize) -> (usize, usize) {
        let plan = plan();
        let options = CompileOptions {
            max_rows: 12,
            ..options(40)
        };
        let mut layout = BatchLayout::new(&options, PageTables::Stay);
        layout.kept_entries = room;
        let mut kept = KeptTables::new(room);
        let mut words = vec![0; layout.words];
        let mut device = vec![u32::MAX; layout.kept + room];
        let mut state = 1u64;
        let mut below = |end: usize| {
            state = state.wrapping_mul(6_364_136_223_846_793_005);
            state = state.wrapping_add(1_442_695_040_888_963_407);
            (state >> 33) as usize % end
        };
        let mut sequences: [Sequence; 4] = Default::default();
        let (mut brought, mut seen) = (0, 0);
        for _ in 0..20_000 {
            for sequence in &mut sequences {
                if below(100) == 0 {
                    let from = below(sequence.pages.full.len() + 1);
                    sequence.goes_back(from, &mut below);
                }
                sequence.rows = below(4);
                sequence.grows(&plan, &mut below);
            }
            let (mut rows, mut runs) = (0, Vec::new());
            for (id, sequence) in sequences.iter().enumerate().filter(|(_, s)| s.rows > 0) {
                runs.push(sequence.run(id, rows));
                rows += sequence.rows;
            }
            if runs.is_empty() {
                continue;
            }
            let batch = Batch {
                feeds: &vec![Feed::Token(1); rows],
                runs: &runs,
            };
            let written = layout.write(&plan, &batch, Some(&mut kept), &mut words);
            let (used, updates) = written.unwrap();
            assert_eq!(used, updates.end);
            brought += updates.start - layout.pages;
            bring(&layout, &mut device, &words, updates);
            for (r, run) in runs.iter().enumerate() {
                for group in KvGroup::ALL {
                    let end = pages_of(run.position + run.rows.len());
                    for entry in plan.first_visible_page(group, run.position)..end {
                        let found = page(&layout, &device, group, r, entry * PAGE_TOKENS);
                        let expected = run.pages.get(group)[entry].0;
                        assert_eq!(found, expected, "{group:?} {entry} of {run:?}");
                        seen += 1;
                    }
                }
            }
            sequences.iter_mut().for_each(Sequence::goes_on);
        }
        (brought, seen)
    }

    #[test]
    fn feeds_are_tokens_numbers_of_samples_and_numbers_of_embeddings() {
        let plan = plan();
        let layout = BatchLayout::new(&options(10), PageTables::Stay);
        let mut words = vec![7; layout.words];
        let width = plan.input_width().unwrap();
        let row = vec![0.5; width];
        let embedding = |token| Feed::Embedding { row: &row, token };
        let feeds = [
            Feed::Sampled(4),
            embedding(9),
            Feed::Token(3),
            Feed::Sampled(0),
            embedding(8),
        ];
        let ends = [3, 4, 4, 4, 5];
        let pages = [PageId(2)];
        let run = Run {
            rows: 0..5,
            position: 0,
            pages: PerGroup {
                full: pages.as_slice(),
                sliding: pages.as_slice(),
            },
            sampled: 1,
            visible_end: Some(&ends),
            table: None,
        };
        let batch = Batch {
            feeds: &feeds,
            runs: &[run],
        };
        batch.check(&plan, &options(10), 5).unwrap();
        layout.write(&plan, &batch, None, &mut words).unwrap();
        layout.write_inputs_at(Address(0x1234_5678_9abc_def0), &mut words);
        let part = |start: usize, count: usize| words[start..start + count].to_vec();
        let tokens = [FROM_SAMPLE + 4, 9, 3, FROM_SAMPLE, 8];
        assert_eq!(part(layout.tokens, 5), tokens);
        assert_eq!(part(layout.inputs, 5), [NONE, 0, NONE, NONE, 1]);
        assert_eq!(part(layout.inputs_at, 2), [0x9abc_def0, 0x1234_5678]);
        assert_eq!(part(layout.sliding_ends, 5), ends);
    }

    #[test]
    fn parts_do_not_meet_and_rows_are_themselves() {
        let layout = BatchLayout::new(&options(10), PageTables::Stay);
        let starts = [
            layout.tokens,
            layout.all_count,
            layout.sampled_count,
            layout.positions,
            layout.runs,
            layout.sliding_ends,
            layout.inputs,
            layout.inputs_at,
            layout.sampled,
            layout.in_flight,
            layout.settings,
            layout.bases.full,
            layout.bases.sliding,
            layout.pages,
            layout.words,
        ];
        assert!(starts.is_sorted_by(|a, b| a < b));
        assert!(starts.iter().all(|s| s % 4 == 0));
        let (offset, rows) = layout.constant();
        assert_eq!(offset, layout.words * WORD);
        // For as many rows as a bucket has.
        assert_eq!(rows, [0, 1, 2, 3, 4, 5, 6, 7]);
        assert_eq!(layout.samples * WORD, offset + rows.len() * WORD);
        assert!(layout.kept >= layout.samples + 3);
        assert_eq!(layout.bytes(), (layout.kept + 120) * WORD);
        let whole = BatchLayout::new(&options(10), PageTables::ComeWhole);
        assert!(whole.bytes() < (layout.samples + 8) * WORD);
    }

    #[test]
    fn tables_that_do_not_fit_are_refused_with_numbers() {
        let plan = plan();
        let mut layout = BatchLayout::new(&options(1), PageTables::Stay);
        layout.page_entries = 1;
        let pages = [PageId(0)];
        let pages = PerGroup {
            full: pages.as_slice(),
            sliding: pages.as_slice(),
        };
        let run = Run {
            rows: 0..1,
            position: 0,
            pages,
            sampled: 0,
            visible_end: None,
            table: None,
        };
        let batch = Batch {
            feeds: &token_feeds(&[1]),
            runs: &[run],
        };
        let mut words = vec![0; layout.words];
        let refused = layout.write(&plan, &batch, None, &mut words);
        let refused = refused.unwrap_err();
        assert_eq!(
            refused.to_string(),
            "the page tables of 1 runs have more than 1 entries together"
        );
    }

    #[test]
    fn long_contexts_of_many_runs_take_a_bounded_table() {
        let options = CompileOptions {
            pages: PerGroup {
                full: 8192,
                sliding: 4096,
            },
            chunk_pages: 0,
            host_pages: PerGroup::default(),
            kv: PerGroup::default(),
            max_rows: 4096,
            max_sampled: 64,
            probe: false,
            batching: Batching::Fast,
        };
        let bytes = BatchLayout::new(&options, PageTables::Stay).bytes();
        assert!(bytes < 10 << 20, "{bytes}");
    }
}
