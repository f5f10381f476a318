//! Attention of prompt chunks, by layer kind and prefix.

use crate::{
    config::Tier,
    device::{Address, launch},
    kernel::{
        Kernel,
        attention::flash_prefill::tests::{
            OnCard, Sequence, blocks, heads, in_q8_0, kernel, load, whole,
        },
    },
    testing::Card,
};

pub(crate) fn all() {
    let card = Card::open(Tier::Best);
    let cases = [
        ("E4B sliding", heads(8, 2, 256, 512)),
        ("E4B global", heads(8, 2, 512, 0)),
        ("12B sliding", heads(16, 8, 256, 1024)),
        ("12B global", heads(16, 1, 512, 0)),
    ];
    for (name, of) in cases
        .into_iter()
        .flat_map(|(name, of)| [(name, of), (name, in_q8_0(of))])
    {
        for (prefix, rows) in [(0, 512), (0, 2048), (0, 8192), (8192, 2048), (65536, 2048)] {
            let sequence = Sequence::repeating(&of, prefix + rows);
            let batch = OnCard::new(&card, of, &[whole(1, prefix, rows)], &[&sequence]);
            let columns = of.heads * of.head_dim;
            let out = card.upload(&vec![0u16; rows * columns]);
            for block in blocks(of) {
                let kernel = kernel(of, block, "OUT_F16");
                let module = load(&card, &kernel);
                let params = batch.params(block, [out.address(), Address::NULL, Address::NULL]);
                let grid = kernel.grid(rows);
                let time = card.time(50, |_| launch(&module, grid, &params).expect("launches"));
                let seen = |p: usize| of.window.map_or(p + 1, |w| w.min(p + 1));
                let seen: usize = (prefix..prefix + rows).map(seen).sum();
                let flops = 4.0 * seen as f64 * columns as f64;
                println!(
                    "flash_prefill {name:<12} {} {rows:5} new at {prefix:5}, {:<13}: {:8.1} us {:6.1} TFLOPS",
                    of.kv.kv,
                    kernel.specialization().entries[grid.entry],
                    time.as_secs_f64() * 1e6,
                    flops / time.as_secs_f64() / 1e12
                );
            }
        }
    }
}
