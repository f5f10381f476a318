//! The 32-value formats Q4_0, Q4_1, Q5_0, Q5_1 and Q8_0: a chunk is sixteen blocks.

use carat_gguf::QuantType;

use super::unpack::{Coding, Format, Order, TransposeLayout, Unpacked, at, no_codes};
use crate::simd::{Floats, Simd, Tiles, array};

/// Nibbles of blocks `2 i` and `2 i + 1`, where a block has `bytes` bytes and its nibbles start at `offset`.
#[inline(always)]
pub(super) fn block_nibbles<S: Simd>(
    chunk: &[u8],
    i: usize,
    bytes: usize,
    offset: usize,
) -> S::Bytes {
    S::nibbles(
        at(chunk, 2 * i * bytes + offset),
        at(chunk, (2 * i + 1) * bytes + offset),
    )
}

/// Nibbles of the even blocks, or the odd ones, of eight in the order of [`Order::HalfGroups`]: the low ones, the first halves, where
/// `i` is even.
#[inline(always)]
pub(super) fn four_blocks_nibbles<S: Simd>(
    chunk: &[u8],
    i: usize,
    bytes: usize,
    offset: usize,
) -> S::Bytes {
    let first = (8 * (i / 4) + i % 4 / 2) * bytes + offset;
    let runs = array![at(chunk, first); j => at(chunk, first + 2 * j * bytes)];
    S::field(S::join_four(runs), 4 * (i % 2) as u32, 15)
}

/// Fifth bits of blocks `2 i` and `2 i + 1`, in place.
#[inline(always)]
fn fifth_bits<S: Simd>(chunk: &[u8], i: usize, bytes: usize, offset: usize) -> S::Bytes {
    let bits = |block: usize| u64::from(u32::from_le_bytes(*at(chunk, block * bytes + offset)));
    S::sixteens(bits(2 * i) | bits(2 * i + 1) << 32)
}

/// The second F16 of every block. Negated, because formats subtract their minimum and these add theirs.
#[inline(always)]
fn added_mins<S: Simd, const STRIDE: usize>(chunk: &[u8]) -> S::Floats {
    S::load_f16_strided::<STRIDE>(&chunk[2..]).mul(S::Floats::splat(-1.0))
}

#[derive(Clone, Copy)]
pub(super) struct Q4_0;

impl Format for Q4_0 {
    const GROUP: usize = 32;
    const CODING: Coding = Coding::Offset(8);
    const MINS: bool = false;
    const TRANSPOSE: TransposeLayout = TransposeLayout::Nibbles;
    const ORDER: Order = Order::HalfGroups;

    #[inline(always)]
    fn quant(self) -> QuantType {
        QuantType::Q4_0
    }

    #[inline(always)]
    fn chunk_bytes(self) -> usize {
        16 * 18
    }

    #[inline(always)]
    fn unpack<S: Simd>(self, chunk: &[u8]) -> Unpacked<S> {
        let chunk: &[u8; 16 * 18] = at(chunk, 0);
        Unpacked {
            codes: array![no_codes::<S>(); i => block_nibbles::<S>(chunk, i, 18, 2)],
            scales: S::load_f16_strided::<18>(chunk),
            mins: S::Floats::zero(),
        }
    }

    #[inline(always)]
    fn unpack_ordered<S: Simd>(self, chunk: &[u8]) -> Unpacked<S> {
        let chunk: &[u8; 16 * 18] = at(chunk, 0);
        Unpacked {
            codes: array![no_codes::<S>(); i => four_blocks_nibbles::<S>(chunk, i, 18, 2)],
            ..self.unpack(chunk)
        }
    }

    #[inline(always)]
    fn unpack_signed<T: Tiles>(self, chunk: &[u8]) -> Unpacked<T::Vectors> {
        let chunk: &[u8; 16 * 18] = at(chunk, 0);
        Unpacked {
            codes: T::q4_0_codes(chunk),
            scales: T::Vectors::load_f16_strided::<18>(chunk),
            mins: Floats::zero(),
        }
    }
}

#[derive(Clone, Copy)]
pub(super) struct Q4_1;

