//! IQ1_S and IQ1_M: eight values of -1, 0 or 1 at a time from a grid, all moved up or down by an eighth. Codes are
//! eight times that, and scales an eighth of `d * (2 * scale + 1)`.

use half::f16;

use super::{grid::IQ1_GRID, half_at, u16_at};

/// Eight codes of the grid, plus one or minus one.
#[inline]
fn moved(codes: u64, down: bool) -> [i8; 8] {
    const TOPS: u64 = 0x8080_8080_8080_8080;
    let by = if down { u64::MAX } else { !TOPS / 127 };
    // Bytes are added apart: without their top bits no sum carries into the next.
    let sums = ((codes & !TOPS) + (by & !TOPS)) ^ ((codes ^ by) & TOPS);
    sums.to_le_bytes().map(u8::cast_signed)
}

fn scale(d: f32, number: u16) -> f32 {
    d * f32::from(2 * (number & 7) + 1) * 0.125
}

/// Layout: half d, 32 bytes of grid numbers, then per 32 values a u16: four times the numbers' upper three bits, a 3-bit
/// scale, the direction on top.
pub(super) fn s_codes(block: &[u8], codes: &mut [[i8; 8]], scales: &mut [f32]) {
    let d = half_at(block, 0);
    for (k, codes) in codes.iter_mut().enumerate() {
        let high = u16_at(block, 34 + k / 4 * 2);
        let number = u16::from(block[2 + k]) | (high >> (3 * (k % 4)) & 7) << 8;
        *codes = moved(IQ1_GRID[usize::from(number)], high >> 15 == 1);
    }
    for (sub, scales) in scales.as_chunks_mut::<2>().0.iter_mut().enumerate() {
        *scales = [scale(d, u16_at(block, 34 + 2 * sub) >> 12); 2];
    }
}

/// Bits of the scale that all of an IQ1_M block share: the upper nibbles of its four u16.
fn shared_scale(block: &[u8]) -> f32 {
    let nibble = |k: usize| (u16_at(block, 48 + 2 * k) >> 12) << (4 * k);
    f16::from_bits(nibble(0) | nibble(1) | nibble(2) | nibble(3)).to_f32()
}

/// Layout: 32 bytes of grid numbers, 16 bytes with a nibble per number (its upper three bits, the direction), four
/// u16 with four 3-bit scales of 16 values each and a nibble of half d on top.
pub(super) fn m_codes(block: &[u8], codes: &mut [[i8; 8]], scales: &mut [f32]) {
    let d = shared_scale(block);
    for (k, codes) in codes.iter_mut().enumerate() {
        let high = block[32 + k / 2] >> (4 * (k % 2));
        let number = u16::from(block[k]) | u16::from(high & 7) << 8;
        *codes = moved(IQ1_GRID[usize::from(number)], high & 8 != 0);
    }
    for (group, value) in scales.iter_mut().enumerate() {
        *value = scale(d, u16_at(block, 48 + group / 4 * 2) >> (3 * (group % 4)));
    }
}
