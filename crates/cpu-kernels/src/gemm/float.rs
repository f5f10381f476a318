//! F32, F16 and BF16 weights with f32 activations.
//!
//! Column `k` adds to lane `k % 16`, in order, and the lanes are folded as everywhere: a row's result does not depend on
//! how many rows and weights share registers.

use carat_gguf::QuantType;

use super::{PREFETCH_BYTES, WeightRows};
use crate::simd::{Floats, LANES, Simd, array};

/// Activation rows that one call of [`gemm_float`] is given; from more on, shorter floats are worth widening first.
pub const MAX_ROWS: usize = 24;

/// Fills `out`, `[x.len(), weights.len()]`.
#[inline(always)]
pub fn gemm_float<S: Simd>(
    quant: QuantType,
    weights: WeightRows<'_>,
    x: &[&[f32]],
    out: &mut [f32],
) {
    assert_eq!(out.len(), x.len() * weights.len(), "an output per pair");
    match quant {
        QuantType::F32 => typed::<S, F32>(weights, x, out),
        QuantType::F16 => typed::<S, F16>(weights, x, out),
        QuantType::BF16 => typed::<S, Bf16>(weights, x, out),
        _ => panic!("{quant} is not a float type"),
    }
}

/// Writes the rows as F32, one after the other, exactly.
#[inline(always)]
pub fn widen<S: Simd>(quant: QuantType, weights: WeightRows<'_>, out: &mut [u8]) {
    match quant {
        QuantType::F32 => widen_typed::<S, F32>(weights, out),
        QuantType::F16 => widen_typed::<S, F16>(weights, out),
        QuantType::BF16 => widen_typed::<S, Bf16>(weights, out),
        _ => panic!("{quant} is not a float type"),
    }
}

#[inline(always)]
fn widen_typed<S: Simd, T: Stored>(weights: WeightRows<'_>, out: &mut [u8]) {
    assert_eq!(
        out.len() * T::BYTES,
        4 * weights.len() * weights.row_bytes,
        "four bytes per weight"
    );
    let row_bytes = weights.row_bytes / T::BYTES * 4;
    for (row, out) in out.chunks_exact_mut(row_bytes).enumerate() {
        let from = weights.row(row);
        let sixteens = T::sixteens(from);
        let (wide, rest) = out.as_chunks_mut::<{ 4 * LANES }>();
        for (from, out) in sixteens.iter().zip(wide) {
            store_bytes::<S>(T::load(from), out);
        }
        if !rest.is_empty() {
            let mut last = [0; 4 * LANES];
            store_bytes::<S>(
                T::load_part(&from[sixteens.len() * LANES * T::BYTES..]),
                &mut last,
            );
            rest.copy_from_slice(&last[..rest.len()]);
        }
    }
}

#[inline(always)]
fn store_bytes<S: Simd>(values: S::Floats, out: &mut [u8; 4 * LANES]) {
    let mut lanes = [0.0; LANES];
    values.store(&mut lanes);
    for (out, lane) in out.as_chunks_mut().0.iter_mut().zip(lanes) {
        *out = f32::to_le_bytes(lane);
    }
}

/// A float type of the file: reads sixteen weights.
trait Stored {
    const BYTES: usize;
    /// The bytes of sixteen weights.
    type Sixteen: Copy + 'static;

    /// All whole sixteens.
    fn sixteens(bytes: &[u8]) -> &[Self::Sixteen];
    fn load<F: Floats>(sixteen: &Self::Sixteen) -> F;

    /// Fewer than sixteen; the missing ones are zero.
    #[inline(always)]
    fn load_part<F: Floats>(bytes: &[u8]) -> F {
        let mut whole = [0; 4 * LANES];
        whole[..bytes.len()].copy_from_slice(bytes);
        Self::load(&Self::sixteens(&whole)[0])
    }
}

struct F32;
struct F16;
struct Bf16;

impl Stored for F32 {
    const BYTES: usize = 4;
    type Sixteen = [u8; 4 * LANES];

    #[inline(always)]
    fn sixteens(bytes: &[u8]) -> &[Self::Sixteen] {
        bytes.as_chunks().0
    }

    #[inline(always)]
    fn load<F: Floats>(sixteen: &Self::Sixteen) -> F {
        F::load_f32_bytes(sixteen)
    }
}

impl Stored for F16 {
    const BYTES: usize = 2;
    type Sixteen = [u8; 2 * LANES];

    #[inline(always)]
    fn sixteens(bytes: &[u8]) -> &[Self::Sixteen] {
        bytes.as_chunks().0
    }

