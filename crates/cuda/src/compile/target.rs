//! The card as lowering sees it: all that calls depend on besides plan and weights.

use carat_model::{
    kv::{KvType, PerGroup},
    plan::Plan,
};

use crate::{
    choices::{Alternative, Alternatives},
    config::{Fusion, Tier},
    device::ClusterCapacity,
    kernel::{HOPPER_MULTIPROCESSORS, TableFormat},
};

/// Facts of the card and settings that lowering depends on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Target {
    pub(crate) multiprocessors: usize,
    /// The most shared memory a block may have.
    pub(crate) shared_bytes: usize,
    /// Whether code is compiled for `sm_90a`.
    pub(crate) hopper: bool,
    /// Blocks of clusters that fit, where code may use them.
    pub(crate) clusters: Option<ClusterCapacity>,
    /// Whether kernels of small and medium batches may be launched with programmatic dependent launch (PDL).
    pub(crate) pdl: bool,
    pub(crate) gemm: GemmImpl,
    /// With cuBLASLt, the first layer whose products have no f16 copies of their weights: it and those behind it are multiplied by
    /// the native GEMM. Not the first ones: where layers share keys and values, rows of a prompt end before the last layers.
    pub(crate) first_uncopied_layer: Option<usize>,
    /// What is chosen otherwise than the model of the card does.
    pub(crate) alternatives: Alternatives,
    /// The most rows of a batch.
    pub(crate) max_rows: usize,
    pub(crate) fusion: Fusion,
    /// Types of keys and values.
    pub(crate) kv: PerGroup<KvType>,
    /// Of a drafter whose target holds values alone in full-attention slots: pairs of a key that turn.
    pub(crate) borrowed_turning_pairs: Option<usize>,
    /// Format that a borrowed table of embeddings lies in on the device already; `None` if it is loaded like any other.
    pub(crate) borrowed_table: Option<TableFormat>,
}

impl Target {
    /// A Hopper card of full size that multiplies by the native GEMM.
    pub(crate) fn hopper(fusion: Fusion, max_rows: usize) -> Target {
        Target {
            multiprocessors: HOPPER_MULTIPROCESSORS,
            shared_bytes: 227 << 10,
            hopper: true,
            clusters: Some(ClusterCapacity::assumed(HOPPER_MULTIPROCESSORS)),
            pdl: true,
            gemm: GemmImpl::Native,
            first_uncopied_layer: None,
            alternatives: Alternatives::default().with(Alternative::PackedFrom(0)),
            max_rows,
            fusion,
            kv: PerGroup::default(),
            borrowed_turning_pairs: None,
            borrowed_table: None,
        }
    }

    /// A card that is not there: an H200 with cuBLASLt, or, of the portable tier, one of its size with the native GEMM.
    pub(crate) fn assumed((tier, fusion): (Tier, Fusion), max_rows: usize) -> Target {
        let best = tier == Tier::Best;
        Target {
            hopper: best,
            pdl: best,
            gemm: if best {
                GemmImpl::CublasLt
            } else {
                GemmImpl::Native
            },
            ..Target::hopper(fusion, max_rows)
        }
    }
}

/// Implementation of matrix products in large batches.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum GemmImpl {
    /// cuBLASLt, in f16 over dequantized weights.
    CublasLt,
    /// `kernels/linear/gemm.cu`: int8 over fragments, or f16.
    Native,
}

/// Where full-attention slots of a plan hold values alone, because keys follow from them: pairs of a key that turn.
pub(crate) fn turning_pairs(plan: &Plan) -> Option<usize> {
    let (_, first) = *plan.tied_keys().first()?;
    Some(plan.rope(first.rope).turning_pairs())
}

/// Weights of a product up to which its launch gains from PDL: all but those of the output. 12B Q4_0 on an H200: 376 tokens/s without
/// PDL, 390 with it, 373 if the output has it, too.
pub(crate) const MAX_WEIGHTS_FOR_PDL: usize = 256 << 20;
