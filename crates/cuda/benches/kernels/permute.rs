//! Permutation of tokens by expert.

use crate::{
    config::Tier,
    device::launch,
    kernel::{
        ExpertGroups, ExpertTiles,
        moe::permute::{
            grid, specialization,
            tests::{params, route},
        },
    },
    testing::Card,
};

pub(crate) fn all() {
    let card = Card::open(Tier::Portable);
    let module = card.load(&specialization());
    let groups = ExpertGroups {
        experts: 128,
        top_k: 8,
        tiles: ExpertTiles::ByShare,
    };
    for count in [64, 512, 2048, 4096] {
        let rows = card.upload(&[count as u32]);
        let route = card.upload(&route(count, groups, 5));
        let sorted = card.upload(&vec![0u32; count * 8]);
        let tiles = card.upload(&vec![0u32; 3 * groups.max_tiles(count)]);
        let tile_count = card.upload(&[0u32]);
        let params = params([&rows, &route, &sorted, &tiles, &tile_count], groups);
        let taken = card.time(50, |_| {
            launch(&module, grid(groups, count), &params).expect("launches");
        });
        println!("permute {count} rows: {:.1} us", taken.as_secs_f64() * 1e6);
    }
}
