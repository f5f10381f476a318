//! Q4_K: 8 sub-blocks of 32 values, 4-bit codes, a 6-bit scale and a 6-bit minimum per sub-block.
//!
//! Layout: half d, half dmin, 12 bytes of packed scales and minimums, 128 bytes of nibbles.
//! Each run of 32 bytes serves two sub-blocks: the even one in the low nibbles, the odd one in the high.

use super::half_at;

/// Scale and minimum of sub-block `j` (0 to 7) from the 12 bytes that Q4_K and Q5_K share.
pub fn k_scale_min(packed: &[u8], j: usize) -> (u8, u8) {
    if j < 4 {
        (packed[j] & 63, packed[j + 4] & 63)
    } else {
        (
            packed[j + 4] & 15 | (packed[j - 4] >> 6) << 4,
            packed[j + 4] >> 4 | (packed[j] >> 6) << 4,
        )
    }
}

pub(super) fn block(block: &[u8], out: &mut [f32]) {
    let (d, dmin) = (half_at(block, 0), half_at(block, 2));
    let (packed, codes) = (&block[4..16], &block[16..]);
    for (i, y) in out.iter_mut().enumerate() {
        let sub = i / 32;
        let byte = codes[32 * (sub / 2) + i % 32];
        let code = if sub % 2 == 0 { byte & 15 } else { byte >> 4 };
        let (scale, min) = k_scale_min(packed, sub);
        *y = d * f32::from(scale) * f32::from(code) - dmin * f32::from(min);
    }
}
