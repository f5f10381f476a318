//! Against f64 on the processor, and against the plain store; then timings.

mod outputs;

use std::thread;

use half::f16;

use super::*;
use crate::{
    config::Tier,
    device::{Buffer, Module},
    kernel::{
        TablesAt, TiedAt,
        attention::{
            host_pages::{HostPages, names, rounded, slot_at},
            kv_norm_rope_store,
        },
        grid::norm_threads,
    },
    testing::{Card, at, normals, relative_error},
};

const EPS: f32 = 1e-6;
const KV_TYPES: [KvType; 2] = [KvType::F16, KvType::Q8_0];

#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Kv {
    Shared,
    /// Shared, and with a window rows see their run to its end.
    SharedAhead,
    Own,
    /// Values are the raw keys.
    OwnSame,
}

impl Kv {
    fn is_shared(self) -> bool {
        matches!(self, Kv::Shared | Kv::SharedAhead)
    }
}

/// Rows of a run: positions from the first on.
#[derive(Clone, Copy, Debug)]
pub(crate) struct RunRows {
    pub(crate) position: usize,
    pub(crate) rows: usize,
}

#[derive(Debug)]
pub(crate) struct Case {
    pub(crate) heads: Heads,
    pub(crate) window: Option<usize>,
    pub(crate) kv: Kv,
    pub(crate) runs: Vec<RunRows>,
}

/// A batch on the host, with everything that the kernel reads.
pub(crate) struct Batch {
    /// Run and position of each row.
    pub(crate) rows: Vec<(usize, usize)>,
    pub(crate) bases: Vec<i32>,
    pub(crate) pages: Vec<u32>,
    pub(crate) keys: HostPages,
    pub(crate) values: HostPages,
    /// q | k | v.
    pub(crate) raw: Vec<f32>,
    pub(crate) stride: usize,
    pub(crate) q_weight: Vec<f32>,
    pub(crate) k_weight: Vec<f32>,
    pub(crate) frequencies: Vec<f32>,
}

#[allow(dead_code, reason = "called by the timing programs")]
pub(crate) fn random_f16(seed: u64, count: usize) -> Vec<u16> {
    let values = normals(seed, count).into_iter();
    values.map(|x| f16::from_f32(x).to_bits()).collect()
}

impl Case {
    pub(crate) fn batch(&self) -> Batch {
        let Heads {
            count,
            kv_count: kv_heads,
            head_dim,
            kv,
            turning_pairs,
            ..
        } = self.heads;
        let rows: Vec<_> = (self.runs.iter().enumerate())
            .flat_map(|(r, run)| (0..run.rows).map(move |i| (r, run.position + i)))
            .collect();
        let (mut bases, mut entries) = (Vec::new(), Vec::new());
        for run in &self.runs {
            let first = self.first_seen(run.position) / PAGE_TOKENS;
            let end = (run.position + run.rows).div_ceil(PAGE_TOKENS);
            bases.push(entries.len() as i32 - first as i32);
            entries.resize(entries.len() + end - first, 0);
        }
        // In disorder: a step that has no divisor in common with their number.
        let total = entries.len() + 3;
        let stride = [7, 5, 3, 2, 1]
            .into_iter()
            .find(|s| !total.is_multiple_of(*s));
        for (i, page) in entries.iter_mut().enumerate() {
            *page = ((i * stride.unwrap_or(1) + 1) % total) as u32;
        }
        let random = |seed: u64| {
            let mut pages = HostPages::poisoned(kv, total, kv_heads, head_dim);
            let values = normals(seed, total * kv_heads * PAGE_TOKENS * head_dim);
            for (i, values) in values.chunks_exact(head_dim).enumerate() {
                let head = i / PAGE_TOKENS;
                pages.put((head / kv_heads, head % kv_heads, i % PAGE_TOKENS), values);
            }
            pages
        };
        let mut batch = Batch {
            bases,
            pages: entries,
            keys: random(1),
            values: random(2),
            // A row more: the kernel reads those that the grid has.
            raw: normals(3, (rows.len() + 1) * (count + 2 * kv_heads) * head_dim),
            stride: (count + 2 * kv_heads) * head_dim,
            q_weight: normals(4, head_dim).iter().map(|x| 0.3 * x).collect(),
            k_weight: normals(5, head_dim).iter().map(|x| 1.0 + 0.1 * x).collect(),
            frequencies: (0..head_dim / 2)
                .map(|j| match turning_pairs {
                    Some(turning) if j >= turning => 0.0,
                    _ => 10000f32.powf(-2.0 * j as f32 / head_dim as f32),
                })
                .collect(),
            rows,
        };
        if self.heads.is_tied() {
            batch.keys = HostPages::poisoned(KvType::F16, total, kv_heads, head_dim);
        }
        for (r, run) in self.runs.iter().enumerate() {
            let end = run.position + run.rows;
            let stored = if self.kv.is_shared() {
                end
            } else {
                run.position
            };
            for position in stored..end.next_multiple_of(PAGE_TOKENS) {
                for head in 0..kv_heads {
                    let cell = batch.cell(r, position, head);
                    batch.keys.poison(cell);
                    batch.values.poison(cell);
                }
            }
        }
        batch
    }

