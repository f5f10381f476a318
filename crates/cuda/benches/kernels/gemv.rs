//! GEMV in the shapes that decoding has. Launches are queued behind a long one, so that none waits for this processor.

use crate::{
    config::Tier,
    device::{Address, Buffer, Grid, Module, launch},
    kernel::{
        GemvShape, GemvWeights, RowsAt, Specialization,
        fragment::FragmentFormat,
        linear::gemv::{
            GemvParams, GemvPrologueParams, INPUTS, OutputRowsParams, specialization,
            tests::{BY, EPS, facts},
        },
        params::Params,
    },
    testing::{Card, normals},
};

/// Bytes per second that reading alone reaches, measured.
const PEAK: f64 = 4.46e12;
const POOL: usize = 900 << 20;

struct Bench {
    card: Card,
    /// Random bytes that serve as every matrix, more than caches hold.
    pool: Buffer,
    values: Buffer,
    outs: Buffer,
    count: Buffer,
}

#[derive(Clone, Copy)]
struct Timed {
    name: &'static str,
    weights: GemvWeights,
    outputs: usize,
    columns: usize,
    prologue: u32,
    epilogue: u32,
}

impl Bench {
    fn open() -> Bench {
        let card = Card::open(Tier::Best);
        let pool = card.device.allocate("test", POOL).unwrap();
        let chunk = 32 << 20;
        let mut host = card.device.allocate_host("test", chunk).unwrap();
        let mut state = 0x9e37_79b9_7f4a_7c15u64;
        for word in host.bytes_mut().chunks_exact_mut(8) {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            word.copy_from_slice(&state.to_ne_bytes());
        }
        for start in (0..POOL).step_by(chunk) {
            let bytes = chunk.min(POOL - start);
            card.device.copy_in(&host, &pool, start, bytes).unwrap();
        }
        card.device.wait("filling").unwrap();
        Bench {
            values: card.upload(&normals(1, 5 * 8 * 16384)),
            outs: card.device.allocate("test", 4 * 8 * 262_144).unwrap(),
            count: card.upload(&[8u32]),
            card,
            pool,
        }
    }

    fn compile(&self) {
        let mut all: Vec<Specialization> = CASES.iter().map(|t| self.specialization(*t)).collect();
        all.sort_by_key(ToString::to_string);
        all.dedup();
        self.card.compile(&all);
    }

    fn shape(&self, t: Timed) -> GemvShape {
        GemvShape {
            weights: t.weights,
            columns: t.columns,
            outputs: t.outputs,
            pair: t.epilogue == 1,
            codes: false,
            top_k: None,
            ready: false,
            normed: t.prologue > 0,
            card: facts(&self.card),
        }
    }

    fn specialization(&self, t: Timed) -> Specialization {
        let input = INPUTS[t.prologue.min(1) as usize];
        self.shape(t).specialization(input)
    }

    fn params(&self, t: Timed, start: usize, blocks: usize) -> Vec<u8> {
        let shape = self.shape(t);
        let mut params = self.plain_params(t, shape);
        params.w = self.pool.address().offset(start);
        params.up = params.w;
        params.force_blocks(shape, blocks);
        params.bytes()
    }

    fn plain_params(&self, t: Timed, shape: GemvShape) -> GemvParams {
        let value = |i: usize| self.values.address().offset(i * 8 * 16384 * 4);
        let at = RowsAt {
            count: self.count.address(),
            index: Address::NULL,
        };
        let input = GemvPrologueParams {
            x: value(0),
            weight: value(1),
            following_weight: value(2),
            residual: value(3),
            sum: value(4),
            kind: t.prologue,
            per_column: 1.0 / t.columns as f32,
            eps: EPS,
            scale: BY,
            following_eps: EPS,
            reserved: 0,
        };
        let mut params = shape.params(at, input, self.pool.address());
        params.part_0 = OutputRowsParams {
            out: self.outs.address(),
            first: 0,
            rows: t.outputs as u32,
        };
        params.epilogue = t.epilogue;
        params.other = value(3);
        params.other_columns = t.columns as u32;
        params
    }

