//! Products of whole tiles of BF16: the vocabulary of processors that multiply sixteen rows by sixteen at once.
//!
//! The meaning in plain Rust is in `plain_tiles.rs`, the twin that the instructions are tested against.

use super::{LANES, Line, Simd};
use crate::pool::Block;

/// Values of a row in a tile.
pub(crate) const STEP: usize = 32;

/// Sixteen rows of 32 BF16, one side of a product.
///
/// On the left, a line is a row. On the right, a line holds two neighbouring values of all sixteen rows.
#[derive(Clone, Copy)]
#[repr(C, align(64))]
pub(crate) struct Tile(pub(crate) [Line; LANES]);

impl Tile {
    pub(crate) const ZERO: Tile = Tile([Line([0; 64]); LANES]);
}

/// What a product does with the sums that are there.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Sums {
    Begin,
    Continue,
}

/// A thread's tile registers, and the conversions that fill tiles.
pub(crate) trait Tiles {
    type Vectors: Simd;

    /// Takes the registers.
    fn take() -> Self;

    /// Multiplies `M` by `N` tiles, one or two each, step after step. A right tile meets as many left ones in a row as
    /// there are more of those. `sums` has `16 M` rows of `16 N`.
    ///
    /// Within a tile, the even and the odd values are summed apart, each with one rounding a value, then added to each
    /// other and to the sum. Numbers too small to be normal count as zero.
    fn multiply<const M: usize, const N: usize>(
        &mut self,
        left: [&[Tile]; M],
        right: [&[Tile]; N],
        begin: Sums,
        sums: &mut Block<'_>,
    );

    /// Rounds 32 numbers to BF16, ties to even; those too small to be normal become zero.
    fn narrow(
        low: <Self::Vectors as Simd>::Floats,
        high: <Self::Vectors as Simd>::Floats,
        to: &mut Line,
    );

    /// Unsigned bytes `2 pair` and the next of each 4-byte unit, as the numbers of a right line: the units' bytes alternate.
    /// The first eight rows of the line come from the first two of every four units, the others from the last two
    /// (see [`unit_of_row`]), which is how vectors are shuffled fastest.
    fn widen_pair(units: &Line, pair: usize) -> [<Self::Vectors as Simd>::Floats; 2];
}

/// Where the row of a right line stands among the units of [`Tiles::widen_pair`].
pub(crate) const fn unit_of_row(row: usize) -> usize {
    row % 8 / 2 * 4 + row / 8 * 2 + row % 2
}
