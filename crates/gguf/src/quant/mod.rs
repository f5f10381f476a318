//! The block formats: how many values a block holds, in how many bytes, and what they are.
//!
//! Each format's file has one function that turns a block into f32; everything faster is tested against it.

mod float;
mod grid;
mod iq1;
mod iq2;
mod iq3;
mod iq4;
mod legacy;
mod mxfp4;
mod nvfp4;
mod q2_k;
mod q3_k;
mod q4_k;
mod q5_k;
mod q6_k;
mod random;
mod ternary;

use std::fmt;

pub use grid::{IQ1_GRID, IQ2_S_GRID, IQ2_XS_GRID, IQ2_XXS_GRID, IQ3_S_GRID, IQ3_XXS_GRID};
pub use iq4::IQ4_VALUES;
pub use mxfp4::{MXFP4_VALUES, mxfp4_scale};
pub use nvfp4::nvfp4_scale;
pub use q3_k::q3_k_scales;
pub use q4_k::k_scale_min;
pub use random::{SplitMix64, random_blocks};

/// A tensor's storage format, under ggml's names.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[expect(non_camel_case_types, reason = "the names people know: Q4_K, IQ4_XS")]
pub enum QuantType {
    /// IEEE single precision.
    F32,
    /// IEEE half precision.
    F16,
    /// The upper half of an F32.
    BF16,
    /// 4-bit codes and a scale per 32 values.
    Q4_0,
    /// 4-bit codes, a scale and a minimum per 32 values.
    Q4_1,
    /// 5-bit codes and a scale per 32 values.
    Q5_0,
    /// 5-bit codes, a scale and a minimum per 32 values.
    Q5_1,
    /// 8-bit codes and a scale per 32 values.
    Q8_0,
    /// 2-bit codes, a 4-bit scale and minimum per 16 values, in blocks of 256.
    Q2_K,
    /// 3-bit codes and a 6-bit scale per 16 values, in blocks of 256.
    Q3_K,
    /// 4-bit codes, a 6-bit scale and minimum per 32 values, in blocks of 256.
    Q4_K,
    /// 5-bit codes, a 6-bit scale and minimum per 32 values, in blocks of 256.
    Q5_K,
    /// 6-bit codes and an 8-bit scale per 16 values, in blocks of 256.
    Q6_K,
    /// 4-bit codes of unevenly spaced values and a scale per 32.
    IQ4_NL,
    /// 4-bit codes of unevenly spaced values and a 6-bit scale per 32, in blocks of 256.
    IQ4_XS,
    /// 4-bit floats and a power of two as scale per 32 values.
    MXFP4,
    /// 4-bit floats and an 8-bit float as scale per 16 values, in blocks of 64.
    NVFP4,
    /// Eight values by a number of 8 bits, seven signs, a 4-bit scale per 32, in blocks of 256.
    IQ2_XXS,
    /// Eight values by a number of 9 bits, seven signs, a 4-bit scale per 16, in blocks of 256.
    IQ2_XS,
    /// Eight values by a number of 10 bits, eight signs, a 4-bit scale per 16, in blocks of 256.
    IQ2_S,
    /// Four values by a number of 8 bits, seven signs per eight, a 4-bit scale per 32, in blocks of 256.
    IQ3_XXS,
    /// Four values by a number of 9 bits, a sign each, a 4-bit scale per 32, in blocks of 256.
    IQ3_S,
    /// Eight values by a number of 11 bits, a 3-bit scale and a shift per 32, in blocks of 256.
    IQ1_S,
    /// Eight values by a number of 11 bits and a shift, a 3-bit scale per 16, in blocks of 256.
    IQ1_M,
    /// Values of -1, 0 or 1, five in a byte, and a scale per 256.
    TQ1_0,
    /// Values of -1, 0 or 1 in two bits each, and a scale per 256.
    TQ2_0,
    /// Values of -1 or 1 in a bit each, and a scale per 128.
    Q1_0,
}

/// A format's row in the table.
struct Facts {
    quant: QuantType,
    name: &'static str,
    id: u32,
    block_len: usize,
    block_bytes: usize,
    decode: Decode,
}

