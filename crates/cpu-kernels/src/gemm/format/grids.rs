//! The IQ1, IQ2 and IQ3 families, TQ2_0, Q1_0 and NVFP4 by vectors: a chunk is 256 values, sixteen groups of 16. Values of a grid are fetched
//! eight or four at a time; signs go to 64 of them at once. No closures: they would be compiled apart, for any processor.

use carat_gguf::{
    QuantType,
    quant::{
        IQ1_GRID, IQ2_S_GRID, IQ2_XS_GRID, IQ2_XXS_GRID, IQ3_S_GRID, IQ3_XXS_GRID, MXFP4_VALUES,
        nvfp4_scale,
    },
};

use super::unpack::{Unpacked, at, f16_bits, no_codes};
use crate::simd::{Floats, LANES, Simd, array};

/// Bytes, each 1.
const ONES: u64 = 0x0101_0101_0101_0101;
/// Seven bits of each u16.
const SEVENS: u64 = 0x007f_007f_007f_007f;

/// A chunk of `quant`; `None` where its definition has to do.
#[inline(always)]
pub(super) fn unpack<S: Simd>(quant: QuantType, chunk: &[u8]) -> Option<Unpacked<S>> {
    Some(match quant {
        QuantType::IQ1_S => iq1_s::<S>(at(chunk, 0)),
        QuantType::IQ1_M => iq1_m::<S>(at(chunk, 0)),
        QuantType::IQ2_XXS => iq2_xxs::<S>(at(chunk, 0)),
        QuantType::IQ2_XS => iq2_xs::<S>(at(chunk, 0)),
        QuantType::IQ2_S => iq2_s::<S>(at(chunk, 0)),
        QuantType::IQ3_XXS => iq3_xxs::<S>(at(chunk, 0)),
        QuantType::IQ3_S => iq3_s::<S>(at(chunk, 0)),
        QuantType::TQ2_0 => tq2_0::<S>(at(chunk, 0)),
        QuantType::Q1_0 => q1_0::<S>(at(chunk, 0)),
        QuantType::NVFP4 => nvfp4::<S>(at(chunk, 0)),
        _ => return None,
    })
}

#[inline(always)]
fn unpacked<S: Simd>(codes: [S::Bytes; 4], scales: S::Floats) -> Unpacked<S> {
    let mut all = [no_codes::<S>(); 8];
    all[..4].copy_from_slice(&codes);
    Unpacked {
        codes: all,
        scales,
        mins: S::Floats::zero(),
    }
}

/// Eight times eight bytes.
#[inline(always)]
fn eights<S: Simd>(words: [u64; 8]) -> S::Bytes {
    let mut bytes = [0; 64];
    for (eight, word) in bytes.as_chunks_mut::<8>().0.iter_mut().zip(words) {
        *eight = word.to_le_bytes();
    }
    S::load_bytes(&bytes)
}

#[inline(always)]
fn joined(first: u32, second: u32) -> u64 {
    u64::from(first) | u64::from(second) << 32
}

#[inline(always)]
fn u32_at(bytes: &[u8], offset: usize) -> u32 {
    u32::from_le_bytes(*at(bytes, offset))
}

#[inline(always)]
fn u64_at(bytes: &[u8], offset: usize) -> u64 {
    u64::from_le_bytes(*at(bytes, offset))
}

/// The F16 with these bits, in every lane.
#[inline(always)]
fn f16<S: Simd>(bits: u16) -> S::Floats {
    S::Floats::load_f16_bits(&[bits; LANES])
}

/// Sixteen small numbers.
#[inline(always)]
fn numbers<S: Simd>(of: [u8; LANES]) -> S::Floats {
    S::to_floats(S::widen(&array![0; g => of[g].cast_signed()]))
}

/// Number `i` of those that lie in nibbles.
#[inline(always)]
fn nibble(bytes: &[u8], i: usize) -> u8 {
    bytes[i / 2] >> (4 * (i % 2)) & 15
}

/// Eight bytes of seven signs each, with the eighth that makes their number even.
#[inline(always)]
fn even_signs(seven: u64) -> u64 {
    let seven = seven & (127 * ONES);
    // The lowest bit of each byte becomes the parity of all; what comes from the next byte stays above it.
    let mut parity = seven ^ seven >> 4;
    parity ^= parity >> 2;
    parity ^= parity >> 1;
    seven | (parity & ONES) << 7
}

/// Four times seven bits, to bytes.
#[inline(always)]
fn sevens(bits: u32) -> u32 {
    bits & 0x7f | bits << 1 & 0x7f00 | bits << 2 & 0x7f_0000 | bits << 3 & 0x7f00_0000
}

