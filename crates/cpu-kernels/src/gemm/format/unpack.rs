//! The trait of quantized formats: sixteen of its groups become codes, scales and minimums.
//!
//! A weight is `scale * code - minimum` with exactly the roundings of `carat_gguf`'s definition. Kernels work on whole
//! chunks of sixteen groups; a row's last chunk is copied and filled with zero bytes where it is short.

use carat_gguf::QuantType;

use crate::simd::{Simd, Tiles};

/// Encoding of a code in its byte.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Coding {
    /// Unsigned and below 64; the weight's code is this less the offset.
    Offset(i32),
    /// Signed bytes.
    Signed,
}

/// Order of the codes of a chunk.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Order {
    /// As the values in the row.
    Row,
    /// Of eight groups of 32 the even ones' first halves and their second halves, then the odd ones' first halves and their second
    /// halves: nibbles come apart so in whole vectors, whether a byte's two are of one group or of neighbours.
    HalfGroups,
}

/// Layout of a block, where its codes lie in runs that [`crate::gemm::gemv_transposed`] can transpose.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum TransposeLayout {
    None,
    /// A scale and 32 int8.
    Int8,
    /// A scale, a minimum if the format has those, and 16 bytes: the low nibbles, then the high ones.
    Nibbles,
    /// Q4_K's own.
    Q4K,
    /// Q6_K's own.
    Q6K,
}

/// A format. Most are types without a value; those of codes and scales share one, whose value is their definition.
pub trait Format: Copy + 'static {
    /// Values that share a scale: 32 or 16.
    const GROUP: usize;
    const CODING: Coding;
    const MINS: bool;

    const TRANSPOSE: TransposeLayout = TransposeLayout::None;

    fn quant(self) -> QuantType;

    /// Bytes of sixteen groups.
    fn chunk_bytes(self) -> usize;

    /// Groups of `bytes` bytes, which are whole blocks.
    #[inline(always)]
    fn groups(self, bytes: usize) -> usize {
        bytes / self.quant().block_bytes() * (self.quant().block_len() / Self::GROUP)
    }

    /// `chunk` has `chunk_bytes` bytes.
    fn unpack<S: Simd>(self, chunk: &[u8]) -> Unpacked<S>;

    /// The order that costs least to unpack.
    const ORDER: Order = Order::Row;

    /// As [`Format::unpack`], with the codes in that order.
    #[inline(always)]
    fn unpack_ordered<S: Simd>(self, chunk: &[u8]) -> Unpacked<S> {
        self.unpack(chunk)
    }

    /// The same with codes as signed bytes, where there are tiles.
    #[inline(always)]
    fn unpack_signed<T: Tiles>(self, chunk: &[u8]) -> Unpacked<T::Vectors> {
        let mut unpacked = self.unpack::<T::Vectors>(chunk);
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
pub struct Unpacked<S: Simd> {
    /// In order, 64 codes each: all eight for groups of 32; for groups of 16 the first four, and nobody looks at the rest.
    pub codes: [S::Bytes; 8],
    pub scales: S::Floats,
    /// Zero in formats without.
    pub mins: S::Floats,
}

/// Largest `chunk_bytes` of any format: Q8_0's.
const LONGEST_CHUNK: usize = 16 * 34;

/// The last chunk of a row, filled up with zero bytes.
pub struct Tail([u8; LONGEST_CHUNK]);

impl Tail {
    /// `None` where the row ends with a whole chunk.
    #[inline(always)]
    pub fn of<F: Format>(format: F, row: &[u8]) -> Option<Tail> {
        let rest = row.len() % format.chunk_bytes();
        (rest > 0).then(|| {
            let mut tail = [0; LONGEST_CHUNK];
            tail[..rest].copy_from_slice(&row[row.len() - rest..]);
            Tail(tail)
        })
    }

    #[inline(always)]
    pub fn chunk<F: Format>(&self, format: F) -> &[u8] {
        &self.0[..format.chunk_bytes()]
    }
}

/// The chunk of a row that starts at `start`; a short last one is filled up in `tail`.
#[inline(always)]
pub fn chunk_at<'a, F: Format>(
    format: F,
    row: &'a [u8],
    start: usize,
    tail: &'a mut Option<Tail>,
) -> &'a [u8] {
    if let Some(chunk) = row.get(start..start + format.chunk_bytes()) {
        return chunk;
    }
    let short = Tail::of(format, row).expect("a row ends short of a whole chunk");
    tail.insert(short).chunk(format)
}

/// `N` bytes at an offset that the caller's constants keep in bounds.
#[inline(always)]
pub(super) fn at<const N: usize>(bytes: &[u8], offset: usize) -> &[u8; N] {
    bytes[offset..offset + N]
        .try_into()
        .expect("a slice of N bytes")
}

/// The F16 bits at `offset`.
#[inline(always)]
pub(super) fn f16_bits(bytes: &[u8], offset: usize) -> u16 {
    u16::from_le_bytes(*at(bytes, offset))
}

/// The codes as signed bytes.
#[inline(always)]
pub fn signed<S: Simd, F: Format>(codes: S::Bytes) -> S::Bytes {
    match F::CODING {
        Coding::Offset(0) | Coding::Signed => codes,
        Coding::Offset(offset) => S::sub_bytes(codes, offset as u8),
    }
}
