//! On a card or the emulator: against plain attention in f64, and prompts in pieces against whole ones.

use half::f16;

use super::*;
use crate::{
    config::Tier,
    device::{Buffer, Module},
    kernel::attention::host_pages::{HostPages, names, rounded, slot_at},
    testing::{Card, normals, relative_error},
};

const PAGE: usize = 32;
/// Poison that no kernel writes.
const UNTOUCHED: u8 = 0xa5;

/// Rows of one sequence: `rows` behind `prefix` stored positions, the last `taken` of which are asked for.
#[derive(Clone, Copy)]
pub(crate) struct TestRun {
    /// Runs of one seed are pieces of the same sequence.
    seed: u64,
    prefix: usize,
    rows: usize,
    taken: usize,
    /// Positions that see each other both ways in sliding-window layers.
    span: (usize, usize),
}

pub(crate) fn whole(seed: u64, prefix: usize, rows: usize) -> TestRun {
    TestRun {
        seed,
        prefix,
        rows,
        taken: rows,
        span: (0, 0),
    }
}

pub(crate) fn heads(
    heads: usize,
    kv_heads: usize,
    head_dim: usize,
    window: usize,
) -> AttentionShape {
    AttentionShape {
        heads,
        kv_heads,
        head_dim,
        window: (window > 0).then_some(window),
        kv: KeysAndValues {
            kv: KvType::F16,
            tied: false,
        },
    }
}

impl TestRun {
    fn end(&self) -> usize {
        self.prefix + self.rows
    }

    fn positions(&self) -> std::ops::Range<usize> {
        self.end() - self.taken..self.end()
    }

    /// Behind the last position that a row sees in sliding-window layers.
    fn sliding_end(&self, position: usize) -> usize {
        if (self.span.0..self.span.1).contains(&position) {
            self.span.1
        } else {
            position + 1
        }
    }
}

/// The same with keys and values in Q8_0.
pub(crate) fn in_q8_0(heads: AttentionShape) -> AttentionShape {
    AttentionShape {
        kv: KeysAndValues {
            kv: KvType::Q8_0,
            tied: false,
        },
        ..heads
    }
}

/// The same with keys in f16, as they are made from values, and values in Q8_0.
fn tied_q8_0(heads: AttentionShape) -> AttentionShape {
    AttentionShape {
        kv: KeysAndValues {
            kv: KvType::Q8_0,
            tied: true,
        },
        ..heads
    }
}

impl AttentionShape {
    fn key_type(&self) -> KvType {
        if self.kv.tied {
            KvType::F16
        } else {
            self.kv.kv
        }
    }
}

fn random_f16(seed: u64, count: usize, scale: f32) -> Vec<u16> {
    let bits = |x: f32| f16::from_f32(x * scale).to_bits();
    normals(seed, count).into_iter().map(bits).collect()
}

fn number(bits: u16) -> f64 {
    f16::from_bits(bits).to_f64()
}

/// The values of `length` positions, from those of fewer.
fn repeated<T: Copy>(of: &[T], positions: usize, length: usize) -> Vec<T> {
    let count = length * (of.len() / positions);
    of.iter().copied().cycle().take(count).collect()
}

/// Queries, keys and values of a sequence: `[position, head, element]`. Keys and values are numbers of the KV type.
pub(crate) struct Sequence {
    q: Vec<u16>,
    k: Vec<f32>,
    v: Vec<f32>,
}

impl Sequence {
    fn new(heads: &AttentionShape, seed: u64, length: usize) -> Sequence {
        let (queries, cells) = (
            heads.heads * heads.head_dim,
            heads.kv_heads * heads.head_dim,
        );
        // Scores as trained models have them: neither flat nor an arg max.
        let scale = 2.0 / (heads.head_dim as f32).sqrt();
        let cached = |seed: u64, kv: KvType| -> Vec<f32> {
            let exact: Vec<f64> = normals(seed, length * cells)
                .iter()
                .map(|&x| f64::from(x))
                .collect();
            let cells = exact.chunks_exact(heads.head_dim);
            cells
                .flat_map(|cell| rounded(kv, cell))
                .map(|x| x as f32)
                .collect()
        };
        Sequence {
            q: random_f16(3 * seed, length * queries, scale),
            k: cached(3 * seed + 1, heads.key_type()),
            v: cached(3 * seed + 2, heads.kv.kv),
        }
    }