    pub(crate) fn first_seen(&self, position: usize) -> usize {
        self.window.map_or(0, |w| (position + 1).saturating_sub(w))
    }

    /// With tables of bases and pages, and what keys may be made with.
    fn slot(
        &self,
        (keys, values): (&Buffer, &Buffer),
        (base, pages): (Address, Address),
        (key_weight, key_frequencies): (Address, Address),
    ) -> SlotAt {
        let Heads {
            kv_count, head_dim, ..
        } = self.heads;
        let plain = slot_at(
            (keys.address(), values.address()),
            TablesAt { base, pages },
            (kv_count, head_dim),
        );
        let tied = TiedAt {
            key_weight,
            key_frequencies,
        };
        SlotAt {
            tied: if self.heads.is_tied() {
                tied
            } else {
                TiedAt::NONE
            },
            ..plain
        }
    }

    fn last_seen(&self, run: usize, position: usize) -> usize {
        match (self.kv, self.window) {
            (Kv::SharedAhead, Some(_)) => self.runs[run].position + self.runs[run].rows - 1,
            _ => position,
        }
    }
}

impl Batch {
    /// Page, head and row of a position.
    pub(crate) fn cell(&self, run: usize, position: usize, head: usize) -> (usize, usize, usize) {
        let entry = self.bases[run] + (position / PAGE_TOKENS) as i32;
        let page = self.pages[entry as usize] as usize;
        (page, head, position % PAGE_TOKENS)
    }

    fn normed_rotated(
        &self,
        x: &[f32],
        weight: Option<&[f32]>,
        position: Option<usize>,
    ) -> Vec<f64> {
        let mean = x.iter().map(|&v| f64::from(v).powi(2)).sum::<f64>() / x.len() as f64;
        let scale = 1.0 / (mean + f64::from(EPS)).sqrt();
        let weight = |j: usize| weight.map_or(1.0, |w| f64::from(w[j]));
        let mut y: Vec<f64> = (x.iter().enumerate())
            .map(|(j, &v)| f64::from(v) * scale * weight(j))
            .collect();
        if let Some(position) = position {
            self.rotate(&mut y, position);
        }
        y
    }

    /// The key and value of a position, rounded.
    fn cached(&self, case: &Case, run: usize, position: usize, head: usize) -> [Vec<f64>; 2] {
        let Heads {
            count,
            kv_count: kv_heads,
            head_dim,
            kv,
            ..
        } = case.heads;
        let first = case.runs[run].position;
        if case.kv.is_shared() || position < first {
            let cell = self.cell(run, position, head);
            let value = self.values.get(cell);
            let key = if case.heads.is_tied() {
                self.tied_key(&value, position)
            } else {
                self.keys.get(cell)
            };
            return [key, value];
        }
        let row = self.rows.iter().position(|&at| at == (run, position));
        let start = row.expect("a row of the batch") * self.stride + (count + head) * head_dim;
        let k = &self.raw[start..][..head_dim];
        let v = match case.kv {
            Kv::OwnSame => k,
            _ => &self.raw[start + kv_heads * head_dim..][..head_dim],
        };
        let value = rounded(kv, &self.normed_rotated(v, None, None));
        if case.heads.is_tied() {
            return [self.tied_key(&value, position), value];
        }
        let k = self.normed_rotated(k, Some(&self.k_weight), Some(position));
        [rounded(kv, &k), value]
    }

