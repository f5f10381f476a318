//! The 256-value formats Q2_K to Q6_K: two levels of scales. A chunk is two blocks of eight groups of 32 (Q4_K, Q5_K) or
//! one block of sixteen groups of 16 (Q2_K, Q3_K, Q6_K).

use std::array::from_fn;

use carat_gguf::{QuantType, quant::q3_k_scales};

use super::format::{Coding, Format, Unpacked, at, half_bits};
use crate::simd::{Floats, Simd};

/// Each of sixteen small integers times the block's factor, as the definition rounds it.
#[inline(always)]
fn scaled<S: Simd>(d: S::Floats, by: [i32; 16]) -> S::Floats {
    d.mul(S::to_floats(S::load_ints(&by)))
}

/// The F16 at `offset`, in every lane.
#[inline(always)]
fn half_at<S: Simd>(bytes: &[u8], offset: usize) -> S::Floats {
    S::Floats::load_half(&[half_bits(bytes, offset); 16])
}

/// Scales and minimums of a chunk of two Q4_K or Q5_K blocks of `bytes` bytes.
#[inline(always)]
fn scales_and_mins<S: Simd>(chunk: &[u8], bytes: usize) -> (S::Floats, S::Floats) {
    // The eight 6-bit scales and eight minimums of a block, a byte each, by arithmetic on four bytes at once.
    let packed = |block: usize| -> [[u8; 8]; 2] {
        let word = |i: usize| u32::from_le_bytes(*at(chunk, block * bytes + 4 + 4 * i));
        let (a, b, c) = (word(0), word(1), word(2));
        let low = [a & 0x3f3f_3f3f, b & 0x3f3f_3f3f];
        let high = [
            c & 0x0f0f_0f0f | ((a >> 6) & 0x0303_0303) << 4,
            (c >> 4) & 0x0f0f_0f0f | ((b >> 6) & 0x0303_0303) << 4,
        ];
        from_fn(|i| (u64::from(low[i]) | u64::from(high[i]) << 32).to_le_bytes())
    };
    let (first, second) = (packed(0), packed(1));
    let numbers =
        |i: usize| from_fn(|g| i32::from(if g < 8 { first[i][g] } else { second[i][g - 8] }));
    let factor = |offset: usize| {
        let (d0, d1) = (half_bits(chunk, offset), half_bits(chunk, bytes + offset));
        S::Floats::load_half(&from_fn(|g| if g < 8 { d0 } else { d1 }))
    };
    (
        scaled::<S>(factor(0), numbers(0)),
        scaled::<S>(factor(2), numbers(1)),
    )
}

pub(crate) struct Q4K;

impl Format for Q4K {
    const QUANT: QuantType = QuantType::Q4_K;
    const GROUP: usize = 32;
    const CODING: Coding = Coding::Offset(0);
    const MINS: bool = true;
    const CHUNK_BYTES: usize = 2 * 144;

    #[inline(always)]
    fn unpack<S: Simd>(chunk: &[u8]) -> Unpacked<S> {
        let chunk: &[u8; 2 * 144] = at(chunk, 0);
        let (scales, mins) = scales_and_mins::<S>(chunk, 144);
        Unpacked {
            codes: from_fn(|i| {
                let run = at(chunk, 144 * (i / 4) + 16 + 32 * (i % 4));
                S::spread(run, 0, 4, 15)
            }),
            scales,
            mins,
        }
    }
}

pub(crate) struct Q5K;

impl Format for Q5K {
    const QUANT: QuantType = QuantType::Q5_K;
    const GROUP: usize = 32;
    const CODING: Coding = Coding::Offset(0);
    const MINS: bool = true;
    const CHUNK_BYTES: usize = 2 * 176;

    #[inline(always)]
    fn unpack<S: Simd>(chunk: &[u8]) -> Unpacked<S> {
        let chunk: &[u8; 2 * 176] = at(chunk, 0);
        let (scales, mins) = scales_and_mins::<S>(chunk, 176);
        Unpacked {
            codes: from_fn(|i| {
                let (block, pair) = (176 * (i / 4), i % 4);
                let low = S::spread(at(chunk, block + 48 + 32 * pair), 0, 4, 15);
                let sub = 2 * pair as u32;
                let fifth = S::spread(at(chunk, block + 16), sub, sub + 1, 1);
                S::or(low, S::shl::<4>(fifth))
            }),
            scales,
            mins,
        }
    }
}

