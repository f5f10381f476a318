//! Activations as quantized weights are multiplied with them: int8, or BF16 in tiles for large batches where there are
//! registers for those.
//!
//! As int8, a row is cut into groups of 32 values that share an f32 scale, and stored in chunks of sixteen groups, with the sums
//! that minimums and offsets need beside the codes. The last chunk is filled up with zeros, so kernels read whole chunks.
//! A value is converted once, right after it is computed, and shared by all its readers.

use super::{
    amx_bf16,
    row_class::{RowClass, RowClasses, SMALL_ROWS},
};
use crate::simd::{Floats, LANES, Simd, Tile};

/// Values that share a scale.
pub const GROUP: usize = 32;
/// Values of a chunk.
pub const CHUNK: usize = GROUP * LANES;

/// Sixteen groups of a row.
#[derive(Clone, Copy)]
#[repr(C, align(64))]
pub struct Chunk {
    pub codes: [i8; CHUNK],
    /// The same in the order of [`super::format::Order::HalfGroups`], as formats of nibbles unpack.
    pub by_half_groups: [i8; CHUNK],
    /// Value of one unit of each group's codes.
    pub scales: [f32; LANES],
    /// Of each group's codes.
    pub sums: [i32; LANES],
    /// Of each half group's codes, for formats whose own groups are 16 long.
    pub half_sums: [i32; 2 * LANES],
}

impl Chunk {
    const ZERO: Chunk = Chunk {
        codes: [0; CHUNK],
        by_half_groups: [0; CHUNK],
        scales: [0.0; LANES],
        sums: [0; LANES],
        half_sums: [0; 2 * LANES],
    };
}

/// One row.
pub type Row<'a> = &'a [Chunk];

/// Rows there is memory for in each format.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ActivationRows {
    pub int8: usize,
    pub bf16: usize,
}

impl ActivationRows {
    /// For steps on up to `rows` rows of a batch that become `each` rows: smaller batches are int8 everywhere.
    pub fn for_batches(classes: RowClasses, rows: usize, each: usize) -> ActivationRows {
        match classes.of(rows) {
            RowClass::Small => ActivationRows {
                int8: rows * each,
                bf16: 0,
            },
            RowClass::Large => ActivationRows {
                int8: SMALL_ROWS * each,
                bf16: rows * each,
            },
        }
    }
}

/// Rows of activations as products with quantized weights read them: a batch fills one of the two formats.
pub struct Activations {
    chunks: Vec<Chunk>,
    row_chunks: usize,
    /// BF16, `[row tiles, K steps]`.
    tiles: Vec<Tile>,
    row_tiles: usize,
}

impl Activations {
    /// Memory for rows of `columns` values, which must fill whole groups.
    pub fn new(rows: ActivationRows, columns: usize) -> Activations {
        assert!(
            columns.is_multiple_of(GROUP),
            "{columns} columns do not fill groups of {GROUP}"
        );
        let (row_chunks, row_tiles) = (columns.div_ceil(CHUNK), amx_bf16::k_steps(columns));
        Activations {
            chunks: vec![Chunk::ZERO; rows.int8 * row_chunks],
            row_chunks,
            tiles: vec![Tile::ZERO; rows.bf16.div_ceil(amx_bf16::ROWS) * row_tiles],
            row_tiles,
        }
    }

    pub fn row(&self, row: usize) -> Row<'_> {
        &self.chunks[row * self.row_chunks..][..self.row_chunks]
    }

    /// The chunks of all rows and how many each row has, for filling.
    pub fn chunks_mut(&mut self) -> (&mut [Chunk], usize) {
        (&mut self.chunks, self.row_chunks)
    }

    /// The tiles of all rows and how many sixteen rows have.
    pub fn tiles(&self) -> (&[Tile], usize) {
        (&self.tiles, self.row_tiles)
    }

    pub fn tiles_mut(&mut self) -> (&mut [Tile], usize) {
        (&mut self.tiles, self.row_tiles)
    }
}

/// Quantizes one row. Codes are the nearest multiples (ties to even) of a 127th of the group's largest magnitude.
#[inline(always)]
pub fn quantize<S: Simd>(x: &[f32], row: &mut [Chunk]) {
    for (values, chunk) in x.chunks(CHUNK).zip(row) {
        let (groups, rest) = values.as_chunks::<GROUP>();
        debug_assert!(rest.is_empty(), "rows fill whole groups");
        let (codes, _) = chunk.codes.as_chunks_mut::<GROUP>();
        for (g, (values, codes)) in groups.iter().zip(codes).enumerate() {
            let (values, _) = values.as_chunks::<LANES>();
            let (low, high) = (S::Floats::load(&values[0]), S::Floats::load(&values[1]));
            let largest = low.abs().max(high.abs()).largest();
            let inverse = if largest > 0.0 { 127.0 / largest } else { 0.0 };
            chunk.scales[g] = largest / 127.0;
            let (codes, _) = codes.as_chunks_mut::<LANES>();
            let inverse = S::Floats::splat(inverse);
            low.mul(inverse).round().store_i8(&mut codes[0]);
            high.mul(inverse).round().store_i8(&mut codes[1]);
            let (by_half_groups, _) = chunk.by_half_groups.as_chunks_mut::<LANES>();
            for (half, codes) in codes.iter().enumerate() {
                by_half_groups[16 * (g / 8) + 8 * (g % 2) + 4 * half + g % 8 / 2] = *codes;
                chunk.half_sums[2 * g + half] = codes.iter().map(|&code| i32::from(code)).sum();
            }
            chunk.sums[g] = chunk.half_sums[2 * g] + chunk.half_sums[2 * g + 1];
        }
    }
}
