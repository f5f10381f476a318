//! Page tables that stay on the device from batch to batch, so that a batch brings what has changed and not all that its sequences
//! have seen.
//!
//! Tables lie in one array behind the words of a batch, in the order they came. One that outgrows its room gets twice as much
//! elsewhere; when the array is full, batches bring their tables whole, and at the next one all begin anew. What is here is a copy:
//! nothing is lost by forgetting it.

use std::ops::Range;

use carat_model::{
    backend::Run,
    kv::{KvGroup, PerGroup},
};

/// Entries that a table gets at least.
const LEAST_ROOM: usize = 32;

/// Tables on the device, by name.
#[derive(Debug)]
pub(crate) struct KeptTables {
    /// Entries of the whole array.
    entries: usize,
    next: usize,
    is_full: bool,
    tables: Vec<PerGroup<Kept>>,
}

/// A table of one group.
#[derive(Clone, Debug, Default)]
struct Kept {
    room: Range<usize>,
    /// Entries that are as they were in the last batch with this name.
    written: Range<usize>,
}

/// Table of a run in a batch.
pub(crate) struct Placed {
    /// Where its first entry would lie in the array.
    pub(crate) start: usize,
    /// Entries that the device lacks.
    pub(crate) missing: Range<usize>,
}

impl KeptTables {
    pub(crate) fn new(entries: usize) -> KeptTables {
        KeptTables {
            entries,
            next: 0,
            is_full: false,
            tables: Vec::new(),
        }
    }

    /// What is known of the device's copy is no longer so.
    pub(crate) fn forget(&mut self) {
        *self = KeptTables::new(self.entries);
    }

    /// A batch begins.
    pub(crate) fn begin(&mut self) {
        if self.is_full {
            self.forget();
        }
    }

    /// Place of a run's table, of which the batch reads the entries `seen`; `None` if the table has no name or there is no room. The
    /// missing entries are taken for written.
    pub(crate) fn place(
        &mut self,
        run: &Run<'_>,
        group: KvGroup,
        seen: Range<usize>,
    ) -> Option<Placed> {
        let table = run.table?;
        let id = table.id as usize;
        if self.tables.len() <= id {
            self.tables.resize_with(id + 1, PerGroup::default);
        }
        let kept = self.tables[id].get_mut(group);
        if kept.room.len() < seen.end {
            let room = seen.end.next_power_of_two().max(LEAST_ROOM);
            let end = self.next + room;
            if end > self.entries {
                self.is_full = true;
                // The last batch with this name is no longer the one that wrote it.
                kept.written = 0..0;
                return None;
            }
            *kept = Kept {
                room: self.next..end,
                written: 0..0,
            };
            self.next = end;
        }
        let known = kept.written.end.min(*table.unchanged.get(group));
        let goes_on = kept.written.start <= seen.start && known >= seen.start;
        let (first, missing) = if goes_on {
            (kept.written.start, known.min(seen.end)..seen.end)
        } else {
            (seen.start, seen.clone())
        };
        kept.written = first..seen.end;
        Some(Placed {
            start: kept.room.start,
            missing,
        })
    }
}

#[cfg(test)]
mod tests {
    use carat_model::{backend::TableRef, kv::PageId};

    use super::*;

    fn run(id: u32, unchanged: usize) -> Run<'static> {
        let unchanged = PerGroup {
            full: unchanged,
            sliding: unchanged,
        };
        let none: &[PageId] = &[];
        Run {
            rows: 0..1,
            position: 0,
            pages: PerGroup {
                full: none,
                sliding: none,
            },
            sampled: 1,
            visible_end: None,
            table: Some(TableRef { id, unchanged }),
        }
    }

    /// Where the run's table lies, and what of it is missing.
    fn place(
        tables: &mut KeptTables,
        run: &Run<'_>,
        group: KvGroup,
        seen: Range<usize>,
    ) -> Option<(usize, Range<usize>)> {
        let placed = tables.place(run, group, seen);
        placed.map(|Placed { start, missing }| (start, missing))
    }

    #[test]
    fn entries_are_missing_until_they_were_brought() {
        let mut tables = KeptTables::new(1000);
        let full = KvGroup::Full;
        assert_eq!(place(&mut tables, &run(0, 0), full, 0..3), Some((0, 0..3)));
        assert_eq!(place(&mut tables, &run(2, 0), full, 0..1), Some((32, 0..1)));
        assert_eq!(place(&mut tables, &run(0, 3), full, 0..3), Some((0, 3..3)));
        assert_eq!(place(&mut tables, &run(0, 3), full, 0..5), Some((0, 3..5)));
        // Others since the second entry.
        assert_eq!(place(&mut tables, &run(0, 1), full, 0..5), Some((0, 1..5)));
        // Entries that a shorter batch did not read may have changed with it.
        assert_eq!(place(&mut tables, &run(0, 1), full, 0..2), Some((0, 1..2)));
        assert_eq!(place(&mut tables, &run(0, 5), full, 0..5), Some((0, 2..5)));
        // Each group has its own.
        let sliding = KvGroup::Sliding;
        assert_eq!(
            place(&mut tables, &run(0, 0), sliding, 2..5),
            Some((64, 2..5))
        );
        assert_eq!(
            place(&mut tables, &run(0, 5), sliding, 4..6),
            Some((64, 5..6))
        );
        // It goes back, to where nothing is known.
        assert_eq!(
            place(&mut tables, &run(0, 6), sliding, 1..6),
            Some((64, 1..6))
        );
        // A gap.
        assert_eq!(
            place(&mut tables, &run(0, 6), sliding, 9..11),
            Some((64, 9..11))
        );
        tables.forget();
        assert_eq!(place(&mut tables, &run(0, 5), full, 0..5), Some((0, 0..5)));
    }

    #[test]
    fn a_table_that_outgrows_its_room_is_brought_whole() {
        let mut tables = KeptTables::new(1000);
        let full = KvGroup::Full;
        assert_eq!(
            place(&mut tables, &run(0, 0), full, 0..32),
            Some((0, 0..32))
        );
        assert_eq!(
            place(&mut tables, &run(0, 32), full, 0..33),
            Some((32, 0..33))
        );
        assert_eq!(
            place(&mut tables, &run(0, 33), full, 0..64),
            Some((32, 33..64))
        );
    }

    #[test]
    fn tables_without_name_or_room_are_the_batchs_own() {
        let mut tables = KeptTables::new(70);
        let full = KvGroup::Full;
        let unnamed = Run {
            table: None,
            ..run(0, 0)
        };
        assert_eq!(place(&mut tables, &unnamed, full, 0..3), None);
        tables.begin();
        assert_eq!(
            place(&mut tables, &run(0, 0), full, 0..30),
            Some((0, 0..30))
        );
        assert_eq!(place(&mut tables, &run(1, 0), full, 0..33), None);
        assert_eq!(
            place(&mut tables, &run(2, 0), full, 0..30),
            Some((32, 0..30))
        );
        // The next batch begins with an empty array.
        tables.begin();
        assert_eq!(
            place(&mut tables, &run(1, 33), full, 0..33),
            Some((0, 0..33))
        );
        assert_eq!(place(&mut tables, &run(0, 30), full, 0..30), None);
    }
}