/// The function that says what a block's bytes stand for.
enum Decode {
    /// `block_bytes` in, `block_len` values out.
    Values(fn(&[u8], &mut [f32])),
    /// Codes and scales out, whose products are the values: see [`CodesFn`].
    Codes(CodesFn),
}

/// Turns a block into signed codes, eight at a time, and a scale per [`CODES_GROUP`] of them. A value is its scale times its
/// code, rounded once.
pub type CodesFn = fn(block: &[u8], codes: &mut [[i8; 8]], scales: &mut [f32]);

/// Values that share a scale of a [`CodesFn`].
pub const CODES_GROUP: usize = 16;

const fn facts(
    quant: QuantType,
    name: &'static str,
    id: u32,
    (block_len, block_bytes): (usize, usize),
    dequantize: fn(&[u8], &mut [f32]),
) -> Facts {
    Facts {
        quant,
        name,
        id,
        block_len,
        block_bytes,
        decode: Decode::Values(dequantize),
    }
}

/// A format that is defined by codes and scales.
const fn coded(
    quant: QuantType,
    name: &'static str,
    id: u32,
    (block_len, block_bytes): (usize, usize),
    codes: CodesFn,
) -> Facts {
    Facts {
        quant,
        name,
        id,
        block_len,
        block_bytes,
        decode: Decode::Codes(codes),
    }
}

/// One row per format, in the order of the enum.
static TABLE: [Facts; 27] = [
    facts(QuantType::F32, "F32", 0, (1, 4), float::f32_block),
    facts(QuantType::F16, "F16", 1, (1, 2), float::f16_block),
    facts(QuantType::BF16, "BF16", 30, (1, 2), float::bf16_block),
    facts(QuantType::Q4_0, "Q4_0", 2, (32, 18), legacy::q4_0_block),
    facts(QuantType::Q4_1, "Q4_1", 3, (32, 20), legacy::q4_1_block),
    facts(QuantType::Q5_0, "Q5_0", 6, (32, 22), legacy::q5_0_block),
    facts(QuantType::Q5_1, "Q5_1", 7, (32, 24), legacy::q5_1_block),
    facts(QuantType::Q8_0, "Q8_0", 8, (32, 34), legacy::q8_0_block),
    facts(QuantType::Q2_K, "Q2_K", 10, (256, 84), q2_k::block),
    facts(QuantType::Q3_K, "Q3_K", 11, (256, 110), q3_k::block),
    facts(QuantType::Q4_K, "Q4_K", 12, (256, 144), q4_k::block),
    facts(QuantType::Q5_K, "Q5_K", 13, (256, 176), q5_k::block),
    facts(QuantType::Q6_K, "Q6_K", 14, (256, 210), q6_k::block),
    facts(QuantType::IQ4_NL, "IQ4_NL", 20, (32, 18), iq4::nl_block),
    facts(QuantType::IQ4_XS, "IQ4_XS", 23, (256, 136), iq4::xs_block),
    facts(QuantType::MXFP4, "MXFP4", 39, (32, 17), mxfp4::block),
    coded(QuantType::NVFP4, "NVFP4", 40, (64, 36), nvfp4::codes),
    coded(QuantType::IQ2_XXS, "IQ2_XXS", 16, (256, 66), iq2::xxs_codes),
    coded(QuantType::IQ2_XS, "IQ2_XS", 17, (256, 74), iq2::xs_codes),
    coded(QuantType::IQ2_S, "IQ2_S", 22, (256, 82), iq2::s_codes),
    coded(QuantType::IQ3_XXS, "IQ3_XXS", 18, (256, 98), iq3::xxs_codes),
    coded(QuantType::IQ3_S, "IQ3_S", 21, (256, 110), iq3::s_codes),
    coded(QuantType::IQ1_S, "IQ1_S", 19, (256, 50), iq1::s_codes),
    coded(QuantType::IQ1_M, "IQ1_M", 29, (256, 56), iq1::m_codes),
    coded(
        QuantType::TQ1_0,
        "TQ1_0",
        34,
        (256, 54),
        ternary::tq1_0_codes,
    ),
    coded(
        QuantType::TQ2_0,
        "TQ2_0",
        35,
        (256, 66),
        ternary::tq2_0_codes,
    ),
    coded(QuantType::Q1_0, "Q1_0", 41, (128, 18), ternary::q1_0_codes),
];