    /// For timings: as large, from few numbers.
    #[allow(dead_code, reason = "called by the timing programs")]
    pub(crate) fn repeating(heads: &AttentionShape, length: usize) -> Sequence {
        const FEW: usize = 1009;
        let Sequence { q, k, v } = Sequence::new(heads, 1, FEW);
        Sequence {
            q: repeated(&q, FEW, length),
            k: repeated(&k, FEW, length),
            v: repeated(&v, FEW, length),
        }
    }

    fn attend(&self, heads: &AttentionShape, run: &TestRun, position: usize) -> Vec<f32> {
        let d = heads.head_dim;
        let end = heads
            .window
            .map_or(position + 1, |_| run.sliding_end(position));
        let first = heads.window.map_or(0, |w| (position + 1).saturating_sub(w));
        let mut out = Vec::new();
        for head in 0..heads.heads {
            let kv_head = head / (heads.heads / heads.kv_heads);
            let q = &self.q[(position * heads.heads + head) * d..][..d];
            let q: Vec<f64> = q.iter().map(|&x| number(x)).collect();
            let cell = |of: &[f32], at: usize, i: usize| {
                f64::from(of[(at * heads.kv_heads + kv_head) * d + i])
            };
            let score = |at| (0..d).map(|i| q[i] * cell(&self.k, at, i)).sum::<f64>();
            let scores: Vec<f64> = (first..end).map(score).collect();
            let most = scores.iter().copied().fold(f64::MIN, f64::max);
            let weights: Vec<f64> = scores.iter().map(|s| (s - most).exp()).collect();
            let total: f64 = weights.iter().sum();
            let mut sum = vec![0.0; d];
            for (at, weight) in (first..).zip(&weights) {
                for (i, sum) in sum.iter_mut().enumerate() {
                    *sum += weight * cell(&self.v, at, i);
                }
            }
            out.extend(sum.iter().map(|x| (x / total) as f32));
        }
        out
    }
}

/// A batch on the card.
pub(crate) struct OnCard {
    heads: AttentionShape,
    rows: usize,
    q: Buffer,
    keys: Buffer,
    values: Buffer,
    /// Counts, row references, tables.
    words: Vec<Buffer>,
}

impl OnCard {
    pub(crate) fn new(
        card: &Card,
        heads: AttentionShape,
        runs: &[TestRun],
        sequences: &[&Sequence],
    ) -> OnCard {
        let d = heads.head_dim;
        let (mut index, mut position, mut run_of) = (vec![], vec![], vec![]);
        let mut ends = vec![];
        let (mut first, mut base, mut table) = (vec![0u32], vec![], vec![]);
        let mut q = Vec::new();
        // Pages stand in no order: this many, and the ones in use go through them in steps.
        let pages: usize = runs.iter().map(|r| r.end().div_ceil(PAGE)).sum::<usize>() | 1;
        let step = (pages / 2).max(1);
        // Cells that were never stored are no numbers.
        let poisoned = |kv| HostPages::poisoned(kv, pages, heads.kv_heads, d);
        let (mut keys, mut values) = (poisoned(heads.key_type()), poisoned(heads.kv.kv));
        for (r, (run, sequence)) in runs.iter().zip(sequences).enumerate() {
            for i in 0..run.rows {
                if i >= run.rows - run.taken {
                    index.push(position.len() as u32);
                    let width = heads.heads * d;
                    q.extend_from_slice(&sequence.q[(run.prefix + i) * width..][..width]);
                }
                position.push((run.prefix + i) as u32);
                ends.push(run.sliding_end(run.prefix + i) as u32);
                run_of.push(r as u32);
            }
            first.push(index.len() as u32);
            let behind = heads
                .window
                .map_or(0, |w| (run.prefix + 1).saturating_sub(w))
                / PAGE;
            base.push(table.len() as i32 - behind as i32);
            for entry in behind..run.end().div_ceil(PAGE) {
                let page = (table.len() * step + 1) % pages;
                table.push(page as u32);
                for at in entry * PAGE..run.end().min((entry + 1) * PAGE) {
                    for head in 0..heads.kv_heads {
                        let from = (at * heads.kv_heads + head) * d;
                        let to = (page, head, at % PAGE);
                        keys.put(to, &sequence.k[from..from + d]);
                        values.put(to, &sequence.v[from..from + d]);
                    }
                }
            }
        }
        let words = vec![
            card.upload(&[index.len() as u32]),
            card.upload(&index),
            card.upload(&position),
            card.upload(&run_of),
            card.upload(&[runs.len() as u32]),
            card.upload(&first),
            card.upload(&base),
            card.upload(&names(&table)),
            card.upload(&ends),
        ];
        OnCard {
            heads,
            rows: index.len(),
            q: card.upload(&q),
            keys: card.upload(&keys.bytes),
            values: card.upload(&values.bytes),
            words,
        }
    }

