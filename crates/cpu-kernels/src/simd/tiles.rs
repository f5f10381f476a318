//! Products of whole tiles, of BF16 or int8: the vocabulary of processors that multiply sixteen rows by sixteen at once.
//!
//! The meaning in plain Rust is in `plain_tiles.rs`, the twin that the instructions are tested against.

use super::{LANES, Line, Simd};
use crate::matrix::MatrixMut;

/// BF16 values of a row in a tile.
pub const K_STEP: usize = 32;

/// Sixteen rows of 32 BF16 or 64 signed bytes, one side of a product.
///
/// On the left, a line is a row. On the right, a line holds two neighbouring BF16, or four neighbouring bytes, of all
/// sixteen rows.
#[derive(Clone, Copy)]
#[repr(C, align(64))]
pub struct Tile(pub [Line; LANES]);

impl Tile {
    pub const ZERO: Tile = Tile([Line([0; 64]); LANES]);
}

/// Products of int8, `[left row, right row]`.
#[derive(Clone, Copy)]
#[repr(C, align(64))]
pub struct Totals(pub [[i32; LANES]; LANES]);

impl Totals {
    pub const ZERO: Totals = Totals([[0; LANES]; LANES]);
}

/// Int8 products that may be in flight at once.
pub const IN_FLIGHT: usize = 4;

/// Initial value of a product's sums.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Accumulate {
    FromZero,
    OntoOutput,
}

/// A thread's tile registers, and the conversions that fill tiles.
pub trait Tiles {
    type Vectors: Simd;

    /// Takes the registers.
    fn take() -> Self;

    /// Multiplies `M` by `N` tiles, one or two each, step after step. A right tile meets as many left ones in a row as
    /// there are more of those. `sums` has `16 M` rows of `16 N`.
    ///
    /// Within a tile, the even and the odd values are summed apart, each with one rounding per value, then added to each
    /// other and to the sum. Numbers too small to be normal count as zero.
    fn multiply<const M: usize, const N: usize>(
        &mut self,
        left: [&[Tile]; M],
        right: [&[Tile]; N],
        accumulate: Accumulate,
        sums: &mut MatrixMut<'_>,
    );

    /// Starts the product in `slot`, one of [`IN_FLIGHT`]: that of as many left tiles as right ones, whose products add up.
    fn start_int8(&mut self, slot: usize, left: &[Tile], right: &[Tile]);

    /// Stores the product in `slot`. It is there sooner when others were started in between.
    fn finish_int8(&mut self, slot: usize, totals: &mut Totals);

    /// `N` numbers again and again, where `N` is 1, 2, 4, 8 or 16.
    fn repeat<const N: usize>(from: &[f32; N]) -> <Self::Vectors as Simd>::Floats;

    /// The signed codes of sixteen blocks of Q4_0, each a scale of two bytes and then sixteen bytes: the low nibbles, then
    /// the high ones, less 8.
    fn q4_0_codes(blocks: &[u8; 16 * 18]) -> [<Self::Vectors as Simd>::Bytes; 8];

    /// Asks for the cache line at an address, which need not be readable, but no nearer than the second cache: the first is
    /// full of tiles.
    fn prefetch(address: *const u8);

    /// Rounds 32 numbers to BF16, ties to even; those too small to be normal become zero.
    fn to_bf16(
        low: <Self::Vectors as Simd>::Floats,
        high: <Self::Vectors as Simd>::Floats,
        to: &mut Line,
    );

    /// Unsigned bytes `2 pair` and the next of each 4-byte unit, as the numbers of a right line: the units' bytes alternate.
    /// The first eight rows of the line come from the first two of every four units, the others from the last two
    /// (see [`unit_of_row`]), which is how vectors are shuffled fastest.
    fn widen_pair(units: &Line, pair: usize) -> [<Self::Vectors as Simd>::Floats; 2];
}

/// Position of a right line's row among the units of [`Tiles::widen_pair`].
pub const fn unit_of_row(row: usize) -> usize {
    row % 8 / 2 * 4 + row / 8 * 2 + row % 2
}
