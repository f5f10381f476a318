//! Dot products of quantized weight rows with quantized activation rows.
//!
//! The value of one output is defined independently of how it is computed. Each group of a weight row (32 values, or 16
//! in some formats) gives an exact integer, the sum of code times code. Group `g` then adds
//! `integer * (weight scale * activation scale)`, and for formats with minimums subtracts
//! `minimum * (sum of activations)`, to lane `g % 16` of sixteen f32; at the end the lanes are folded in the order of
//! [`crate::simd::Floats::sum`]. Integers do not depend on order, so [`matvec`] and [`sideways`] (few rows, weights read
//! packed) and [`panel`] (many rows, weights unpacked once) agree to the last bit on every instruction set, and a row's result does
//! not depend on its neighbours.
//!
//! [`tiled`] is another class of results, for many rows where there are registers for whole tiles: BF16 on both sides.
//!
//! - [`format`](mod@format): what a format must say; the other lower-case names are the formats
//! - [`float`]: F32, F16 and BF16 weights with f32 activations

pub(crate) mod float;
pub(crate) mod format;
mod iq4;
mod k_quants;
mod legacy;
pub(crate) mod matvec;
pub(crate) mod panel;
pub(crate) mod sideways;
#[cfg(test)]
mod tests;
pub(crate) mod tiled;

/// A run of weight rows in the file.
#[derive(Clone, Copy)]
pub(crate) struct WeightRows<'a> {
    bytes: &'a [u8],
    stride: usize,
    row_bytes: usize,
    count: usize,
}

impl<'a> WeightRows<'a> {
    /// `count` rows of `row_bytes`, one every `stride` bytes.
    pub(crate) fn new(
        bytes: &'a [u8],
        stride: usize,
        row_bytes: usize,
        count: usize,
    ) -> WeightRows<'a> {
        assert!(
            count == 0 || (count - 1) * stride + row_bytes <= bytes.len(),
            "{count} rows of {row_bytes} bytes lie within {}",
            bytes.len()
        );
        WeightRows {
            bytes,
            stride,
            row_bytes,
            count,
        }
    }

    pub(crate) fn len(self) -> usize {
        self.count
    }

    #[inline(always)]
    pub(crate) fn row(self, row: usize) -> &'a [u8] {
        &self.bytes[row * self.stride..][..self.row_bytes]
    }

    pub(crate) fn slice(self, rows: std::ops::Range<usize>) -> WeightRows<'a> {
        let bytes = &self.bytes[rows.start * self.stride..];
        WeightRows::new(bytes, self.stride, self.row_bytes, rows.len())
    }
}
