//! Q5_K: Q4_K with a fifth bit a code.
//!
//! Layout: half d, half dmin, 12 bytes of packed scales and minimums, 32 bytes of fifth bits (bit `s` of byte `l` for
//! value `l` of sub-block `s`), 128 bytes of nibbles.

use super::{half_at, q4_k::k_scale_min};

pub(super) fn block(block: &[u8], out: &mut [f32]) {
    let (d, dmin) = (half_at(block, 0), half_at(block, 2));
    let (packed, high, codes) = (&block[4..16], &block[16..48], &block[48..]);
    for (i, y) in out.iter_mut().enumerate() {
        let (sub, l) = (i / 32, i % 32);
        let byte = codes[32 * (sub / 2) + l];
        let low = if sub % 2 == 0 { byte & 15 } else { byte >> 4 };
        let code = low | ((high[l] >> sub) & 1) << 4;
        let (scale, min) = k_scale_min(packed, sub);
        *y = d * f32::from(scale) * f32::from(code) - dmin * f32::from(min);
    }
}
