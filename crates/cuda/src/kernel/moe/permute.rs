//! Twin of `kernels/moe/permute.cu`: tokens permuted by expert, and the tiles of the grouped GEMM.

use crate::kernel::{
    Addresses, Kernel, Operand, RowsAt, Specialization,
    linear::gemm::{ExpertGroups, PermutationOperands},
};
use crate::{
    device::{Address, Grid},
    kernel::params::{Params, params},
};

const WARPS: usize = 32;
/// Pairs of a tile, by entry point.
const TILES: [usize; 4] = [16, 32, 64, 144];
const ENTRIES: &[&str] = &["permute_16", "permute_32", "permute_64", "permute_144"];

params! {
    struct MoePermuteParams {
        rows: RowsAt,
        route: Address,
        sorted: Address,
        tiles: Address,
        tile_count: Address,
        experts: u32,
        top_k: u32,
    }
}

/// Each row's routed experts to the tiles of the grouped GEMM.
#[derive(Debug)]
pub(crate) struct MoePermute {
    pub(crate) groups: ExpertGroups,
    pub(crate) route: Operand,
    pub(crate) out: PermutationOperands,
}

pub(crate) fn specialization() -> Specialization {
    Specialization {
        kernel: "permute",
        entries: ENTRIES,
        constants: vec![],
        params_bytes: MoePermuteParams::BYTES,
    }
}

pub(crate) fn grid(groups: ExpertGroups, rows: usize) -> Grid {
    // Tiles as the GEMM wants them.
    let tile = groups.tile(rows);
    let entry = TILES.iter().position(|of_entry| *of_entry == tile);
    Grid {
        entry: entry.expect("an entry point for every tile"),
        blocks: (1, 1),
        threads: 32 * WARPS,
        shared_bytes: (WARPS + 2) * groups.experts * 4,
        pdl: false,
        cluster: 1,
    }
}

impl Kernel for MoePermute {
    fn specialization(&self) -> Specialization {
        specialization()
    }

    fn grid(&self, rows: usize) -> Grid {
        grid(self.groups, rows)
    }

    fn params(&self, at: &Addresses, rows: RowsAt) -> Vec<u8> {
        MoePermuteParams {
            rows,
            route: at.operand(self.route),
            sorted: at.operand(self.out.sorted),
            tiles: at.operand(self.out.tiles),
            tile_count: at.operand(self.out.tile_count),
            experts: self.groups.experts as u32,
            top_k: self.groups.top_k as u32,
        }
        .bytes()
    }

    fn reads(&self) -> Vec<Operand> {
        vec![self.route]
    }

    fn writes(&self) -> Vec<Operand> {
        vec![self.out.sorted, self.out.tiles, self.out.tile_count]
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use crate::{config::Tier, device::Buffer, kernel::ExpertTiles, testing::Card};

    /// Routed experts of every row, then some weights.
    pub(crate) fn route(rows: usize, groups: ExpertGroups, seed: u64) -> Vec<f32> {
        let mut state = seed | 1;
        let mut out = Vec::new();
        for _ in 0..rows {
            let mut routed: Vec<usize> = Vec::new();
            while routed.len() < groups.top_k {
                state = state
                    .wrapping_mul(6_364_136_223_846_793_005)
                    .wrapping_add(99);
                // Some experts are far more popular than others.
                let draw = (state >> 40) as usize;
                let expert = draw % groups.experts.min(1 + draw % 1000);
                if !routed.contains(&expert) {
                    routed.push(expert);
                }
            }
            out.extend(routed.iter().map(|&e| e as f32));
            out.extend((0..groups.top_k).map(|k| 0.5 / (k + 1) as f32));
        }
        out
    }

    pub(crate) fn params(at: [&Buffer; 5], groups: ExpertGroups) -> Vec<u8> {
        let [rows, route, sorted, tiles, tile_count] = at.map(Buffer::address);
        MoePermuteParams {
            rows: RowsAt {
                count: rows,
                index: Address::NULL,
            },
            route,
            sorted,
            tiles,
            tile_count,
            experts: groups.experts as u32,
            top_k: groups.top_k as u32,
        }
        .bytes()
    }

    /// The permutation of a route, in a bucket of this many rows: token-expert pairs, tiles, and how many.
    pub(crate) fn sort(
        card: &Card,
        groups: ExpertGroups,
        bucket: usize,
        route: &[f32],
    ) -> (Buffer, Buffer, Buffer) {
        let module = card.load(&specialization());
        let rows = card.upload(&[(route.len() / 2 / groups.top_k) as u32]);
        let route = card.upload(route);
        let sorted = card.upload(&vec![u32::MAX; bucket * groups.top_k]);
        let tiles = card.upload(&vec![u32::MAX; 3 * groups.max_tiles(bucket)]);
        let tile_count = card.upload(&[u32::MAX]);
        let params = params([&rows, &route, &sorted, &tiles, &tile_count], groups);
        card.run(&module, grid(groups, bucket), &params);
        (sorted, tiles, tile_count)
    }

    #[test]
    #[ignore = "needs a card"]
    fn permute_covers_every_pair_once_and_in_order() {
        let card = Card::open(Tier::Portable);
        let by_share = ExpertTiles::ByShare;
        for (experts, top_k, tiles, bucket, count) in [
            (128, 8, by_share, 9, 9),
            (128, 8, by_share, 600, 577),
            (40, 3, by_share, 64, 1),
            (128, 8, by_share, 2100, 2049),
            (128, 8, ExpertTiles::Of(144), 2100, 2049),
        ] {
            let groups = ExpertGroups {
                experts,
                top_k,
                tiles,
            };
            let route_values = route(count, groups, 5);
            let (sorted, tiles, tile_count) = sort(&card, groups, bucket, &route_values);
            let bound = groups.max_tiles(bucket);
            let expert_of =
                |pair: usize| route_values[pair / top_k * 2 * top_k + pair % top_k] as usize;
            let mut expected: Vec<usize> = (0..count * top_k).collect();
            expected.sort_by_key(|&pair| (expert_of(pair), pair));
            let found: Vec<u32> = card.download(&sorted, bucket * top_k);
            let (found, beyond) = found.split_at(count * top_k);
            let same = found.iter().zip(&expected).all(|(&a, &b)| a as usize == b);
            assert!(same, "{experts} {top_k} {count}");
            assert!(beyond.iter().all(|&c| c == u32::MAX));

            let tile_count = card.download::<u32>(&tile_count, 1)[0] as usize;
            assert!(tile_count <= bound, "{tile_count} of {bound} tiles");
            let tiles: Vec<u32> = card.download(&tiles, 3 * bound);
            let mut next = 0;
            for tile in tiles.chunks_exact(3).take(tile_count) {
                let [expert, first, tile_rows] = [0, 1, 2].map(|i| tile[i] as usize);
                assert_eq!(first, next);
                assert!((1..=groups.tile(bucket)).contains(&tile_rows));
                next += tile_rows;
                let own = &expected[first..next];
                assert!(own.iter().all(|&pair| expert_of(pair) == expert));
                // A tile that is not full is its expert's last.
                let another = expected.get(next).is_some_and(|&c| expert_of(c) == expert);
                assert!(tile_rows == groups.tile(bucket) || !another);
            }
            assert_eq!(next, count * top_k);
        }
    }
}
