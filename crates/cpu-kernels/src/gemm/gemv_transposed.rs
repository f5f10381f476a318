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
    sixteen_rows::{self, Groups},
};
use crate::simd::{Floats, LANES, Simd, array};

pub use super::sixteen_rows::ROWS;

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
    sixteen_rows::can_read(quant)
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
            sixteen_rows::read::<S, F>(format, rows, &mut self);
            self.fold(format.groups(rows.row_bytes));
            for (row, out) in self.out.chunks_exact_mut(count).enumerate() {
                let sums = &self.sums.0[0][row].0[..rows.len()];
                out[first..first + rows.len()].copy_from_slice(sums);
            }
        }
    }
}

impl<S: Simd> GemvTransposed<'_, S> {
    /// Adds up the partial sums of `groups` groups, into lane 0.
    #[inline(always)]
    fn fold(&mut self, groups: usize) {
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
}

impl<S: Simd> Groups<S> for GemvTransposed<'_, S> {
    /// Adds one group of sixteen columns to its lane.
    #[inline(always)]
    fn half_group<F: Format>(&mut self, group: usize, codes: &[S::Bytes; 4], scales: S::Floats) {
        let half = group % (2 * LANES);
        let lane = &mut self.sums.0[group % LANES];
        for (x, sum) in self.x.iter().zip(lane) {
            let chunk: &Chunk = &x[group / (2 * LANES)];
            let (quads, _) = chunk.codes.as_chunks::<4>();
            let quads: &[[i8; 4]; 4] = &quads.as_chunks().0[half];
            let mut totals = S::ints(-offset::<F>() * chunk.half_sums[half]);
            for (codes, quad) in codes.iter().zip(quads) {
                totals = S::dot_unsigned(totals, *codes, S::splat_quad(*quad));
            }
            let scale = S::Floats::splat(chunk.scales[half / 2]);
            let before = if group < LANES {
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

/// By how much the codes of groups of 16 are too large.
#[inline(always)]
fn offset<F: Format>() -> i32 {
    match F::CODING {
        Coding::Offset(offset) => offset,
        Coding::Signed => unreachable!("none of them is signed"),
    }
}
