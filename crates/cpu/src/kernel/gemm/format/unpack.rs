//! What a quantized format must say: how sixteen of its groups become codes, scales and minimums.
//!
//! A weight is `scale * code - minimum` with exactly the roundings of `carat_gguf`'s definition. Kernels work on whole
//! chunks of sixteen groups; a row's last chunk is copied and filled with zero bytes where it is short.

use carat_gguf::QuantType;

use super::{
    iq4::{Iq4Nl, Iq4Xs, Mxfp4},
    k_quants::{Q2K, Q3K, Q4K, Q5K, Q6K},
    legacy::{Q4_0, Q4_1, Q5_0, Q5_1, Q8_0},
};
use crate::simd::{LANES, Simd, Tiles};

/// How the codes of a format lie in a byte.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Coding {
    /// Unsigned and below 64; the weight's code is this less the offset.
    Offset(i32),
    /// Signed bytes.
    Signed,
}

/// How the codes of a chunk follow each other.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Order {
    /// As the values in the row.
    Row,
    /// Of four groups of 32 the first halves, then the second halves: nibbles come apart so in whole vectors.
    Halves,
}

/// Blocks whose codes lie in runs that [`super::gemv_transposed`] can turn.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Runs {
    None,
    /// A scale and 32 signed bytes.
    Bytes,
    /// A scale, a minimum if the format has those, and 16 bytes: the low nibbles, then the high ones.
    Nibbles,
    /// Q4_K's own.
    Q4K,
    /// Q6_K's own.
    Q6K,
}

pub(crate) trait Format: Sized + 'static {
    const QUANT: QuantType;
    /// Values that share a scale: 32 or 16.
    const GROUP: usize;
    const CODING: Coding;
    const MINS: bool;

    const RUNS: Runs = Runs::None;

    /// Bytes of sixteen groups.
    const CHUNK_BYTES: usize;

    /// `chunk` has `CHUNK_BYTES` bytes.
    fn unpack<S: Simd>(chunk: &[u8]) -> Unpacked<S>;

    /// The order that costs least to unpack.
    const ORDER: Order = Order::Row;

    /// As [`Format::unpack`], with the codes in that order.
    #[inline(always)]
    fn unpack_ordered<S: Simd>(chunk: &[u8]) -> Unpacked<S> {
        Self::unpack(chunk)
    }

    /// The same with codes as signed bytes, where there are tiles.
    #[inline(always)]
    fn unpack_signed<T: Tiles>(chunk: &[u8]) -> Unpacked<T::Vectors> {
        let mut unpacked = Self::unpack::<T::Vectors>(chunk);
        for codes in &mut unpacked.codes {
            *codes = signed::<T::Vectors, Self>(*codes);
        }
        unpacked
    }
}

/// 64 zero codes.
#[inline(always)]
pub(super) fn no_codes<S: Simd>() -> S::Bytes {
    S::load_bytes(&[0; 64])
}

/// Sixteen groups, ready to multiply.
pub(crate) struct Unpacked<S: Simd> {
    /// In order, 64 codes each: all eight for groups of 32; for groups of 16 the first four, and nobody looks at the rest.
    pub(crate) codes: [S::Bytes; 8],
    pub(crate) scales: S::Floats,
    /// Zero in formats without.
    pub(crate) mins: S::Floats,
}

/// Largest `CHUNK_BYTES` of any format: Q8_0's.
const LONGEST_CHUNK: usize = 16 * 34;

/// The last chunk of a row, filled up with zero bytes.
pub(crate) struct Tail([u8; LONGEST_CHUNK]);

impl Tail {
    /// `None` where the row ends with a whole chunk.
    #[inline(always)]
    pub(crate) fn of<F: Format>(row: &[u8]) -> Option<Tail> {
        let rest = row.len() % F::CHUNK_BYTES;
        (rest > 0).then(|| {
            let mut tail = [0; LONGEST_CHUNK];
            tail[..rest].copy_from_slice(&row[row.len() - rest..]);
            Tail(tail)
        })
    }

