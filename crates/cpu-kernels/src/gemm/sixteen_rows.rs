//! Sixteen weight rows read side by side and transposed in registers, for formats whose codes lie in runs of bytes: one vector holds the
//! same four columns of all of them, so a lane is an output and nothing has to be added across lanes.
//!
//! Groups go to whoever takes them: [`super::gemv_transposed`] multiplies them as they come, [`super::packed_int8`] keeps them.

use carat_gguf::QuantType;

use super::{
    WeightRows,
    format::{Format, TransposeLayout, WithFormat, with_format},
};
use crate::simd::{Floats, LANES, Simd, array};

/// Weight rows side by side.
pub const ROWS: usize = LANES;

/// Takes the groups of sixteen rows, in order.
pub(super) trait Groups<S: Simd> {
    /// A group of 32 columns, four to a vector. Codes are as the format has them, or prepared where those are signed.
    fn group<F: Format>(
        &mut self,
        group: usize,
        codes: &[S::Bytes; 8],
        scales: S::Floats,
        mins: S::Floats,
    );

    /// A group of 16 columns of a format without minimums.
    fn half_group<F: Format>(&mut self, group: usize, codes: &[S::Bytes; 4], scales: S::Floats);
}

/// Whether the codes of a format lie in runs.
pub(super) fn can_read(quant: QuantType) -> bool {
    struct Transposes;
    impl WithFormat for Transposes {
        type Output = bool;
        fn run<F: Format>(self, _: F) -> bool {
            F::TRANSPOSE != TransposeLayout::None
        }
    }
    !quant.is_float() && with_format(quant, Transposes)
}

/// Hands out all groups of up to sixteen rows; missing ones have zeros. The format must have runs.
#[inline(always)]
pub(super) fn read<S: Simd, F: Format>(format: F, rows: WeightRows<'_>, to: &mut impl Groups<S>) {
    let spare;
    let sixteen = if rows.len() == ROWS {
        SixteenRows::new(rows.bytes, rows.stride(), rows.row_bytes)
    } else {
        spare = filled_up(rows);
        SixteenRows::new(&spare, rows.row_bytes, rows.row_bytes)
    };
    sixteen.read::<S, F>(format, to);
}

/// The last rows of a matrix and zeros for those that are missing.
#[cold]
fn filled_up(rows: WeightRows<'_>) -> Vec<u8> {
    let mut bytes = vec![0; ROWS * rows.row_bytes];
    for (row, to) in bytes
        .chunks_exact_mut(rows.row_bytes)
        .take(rows.len())
        .enumerate()
    {
        to.copy_from_slice(rows.row(row));
    }
    bytes
}

/// Sixteen weight rows.
#[derive(Clone, Copy)]
struct SixteenRows<'a> {
    bytes: &'a [u8],
    stride: usize,
    row_bytes: usize,
}

