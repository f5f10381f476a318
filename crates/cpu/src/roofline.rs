//! What this machine can do at the most with our threads and instructions: the bounds that `bench` sets speeds against.

use std::{hint::black_box, time::Instant};

use carat_model::{backend::BackendError, cost::Rates};

use crate::{
    backend::CpuBackend,
    kernel::{
        gemm::{
            PREFETCH_BYTES, STRANDS,
            amx_bf16::{self, Operands, Side},
        },
        table::TileKernels,
    },
    pool::{Block, Pool},
    simd::{Floats, Line, STEP, Simd, Sums, Tile},
};

/// Far more than any cache a core has to itself; a shared one is part of what the weights of a small model live in.
const READ_BYTES: usize = 512 << 20;
const PASSES: usize = 5;
/// Enough independent sums to keep every multiplier busy.
const SUMS: usize = 10;
const ROUNDS: usize = 2_000_000;

impl CpuBackend {
    pub(crate) fn rates(&self) -> Result<Rates, BackendError> {
        let pool =
            Pool::new(self.threads()).map_err(|error| BackendError::Device(Box::new(error)))?;
        Ok(Rates {
            read_bytes_per_second: self.read_rate(&pool),
            multiply_adds_per_second: self.multiply_rate(&pool),
        })
    }

    fn read_rate(&self, pool: &Pool) -> f64 {
        const CHUNK: usize = 4 << 20;
        let mut data = vec![1u8; READ_BYTES];
        let mut best = f64::INFINITY;
        for _ in 0..PASSES {
            let start = Instant::now();
            pool.for_each_chunk(&mut data, CHUNK, |_, part| {
                black_box(self.kernels().read(part));
            });
            best = best.min(start.elapsed().as_secs_f64());
        }
        READ_BYTES as f64 / best
    }

    fn multiply_rate(&self, pool: &Pool) -> f64 {
        if let Some(kernels) = self.kernels().tiles() {
            return tile_rate(kernels, pool);
        }
        let products = (pool.threads() * ROUNDS * SUMS * 64) as f64;
        let mut sums = vec![0.0; pool.threads()];
        let mut best = f64::INFINITY;
        for _ in 0..PASSES {
            let start = Instant::now();
            pool.for_each_chunk(&mut sums, 1, |_, sum| sum[0] = self.kernels().dots(ROUNDS));
            best = best.min(start.elapsed().as_secs_f64());
        }
        black_box(sums);
        products / best
    }
}

/// Two by two tiles again and again, with everything in the nearest cache.
fn tile_rate(kernels: &TileKernels, pool: &Pool) -> f64 {
    const STEPS: usize = 16;
    const ROUNDS: usize = 10_000;
    const SIDE: usize = 2 * amx_bf16::ROWS;
    let tiles = vec![Tile::ZERO; 2 * STEPS];
    let side = Side {
        tiles: &tiles,
        row: STEPS,
        first: 0,
    };
    let operands = Operands {
        left: side,
        parts: 1,
        right: side,
        steps: STEPS,
    };
    let mut sums = vec![0.0; pool.threads() * SIDE * SIDE];
    let mut best = f64::INFINITY;
    for _ in 0..PASSES {
        let start = Instant::now();
        pool.for_each_chunk(&mut sums, SIDE * SIDE, |_, sums| {
            for _ in 0..ROUNDS {
                kernels.multiply(&operands, Sums::Begin, &mut Block::new(sums, SIDE));
            }
        });
        best = best.min(start.elapsed().as_secs_f64());
    }
    black_box(sums);
    (pool.threads() * ROUNDS * SIDE * SIDE * STEPS * STEP) as f64 / best
}

/// Adds up all bytes of `data` as kernels of few rows read theirs: in strands, asking for them ahead.
#[inline(always)]
pub(crate) fn read<S: Simd>(data: &[u8]) -> f32 {
    let ones = S::load_signed(&[1; 64]);
    let mut sums = [S::ints(0); STRANDS];
    let (lines, _) = data.as_chunks::<64>();
    let strand = lines.len() / STRANDS;
    for place in 0..strand {
        for (i, sum) in sums.iter_mut().enumerate() {
            let line = &lines[i * strand + place];
            S::prefetch(line.as_ptr().wrapping_add(PREFETCH_BYTES));
            *sum = S::dot_unsigned(*sum, S::load_bytes(line), ones);
        }
    }
    sums.into_iter().map(|sum| S::to_floats(sum).sum()).sum()
}

/// The dot products that every quantized kernel is made of, with nothing else around them.
#[inline(always)]
pub(crate) fn dots<S: Simd>(rounds: usize) -> f32 {
    if S::PAIRS {
        return paired_dots::<S>(rounds);
    }
    let codes = S::load_bytes(black_box(&[3; 64]));
    let x = S::load_signed(black_box(&[5; 64]));
    let mut sums = [S::ints(0); SUMS];
    for _ in 0..rounds {
        for sum in &mut sums {
            *sum = S::dot_unsigned(*sum, codes, x);
        }
    }
    sums.into_iter().map(|sum| S::to_floats(sum).sum()).sum()
}

/// As many of them where rows are multiplied in pairs: four rows with lines that stay in the nearest cache.
#[inline(always)]
fn paired_dots<S: Simd>(rounds: usize) -> f32 {
    const ROWS: usize = 4;
    const ROUNDS_A_CALL: usize = 64;
    // A line has 64 products with a row, as a vector has.
    let lines = [Line([3; 64]); SUMS * ROUNDS_A_CALL / ROWS];
    let x = [[5; 16]; SUMS * ROUNDS_A_CALL / ROWS / 4];
    let mut sum = 0.0;
    for _ in 0..rounds / ROUNDS_A_CALL {
        for totals in S::totals_by_eights(black_box(&lines), black_box([x.as_slice(); ROWS])) {
            sum += S::to_floats(totals).sum();
        }
    }
    sum
}

#[cfg(test)]
mod tests {
    use super::SUMS;
    use crate::kernel::table::Kernels;

    #[test]
    fn every_level_makes_as_many_products_a_round() {
        for kernels in Kernels::all() {
            let products = kernels.dots(64) / (3.0 * 5.0);
            assert_eq!(products, (64 * SUMS * 64) as f32, "{:?}", kernels.isa());
        }
    }
}