/// The low bytes of four u16, whose others are 0.
#[inline(always)]
fn low_bytes(four: u64) -> u32 {
    let pairs = (four | four >> 8) & 0x0000_ffff_0000_ffff;
    (pairs | pairs >> 16) as u32
}

/// `d * (number + 1/2) * by`, as IQ2 and IQ3_XXS have their scales.
#[inline(always)]
fn half_scales<S: Simd>(d: u16, number: [u8; LANES], by: f32) -> S::Floats {
    let halves = numbers::<S>(number).add(S::Floats::splat(0.5));
    f16::<S>(d).mul(halves).mul(S::Floats::splat(by))
}

#[inline(always)]
fn iq2_xxs<S: Simd>(block: &[u8; 66]) -> Unpacked<S> {
    let codes = array![no_codes::<S>(); i => {
        let (first, second) = (2 + 16 * i, 10 + 16 * i);
        let magnitudes = array![0; k => {
            IQ2_XXS_GRID[usize::from(block[first + k / 4 * 8 + k % 4])]
        }];
        let signs = joined(sevens(u32_at(block, first + 4)), sevens(u32_at(block, second + 4)));
        S::negate(eights::<S>(magnitudes), even_signs(signs))
    }];
    let numbers = array![0; g => block[2 + g / 2 * 8 + 7] >> 4];
    unpacked::<S>(codes, half_scales::<S>(f16_bits(block, 0), numbers, 0.25))
}

#[inline(always)]
fn iq2_xs<S: Simd>(block: &[u8; 74]) -> Unpacked<S> {
    let codes = array![no_codes::<S>(); i => {
        let (first, second) = (u64_at(block, 2 + 16 * i), u64_at(block, 10 + 16 * i));
        let magnitudes = array![0; k => {
            let four = if k < 4 { first } else { second };
            IQ2_XS_GRID[(four >> (16 * (k % 4)) & 511) as usize]
        }];
        let signs = joined(low_bytes(first >> 9 & SEVENS), low_bytes(second >> 9 & SEVENS));
        S::negate(eights::<S>(magnitudes), even_signs(signs))
    }];
    let numbers = array![0; g => nibble(&block[66..], g)];
    unpacked::<S>(codes, half_scales::<S>(f16_bits(block, 0), numbers, 0.25))
}

#[inline(always)]
fn iq2_s<S: Simd>(block: &[u8; 82]) -> Unpacked<S> {
    let codes = array![no_codes::<S>(); i => {
        let magnitudes = array![0; k => {
            let high = block[66 + 2 * i + k / 4] >> (2 * (k % 4)) & 3;
            IQ2_S_GRID[usize::from(block[2 + 8 * i + k]) | usize::from(high) << 8]
        }];
        S::negate(eights::<S>(magnitudes), u64_at(block, 34 + 8 * i))
    }];
    let numbers = array![0; g => nibble(&block[74..], g)];
    unpacked::<S>(codes, half_scales::<S>(f16_bits(block, 0), numbers, 0.25))
}

#[inline(always)]
fn iq3_xxs<S: Simd>(block: &[u8; 98]) -> Unpacked<S> {
    let codes = array![no_codes::<S>(); i => {
        let magnitudes = array![0; k => {
            let at = 2 + 16 * i + 2 * k;
            joined(IQ3_XXS_GRID[usize::from(block[at])], IQ3_XXS_GRID[usize::from(block[at + 1])])
        }];
        let (first, second) = (u32_at(block, 66 + 8 * i), u32_at(block, 70 + 8 * i));
        let signs = even_signs(joined(sevens(first), sevens(second)));
        S::negate(eights::<S>(magnitudes), signs)
    }];
    let numbers = array![0; g => block[66 + g / 2 * 4 + 3] >> 4];
    unpacked::<S>(codes, half_scales::<S>(f16_bits(block, 0), numbers, 0.5))
}

/// Four values of IQ3_S; bit `k` of `ninths` belongs to their number.
#[inline(always)]
fn iq3_s_four(number: u8, ninths: u16, k: usize) -> u32 {
    IQ3_S_GRID[usize::from(number) | usize::from(ninths >> k & 1) << 8]
}

#[inline(always)]
fn iq3_s<S: Simd>(block: &[u8; 110]) -> Unpacked<S> {
    let codes = array![no_codes::<S>(); i => {
        let ninths = f16_bits(block, 66 + 2 * i);
        let magnitudes = array![0; k => {
            let at = 2 + 16 * i + 2 * k;
            let first = iq3_s_four(block[at], ninths, 2 * k);
            joined(first, iq3_s_four(block[at + 1], ninths, 2 * k + 1))
        }];
        S::negate(eights::<S>(magnitudes), u64_at(block, 74 + 8 * i))
    }];
    let odd = array![0; g => 2 * nibble(&block[106..], g / 2) + 1];
    let scales = f16::<S>(f16_bits(block, 0)).mul(numbers::<S>(odd));
    unpacked::<S>(codes, scales)
}