    #[inline(always)]
    pub(crate) fn chunk<F: Format>(&self) -> &[u8] {
        &self.0[..F::CHUNK_BYTES]
    }
}

/// The chunk of a row that starts at `start`; a short last one is filled up in `tail`.
#[inline(always)]
pub(crate) fn chunk_at<'a, F: Format>(
    row: &'a [u8],
    start: usize,
    tail: &'a mut Option<Tail>,
) -> &'a [u8] {
    if let Some(chunk) = row.get(start..start + F::CHUNK_BYTES) {
        return chunk;
    }
    let short = Tail::of::<F>(row).expect("a row ends short of a whole chunk");
    tail.insert(short).chunk::<F>()
}

/// `N` bytes at a place that the caller's constants keep in bounds.
#[inline(always)]
pub(super) fn at<const N: usize>(bytes: &[u8], offset: usize) -> &[u8; N] {
    bytes[offset..offset + N]
        .try_into()
        .expect("a slice of N bytes")
}

/// The F16 bits at `offset`.
#[inline(always)]
pub(super) fn half_bits(bytes: &[u8], offset: usize) -> u16 {
    u16::from_le_bytes(*at(bytes, offset))
}

/// Does something with the format type of a quantized [`QuantType`].
pub(crate) trait WithFormat {
    type Output;
    fn run<F: Format>(self) -> Self::Output;
}

/// Calls `visitor` with the format `quant` names. Float types have none; asking for one is a broken invariant.
#[inline(always)]
pub(crate) fn with_format<V: WithFormat>(quant: QuantType, visitor: V) -> V::Output {
    match quant {
        QuantType::Q4_0 => visitor.run::<Q4_0>(),
        QuantType::Q4_1 => visitor.run::<Q4_1>(),
        QuantType::Q5_0 => visitor.run::<Q5_0>(),
        QuantType::Q5_1 => visitor.run::<Q5_1>(),
        QuantType::Q8_0 => visitor.run::<Q8_0>(),
        QuantType::Q2_K => visitor.run::<Q2K>(),
        QuantType::Q3_K => visitor.run::<Q3K>(),
        QuantType::Q4_K => visitor.run::<Q4K>(),
        QuantType::Q5_K => visitor.run::<Q5K>(),
        QuantType::Q6_K => visitor.run::<Q6K>(),
        QuantType::IQ4_NL => visitor.run::<Iq4Nl>(),
        QuantType::IQ4_XS => visitor.run::<Iq4Xs>(),
        QuantType::MXFP4 => visitor.run::<Mxfp4>(),
        QuantType::F32 | QuantType::F16 | QuantType::BF16 => {
            panic!("{quant} is multiplied as floats")
        }
    }
}

/// Turns whole rows into f32 times `scale`, with the roundings of [`QuantType::dequantize`].
#[inline(always)]
pub(crate) fn dequantize<S: Simd>(quant: QuantType, row: &[u8], scale: f32, out: &mut [f32]) {
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
    fn run<F: Format>(self) {
        let Dequantize(row, scale, out, _) = self;
        let tail = Tail::of::<F>(row);
        let whole = row.chunks_exact(F::CHUNK_BYTES);
        let chunks = whole.chain(tail.as_ref().map(Tail::chunk::<F>));
        for (chunk, values) in chunks.zip(out.chunks_mut(F::GROUP * LANES)) {
            let unpacked = F::unpack::<S>(chunk);
            let (mut scales, mut mins) = ([0.0; LANES], [0.0; LANES]);
            crate::simd::Floats::store(unpacked.scales, &mut scales);
            crate::simd::Floats::store(unpacked.mins, &mut mins);
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

/// The codes as signed bytes.
#[inline(always)]
pub(crate) fn signed<S: Simd, F: Format>(codes: S::Bytes) -> S::Bytes {
    match F::CODING {
        Coding::Offset(0) | Coding::Signed => codes,
        Coding::Offset(offset) => S::sub_bytes(codes, offset as u8),
    }
}
