//! Weights on their way to the card: dequantized, packed, whole uploads.

use std::sync::Arc;

use carat_gguf::{QuantType, quant::random_blocks};

use crate::{
    compile::weights::WeightLayout,
    config::{TableMemory, Tier},
    device::launch,
    kernel::{
        Dequantize, HalfKind, Pack, WeightFormat, WeightOperand,
        fragment::{FragmentFormat, M_TILE},
        load::pack::tests::{packed, random},
    },
    run::upload::{Loaders, tests::random as random_tensor},
    testing::{Card, at, weights_of},
};

pub(crate) fn dequantize() {
    let card = Card::open(Tier::Best);
    for quant in [
        QuantType::Q4_0,
        QuantType::Q8_0,
        QuantType::Q4_K,
        QuantType::Q6_K,
        QuantType::F32,
    ] {
        let (rows, columns) = (10240, 2560);
        let mut bytes = vec![0; rows * quant.row_bytes(columns)];
        random_blocks(quant, 8, 0.05, &mut bytes);
        let from = card.upload(&bytes);
        // More than L2 holds.
        let (count, bytes) = (5, rows * columns * 2);
        let to = card.device.allocate("test", count * bytes).unwrap();
        let module = card.load(&Dequantize::specialization(quant, HalfKind::F16));
        let time = card.time(50, |i| {
            let job = Dequantize {
                quant,
                from: from.address(),
                rows,
                columns,
                to: to.address().offset(i % count * bytes),
            };
            launch(&module, job.grid(), &job.params()).unwrap();
        });
        let rate = bytes as f64 / time.as_secs_f64() / 1e9;
        println!("dequantize {quant}: {rate:.0} GB/s of f16 ({time:?})");
    }
}

pub(crate) fn pack() {
    let card = Card::open(Tier::Best);
    for quant in packed() {
        let (rows, columns) = (10240, 2560);
        let bytes = random(quant, rows, columns);
        let format = FragmentFormat::of(quant).unwrap();
        let m_tile_bytes = format.m_tile_bytes(columns);
        let (from, fragments) = (card.upload(&bytes), m_tile_bytes * rows / M_TILE);
        // More than L2 holds.
        let count = (256 << 20) / fragments;
        let to = card.device.allocate("test", count * fragments).unwrap();
        let module = card.load(&Pack::specialization(quant));
        let time = card.time(50, |i| {
            let job = Pack {
                quant,
                from: from.address(),
                rows,
                columns,
                fragments: at::<u8>(&to, i % count * fragments),
                m_tile_bytes,
            };
            launch(&module, job.grid(), &job.params()).unwrap();
        });
        let rate = bytes.len() as f64 / time.as_secs_f64() / 1e9;
        println!("pack {quant}: {rate:.0} GB/s of file ({time:?})");
    }
}

pub(crate) fn upload() {
    let card = Card::open(Tier::Best);
    let quant = QuantType::Q4_0;
    let shape = [2560, 40960];
    let names: Vec<String> = (0..8).map(|i| format!("w{i}")).collect();
    let tensor = |name| (name, shape.to_vec(), quant, random_tensor(quant, &shape, 1));
    let tensors: Vec<_> = names.iter().map(|n| tensor(n.as_str())).collect();
    let weights = weights_of(&tensors);
    let all = || weights.iter().map(|(weight, _)| weight);
    for formats in [
        &[WeightFormat::File][..],
        &[WeightFormat::Fragments],
        &[WeightFormat::Fragments, WeightFormat::F16],
    ] {
        let named = all().flat_map(|w| {
            formats
                .iter()
                .map(move |format| WeightOperand::one(w, *format))
        });
        let layout = WeightLayout::new(&weights, &named.collect(), TableMemory::Device);
        let kernels = layout.kernels(&weights).into_iter();
        let loaders = kernels.map(|k| (k.clone(), Arc::new(card.load(&k))));
        let loaders: Loaders = loaders.collect();
        let start = std::time::Instant::now();
        layout.upload(&card.device, &weights, &loaders).unwrap();
        let time = start.elapsed();
        let bytes = all().map(|w| weights.bytes(w).len()).sum::<usize>();
        let rate = bytes as f64 / time.as_secs_f64() / 1e9;
        println!("upload {formats:?}: {rate:.1} GB/s of file ({time:?})");
    }
}
