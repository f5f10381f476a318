//! Q3_K: 16 groups of 16 values, 2 low bits in the order of Q2_K, a high bit apart, 6-bit scales.
//!
//! Layout: 32 bytes of high bits, 64 bytes of low bits, 12 bytes of packed scales, half d.
//! A clear high bit subtracts 4 from the code.

use super::{half_at, u32_at};

/// The 16 scales (0 to 63, not yet centred) packed in 12 bytes.
pub fn q3_k_scales(packed: &[u8]) -> [u8; 16] {
    // Four at a time: nibbles, and two bits each of what is above them.
    let [first, second, above] = [0, 4, 8].map(|at| u32_at(packed, at));
    let scales = [first, second, first >> 4, second >> 4];
    let mut joined = [[0; 4]; 4];
    for (k, (joined, nibbles)) in joined.iter_mut().zip(scales).enumerate() {
        let scales = nibbles & 0x0f0f_0f0f | (above >> (2 * k) & 0x0303_0303) << 4;
        *joined = scales.to_le_bytes();
    }
    *joined.as_flattened().as_array().expect("16 scales")
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