    pub(crate) fn params(&self, block: BlockTiling, [out, scales, sums]: [Address; 3]) -> Vec<u8> {
        let word = |i: usize| self.words[i].address();
        block.params(FlashPrefillParams {
            rows: RowsAt {
                count: word(0),
                index: word(1),
            },
            row_refs: RowRefsAt {
                position: word(2),
                run: word(3),
                sliding_end: word(8),
            },
            runs: RunsAt {
                count: word(4),
                first: word(5),
            },
            slot: slot_at(
                (self.keys.address(), self.values.address()),
                crate::kernel::TablesAt {
                    base: word(6),
                    pages: word(7),
                },
                (self.heads.kv_heads, self.heads.head_dim),
            ),
            q: self.q.address(),
            out,
            scales,
            sums,
            heads: self.heads.heads as u32,
            window: self.heads.window.unwrap_or(0) as u32,
        })
    }
}

/// The blocks that take such heads.
pub(crate) fn blocks(heads: AttentionShape) -> Vec<BlockTiling> {
    let AttentionShape { head_dim, kv, .. } = heads;
    let portable = BlockTiling::Portable(PortableTiling::of(head_dim));
    let hopper = Sm90Tiling::of(head_dim).map(BlockTiling::Hopper);
    let multicast = multicast::takes(head_dim, kv).then_some(BlockTiling::Multicast);
    let all = [Some(portable), hopper, multicast];
    all.into_iter().flatten().collect()
}

pub(crate) fn kernel(heads: AttentionShape, block: BlockTiling, format: &str) -> FlashPrefill {
    let operand = Operand::Scratch(0);
    let out = match format {
        "OUT_F32" => AttentionOut::F32(operand),
        "OUT_F16" => AttentionOut::F16(operand),
        _ => AttentionOut::Int8(Int8Operands {
            codes: operand,
            scales: operand,
            sums: operand,
        }),
    };
    FlashPrefill {
        rows: Rows::All,
        q: operand,
        slot: KvSlot(0),
        heads,
        block,
        out,
    }
}

pub(crate) fn load(card: &Card, kernel: &FlashPrefill) -> Module {
    card.load(&kernel.specialization())
}

