//! Q2_K: 16 groups of 16 values, 2-bit codes, a 4-bit scale and a 4-bit minimum per group.
//!
//! Layout: 16 bytes of (minimum << 4 | scale), 64 bytes of codes, half d, half dmin.
//! The two 128-value halves each use 32 bytes of codes; step `k` of a half reads the bits at shift `2k` of all 32.

use super::half_at;

pub(super) fn block(block: &[u8], out: &mut [f32]) {
    let (scales, codes) = (&block[..16], &block[16..80]);
    let (d, dmin) = (half_at(block, 80), half_at(block, 82));
    for (i, y) in out.iter_mut().enumerate() {
        let (half, step, byte) = (i / 128, i % 128 / 32, i % 32);
        let code = (codes[32 * half + byte] >> (2 * step)) & 3;
        let scale = scales[i / 16];
        *y = d * f32::from(scale & 15) * f32::from(code) - dmin * f32::from(scale >> 4);
    }
}
