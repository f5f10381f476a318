//! The 256-value formats Q2_K to Q6_K: two levels of scales. A chunk is two blocks of eight groups of 32 (Q4_K, Q5_K) or
//! one block of sixteen groups of 16 (Q2_K, Q3_K, Q6_K).

use carat_gguf::{QuantType, quant::q3_k_scales};

use super::unpack::{Coding, Format, Order, TransposeLayout, Unpacked, at, f16_bits, no_codes};
use crate::simd::{Floats, Simd, array};

/// Each of sixteen small integers times the block's factor, as the definition rounds it.
#[inline(always)]
fn scaled<S: Simd>(d: S::Floats, by: [i8; 16]) -> S::Floats {
    d.mul(S::to_floats(S::widen(&by)))
}

/// The F16 at `offset`, in every lane.
#[inline(always)]
fn f16_at<S: Simd>(bytes: &[u8], offset: usize) -> S::Floats {
    S::Floats::load_f16_bits(&[f16_bits(bytes, offset); 16])
}

/// Scales and minimums of a chunk of two Q4_K or Q5_K blocks of `bytes` bytes.
#[inline(always)]
fn scales_and_mins<S: Simd>(chunk: &[u8], bytes: usize) -> [S::Floats; 2] {
    S::six_bit_scales([at(chunk, 0), at(chunk, bytes)])
}

/// Nibbles of eight groups in the order of [`Order::HalfGroups`], from runs of 32 bytes that hold two groups each.
#[inline(always)]
fn halves_of_nibbles<S: Simd>(runs: &[u8; 128]) -> [S::Bytes; 4] {
    let (lines, _) = runs.as_chunks();
    let [first, second] = S::unzip_quarters(S::load_bytes(&lines[0]), S::load_bytes(&lines[1]));
    [
        S::field(first, 0, 15),
        S::field(second, 0, 15),
        S::field(first, 4, 15),
        S::field(second, 4, 15),
    ]
}

#[derive(Clone, Copy)]
pub(super) struct Q4K;

impl Format for Q4K {
    const GROUP: usize = 32;
    const CODING: Coding = Coding::Offset(0);
    const MINS: bool = true;
    const TRANSPOSE: TransposeLayout = TransposeLayout::Q4K;
    const ORDER: Order = Order::HalfGroups;

    #[inline(always)]
    fn quant(self) -> QuantType {
        QuantType::Q4_K
    }

    #[inline(always)]
    fn chunk_bytes(self) -> usize {
        2 * 144
    }

    #[inline(always)]
    fn unpack<S: Simd>(self, chunk: &[u8]) -> Unpacked<S> {
        let chunk: &[u8; 2 * 144] = at(chunk, 0);
        let [scales, mins] = scales_and_mins::<S>(chunk, 144);
        Unpacked {
            codes: array![no_codes::<S>(); i => {
                let run = at(chunk, 144 * (i / 4) + 16 + 32 * (i % 4));
                S::spread(run, 0, 4, 15)
            }],
            scales,
            mins,
        }
    }

    #[inline(always)]
    fn unpack_ordered<S: Simd>(self, chunk: &[u8]) -> Unpacked<S> {
        let chunk: &[u8; 2 * 144] = at(chunk, 0);
        let [scales, mins] = scales_and_mins::<S>(chunk, 144);
        let first = halves_of_nibbles::<S>(at(chunk, 16));
        let second = halves_of_nibbles::<S>(at(chunk, 144 + 16));
        Unpacked {
            codes: array![no_codes::<S>(); i => if i < 4 { first[i] } else { second[i - 4] }],
            scales,
            mins,
        }
    }
}

#[derive(Clone, Copy)]
pub(super) struct Q5K;

impl Format for Q5K {
    const GROUP: usize = 32;
    const CODING: Coding = Coding::Offset(0);
    const MINS: bool = true;
    const ORDER: Order = Order::HalfGroups;

    #[inline(always)]
    fn quant(self) -> QuantType {
        QuantType::Q5_K
    }

    #[inline(always)]
    fn chunk_bytes(self) -> usize {
        2 * 176
    }

    #[inline(always)]
    fn unpack<S: Simd>(self, chunk: &[u8]) -> Unpacked<S> {
        let chunk: &[u8; 2 * 176] = at(chunk, 0);
        let [scales, mins] = scales_and_mins::<S>(chunk, 176);
        Unpacked {
            codes: array![no_codes::<S>(); i => {
                let (block, pair) = (176 * (i / 4), i % 4);
                let low = S::spread(at(chunk, block + 48 + 32 * pair), 0, 4, 15);
                let sub = 2 * pair as u32;
                let fifth = S::spread(at(chunk, block + 16), sub, sub + 1, 1);
                S::or(low, S::shl::<4>(fifth))
            }],
            scales,
            mins,
        }
    }