/// Runs the kernel with some rows to spare and gives back what it wrote, as floats; checks that it wrote nothing else.
fn attend(card: &Card, kernel: &FlashPrefill, module: &Module, batch: &OnCard) -> Vec<f32> {
    let columns = batch.heads.heads * batch.heads.head_dim;
    let bucket = batch.rows + 5;
    let value_bytes = match kernel.out {
        AttentionOut::F32(_) => 4,
        AttentionOut::F16(_) => 2,
        AttentionOut::Int8(_) => 1,
    };
    let poison = |bytes: usize| card.upload(&vec![UNTOUCHED; bytes]);
    let outs = [
        poison(bucket * columns * value_bytes),
        poison(bucket * columns / 8),
        poison(bucket * columns / 8),
    ];
    let params = batch.params(kernel.block, [0, 1, 2].map(|i| outs[i].address()));
    card.run(module, kernel.grid(bucket), &params);
    let read = |buffer: &Buffer, row_bytes: usize| {
        let mut bytes = card.download::<u8>(buffer, bucket * row_bytes);
        let rest = bytes.split_off(batch.rows * row_bytes);
        assert!(rest.iter().all(|&b| b == UNTOUCHED), "wrote past its rows");
        bytes
    };
    let bytes = read(&outs[0], columns * value_bytes);
    let floats = |bytes: &[u8]| -> Vec<f32> {
        let (words, _) = bytes.as_chunks::<4>();
        words.iter().map(|b| f32::from_ne_bytes(*b)).collect()
    };
    match kernel.out {
        AttentionOut::F32(_) => floats(&bytes),
        AttentionOut::F16(_) => {
            let (words, _) = bytes.as_chunks::<2>();
            let value = |b: &[u8; 2]| f16::from_bits(u16::from_ne_bytes(*b)).to_f32();
            words.iter().map(value).collect()
        }
        AttentionOut::Int8(_) => {
            let scales = floats(&read(&outs[1], columns / 8));
            let sums = floats(&read(&outs[2], columns / 8));
            for (block, (&scale, &sum)) in bytes.chunks_exact(32).zip(scales.iter().zip(&sums)) {
                let codes = block.iter().map(|&c| i32::from(c.cast_signed()));
                assert_eq!(
                    codes.clone().map(i32::abs).max(),
                    Some(127),
                    "a scale too large"
                );
                assert_eq!(sum, scale * codes.sum::<i32>() as f32);
            }
            let value = |(i, &code): (usize, &u8)| f32::from(code.cast_signed()) * scales[i / 32];
            bytes.iter().enumerate().map(value).collect()
        }
    }
}

fn expected(heads: &AttentionShape, runs: &[TestRun], sequences: &[&Sequence]) -> Vec<f32> {
    let pairs = runs.iter().zip(sequences);
    let rows = pairs.flat_map(|(run, sequence)| run.positions().map(move |p| (run, sequence, p)));
    rows.flat_map(|(run, sequence, p)| sequence.attend(heads, run, p))
        .collect()
}

/// With keys and values of every type.
fn check(card: &Card, heads: AttentionShape, runs: &[TestRun], formats: &[&str]) {
    check_type(card, heads, runs, formats);
    if heads.head_dim.is_multiple_of(32) || heads.head_dim == 16 {
        check_type(card, in_q8_0(heads), runs, formats);
        if heads.window.is_none() {
            check_type(card, tied_q8_0(heads), runs, formats);
        }
    }
}

fn check_type(card: &Card, heads: AttentionShape, runs: &[TestRun], formats: &[&str]) {
    let sequences: Vec<Sequence> = (runs.iter())
        .map(|run| Sequence::new(&heads, run.seed, run.end()))
        .collect();
    let sequences: Vec<&Sequence> = sequences.iter().collect();
    let batch = OnCard::new(card, heads, runs, &sequences);
    let expected = expected(&heads, runs, &sequences);
    for block in blocks(heads) {
        for format in formats {
            let kernel = kernel(heads, block, format);
            let found = attend(card, &kernel, &load(card, &kernel), &batch);
            let error = relative_error(&found, &expected);
            let bound = if *format == "OUT_INT8" { 8e-3 } else { 1e-3 };
            assert!(error < bound, "{heads:?} {block:?} {format}: {error}");
        }
    }
}