/// Eight times -1, 0 or 1 of the grid, and one more, or one less where `down` has bits.
#[inline(always)]
fn iq1<S: Simd>(numbers: [usize; 8], down: u64) -> S::Bytes {
    let grid = eights::<S>(array![0; k => IQ1_GRID[numbers[k]]]);
    S::add_bytes(grid, S::negate(S::load_bytes(&[1; 64]), down))
}

/// `d * (2 * number + 1) / 8`.
#[inline(always)]
fn iq1_scales<S: Simd>(d: u16, number: [u16; LANES]) -> S::Floats {
    let odd = numbers::<S>(array![0; g => 2 * (number[g] & 7) as u8 + 1]);
    f16::<S>(d).mul(odd).mul(S::Floats::splat(0.125))
}

#[inline(always)]
fn iq1_s<S: Simd>(block: &[u8; 50]) -> Unpacked<S> {
    let codes = array![no_codes::<S>(); i => {
        // Per 32 values: four times the upper three bits of a number, a scale, whether values are less by one.
        let (first, second) = (f16_bits(block, 34 + 4 * i), f16_bits(block, 36 + 4 * i));
        let numbers = array![0; k => {
            let upper = (if k < 4 { first } else { second }) >> (3 * (k % 4)) & 7;
            usize::from(block[2 + 8 * i + k]) | usize::from(upper) << 8
        }];
        let down = (u32::from(first >> 15), u32::from(second >> 15));
        iq1::<S>(numbers, joined(0u32.wrapping_sub(down.0), 0u32.wrapping_sub(down.1)))
    }];
    let numbers = array![0; g => f16_bits(block, 34 + g / 2 * 2) >> 12];
    unpacked::<S>(codes, iq1_scales::<S>(f16_bits(block, 0), numbers))
}

#[inline(always)]
fn iq1_m<S: Simd>(block: &[u8; 56]) -> Unpacked<S> {
    let shorts: [u16; 4] = array![0; k => f16_bits(block, 48 + 2 * k)];
    let d = shorts[0] >> 12 | shorts[1] >> 12 << 4 | shorts[2] >> 12 << 8 | shorts[3] >> 12 << 12;
    let codes = array![no_codes::<S>(); i => {
        // A nibble per number: its upper three bits, and whether values are less by one.
        let nibbles = u32_at(block, 32 + 4 * i);
        let numbers = array![0; k => {
            let upper = (nibbles >> (4 * k) & 7) as usize;
            usize::from(block[8 * i + k]) | upper << 8
        }];
        let down: [u8; 8] = array![0; k => 0u8.wrapping_sub((nibbles >> (4 * k + 3) & 1) as u8)];
        iq1::<S>(numbers, u64::from_le_bytes(down))
    }];
    let numbers = array![0; g => shorts[g / 4] >> (3 * (g % 4))];
    unpacked::<S>(codes, iq1_scales::<S>(d, numbers))
}

#[inline(always)]
fn tq2_0<S: Simd>(block: &[u8; 66]) -> Unpacked<S> {
    let codes = array![no_codes::<S>(); i => {
        let shift = 4 * (i % 2) as u32;
        S::sub_bytes(S::spread(at(block, 32 * (i / 2)), shift, shift + 2, 3), 1)
    }];
    unpacked::<S>(codes, f16::<S>(f16_bits(block, 64)))
}

#[inline(always)]
fn q1_0<S: Simd>(blocks: &[u8; 36]) -> Unpacked<S> {
    let codes = array![no_codes::<S>(); i => {
        let set = u64_at(blocks, 18 * (i / 2) + 2 + 8 * (i % 2));
        S::negate(S::load_bytes(&[1; 64]), !set)
    }];
    let d = array![0; g => f16_bits(blocks, 18 * (g / 8))];
    unpacked::<S>(codes, S::Floats::load_f16_bits(&d))
}

#[inline(always)]
fn nvfp4<S: Simd>(blocks: &[u8; 144]) -> Unpacked<S> {
    let codes = array![no_codes::<S>(); i => {
        let nibbles = array![0; k => {
            u64_at(blocks, 36 * i + 4 + 8 * (k / 2)) >> (4 * (k % 2)) & (15 * ONES)
        }];
        S::lookup(&MXFP4_VALUES, eights::<S>(nibbles))
    }];
    let scales = array![0.0; g => nvfp4_scale(blocks[36 * (g / 4) + g % 4])];
    unpacked::<S>(codes, S::Floats::load(&scales))
}
