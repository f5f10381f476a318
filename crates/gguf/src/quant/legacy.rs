//! The 32-value formats Q4_0, Q4_1, Q5_0, Q5_1 and Q8_0: an F16 scale, perhaps an F16 minimum, and codes.
//!
//! Byte `j` of the nibbles holds value `j` low and value `j + 16` high. Q5's fifth bits are a u32, bit `j` for value `j`.

use super::half_at;

/// Values of a block.
const LEN: usize = 32;
const HALF: usize = LEN / 2;

/// The 4-bit code of value `j` among 16 bytes of nibbles.
pub(super) fn nibble(codes: &[u8], j: usize) -> u8 {
    if j < HALF {
        codes[j] & 15
    } else {
        codes[j - HALF] >> 4
    }
}

fn five_bits(high: &[u8], codes: &[u8], j: usize) -> u8 {
    nibble(codes, j) | ((high[j / 8] >> (j % 8)) & 1) << 4
}

/// `d * (code - 8)`; layout: half d, 16 bytes of nibbles.
pub(super) fn q4_0_block(block: &[u8], out: &mut [f32]) {
    let d = half_at(block, 0);
    for (j, y) in out.iter_mut().enumerate() {
        *y = d * (f32::from(nibble(&block[2..], j)) - 8.0);
    }
}

/// `d * code + m`; layout: half d, half m, 16 bytes of nibbles.
pub(super) fn q4_1_block(block: &[u8], out: &mut [f32]) {
    let (d, m) = (half_at(block, 0), half_at(block, 2));
    for (j, y) in out.iter_mut().enumerate() {
        *y = d * f32::from(nibble(&block[4..], j)) + m;
    }
}

/// `d * (code - 16)`; layout: half d, u32 fifth bits, 16 bytes of nibbles.
pub(super) fn q5_0_block(block: &[u8], out: &mut [f32]) {
    let d = half_at(block, 0);
    for (j, y) in out.iter_mut().enumerate() {
        *y = d * (f32::from(five_bits(&block[2..6], &block[6..], j)) - 16.0);
    }
}

/// `d * code + m`; layout: half d, half m, u32 fifth bits, 16 bytes of nibbles.
pub(super) fn q5_1_block(block: &[u8], out: &mut [f32]) {
    let (d, m) = (half_at(block, 0), half_at(block, 2));
    for (j, y) in out.iter_mut().enumerate() {
        *y = d * f32::from(five_bits(&block[4..8], &block[8..], j)) + m;
    }
}

/// `d * code`; layout: half d, 32 signed bytes.
pub(super) fn q8_0_block(block: &[u8], out: &mut [f32]) {
    let d = half_at(block, 0);
    for (y, &code) in out.iter_mut().zip(&block[2..]) {
        *y = d * f32::from(code.cast_signed());
    }
}