    /// The key that follows from a value.
    pub(crate) fn tied_key(&self, value: &[f64], position: usize) -> Vec<f64> {
        let weighted = value.iter().zip(&self.k_weight);
        let mut key: Vec<f64> = weighted.map(|(v, w)| v * f64::from(*w)).collect();
        self.rotate(&mut key, position);
        key
    }

    fn rotate(&self, y: &mut [f64], position: usize) {
        let half = y.len() / 2;
        for j in 0..half {
            let angle = position as f32 * self.frequencies[j];
            let (sin, cos) = f64::from(angle).sin_cos();
            let (a, b) = (y[j], y[j + half]);
            (y[j], y[j + half]) = (a * cos - b * sin, a * sin + b * cos);
        }
    }

    fn expected(&self, case: &Case) -> Vec<f32> {
        let Heads {
            count,
            kv_count: kv_heads,
            head_dim,
            ..
        } = case.heads;
        let mut out = Vec::new();
        for (r, &(run, position)) in self.rows.iter().enumerate() {
            for kv_head in 0..kv_heads {
                let seen: Vec<_> = (case.first_seen(position)..=case.last_seen(run, position))
                    .map(|at| self.cached(case, run, at, kv_head))
                    .collect();
                for head in 0..count / kv_heads {
                    let start = r * self.stride + (kv_head * (count / kv_heads) + head) * head_dim;
                    let q = &self.raw[start..][..head_dim];
                    let q = self.normed_rotated(q, Some(&self.q_weight), Some(position));
                    let score = |k: &Vec<f64>| q.iter().zip(k).map(|(a, b)| a * b).sum::<f64>();
                    let scores: Vec<f64> = seen.iter().map(|[k, _]| score(k)).collect();
                    let most = scores.iter().copied().fold(f64::MIN, f64::max);
                    let weights: Vec<f64> = scores.iter().map(|s| (s - most).exp()).collect();
                    let total: f64 = weights.iter().sum();
                    let mut sum = vec![0.0; head_dim];
                    for (weight, [_, v]) in weights.iter().zip(&seen) {
                        for (to, from) in sum.iter_mut().zip(v) {
                            *to += weight * from;
                        }
                    }
                    out.extend(sum.iter().map(|x| (x / total) as f32));
                }
            }
        }
        out
    }
}

/// A batch on the card, ready to be launched.
pub(crate) struct Ready {
    pub(crate) module: Module,
    pub(crate) grid: Grid,
    pub(crate) params: FlashDecodeParams,
    pub(crate) keys: Buffer,
    pub(crate) values: Buffer,
    pub(crate) arrivals: Buffer,
    pub(crate) out: Buffer,
    pub(crate) _others: Vec<Buffer>,
}

