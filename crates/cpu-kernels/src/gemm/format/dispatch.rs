//! From a [`QuantType`] to the format that unpacks it.

use carat_gguf::QuantType;

use super::{
    coded::Coded,
    iq4::{Iq4Nl, Iq4Xs, Mxfp4},
    k_quants::{Q2K, Q3K, Q4K, Q5K, Q6K},
    legacy::{Q4_0, Q4_1, Q5_0, Q5_1, Q8_0},
    unpack::{Format, Tail, signed},
};
use crate::simd::{Floats, LANES, Simd};

/// Does something with the format type of a quantized [`QuantType`].
pub trait WithFormat {
    type Output;
    fn run<F: Format>(self, format: F) -> Self::Output;
}

/// Calls `visitor` with the format `quant` names. Float types have none; asking for one is a broken invariant.
#[inline(always)]
pub fn with_format<V: WithFormat>(quant: QuantType, visitor: V) -> V::Output {
    if let Some(codes) = quant.codes() {
        return visitor.run(Coded { quant, codes });
    }
    match quant {
        QuantType::Q4_0 => visitor.run(Q4_0),
        QuantType::Q4_1 => visitor.run(Q4_1),
        QuantType::Q5_0 => visitor.run(Q5_0),
        QuantType::Q5_1 => visitor.run(Q5_1),
        QuantType::Q8_0 => visitor.run(Q8_0),
        QuantType::Q2_K => visitor.run(Q2K),
        QuantType::Q3_K => visitor.run(Q3K),
        QuantType::Q4_K => visitor.run(Q4K),
        QuantType::Q5_K => visitor.run(Q5K),
        QuantType::Q6_K => visitor.run(Q6K),
        QuantType::IQ4_NL => visitor.run(Iq4Nl),
        QuantType::IQ4_XS => visitor.run(Iq4Xs),
        QuantType::MXFP4 => visitor.run(Mxfp4),
        _ => panic!("{quant} is multiplied as floats"),
    }
}

/// Dequantizes whole rows times `scale`, with the roundings of [`QuantType::dequantize`].
#[inline(always)]
pub fn dequantize<S: Simd>(quant: QuantType, row: &[u8], scale: f32, out: &mut [f32]) {
    if quant.is_float() {
        quant.dequantize(row, out);
        for y in out {
            *y *= scale;
        }
    } else {
        with_format(
            quant,
            Dequantize::<S>(row, scale, out, std::marker::PhantomData),
        );
    }
}

struct Dequantize<'a, S>(&'a [u8], f32, &'a mut [f32], std::marker::PhantomData<S>);

impl<S: Simd> WithFormat for Dequantize<'_, S> {
    type Output = ();

    #[inline(always)]
    fn run<F: Format>(self, format: F) {
        let Dequantize(row, scale, out, _) = self;
        let tail = Tail::of(format, row);
        let whole = row.chunks_exact(format.chunk_bytes());
        let chunks = whole.chain(tail.as_ref().map(|tail| tail.chunk(format)));
        for (chunk, values) in chunks.zip(out.chunks_mut(F::GROUP * LANES)) {
            let unpacked = format.unpack::<S>(chunk);
            let (mut scales, mut mins) = ([0.0; LANES], [0.0; LANES]);
            unpacked.scales.store(&mut scales);
            unpacked.mins.store(&mut mins);
            let mut codes = [0; 64];
            for (piece, values) in values.chunks_mut(64).enumerate() {
                S::store_bytes(signed::<S, F>(unpacked.codes[piece]), &mut codes);
                for (i, (y, code)) in values.iter_mut().zip(codes).enumerate() {
                    let g = (64 * piece + i) / F::GROUP;
                    let value = scales[g] * f32::from(code.cast_signed());
                    *y = scale * if F::MINS { value - mins[g] } else { value };
                }
            }
        }
    }
}
