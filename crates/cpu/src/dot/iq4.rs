//! IQ4_NL, IQ4_XS and MXFP4: nibbles that index a table of sixteen signed values.

use std::array::from_fn;

use carat_gguf::{
    QuantType,
    quant::{IQ4_VALUES, MXFP4_VALUES, mxfp4_scale},
};
use half::f16;

use super::{
    format::{Coding, Format, Unpacked, at, half_bits, halves},
    legacy::block_nibbles,
};
use crate::simd::{Floats, Simd};

pub(crate) struct Iq4Nl;

impl Format for Iq4Nl {
    const QUANT: QuantType = QuantType::IQ4_NL;
    const GROUP: usize = 32;
    const CODING: Coding = Coding::Signed;
    const MINS: bool = false;
    const CHUNK_BYTES: usize = 16 * 18;

    #[inline(always)]
    fn unpack<S: Simd>(chunk: &[u8]) -> Unpacked<S> {
        let chunk: &[u8; 16 * 18] = at(chunk, 0);
        Unpacked {
            codes: from_fn(|i| S::lookup(&IQ4_VALUES, block_nibbles::<S>(chunk, i, 18, 2))),
            scales: S::Floats::load_half(&halves(chunk, 0, 18)),
            mins: S::Floats::zero(),
        }
    }
}

/// A chunk is two blocks of eight groups.
pub(crate) struct Iq4Xs;

impl Format for Iq4Xs {
    const QUANT: QuantType = QuantType::IQ4_XS;
    const GROUP: usize = 32;
    const CODING: Coding = Coding::Signed;
    const MINS: bool = false;
    const CHUNK_BYTES: usize = 2 * 136;

    #[inline(always)]
    fn unpack<S: Simd>(chunk: &[u8]) -> Unpacked<S> {
        let chunk: &[u8; 2 * 136] = at(chunk, 0);
        let scales = from_fn(|g| {
            let block: &[u8; 136] = at(chunk, 136 * (g / 8));
            let sub = g % 8;
            let low = (block[4 + sub / 2] >> (4 * (sub % 2))) & 15;
            let high = (block[2 + sub / 4] >> (2 * (sub % 4))) & 3;
            let d = f16::from_bits(half_bits(block, 0)).to_f32();
            d * (f32::from(low | high << 4) - 32.0)
        });
        Unpacked {
            codes: from_fn(|i| {
                let start = 136 * (i / 4) + 8 + 32 * (i % 4);
                S::lookup(
                    &IQ4_VALUES,
                    S::nibbles(at(chunk, start), at(chunk, start + 16)),
                )
            }),
            scales: S::Floats::load(&scales),
            mins: S::Floats::zero(),
        }
    }
}

pub(crate) struct Mxfp4;

impl Format for Mxfp4 {
    const QUANT: QuantType = QuantType::MXFP4;
    const GROUP: usize = 32;
    const CODING: Coding = Coding::Signed;
    const MINS: bool = false;
    const CHUNK_BYTES: usize = 16 * 17;

    #[inline(always)]
    fn unpack<S: Simd>(chunk: &[u8]) -> Unpacked<S> {
        let chunk: &[u8; 16 * 17] = at(chunk, 0);
        Unpacked {
            codes: from_fn(|i| S::lookup(&MXFP4_VALUES, block_nibbles::<S>(chunk, i, 17, 1))),
            scales: S::Floats::load(&from_fn(|g| mxfp4_scale(chunk[17 * g]))),
            mins: S::Floats::zero(),
        }
    }
}