impl Ready {
    /// The grid has one row more than the batch.
    pub(crate) fn new(card: &Card, case: &Case, batch: &Batch) -> Ready {
        let Heads {
            count,
            kv_count: kv_heads,
            head_dim,
            ..
        } = case.heads;
        let (heads, rows) = (case.heads, batch.rows.len());
        let mut positions: Vec<u32> = batch.rows.iter().map(|r| r.1 as u32).collect();
        let mut runs: Vec<u32> = batch.rows.iter().map(|r| r.0 as u32).collect();
        let mut ends: Vec<u32> = (batch.rows.iter())
            .map(|&(run, position)| case.last_seen(run, position) as u32 + 1)
            .collect();
        positions.push(0);
        runs.push(0);
        ends.push(1);
        let index: Vec<u32> = (0..=rows as u32).collect();
        let partials = (rows + 1) * FlashDecode::partial_columns(heads, case.window);
        let arrivals = (rows + 1) * FlashDecode::arrival_columns(heads, case.window);
        let (keys, values) = (
            card.upload(&batch.keys.bytes),
            card.upload(&batch.values.bytes),
        );
        let arrivals = card.upload(&vec![0u32; arrivals]);
        let out = card.upload(&vec![f32::NAN; (rows + 1) * count * head_dim]);
        let raw = card.upload(&batch.raw);
        let k = match case.kv {
            Kv::Shared | Kv::SharedAhead => Address::NULL,
            _ => at::<f32>(&raw, count * head_dim),
        };
        let v = match case.kv {
            Kv::Own => at::<f32>(&raw, (count + kv_heads) * head_dim),
            _ => k,
        };
        let others = vec![
            card.upload(&[rows as u32]),
            card.upload(&index),
            card.upload(&positions),
            card.upload(&runs),
            card.upload(&batch.bases),
            card.upload(&names(&batch.pages)),
            card.upload(&batch.q_weight),
            card.upload(&batch.k_weight),
            card.upload(&batch.frequencies),
            card.upload(&vec![f32::NAN; partials]),
            card.upload(&ends),
        ];
        let other = |i: usize| -> Address { others[i].address() };
        let splits = splits(heads, case.window, rows + 1);
        let params = FlashDecodeParams {
            rows: RowsAt {
                count: other(0),
                index: other(1),
            },
            row_refs: RowRefsAt {
                position: other(2),
                run: other(3),
                sliding_end: other(10),
            },
            slot: case.slot((&keys, &values), (other(4), other(5)), (other(7), other(8))),
            q: raw.address(),
            q_weight: other(6),
            k,
            k_weight: other(7),
            v,
            frequencies: other(8),
            partials: other(9),
            arrivals: arrivals.address(),
            out: out.address(),
            q_stride: batch.stride as u32,
            k_stride: batch.stride as u32,
            v_stride: batch.stride as u32,
            window: case.window.unwrap_or(0) as u32,
            q_eps: EPS,
            k_eps: EPS,
            v_eps: EPS,
            out_kind: 0,
        };
        let grid = Grid {
            shared_bytes: heads.shared_bytes(),
            ..Grid::new(((rows + 1) * kv_heads, splits), heads.threads())
        };
        Ready {
            module: card.load(&specialization(heads)),
            grid,
            params,
            keys,
            values,
            arrivals,
            out,
            _others: others.into_iter().chain([raw]).collect(),
        }
    }
}

fn check(card: &Card, case: &Case) {
    let Heads {
        count, head_dim, ..
    } = case.heads;
    let batch = case.batch();
    let (rows, columns) = (batch.rows.len(), count * head_dim);
    let ready = Ready::new(card, case, &batch);
    card.run(&ready.module, ready.grid, &ready.params.bytes());
    let found: Vec<f32> = card.download(&ready.out, (rows + 1) * columns);
    let error = relative_error(&found[..rows * columns], &batch.expected(case));
    // Keys that are made are rounded once more.
    let most = if case.heads.is_tied() { 2e-3 } else { 1e-3 };
    assert!(error < most, "{error:.1e} for {case:?}");
    assert!(found[rows * columns..].iter().all(|x| x.is_nan()));
    let arrivals = (rows + 1) * FlashDecode::arrival_columns(case.heads, case.window);
    let arrivals_left = || card.download::<u32>(&ready.arrivals, arrivals);
    assert!(arrivals_left().iter().all(|&t| t == 0), "{case:?}");
    let lengths = [batch.keys.bytes.len(), batch.values.bytes.len()];
    let stored = [
        card.download::<u8>(&ready.keys, lengths[0]),
        card.download::<u8>(&ready.values, lengths[1]),
    ];

    card.run(&ready.module, ready.grid, &ready.params.bytes());
    let again: Vec<f32> = card.download(&ready.out, rows * columns);
    let bits = |x: &[f32]| x.iter().map(|v| v.to_bits()).collect::<Vec<_>>();
    assert_eq!(bits(&again), bits(&found[..rows * columns]), "{case:?}");
    assert!(arrivals_left().iter().all(|&t| t == 0), "{case:?}");

    outputs::check(card, case, &ready, &found[..rows * columns]);

    if case.kv.is_shared() {
        assert!(stored == [batch.keys.bytes, batch.values.bytes], "{case:?}");
    } else if batch.rows.len() == case.runs.len() {
        // Rows lie apart there, so the store's columns are those of one row after another.
        let expected = plainly_stored(card, case, &batch, &ready);
        assert!(stored == expected, "other bits for {case:?}");
    }
}

