//! Tiles in plain Rust: what the instructions compute, to the last bit.

#![expect(unsafe_code, reason = "vouches for instructions")]

use carat_cpu_kernels::{
    matrix::MatrixMut,
    simd::{Accumulate, IN_FLIGHT, K_STEP, LANES, Line, Scalar, Tile, Tiles, Totals, unit_of_row},
    table::TileKernels,
};
use half::bf16;

/// The twin of the instructions.
pub(crate) fn kernels() -> &'static TileKernels {
    // SAFETY: Plain Rust needs no instructions of its own.
    const { &unsafe { TileKernels::over::<PlainTiles>() } }
}

pub(crate) struct PlainTiles {
    in_flight: [Totals; IN_FLIGHT],
}

impl Tiles for PlainTiles {
    type Vectors = Scalar;

    fn take() -> PlainTiles {
        PlainTiles {
            in_flight: [Totals::ZERO; IN_FLIGHT],
        }
    }

    fn multiply<const M: usize, const N: usize>(
        &mut self,
        left: [&[Tile]; M],
        right: [&[Tile]; N],
        accumulate: Accumulate,
        sums: &mut MatrixMut<'_>,
    ) {
        let terms = left[0].len() / right[0].len();
        for row in 0..M * LANES {
            for column in 0..N * LANES {
                let sum = &mut sums.row_mut(row)[column];
                if accumulate == Accumulate::FromZero {
                    *sum = 0.0;
                }
                for (i, left) in left[row / LANES].iter().enumerate() {
                    let right = &right[column / LANES][i / terms];
                    *sum = add_step(*sum, left, row % LANES, right, column % LANES);
                }
            }
        }
    }

    fn start_int8(&mut self, slot: usize, left: &[Tile], right: &[Tile]) {
        let totals = &mut self.in_flight[slot];
        *totals = Totals::ZERO;
        for (left, right) in left.iter().zip(right) {
            for (row, totals) in totals.0.iter_mut().enumerate() {
                for (column, total) in totals.iter_mut().enumerate() {
                    for k in 0..64 {
                        let left = left.0[row].0[k].cast_signed();
                        let right = right.0[k / 4].0[4 * column + k % 4].cast_signed();
                        *total += i32::from(left) * i32::from(right);
                    }
                }
            }
        }
    }

    fn finish_int8(&mut self, slot: usize, totals: &mut Totals) {
        *totals = self.in_flight[slot];
    }

    fn repeat<const N: usize>(from: &[f32; N]) -> [f32; LANES] {
        std::array::from_fn(|lane| from[lane % N])
    }

    fn q4_0_codes(blocks: &[u8; 16 * 18]) -> [[u8; 64]; 8] {
        let code = |i: usize| {
            let byte = blocks[i / 32 * 18 + 2 + i % 16];
            let nibble = if i % 32 < 16 { byte & 15 } else { byte >> 4 };
            nibble.wrapping_sub(8)
        };
        std::array::from_fn(|vector| std::array::from_fn(|i| code(64 * vector + i)))
    }

    fn prefetch(_: *const u8) {}

    fn to_bf16(low: [f32; LANES], high: [f32; LANES], to: &mut Line) {
        let (pairs, _) = to.0.as_chunks_mut();
        for (pair, x) in pairs.iter_mut().zip(low.into_iter().chain(high)) {
            *pair = bf16::from_f32(flushed(x)).to_le_bytes();
        }
    }

    fn widen_pair(units: &Line, pair: usize) -> [[f32; LANES]; 2] {
        let row = |row: usize, i: usize| f32::from(units.0[4 * unit_of_row(row) + 2 * pair + i]);
        [0, 8].map(|first| std::array::from_fn(|lane| row(first + lane / 2, lane % 2)))
    }
}

/// One tile's share of a sum.
fn add_step(sum: f32, left: &Tile, row: usize, right: &Tile, column: usize) -> f32 {
    let mut even_odd = [0.0; 2];
    for k in 0..K_STEP {
        let left = value(&left.0[row], k);
        let right = value(&right.0[k / 2], 2 * column + k % 2);
        even_odd[k % 2] = flushed(left.mul_add(right, even_odd[k % 2]));
    }
    flushed(flushed(sum) + flushed(even_odd[0] + even_odd[1]))
}

/// One number of a line.
fn value(line: &Line, index: usize) -> f32 {
    flushed(bf16::from_le_bytes(line.0.as_chunks().0[index]).to_f32())
}

fn flushed(x: f32) -> f32 {
    if x.is_subnormal() {
        0.0_f32.copysign(x)
    } else {
        x
    }
}
