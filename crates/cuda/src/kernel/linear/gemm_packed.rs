//! Twin of `kernels/linear/gemm_packed_sm90.cu`: products of large batches on Hopper, weights packed, activations in K-permuted f16.
//! Rows are those of the batch, or token-expert pairs, grouped by expert.
//!
//! Products of every width give the same bits, so that rows come out the same in every batch.

#[cfg(test)]
pub(crate) mod tests;

use super::gemm::{ExpertGroups, PermutationOperands};
use crate::kernel::{Addresses, ExpertInput, Kernel, Operand, RowsAt, Specialization};
use crate::{
    device::{Address, Grid},
    kernel::weights::WeightOperand,
    kernel::{
        fragment::{FragmentFormat, M_TILE, PART_INPUTS},
        params::{Params, params},
    },
};

/// M-tiles and outputs of an item of work.
const CONSUMER_WARPS: usize = 8;
const BLOCK_M_TILES: usize = 2 * CONSUMER_WARPS;
/// The most rows of an item: of token-expert pairs, so many that most experts have one tile for 2,048 rows of 26B-A4B; of others.
pub(crate) const GROUPED_TOKENS: usize = 144;
const DENSE_TOKENS: usize = 128;
const THREADS: usize = 512;
/// Shared memory of a block, less what the kernel declares and what alignment takes.
const SHARED_BYTES: usize = (227 << 10) - (2 << 10);
/// More stages than that are of no use.
const MAX_STAGES: usize = 8;

params! {
    pub(crate) struct GemmPackedParams {
        rows: RowsAt,
        w: Address,
        x: Address,
        out: Address,
        tiles: Address,
        tile_count: Address,
        sorted: Address,
        columns: u32,
        outputs: u32,
        m_tiles: u32,
        out_stride: u32,
        x_share: u32,
        scale: f32,
    }
}

/// Epilogue: what becomes of the sums.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum GemmPackedEpilogue {
    F32,
    /// In rows, what is too large as the largest.
    F16,
    /// M-tiles alternate gates and ups: `gelu(gate) * up` in K-permuted f16.
    Geglu,
}

/// Everything that grids depend on.
#[derive(Clone, Copy, Debug)]
pub(crate) struct GemmPackedShape {
    pub(crate) format: FragmentFormat,
    pub(crate) epilogue: GemmPackedEpilogue,
    pub(crate) columns: usize,
    /// Rows of the weights: gates and ups together.
    pub(crate) outputs: usize,
    /// Of the target.
    pub(crate) multiprocessors: usize,
    /// For the grouped GEMM over routed experts.
    pub(crate) groups: Option<ExpertGroups>,
}

impl GemmPackedShape {
    /// Whether the kernel takes a matrix of this size.
    pub(crate) fn takes(rows: usize, columns: usize) -> bool {
        columns.is_multiple_of(PART_INPUTS) && rows.is_multiple_of(4)
    }

    fn m_tiles(&self) -> usize {
        match self.epilogue {
            GemmPackedEpilogue::F32 | GemmPackedEpilogue::F16 => self.outputs.div_ceil(M_TILE),
            GemmPackedEpilogue::Geglu => 2 * (self.outputs / 2).div_ceil(M_TILE),
        }
    }

    /// Blocks that run at once, each with item after item; no more than there may be items.
    pub(crate) fn grid(&self, rows: usize) -> Grid {
        let tiles = self.groups.map_or_else(
            || rows.div_ceil(DENSE_TOKENS),
            |groups| groups.max_tiles(rows),
        );
        let items = tiles * self.m_tiles().div_ceil(BLOCK_M_TILES);
        let (stages, stage, staged) = shared(self.format, self.epilogue, self.rows());
        Grid {
            entry: 0,
            blocks: (items.min(self.multiprocessors), 1),
            threads: THREADS,
            // What it takes for activations to start at a multiple of 1024.
            shared_bytes: stages * stage + staged + 1024,
            pdl: false,
            cluster: 1,
        }
    }

    pub(crate) fn specialization(&self) -> Specialization {
        specialization(self.format, self.epilogue, self.rows())
    }

    fn rows(&self) -> TiledRows {
        match self.groups {
            None => TiledRows::Dense,
            Some(_) => TiledRows::Grouped,
        }
    }
}

/// What tiles of rows are cut from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum TiledRows {
    /// A batch.
    Dense,
    /// The token-expert pairs of an expert.
    Grouped,
}

impl TiledRows {
    const ALL: [TiledRows; 2] = [TiledRows::Dense, TiledRows::Grouped];

    fn max_tokens(self) -> usize {
        match self {
            TiledRows::Dense => DENSE_TOKENS,
            TiledRows::Grouped => GROUPED_TOKENS,
        }
    }
}

/// Stages of the ring, bytes of one, and bytes of products on their way out.
fn shared(
    format: FragmentFormat,
    epilogue: GemmPackedEpilogue,
    rows: TiledRows,
) -> (usize, usize, usize) {
    let stage = rows.max_tokens() * PART_INPUTS * 2 + BLOCK_M_TILES * format.part_bytes();
    let staged = match epilogue {
        GemmPackedEpilogue::F32 | GemmPackedEpilogue::F16 => {
            CONSUMER_WARPS * 8 * (2 * M_TILE + 4) * 4
        }
        GemmPackedEpilogue::Geglu => rows.max_tokens() * (BLOCK_M_TILES * M_TILE + 16),
    };
    (
        ((SHARED_BYTES - staged) / stage).min(MAX_STAGES),
        stage,
        staged,
    )
}

