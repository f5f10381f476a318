//! IQ2_XXS, IQ2_XS and IQ2_S: eight values at a time from a grid, with signs and scales apart. A value is
//! `d * (scale + 1/2) / 4` times a magnitude of the grid.

use super::{
    grid::{IQ2_S_GRID, IQ2_XS_GRID, IQ2_XXS_GRID, even_signs, with_signs},
    half_at, u16_at, u32_at,
};

fn scale(d: f32, number: u8) -> f32 {
    d * (f32::from(number) + 0.5) * 0.25
}

/// Scales of 16 values, two in a byte.
fn nibble_scales(d: f32, packed: &[u8], scales: &mut [f32]) {
    for (pair, byte) in scales.as_chunks_mut::<2>().0.iter_mut().zip(packed) {
        *pair = [scale(d, byte & 15), scale(d, byte >> 4)];
    }
}

/// Layout: half d, then per 32 values four bytes of grid numbers and a u32: four times seven signs, a 4-bit scale on top.
pub(super) fn xxs_codes(block: &[u8], codes: &mut [[i8; 8]], scales: &mut [f32]) {
    let d = half_at(block, 0);
    let subs = block[2..].as_chunks::<8>().0.iter();
    let scales = scales.as_chunks_mut::<2>().0.iter_mut();
    for ((sub, codes), scales) in subs.zip(codes.as_chunks_mut::<4>().0).zip(scales) {
        let high = u32_at(sub, 4);
        for (k, codes) in codes.iter_mut().enumerate() {
            let [signs, ..] = (high >> (7 * k)).to_le_bytes();
            *codes = with_signs(IQ2_XXS_GRID[usize::from(sub[k])], even_signs(signs));
        }
        *scales = [scale(d, sub[7] >> 4); 2];
    }
}

/// Layout: half d, 32 u16 (9 bits of grid number, seven signs), 8 bytes of 4-bit scales.
pub(super) fn xs_codes(block: &[u8], codes: &mut [[i8; 8]], scales: &mut [f32]) {
    for (k, codes) in codes.iter_mut().enumerate() {
        let number = u16_at(block, 2 + 2 * k);
        let [_, signs] = number.to_le_bytes();
        let magnitudes = IQ2_XS_GRID[usize::from(number & 511)];
        *codes = with_signs(magnitudes, even_signs(signs >> 1));
    }
    nibble_scales(half_at(block, 0), &block[66..], scales);
}

/// Layout: half d, 32 bytes of grid numbers, 32 bytes of signs, 8 bytes of the numbers' upper two bits, 8 bytes of 4-bit
/// scales.
pub(super) fn s_codes(block: &[u8], codes: &mut [[i8; 8]], scales: &mut [f32]) {
    let (low, signs, high) = (&block[2..34], &block[34..66], &block[66..74]);
    for (k, codes) in codes.iter_mut().enumerate() {
        let number = u16::from(low[k]) | u16::from(high[k / 4] >> (2 * (k % 4)) & 3) << 8;
        *codes = with_signs(IQ2_S_GRID[usize::from(number)], signs[k]);
    }
    nibble_scales(half_at(block, 0), &block[74..], scales);
}
