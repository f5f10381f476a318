//! A run of weight rows times a few activation rows, reading the weights packed as they lie in the file.
//!
//! This is the decode path: each weight byte is read once and unpacked in registers, so the speed is that of memory.

use std::marker::PhantomData;

use carat_gguf::QuantType;

use super::{
    WeightRows,
    format::{Chunks, Coding, Format, Unpacked, WithFormat, with_format},
};
use crate::{
    activations::{CHUNK, Chunk, Row},
    simd::{Floats, LANES, Simd},
};

/// From how many activation rows on [`super::panel`] is faster.
pub(crate) const MOST_ROWS: usize = 4;

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
            let chunks = Chunks::new::<F>(self.weights.row(column));
            let mut sums = [S::Floats::zero(); R];
            for index in 0..chunks.count() {
                let weights = F::unpack::<S>(chunks.chunk::<F>(index));
                for (sum, x) in sums.iter_mut().zip(x) {
                    *sum = add_chunk::<S, F>(*sum, &weights, x, index);
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
    let dot = |i: usize, codes: &[[i8; 64]]| {
        let x = S::load_signed(&codes[i]);
        let zero = S::ints(0);
        match F::CODING {
            Coding::Offset(_) => S::dot_unsigned(zero, weights.codes[i], x),
            Coding::Signed => S::dot_signed(zero, weights.codes[i], x),
        }
    };
    let (totals, code_sums, scales);
    if F::GROUP == 32 {
        let chunk = &x[index];
        let (codes, _) = chunk.codes.as_chunks::<64>();
        totals = S::sum_by_eight(std::array::from_fn(|i| dot(i, codes)));
        code_sums = S::load_ints(&chunk.sums);
        scales = S::Floats::load(&chunk.scales);
    } else {
        let half = HalfChunk::new(x, index);
        let (codes, _) = half.codes.as_chunks::<64>();
        totals = S::sum_by_four(std::array::from_fn(|i| dot(i, codes)));
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