    fn bytes(&self, t: Timed) -> usize {
        let shape = self.shape(t);
        match t.weights {
            GemvWeights::Fragments(_) => shape.m_tiles() * t.weights.m_tile_bytes(t.columns),
            _ => t.outputs * t.weights.m_tile_bytes(t.columns),
        }
    }

    /// Microseconds of one launch of `grid`.
    fn time(&self, t: Timed, grid: Grid, module: &Module) -> f64 {
        let bytes = self.bytes(t).next_multiple_of(256);
        let params: Vec<Vec<u8>> = (0..(POOL / bytes).min(200))
            .map(|i| self.params(t, i * bytes, grid.blocks.0))
            .collect();
        let count = if bytes > 200 << 20 { 10 } else { 200 };
        self.queued(module, grid, &params, count)
    }

    /// Microseconds of one of `count` launches in a row, behind others that keep the card busy meanwhile.
    fn queued(&self, module: &Module, grid: Grid, params: &[Vec<u8>], count: usize) -> f64 {
        let head = HEAD;
        let head_module = self.card.load(&self.specialization(head));
        let head_grid = self.shape(head).grid(1);
        let head_params = self.params(head, 0, head_grid.blocks.0);
        let run = |module, grid, params: &[u8]| launch(module, grid, params).unwrap();
        self.card.device.bind().unwrap();
        (0..3).for_each(|i| run(module, grid, &params[i % params.len()]));
        (0..8).for_each(|_| run(&head_module, head_grid, &head_params));
        let start = self.card.device.moment().unwrap();
        (0..count).for_each(|i| run(module, grid, &params[i % params.len()]));
        let end = self.card.device.moment().unwrap();
        self.card.device.wait("timing").unwrap();
        start.until(&end).unwrap().as_secs_f64() * 1e6 / count as f64
    }

    fn print(&self, t: Timed, rows: usize, note: &str, grid: Grid, module: &Module) {
        let us = self.time(t, grid, module);
        let rate = self.bytes(t) as f64 / us * 1e6;
        println!(
            "{:<22} {:>6} x {:<5} {:<4} rows {rows} {:>3} x {:>3} threads, {:>3} KB {note:<8} {us:>7.2} us {:>6.0} GB/s {:>3.0} %",
            t.name,
            t.outputs,
            t.columns,
            t.weights.name(),
            grid.blocks.0,
            grid.threads,
            grid.shared_bytes >> 10,
            rate / 1e9,
            100.0 * rate / PEAK
        );
    }
}

const Q8: GemvWeights = GemvWeights::Fragments(FragmentFormat::Q8);
const Q4: GemvWeights = GemvWeights::Fragments(FragmentFormat::Q4);
const K4: GemvWeights = GemvWeights::Fragments(FragmentFormat::K4);
const K6: GemvWeights = GemvWeights::Fragments(FragmentFormat::K6);

const fn timed(
    name: &'static str,
    weights: GemvWeights,
    size: (usize, usize),
    prologue: u32,
    epilogue: u32,
) -> Timed {
    Timed {
        name,
        weights,
        outputs: size.0,
        columns: size.1,
        prologue,
        epilogue,
    }
}

const HEAD: Timed = timed("E4B head", Q8, (262_144, 2560), 1, 0);
const CASES: [Timed; 19] = [
    timed("E4B q|k|v sliding", Q8, (3072, 2560), 3, 0),
    timed("E4B q|k|v global", Q8, (6144, 2560), 3, 0),
    timed("E4B o sliding", Q8, (2560, 2048), 0, 0),
    timed("E4B o global", Q8, (2560, 4096), 0, 0),
    timed("E4B gate|up", Q8, (10240, 2560), 3, 1),
    timed("E4B down", Q8, (2560, 10240), 0, 0),
    timed("E4B PLE gate", GemvWeights::BF16, (256, 2560), 2, 2),
    timed("E4B PLE proj", GemvWeights::BF16, (2560, 256), 0, 0),
    timed("E4B model proj", GemvWeights::BF16, (10752, 2560), 0, 0),
    HEAD,
    timed("E4B Q4 gate|up", Q4, (10240, 2560), 3, 1),
    timed("E4B Q4 down", Q4, (2560, 10240), 0, 0),
    timed("E4B K4 gate|up", K4, (10240, 2560), 3, 1),
    timed("E4B K6 head", K6, (262_144, 2560), 1, 0),
    timed("12B q|k|v", Q4, (8192, 3840), 3, 0),
    timed("12B o", Q4, (3840, 4096), 0, 0),
    timed("12B gate|up", Q4, (15360, 3840), 3, 1),
    timed("12B down", Q4, (3840, 15360), 0, 0),
    timed("12B K6 head", K6, (262_144, 3840), 1, 0),
];