    #[inline(always)]
    fn load<F: Floats>(sixteen: &Self::Sixteen) -> F {
        F::load_f16_bytes(sixteen)
    }
}

impl Stored for Bf16 {
    const BYTES: usize = 2;
    type Sixteen = [u8; 2 * LANES];

    #[inline(always)]
    fn sixteens(bytes: &[u8]) -> &[Self::Sixteen] {
        bytes.as_chunks().0
    }

    #[inline(always)]
    fn load<F: Floats>(sixteen: &Self::Sixteen) -> F {
        F::load_bf16_bytes(sixteen)
    }
}

#[inline(always)]
fn typed<S: Simd, T: Stored>(weights: WeightRows<'_>, x: &[&[f32]], out: &mut [f32]) {
    let count = weights.len();
    let mut store = |first_row: usize, column: usize, sums: &[f32]| {
        for (row, sum) in sums.iter().enumerate() {
            out[(first_row + row) * count + column] = *sum;
        }
    };
    let mut column = 0;
    while column < count {
        // Four weight rows at a time while there are four.
        if column + 4 <= count {
            let rows = array![[].as_slice(); i => weights.row(column + i)];
            let mut row = 0;
            while row < x.len() {
                // As many sums as there are registers for.
                row += if let (true, Some(x)) = (S::WIDE, x[row..].first_chunk::<6>()) {
                    block::<S, T, 6>(rows, *x, row, column, &mut store)
                } else if let Some(x) = x[row..].first_chunk::<4>() {
                    block::<S, T, 4>(rows, *x, row, column, &mut store)
                } else {
                    block::<S, T, 1>(rows, [x[row]], row, column, &mut store)
                };
            }
            column += 4;
        } else {
            for (row, x) in x.iter().enumerate() {
                store(
                    row,
                    column,
                    &tile::<S, T, 1, 1>([weights.row(column)], [x])[0],
                );
            }
            column += 1;
        }
    }
}

/// Four weight rows times `R` activation rows. Returns `R`.
#[inline(always)]
fn block<S: Simd, T: Stored, const R: usize>(
    weights: [&[u8]; 4],
    x: [&[f32]; R],
    row: usize,
    column: usize,
    store: &mut impl FnMut(usize, usize, &[f32]),
) -> usize {
    let sums = tile::<S, T, 4, R>(weights, x);
    for (i, sums) in sums.iter().enumerate() {
        store(row, column + i, sums);
    }
    R
}

/// `W` weight rows times `R` activation rows.
#[inline(always)]
fn tile<S: Simd, T: Stored, const W: usize, const R: usize>(
    weights: [&[u8]; W],
    x: [&[f32]; R],
) -> [[f32; R]; W] {
    let columns = x[0].len();
    let whole = columns / LANES;
    // Of one length, said once: the loop below needs no checks.
    let vectors: [&[[f32; LANES]]; R] =
        array![[].as_slice(); r => &x[r][..columns].as_chunks().0[..whole]];
    let sixteens: [&[T::Sixteen]; W] =
        array![[].as_slice(); w => &T::sixteens(weights[w])[..whole]];
    let mut sums = [[S::Floats::zero(); R]; W];
    for k in 0..whole {
        let values: [S::Floats; R] =
            array![S::Floats::zero(); r => S::Floats::load(&vectors[r][k])];
        for (sums, sixteens) in sums.iter_mut().zip(sixteens) {
            // Few rows stream their weights from memory; more rows find them close by, widened.
            if R <= 4 || T::BYTES < 4 {
                let here: *const T::Sixteen = &raw const sixteens[k];
                S::prefetch(here.cast::<u8>().wrapping_add(PREFETCH_BYTES));
            }
            let weights: S::Floats = T::load(&sixteens[k]);
            for (sum, x) in sums.iter_mut().zip(values) {
                *sum = weights.mul_add(x, *sum);
            }
        }
    }
    if whole * LANES < columns {
        for (sums, weights) in sums.iter_mut().zip(weights) {
            let rest = &weights[whole * LANES * T::BYTES..columns * T::BYTES];
            let weights: S::Floats = T::load_part(rest);
            for (sum, x) in sums.iter_mut().zip(x) {
                let x = S::Floats::load_part(&x[whole * LANES..]);
                *sum = weights.mul_add(x, *sum);
            }
        }
    }
    let mut out = [[0.0; R]; W];
    for w in 0..W {
        for r in 0..R {
            out[w][r] = sums[w][r].sum();
        }
    }
    out
}
