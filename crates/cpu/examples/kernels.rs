//! Speeds of single steps through the public traits, beside the bound they are measured against. Single kernels are measured
//! by `benches/gemm.rs`.
//!
//! `cargo run --release -p carat-cpu --example kernels -- [threads] [part of a name]`. Weights are random and larger than
//! the caches, so one row measures memory and many rows measure arithmetic.
#![expect(clippy::print_stdout, reason = "printing figures is its purpose")]

use std::{
    hint::black_box,
    sync::Arc,
    time::{Duration, Instant},
};

use carat_cpu::{CpuBackend, CpuConfig};
use carat_gguf::{
    Gguf, QuantType,
    writer::{Writer, write_tensor},
};
use carat_model::{
    backend::{
        Backend, Batch, Batching, CompileOptions, Executor, KvGroup, KvType, Outputs, PAGE_TOKENS,
        PageId, PerGroup, Run, token_feeds,
    },
    plan::{Builder, Plan, Rows, SlotSpec, Value},
    weights::{Weight, Weights},
};

/// Weight bytes of a one-row product: several times the caches of a desktop, and more than most servers have.
const STREAMED_BYTES: usize = 768 << 20;
const COLUMNS: usize = 2560;

fn main() {
    let mut arguments = std::env::args().skip(1);
    let threads = arguments.next().and_then(|n| n.parse().ok());
    let filter = arguments.next().unwrap_or_default();
    let backend = CpuBackend::new(&CpuConfig {
        threads,
        ..CpuConfig::default()
    });
    println!("{} threads, {:?}", backend.threads(), backend.isa());
    let wanted = |name: &str| name.contains(&filter);
    if wanted("read") {
        read_bound(backend.threads());
    }
    for quant in QuantType::all() {
        if wanted(&format!("stream/{quant}")) {
            stream(&backend, quant);
        }
    }
    for quant in [
        QuantType::Q4_0,
        QuantType::Q8_0,
        QuantType::Q4_K,
        QuantType::Q6_K,
        QuantType::BF16,
    ] {
        for rows in [2, 4, 8, 64, 512] {
            if wanted(&format!("multiply/{quant}/{rows}")) {
                multiply(&backend, quant, rows);
            }
        }
    }
    for (rows, depth) in [(1, 512), (1, 8192), (512, 0), (512, 4096)] {
        for head_dim in [256, 512] {
            for kv in [KvType::F16, KvType::Q8_0] {
                if wanted(&format!("attend/{kv}/{rows}/{depth}")) {
                    attend(&backend, kv, rows, depth, head_dim);
                }
            }
        }
    }
    if wanted("dispatch") {
        dispatch(&backend);
    }
}

/// The shortest of several runs, after one to warm up.
fn best(mut run: impl FnMut()) -> Duration {
    run();
    let mut best = Duration::MAX;
    let begin = Instant::now();
    while begin.elapsed() < Duration::from_secs(2) {
        let start = Instant::now();
        run();
        best = best.min(start.elapsed());
    }
    best
}

/// The speed of a plain loop over memory on the same threads.
fn read_bound(threads: usize) {
    let data = vec![3u64; STREAMED_BYTES / 8];
    let time = best(|| {
        std::thread::scope(|scope| {
            for part in data.chunks(data.len().div_ceil(threads)) {
                scope.spawn(|| black_box(part.iter().fold(0u64, |a, b| a.wrapping_add(*b))));
            }
        });
    });
    println!("read       {:6.2} GB/s", gigabytes(STREAMED_BYTES, time));
}

fn gigabytes(bytes: usize, time: Duration) -> f64 {
    bytes as f64 / time.as_secs_f64() / 1e9
}

/// A file in memory with random tensors, and a plan over it.
struct Bench {
    weights: Arc<Weights>,
    plan: Plan,
}

