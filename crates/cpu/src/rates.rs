//! What this machine can do at the most with our threads and instructions: the bounds that `bench` sets speeds against.

use std::{hint::black_box, time::Instant};

use carat_model::backend::BackendError;

use crate::{
    backend::CpuBackend,
    pool::Pool,
    simd::{Floats, Simd},
};

/// Far more than any cache a core has to itself; a shared one is part of what the weights of a small model live in.
const READ_BYTES: usize = 512 << 20;
const READ_PASSES: usize = 3;
/// Enough independent sums to keep every multiplier busy.
const SUMS: usize = 10;
const ROUNDS: usize = 2_000_000;

/// Rates of all threads together.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Rates {
    /// Sequential reads of memory.
    pub read_bytes_per_second: f64,
    /// Products of 8-bit integers, added up, from registers.
    pub multiply_adds_per_second: f64,
}

impl CpuBackend {
    /// Takes about a second.
    pub fn measure(&self) -> Result<Rates, BackendError> {
        let pool =
            Pool::new(self.threads()).map_err(|error| BackendError::Device(Box::new(error)))?;
        Ok(Rates {
            read_bytes_per_second: read_rate(&pool),
            multiply_adds_per_second: self.multiply_rate(&pool),
        })
    }

    fn multiply_rate(&self, pool: &Pool) -> f64 {
        let products = (pool.threads() * ROUNDS * SUMS * 64) as f64;
        let mut sums = vec![0.0; pool.threads()];
        let mut best = f64::INFINITY;
        for _ in 0..READ_PASSES {
            let start = Instant::now();
            pool.for_each_chunk(&mut sums, 1, |_, sum| sum[0] = self.kernels().dots(ROUNDS));
            best = best.min(start.elapsed().as_secs_f64());
        }
        black_box(sums);
        products / best
    }
}

fn read_rate(pool: &Pool) -> f64 {
    const CHUNK: usize = 1 << 20;
    let mut data = vec![1u64; READ_BYTES / 8];
    let mut best = f64::INFINITY;
    for _ in 0..READ_PASSES {
        let start = Instant::now();
        pool.for_each_chunk(&mut data, CHUNK / 8, |_, part| {
            // Several sums, so that adding does not wait for adding.
            let (lines, _) = part.as_chunks::<16>();
            let mut sums = [0u64; 16];
            for line in lines {
                for (sum, x) in sums.iter_mut().zip(line) {
                    *sum = sum.wrapping_add(*x);
                }
            }
            black_box(sums);
        });
        best = best.min(start.elapsed().as_secs_f64());
    }
    READ_BYTES as f64 / best
}

/// The dot products that every quantized kernel is made of, with nothing else around them.
#[inline(always)]
pub(crate) fn dots<S: Simd>(rounds: usize) -> f32 {
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
