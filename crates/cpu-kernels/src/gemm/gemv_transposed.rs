//! GEMV with sixteen weight rows at a time, transposed in registers, times a few activation rows.
//!
//! This is the path of formats whose codes lie in runs of bytes, when a few sequences decode together. A group of sixteen
//! rows is transposed as it is read, so that one vector holds the same four columns of all of them: a lane is an output,
//! nothing has to be added across lanes, and the work of unpacking is shared by all activation rows. As in
//! [`super::packed_int8`], an output's sixteen partial sums are sixteen vectors, folded at the end; but nothing unpacked goes
//! through memory.

use std::marker::PhantomData;

use carat_gguf::QuantType;

use super::{
    WeightRows,
    activations::{Chunk, Row},
    format::{Coding, Format, TransposeLayout, WithFormat, with_format},
};
use crate::simd::{Floats, LANES, Simd, array};

/// Weight rows side by side.
pub const ROWS: usize = LANES;

/// Activation rows from which on this is faster than [`super::gemv`], which shares unpacked weights among four; fewer where weight
/// rows are short ([`super::choice`]).
pub const MIN_ROWS: usize = 5;
/// Activation rows that one call of [`gemv_transposed`] may take.
pub const MAX_ROWS: usize = 8;

/// Partial sums of a call, `[lane][row]`, a vector of outputs each.
pub struct Accumulators(Box<[[Column; MAX_ROWS]; LANES]>);

#[derive(Clone, Copy)]
#[repr(align(64))]
struct Column([f32; ROWS]);

impl Default for Accumulators {
    fn default() -> Accumulators {
        Accumulators(Box::new([[Column([0.0; ROWS]); MAX_ROWS]; LANES]))
    }
}

/// Whether the codes of a format lie in runs, so that [`gemv_transposed`] can take it.
pub fn takes(quant: QuantType) -> bool {
    struct Transposes;
    impl WithFormat for Transposes {
        type Output = bool;
        fn run<F: Format>(self, _: F) -> bool {
            F::TRANSPOSE != TransposeLayout::None
        }
    }
    !quant.is_float() && with_format(quant, Transposes)
}

/// Fills `out`, `[x.len(), weights.len()]`. The format must have runs.
#[inline(always)]
pub fn gemv_transposed<S: Simd>(
    quant: QuantType,
    weights: WeightRows<'_>,
    x: &[Row<'_>],
    sums: &mut Accumulators,
    out: &mut [f32],
) {
    assert_eq!(out.len(), x.len() * weights.len(), "an output per pair");
    assert!(x.len() <= MAX_ROWS, "{} rows are too many", x.len());
    with_format(
        quant,
        GemvTransposed::<S> {
            weights,
            x,
            sums,
            out,
            simd: PhantomData,
        },
    );
}

struct GemvTransposed<'a, S> {
    weights: WeightRows<'a>,
    x: &'a [Row<'a>],
    sums: &'a mut Accumulators,
    out: &'a mut [f32],
    simd: PhantomData<S>,
}

impl<S: Simd> WithFormat for GemvTransposed<'_, S> {
    type Output = ();

    #[inline(always)]
    fn run<F: Format>(mut self, format: F) {
        if const { matches!(F::TRANSPOSE, TransposeLayout::None) } {
            return;
        }
        let count = self.weights.len();
        for first in (0..count).step_by(ROWS) {
            let rows = self.weights.slice(first..count.min(first + ROWS));
            let spare;
            let sixteen = if rows.len() == ROWS {
                SixteenRows::new(rows.bytes, rows.stride(), rows.row_bytes)
            } else {
                spare = filled_up(rows);
                SixteenRows::new(&spare, rows.row_bytes, rows.row_bytes)
            };
            self.sixteen_rows(format, sixteen);
            for (row, out) in self.out.chunks_exact_mut(count).enumerate() {
                let sums = &self.sums.0[0][row].0[..rows.len()];
                out[first..first + rows.len()].copy_from_slice(sums);
            }
        }
    }
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
}

