//! NVFP4: 64 four-bit floats (E2M1) under an unsigned 8-bit float (E4M3) per 16.

use super::MXFP4_VALUES;

/// Half of the scale, for the codes' values are doubled. The sign bit is left out, and the code that stands for "no
/// number" is 0.
pub fn nvfp4_scale(e4m3: u8) -> f32 {
    let (exponent, fraction) = (e4m3 >> 3 & 15, f32::from(e4m3 & 7));
    match e4m3 {
        0x7f => 0.0,
        _ if exponent == 0 => fraction / 1024.0,
        // Two to the power of `exponent - 11`, by its bits.
        _ => (8.0 + fraction) * f32::from_bits((u32::from(exponent) + 116) << 23),
    }
}

/// Layout: 4 scales, then per 16 values 8 bytes of nibbles: the low ones, then the high ones.
pub(super) fn codes(block: &[u8], codes: &mut [[i8; 8]], scales: &mut [f32]) {
    for (group, scale) in scales.iter_mut().enumerate() {
        *scale = nvfp4_scale(block[group]);
        let bytes = &block[4 + 8 * group..][..8];
        for (j, byte) in bytes.iter().enumerate() {
            codes[2 * group][j] = MXFP4_VALUES[usize::from(byte & 15)];
            codes[2 * group + 1][j] = MXFP4_VALUES[usize::from(byte >> 4)];
        }
    }
}
