//! Products by cuBLASLt, in TFLOPS.

use crate::{
    config::Tier,
    device::{
        Address,
        cublaslt::{
            Gemm, Operands, Out,
            tests::{WORKSPACE, open, shape},
        },
    },
    testing::{Card, f16_bits, normals},
};

pub(crate) fn all() {
    /// More than four times L2, and more than the largest matrix.
    const POOL: usize = 300 << 20;
    const MAX_ROWS: usize = 4096;
    let card = Card::open(Tier::Best);
    let library = open(&card);
    let allocate = |bytes| card.device.allocate("timing", bytes).expect("memory");
    let workspace = allocate(WORKSPACE);
    let out = allocate(MAX_ROWS * 30720 * 4);
    // Random f16 that repeat after a while: as good as others, and quicker to make.
    let noise = f16_bits(&normals(3, 1 << 18));
    let words = noise.chunks_exact(4).map(|four| {
        let bits = four.iter().rev().map(|bits| u64::from(*bits));
        bits.fold(0, |word, bits| word << 16 | bits)
    });
    let words: Vec<u64> = words.collect();
    let words: Vec<u64> = words.iter().cycle().take(POOL / 8).copied().collect();
    let pool = card.upload(&words);
    let sizes: [(usize, usize); 11] = [
        (3072, 2560),
        (2560, 2048),
        (20480, 2560),
        (2560, 10240),
        (256, 2560),
        (2560, 256),
        (10752, 2560),
        (8192, 3840),
        (3840, 4096),
        (30720, 3840),
        (3840, 15360),
    ];
    for (outputs, columns) in sizes {
        let bytes = outputs * columns * 2;
        let matrices = (0..POOL / bytes).map(|i| pool.address().offset(i * bytes));
        let addresses: Vec<Address> = matrices.collect();
        for rows in [16, 64, 128, 512, 1024, 2048, 4096] {
            let operands = Operands {
                weights: addresses[0],
                x: pool.address(),
                out: out.address(),
                workspace: workspace.address(),
            };
            let shape = shape(rows, outputs, columns, outputs);
            // Gate and up are wanted in f16.
            let kind = if outputs >= 20480 { Out::F16 } else { Out::F32 };
            let gemm = Gemm::new(&library, shape, kind, 1.0, WORKSPACE).expect("an algorithm");
            let time = card.time_captured(50, |i| {
                let weights = addresses[i % addresses.len()];
                let operands = Operands {
                    weights,
                    ..operands
                };
                gemm.launch(operands).expect("runs");
            });
            let flops = 2.0 * rows as f64 * outputs as f64 * columns as f64;
            let (us, rate) = (time.as_secs_f64() * 1e6, flops / time.as_secs_f64() / 1e12);
            println!(
                "gemm {kind:?} {outputs:>5} x {columns:>5}, {rows:>4} rows: {us:>7.1} us {rate:>5.0} TFLOPS"
            );
        }
    }
}