#[test]
fn shapes_fit_their_cards_and_others_are_refused() {
    for head_dim in (16..=512).step_by(16) {
        assert!(PortableTiling::of(head_dim).shared_bytes() <= PORTABLE_BYTES);
    }
    let (slot, operand) = (KvSlot(0), Operand::Scratch(0));
    let taken = |of: AttentionShape, out: AttentionOut| {
        FlashPrefill::new(Rows::All, (operand, out), slot, of, false).is_some()
    };
    let q8 = AttentionOut::Int8(Int8Operands {
        codes: operand,
        scales: operand,
        sums: operand,
    });
    assert!(taken(heads(8, 2, 256, 512), q8));
    assert!(taken(heads(16, 1, 512, 0), AttentionOut::F16(operand)));
    assert!(taken(heads(4, 2, 16, 8), q8));
    assert!(!taken(heads(4, 4, 16, 8), q8), "blocks across KV heads");
    assert!(taken(heads(4, 4, 16, 8), AttentionOut::F32(operand)));
    assert!(!taken(heads(3, 1, 24, 0), AttentionOut::F32(operand)));
    assert!(
        !taken(heads(33, 1, 512, 0), AttentionOut::F32(operand)),
        "more heads than rows"
    );
}

#[test]
fn grids_depend_on_rows_alone() {
    let of = heads(8, 2, 256, 512);
    let kernel = kernel(of, blocks(of)[1], OUT_FORMATS[1]);
    let many = kernel.grid(2048);
    assert_eq!((many.entry, many.threads), (0, 256));
    assert_eq!(many.blocks, (2, 64 + MORE_TILES));
    let few = kernel.grid(9);
    assert_eq!((few.entry, few.threads), (1, 128));
    assert_eq!(few.blocks, (2, 9));
    let of = heads(8, 2, 512, 0);
    let shared = self::kernel(of, blocks(of)[2], OUT_FORMATS[1]).grid(2048);
    assert_eq!((shared.cluster, shared.threads), (2, 384));
    assert_eq!(shared.blocks, (2 * 2 * (64 + MORE_TILES), 1));
}

#[test]
#[ignore = "needs a card"]
fn flash_prefill_takes_every_head_size_and_format() {
    let card = Card::open(Tier::Best);
    for (h, kv, d, window) in [
        (4, 2, 16, 8),
        (4, 1, 16, 0),
        (4, 4, 32, 0),
        (8, 4, 64, 33),
        (6, 2, 48, 70),
        (16, 1, 128, 0),
        (3, 1, 144, 20),
        (8, 2, 256, 64),
        (2, 2, 256, 0),
        (8, 2, 512, 0),
        (16, 1, 512, 100),
    ] {
        let formats = if d % 32 == 0 || d == 16 {
            &OUT_FORMATS[..]
        } else {
            &OUT_FORMATS[..2]
        };
        check(
            &card,
            heads(h, kv, d, window),
            &[whole(1, 0, 45), whole(2, 50, 20)],
            formats,
        );
    }
}

#[test]
#[ignore = "needs a card"]
fn flash_prefill_keeps_runs_apart() {
    let card = Card::open(Tier::Best);
    let some = |seed, prefix, rows, taken| TestRun {
        seed,
        prefix,
        rows,
        taken,
        span: (0, 0),
    };
    let runs = [
        whole(1, 130, 1),
        whole(2, 0, 67),
        some(3, 31, 40, 9),
        some(4, 0, 30, 0),
        whole(5, 64, 64),
        some(6, 96, 33, 1),
    ];
    check(&card, heads(4, 1, 256, 40), &runs, &OUT_FORMATS[1..2]);
    check(&card, heads(8, 1, 512, 0), &runs, &OUT_FORMATS[1..2]);
    check(&card, heads(2, 1, 64, 1), &runs, &OUT_FORMATS[1..2]);
    // More runs than a warp has lanes, and more tiles than the grid has blocks.
    let many: Vec<TestRun> = (0..75)
        .map(|i| whole(i, i as usize % 7, 1 + i as usize % 3))
        .collect();
    check(&card, heads(2, 1, 32, 5), &many, &OUT_FORMATS[..1]);
}

