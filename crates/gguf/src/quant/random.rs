//! Random blocks of any format, for synthetic models and for tests.
//!
//! Every byte is drawn at random and then each block's scale fields are overwritten, so that the values have a chosen
//! size. Codes and sub-scales take all their values; scales differ from block to block, half of them negative: a kernel
//! that mixes two blocks up is noticed. About as fast as memory, since a synthetic model has gigabytes of it.

use half::{bf16, f16};

use super::{
    IQ1_GRID, IQ2_S_GRID, IQ2_XS_GRID, IQ2_XXS_GRID, IQ3_S_GRID, IQ3_XXS_GRID, IQ4_VALUES,
    MXFP4_VALUES, QuantType, nvfp4_scale,
};

/// Steele, Lea and Flood's generator: a counter and a hash of it. Good enough to look random, and nothing more.
#[derive(Clone, Debug)]
pub struct SplitMix64(u64);

impl SplitMix64 {
    /// A generator that repeats itself for the same seed.
    pub fn new(seed: u64) -> SplitMix64 {
        SplitMix64(seed)
    }

    /// A generator for one of many independent parts of a job, whatever the order they are done in.
    #[must_use]
    pub fn part(seed: u64, part: u64) -> SplitMix64 {
        SplitMix64(SplitMix64(seed).next_u64() ^ SplitMix64(!part).next_u64())
    }

    /// The next 64 random bits.
    #[inline]
    pub fn next_u64(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// A number below `end`, which must not be 0. The bias is `end / 2^64`.
    pub fn below(&mut self, end: usize) -> usize {
        let scaled = (u128::from(self.next_u64()) * end as u128) >> 64;
        usize::try_from(scaled).expect("less than end")
    }

    /// Nearly normal with mean 0 and deviation 1: the sum of the four 16-bit parts of a draw.
    #[inline]
    pub fn gauss(&mut self) -> f32 {
        let bytes = self.next_u64().to_le_bytes();
        let parts = bytes.as_chunks().0.iter();
        let sum: u32 = parts.map(|part| u32::from(u16::from_le_bytes(*part))).sum();
        (sum as f32 - 2.0 * 65535.0) * (1.0 / 37837.23)
    }

    /// Fills `out` with random bytes.
    pub fn fill(&mut self, out: &mut [u8]) {
        let (words, tail) = out.as_chunks_mut::<8>();
        for word in words {
            *word = self.next_u64().to_le_bytes();
        }
        let last = self.next_u64().to_le_bytes();
        tail.copy_from_slice(&last[..tail.len()]);
    }
}

/// Fills `out` with whole blocks whose values are spread around 0 with deviation `std`; the same for the same seed.
///
/// Deviations below about 1e-4 make the F16 scales of the K formats imprecise, as in real files, but never infinite.
pub fn random_blocks(quant: QuantType, seed: u64, std: f32, out: &mut [u8]) {
    assert!(
        out.len().is_multiple_of(quant.block_bytes()),
        "part of a {quant} block"
    );
    let mut rng = SplitMix64::new(seed);
    match quant {
        QuantType::F32 => {
            for value in out.as_chunks_mut().0 {
                *value = (std * rng.gauss()).to_le_bytes();
            }
        }
        QuantType::F16 => {
            for value in out.as_chunks_mut().0 {
                *value = f16::from_f32(std * rng.gauss()).to_le_bytes();
            }
        }
        QuantType::BF16 => {
            for value in out.as_chunks_mut().0 {
                *value = bf16::from_f32(std * rng.gauss()).to_le_bytes();
            }
        }
        _ => {
            rng.fill(out);
            for field in fields(quant, std) {
                field.overwrite(quant.block_bytes(), out);
            }
            if quant == QuantType::TQ2_0 {
                // Of four codes three are in use: the fourth becomes a 0.
                for block in out.chunks_exact_mut(quant.block_bytes()) {
                    for byte in &mut block[..64] {
                        *byte &= !(*byte & 0x55) << 1 | 0x55;
                    }
                }
            }
        }
    }
}

/// Count of different scales among the blocks of a model.
const CHOICES: usize = 32;

/// A scale field and the values it may take. Which one a block gets is decided by a random byte that stays in place, so
/// the fields of a block agree.
struct Field {
    offset: usize,
    choices: Choices,
}

enum Choices {
    Half([[u8; 2]; CHOICES]),
    /// IQ1_M's: the upper nibbles of four u16.
    Nibbles([[u8; 2]; CHOICES]),
    Byte([u8; CHOICES]),
}

impl Field {
    /// Scales of root mean square `size` and of both signs.
    fn half(offset: usize, size: f32) -> Field {
        Field {
            offset,
            choices: Choices::Half(halves(size)),
        }
    }

