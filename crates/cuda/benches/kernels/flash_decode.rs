//! Attention of single rows, by layer kind and depth.

use carat_model::kv::{KvType, PAGE_TOKENS};

use crate::{
    config::Tier,
    device::{Buffer, Grid, launch},
    kernel::{
        Heads,
        attention::flash_decode::{
            splits,
            tests::{Case, Kv, Ready, heads, lone, random_f16},
        },
        params::Params,
    },
    testing::{Card, at},
};

/// The time of a launch, the mean of many that are queued behind a long clearing of memory: the host is not in the way.
fn time(card: &Card, count: usize, mut call: impl FnMut(usize)) -> f64 {
    (0..5).for_each(&mut call);
    let delay = card.device.allocate("delay", 12 << 30).expect("memory");
    let start = card.device.moment().expect("an event");
    (0..count).for_each(&mut call);
    let end = card.device.moment().expect("an event");
    card.device.wait("timing").expect("runs");
    drop(delay);
    start.until(&end).expect("times").as_secs_f64() * 1e6 / count as f64
}

pub(crate) fn all() {
    let card = Card::open(Tier::Best);
    let layers = [
        ("E4B sliding", heads(4, 2, 256), Some(512)),
        ("E4B global", heads(4, 2, 512), None),
        ("12B sliding", heads(2, 8, 256), Some(1024)),
        ("12B global", heads(16, 1, 512).tied(64), None),
        ("26B-A4B global", heads(8, 2, 512).tied(64), None),
        ("12B global wide", heads(16, 1, 512).tied(64).wide(), None),
    ];
    // Keys and values of many layers, so that none is in a cache: 1 GiB, of which each launch takes other pages.
    let bytes = 1 << 30;
    let some = random_f16(7, 1 << 22);
    let cache = card.upload(&some.repeat(bytes >> 23));
    for (name, heads, window) in layers {
        for kv in [KvType::F16, KvType::Q8_0] {
            let heads = heads.with_kv(kv);
            for rows in [1, 8] {
                for depth in [0, 512, 2048, 8192, 32768, 131_072] {
                    timing(&card, (&cache, bytes), (name, heads, window), (rows, depth));
                }
            }
        }
    }
}

fn timing(
    card: &Card,
    (cache, cache_bytes): (&Buffer, usize),
    (name, heads, window): (&str, Heads, Option<usize>),
    (rows, depth): (usize, usize),
) {
    let head_bytes = heads.kv.head_bytes(heads.head_dim);
    let page_bytes = heads.kv_count * PAGE_TOKENS * head_bytes;
    let case = Case {
        heads,
        window,
        kv: Kv::Own,
        runs: vec![lone(0); rows],
    };
    let mut batch = case.batch();
    // Runs of the depth asked for, on pages of their own in disorder; the tables are those of the deepest row.
    let first = case.first_seen(depth) / PAGE_TOKENS;
    let run_pages = depth / PAGE_TOKENS + 1 - first;
    batch.rows = (0..rows).map(|r| (r, depth)).collect();
    batch.bases = (0..rows)
        .map(|r| (r * run_pages) as i32 - first as i32)
        .collect();
    let total = rows * run_pages;
    let stride = [61, 59, 53, 1]
        .into_iter()
        .find(|s| !total.is_multiple_of(*s))
        .unwrap();
    batch.pages = (0..total).map(|i| (i * stride % total) as u32).collect();
    let ready = Ready::new(card, &case, &batch);
    let set = total * page_bytes;
    let sets = (cache_bytes / 2 / set).min(512);
    if sets == 0 {
        return;
    }
    let params: Vec<Vec<u8>> = (0..sets)
        .map(|i| {
            let mut params = ready.params;
            params.slot.keys = at::<u8>(cache, i * set);
            params.slot.values = at::<u8>(cache, cache_bytes / 2 + i * set);
            params.bytes()
        })
        .collect();
    let grid = Grid {
        blocks: (rows * heads.kv_count, splits(heads, window, rows)),
        ..ready.grid
    };
    let us = time(card, 200, |i| {
        launch(&ready.module, grid, &params[i % sets]).expect("launches");
    });
    if depth == 0 {
        let mut nothing = ready.params;
        let zero = card.upload(&[0u32]);
        nothing.rows.count = zero.address();
        let us = time(card, 200, |_| {
            launch(&ready.module, grid, &nothing.bytes()).expect("launches");
        });
        println!("flash_decode {name}, no rows in a grid of {rows}: {us:.2} us");
    }
    let seen = depth + 1 - case.first_seen(depth);
    let tensors = if heads.is_tied() { 1 } else { 2 };
    let bytes = rows * seen * heads.kv_count * head_bytes * tensors;
    println!(
        "flash_decode {name} {}, {rows} rows, depth {depth}: {us:.2} us, {:.0} GB/s",
        heads.kv,
        bytes as f64 / us / 1e3
    );
}