/// Pages as `kv_norm_rope_store` writes them, row by row.
fn plainly_stored(card: &Card, case: &Case, batch: &Batch, ready: &Ready) -> [Vec<u8>; 2] {
    let Heads {
        kv_count: kv_heads,
        head_dim,
        kv,
        ..
    } = case.heads;
    let (keys, values) = (
        card.upload(&batch.keys.bytes),
        card.upload(&batch.values.bytes),
    );
    let module = card.load(&kv_norm_rope_store::specialization(kv));
    let grid = Grid::new((1, kv_heads), norm_threads(head_dim));
    for r in 0..batch.rows.len() {
        let one = card.upload(&[1u32, r as u32]);
        let row = |address: Address| address.offset(4 * r * batch.stride);
        let params = kv_norm_rope_store::KvNormRopeStoreParams {
            rows: RowsAt {
                count: one.address(),
                index: at::<u32>(&one, 1),
            },
            slot: SlotAt {
                keys: keys.address(),
                values: values.address(),
                ..ready.params.slot
            },
            row_refs: ready.params.row_refs,
            k: row(ready.params.k),
            k_weight: ready.params.k_weight,
            v: row(ready.params.v),
            v_weight: Address::NULL,
            frequencies: ready.params.frequencies,
            columns: (kv_heads * head_dim) as u32,
            head_dim: head_dim as u32,
            k_eps: EPS,
            v_eps: EPS,
        };
        card.run(&module, grid, &params.bytes());
    }
    [
        card.download(&keys, batch.keys.bytes.len()),
        card.download(&values, batch.values.bytes.len()),
    ]
}

pub(crate) fn heads(group: usize, kv_heads: usize, head_dim: usize) -> Heads {
    Heads::new(group * kv_heads, kv_heads, head_dim)
}

pub(crate) fn lone(position: usize) -> RunRows {
    RunRows { position, rows: 1 }
}

/// The emulator is slow, so it gets the shorter of them.
fn lengths(card: &Card, all: &[usize]) -> Vec<usize> {
    let most = if card.device.name == "emulated card" {
        300
    } else {
        usize::MAX
    };
    all.iter().copied().filter(|&n| n <= most).collect()
}

#[test]
#[ignore = "needs a card"]
fn flash_decode_takes_every_head_size_and_group() {
    // Most of the time goes into compiling, so head sizes go side by side.
    let all_groups = |head_dim: usize| {
        let card = Card::open(Tier::Best);
        for group in [1, 2, 3, 4, 8, 16] {
            if [48, 128].contains(&head_dim) && ![3, 8].contains(&group) {
                continue;
            }
            let kv = [Kv::Own, Kv::OwnSame, Kv::Shared][(head_dim / 16 + group) % 3];
            for kv_type in KV_TYPES {
                let heads = heads(group, 2, head_dim).with_kv(kv_type);
                let case = Case {
                    heads,
                    window: None,
                    kv,
                    runs: vec![lone(99)],
                };
                if FlashDecode::takes(heads) {
                    check(&card, &case);
                }
            }
        }
    };
    thread::scope(|scope| {
        for head_dim in [16, 32, 48, 64, 128, 256, 512] {
            scope.spawn(move || all_groups(head_dim));
        }
    });
}

