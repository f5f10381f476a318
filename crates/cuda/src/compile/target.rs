//! The card as lowering sees it: all that calls depend on besides plan and weights.

use crate::{config::Fusion, kernel::HOPPER_MULTIPROCESSORS};

/// What lowering must know of the card.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Target {
    pub(crate) multiprocessors: usize,
    /// The most shared memory a block may have.
    pub(crate) shared_bytes: usize,
    /// Whether code is made for Hopper alone.
    pub(crate) hopper: bool,
    /// Whether launches may start before those before them are over.
    pub(crate) pdl: bool,
    pub(crate) gemm: GemmImpl,
    /// The most rows of a batch.
    pub(crate) max_rows: usize,
    pub(crate) fusion: Fusion,
}

impl Target {
    /// A Hopper card of full size whose products are our own.
    pub(crate) fn hopper(fusion: Fusion, max_rows: usize) -> Target {
        Target {
            multiprocessors: HOPPER_MULTIPROCESSORS,
            shared_bytes: 227 << 10,
            hopper: true,
            pdl: true,
            gemm: GemmImpl::Native,
            max_rows,
            fusion,
        }
    }
}

/// Who multiplies matrices in wide batches.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum GemmImpl {
    /// NVIDIA's library, in half precision over expanded weights.
    CublasLt,
    /// Our own kernels: bytes over packed weights, or halves.
    Native,
}
