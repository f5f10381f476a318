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
