//! Classes of batches by their rows.

use carat_model::backend::Batching;

use crate::isa::Isa;

/// Rows of a small batch, at most.
pub const SMALL_ROWS: usize = 32;

/// Classes of batches. Within one, a row has the same bits in any company.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RowClass {
    /// Up to [`SMALL_ROWS`] rows, and any number where there are no tiles or the company must not matter: the same bits at every
    /// instruction set.
    Small,
    /// Multiplied in tiles of BF16.
    Large,
}

/// Rows that make a class: one fact of a compiled model.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RowClasses {
    has_large: bool,
}

impl RowClasses {
    pub fn new(isa: Isa, batching: Batching) -> RowClasses {
        RowClasses {
            has_large: isa.has_tiles() && batching == Batching::Fast,
        }
    }

    /// The class of a step on so many rows of a batch.
    pub fn of(self, rows: usize) -> RowClass {
        if self.has_large && rows > SMALL_ROWS {
            RowClass::Large
        } else {
            RowClass::Small
        }
    }
}