    fn overwrite(&self, block_bytes: usize, out: &mut [u8]) {
        let (at, chooser) = (self.offset, block_bytes / 2);
        debug_assert!(
            chooser > at + 1 || chooser < at,
            "the chooser stays as drawn"
        );
        for block in out.chunks_exact_mut(block_bytes) {
            let choice = usize::from(block[chooser]) % CHOICES;
            match &self.choices {
                Choices::Half(halves) => block[at..at + 2].copy_from_slice(&halves[choice]),
                Choices::Nibbles(halves) => {
                    for (k, byte) in halves[choice].into_iter().enumerate() {
                        let (low, high) = (at + 4 * k + 1, at + 4 * k + 3);
                        block[low] = block[low] & 15 | byte << 4;
                        block[high] = block[high] & 15 | byte & 0xf0;
                    }
                }
                Choices::Byte(bytes) => block[at] = bytes[choice],
            }
        }
    }
}

/// Scales of root mean square `size` and of both signs.
fn halves(size: f32) -> [[u8; 2]; CHOICES] {
    let mut choices = [[0; 2]; CHOICES];
    for (k, choice) in (0u8..).zip(&mut choices) {
        let jitter = SPREAD[usize::from(k / 2)];
        let sign = if k % 2 == 0 { 1.0 } else { -1.0 };
        *choice = f16::from_f32(size * jitter * sign).to_le_bytes();
    }
    choices
}

/// Factors from two thirds to four thirds with a mean square of 1, near enough.
const SPREAD: [f32; CHOICES / 2] = {
    let mut factors = [0.0; CHOICES / 2];
    let mut k = 0;
    while k < factors.len() {
        factors[k] = 0.6458 + 0.0444 * k as f32;
        k += 1;
    }
    factors
};

/// Places of a format's scales in a block, and the scales that give values of deviation `std`.
///
/// The divisors are the deviations that codes and sub-scales, uniform over their ranges, give at a scale of 1;
/// a minimum is the mean of what it is subtracted from.
fn fields(quant: QuantType, std: f32) -> Vec<Field> {
    /// Root mean square of `-n/2 .. n/2`.
    fn centred(n: f32) -> f32 {
        ((n * n - 1.0) / 12.0 + 0.25).sqrt()
    }
    /// Mean and mean square of `0 .. n`.
    fn counted(n: f32) -> (f32, f32) {
        ((n - 1.0) / 2.0, (n - 1.0) * (2.0 * n - 1.0) / 6.0)
    }
    fn table(values: &[i8]) -> f32 {
        let squares: f32 = values.iter().map(|&v| f32::from(v).powi(2)).sum();
        (squares / values.len() as f32).sqrt()
    }
    /// Root mean square of the first `n` of `step / 2`, `step / 2 + step` and so on.
    fn stepped(n: u8, step: f32) -> f32 {
        let squares: f32 = (0..n).map(|k| (f32::from(k) + 0.5).powi(2)).sum();
        step * (squares / f32::from(n)).sqrt()
    }
    fn eights(grid: &[u64]) -> f32 {
        let codes = grid.iter().flat_map(|word| word.to_le_bytes());
        table(&codes.map(u8::cast_signed).collect::<Vec<_>>())
    }
    fn fours(grid: &[u32]) -> f32 {
        let codes = grid.iter().flat_map(|word| word.to_le_bytes());
        table(&codes.map(u8::cast_signed).collect::<Vec<_>>())
    }
    /// Codes of the IQ1 formats, one more or less.
    fn moved_ones() -> f32 {
        (eights(&IQ1_GRID).powi(2) + 1.0).sqrt()
    }
    // A block of value `d * code + m`.
    let with_minimum = |codes: f32| {
        let (mean, square) = counted(codes);
        let d = std / (square - mean * mean).sqrt();
        vec![Field::half(0, d), Field::half(2, -d * mean)]
    };
    // Sub-blocks of value `d * scale * code - dmin * min`, scale and min alike.
    let with_sub_minimums = |d_at: usize, scales: f32, codes: f32| {
        let ((scale, scale_square), (code, code_square)) = (counted(scales), counted(codes));
        let product = scale_square * code_square - (scale * code).powi(2);
        let minimum = (scale_square - scale * scale) * code * code;
        let d = std / (product + minimum).sqrt();
        vec![Field::half(d_at, d), Field::half(d_at + 2, d * code)]
    };
    match quant {
        QuantType::Q4_0 => vec![Field::half(0, std / centred(16.0))],
        QuantType::Q4_1 => with_minimum(16.0),
        QuantType::Q5_0 => vec![Field::half(0, std / centred(32.0))],
        QuantType::Q5_1 => with_minimum(32.0),
        QuantType::Q8_0 => vec![Field::half(0, std / centred(256.0))],
        QuantType::Q2_K => with_sub_minimums(80, 16.0, 4.0),
        QuantType::Q3_K => vec![Field::half(108, std / (centred(64.0) * centred(8.0)))],
        QuantType::Q4_K => with_sub_minimums(0, 64.0, 16.0),
        QuantType::Q5_K => with_sub_minimums(0, 64.0, 32.0),
        QuantType::Q6_K => vec![Field::half(208, std / (centred(256.0) * centred(64.0)))],
        QuantType::IQ4_NL => vec![Field::half(0, std / table(&IQ4_VALUES))],
        QuantType::IQ4_XS => vec![Field::half(0, std / (centred(64.0) * table(&IQ4_VALUES)))],
        QuantType::MXFP4 => vec![Field {
            offset: 0,
            choices: Choices::Byte(exponents(std / table(&MXFP4_VALUES))),
        }],
        QuantType::NVFP4 => (0..4)
            .map(|group| Field {
                offset: group,
                choices: Choices::Byte(e4m3_scales(std / table(&MXFP4_VALUES), group)),
            })
            .collect(),
        QuantType::IQ2_XXS => vec![Field::half(
            0,
            4.0 * std / (stepped(16, 1.0) * eights(&IQ2_XXS_GRID)),
        )],
        QuantType::IQ2_XS => vec![Field::half(
            0,
            4.0 * std / (stepped(16, 1.0) * eights(&IQ2_XS_GRID)),
        )],
        QuantType::IQ2_S => vec![Field::half(
            0,
            4.0 * std / (stepped(16, 1.0) * eights(&IQ2_S_GRID)),
        )],
        QuantType::IQ3_XXS => vec![Field::half(
            0,
            2.0 * std / (stepped(16, 1.0) * fours(&IQ3_XXS_GRID)),
        )],
        QuantType::IQ3_S => vec![Field::half(
            0,
            std / (stepped(16, 2.0) * fours(&IQ3_S_GRID)),
        )],
        QuantType::IQ1_S => vec![Field::half(0, 8.0 * std / (stepped(8, 2.0) * moved_ones()))],
        QuantType::IQ1_M => vec![Field {
            offset: 48,
            choices: Choices::Nibbles(halves(8.0 * std / (stepped(8, 2.0) * moved_ones()))),
        }],
        QuantType::TQ1_0 => vec![Field::half(52, std / table(&[-1, 0, 1]))],
        QuantType::TQ2_0 => vec![Field::half(64, std / table(&[-1, 0, 0, 1]))],
        QuantType::Q1_0 => vec![Field::half(0, std)],
        QuantType::F32 | QuantType::F16 | QuantType::BF16 => Vec::new(),
    }
}

/// Exponents of MXFP4 whose scales have the root mean square `scale`: a mix of the powers of two around it.
#[expect(
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    reason = "clamped to the range of the field"
)]
fn exponents(scale: f32) -> [u8; CHOICES] {
    let below = scale.log2().floor().clamp(-126.0, 120.0);
    let excess = (scale / below.exp2()).powi(2);
    let doubled = ((excess - 1.0) / 3.0 * CHOICES as f32).round() as usize;
    let e = (below + 128.0) as u8;
    std::array::from_fn(|k| if k < doubled { e + 1 } else { e })
}

/// Scales of an NVFP4 group with the root mean square `scale`: a mix of the two numbers next to it, another for every group.
fn e4m3_scales(scale: f32, group: usize) -> [u8; CHOICES] {
    let above = (1..=0x7e)
        .find(|&e| nvfp4_scale(e) >= scale)
        .unwrap_or(0x7e);
    let (low, high) = (nvfp4_scale(above - 1).powi(2), nvfp4_scale(above).powi(2));
    let share = ((scale * scale - low) / (high - low)).clamp(0.0, 1.0) * CHOICES as f32;
    std::array::from_fn(|k| {
        let place = (k + 5 * group) % CHOICES;
        if (place as f32) < share.round() {
            above
        } else {
            above - 1
        }
    })
}
