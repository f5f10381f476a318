//! Repacked weights, kept as far as a budget goes: in the BF16 tiles that prompts otherwise make of them batch after batch.

use std::collections::HashMap;

use carat_model::weights::{Weight, Weights};

use carat_cpu_kernels::{gemm::amx_bf16, simd::Tile};

pub(crate) struct Repacked {
    bytes_left: u64,
    matrices: HashMap<Weight, Vec<Tile>>,
}

impl Repacked {
    pub(crate) fn new(budget_bytes: u64) -> Repacked {
        Repacked {
            bytes_left: budget_bytes,
            matrices: HashMap::new(),
        }
    }

    /// Keeps the tiles of a matrix from now on, which `fill` makes, unless they would go over the budget.
    pub(crate) fn keep(&mut self, weight: Weight, count: usize, fill: impl FnOnce(&mut [Tile])) {
        if self.matrices.contains_key(&weight) {
            return;
        }
        let bytes = (count * size_of::<Tile>()) as u64;
        let Some(left) = self.bytes_left.checked_sub(bytes) else {
            return;
        };
        self.bytes_left = left;
        let mut tiles = vec![Tile::ZERO; count];
        fill(&mut tiles);
        self.matrices.insert(weight, tiles);
    }

    /// The tiles of a matrix that are kept.
    pub(crate) fn tiles(&self, weight: Weight) -> Option<&[Tile]> {
        self.matrices.get(&weight).map(Vec::as_slice)
    }
}

/// Bytes of all matrices that could be kept.
pub(crate) fn max_bytes(weights: &Weights) -> u64 {
    let matrices = weights.iter().map(|(_, matrix)| matrix);
    let single = matrices.filter(|matrix| matrix.count == 1 && !matrix.quant.is_float());
    let tiles = single
        .map(|matrix| matrix.rows.div_ceil(amx_bf16::ROWS) * amx_bf16::k_steps(matrix.columns));
    (tiles.sum::<usize>() * size_of::<Tile>()) as u64
}

#[cfg(test)]
mod tests {
    use carat_testkit::fixtures;

    use super::*;
    use carat_cpu_kernels::simd::Line;

    #[test]
    fn matrices_are_made_once_and_only_within_the_budget() {
        let model = fixtures::ALL[0].model();
        let names: Vec<Weight> = model.weights.iter().map(|(weight, _)| weight).collect();
        let mut repacked = Repacked::new(5 * size_of::<Tile>() as u64);
        let mut made = 0;
        for round in 0..2 {
            for (weight, count, fits) in [(0, 3, true), (1, 3, false), (2, 2, true), (3, 1, false)]
            {
                repacked.keep(names[weight], count, |tiles| {
                    made += 1;
                    tiles[0].0[0] = Line([weight as u8 + 1; 64]);
                });
                let found = repacked.tiles(names[weight]);
                let expected = fits.then_some((count, weight as u8 + 1));
                let found = found.map(|tiles| (tiles.len(), tiles[0].0[0].0[0]));
                assert_eq!(found, expected, "{weight} in round {round}");
            }
        }
        assert_eq!(made, 2);
    }
}
