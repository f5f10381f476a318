//! RoPE angles: sines and cosines of every row's position, made once per batch and used by all layers.

use carat_model::{backend::RowRef, plan::Rope};

use super::workers::Workers;

/// The table of one batch: cosines then sines of each row, `[rows, 2, head_dim / 2]`.
pub(crate) struct Angles {
    table: Vec<f32>,
    half: usize,
}

impl Angles {
    pub(crate) fn new(rope: &Rope, rows: usize) -> Angles {
        let half = rope.frequencies.len();
        Angles {
            table: vec![0.0; rows * 2 * half],
            half,
        }
    }

    /// Angles in f32, as the model defines them; their sines in f64, because positions go far beyond one rotation.
    pub(crate) fn fill(&mut self, workers: &Workers, rope: &Rope, rows: &[RowRef]) {
        let half = self.half;
        let table = &mut self.table[..rows.len() * 2 * half];
        workers.each_row(table, 2 * half, |row, angles| {
            let position = (rows[row].position + rope.shift) as f32;
            let (cos, sin) = angles.split_at_mut(half);
            for ((cos, sin), frequency) in cos.iter_mut().zip(sin).zip(&rope.frequencies) {
                let angle = position * frequency;
                // Most pairs of a partly rotated head do not rotate at all.
                let sin_cos = if angle.abs() < 1e-20 {
                    (0.0, 1.0)
                } else {
                    f64::from(angle).sin_cos()
                };
                (*sin, *cos) = (sin_cos.0 as f32, sin_cos.1 as f32);
            }
        });
    }

    /// Cosines and sines of a row of the batch.
    pub(crate) fn row(&self, row: usize) -> (&[f32], &[f32]) {
        self.table[row * 2 * self.half..][..2 * self.half].split_at(self.half)
    }
}
