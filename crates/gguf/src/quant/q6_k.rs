//! Q6_K: 16 groups of 16 values, 6-bit codes in a 4-bit and a 2-bit plane, signed byte scales.
//!
//! Layout: 128 bytes of low nibbles, 64 bytes of high pairs, 16 scales, half d. Each 128-value half uses 64 low bytes
//! and 32 high bytes: quarter `k` of it takes nibble `k / 2` of low byte `l + 32 * (k % 2)` and pair `k` of high byte `l`.

use super::half_at;

pub(super) fn block(block: &[u8], out: &mut [f32]) {
    let (low, high, scales) = (&block[..128], &block[128..192], &block[192..208]);
    let d = half_at(block, 208);
    for (i, y) in out.iter_mut().enumerate() {
        let (half, quarter, l) = (i / 128, i % 128 / 32, i % 32);
        let nibble = (low[64 * half + 32 * (quarter % 2) + l] >> (4 * (quarter / 2))) & 15;
        let pair = (high[32 * half + l] >> (2 * quarter)) & 3;
        let code = f32::from(nibble | pair << 4) - 32.0;
        *y = d * f32::from(scales[i / 16].cast_signed()) * code;
    }
}
