//! The bodies a roofline is measured with: reads and multiply-adds with nothing else around them.

use std::hint::black_box;

use super::gemm::{PREFETCH_BYTES, READ_STREAMS};
use crate::simd::{Floats, Line, Simd};

/// Independent sums of [`dots`]: enough to keep every multiplier busy.
pub const SUMS: usize = 10;

/// Adds up all bytes of `data` as [`super::gemm::gemv`] reads weights: in several streams, prefetching.
#[inline(always)]
pub fn read<S: Simd>(data: &[u8]) -> f32 {
    let ones = S::load_signed(&[1; 64]);
    let mut sums = [S::ints(0); READ_STREAMS];
    let (lines, _) = data.as_chunks::<64>();
    let stream = lines.len() / READ_STREAMS;
    for offset in 0..stream {
        for (i, sum) in sums.iter_mut().enumerate() {
            let line = &lines[i * stream + offset];
            S::prefetch(line.as_ptr().wrapping_add(PREFETCH_BYTES));
            *sum = S::dot_unsigned(*sum, S::load_bytes(line), ones);
        }
    }
    sums.into_iter().map(|sum| S::to_floats(sum).sum()).sum()
}

/// The dot products that every quantized kernel is made of, with nothing else around them.
#[inline(always)]
pub fn dots<S: Simd>(rounds: usize) -> f32 {
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
    const ROUNDS_PER_CALL: usize = 64;
    // A line has 64 products with a row, as a vector has.
    let lines = [Line([3; 64]); SUMS * ROUNDS_PER_CALL / ROWS];
    let x = [[5; 16]; SUMS * ROUNDS_PER_CALL / ROWS / 4];
    let mut sum = 0.0;
    for _ in 0..rounds / ROUNDS_PER_CALL {
        for totals in S::totals_by_eights(black_box(&lines), black_box([x.as_slice(); ROWS])) {
            sum += S::to_floats(totals).sum();
        }
    }
    sum
}
