//! Classes of batches by their rows.

use crate::kernel::isa::Isa;

/// Rows of a small batch, at most.
pub(crate) const SMALL_ROWS: usize = 32;

/// Classes of batches. Within one, a row has the same bits in any company.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum RowClass {
    /// Up to [`SMALL_ROWS`] rows, and any number where there are no tiles: the same bits at every instruction set.
    Small,
    /// Multiplied in tiles of BF16.
    Large,
}

impl RowClass {
    /// The class of a step on so many rows of a batch.
    pub(crate) fn of(isa: Isa, rows: usize) -> RowClass {
        if isa.has_tiles() && rows > SMALL_ROWS {
            RowClass::Large
        } else {
            RowClass::Small
        }
    }
}
