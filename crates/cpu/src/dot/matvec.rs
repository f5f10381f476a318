//! A run of weight rows times a few activation rows, reading the weights packed as they lie in the file.
//!
//! This is the decode path: each weight byte is read once and unpacked in registers, so the speed is that of memory.

use std::marker::PhantomData;

use carat_gguf::QuantType;

use super::{
    WeightRows,
    format::{Coding, Format, Tail, Unpacked, WithFormat, with_format},
};
use crate::{
    activations::{CHUNK, Chunk, Row},
    simd::{Floats, LANES, Simd, array},
};

/// How far ahead of the arithmetic weights are asked for, across the ends of rows: the processor's own prefetcher stays
/// within a page and starts anew in the next.
const PREFETCH_BYTES: usize = 4096;

/// Above this many activation rows [`super::panel`] is faster.
pub(crate) const MOST_ROWS: usize = 7;

/// Fills `out`, `[x.len(), weights.len()]`.
#[inline(always)]
pub(crate) fn matvec<S: Simd>(
    quant: QuantType,
    weights: WeightRows<'_>,
    x: &[Row<'_>],
    out: &mut [f32],
) {
    assert_eq!(out.len(), x.len() * weights.len(), "an output a pair");
    with_format(
        quant,
        Matvec::<S> {
            weights,
            x,
            out,
            simd: PhantomData,
        },
    );
}

struct Matvec<'a, S> {
    weights: WeightRows<'a>,
    x: &'a [Row<'a>],
    out: &'a mut [f32],
    simd: PhantomData<S>,
}

impl<S: Simd> WithFormat for Matvec<'_, S> {
    type Output = ();

    #[inline(always)]
    fn run<F: Format>(mut self) {
        let mut done = 0;
        while done < self.x.len() {
            done += match &self.x[done..] {
                [a, b, c, d, ..] if S::SHARING_ROWS >= 4 => self.rows::<F, 4>(done, [a, b, c, d]),
                [a, b, ..] if S::SHARING_ROWS >= 2 => self.rows::<F, 2>(done, [a, b]),
                [a, ..] => self.rows::<F, 1>(done, [a]),
                [] => 0,
            };
        }
    }
}

impl<S: Simd> Matvec<'_, S> {
    #[inline(always)]
    fn rows<F: Format, const R: usize>(&mut self, first: usize, x: [Row<'_>; R]) -> usize {
        let columns = self.weights.len();
        for column in 0..columns {
            let row = self.weights.row(column);
            let mut sums = [S::Floats::zero(); R];
            let whole = row.chunks_exact(F::CHUNK_BYTES);
            let count = whole.len();
            for (index, chunk) in whole.enumerate() {
                for line in 0..F::CHUNK_BYTES.div_ceil(64) {
                    S::prefetch(chunk.as_ptr().wrapping_add(PREFETCH_BYTES + 64 * line));
                }
                let weights = F::unpack::<S>(chunk);
                for (sum, x) in sums.iter_mut().zip(x) {
                    *sum = add_chunk::<S, F>(*sum, &weights, x, index);
                }
            }
            if let Some(tail) = Tail::of::<F>(row) {
                let weights = F::unpack::<S>(tail.chunk::<F>());
                for (sum, x) in sums.iter_mut().zip(x) {
                    *sum = add_chunk::<S, F>(*sum, &weights, x, count);
                }
            }
            for (row, sum) in sums.into_iter().enumerate() {
                self.out[(first + row) * columns + column] = sum.sum();
            }
        }
        R
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
        let (codes, _) = chunk.codes.as_chunks::<64>();
        let parts = array![S::ints(0); i => dot::<S, F>(weights.codes[i], &codes[i])];
        totals = S::sum_by_eight(parts);
        code_sums = S::load_ints(&chunk.sums);
        scales = S::Floats::load(&chunk.scales);
    } else {
        let half = HalfChunk::new(x, index);
        let (codes, _) = half.codes.as_chunks::<64>();
        let parts = array![S::ints(0); i => dot::<S, F>(weights.codes[i], &codes[i])];
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
fn dot<S: Simd, F: Format>(weights: S::Bytes, x: &[i8; 64]) -> S::Ints {
    let (zero, x) = (S::ints(0), S::load_signed(x));
    match F::CODING {
        Coding::Offset(_) => S::dot_unsigned(zero, weights, x),
        Coding::Signed => S::dot_prepared(zero, S::prepare(weights), x),
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
