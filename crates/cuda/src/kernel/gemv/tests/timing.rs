//! Times of the shapes that decoding has. Launches are queued behind a long one, so that none waits for this processor.

use super::*;

/// Measured: what reading alone reaches, bytes a second.
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
    form: GemvForm,
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

    fn shape(&self, t: Timed) -> GemvShape {
        GemvShape {
            form: t.form,
            columns: t.columns,
            outputs: t.outputs,
            pair: t.epilogue == 1,
            summed: 1,
            multiprocessors: self.card.device.multiprocessors,
        }
    }

    fn params(&self, t: Timed, start: usize) -> Vec<u8> {
        let shape = self.shape(t);
        let value = |i: usize| self.values.address().offset(i * 8 * 16384 * 4);
        let at = RowsAt {
            count: self.count.address(),
            index: Address::NULL,
        };
        let input = PrologueParams {
            x: value(0),
            weight: value(1),
            next_weight: value(2),
            a: value(3),
            sum: value(4),
            kind: t.prologue,
            eps: EPS,
            by: BY,
            next_eps: EPS,
        };
        let mut params = shape.params(at, input, self.pool.address().offset(start));
        params.part_0 = PartParams {
            out: self.outs.address(),
            first: 0,
            rows: t.outputs as u32,
        };
        params.up = self.pool.address().offset(start);
        params.epilogue = t.epilogue;
        params.other = value(3);
        params.other_columns = t.columns as u32;
        params.bytes()
    }

    fn bytes(&self, t: Timed) -> usize {
        let shape = self.shape(t);
        match t.form {
            GemvForm::Panel(_) => shape.strips() * t.form.strip_bytes(t.columns),
            _ => t.outputs * t.form.strip_bytes(t.columns),
        }
    }

    /// Microseconds of one launch of `grid`.
    fn time(&self, t: Timed, grid: Grid, module: &crate::device::Module) -> f64 {
        let bytes = self.bytes(t).next_multiple_of(256);
        let params: Vec<Vec<u8>> = (0..(POOL / bytes).min(200)).map(|i| self.params(t, i * bytes)).collect();
        let head = HEAD;
        let head_module = self.card.load(&specialization(head.form));
        let (head_grid, head_params) = (self.shape(head).grid(1), self.params(head, 0));
        let run = |module, grid, params: &[u8]| crate::launch::launch(module, grid, params).unwrap();
        self.card.device.bind().unwrap();
        (0..3).for_each(|i| run(module, grid, &params[i % params.len()]));
        (0..6).for_each(|_| run(&head_module, head_grid, &head_params));
        let start = self.card.device.moment().unwrap();
        let count = if bytes > 200 << 20 { 10 } else { 200 };
        (0..count).for_each(|i| run(module, grid, &params[i % params.len()]));
        let end = self.card.device.moment().unwrap();
        self.card.device.wait("timing").unwrap();
        start.until(&end).unwrap().as_secs_f64() * 1e6 / f64::from(count as u32)
    }

    fn print(&self, t: Timed, rows: usize, note: &str, grid: Grid, module: &crate::device::Module) {
        let us = self.time(t, grid, module);
        let rate = self.bytes(t) as f64 / us * 1e6;
        println!(
            "{:<22} {:>6} x {:<5} {:<4} rows {rows} {:>3} x {:>3} threads, {:>3} KB {note:<8} {us:>7.2} us {:>6.0} GB/s {:>3.0} %",
            t.name,
            t.outputs,
            t.columns,
            t.form.name(),
            grid.blocks.0,
            grid.threads,
            grid.shared_bytes >> 10,
            rate / 1e9,
            100.0 * rate / PEAK
        );
    }
}

const Q8: GemvForm = GemvForm::Panel(PanelFormat::Q8);
const Q4: GemvForm = GemvForm::Panel(PanelFormat::Q4);
const K4: GemvForm = GemvForm::Panel(PanelFormat::K4);
const K6: GemvForm = GemvForm::Panel(PanelFormat::K6);

const fn timed(name: &'static str, form: GemvForm, size: (usize, usize), prologue: u32, epilogue: u32) -> Timed {
    Timed {
        name,
        form,
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
    timed("E4B PLE gate", GemvForm::BF16, (256, 2560), 2, 2),
    timed("E4B PLE proj", GemvForm::BF16, (2560, 256), 0, 0),
    timed("E4B model proj", GemvForm::BF16, (10752, 2560), 0, 0),
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

#[test]
#[ignore = "needs a card"]
fn gemv_timing() {
    let bench = Bench::open();
    for t in CASES {
        let module = bench.card.load(&specialization(t.form));
        let shape = bench.shape(t);
        for rows in [1, 2, 4, 8] {
            bench.print(t, rows, "", shape.grid(rows), &module);
        }
    }
}

/// Other numbers of blocks, depths of the ring and orders of loads, to choose by.
#[test]
#[ignore = "needs a card"]
fn gemv_timing_of_choices() {
    let bench = Bench::open();
    for i in [0, 1, 2, 3, 4, 5, 6, 7, 8, 10, 11, 14, 16, 17] {
        let t = CASES[i];
        let shape = bench.shape(t);
        let granules = shape.strips() / shape.granule();
        let sms = shape.multiprocessors;
        let mut all = vec![sms / 2, sms * 3 / 5, sms, sms * 3 / 2, 2 * sms, 3 * sms];
        all.extend((1..200).map(|m| granules.div_ceil(m)).filter(|b| (sms / 2..3 * sms).contains(b)));
        all.sort_unstable();
        all.dedup();
        for (ring, first) in [(2, 1), (3, 1), (3, 0), (4, 1)] {
            let mut variant = specialization(t.form);
            variant.constants[1].1 = ring.to_string();
            variant.constants[2].1 = first.to_string();
            let module = bench.card.load(&variant);
            for &blocks in all.iter().filter(|&&b| b <= granules) {
                let mut grid = shape.grid_of(1, blocks);
                grid.shared_bytes = grid.shared_bytes + ring * shape.warps() * t.form.stage().1
                    - RING * shape.warps() * t.form.stage().1;
                let note = format!("ring {ring} first {first}");
                bench.print(t, 1, &note, grid, &module);
            }
        }
    }
}
