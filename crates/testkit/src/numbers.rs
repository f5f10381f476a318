//! Random inputs of kernels, and error measures.

use carat_gguf::{QuantType, quant::random_blocks};
use half::f16;

/// A small generator of well-mixed numbers; tests name their seed.
pub struct Random(u64);

impl Random {
    pub fn new(seed: u64) -> Random {
        Random(seed)
    }

    pub fn bits(&mut self) -> u64 {
        self.0 += 1;
        carat_model::sampling::random(self.0, 0, 0)
    }

    pub fn below(&mut self, n: usize) -> usize {
        (self.bits() % n as u64) as usize
    }

    /// Between -1 and 1.
    pub fn uniform(&mut self) -> f32 {
        (self.bits() >> 40) as f32 / (1 << 23) as f32 - 1.0
    }

    /// Roughly normal, with variance 1.
    pub fn normal(&mut self) -> f32 {
        (0..12).map(|_| self.uniform()).sum::<f32>() / 2.0
    }

    pub fn normals(&mut self, n: usize) -> Vec<f32> {
        (0..n).map(|_| self.normal()).collect()
    }

    /// Rows of a format: random codes under scales of ordinary size.
    pub fn weights(&mut self, quant: QuantType, rows: usize, columns: usize) -> Vec<u8> {
        let mut bytes: Vec<u8> = (0..rows * quant.row_bytes(columns))
            .map(|_| self.bits() as u8)
            .collect();
        if quant.codes().is_some() {
            random_blocks(quant, self.bits(), 0.3, &mut bytes);
            return bytes;
        }
        let f16_offsets: &[usize] = match quant {
            QuantType::Q4_1 | QuantType::Q5_1 | QuantType::Q4_K | QuantType::Q5_K => &[0, 2],
            QuantType::Q2_K => &[80, 82],
            QuantType::Q3_K => &[108],
            QuantType::Q6_K => &[208],
            _ => &[0],
        };
        for block in bytes.chunks_exact_mut(quant.block_bytes()) {
            match quant {
                QuantType::F32 => block.copy_from_slice(&self.normal().to_le_bytes()),
                QuantType::BF16 => {
                    block.copy_from_slice(&half::bf16::from_f32(self.normal()).to_le_bytes());
                }
                QuantType::MXFP4 => block[0] = 118 + self.below(6) as u8,
                _ => {
                    for &offset in f16_offsets {
                        let scale = f16::from_f32(self.uniform() * 0.1);
                        block[offset..offset + 2].copy_from_slice(&scale.to_le_bytes());
                    }
                }
            }
        }
        bytes
    }
}

/// Relative L2 distance from what was expected.
pub fn relative_error(found: &[f32], expected: &[f64]) -> f64 {
    assert_eq!(found.len(), expected.len());
    let (mut error, mut norm) = (0.0, 0.0);
    for (f, e) in found.iter().zip(expected) {
        error += (f64::from(*f) - e).powi(2);
        norm += e * e;
    }
    // A NaN must fail, so it may not vanish in a comparison.
    assert!(!error.is_nan(), "a result is not a number");
    (error / norm).sqrt()
}

pub fn bits(x: &[f32]) -> Vec<u32> {
    x.iter().map(|x| x.to_bits()).collect()
}
