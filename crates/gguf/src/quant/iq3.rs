//! IQ3_XXS and IQ3_S: four values at a time from a grid, with signs of eight and scales of 32 apart.

use super::{
    grid::{IQ3_S_GRID, IQ3_XXS_GRID, even_signs, with_signs},
    half_at, u32_at,
};

fn joined(first: u32, second: u32) -> u64 {
    u64::from(first) | u64::from(second) << 32
}

/// `d * (scale + 1/2) / 2`; layout: half d, 64 bytes of grid numbers, then per 32 values a u32: four times seven signs, a
/// 4-bit scale on top.
pub(super) fn xxs_codes(block: &[u8], codes: &mut [[i8; 8]], scales: &mut [f32]) {
    let d = half_at(block, 0);
    let (numbers, high) = (&block[2..66], &block[66..]);
    for (k, codes) in codes.iter_mut().enumerate() {
        let [signs, ..] = (u32_at(high, k / 4 * 4) >> (7 * (k % 4))).to_le_bytes();
        let four = |i: usize| IQ3_XXS_GRID[usize::from(numbers[2 * k + i])];
        *codes = with_signs(joined(four(0), four(1)), even_signs(signs));
    }
    for (sub, scales) in scales.as_chunks_mut::<2>().0.iter_mut().enumerate() {
        *scales = [d * (f32::from(high[4 * sub + 3] >> 4) + 0.5) * 0.5; 2];
    }
}

/// `d * (2 * scale + 1)`; layout: half d, 64 bytes of grid numbers, 8 bytes of their ninth bits, 32 bytes of signs, 4 bytes
/// of 4-bit scales.
pub(super) fn s_codes(block: &[u8], codes: &mut [[i8; 8]], scales: &mut [f32]) {
    let d = half_at(block, 0);
    let (low, ninth, signs) = (&block[2..66], &block[66..74], &block[74..106]);
    for (k, codes) in codes.iter_mut().enumerate() {
        let four = |i: usize| {
            let number = 2 * k + i;
            let high = usize::from(ninth[number / 8] >> (number % 8) & 1) << 8;
            IQ3_S_GRID[usize::from(low[number]) | high]
        };
        *codes = with_signs(joined(four(0), four(1)), signs[k]);
    }
    for (sub, scales) in scales.as_chunks_mut::<2>().0.iter_mut().enumerate() {
        let number = block[106 + sub / 2] >> (4 * (sub % 2)) & 15;
        *scales = [d * f32::from(2 * number + 1); 2];
    }
}