/// Keys that are made from values: few pairs turn or all, pages of all lengths, rows of one run, and rows that see up to an end.
#[test]
#[ignore = "needs a card"]
fn flash_decode_makes_keys_from_values() {
    let card = Card::open(Tier::Best);
    let emulated = card.device.name == "emulated card";
    let run = |position, rows| RunRows { position, rows };
    let shapes = [
        (4, 1, 32, 4, false),
        (2, 2, 32, 16, false),
        (8, 2, 64, 5, false),
        (3, 1, 128, 33, false),
        (2, 1, 256, 128, false),
        (16, 1, 512, 64, false),
        (16, 1, 512, 64, true),
        (8, 2, 512, 64, false),
        (8, 2, 512, 64, true),
        (4, 2, 512, 200, false),
    ];
    for (group, kv_heads, head_dim, turning, wide) in shapes {
        for kv_type in KV_TYPES {
            let heads = heads(group, kv_heads, head_dim)
                .with_kv(kv_type)
                .tied(turning);
            let heads = if wide { heads.wide() } else { heads };
            let mut cases = vec![
                (Kv::OwnSame, None, vec![lone(99)]),
                (
                    Kv::OwnSame,
                    None,
                    vec![run(61, 5), lone(0), run(0, 3), lone(130)],
                ),
                (Kv::Shared, None, vec![lone(31), lone(32), lone(150)]),
                (Kv::SharedAhead, Some(1 << 30), vec![run(64, 4), lone(17)]),
            ];
            if !emulated {
                cases.push((Kv::OwnSame, None, vec![lone(6140), lone(300)]));
                cases.push((Kv::Shared, None, vec![lone(9000), run(5000, 3)]));
            }
            for (kv, window, runs) in cases {
                let case = Case {
                    heads,
                    window,
                    kv,
                    runs,
                };
                check(&card, &case);
            }
        }
    }
}

#[test]
#[ignore = "needs a card"]
fn flash_decode_takes_every_length() {
    let card = Card::open(Tier::Best);
    for head_dim in [64, 512] {
        for length in lengths(&card, &[1, 31, 32, 33, 64, 65, 129, 600, 3000]) {
            for kv in [Kv::Shared, Kv::OwnSame] {
                for kv_type in KV_TYPES {
                    let case = Case {
                        heads: heads(2, 1, head_dim).with_kv(kv_type),
                        window: None,
                        kv,
                        runs: vec![lone(length - 1)],
                    };
                    check(&card, &case);
                }
            }
        }
    }
}

#[test]
#[ignore = "needs a card"]
fn flash_decode_sees_ahead_of_rows_whose_keys_are_stored() {
    let card = Card::open(Tier::Best);
    for (window, position, rows) in [(Some(8), 3, 40), (Some(100), 90, 35), (None, 30, 5)] {
        for kv_type in KV_TYPES {
            let case = Case {
                heads: heads(4, 2, 64).with_kv(kv_type),
                window,
                kv: Kv::SharedAhead,
                runs: vec![RunRows { position, rows }, lone(17)],
            };
            check(&card, &case);
        }
    }
}

#[test]
#[ignore = "needs a card"]
fn flash_decode_sees_windows() {
    let card = Card::open(Tier::Best);
    for (window, head_dim) in [(8, 64), (100, 32), (128, 512), (512, 256)] {
        let around = [window - 1, window, window + 1, window + 40, 600, 3000];
        for length in lengths(&card, &around) {
            for kv_type in KV_TYPES {
                let case = Case {
                    heads: heads(4, 2, head_dim).with_kv(kv_type),
                    window: Some(window),
                    kv: Kv::Own,
                    runs: vec![lone(length - 1)],
                };
                check(&card, &case);
            }
        }
    }
}

