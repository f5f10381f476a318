//! Q3_K: 16 groups of 16 values, 2 low bits in the order of Q2_K, a high bit apart, 6-bit scales.
//!
//! Layout: 32 bytes of high bits, 64 bytes of low bits, 12 bytes of packed scales, half d.
//! A clear high bit subtracts 4 from the code.

use super::half_at;

/// The 16 scales (0 to 63, not yet centred) packed in 12 bytes.
pub fn q3_k_scales(packed: &[u8]) -> [u8; 16] {
    std::array::from_fn(|g| {
        let low = if g < 8 {
            packed[g] & 15
        } else {
            packed[g - 8] >> 4
        };
        let high = (packed[8 + g % 4] >> (2 * (g / 4))) & 3;
        low | high << 4
    })
}

pub(super) fn block(block: &[u8], out: &mut [f32]) {
    let (high, codes) = (&block[..32], &block[32..96]);
    let scales = q3_k_scales(&block[96..108]);
    let d = half_at(block, 108);
    for (i, y) in out.iter_mut().enumerate() {
        let (half, step, byte) = (i / 128, i % 128 / 32, i % 32);
        let low = (codes[32 * half + byte] >> (2 * step)) & 3;
        let high = (high[byte] >> (4 * half + step)) & 1;
        let code = f32::from(low) - if high == 1 { 0.0 } else { 4.0 };
        *y = d * (f32::from(scales[i / 16]) - 32.0) * code;
    }
}