    #[inline(always)]
    fn unpack_ordered<S: Simd>(self, chunk: &[u8]) -> Unpacked<S> {
        let chunk: &[u8; 2 * 176] = at(chunk, 0);
        let [scales, mins] = scales_and_mins::<S>(chunk, 176);
        let first = halves_of_nibbles::<S>(at(chunk, 48));
        let second = halves_of_nibbles::<S>(at(chunk, 176 + 48));
        Unpacked {
            codes: array![no_codes::<S>(); i => {
                let low = if i < 4 { first[i] } else { second[i - 4] };
                let (bits, odd) = (176 * (i / 4) + 16 + 16 * (i % 2), i as u32 % 4 / 2);
                let fifth = S::spread_four(at(chunk, bits), [odd, odd + 2, odd + 4, odd + 6], 1);
                S::or(low, S::shl::<4>(fifth))
            }],
            scales,
            mins,
        }
    }
}

#[derive(Clone, Copy)]
pub(super) struct Q6K;

impl Format for Q6K {
    const GROUP: usize = 16;
    const CODING: Coding = Coding::Offset(32);
    const MINS: bool = false;
    const TRANSPOSE: TransposeLayout = TransposeLayout::Q6K;

    #[inline(always)]
    fn quant(self) -> QuantType {
        QuantType::Q6_K
    }

    #[inline(always)]
    fn chunk_bytes(self) -> usize {
        210
    }

    #[inline(always)]
    fn unpack<S: Simd>(self, chunk: &[u8]) -> Unpacked<S> {
        let chunk: &[u8; 210] = at(chunk, 0);
        Unpacked {
            codes: array![no_codes::<S>(); i => {
                // Piece `i` holds quarters `2 (i % 2)` and the next, of half `i / 2`; a block has four pieces.
                let (half, shift) = (i % 4 / 2, 4 * (i % 2) as u32);
                let low = S::field(S::load_bytes(at(chunk, 64 * half)), shift, 15);
                let pairs = S::spread(at(chunk, 128 + 32 * half), shift, shift + 2, 3);
                S::or(low, S::shl::<4>(pairs))
            }],
            scales: scaled::<S>(
                f16_at::<S>(chunk, 208),
                array![0; g => chunk[192 + g].cast_signed()],
            ),
            mins: S::Floats::zero(),
        }
    }
}

/// Two-bit fields of Q2_K and Q3_K: steps `2 (i % 2)` and the next of half `i / 2`, whose bytes start at `offset`.
#[inline(always)]
fn two_bits<S: Simd>(chunk: &[u8], offset: usize, i: usize) -> S::Bytes {
    let shift = 4 * (i % 2) as u32;
    S::spread(at(chunk, offset + 32 * (i % 4 / 2)), shift, shift + 2, 3)
}

#[derive(Clone, Copy)]
pub(super) struct Q2K;

impl Format for Q2K {
    const GROUP: usize = 16;
    const CODING: Coding = Coding::Offset(0);
    const MINS: bool = true;

    #[inline(always)]
    fn quant(self) -> QuantType {
        QuantType::Q2_K
    }

    #[inline(always)]
    fn chunk_bytes(self) -> usize {
        84
    }

    #[inline(always)]
    fn unpack<S: Simd>(self, chunk: &[u8]) -> Unpacked<S> {
        let chunk: &[u8; 84] = at(chunk, 0);
        Unpacked {
            codes: array![no_codes::<S>(); i => two_bits::<S>(chunk, 16, i)],
            scales: scaled::<S>(
                f16_at::<S>(chunk, 80),
                array![0; g => (chunk[g] & 15).cast_signed()],
            ),
            mins: scaled::<S>(
                f16_at::<S>(chunk, 82),
                array![0; g => (chunk[g] >> 4).cast_signed()],
            ),
        }
    }
}

#[derive(Clone, Copy)]
pub(super) struct Q3K;

impl Format for Q3K {
    const GROUP: usize = 16;
    // A set high bit adds 4 to the two low ones, a clear one leaves 4 to subtract: one offset for both.
    const CODING: Coding = Coding::Offset(4);
    const MINS: bool = false;

    #[inline(always)]
    fn quant(self) -> QuantType {
        QuantType::Q3_K
    }

    #[inline(always)]
    fn chunk_bytes(self) -> usize {
        110
    }

    #[inline(always)]
    fn unpack<S: Simd>(self, chunk: &[u8]) -> Unpacked<S> {
        let chunk: &[u8; 110] = at(chunk, 0);
        let scales = q3_k_scales(&chunk[96..108]);
        Unpacked {
            codes: array![no_codes::<S>(); i => {
                let bit = 2 * (i % 4) as u32;
                let high = S::spread(at(chunk, 0), bit, bit + 1, 1);
                S::or(two_bits::<S>(chunk, 32, i), S::shl::<2>(high))
            }],
            scales: scaled::<S>(
                f16_at::<S>(chunk, 108),
                array![0; g => scales[g].cast_signed() - 32],
            ),
            mins: S::Floats::zero(),
        }
    }
}
