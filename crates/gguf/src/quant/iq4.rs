//! IQ4_NL and IQ4_XS: 4-bit codes that index a table of unevenly spaced values.

use super::{half_at, legacy::nibble};

/// Values of the 16 codes, before the scale.
pub const IQ4_VALUES: [i8; 16] = [
    -127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113,
];

fn value(codes: &[u8], j: usize) -> f32 {
    f32::from(IQ4_VALUES[usize::from(nibble(codes, j))])
}

/// `d * table[code]`; layout: half d, 16 bytes of nibbles.
pub(super) fn nl_block(block: &[u8], out: &mut [f32]) {
    let d = half_at(block, 0);
    for (j, y) in out.iter_mut().enumerate() {
        *y = d * value(&block[2..], j);
    }
}

/// 8 sub-blocks of 32 with 6-bit scales; layout: half d, u16 high scale pairs, 4 bytes of low scale nibbles, 128 bytes
/// of nibbles.
pub(super) fn xs_block(block: &[u8], out: &mut [f32]) {
    let d = half_at(block, 0);
    let (high, low, codes) = (&block[2..4], &block[4..8], &block[8..]);
    for (sub, values) in out.chunks_exact_mut(32).enumerate() {
        let scale =
            (low[sub / 2] >> (4 * (sub % 2))) & 15 | ((high[sub / 4] >> (2 * (sub % 4))) & 3) << 4;
        let d = d * (f32::from(scale) - 32.0);
        for (j, y) in values.iter_mut().enumerate() {
            *y = d * value(&codes[16 * sub..], j);
        }
    }
}
