//! Twin of `kernels/draft/nearest_clusters.cu`: the clusters that a row's head is cut down to.

use crate::kernel::{Addresses, Kernel, Operand, RowsAt, Specialization};
use crate::{
    device::{Address, Grid},
    kernel::params::{Params, params},
};

const THREADS: usize = 1024;
/// Clusters of the published drafters.
pub(crate) const PUBLISHED: usize = 2048;
/// The most clusters that threads hold in registers.
pub(crate) const MAX_CLUSTERS: usize = 8 * THREADS;

params! {
    struct NearestClustersParams {
        rows: RowsAt,
        scores: Address,
        chosen: Address,
        clusters: u32,
        top: u32,
    }
}

/// Requires at most [`MAX_CLUSTERS`].
#[derive(Debug)]
pub(crate) struct NearestClusters {
    pub(crate) scores: Operand,
    pub(crate) clusters: usize,
    pub(crate) top: usize,
    /// [`chosen_words`] per row.
    pub(crate) chosen: Operand,
}

/// Words per row of the clusters that are taken, one bit each.
pub(crate) fn chosen_words(clusters: usize) -> usize {
    clusters.div_ceil(32)
}

pub(crate) fn specialization(clusters: usize) -> Specialization {
    Specialization {
        kernel: "nearest_clusters",
        entries: &["nearest_clusters"],
        constants: vec![("KEYS", format!("{}u", clusters.div_ceil(THREADS)))],
        params_bytes: NearestClustersParams::BYTES,
    }
}

impl Kernel for NearestClusters {
    fn specialization(&self) -> Specialization {
        specialization(self.clusters)
    }

    fn grid(&self, rows: usize) -> Grid {
        Grid::new((rows, 1), THREADS)
    }

    fn params(&self, at: &Addresses, rows: RowsAt) -> Vec<u8> {
        NearestClustersParams {
            rows,
            scores: at.operand(self.scores),
            chosen: at.operand(self.chosen),
            clusters: self.clusters as u32,
            top: self.top as u32,
        }
        .bytes()
    }

    fn reads(&self) -> Vec<Operand> {
        vec![self.scores]
    }

    fn writes(&self) -> Vec<Operand> {
        vec![self.chosen]
    }
}

#[cfg(test)]
mod tests {
    use carat_model::draft::nearest;

    use super::*;
    use crate::{
        config::Tier,
        testing::{Card, normals},
    };

    #[test]
    #[ignore = "needs a card"]
    fn nearest_clusters_are_those_of_the_definition() {
        let card = Card::open(Tier::Best);
        for (clusters, top) in [(1, 1), (40, 3), (40, 40), (2048, 32), (2500, 7)] {
            let rows = 3;
            let mut scores = normals(top as u64, rows * clusters);
            // All alike in the second row, and few numbers in the third.
            scores[clusters..2 * clusters].fill(-0.5);
            for (i, score) in scores[2 * clusters..].iter_mut().enumerate() {
                *score = [0.0, -0.0, 1.0, -1.0][i * i % 4];
            }
            let words = chosen_words(clusters);
            let (given, chosen) = (
                card.upload(&scores),
                card.upload(&vec![u32::MAX; rows * words]),
            );
            let count = card.upload(&[rows as u32]);
            let params = NearestClustersParams {
                rows: RowsAt {
                    count: count.address(),
                    index: Address::NULL,
                },
                scores: given.address(),
                chosen: chosen.address(),
                clusters: clusters as u32,
                top: top as u32,
            };
            let module = card.load(&specialization(clusters));
            card.run(&module, Grid::new((rows, 1), THREADS), &params.bytes());
            let found: Vec<u32> = card.download(&chosen, rows * words);
            let numbers: Vec<u32> = (0..clusters as u32).collect();
            for (scores, found) in scores.chunks(clusters).zip(found.chunks(words)) {
                let mut expected: Vec<u32> = nearest(scores, &numbers, top).collect();
                expected.sort_unstable();
                let is_taken = |cluster: &u32| found[*cluster as usize / 32] >> (cluster % 32) & 1;
                let all = 0..words as u32 * 32;
                let found: Vec<u32> = all.filter(|cluster| is_taken(cluster) == 1).collect();
                assert_eq!(found, expected, "{top} of {clusters}");
            }
        }
    }
}