fn specialization(
    format: FragmentFormat,
    epilogue: GemmPackedEpilogue,
    rows: TiledRows,
) -> Specialization {
    let (stages, stage, staged) = shared(format, epilogue, rows);
    let rows = match rows {
        TiledRows::Dense => "dense",
        TiledRows::Grouped => "grouped",
    };
    let epilogue = match epilogue {
        GemmPackedEpilogue::F32 => "f32",
        GemmPackedEpilogue::F16 => "f16",
        GemmPackedEpilogue::Geglu => "geglu_pair",
    };
    Specialization {
        kernel: "gemm_packed_sm90",
        entries: &["gemm_packed_sm90"],
        constants: vec![
            ("WEIGHTS", format.name().to_owned()),
            ("EPILOGUE", epilogue.to_owned()),
            ("ROWS", rows.to_owned()),
            ("STAGES", stages.to_string()),
            ("M_TILE_STAGE_BYTES", format.part_bytes().to_string()),
            ("STAGE_BYTES", stage.to_string()),
            ("STAGED_BYTES", staged.to_string()),
        ],
        params_bytes: GemmPackedParams::BYTES,
    }
}

/// Every specialization that lowering may choose.
pub(crate) fn specializations() -> Vec<Specialization> {
    let mut all = Vec::new();
    for format in FragmentFormat::ALL {
        for epilogue in [GemmPackedEpilogue::F32, GemmPackedEpilogue::Geglu] {
            all.extend(TiledRows::ALL.map(|rows| specialization(format, epilogue, rows)));
        }
        // Of experts alone, for whoever adds them up.
        let f16 = GemmPackedEpilogue::F16;
        all.push(specialization(format, f16, TiledRows::Grouped));
    }
    all
}

#[derive(Clone, Copy, Debug)]
pub(crate) enum GemmPackedOut {
    /// From `column` on, `stride` values from row to row, in the epilogue's format.
    Rows {
        out: Operand,
        column: usize,
        stride: usize,
    },
    /// K-permuted f16, rows of half as many as the shape has outputs.
    F16Permuted(Operand),
}

#[derive(Debug)]
pub(crate) struct GemmPacked {
    pub(crate) shape: GemmPackedShape,
    /// K-permuted f16.
    pub(crate) x: Operand,
    pub(crate) w: WeightOperand,
    pub(crate) out: GemmPackedOut,
    /// Factor of all outputs.
    pub(crate) scale: f32,
    /// The permutation, and which rows of `x` there are, if the shape has groups.
    pub(crate) groups: Option<(PermutationOperands, ExpertInput)>,
}

impl Kernel for GemmPacked {
    fn specialization(&self) -> Specialization {
        self.shape.specialization()
    }

    fn grid(&self, rows: usize) -> Grid {
        self.shape.grid(rows)
    }

    fn params(&self, at: &Addresses, rows: RowsAt) -> Vec<u8> {
        let shape = &self.shape;
        let (out, out_stride) = match self.out {
            GemmPackedOut::Rows {
                out,
                column,
                stride,
            } => {
                let bytes = match shape.epilogue {
                    GemmPackedEpilogue::F32 => 4,
                    GemmPackedEpilogue::F16 | GemmPackedEpilogue::Geglu => 2,
                };
                (at.operand(out).offset(bytes * column), stride)
            }
            GemmPackedOut::F16Permuted(out) => (at.operand(out), shape.outputs / 2),
        };
        let ([sorted, tiles, tile_count], x_share) = match self.groups {
            None => ([Address::NULL; 3], 1),
            Some((groups, x_rows)) => {
                let top_k = shape.groups.map_or(1, |groups| groups.top_k);
                let x_share = match x_rows {
                    ExpertInput::PerToken => top_k,
                    ExpertInput::PerExpert => 1,
                };
                let operands = [groups.sorted, groups.tiles, groups.tile_count];
                (operands.map(|operand| at.operand(operand)), x_share)
            }
        };
        GemmPackedParams {
            rows,
            w: at.matrix(&self.w).start,
            x: at.operand(self.x),
            out,
            tiles,
            tile_count,
            sorted,
            columns: shape.columns as u32,
            outputs: shape.outputs as u32,
            m_tiles: shape.m_tiles() as u32,
            out_stride: out_stride as u32,
            x_share: x_share as u32,
            scale: self.scale,
        }
        .bytes()
    }

    fn weights(&self) -> Vec<WeightOperand> {
        vec![self.w.clone()]
    }

    fn reads(&self) -> Vec<Operand> {
        let groups = self.groups.iter();
        let permutation = groups.flat_map(|(p, _)| [p.sorted, p.tiles, p.tile_count]);
        permutation.chain([self.x]).collect()
    }

    fn writes(&self) -> Vec<Operand> {
        match self.out {
            GemmPackedOut::Rows { out, .. } | GemmPackedOut::F16Permuted(out) => vec![out],
        }
    }
}
