//! GEMV: a run of weight rows times a few activation rows, reading the weights packed as they lie in the file.
//!
//! This is the decode path: each weight byte is read once and unpacked in registers, so the speed is that of memory. Four
//! weight rows go side by side, from four places of the matrix where the caller interleaves them: one stream of
//! reads does not keep enough of them on their way.

use std::marker::PhantomData;

use carat_gguf::QuantType;

use super::{
    PREFETCH_BYTES, READ_STREAMS, WeightRows,
    activations::{CHUNK, Chunk, Row},
    format::{Coding, Format, Order, Tail, Unpacked, WithFormat, with_format},
};
use crate::simd::{Floats, LANES, Simd, array};

/// Above this many activation rows [`super::packed_int8`] is faster.
pub const MAX_ROWS: usize = 7;

/// Fills `out`, `[x.len(), weights.len()]`.
#[inline(always)]
pub fn gemv<S: Simd>(quant: QuantType, weights: WeightRows<'_>, x: &[Row<'_>], out: &mut [f32]) {
    assert_eq!(out.len(), x.len() * weights.len(), "an output per pair");
    with_format(
        quant,
        Gemv::<S> {
            weights,
            x,
            out,
            simd: PhantomData,
        },
    );
}

struct Gemv<'a, S> {
    weights: WeightRows<'a>,
    x: &'a [Row<'a>],
    out: &'a mut [f32],
    simd: PhantomData<S>,
}

impl<S: Simd> WithFormat for Gemv<'_, S> {
    type Output = ();

    #[inline(always)]
    fn run<F: Format>(mut self, format: F) {
        let mut done = 0;
        while done < self.x.len() {
            // Constant, so that what an instruction set never takes is not compiled for it.
            done += match &self.x[done..] {
                [a, b, c, d, ..] if const { S::SHARING_ROWS >= 4 } => {
                    self.rows::<F, 4>(format, done, [a, b, c, d])
                }
                [a, b, c] if const { S::SHARING_ROWS >= 4 } => {
                    self.rows::<F, 3>(format, done, [a, b, c])
                }
                [a, b, ..] if const { S::SHARING_ROWS >= 2 } => {
                    self.rows::<F, 2>(format, done, [a, b])
                }
                [a, ..] => self.rows::<F, 1>(format, done, [a]),
                [] => 0,
            };
        }
    }
}

impl<S: Simd> Gemv<'_, S> {
    #[inline(always)]
    fn rows<F: Format, const R: usize>(
        &mut self,
        format: F,
        first: usize,
        x: [Row<'_>; R],
    ) -> usize {
        let columns = self.weights.len();
        for start in (0..columns).step_by(READ_STREAMS) {
            let count = READ_STREAMS.min(columns - start);
            let rows: [&[u8]; READ_STREAMS] = array![[].as_slice(); w => {
                self.weights.row_and_rest(start + w.min(count - 1))
            }];
            let sums = products::<S, F, R>(format, &rows[..count], self.weights.row_bytes, x);
            for (w, sums) in sums.into_iter().take(count).enumerate() {
                for (row, sum) in sums.into_iter().enumerate() {
                    self.out[(first + row) * columns + start + w] = sum.sum();
                }
            }
        }
        R
    }
}

