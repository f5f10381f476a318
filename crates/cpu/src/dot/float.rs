//! F32, F16 and BF16 weights with f32 activations.
//!
//! Column `k` adds to lane `k % 16`, in order, and the lanes are folded as everywhere: a row's result does not depend on
//! how many rows and weights share registers.

use carat_gguf::QuantType;

use super::{WeightRows, format::at};
use crate::simd::{Floats, LANES, Simd, array};

/// Fills `out`, `[x.len(), weights.len()]`.
#[inline(always)]
pub(crate) fn matmul<S: Simd>(
    quant: QuantType,
    weights: WeightRows<'_>,
    x: &[&[f32]],
    out: &mut [f32],
) {
    assert_eq!(out.len(), x.len() * weights.len(), "an output a pair");
    match quant {
        QuantType::F32 => typed::<S, F32>(weights, x, out),
        QuantType::F16 => typed::<S, F16>(weights, x, out),
        QuantType::BF16 => typed::<S, Bf16>(weights, x, out),
        _ => panic!("{quant} is not a float type"),
    }
}

/// A way to read sixteen weights.
trait Stored {
    const BYTES: usize;
    fn load<F: Floats>(bytes: &[u8]) -> F;
}

struct F32;
struct F16;
struct Bf16;

impl Stored for F32 {
    const BYTES: usize = 4;

    #[inline(always)]
    fn load<F: Floats>(bytes: &[u8]) -> F {
        F::load_f32_bytes(at(bytes, 0))
    }
}

impl Stored for F16 {
    const BYTES: usize = 2;

    #[inline(always)]
    fn load<F: Floats>(bytes: &[u8]) -> F {
        F::load_f16_bytes(at(bytes, 0))
    }
}

impl Stored for Bf16 {
    const BYTES: usize = 2;

    #[inline(always)]
    fn load<F: Floats>(bytes: &[u8]) -> F {
        F::load_bf16_bytes(at(bytes, 0))
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
    let (blocks, rest) = x.as_chunks::<4>();
    let mut column = 0;
    while column < count {
        // Four weight rows at a time while there are four.
        if column + 4 <= count {
            let rows = array![[].as_slice(); i => weights.row(column + i)];
            for (block, x) in blocks.iter().enumerate() {
                let sums = tile::<S, T, 4, 4>(rows, *x);
                for (i, sums) in sums.iter().enumerate() {
                    store(4 * block, column + i, sums);
                }
            }
            for (row, x) in rest.iter().enumerate() {
                let sums = tile::<S, T, 4, 1>(rows, [x]);
                for (i, sums) in sums.iter().enumerate() {
                    store(4 * blocks.len() + row, column + i, sums);
                }
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

/// `W` weight rows times `R` activation rows.
#[inline(always)]
fn tile<S: Simd, T: Stored, const W: usize, const R: usize>(
    weights: [&[u8]; W],
    x: [&[f32]; R],
) -> [[f32; R]; W] {
    let columns = x[0].len();
    // Said once, so that the loop below needs no checks.
    let weights: [&[u8]; W] = array![[].as_slice(); w => &weights[w][..columns * T::BYTES]];
    let x: [&[f32]; R] = array![[].as_slice(); r => &x[r][..columns]];
    let mut sums = [[S::Floats::zero(); R]; W];
    let whole = columns / LANES * LANES;
    let mut k = 0;
    while k < whole {
        let values: [S::Floats; R] = array![S::Floats::zero(); r => {
            S::Floats::load(x[r][k..k + LANES].try_into().expect("sixteen lanes"))
        }];
        for (sums, weights) in sums.iter_mut().zip(weights) {
            let weights: S::Floats = T::load(&weights[k * T::BYTES..][..LANES * T::BYTES]);
            for (sum, x) in sums.iter_mut().zip(values) {
                *sum = weights.mul_add(x, *sum);
            }
        }
        k += LANES;
    }
    if whole < columns {
        for (sums, weights) in sums.iter_mut().zip(weights) {
            let mut bytes = [0; 4 * LANES];
            let rest = &weights[whole * T::BYTES..];
            bytes[..rest.len()].copy_from_slice(rest);
            let weights: S::Floats = T::load(&bytes[..LANES * T::BYTES]);
            for (sum, x) in sums.iter_mut().zip(x) {
                *sum = weights.mul_add(S::Floats::load_part(&x[whole..]), *sum);
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