pub(crate) fn shapes() {
    let bench = Bench::open();
    bench.compile();
    for t in CASES {
        let module = bench.card.load(&bench.specialization(t));
        let shape = bench.shape(t);
        for rows in [1, 2, 4, 8] {
            bench.print(t, rows, "", shape.grid(rows), &module);
        }
    }
}

/// Other numbers of blocks, to choose by.
pub(crate) fn blocks() {
    let bench = Bench::open();
    bench.compile();
    for t in [0, 1, 2, 3, 4, 5, 7, 8, 10, 11, 16, 17].map(|i| CASES[i]) {
        let module = bench.card.load(&bench.specialization(t));
        let shape = bench.shape(t);
        let granules = shape.m_tiles() / shape.granule();
        let sms = shape.card.multiprocessors;
        let mut all: Vec<usize> = (1..200).map(|m| granules.div_ceil(m)).collect();
        all.retain(|b| (sms / 2..3 * sms).contains(b));
        all.dedup();
        for blocks in all {
            bench.print(t, 1, "forced", shape.grid_of(1, blocks), &module);
        }
    }
}

/// 26B-A4B: 8 of 128 experts per row.
pub(crate) fn experts() {
    let bench = Bench::open();
    let (experts, top_k, dim, width) = (128, 8, 2816, 704);
    for weights in [Q4, Q8] {
        let module = bench.card.load(&specialization(
            weights,
            "plain",
            facts(&bench.card).clusters.is_some(),
            false,
        ));
        for rows in [1, 2, 4, 8] {
            for (name, columns, outputs, pair) in
                [("gate|up", dim, width, true), ("down", width, dim, false)]
            {
                let shape = GemvShape {
                    weights,
                    columns,
                    outputs,
                    pair,
                    codes: false,
                    top_k: Some(top_k),
                    ready: false,
                    normed: true,
                    card: facts(&bench.card),
                };
                let matrix_bytes = shape.m_tiles() * weights.m_tile_bytes(columns);
                let bytes = rows * top_k * matrix_bytes;
                let routes: Vec<Buffer> = (0..16)
                    .map(|n| {
                        let expert = |k: usize| ((n * 37 + k * 29) % experts) as f32;
                        let route = (0..rows).flat_map(|r| {
                            let chosen = (0..top_k).map(move |k| expert(r * top_k + k));
                            chosen.chain([0.1; 8])
                        });
                        bench.card.upload(&route.collect::<Vec<f32>>())
                    })
                    .collect();
                let calls: Vec<Vec<u8>> = routes
                    .iter()
                    .map(|route| {
                        let t = timed(name, weights, (outputs, columns), 0, u32::from(shape.pair));
                        let plain = bench.plain_params(t, shape);
                        let mut params = plain;
                        params.route = route.address();
                        params.matrix_bytes = matrix_bytes as u64;
                        params.top_k = top_k as u32;
                        params.input_per_expert = u32::from(!pair);
                        params.bytes()
                    })
                    .collect();
                let grid = shape.routed_grid(rows);
                let us = bench.queued(&module, grid, &calls, 100);
                println!(
                    "experts {name:<8} {:<4} rows {rows} {:>3} x {:<3} blocks {us:>7.2} us {:>6.0} GB/s",
                    weights.name(),
                    grid.blocks.0,
                    grid.blocks.1,
                    bytes as f64 / us / 1e3
                );
            }
        }
    }
}
