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

impl Format for Iq4Xs {
    const GROUP: usize = 32;
    const CODING: Coding = Coding::Signed;
    const MINS: bool = false;

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
        let factors = array![0; g => f16_bits(chunk, 136 * (g / 8))];
        let numbers = array![0; g => {
            let (block, sub) = (136 * (g / 8), g % 8);
            let low = (chunk[block + 4 + sub / 2] >> (4 * (sub % 2))) & 15;
            let high = (chunk[block + 2 + sub / 4] >> (2 * (sub % 4))) & 3;
            i32::from(low | high << 4) - 32
        }];
        Unpacked {
            codes: array![no_codes::<S>(); i => {
                let start = 136 * (i / 4) + 8 + 32 * (i % 4);
                S::lookup(
                    &IQ4_VALUES,
                    S::nibbles(at(chunk, start), at(chunk, start + 16)),
                )
            }],
            scales: S::Floats::load_f16_bits(&factors).mul(S::to_floats(S::load_ints(&numbers))),
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