/// Up to [`READ_STREAMS`] weight rows of `row_bytes`, chunk after chunk of each, times `R` activation rows.
#[inline(always)]
fn products<S: Simd, F: Format, const R: usize>(
    format: F,
    rows: &[&[u8]],
    row_bytes: usize,
    x: [Row<'_>; R],
) -> [[S::Floats; R]; READ_STREAMS] {
    let mut sums = [[S::Floats::zero(); R]; READ_STREAMS];
    let whole = row_bytes / format.chunk_bytes();
    for index in 0..whole {
        // Not unrolled, for the length of a slice is not known: the body is long.
        for (row, sums) in rows.iter().zip(&mut sums) {
            let chunk = &row[index * format.chunk_bytes()..][..format.chunk_bytes()];
            prefetch_ahead::<S>(chunk);
            let weights = format.unpack_ordered::<S>(chunk);
            for (sum, x) in sums.iter_mut().zip(x) {
                *sum = add_chunk::<S, F>(*sum, &weights, x, index);
            }
        }
    }
    if whole * format.chunk_bytes() < row_bytes {
        for (row, sums) in rows.iter().zip(&mut sums) {
            prefetch_ahead::<S>(&row[whole * format.chunk_bytes()..row_bytes]);
            let weights = last_chunk::<S, F>(format, row, row_bytes);
            for (sum, x) in sums.iter_mut().zip(x) {
                *sum = add_chunk::<S, F>(*sum, &weights, x, whole);
            }
        }
    }
    sums
}

/// Prefetches what lies as far behind these bytes as memory needs to answer.
#[inline(always)]
fn prefetch_ahead<S: Simd>(bytes: &[u8]) {
    for line in 0..bytes.len().div_ceil(64) {
        S::prefetch(bytes.as_ptr().wrapping_add(PREFETCH_BYTES + 64 * line));
    }
}

/// The short chunk at the end of a row, read together with what lies behind it: a copy would cost more than the chunk. Beyond
/// the row, activations are zero, and scales are made so, because those of a damaged file may be infinite.
#[inline(always)]
fn last_chunk<S: Simd, F: Format>(format: F, row: &[u8], row_bytes: usize) -> Unpacked<S> {
    let rest = row_bytes % format.chunk_bytes();
    let Some(chunk) = row[row_bytes - rest..].get(..format.chunk_bytes()) else {
        let tail =
            Tail::of(format, &row[..row_bytes]).expect("the row ends short of a whole chunk");
        return format.unpack_ordered::<S>(tail.chunk(format));
    };
    let Unpacked {
        codes,
        scales,
        mins,
    } = format.unpack_ordered::<S>(chunk);
    let groups = format.groups(rest);
    let count = S::Floats::splat(groups as f32);
    let indices = S::Floats::load(&array![0.0; i => i as f32]);
    Unpacked {
        codes,
        scales: indices.select_below(count, scales, S::Floats::zero()),
        mins: indices.select_below(count, mins, S::Floats::zero()),
    }
}

/// Adds sixteen groups of one weight row and one activation row, each to its lane.
#[inline(always)]
fn add_chunk<S: Simd, F: Format>(
    sum: S::Floats,
    weights: &Unpacked<S>,
    x: Row<'_>,
    index: usize,
) -> S::Floats {
    let (totals, code_sums, scales);
    if F::GROUP == 32 {
        let chunk = &x[index];
        totals = match F::ORDER {
            Order::Row => {
                let (codes, _) = chunk.codes.as_chunks::<64>();
                let parts =
                    array![S::ints(0); i => dot::<S, F>(S::ints(0), weights.codes[i], &codes[i])];
                S::sum_by_eight(parts)
            }
            Order::HalfGroups => {
                let (codes, _) = chunk.by_half_groups.as_chunks::<64>();
                let parts = array![S::ints(0); i => {
                    let first = dot::<S, F>(S::ints(0), weights.codes[2 * i], &codes[2 * i]);
                    dot::<S, F>(first, weights.codes[2 * i + 1], &codes[2 * i + 1])
                }];
                S::sum_by_four_in_turns(parts)
            }
        };
        code_sums = S::load_ints(&chunk.sums);
        scales = S::Floats::load(&chunk.scales);
    } else {
        let half = HalfChunk::new(x, index);
        let (codes, _) = half.codes.as_chunks::<64>();
        let parts = array![S::ints(0); i => dot::<S, F>(S::ints(0), weights.codes[i], &codes[i])];
        totals = S::sum_by_four(parts);
        code_sums = S::load_ints(half.sums);
        scales = S::Floats::load_twice(half.scales);
    }
    let offset = match F::CODING {
        Coding::Offset(offset) => offset,
        Coding::Signed => S::SIGNED_OFFSET,
    };
    let totals = S::to_floats(S::minus_times(totals, offset, code_sums));
    let sum = totals.mul_add(weights.scales.mul(scales), sum);
    if F::MINS {
        weights
            .mins
            .neg_mul_add(S::to_floats(code_sums).mul(scales), sum)
    } else {
        sum
    }
}

#[inline(always)]
fn dot<S: Simd, F: Format>(sum: S::Ints, weights: S::Bytes, x: &[i8; 64]) -> S::Ints {
    let x = S::load_signed(x);
    match F::CODING {
        Coding::Offset(_) => S::dot_unsigned(sum, weights, x),
        Coding::Signed => S::dot_prepared(sum, S::prepare(weights), x),
    }
}

/// Sixteen groups of 16 values.
struct HalfChunk<'a> {
    codes: &'a [i8; CHUNK / 2],
    scales: &'a [f32; LANES / 2],
    sums: &'a [i32; LANES],
}

impl<'a> HalfChunk<'a> {
    #[inline(always)]
    fn new(x: &'a [Chunk], index: usize) -> HalfChunk<'a> {
        let (chunk, half) = (&x[index / 2], index % 2);
        HalfChunk {
            codes: &chunk.codes.as_chunks().0[half],
            scales: &chunk.scales.as_chunks().0[half],
            sums: &chunk.half_sums.as_chunks().0[half],
        }
    }
}