/// Later rows see keys that the same launch stores, over borders of pages and splits.
#[test]
#[ignore = "needs a card"]
fn flash_decode_takes_rows_of_same_and_other_runs() {
    let card = Card::open(Tier::Best);
    let run = |position, rows| RunRows { position, rows };
    for (head_dim, window) in [(32, None), (32, Some(40)), (512, None), (256, Some(64))] {
        for kv in [Kv::Own, Kv::Shared] {
            for kv_type in KV_TYPES {
                let case = Case {
                    heads: heads(2, 2, head_dim).with_kv(kv_type),
                    window,
                    kv,
                    runs: vec![run(61, 5), lone(0), run(0, 3), lone(130)],
                };
                check(&card, &case);
            }
        }
    }
    // Past 64 splits, whose second step from the end has fresh rows, too.
    if card.device.name != "emulated card" {
        for kv_type in KV_TYPES {
            let case = Case {
                heads: heads(4, 2, 512).with_kv(kv_type),
                window: None,
                kv: Kv::Own,
                runs: vec![run(6140, 8), run(300, 40)],
            };
            check(&card, &case);
        }
    }
}

/// Outputs as rows of the product that reads them, of few rows: alone, merged, and where keys are made.
#[test]
#[ignore = "needs a card"]
fn flash_decode_prepares_rows() {
    let card = Card::open(Tier::Best);
    let shapes = [
        heads(2, 2, 256),
        heads(3, 1, 512),
        heads(16, 1, 512).tied(64),
    ];
    for shape in shapes {
        assert!(shape.fill_blocks());
        for kv_type in KV_TYPES {
            let case = Case {
                heads: shape.with_kv(kv_type),
                window: None,
                kv: Kv::OwnSame,
                runs: vec![
                    lone(3),
                    RunRows {
                        position: 61,
                        rows: 2,
                    },
                    lone(90),
                ],
            };
            check(&card, &case);
        }
    }
}

/// More splits than are merged at once.
#[test]
#[ignore = "needs a card"]
fn flash_decode_merges_many_splits() {
    let card = Card::open(Tier::Best);
    for (head_dim, group, length) in [(16, 2, 1200), (512, 1, 600), (16, 3, 4400)] {
        for kv_type in KV_TYPES {
            let case = Case {
                heads: heads(group, 1, head_dim).with_kv(kv_type),
                window: None,
                kv: Kv::Own,
                runs: vec![lone(length - 1), lone(40)],
            };
            check(&card, &case);
        }
    }
}

#[test]
fn grids_and_scratch_follow_the_window() {
    let sliding = heads(4, 2, 256);
    assert_eq!(splits(sliding, Some(512), 1), 9);
    assert_eq!(splits(sliding, None, 1), MAX_SPLITS);
    assert_eq!(splits(sliding, None, 8), 24);
    let codes = sliding.with_kv(KvType::Q8_0);
    assert_eq!(splits(codes, Some(512), 1), 9);
    assert_eq!(splits(codes, None, 1), MAX_SMALL_SPLITS);
    assert_eq!(splits(sliding, None, 1000), MIN_SPLITS);
    assert_eq!(FlashDecode::arrival_columns(sliding, Some(512)), 2 * 3);
    assert_eq!(sliding.partial_bytes(), 4 * 256 * 2 + 128);
    // Shared memory of a block on an Ada card, less what every kernel has.
    for heads in [heads(16, 1, 512), heads(16, 1, 512).tied(64)] {
        for kv in KV_TYPES {
            assert!(heads.with_kv(kv).shared_bytes() + 256 <= 99 << 10);
        }
    }
    assert_eq!(
        splits(heads(16, 1, 512).tied(64), None, 1),
        MAX_SMALL_SPLITS
    );
    assert!(!FlashDecode::takes(heads(1, 1, 48).tied(6)));
    assert!(FlashDecode::takes(heads(16, 1, 512)));
    assert!(!FlashDecode::takes(heads(17, 1, 512)));
    assert!(!FlashDecode::takes(heads(1, 1, 520)));
    assert!(!FlashDecode::takes(heads(1, 1, 24)));
    assert!(FlashDecode::takes(heads(1, 1, 48)));
    assert!(!FlashDecode::takes(heads(1, 1, 48).with_kv(KvType::Q8_0)));
}
