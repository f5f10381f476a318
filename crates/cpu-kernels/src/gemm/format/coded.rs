//! Formats that `carat_gguf` defines by codes and scales. [`grids`] has most of them in vectors; else the definition itself unpacks a
//! chunk, and vectors are loaded from what it leaves. One type serves all, so that each product is compiled once for the lot.

use carat_gguf::{
    QuantType,
    quant::{CODES_GROUP, CodesFn},
};

use super::{
    grids,
    unpack::{Coding, Format, Unpacked, no_codes},
};
use crate::simd::{Floats, LANES, Simd};

/// Values of a chunk.
const VALUES: usize = LANES * CODES_GROUP;

#[derive(Clone, Copy)]
pub(super) struct Coded {
    pub(super) quant: QuantType,
    pub(super) codes: CodesFn,
}

impl Format for Coded {
    const GROUP: usize = CODES_GROUP;
    const CODING: Coding = Coding::Signed;
    const MINS: bool = false;

    #[inline(always)]
    fn quant(self) -> QuantType {
        self.quant
    }

    #[inline(always)]
    fn chunk_bytes(self) -> usize {
        VALUES / self.quant.block_len() * self.quant.block_bytes()
    }

    #[inline(always)]
    fn unpack<S: Simd>(self, chunk: &[u8]) -> Unpacked<S> {
        match grids::unpack(self.quant, chunk) {
            Some(unpacked) => unpacked,
            None => self.unpack_by_definition(chunk),
        }
    }
}

impl Coded {
    #[inline(always)]
    fn unpack_by_definition<S: Simd>(self, chunk: &[u8]) -> Unpacked<S> {
        let mut codes = [[0; 8]; VALUES / 8];
        let mut scales = [0.0; LANES];
        let length = self.quant.block_len();
        let blocks = chunk.chunks_exact(self.quant.block_bytes());
        let codes_of_blocks = codes.chunks_exact_mut(length / 8);
        let scales_of_blocks = scales.chunks_exact_mut(length / CODES_GROUP);
        for ((block, codes), scales) in blocks.zip(codes_of_blocks).zip(scales_of_blocks) {
            (self.codes)(block, codes, scales);
        }
        let mut unpacked = Unpacked {
            codes: [no_codes::<S>(); 8],
            scales: S::Floats::load(&scales),
            mins: S::Floats::zero(),
        };
        let (runs, _) = codes.as_flattened().as_chunks::<64>();
        for (codes, run) in unpacked.codes.iter_mut().zip(runs) {
            *codes = S::load_bytes(&run.map(i8::cast_unsigned));
        }
        unpacked
    }
}