pub(crate) struct Q6K;

impl Format for Q6K {
    const QUANT: QuantType = QuantType::Q6_K;
    const GROUP: usize = 16;
    const CODING: Coding = Coding::Offset(32);
    const MINS: bool = false;
    const CHUNK_BYTES: usize = 210;

    #[inline(always)]
    fn unpack<S: Simd>(chunk: &[u8]) -> Unpacked<S> {
        let chunk: &[u8; 210] = at(chunk, 0);
        let codes = |i: usize| {
            // Piece `i` holds quarters `2 (i % 2)` and the next, of half `i / 2`.
            let (half, quarter) = (i / 2, 2 * (i % 2) as u32);
            let low = S::field(S::load_bytes(at(chunk, 64 * half)), 2 * quarter, 15);
            let pairs = S::spread(at(chunk, 128 + 32 * half), 2 * quarter, 2 * quarter + 2, 3);
            S::or(low, S::shl::<4>(pairs))
        };
        let zero = S::load_bytes(&[0; 64]);
        Unpacked {
            codes: from_fn(|i| if i < 4 { codes(i) } else { zero }),
            scales: scaled::<S>(
                half_at::<S>(chunk, 208),
                from_fn(|g| i32::from(chunk[192 + g].cast_signed())),
            ),
            mins: S::Floats::zero(),
        }
    }
}

/// Two-bit fields of Q2_K and Q3_K: steps `2 (i % 2)` and the next of half `i / 2`, whose bytes start at `offset`.
#[inline(always)]
fn two_bits<S: Simd>(chunk: &[u8], offset: usize, i: usize) -> S::Bytes {
    let shift = 4 * (i % 2) as u32;
    S::spread(at(chunk, offset + 32 * (i / 2)), shift, shift + 2, 3)
}

pub(crate) struct Q2K;

impl Format for Q2K {
    const QUANT: QuantType = QuantType::Q2_K;
    const GROUP: usize = 16;
    const CODING: Coding = Coding::Offset(0);
    const MINS: bool = true;
    const CHUNK_BYTES: usize = 84;

    #[inline(always)]
    fn unpack<S: Simd>(chunk: &[u8]) -> Unpacked<S> {
        let chunk: &[u8; 84] = at(chunk, 0);
        let zero = S::load_bytes(&[0; 64]);
        Unpacked {
            codes: from_fn(|i| {
                if i < 4 {
                    two_bits::<S>(chunk, 16, i)
                } else {
                    zero
                }
            }),
            scales: scaled::<S>(
                half_at::<S>(chunk, 80),
                from_fn(|g| i32::from(chunk[g] & 15)),
            ),
            mins: scaled::<S>(
                half_at::<S>(chunk, 82),
                from_fn(|g| i32::from(chunk[g] >> 4)),
            ),
        }
    }
}

pub(crate) struct Q3K;

impl Format for Q3K {
    const QUANT: QuantType = QuantType::Q3_K;
    const GROUP: usize = 16;
    // A set high bit adds 4 to the two low ones, a clear one leaves 4 to subtract: one offset for both.
    const CODING: Coding = Coding::Offset(4);
    const MINS: bool = false;
    const CHUNK_BYTES: usize = 110;

    #[inline(always)]
    fn unpack<S: Simd>(chunk: &[u8]) -> Unpacked<S> {
        let chunk: &[u8; 110] = at(chunk, 0);
        let codes = |i: usize| {
            let bit = 2 * i as u32;
            let high = S::spread(at(chunk, 0), bit, bit + 1, 1);
            S::or(two_bits::<S>(chunk, 32, i), S::shl::<2>(high))
        };
        let zero = S::load_bytes(&[0; 64]);
        let scales = q3_k_scales(&chunk[96..108]);
        Unpacked {
            codes: from_fn(|i| if i < 4 { codes(i) } else { zero }),
            scales: scaled::<S>(
                half_at::<S>(chunk, 108),
                scales.map(|scale| i32::from(scale) - 32),
            ),
            mins: S::Floats::zero(),
        }
    }
}