impl<S: Simd> GemvTransposed<'_, S> {
    /// Sixteen weight rows, into lane 0 of the sums.
    #[inline(always)]
    fn sixteen_rows<F: Format>(&mut self, format: F, rows: SixteenRows<'_>) {
        let block = format.quant().block_bytes();
        let blocks = rows.row_bytes / block;
        let in_block = format.quant().block_len() / F::GROUP;
        for b in 0..blocks {
            let start = b * block;
            prefetch_next::<S>(rows, start, block);
            let first_group = b * in_block;
            // Constant conditions, so that a format's branch is compiled for that format alone.
            if const { matches!(F::TRANSPOSE, TransposeLayout::Q6K) } {
                self.q6_k(rows, start, b);
                continue;
            }
            if const { matches!(F::TRANSPOSE, TransposeLayout::Q4K) } {
                self.q4_k::<F>(rows, start, first_group);
                continue;
            }
            match F::TRANSPOSE {
                TransposeLayout::None | TransposeLayout::Q4K | TransposeLayout::Q6K => {}
                TransposeLayout::Int8 => {
                    let scales = rows.f16::<S>(start);
                    let low = rows.transpose::<S>(start + 2);
                    let high = rows.transpose::<S>(start + 18);
                    let codes = joined::<S>(low, high);
                    let codes = array![no_bytes::<S>(); i => S::prepare(codes[i])];
                    self.group::<F>(first_group, &codes, scales, S::Floats::zero());
                }
                TransposeLayout::Nibbles => {
                    let scales = rows.f16::<S>(start);
                    let bytes = rows.transpose::<S>(start + block - 16);
                    let low = array![no_bytes::<S>(); i => S::field(bytes[i], 0, 15)];
                    let high = array![no_bytes::<S>(); i => S::field(bytes[i], 4, 15)];
                    let codes = joined::<S>(low, high);
                    // The format adds its minimum.
                    let mins = if F::MINS {
                        rows.f16_after::<S>(start).mul(S::Floats::splat(-1.0))
                    } else {
                        S::Floats::zero()
                    };
                    self.group::<F>(first_group, &codes, scales, mins);
                }
            }
        }
        let groups = blocks * in_block;
        for row in 0..self.x.len() {
            let mut lanes: [S::Floats; LANES] = array![S::Floats::zero(); lane => {
                if lane < groups {
                    S::Floats::load(&self.sums.0[lane][row].0)
                } else {
                    S::Floats::zero()
                }
            }];
            for width in [8, 4, 2, 1] {
                for i in 0..width {
                    lanes[i] = lanes[i].add(lanes[i + width]);
                }
            }
            lanes[0].store(&mut self.sums.0[0][row].0);
        }
    }

    /// A block of eight groups under six-bit scales and minimums, which come as three words of four bytes per row.
    #[inline(always)]
    fn q4_k<F: Format>(&mut self, rows: SixteenRows<'_>, start: usize, first_group: usize) {
        let (d, dmin) = (rows.f16::<S>(start), rows.f16_after::<S>(start));
        let [_, scales, mins, rest] = rows.transpose::<S>(start);
        for pair in 0..4 {
            let at = start + 16 + 32 * pair;
            let bytes = joined::<S>(rows.transpose::<S>(at), rows.transpose::<S>(at + 16));
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
                self.group::<F>(
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
    fn q6_k(&mut self, rows: SixteenRows<'_>, start: usize, block: usize) {
        let d = rows.f16_after::<S>(start + 206);
        let scales = rows.transpose::<S>(start + 192);
        // Half a block has four quarters of two groups, left and right. The low bits of quarters 0 and 2 share bytes, as do
        // those of 1 and 3; the high bits of all four share theirs.
        for half in 0..2 {
            for side in 0..2 {
                let high = rows.transpose::<S>(start + 128 + 32 * half + 16 * side);
                for odd in 0..2 {
                    let low = rows.transpose::<S>(start + 64 * half + 32 * odd + 16 * side);
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
                        self.half_group(block, group, &codes, d.mul(S::to_floats(scale)));
                    }
                }
            }
        }
    }

    /// Adds a group of sixteen columns, the `group`th of a block of as many, whose codes are 32 too large.
    #[inline(always)]
    fn half_group(&mut self, block: usize, group: usize, codes: &[S::Bytes; 4], scales: S::Floats) {
        let lane_index = block % 2 * LANES + group;
        let lane = &mut self.sums.0[group];
        for (x, sum) in self.x.iter().zip(lane) {
            let chunk: &Chunk = &x[block / 2];
            let (quads, _) = chunk.codes.as_chunks::<4>();
            let quads: &[[i8; 4]; 4] = &quads.as_chunks().0[lane_index];
            let mut totals = S::ints(-32 * chunk.half_sums[lane_index]);
            for (codes, quad) in codes.iter().zip(quads) {
                totals = S::dot_unsigned(totals, *codes, S::splat_quad(*quad));
            }
            let scale = S::Floats::splat(chunk.scales[lane_index / 2]);
            let before = if block == 0 {
                S::Floats::zero()
            } else {
                S::Floats::load(&sum.0)
            };
            S::to_floats(totals)
                .mul_add(scales.mul(scale), before)
                .store(&mut sum.0);
        }
    }

    /// Adds one group of the sixteen rows, times all activation rows, to its lane.
    #[inline(always)]
    fn group<F: Format>(
        &mut self,
        group: usize,
        codes: &[S::Bytes; 8],
        scales: S::Floats,
        mins: S::Floats,
    ) {
        let (index, lane_index) = (group / LANES, group % LANES);
        let lane = &mut self.sums.0[lane_index];
        for (x, sum) in self.x.iter().zip(lane) {
            let chunk: &Chunk = &x[index];
            let (quads, _) = chunk.codes.as_chunks::<4>();
            let quads: &[[i8; 4]; 8] = &quads.as_chunks().0[lane_index];
            let totals = match F::CODING {
                Coding::Offset(offset) => {
                    S::dot_group(codes, quads, -offset * chunk.sums[lane_index])
                }
                Coding::Signed => {
                    let mut totals = S::ints(-S::SIGNED_OFFSET * chunk.sums[lane_index]);
                    for (codes, quad) in codes.iter().zip(quads) {
                        totals = S::dot_prepared(totals, *codes, S::splat_quad(*quad));
                    }
                    totals
                }
            };
            let scale = S::Floats::splat(chunk.scales[lane_index]);
            // A lane's first group starts it.
            let before = if index == 0 {
                S::Floats::zero()
            } else {
                S::Floats::load(&sum.0)
            };
            let mut after = S::to_floats(totals).mul_add(scales.mul(scale), before);
            if F::MINS {
                let x_sum =
                    S::Floats::splat(chunk.sums[lane_index] as f32 * chunk.scales[lane_index]);
                after = mins.neg_mul_add(x_sum, after);
            }
            after.store(&mut sum.0);
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
