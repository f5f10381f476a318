//! Row counts: classes of batches that run different kernels, and the buckets that grids are sized for.

use carat_model::plan::Rows;

/// The most rows of a small batch: the columns of one tensor-core tile.
pub(crate) const SMALL_ROWS: usize = 8;

/// The most rows of a medium batch: as many as share weights that are dequantized in registers.
pub(crate) const MEDIUM_ROWS: usize = 64;

/// Class of batches that a program is lowered for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum RowClass {
    /// Up to [`SMALL_ROWS`] rows.
    Small,
    /// Up to [`MEDIUM_ROWS`] rows.
    Medium,
    Large,
}

impl RowClass {
    pub(crate) fn of(rows: usize) -> RowClass {
        if rows <= SMALL_ROWS {
            RowClass::Small
        } else if rows <= MEDIUM_ROWS {
            RowClass::Medium
        } else {
            RowClass::Large
        }
    }
}

/// Rows of a batch.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct RowCounts {
    pub(crate) all: usize,
    pub(crate) sampled: usize,
}

impl RowCounts {
    pub(crate) fn get(self, rows: Rows) -> usize {
        match rows {
            Rows::All => self.all,
            Rows::Sampled => self.sampled,
        }
    }
}

/// Groups of rows that go through the programs of small batches one after another.
pub(crate) fn small_groups(rows: usize) -> usize {
    rows.div_ceil(SMALL_ROWS)
}

/// Rows of the bucket that holds so many: grids and buffers are sized for it.
pub(crate) fn padded_rows(rows: usize) -> usize {
    match RowClass::of(rows) {
        RowClass::Small => SMALL_ROWS,
        RowClass::Medium => rows.next_multiple_of(16),
        RowClass::Large if rows <= 512 => rows.next_multiple_of(64),
        RowClass::Large => rows.next_multiple_of(256),
    }
}

/// Buckets of medium and large batches, up to the one that holds so many rows.
pub(crate) fn buckets(max_rows: usize) -> impl Iterator<Item = usize> {
    let rows = SMALL_ROWS + 1..=max_rows;
    rows.filter(move |&rows| padded_rows(rows) == rows || rows == max_rows)
        .map(padded_rows)
}

/// One for each class of batches.
#[derive(Clone, Debug, Default)]
pub(crate) struct ByClass<T> {
    pub(crate) small: T,
    pub(crate) medium: T,
    pub(crate) large: T,
}

impl<T> ByClass<T> {
    pub(crate) fn get(&self, class: RowClass) -> &T {
        match class {
            RowClass::Small => &self.small,
            RowClass::Medium => &self.medium,
            RowClass::Large => &self.large,
        }
    }

    pub(crate) fn all(&self) -> [&T; 3] {
        [&self.small, &self.medium, &self.large]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn padding_holds_the_rows_and_grows() {
        let padded: Vec<usize> = [1, 8, 9, 16, 17, 64, 65, 512, 513, 2048]
            .map(padded_rows)
            .into();
        assert_eq!(padded, [8, 8, 16, 16, 32, 64, 128, 512, 768, 2048]);
        for rows in 1..3000 {
            let held = padded_rows(rows);
            assert!(held >= rows && padded_rows(held) == held && padded_rows(rows + 1) >= held);
        }
    }

    #[test]
    fn buckets_are_the_padded_rows_of_medium_and_large_batches() {
        for max_rows in [1, 8, 9, 40, 64, 300, 2048, 2050] {
            let mut expected: Vec<usize> = (SMALL_ROWS + 1..=max_rows).map(padded_rows).collect();
            expected.dedup();
            let found: Vec<usize> = buckets(max_rows).collect();
            assert_eq!(found, expected, "up to {max_rows} rows");
        }
    }
}