impl Bench {
    fn new(
        tensors: &[(&str, &[usize], QuantType)],
        build: impl FnOnce(&Builder<'_>, &dyn Fn(&str) -> Weight) -> Value,
    ) -> Bench {
        let (mut writer, mut data) = (Writer::default(), Vec::new());
        for (name, shape, quant) in tensors {
            let bytes = writer.tensor(name, shape, *quant);
            // One random megabyte again and again: filling a gigabyte would take longer than the measurement.
            let mut blocks =
                vec![0; bytes.min((1 << 20) / quant.block_bytes() * quant.block_bytes())];
            carat_gguf::quant::random_blocks(*quant, 1, 1.0, &mut blocks);
            let whole: Vec<u8> = blocks.iter().copied().cycle().take(bytes).collect();
            write_tensor(&mut data, &whole).expect("memory takes it");
        }
        let mut file = Vec::new();
        writer.write_head(&mut file).expect("memory takes it");
        file.extend_from_slice(&data);
        let file =
            Gguf::from_bytes("bench", file).expect("the writer writes what the reader reads");
        let weights = Weights::of_file(Arc::new(file));
        let builder = Builder::new(&weights);
        let last = build(&builder, &|name| weights.find(name).expect("written above"));
        let sampled = builder.select_sampled("last", last);
        let plan = builder.finish(sampled, sampled);
        Bench {
            weights: Arc::new(weights),
            plan,
        }
    }

    fn compile(
        &self,
        backend: &CpuBackend,
        rows: usize,
        positions: usize,
        kv: KvType,
    ) -> Box<dyn Executor> {
        let pages = positions.div_ceil(PAGE_TOKENS);
        let options = CompileOptions {
            pages: PerGroup {
                full: pages,
                sliding: pages,
            },
            chunk_pages: 0,
            host_pages: PerGroup::default(),
            kv: kv.into(),
            max_rows: rows,
            max_sampled: 1,
            probe: false,
            batching: Batching::Fast,
        };
        backend
            .compile(&self.plan, Arc::clone(&self.weights), &options)
            .expect("it fits")
    }
}

/// One batch of `rows` that samples nothing, so that only the measured step is large.
fn run(executor: &mut dyn Executor, rows: usize, position: usize) {
    let tokens: Vec<u32> = (0..rows as u32).map(|t| t % 16).collect();
    let pages: Vec<PageId> = (0..(position + rows).div_ceil(PAGE_TOKENS) as u32)
        .map(PageId)
        .collect();
    let batch = Batch {
        feeds: &token_feeds(&tokens),
        runs: &[Run {
            rows: 0..rows,
            position,
            pages: PerGroup {
                full: &pages,
                sliding: &pages,
            },
            sampled: 0,
            visible_end: None,
            table: None,
        }],
    };
    let ticket = executor.submit(&batch).expect("runs");
    executor
        .collect(ticket, &mut Outputs::default())
        .expect("collects");
}

fn linear(quant: QuantType, outputs: usize) -> Bench {
    Bench::new(
        &[
            ("table", &[COLUMNS, 16], QuantType::F32),
            ("w", &[COLUMNS, outputs], quant),
        ],
        |p, w| p.linear("w", p.embed("table", w("table"), 1.0, Rows::All), w("w")),
    )
}

/// One row: bytes of weights per second.
fn stream(backend: &CpuBackend, quant: QuantType) {
    let outputs = STREAMED_BYTES / quant.row_bytes(COLUMNS);
    let bench = linear(quant, outputs);
    let mut executor = bench.compile(backend, 1, 1, KvType::F16);
    let time = best(|| run(executor.as_mut(), 1, 0));
    let bytes = outputs * quant.row_bytes(COLUMNS);
    println!("stream/{quant:<8} {:6.2} GB/s", gigabytes(bytes, time));
}

/// Many rows: multiplications and additions per second.
fn multiply(backend: &CpuBackend, quant: QuantType, rows: usize) {
    let outputs = 10240;
    let bench = linear(quant, outputs);
    let mut executor = bench.compile(backend, rows, rows, KvType::F16);
    let time = best(|| run(executor.as_mut(), rows, 0));
    let operations = 2.0 * (rows * outputs * COLUMNS) as f64;
    println!(
        "multiply/{quant}/{rows:<4} {:8.2} ms  {:7.1} GOPS",
        time.as_secs_f64() * 1e3,
        operations / time.as_secs_f64() / 1e9
    );
}

/// Attention of E4B's shape: 8 query heads on 2 KV heads.
fn attend(backend: &CpuBackend, kv: KvType, rows: usize, depth: usize, head_dim: usize) {
    let bench = Bench::new(
        &[
            ("q", &[8 * head_dim, 16], QuantType::F32),
            ("k", &[2 * head_dim, 16], QuantType::F32),
            ("v", &[2 * head_dim, 16], QuantType::F32),
        ],
        |p, w| {
            let slot = p.slot(SlotSpec {
                group: KvGroup::Full,
                kv_heads: 2,
                head_dim,
                window: None,
                borrowed: None,
            });
            let embed = |name| p.embed(name, w(name), 0.05, Rows::All);
            p.store_kv(embed("k"), embed("v"), slot);
            p.attend(embed("q"), slot)
        },
    );
    let mut executor = bench.compile(backend, rows, depth + rows, kv);
    let time = best(|| run(executor.as_mut(), rows, depth));
    let pairs: usize = (depth..depth + rows).map(|position| position + 1).sum();
    println!(
        "attend/{kv}/{rows}/{depth}/{head_dim} {:9.3} ms  {:6.1} GFLOPS",
        time.as_secs_f64() * 1e3,
        (4 * pairs * 8 * head_dim) as f64 / time.as_secs_f64() / 1e9
    );
}

/// Many tiny products: what starting and ending a shared step costs.
fn dispatch(backend: &CpuBackend) {
    let steps = 1000;
    let bench = Bench::new(
        &[
            ("table", &[64, 16], QuantType::F32),
            ("w", &[64, 64], QuantType::Q8_0),
        ],
        |p, w| {
            let first = p.embed("table", w("table"), 1.0, Rows::All);
            (0..steps).fold(first, |x, i| p.linear(&format!("w{i}"), x, w("w")))
        },
    );
    let mut executor = bench.compile(backend, 1, 1, KvType::F16);
    let time = best(|| run(executor.as_mut(), 1, 0));
    println!(
        "dispatch   {:6.2} us per step of 8 items",
        time.as_secs_f64() * 1e6 / f64::from(steps)
    );
}
