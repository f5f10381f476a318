//! Twin of `kernels/attention/flash_prefill_multicast.cu`: heads of 512 in f16, by clusters that share keys and values.

use carat_model::kv::{KvType, PAGE_TOKENS};

use super::{FlashPrefillParams, KeysAndValues};
use crate::{
    device::{Grid, TensorMap},
    kernel::Specialization,
    kernel::params::{Params, params},
};

/// Blocks of a cluster.
pub(super) const CLUSTER: usize = 2;
/// Rows of a block.
pub(super) const ROWS: usize = 64;
const HEAD_DIM: usize = 512;
/// Keys of a tile.
const KEYS: usize = 128;
/// Two warpgroups that compute, and one that copies.
const THREADS: usize = 3 * 128;
/// Q, weights of two tiles and statistics per row; the pipeline of chunks; padding that aligns them.
const SHARED_BYTES: usize = ROWS * (2 * HEAD_DIM + 2 * 2 * KEYS + 2 * 4) + 4 * (32 << 10) + 1024;

params! {
    struct MulticastParams {
        keys: TensorMap,
        values: TensorMap,
        attention: FlashPrefillParams,
    }
}

pub(super) fn takes(head_dim: usize, kv: KeysAndValues) -> bool {
    head_dim == HEAD_DIM && kv.kv == KvType::F16
}

pub(super) fn specialization(format: &str, kv: KeysAndValues) -> Specialization {
    let numbers = [("HEAD_DIM", HEAD_DIM), ("SHARED_BYTES", SHARED_BYTES)];
    let entries = &["flash_prefill_multicast"];
    Specialization {
        params_bytes: MulticastParams::BYTES,
        ..super::specialization("flash_prefill_multicast", entries, (format, kv), &numbers)
    }
}

pub(super) fn grid(clusters: usize) -> Grid {
    Grid {
        cluster: CLUSTER,
        shared_bytes: SHARED_BYTES,
        ..Grid::new((CLUSTER * clusters, 1), THREADS)
    }
}

pub(super) fn params(attention: FlashPrefillParams) -> Vec<u8> {
    let map = |at| TensorMap::f16(at, [TensorMap::ANY_ROWS, HEAD_DIM], PAGE_TOKENS);
    MulticastParams {
        keys: map(attention.slot.keys),
        values: map(attention.slot.values),
        attention,
    }
    .bytes()
}
