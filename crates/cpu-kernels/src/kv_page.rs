//! Layout of one head in one page of the KV cache, as F16 or Q8_0, and the kernels that encode it.
//!
//! Keys and values lie so that attention runs without adding across lanes. As F16, keys are `[head_dim, tokens]` and values
//! `[tokens, width]`, where `width` is the head size rounded up to whole vectors. As Q8_0, both are cut into groups of 32
//! dimensions, each a [`Q8Block`] with the scales beside the codes.

use carat_model::backend::{KvType, PAGE_TOKENS};
use half::f16;

use crate::simd::{Floats, LANES, Simd};

/// Sixteen F16, or thirty-two int8 codes.
pub type PageRow = [u8; 2 * LANES];

/// A group of dimensions of all tokens of a page: codes, for keys `[dimensions, tokens]` and for values `[tokens, dimensions]`,
/// then one F16 scale per token.
pub type Q8Block = [PageRow; GROUP + SCALE_ROWS];

/// Dimensions of a block.
pub const GROUP: usize = KvType::GROUP;
const SCALE_ROWS: usize = PAGE_TOKENS / LANES;

const _: () = assert!(
    GROUP == PAGE_TOKENS && GROUP == size_of::<PageRow>(),
    "a block is square, so that keys and values have the same"
);

/// Keys or values of one head in one page.
#[derive(Clone, Copy)]
pub enum PageHead<'a> {
    F16(&'a [PageRow]),
    Q8_0(&'a [Q8Block]),
}

impl PageHead<'_> {
    pub fn new(kv: KvType, bytes: &[u8]) -> PageHead<'_> {
        let (rows, _) = bytes.as_chunks();
        match kv {
            KvType::F16 => PageHead::F16(rows),
            KvType::Q8_0 => PageHead::Q8_0(rows.as_chunks().0),
        }
    }
}

/// F16 of a row, sixteen at a time; missing values at the end of `out` become 0.
#[inline(always)]
pub fn to_f16<S: Simd>(x: &[f32], out: &mut [PageRow]) {
    for (x, out) in x.chunks(LANES).zip(out) {
        let mut f16s = [0; LANES];
        S::Floats::load_part(x).store_f16_bits(&mut f16s);
        for (f16, out) in f16s.iter().zip(out.as_chunks_mut().0) {
            *out = f16.to_le_bytes();
        }
    }
}

/// Q8_0 of a group: codes are the nearest multiples (ties to even) of the scale, a 127th of the largest magnitude as F16,
/// which is returned. The codes of missing values become 0.
#[inline(always)]
pub fn to_q8_0<S: Simd>(x: &[f32], codes: &mut PageRow) -> [u8; 2] {
    let (low, high) = x.split_at(x.len().min(LANES));
    let (low, high) = (S::Floats::load_part(low), S::Floats::load_part(high));
    let largest = low.abs().max(high.abs()).largest();
    let scale = f16::from_f32(largest / 127.0);
    let inverse = if scale > f16::ZERO {
        1.0 / scale.to_f32()
    } else {
        0.0
    };
    let (least, most) = (S::Floats::splat(-127.0), S::Floats::splat(127.0));
    let inverse = S::Floats::splat(inverse);
    let (codes, _) = codes.as_chunks_mut::<LANES>();
    for (x, codes) in [low, high].into_iter().zip(codes) {
        // Numbers so small that their scale has few bits may come to more than 127 of it.
        let steps = x.mul(inverse).round().min(most).max(least);
        let mut signed = [0; LANES];
        steps.store_i8(&mut signed);
        *codes = signed.map(i8::cast_unsigned);
    }
    scale.to_le_bytes()
}