impl Format for Q4_1 {
    const GROUP: usize = 32;
    const CODING: Coding = Coding::Offset(0);
    const MINS: bool = true;
    const TRANSPOSE: TransposeLayout = TransposeLayout::Nibbles;
    const ORDER: Order = Order::HalfGroups;

    #[inline(always)]
    fn quant(self) -> QuantType {
        QuantType::Q4_1
    }

    #[inline(always)]
    fn chunk_bytes(self) -> usize {
        16 * 20
    }

    #[inline(always)]
    fn unpack<S: Simd>(self, chunk: &[u8]) -> Unpacked<S> {
        let chunk: &[u8; 16 * 20] = at(chunk, 0);
        Unpacked {
            codes: array![no_codes::<S>(); i => block_nibbles::<S>(chunk, i, 20, 4)],
            scales: S::load_f16_strided::<20>(chunk),
            mins: added_mins::<S, 20>(chunk),
        }
    }

    #[inline(always)]
    fn unpack_ordered<S: Simd>(self, chunk: &[u8]) -> Unpacked<S> {
        let chunk: &[u8; 16 * 20] = at(chunk, 0);
        Unpacked {
            codes: array![no_codes::<S>(); i => four_blocks_nibbles::<S>(chunk, i, 20, 4)],
            ..self.unpack(chunk)
        }
    }
}

#[derive(Clone, Copy)]
pub(super) struct Q5_0;

impl Format for Q5_0 {
    const GROUP: usize = 32;
    const CODING: Coding = Coding::Offset(16);
    const MINS: bool = false;

    #[inline(always)]
    fn quant(self) -> QuantType {
        QuantType::Q5_0
    }

    #[inline(always)]
    fn chunk_bytes(self) -> usize {
        16 * 22
    }

    #[inline(always)]
    fn unpack<S: Simd>(self, chunk: &[u8]) -> Unpacked<S> {
        let chunk: &[u8; 16 * 22] = at(chunk, 0);
        Unpacked {
            codes: array![no_codes::<S>(); i => {
                let low = block_nibbles::<S>(chunk, i, 22, 6);
                S::or(low, fifth_bits::<S>(chunk, i, 22, 2))
            }],
            scales: S::load_f16_strided::<22>(chunk),
            mins: S::Floats::zero(),
        }
    }
}

#[derive(Clone, Copy)]
pub(super) struct Q5_1;

impl Format for Q5_1 {
    const GROUP: usize = 32;
    const CODING: Coding = Coding::Offset(0);
    const MINS: bool = true;

    #[inline(always)]
    fn quant(self) -> QuantType {
        QuantType::Q5_1
    }

    #[inline(always)]
    fn chunk_bytes(self) -> usize {
        16 * 24
    }

    #[inline(always)]
    fn unpack<S: Simd>(self, chunk: &[u8]) -> Unpacked<S> {
        let chunk: &[u8; 16 * 24] = at(chunk, 0);
        Unpacked {
            codes: array![no_codes::<S>(); i => {
                let low = block_nibbles::<S>(chunk, i, 24, 8);
                S::or(low, fifth_bits::<S>(chunk, i, 24, 4))
            }],
            scales: S::load_f16_strided::<24>(chunk),
            mins: added_mins::<S, 24>(chunk),
        }
    }
}

#[derive(Clone, Copy)]
pub(super) struct Q8_0;

impl Format for Q8_0 {
    const GROUP: usize = 32;
    const CODING: Coding = Coding::Signed;
    const MINS: bool = false;
    const TRANSPOSE: TransposeLayout = TransposeLayout::Int8;

    #[inline(always)]
    fn quant(self) -> QuantType {
        QuantType::Q8_0
    }

    #[inline(always)]
    fn chunk_bytes(self) -> usize {
        16 * 34
    }

    #[inline(always)]
    fn unpack<S: Simd>(self, chunk: &[u8]) -> Unpacked<S> {
        let chunk: &[u8; 16 * 34] = at(chunk, 0);
        Unpacked {
            codes: array![no_codes::<S>(); i => S::join(at(chunk, 68 * i + 2), at(chunk, 68 * i + 36))],
            scales: S::load_f16_strided::<34>(chunk),
            mins: S::Floats::zero(),
        }
    }
}