impl<'a> SixteenRows<'a> {
    fn new(bytes: &'a [u8], stride: usize, row_bytes: usize) -> SixteenRows<'a> {
        SixteenRows {
            bytes,
            stride,
            row_bytes,
        }
    }

    /// Sixteen bytes of every row, from `start` on.
    #[inline(always)]
    fn transpose<S: Simd>(self, start: usize) -> [S::Bytes; 4] {
        S::transpose_strided(&self.bytes[start..], self.stride)
    }

    /// The F16 of every row at `start`. The two bytes behind it are read, too.
    #[inline(always)]
    fn f16<S: Simd>(self, start: usize) -> S::Floats {
        S::low_f16(S::load_words_strided(&self.bytes[start..], self.stride))
    }

    /// The F16 of every row behind the two bytes at `start`, which are read, too.
    #[inline(always)]
    fn f16_after<S: Simd>(self, start: usize) -> S::Floats {
        S::high_f16(S::load_words_strided(&self.bytes[start..], self.stride))
    }

    #[inline(always)]
    fn read<S: Simd, F: Format>(self, format: F, to: &mut impl Groups<S>) {
        let block = format.quant().block_bytes();
        let in_block = format.quant().block_len() / F::GROUP;
        for b in 0..self.row_bytes / block {
            let (start, group) = (b * block, b * in_block);
            prefetch_next::<S>(self, start, block);
            // Constant conditions, so that a format's branch is compiled for that format alone.
            if const { matches!(F::TRANSPOSE, TransposeLayout::Q6K) } {
                self.q6_k::<S, F>(start, group, to);
            } else if const { matches!(F::TRANSPOSE, TransposeLayout::Q4K) } {
                self.q4_k::<S, F>(start, group, to);
            } else if const { matches!(F::TRANSPOSE, TransposeLayout::Int8) } {
                let low = self.transpose::<S>(start + 2);
                let high = self.transpose::<S>(start + 18);
                let codes = joined::<S>(low, high);
                let codes = array![no_bytes::<S>(); i => S::prepare(codes[i])];
                to.group::<F>(group, &codes, self.f16::<S>(start), S::Floats::zero());
            } else if const { matches!(F::TRANSPOSE, TransposeLayout::Nibbles) } {
                let bytes = self.transpose::<S>(start + block - 16);
                let low = array![no_bytes::<S>(); i => S::field(bytes[i], 0, 15)];
                let high = array![no_bytes::<S>(); i => S::field(bytes[i], 4, 15)];
                // The format adds its minimum.
                let mins = if F::MINS {
                    self.f16_after::<S>(start).mul(S::Floats::splat(-1.0))
                } else {
                    S::Floats::zero()
                };
                let codes = joined::<S>(low, high);
                to.group::<F>(group, &codes, self.f16::<S>(start), mins);
            }
        }
    }

    /// A block of eight groups under six-bit scales and minimums, which come as three words of four bytes per row.
    #[inline(always)]
    fn q4_k<S: Simd, F: Format>(self, start: usize, first_group: usize, to: &mut impl Groups<S>) {
        let (d, dmin) = (self.f16::<S>(start), self.f16_after::<S>(start));
        let [_, scales, mins, rest] = self.transpose::<S>(start);
        for pair in 0..4 {
            let at = start + 16 + 32 * pair;
            let bytes = joined::<S>(self.transpose::<S>(at), self.transpose::<S>(at + 16));
            for half in 0..2 {
                let group = 2 * pair + half;
                let codes = array![no_bytes::<S>(); i => S::field(bytes[i], 4 * half as u32, 15)];
                let shift = 8 * (group % 4) as u32;
                let (scale, min) = if group < 4 {
                    (
                        S::word_field(scales, shift, 63),
                        S::word_field(mins, shift, 63),
                    )
                } else {
                    (
                        S::or_ints(
                            S::word_field(rest, shift, 15),
                            S::shl_ints(S::word_field(scales, shift + 6, 3), 4),
                        ),
                        S::or_ints(
                            S::word_field(rest, shift + 4, 15),
                            S::shl_ints(S::word_field(mins, shift + 6, 3), 4),
                        ),
                    )
                };
                to.group::<F>(
                    first_group + group,
                    &codes,
                    d.mul(S::to_floats(scale)),
                    dmin.mul(S::to_floats(min)),
                );
            }
        }
    }

    /// A block of sixteen groups of sixteen codes: four bits and two bits apart, under signed bytes as scales.
    #[inline(always)]
    fn q6_k<S: Simd, F: Format>(self, start: usize, first_group: usize, to: &mut impl Groups<S>) {
        let d = self.f16_after::<S>(start + 206);
        let scales = self.transpose::<S>(start + 192);
        // Half a block has four quarters of two groups, left and right. The low bits of quarters 0 and 2 share bytes, as do
        // those of 1 and 3; the high bits of all four share theirs.
        for half in 0..2 {
            for side in 0..2 {
                let high = self.transpose::<S>(start + 128 + 32 * half + 16 * side);
                for odd in 0..2 {
                    let low = self.transpose::<S>(start + 64 * half + 32 * odd + 16 * side);
                    for upper in 0..2 {
                        let quarter = odd + 2 * upper;
                        let (low_shift, high_shift) = (4 * upper as u32, 2 * quarter as u32);
                        let codes = array![no_bytes::<S>(); i => S::or(
                            S::field(low[i], low_shift, 15),
                            S::shl::<4>(S::field(high[i], high_shift, 3)),
                        )];
                        let group = 8 * half + 2 * quarter + side;
                        let (word, shift) = (scales[group / 4], 8 * (group % 4) as u32);
                        let byte = S::word_field(word, shift, 255);
                        let scale = S::minus_times(byte, 256, S::word_field(word, shift + 7, 1));
                        to.half_group::<F>(first_group + group, &codes, d.mul(S::to_floats(scale)));
                    }
                }
            }
        }
    }
}

/// Prefetches as many bytes as `block` has in every row, in the sixteen rows that come next.
#[inline(always)]
fn prefetch_next<S: Simd>(rows: SixteenRows<'_>, start: usize, block: usize) {
    let first = start * ROWS;
    for line in first.div_ceil(64)..(first + ROWS * block).div_ceil(64) {
        S::prefetch(
            rows.bytes
                .as_ptr()
                .wrapping_add(ROWS * rows.stride + 64 * line),
        );
    }
}

#[inline(always)]
fn no_bytes<S: Simd>() -> S::Bytes {
    S::load_bytes(&[0; 64])
}

#[inline(always)]
fn joined<S: Simd>(a: [S::Bytes; 4], b: [S::Bytes; 4]) -> [S::Bytes; 8] {
    [a[0], a[1], a[2], a[3], b[0], b[1], b[2], b[3]]
}
