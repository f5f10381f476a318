//! Twin of `kernels/moe/router_scores.cu`: scores of all experts for the rows of a large batch, in parts.

use carat_model::weights::Weight;

use crate::kernel::{Addresses, Kernel, Operand, RowsAt, Specialization};
use crate::{
    device::{Address, Grid},
    kernel::params::{Params, params},
    kernel::weights::WeightOperand,
};

/// Rows of a block.
const ROWS: usize = 64;
const THREADS: usize = 256;
/// Inputs of a tile.
const INPUTS: usize = 32;
/// Slices of the inputs, each with blocks of its own.
pub(crate) const PARTS: usize = 8;

params! {
    struct RouterScoresParams {
        rows: RowsAt,
        x: Address,
        norm_weight: Address,
        w: Address,
        out: Address,
        squares: Address,
        columns: u32,
        experts: u32,
    }
}

/// Floats that the router's weights may be.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum RouterWeights {
    F32,
    BF16,
}

/// `x * norm_weight . w` in parts, `[rows, PARTS, experts]`, and what the norm's factor follows from.
#[derive(Debug)]
pub(crate) struct RouterScores {
    pub(crate) x: Operand,
    pub(crate) norm_weight: Option<Weight>,
    /// Row-major.
    pub(crate) w: WeightOperand,
    pub(crate) weights: RouterWeights,
    pub(crate) columns: usize,
    pub(crate) experts: usize,
    pub(crate) out: Operand,
    /// `[rows, PARTS]`
    pub(crate) squares: Operand,
}

impl RouterScores {
    /// Whether the kernel takes rows of this width.
    pub(crate) fn takes(columns: usize) -> bool {
        columns.is_multiple_of(INPUTS)
    }
}

pub(crate) fn specialization(weights: RouterWeights) -> Specialization {
    let weights = match weights {
        RouterWeights::F32 => "f32",
        RouterWeights::BF16 => "bf16",
    };
    Specialization {
        kernel: "router_scores",
        entries: &["router_scores"],
        constants: vec![
            ("WEIGHTS", weights.to_owned()),
            ("PARTS", PARTS.to_string()),
        ],
        params_bytes: RouterScoresParams::BYTES,
    }
}

impl Kernel for RouterScores {
    fn specialization(&self) -> Specialization {
        specialization(self.weights)
    }

    fn grid(&self, rows: usize) -> Grid {
        Grid::new((rows.div_ceil(ROWS), PARTS), THREADS)
    }

    fn params(&self, at: &Addresses, rows: RowsAt) -> Vec<u8> {
        RouterScoresParams {
            rows,
            x: at.operand(self.x),
            norm_weight: at.vector(self.norm_weight),
            w: at.matrix(&self.w).start,
            out: at.operand(self.out),
            squares: at.operand(self.squares),
            columns: self.columns as u32,
            experts: self.experts as u32,
        }
        .bytes()
    }

    fn weights(&self) -> Vec<WeightOperand> {
        let mut weights = WeightOperand::vectors([self.norm_weight]);
        weights.push(self.w.clone());
        weights
    }

    fn reads(&self) -> Vec<Operand> {
        vec![self.x]
    }

    fn writes(&self) -> Vec<Operand> {
        vec![self.out, self.squares]
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        config::Tier,
        testing::{Card, normals, relative_error},
    };

    const POISON: f32 = -1.5e30;
    const EPS: f32 = 1e-6;

    /// Against f64, with more rows than there are, experts that fill no tile and more than one.
    fn check(weights: RouterWeights, (columns, experts): (usize, usize), normed: bool) {
        let card = Card::open(Tier::Portable);
        let module = card.load(&specialization(weights));
        let (count, bucket) = (77, 96);
        let x = normals(1, bucket * columns);
        let norm = normals(2, columns);
        // What BF16 holds, so that either format has the same values.
        let w: Vec<f32> = normals(3, experts * columns)
            .into_iter()
            .map(|v| f32::from_bits(v.to_bits() & 0xffff_0000))
            .collect();
        let rows = card.upload(&[count as u32]);
        let (x_at, norm_at) = (card.upload(&x), card.upload(&norm));
        let w_at = match weights {
            RouterWeights::F32 => card.upload(&w),
            RouterWeights::BF16 => {
                let halves: Vec<u16> = w.iter().map(|v| (v.to_bits() >> 16) as u16).collect();
                card.upload(&halves)
            }
        };
        let out = card.upload(&vec![POISON; bucket * PARTS * experts]);
        let squares = card.upload(&vec![POISON; bucket * PARTS]);
        let params = RouterScoresParams {
            rows: RowsAt {
                count: rows.address(),
                index: Address::NULL,
            },
            x: x_at.address(),
            norm_weight: if normed {
                norm_at.address()
            } else {
                Address::NULL
            },
            w: w_at.address(),
            out: out.address(),
            squares: squares.address(),
            columns: columns as u32,
            experts: experts as u32,
        };
        let grid = Grid::new((bucket.div_ceil(ROWS), PARTS), THREADS);
        card.run(&module, grid, &params.bytes());
        let parts: Vec<f32> = card.download(&out, bucket * PARTS * experts);
        let squares: Vec<f32> = card.download(&squares, bucket * PARTS);
        let (parts, beyond) = parts.split_at(count * PARTS * experts);
        let (squares, squares_beyond) = squares.split_at(count * PARTS);
        let mut beyond = beyond.iter().chain(squares_beyond);
        assert!(beyond.all(|&v| v == POISON), "past the end");
        let mut found = Vec::new();
        for (parts, squares) in parts
            .chunks_exact(PARTS * experts)
            .zip(squares.chunks_exact(PARTS))
        {
            let scale = 1.0 / (squares.iter().sum::<f32>() / columns as f32 + EPS).sqrt();
            let sum = |e: usize| parts[e..].iter().step_by(experts).sum::<f32>();
            found.extend((0..experts).map(|e| scale * sum(e)));
        }
        let mut expected = Vec::new();
        for x in x.chunks_exact(columns).take(count) {
            let squares: f64 = x.iter().map(|&v| f64::from(v) * f64::from(v)).sum();
            let scale = 1.0 / (squares / columns as f64 + f64::from(EPS)).sqrt();
            for w in w.chunks_exact(columns) {
                let term = |k: usize| {
                    let by = if normed { f64::from(norm[k]) } else { 1.0 };
                    f64::from(x[k]) * by * f64::from(w[k])
                };
                let sum: f64 = (0..columns).map(term).sum();
                expected.push((scale * sum) as f32);
            }
        }
        let error = relative_error(&found, &expected);
        assert!(error < 1e-6, "{weights:?} {columns} {experts}: {error}");
    }

    #[test]
    #[ignore = "needs a card"]
    fn router_scores_are_those_of_f64() {
        check(RouterWeights::F32, (96, 128), true);
        check(RouterWeights::BF16, (96, 200), true);
        check(RouterWeights::F32, (320, 7), false);
    }
}
