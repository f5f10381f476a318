//! IQ4_NL, IQ4_XS and MXFP4: nibbles that index a table of sixteen signed values.

use carat_gguf::{
    QuantType,
    quant::{IQ4_VALUES, MXFP4_VALUES, mxfp4_scale},
};

use super::{
    legacy::{block_nibbles, four_blocks_nibbles},
    unpack::{Coding, Format, Order, Unpacked, at, f16_bits, no_codes},
};
use crate::simd::{Floats, Simd, array};

#[derive(Clone, Copy)]
pub(super) struct Iq4Nl;

impl Format for Iq4Nl {
    const GROUP: usize = 32;
    const CODING: Coding = Coding::Signed;
    const MINS: bool = false;
    const ORDER: Order = Order::HalfGroups;

    #[inline(always)]
    fn quant(self) -> QuantType {
        QuantType::IQ4_NL
    }

    #[inline(always)]
    fn chunk_bytes(self) -> usize {
        16 * 18
    }

    #[inline(always)]
    fn unpack<S: Simd>(self, chunk: &[u8]) -> Unpacked<S> {
        let chunk: &[u8; 16 * 18] = at(chunk, 0);
        Unpacked {
            codes: array![no_codes::<S>(); i => S::lookup(&IQ4_VALUES, block_nibbles::<S>(chunk, i, 18, 2))],
            scales: S::load_f16_strided::<18>(chunk),
            mins: S::Floats::zero(),
        }
    }

    #[inline(always)]
    fn unpack_ordered<S: Simd>(self, chunk: &[u8]) -> Unpacked<S> {
        let chunk: &[u8; 16 * 18] = at(chunk, 0);
        Unpacked {
            codes: array![no_codes::<S>(); i => S::lookup(&IQ4_VALUES, four_blocks_nibbles::<S>(chunk, i, 18, 2))],
            ..self.unpack(chunk)
        }
    }
}

/// A chunk is two blocks of eight groups.
#[derive(Clone, Copy)]
pub(super) struct Iq4Xs;

impl Iq4Xs {
    /// Scales of a chunk: four bits of each stand together, and two further ones.
    #[inline(always)]
    fn scales<S: Simd>(chunk: &[u8; 2 * 136]) -> S::Floats {
        let numbers: [[u8; 8]; 2] = array![[0; 8]; block => {
            let low = u32::from_le_bytes(*at(chunk, 136 * block + 4));
            let high = u16::from_le_bytes(*at(chunk, 136 * block + 2));
            (nibbles_as_bytes(low) | bit_pairs_as_bytes(high) << 4).to_le_bytes()
        }];
        let numbers = array![0; g => numbers[g / 8][g % 8].cast_signed() - 32];
        let factors = array![0; g => f16_bits(chunk, 136 * (g / 8))];
        S::Floats::load_f16_bits(&factors).mul(S::to_floats(S::widen(&numbers)))
    }
}

/// Eight nibbles, the lowest first, a byte each.
#[inline(always)]
fn nibbles_as_bytes(x: u32) -> u64 {
    let x = u64::from(x);
    let x = (x | x << 16) & 0x0000_ffff_0000_ffff;
    let x = (x | x << 8) & 0x00ff_00ff_00ff_00ff;
    (x | x << 4) & 0x0f0f_0f0f_0f0f_0f0f
}

/// Eight pairs of bits, the lowest first, a byte each.
#[inline(always)]
fn bit_pairs_as_bytes(x: u16) -> u64 {
    let x = u64::from(x);
    let x = (x | x << 24) & 0x0000_00ff_0000_00ff;
    let x = (x | x << 12) & 0x000f_000f_000f_000f;
    (x | x << 6) & 0x0303_0303_0303_0303
}

impl Format for Iq4Xs {
    const GROUP: usize = 32;
    const CODING: Coding = Coding::Signed;
    const MINS: bool = false;
    const ORDER: Order = Order::HalfGroups;

    #[inline(always)]
    fn quant(self) -> QuantType {
        QuantType::IQ4_XS
    }

    #[inline(always)]
    fn chunk_bytes(self) -> usize {
        2 * 136
    }

    #[inline(always)]
    fn unpack<S: Simd>(self, chunk: &[u8]) -> Unpacked<S> {
        let chunk: &[u8; 2 * 136] = at(chunk, 0);
        Unpacked {
            codes: array![no_codes::<S>(); i => {
                let start = 136 * (i / 4) + 8 + 32 * (i % 4);
                S::lookup(
                    &IQ4_VALUES,
                    S::nibbles(at(chunk, start), at(chunk, start + 16)),
                )
            }],
            scales: Iq4Xs::scales::<S>(chunk),
            mins: S::Floats::zero(),
        }
    }

    #[inline(always)]
    fn unpack_ordered<S: Simd>(self, chunk: &[u8]) -> Unpacked<S> {
        let chunk: &[u8; 2 * 136] = at(chunk, 0);
        let blocks: [_; 2] = array![[no_codes::<S>(); 2]; b => {
            let lines: [&[u8; 64]; 2] = [at(chunk, 136 * b + 8), at(chunk, 136 * b + 72)];
            S::unzip_quarters(S::load_bytes(lines[0]), S::load_bytes(lines[1]))
        }];
        Unpacked {
            codes: array![no_codes::<S>(); i => {
                let nibbles = S::field(blocks[i / 4][i % 4 / 2], 4 * (i % 2) as u32, 15);
                S::lookup(&IQ4_VALUES, nibbles)
            }],
            scales: Iq4Xs::scales::<S>(chunk),
            mins: S::Floats::zero(),
        }
    }
}

#[derive(Clone, Copy)]
pub(super) struct Mxfp4;

impl Format for Mxfp4 {
    const GROUP: usize = 32;
    const CODING: Coding = Coding::Signed;
    const MINS: bool = false;
    const ORDER: Order = Order::HalfGroups;

    #[inline(always)]
    fn quant(self) -> QuantType {
        QuantType::MXFP4
    }

    #[inline(always)]
    fn chunk_bytes(self) -> usize {
        16 * 17
    }

    #[inline(always)]
    fn unpack<S: Simd>(self, chunk: &[u8]) -> Unpacked<S> {
        let chunk: &[u8; 16 * 17] = at(chunk, 0);
        Unpacked {
            codes: array![no_codes::<S>(); i => S::lookup(&MXFP4_VALUES, block_nibbles::<S>(chunk, i, 17, 1))],
            scales: S::Floats::load(&array![0.0; g => mxfp4_scale(chunk[17 * g])]),
            mins: S::Floats::zero(),
        }
    }

    #[inline(always)]
    fn unpack_ordered<S: Simd>(self, chunk: &[u8]) -> Unpacked<S> {
        let chunk: &[u8; 16 * 17] = at(chunk, 0);
        Unpacked {
            codes: array![no_codes::<S>(); i => S::lookup(&MXFP4_VALUES, four_blocks_nibbles::<S>(chunk, i, 17, 1))],
            ..self.unpack(chunk)
        }
    }
}
