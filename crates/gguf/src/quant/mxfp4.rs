//! MXFP4: 32 four-bit floats (E2M1) under one power-of-two scale (E8M0).

use super::legacy::nibble;

/// Twice the value of each E2M1 code, so that all are integers; the scale below is halved to match.
pub const MXFP4_VALUES: [i8; 16] = [0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12];

/// Half of the E8M0 scale: `2^(e - 128)`, subnormal for the two smallest exponents.
pub fn mxfp4_scale(e: u8) -> f32 {
    let bits = match e {
        0 => 0x0020_0000,
        1 => 0x0040_0000,
        _ => u32::from(e - 1) << 23,
    };
    f32::from_bits(bits)
}

/// Layout: u8 exponent, 16 bytes of nibbles.
pub(super) fn block(block: &[u8], out: &mut [f32]) {
    let d = mxfp4_scale(block[0]);
    for (j, y) in out.iter_mut().enumerate() {
        *y = d * f32::from(MXFP4_VALUES[usize::from(nibble(&block[1..], j))]);
    }
}
