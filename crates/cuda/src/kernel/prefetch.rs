//! Weights that a launch asks the memory for on behalf of a later one, so that they lie in the L2 cache by then.

use super::{Addresses, weights::WeightOperand};
use crate::{device::Address, kernel::params::params};

/// Bytes that one instruction asks for. Mirrors `PIECE` in `kernels/lib/prefetch.cuh`.
const PIECE: usize = 2048;

params! {
    pub(crate) struct PrefetchParams {
        start: Address,
        chunks: u32,
        chunk_bytes: u32,
        bytes: u32,
        reserved: u32,
    }
}

impl PrefetchParams {
    pub(crate) const NONE: PrefetchParams = PrefetchParams {
        start: Address::NULL,
        chunks: 0,
        chunk_bytes: 0,
        bytes: 0,
        reserved: 0,
    };
}

/// A matrix that a launch streams, each block its own run of bytes.
#[derive(Clone, Debug)]
pub(crate) struct Streamed {
    pub(crate) w: WeightOperand,
    pub(crate) chunks: usize,
    pub(crate) chunk_bytes: usize,
}

impl Streamed {
    pub(crate) fn bytes(&self) -> usize {
        self.chunks * self.chunk_bytes
    }

    /// About so many bytes of it, an equal part of each block's, behind the first `skipped`.
    pub(crate) fn part(&self, skipped: usize, bytes: usize) -> Option<Prefetch> {
        let each = |bytes: usize| bytes / self.chunks / PIECE * PIECE;
        let offset = each(skipped);
        let bytes = each(bytes).min(self.chunk_bytes.saturating_sub(offset) / PIECE * PIECE);
        (bytes > 0).then(|| Prefetch {
            streamed: self.clone(),
            offset,
            bytes,
        })
    }
}

/// A part of each block's run of bytes.
#[derive(Clone, Debug)]
pub(crate) struct Prefetch {
    streamed: Streamed,
    offset: usize,
    bytes: usize,
}

impl Prefetch {
    pub(crate) fn bytes(&self) -> usize {
        self.streamed.chunks * self.bytes
    }

    pub(crate) fn params(prefetch: Option<&Prefetch>, at: &Addresses) -> PrefetchParams {
        prefetch.map_or(PrefetchParams::NONE, |p| PrefetchParams {
            start: at.matrix(&p.streamed.w).start.offset(p.offset),
            // The last block's run may be shorter.
            chunks: p.streamed.chunks as u32 - 1,
            chunk_bytes: p.streamed.chunk_bytes as u32,
            bytes: p.bytes as u32,
            reserved: 0,
        })
    }
}
