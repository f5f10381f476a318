//! A batch as words for kernels, which go to the device in one copy. Only the words in use are copied.

use carat_model::{
    backend::{BackendError, Batch, Feed},
    kv::{KvGroup, pages_of},
    plan::Plan,
};

use super::sample::SettingsAt;
use crate::{
    compile::batch_layout::BatchLayout,
    device::Address,
    kernel::{FROM_SAMPLE, NONE},
};

impl BatchLayout {
    /// Writes a checked batch. Returns how many words are in use, from the start.
    pub(crate) fn write(
        &self,
        plan: &Plan,
        batch: &Batch<'_>,
        words: &mut [u32],
    ) -> Result<usize, BackendError> {
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
        let mut entries = 0;
        for (r, run) in batch.runs.iter().enumerate() {
            let end = pages_of(run.position + run.rows.len());
            for group in KvGroup::ALL {
                if !plan.uses(group) {
                    continue;
                }
                // Entries behind the window of the run's first row are not looked at, and may be freed.
                let first = plan.first_visible_page(group, run.position);
                let seen = &run.pages.get(group)[first..end];
                if entries + seen.len() > self.page_entries {
                    return Err(BackendError::Unsupported {
                        what: format!(
                            "the page tables of {} runs have more than {} entries together",
                            batch.runs.len(),
                            self.page_entries
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

#[cfg(test)]
mod tests {
    use carat_gguf::QuantType;
    use carat_model::{
        backend::{Batching, CompileOptions, Run, token_feeds},
        gemma4,
        kv::{PAGE_TOKENS, PageId, PerGroup},
    };
    use carat_testkit::tiny::{Tiny, Variant};

    use super::*;
    use crate::compile::batch_layout::WORD;

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
        let layout = BatchLayout::new(&options);
        let mut words = vec![0; layout.words];
        let used = layout.write(&plan, &batch, &mut words).unwrap();
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

    #[test]
    fn feeds_are_tokens_numbers_of_samples_and_numbers_of_embeddings() {
        let plan = plan();
        let layout = BatchLayout::new(&options(10));
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
        layout.write(&plan, &batch, &mut words).unwrap();
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
        let layout = BatchLayout::new(&options(10));
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
        assert_eq!(layout.bytes(), (layout.samples + 3) * WORD);
    }

    #[test]
    fn tables_that_do_not_fit_are_refused_with_numbers() {
        let plan = plan();
        let mut layout = BatchLayout::new(&options(1));
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
        let refused = layout.write(&plan, &batch, &mut words).unwrap_err();
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
            host_pages: PerGroup::default(),
            kv: PerGroup::default(),
            max_rows: 4096,
            max_sampled: 64,
            probe: false,
            batching: Batching::Fast,
        };
        let bytes = BatchLayout::new(&options).bytes();
        assert!(bytes < 8 << 20, "{bytes}");
    }
}
