//! TQ1_0 and TQ2_0: values of -1, 0 or 1 under one scale per 256. Q1_0: values of -1 or 1 under one per 128.

use super::{grid::with_signs, half_at};

/// Layout: 48 bytes of five digits each, 4 bytes of four, half d. A byte is a fraction of 256: three times it, and
/// what is beyond the byte is its first digit. The first 32 bytes hold the first digit of 32 values, then the second of
/// the next 32; 16 bytes and 4 bytes follow alike.
pub(super) fn tq1_0_codes(block: &[u8], codes: &mut [[i8; 8]], scales: &mut [f32]) {
    let values = codes.as_flattened_mut();
    for (first, bytes, digits) in [
        (0, &block[..32], 5),
        (160, &block[32..48], 5),
        (240, &block[48..52], 4),
    ] {
        let values = values[first..].chunks_exact_mut(bytes.len()).take(digits);
        let mut power = 1u8;
        for values in values {
            for (value, byte) in values.iter_mut().zip(bytes) {
                let [_, digit] = (3 * u16::from(byte.wrapping_mul(power))).to_le_bytes();
                *value = digit.cast_signed() - 1;
            }
            power = power.wrapping_mul(3);
        }
    }
    scales.fill(half_at(block, 52));
}

/// Layout: 64 bytes of four 2-bit codes, half d. Two halves of 128 values; step `k` of a half reads the bits at shift `2 k` of
/// its 32 bytes.
pub(super) fn tq2_0_codes(block: &[u8], codes: &mut [[i8; 8]], scales: &mut [f32]) {
    for (i, code) in codes.as_flattened_mut().iter_mut().enumerate() {
        let bits = block[i / 128 * 32 + i % 32] >> (2 * (i % 128 / 32)) & 3;
        *code = bits.cast_signed() - 1;
    }
    scales.fill(half_at(block, 64));
}

/// Layout: half d, 16 bytes; a set bit is a 1.
pub(super) fn q1_0_codes(block: &[u8], codes: &mut [[i8; 8]], scales: &mut [f32]) {
    for (codes, bits) in codes.iter_mut().zip(&block[2..]) {
        *codes = with_signs(0x0101_0101_0101_0101, !bits);
    }
    scales.fill(half_at(block, 0));
}
