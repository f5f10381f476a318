//! The roofline of this machine: peak rates with our threads and instructions, the bounds that `bench` sets speeds against.

use std::{hint::black_box, time::Instant};

use carat_model::{backend::BackendError, cost::Roofline};

use crate::{memory, pool::Pool};
use carat_cpu_kernels::{
    gemm::amx_bf16::{self, TileOperands, TileRows},
    matrix::MatrixMut,
    roofline::SUMS,
    simd::{Accumulate, K_STEP, Tile},
    table::{Kernels, TileKernels},
};

/// Far more than any cache a core has to itself; a shared one is part of what the weights of a small model live in.
const READ_BYTES: usize = 512 << 20;
const PASSES: usize = 5;
const ROUNDS: usize = 2_000_000;

/// Peak rates of reading and of multiplying, on so many threads.
pub(crate) fn peak_rates(kernels: &Kernels, threads: usize) -> Result<Roofline, BackendError> {
    let pool = Pool::new(threads).map_err(|error| BackendError::Device(Box::new(error)))?;
    Ok(Roofline {
        read_bytes_per_second: peak_read_bytes(kernels, &pool)?,
        multiply_adds_per_second: kernels.tiles().map_or_else(
            || peak_multiply_adds(kernels, &pool),
            |kernels| peak_tile_multiply_adds(kernels, &pool),
        ),
    })
}

/// Bytes per second that so many threads read from memory.
pub(crate) fn read_rate(kernels: &Kernels, threads: usize) -> Result<f64, BackendError> {
    let pool = Pool::new(threads).map_err(|error| BackendError::Device(Box::new(error)))?;
    peak_read_bytes(kernels, &pool)
}

/// Bytes per second of reading memory; an error where there is too little of it to tell.
fn peak_read_bytes(kernels: &Kernels, pool: &Pool) -> Result<f64, BackendError> {
    const CHUNK: usize = 4 << 20;
    let needed_bytes = READ_BYTES as u64;
    let free_bytes = memory::available().map(|memory| memory.free_bytes);
    let mut data = Vec::new();
    // The system promises more than there is, so its word alone is not enough.
    let is_short = free_bytes.is_some_and(|free_bytes| free_bytes < needed_bytes);
    if is_short || data.try_reserve_exact(READ_BYTES).is_err() {
        return Err(BackendError::OutOfMemory {
            needed_bytes,
            free_bytes: free_bytes.unwrap_or(0),
        });
    }
    data.resize(READ_BYTES, 1u8);
    let mut best = f64::INFINITY;
    for _ in 0..PASSES {
        let start = Instant::now();
        pool.for_each_chunk(&mut data, CHUNK, |_, part| {
            black_box(kernels.read(part));
        });
        best = best.min(start.elapsed().as_secs_f64());
    }
    Ok(READ_BYTES as f64 / best)
}

/// Multiply-adds per second of int8 vectors.
fn peak_multiply_adds(kernels: &Kernels, pool: &Pool) -> f64 {
    let products = (pool.threads() * ROUNDS * SUMS * 64) as f64;
    let mut sums = vec![0.0; pool.threads()];
    let mut best = f64::INFINITY;
    for _ in 0..PASSES {
        let start = Instant::now();
        pool.for_each_chunk(&mut sums, 1, |_, sum| sum[0] = kernels.dots(ROUNDS));
        best = best.min(start.elapsed().as_secs_f64());
    }
    black_box(sums);
    products / best
}

/// Multiply-adds per second of BF16 tiles: two by two of them again and again, with everything in the nearest cache.
fn peak_tile_multiply_adds(kernels: &TileKernels, pool: &Pool) -> f64 {
    const STEPS: usize = 16;
    const ROUNDS: usize = 10_000;
    const SIDE: usize = 2 * amx_bf16::ROWS;
    let tiles = vec![Tile::ZERO; 2 * STEPS];
    let rows = TileRows {
        tiles: &tiles,
        row: STEPS,
        first: 0,
    };
    let operands = TileOperands {
        left: rows,
        terms: 1,
        right: rows,
        steps: STEPS,
    };
    let mut sums = vec![0.0; pool.threads() * SIDE * SIDE];
    let mut best = f64::INFINITY;
    for _ in 0..PASSES {
        let start = Instant::now();
        pool.for_each_chunk(&mut sums, SIDE * SIDE, |_, sums| {
            for _ in 0..ROUNDS {
                kernels.gemm_bf16(
                    &operands,
                    Accumulate::FromZero,
                    &mut MatrixMut::new(sums, SIDE),
                );
            }
        });
        best = best.min(start.elapsed().as_secs_f64());
    }
    black_box(sums);
    (pool.threads() * ROUNDS * SIDE * SIDE * STEPS * K_STEP) as f64 / best
}
