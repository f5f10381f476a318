//! Feed-forward networks that host and card share in small batches, because their weights lie in host memory: which, and the
//! memory through which both sides pass their parts on.
//!
//! The host multiplies rows of the matrices as the file has them while the card reads its own rows through the bus. What it gets of
//! each matrix is a share of rows, the same for all networks. Larger batches are the card's alone.

use std::collections::BTreeSet;

use carat_model::{
    host_steps::HostNetwork,
    weights::{Weight, Weights},
};

use super::{memory::Arena, rows::SMALL_ROWS, weights::HostWeights};

/// Parts of a matrix are whole runs of so many rows: two M-tiles.
const PART_ROWS: usize = 32;
/// Bytes of the words that the two sides signal with.
const WORD_BYTES: usize = 256;

/// Networks that lowering has given to the host, and those it may give.
#[derive(Clone, Debug, Default)]
pub(crate) struct HostNetworks {
    matrices: BTreeSet<Weight>,
    /// Of a hundred rows of a matrix.
    share: usize,
    pub(crate) list: Vec<HostNetwork>,
}

impl HostNetworks {
    pub(crate) fn new(host: &HostWeights) -> HostNetworks {
        HostNetworks {
            matrices: host.matrices.clone(),
            share: usize::from(host.cpu_share),
            list: Vec::new(),
        }
    }

    /// A network as it is shared, if it is. One whose matrices the card cannot take in parts is the host's, if that has the larger
    /// share.
    pub(super) fn network(
        &self,
        weights: &Weights,
        [gate, up, down]: [Weight; 3],
        top_k: Option<usize>,
        in_parts: bool,
    ) -> Option<HostNetwork> {
        let there = |w: Weight| self.share > 0 && self.matrices.contains(&w);
        let rows = |w: Weight| weights.matrix(w).rows;
        let from = |w: Weight, is_there: bool| match is_there {
            false => rows(w),
            true if in_parts => self.own_rows(rows(w)),
            true => 0,
        };
        let gated = there(gate) && there(up);
        let network = HostNetwork {
            gate,
            up,
            down,
            top_k,
            gated_from: from(gate, gated),
            down_from: from(down, there(down)),
        };
        let shared = network.gated_from < rows(gate) || network.down_from < rows(down);
        // Both sides copy and quantize by runs of values.
        let whole = [gate, down].map(|w| weights.matrix(w).columns.is_multiple_of(PART_ROWS))
            == [true; 2]
            && rows(down).is_multiple_of(4);
        let fits = whole && (in_parts || network.is_whole() && self.share >= 50);
        (shared && fits).then_some(network)
    }

    /// The card's rows of a matrix.
    fn own_rows(&self, rows: usize) -> usize {
        let own = rows * (100 - self.share);
        let parts = (own + 50 * PART_ROWS) / (100 * PART_ROWS);
        (parts * PART_ROWS).min(rows)
    }
}

/// Offsets in the memory that both sides share, by stage: gate and up or all of a network, then down.
#[derive(Clone, Copy, Debug)]
pub(crate) struct SharedMemory {
    pub(crate) inputs: [usize; 2],
    pub(crate) routes: [usize; 2],
    pub(crate) outputs: [usize; 2],
    pub(crate) bytes: usize,
}

impl SharedMemory {
    /// For the largest of some networks.
    pub(crate) fn new(weights: &Weights, networks: &[HostNetwork]) -> SharedMemory {
        let most = |floats: &dyn Fn(&HostNetwork) -> usize| {
            let most = networks.iter().map(floats).max().unwrap_or(0);
            SMALL_ROWS * most * size_of::<f32>()
        };
        let inner = |n: &HostNetwork| weights.matrix(n.gate).rows;
        let route = most(&|n| 2 * n.each());
        let sizes = [
            WORD_BYTES,
            most(&|n| weights.matrix(n.gate).columns),
            most(&|n| n.each() * n.gated_from),
            route,
            route,
            most(&|n| n.each() * (inner(n) - n.gated_from)),
            most(&|n| weights.matrix(n.down).rows - n.down_from),
        ];
        let Arena { offsets, bytes } = Arena::new(sizes.into_iter());
        SharedMemory {
            inputs: [offsets[1], offsets[2]],
            routes: [offsets[3], offsets[4]],
            outputs: [offsets[5], offsets[6]],
            bytes,
        }
    }
}

#[cfg(test)]
mod tests {
    use carat_gguf::QuantType;
    use carat_testkit::tiny::{Tiny, Variant};

    use super::*;

    #[test]
    fn the_hosts_share_of_rows_is_rounded_to_whole_tiles() {
        let own = |share, rows| {
            let networks = HostNetworks {
                share,
                ..HostNetworks::default()
            };
            networks.own_rows(rows)
        };
        assert_eq!(own(100, 704), 0);
        assert_eq!(own(65, 704), 256);
        assert_eq!(own(70, 704), 224);
        assert_eq!(own(1, 64), 64);
        // Rows that fill no tile.
        assert_eq!(own(2, 70), 64);
        assert_eq!(own(1, 50), 50);
    }

    #[test]
    fn parts_of_the_shared_memory_do_not_meet() {
        let model = Tiny::new(Variant::Moe26b, QuantType::Q4_0).model();
        let layer = &model.layers[0];
        let moe = layer.moe.as_ref().expect("has experts");
        let network = HostNetwork {
            gate: moe.gate,
            up: moe.up,
            down: moe.down,
            top_k: Some(2),
            gated_from: 32,
            down_from: 64,
        };
        let rows = |w| model.weights.matrix(w).rows;
        let at = SharedMemory::new(&model.weights, &[network]);
        let floats = [
            (at.inputs[0], model.weights.matrix(moe.gate).columns),
            (at.inputs[1], 2 * 32),
            (at.routes[0], 4),
            (at.routes[1], 4),
            (at.outputs[0], 2 * (rows(moe.gate) - 32)),
            (at.outputs[1], rows(moe.down) - 64),
        ];
        let mut end = WORD_BYTES;
        for (start, per_row) in floats {
            assert!(start >= end && start.is_multiple_of(16), "{at:?}");
            end = start + SMALL_ROWS * per_row * size_of::<f32>();
        }
        assert!(end <= at.bytes);
    }
}
