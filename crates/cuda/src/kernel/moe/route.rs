//! Twin of `kernels/moe/route.cu`: top-k routing from router scores.

use carat_model::weights::Weight;

use crate::kernel::{Addresses, Kernel, Operand, RowsAt, Specialization};
use crate::{
    device::{Address, Grid},
    kernel::params::{Params, params},
    kernel::weights::WeightOperand,
};

/// The router keeps a row's scores in shared memory.
pub(crate) const MAX_EXPERTS: usize = 1024;

params! {
    struct RouteParams {
        rows: RowsAt,
        scores: Address,
        squares: Address,
        expert_scale: Address,
        out: Address,
        experts: u32,
        top_k: u32,
        scale: f32,
        parts: u32,
        columns: u32,
        eps: f32,
    }
}

/// Scores that are still to be added up and normed.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ScoreParts {
    /// Sums of squares, one per part.
    pub(crate) squares: Operand,
    pub(crate) parts: usize,
    /// Inputs of the norm.
    pub(crate) columns: usize,
    pub(crate) eps: f32,
}

/// Scores to routed experts and their weights.
#[derive(Debug)]
pub(crate) struct Route {
    pub(crate) scores: Operand,
    /// `None` where they are whole.
    pub(crate) parts: Option<ScoreParts>,
    /// Factor of scores.
    pub(crate) scale: f32,
    pub(crate) expert_scale: Option<Weight>,
    pub(crate) experts: usize,
    pub(crate) top_k: usize,
    pub(crate) out: Operand,
    /// Launched with PDL.
    pub(crate) pdl: bool,
}

pub(crate) fn specialization() -> Specialization {
    Specialization {
        kernel: "route",
        entries: &["route"],
        constants: vec![],
        params_bytes: RouteParams::BYTES,
    }
}

impl Kernel for Route {
    fn specialization(&self) -> Specialization {
        specialization()
    }

    fn grid(&self, rows: usize) -> Grid {
        Grid {
            pdl: self.pdl,
            ..Grid::new((rows, 1), 32)
        }
    }

    fn params(&self, at: &Addresses, rows: RowsAt) -> Vec<u8> {
        RouteParams {
            rows,
            scores: at.operand(self.scores),
            squares: self
                .parts
                .map_or(Address::NULL, |parts| at.operand(parts.squares)),
            expert_scale: at.vector(self.expert_scale),
            out: at.operand(self.out),
            experts: self.experts as u32,
            top_k: self.top_k as u32,
            scale: self.scale,
            parts: self.parts.map_or(1, |parts| parts.parts as u32),
            columns: self.parts.map_or(1, |parts| parts.columns as u32),
            eps: self.parts.map_or(0.0, |parts| parts.eps),
        }
        .bytes()
    }

    fn weights(&self) -> Vec<WeightOperand> {
        WeightOperand::vectors([self.expert_scale])
    }

    fn reads(&self) -> Vec<Operand> {
        let squares = self.parts.map(|parts| parts.squares);
        [self.scores].into_iter().chain(squares).collect()
    }

    fn writes(&self) -> Vec<Operand> {
        vec![self.out]
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{kernel::testing::Table, testing::normals};

    const EPS: f32 = 1e-6;

    #[test]
    #[ignore = "needs a card"]
    fn parts_of_scores_route_as_whole_ones() {
        let (rows, experts, top_k, parts, columns) = (5, 70, 4, 8, 96);
        let mut table = Table::new();
        let scores = normals(1, rows * parts * experts);
        let squares: Vec<f32> = normals(2, rows * parts).iter().map(|v| v * v).collect();
        let mut whole = Vec::new();
        for (scores, squares) in scores
            .chunks_exact(parts * experts)
            .zip(squares.chunks_exact(parts))
        {
            let norm = 1.0 / (squares.iter().sum::<f32>() / columns as f32 + EPS).sqrt();
            let sum = |e: usize| scores[e..].iter().step_by(experts).sum::<f32>();
            whole.extend((0..experts).map(|e| sum(e) * norm));
        }
        let (scores, squares) = (table.put(&scores), table.put(&squares));
        let whole = table.put(&whole);
        let in_parts = ScoreParts {
            squares,
            parts,
            columns,
            eps: EPS,
        };
        let size = rows * 2 * top_k;
        let [expected, found] = [(whole, None), (scores, Some(in_parts))].map(|(scores, parts)| {
            let out = table.poison(size);
            let route = Route {
                scores,
                parts,
                scale: 0.3,
                expert_scale: None,
                experts,
                top_k,
                out,
                pdl: false,
            };
            table.run(rows, rows, &route);
            table.get::<f32>(out, size)
        });
        assert_eq!(found, expected);
        let mut numbers = found.chunks_exact(2 * top_k).flat_map(|row| &row[..top_k]);
        assert!(numbers.all(|n| (0.0..experts as f32).contains(n)));
    }
}
