//! Twin of `kernels/linear/ple_branch.cu`: the two products of per-layer embeddings, of medium batches on Hopper.

use crate::kernel::{
    Addresses, ColumnSlice, Kernel, Operand, RowsAt, Specialization, WeightOperand,
};
use crate::{
    device::{Address, Grid, TensorMap},
    kernel::params::{Params, params},
};

/// Columns of a layer's slice.
const WIDTH: usize = 256;
/// Columns of the residual stream that are compiled for ahead: E2B's and E4B's.
const PUBLISHED: [usize; 2] = [1536, 2560];
/// Blocks of a cluster of the gate.
const BLOCKS: usize = 8;
/// Outputs of a block, or of a cluster.
const OUTPUTS: usize = 64;
const THREADS: usize = 128;
/// Tokens of the smallest tile, and what tiles grow by; of the largest.
const TILE_TOKENS: usize = 16;
const MAX_TOKENS: usize = 64;
/// Bytes of a chunk of 64 inputs, of an output or a token.
const LINE: usize = 128;

params! {
    struct PleBranchParams {
        x: TensorMap,
        w: TensorMap,
        rows: RowsAt,
        slices: Address,
        out: Address,
        slice_columns: u32,
        slice_column: u32,
    }
}

/// One of the two products.
#[derive(Clone, Copy, Debug)]
pub(crate) enum PleProduct {
    /// `gelu(w . x) * slice`, f16.
    Gate(ColumnSlice),
    /// `w . x`, f32.
    Proj,
}

/// A product of up to 64 rows; its matrix is f16.
#[derive(Debug)]
pub(crate) struct PleBranch {
    pub(crate) product: PleProduct,
    /// F16, `[rows, inputs]`.
    pub(crate) x: Operand,
    pub(crate) w: WeightOperand,
    pub(crate) out: Operand,
    /// Of the residual stream.
    pub(crate) columns: usize,
    /// Launched with PDL.
    pub(crate) pdl: bool,
}

impl PleBranch {
    /// Whether there is code for these columns of the stream and of a slice.
    pub(crate) fn takes(columns: usize, width: usize) -> bool {
        PUBLISHED.contains(&columns) && width == WIDTH
    }

    fn inputs(&self) -> usize {
        match self.product {
            PleProduct::Gate(_) => self.columns,
            PleProduct::Proj => WIDTH,
        }
    }

    fn outputs(&self) -> usize {
        match self.product {
            PleProduct::Gate(_) => WIDTH,
            PleProduct::Proj => self.columns,
        }
    }
}

/// Chunks of a block of the gate, or of the product behind it, whichever has more; and what aligns them.
fn shared_bytes(columns: usize) -> usize {
    let chunks = (columns / BLOCKS).max(WIDTH) / OUTPUTS;
    chunks * (OUTPUTS + MAX_TOKENS) * LINE + 1024
}

fn specialization(columns: usize) -> Specialization {
    Specialization {
        kernel: "ple_branch",
        entries: &[
            "ple_gate_16",
            "ple_gate_32",
            "ple_gate_48",
            "ple_gate_64",
            "ple_proj_16",
            "ple_proj_32",
            "ple_proj_48",
            "ple_proj_64",
        ],
        constants: vec![
            ("COLUMNS", columns.to_string()),
            ("SHARED_BYTES", shared_bytes(columns).to_string()),
        ],
        params_bytes: PleBranchParams::BYTES,
    }
}

pub(crate) fn specializations() -> impl Iterator<Item = Specialization> {
    PUBLISHED.into_iter().map(specialization)
}

impl Kernel for PleBranch {
    fn specialization(&self) -> Specialization {
        specialization(self.columns)
    }

    fn grid(&self, rows: usize) -> Grid {
        assert!(rows <= MAX_TOKENS, "{rows} rows");
        let (first_entry, cluster) = match self.product {
            PleProduct::Gate(_) => (0, BLOCKS),
            PleProduct::Proj => (MAX_TOKENS / TILE_TOKENS, 1),
        };
        Grid {
            entry: first_entry + rows.div_ceil(TILE_TOKENS) - 1,
            cluster,
            shared_bytes: shared_bytes(self.columns),
            pdl: self.pdl,
            ..Grid::new((cluster * self.outputs() / OUTPUTS, 1), THREADS)
        }
    }

    fn params(&self, at: &Addresses, rows: RowsAt) -> Vec<u8> {
        let (x, w) = (at.operand(self.x), at.matrix(&self.w).start);
        let slice = match self.product {
            PleProduct::Gate(slice) => Some(slice),
            PleProduct::Proj => None,
        };
        PleBranchParams {
            x: TensorMap::f16(x, [MAX_TOKENS, self.inputs()], TILE_TOKENS),
            w: TensorMap::f16(w, [self.outputs(), self.inputs()], OUTPUTS),
            rows,
            slices: slice.map_or(Address::NULL, |slice| at.operand(slice.operand)),
            out: at.operand(self.out),
            slice_columns: slice.map_or(0, |slice| slice.columns) as u32,
            slice_column: slice.map_or(0, |slice| slice.column) as u32,
        }
        .bytes()
    }

    fn weights(&self) -> Vec<WeightOperand> {
        vec![self.w.clone()]
    }

    fn reads(&self) -> Vec<Operand> {
        match self.product {
            PleProduct::Gate(slice) => vec![self.x, slice.operand],
            PleProduct::Proj => vec![self.x],
        }
    }

    fn writes(&self) -> Vec<Operand> {
        vec![self.out]
    }
}

#[cfg(test)]
mod tests;