impl QuantType {
    fn facts(self) -> &'static Facts {
        let facts = &TABLE[self as usize];
        debug_assert_eq!(facts.quant, self, "TABLE follows the enum's order");
        facts
    }

    /// Every format that can be read, in the order of the enum.
    pub fn all() -> impl Iterator<Item = QuantType> {
        TABLE.iter().map(|f| f.quant)
    }

    pub(crate) fn names() -> String {
        let names: Vec<&str> = TABLE.iter().map(|f| f.name).collect();
        names.join(" ")
    }

    /// The format that ggml gives this number; `None` where Carat does not read it.
    pub fn from_id(id: u32) -> Option<QuantType> {
        TABLE.iter().find(|f| f.id == id).map(|f| f.quant)
    }

    /// ggml's number of the format, as files have it.
    pub fn id(self) -> u32 {
        self.facts().id
    }

    /// ggml's name of the format: `Q4_K`.
    pub fn name(self) -> &'static str {
        self.facts().name
    }

    /// Values per block.
    pub fn block_len(self) -> usize {
        self.facts().block_len
    }

    /// Bytes per block.
    pub fn block_bytes(self) -> usize {
        self.facts().block_bytes
    }

    /// Bytes of a row of `columns` values, which must fill whole blocks.
    pub fn row_bytes(self, columns: usize) -> usize {
        debug_assert!(columns.is_multiple_of(self.block_len()));
        columns / self.block_len() * self.block_bytes()
    }

    /// True for F32, F16 and BF16, whose values need no block arithmetic.
    pub fn is_float(self) -> bool {
        matches!(self, QuantType::F32 | QuantType::F16 | QuantType::BF16)
    }

    /// Turns whole blocks into f32. `bytes` must hold exactly the blocks that fill `out`.
    pub fn dequantize(self, bytes: &[u8], out: &mut [f32]) {
        let f = self.facts();
        let blocks = bytes.chunks_exact(f.block_bytes);
        assert!(blocks.remainder().is_empty(), "part of a {} block", f.name);
        let values = out.chunks_exact_mut(f.block_len);
        assert_eq!(blocks.len(), values.len(), "blocks of {}", f.name);
        for (block, values) in blocks.zip(values) {
            match f.decode {
                Decode::Values(dequantize) => dequantize(block, values),
                Decode::Codes(codes) => multiply_out(codes, block, values),
            }
        }
    }

    /// The function that defines the format, where it is one of codes and scales.
    pub fn codes(self) -> Option<CodesFn> {
        match self.facts().decode {
            Decode::Values(_) => None,
            Decode::Codes(codes) => Some(codes),
        }
    }
}

/// The values of a block of codes and scales.
fn multiply_out(codes_of: CodesFn, block: &[u8], out: &mut [f32]) {
    const LONGEST: usize = 256;
    let (mut codes, mut scales) = ([[0; 8]; LONGEST / 8], [0.0; LONGEST / CODES_GROUP]);
    let (codes, scales) = (
        &mut codes[..out.len() / 8],
        &mut scales[..out.len() / CODES_GROUP],
    );
    codes_of(block, codes, scales);
    for (i, (y, code)) in out.iter_mut().zip(codes.as_flattened()).enumerate() {
        *y = scales[i / CODES_GROUP] * f32::from(*code);
    }
}

impl fmt::Display for QuantType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

/// Names of formats that files may hold and Carat does not read.
pub(crate) fn foreign_name(id: u32) -> Option<&'static str> {
    Some(match id {
        9 => "Q8_1",
        15 => "Q8_K",
        24 => "I8",
        25 => "I16",
        26 => "I32",
        27 => "I64",
        28 => "F64",
        _ => return None,
    })
}

/// The F16 at `offset`, widened exactly.
fn half_at(block: &[u8], offset: usize) -> f32 {
    half::f16::from_le_bytes([block[offset], block[offset + 1]]).to_f32()
}

fn u16_at(block: &[u8], offset: usize) -> u16 {
    u16::from_le_bytes([block[offset], block[offset + 1]])
}

fn u32_at(block: &[u8], offset: usize) -> u32 {
    u32::from(u16_at(block, offset)) | u32::from(u16_at(block, offset + 2)) << 16
}

#[cfg(test)]
mod tests;