#[test]
#[ignore = "needs a card"]
fn flash_prefill_lets_images_see_themselves_in_sliding_layers() {
    let card = Card::open(Tier::Best);
    let image = |seed, prefix, rows, taken, span| TestRun {
        seed,
        prefix,
        rows,
        taken,
        span,
    };
    // Across tiles of keys and of rows, longer than the window, up to the end of a run, and with but some rows asked for.
    let runs = [
        image(1, 20, 200, 200, (30, 190)),
        whole(2, 0, 33),
        image(3, 64, 40, 40, (64, 104)),
        image(4, 0, 90, 30, (10, 80)),
    ];
    for of in [
        heads(4, 1, 256, 40),
        heads(2, 2, 64, 100),
        heads(4, 2, 16, 8),
        heads(8, 2, 512, 70),
        // Nothing changes without a window.
        heads(2, 1, 256, 0),
    ] {
        check(&card, of, &runs, &OUT_FORMATS[1..2]);
    }
}

#[test]
#[ignore = "needs a card"]
fn blocks_that_share_keys_have_the_bits_of_those_that_do_not() {
    let card = Card::open(Tier::Best);
    // Clusters whose second block has no row, one row and all; one run after another through the same blocks.
    let runs: Vec<TestRun> = [(7, 3), (100, 16), (300, 17), (0, 64), (65, 129), (1, 1)]
        .into_iter()
        .zip(1..)
        .map(|((prefix, rows), seed)| whole(seed, prefix, rows))
        .collect();
    for of in [
        heads(8, 2, 512, 0),
        heads(16, 1, 512, 0),
        heads(4, 2, 512, 90),
    ] {
        let sequences: Vec<Sequence> = (runs.iter())
            .map(|run| Sequence::new(&of, run.seed, run.end()))
            .collect();
        let sequences: Vec<&Sequence> = sequences.iter().collect();
        let batch = OnCard::new(&card, of, &runs, &sequences);
        let bits = |block| -> Vec<u32> {
            let kernel = kernel(of, block, "OUT_F32");
            let found = attend(&card, &kernel, &load(&card, &kernel), &batch);
            found.iter().map(|x| x.to_bits()).collect()
        };
        let apart = bits(BlockTiling::Hopper(Sm90Tiling::Double));
        assert!(bits(BlockTiling::Multicast) == apart, "{of:?}: other bits");
    }
}

#[test]
#[ignore = "needs a card"]
fn flash_prefill_sees_prompts_in_pieces_as_whole_ones() {
    let card = Card::open(Tier::Best);
    for (of, length) in [
        (heads(4, 1, 256, 100), 260),
        // Enough rows for two row groups per block, on Hopper.
        (heads(16, 8, 256, 50), 600),
        (heads(4, 2, 512, 0), 200),
        (heads(2, 1, 32, 0), 300),
        (in_q8_0(heads(4, 1, 256, 100)), 260),
        (in_q8_0(heads(4, 2, 512, 0)), 200),
        (tied_q8_0(heads(4, 2, 512, 0)), 200),
    ] {
        let sequence = Sequence::new(&of, 9, length);
        for block in blocks(of) {
            let kernel = kernel(of, block, "OUT_F32");
            let module = load(&card, &kernel);
            let bits = |prefix, rows| -> Vec<u32> {
                let batch = OnCard::new(&card, of, &[whole(9, prefix, rows)], &[&sequence]);
                let found = attend(&card, &kernel, &module, &batch);
                found.iter().map(|x| x.to_bits()).collect()
            };
            let unbroken = bits(0, length);
            for piece in [1, 37, 64, 150] {
                let pieces = if piece == 1 {
                    length - 5..length
                } else {
                    0..length
                };
                let columns = of.heads * of.head_dim;
                let expected = &unbroken[pieces.start * columns..];
                let starts = pieces.step_by(piece);
                let found: Vec<u32> = starts
                    .flat_map(|p| bits(p, piece.min(length - p)))
                    .collect();
                assert!(found == expected, "{of:?} in pieces of {piece}");
            }
        }
    }
}
