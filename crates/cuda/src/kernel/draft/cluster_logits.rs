//! Twin of `kernels/draft/cluster_logits.cu`: the head of a drafter, for the tokens of some clusters alone.

use carat_gguf::QuantType;
use carat_model::{plan::ClusterId, weights::Weight};

use crate::kernel::{
    Addresses, Kernel, Operand, RowsAt, Specialization, grid::elementwise_grid,
    specialization::format_constant,
};
use crate::{
    device::{Address, Grid},
    kernel::params::{Params, params},
    kernel::weights::{WeightFormat, WeightOperand},
};

params! {
    struct ClusterLogitsParams {
        rows: RowsAt,
        x: Address,
        w: Address,
        row_bytes: u64,
        cluster_of: Address,
        chosen: Address,
        out: Address,
        columns: u32,
        vocab: u32,
        clusters: u32,
    }
}

#[derive(Debug)]
pub(crate) struct ClusterLogits {
    pub(crate) x: Operand,
    pub(crate) w: Weight,
    pub(crate) quant: QuantType,
    pub(crate) columns: usize,
    pub(crate) vocab: usize,
    pub(crate) table: ClusterId,
    pub(crate) clusters: usize,
    /// As [`NearestClusters`](super::nearest_clusters::NearestClusters) leaves them.
    pub(crate) chosen: Operand,
    pub(crate) out: Operand,
}

pub(crate) fn specialization(quant: QuantType) -> Specialization {
    Specialization {
        kernel: "cluster_logits",
        entries: &["cluster_logits"],
        constants: vec![format_constant(quant)],
        params_bytes: ClusterLogitsParams::BYTES,
    }
}

impl Kernel for ClusterLogits {
    fn specialization(&self) -> Specialization {
        specialization(self.quant)
    }

    fn grid(&self, rows: usize) -> Grid {
        elementwise_grid(rows, self.vocab)
    }

    fn params(&self, at: &Addresses, rows: RowsAt) -> Vec<u8> {
        let w = at.matrix(&WeightOperand::one(self.w, WeightFormat::File));
        ClusterLogitsParams {
            rows,
            x: at.operand(self.x),
            w: w.start,
            row_bytes: w.row_bytes as u64,
            cluster_of: at.clusters(self.table),
            chosen: at.operand(self.chosen),
            out: at.operand(self.out),
            columns: self.columns as u32,
            vocab: self.vocab as u32,
            clusters: self.clusters as u32,
        }
        .bytes()
    }

    fn weights(&self) -> Vec<WeightOperand> {
        vec![WeightOperand::one(self.w, WeightFormat::File)]
    }

    fn reads(&self) -> Vec<Operand> {
        vec![self.x, self.chosen]
    }

    fn writes(&self) -> Vec<Operand> {
        vec![self.out]
    }
}
