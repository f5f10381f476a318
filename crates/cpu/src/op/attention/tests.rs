use carat_model::{
    backend::{Batch, Batching, KvGroup, KvType, PAGE_TOKENS, PageId, PerGroup, Run},
    plan::SlotSpec,
};

use half::f16;

use super::{Attention, QuerySpan, SplitKvScratch, attend::SPLIT_TOKENS};
use crate::{
    op::{
        kv::{self, PagedKv},
        repack::Repacked,
        workers::Workers,
    },
    pool::Pool,
};
use carat_cpu_kernels::{gemm::row_class::RowClasses, table::Kernels, tied_keys::TiedKeys};
use carat_testkit::numbers::{Random, bits, relative_error};

/// One sequence of random queries, keys and values.
struct Sequence {
    spec: SlotSpec,
    /// Query heads of a KV head.
    group: usize,
    tokens: usize,
    queries: Vec<f32>,
    keys: Vec<f32>,
    values: Vec<f32>,
    pages: Vec<PageId>,
    /// What keys follow from values with: a weight, and frequencies of pairs that turn.
    tied: Option<(Vec<f32>, Vec<f32>)>,
}

impl Sequence {
    fn new(spec: SlotSpec, group: usize, tokens: usize) -> Sequence {
        let mut random = Random::new(tokens as u64);
        let width = spec.kv_heads * spec.head_dim;
        let scale = 2.0 / (spec.head_dim as f32).sqrt();
        let queries = random.normals(tokens * width * group);
        let page_count = tokens.div_ceil(PAGE_TOKENS) as u32;
        Sequence {
            queries: queries.iter().map(|x| x * scale).collect(),
            keys: random.normals(tokens * width),
            values: random.normals(tokens * width),
            // Backwards, so that a page's index is never its number.
            pages: (0..page_count).rev().map(PageId).collect(),
            spec,
            group,
            tokens,
            tied: None,
        }
    }

    /// The same with keys that follow from values as `kv` has them, so many pairs of which turn.
    fn tied(mut self, kv: KvType, turning: usize) -> Sequence {
        let head_dim = self.spec.head_dim;
        let random = Random::new(5).normals(head_dim);
        let weight: Vec<f32> = random.iter().map(|x| 1.0 + 0.2 * x).collect();
        let base = 10000f32;
        let frequencies = (0..turning).map(|j| base.powf(-2.0 * j as f32 / head_dim as f32));
        let frequencies: Vec<f32> = frequencies.collect();
        let values = match kv {
            KvType::F16 => self
                .values
                .iter()
                .map(|x| f16::from_f32(*x).to_f32())
                .collect(),
            KvType::Q8_0 => self.rounded().values,
        };
        self.keys.copy_from_slice(&values);
        let heads = self.keys.chunks_exact_mut(head_dim).enumerate();
        for (i, key) in heads {
            let position = (i / self.spec.kv_heads) as f32;
            for (k, w) in key.iter_mut().zip(&weight) {
                *k *= w;
            }
            let (low, high) = key.split_at_mut(head_dim / 2);
            for ((a, b), frequency) in low.iter_mut().zip(high).zip(&frequencies) {
                let (sin, cos) = f64::from(position * frequency).sin_cos();
                let (x, y) = (f64::from(*a), f64::from(*b));
                (*a, *b) = ((x * cos - y * sin) as f32, (x * sin + y * cos) as f32);
            }
        }
        self.tied = Some((weight, frequencies));
        self
    }

    fn store(&self, workers: &Workers, cache: &mut PagedKv, positions: std::ops::Range<usize>) {
        let pages = PerGroup {
            full: self.pages.as_slice(),
            sliding: self.pages.as_slice(),
        };
        let run = Run {
            rows: 0..positions.len(),
            position: positions.start,
            pages,
            sampled: 0,
            visible_end: None,
            table: None,
        };
        let batch = Batch {
            feeds: &[],
            runs: &[run],
        };
        let writes = kv::writes(&batch, |_| true, PerGroup::both(self.pages.len()));
        let width = self.spec.kv_heads * self.spec.head_dim;
        let rows = positions.start * width..positions.end * width;
        let kv = (&self.keys[rows.clone()], &self.values[rows]);
        cache.store(&mut [], workers, writes.get(self.spec.group), kv);
    }

    /// Feeds the sequence in chunks: keys and values first, then their queries.
    fn run(&self, kv: KvType, kernels: &'static Kernels, threads: usize, chunk: usize) -> Vec<f32> {
        let mut workers = Workers::new(
            Pool::new(threads).unwrap(),
            kernels,
            RowClasses::new(kernels.isa(), Batching::Fast),
            Repacked::new(0),
        );
        let tied =
            (self.tied.as_ref()).map(|(weight, frequencies)| TiedKeys::new(weight, frequencies));
        let mut cache = PagedKv::new(&self.spec, kv, tied, self.pages.len());
        let columns = self.queries.len() / self.tokens;
        let mut out = vec![f32::NAN; self.queries.len()];
        let mut scratch = SplitKvScratch::default();
        for start in (0..self.tokens).step_by(chunk) {
            let end = self.tokens.min(start + chunk);
            self.store(&workers, &mut cache, start..end);
            let span = QuerySpan {
                rows: 0..end - start,
                position: start,
                pages: &self.pages,
                visible_end: None,
            };
            let range = start * columns..end * columns;
            Attention::new(
                (&cache, &[]),
                self.spec.window,
                (&self.queries[range.clone()], columns),
                std::iter::once(span),
            )
            .run(&mut workers, &mut scratch, &mut out[range]);
        }
        out
    }

    /// The same with keys and values as Q8_0 has them.
    fn rounded(&self) -> Sequence {
        let round = |data: &[f32]| -> Vec<f32> {
            let heads = data.chunks(self.spec.head_dim);
            let groups = heads.flat_map(|head| head.chunks(KvType::GROUP));
            let rounded = groups.flat_map(|group| {
                let largest = group.iter().fold(0.0f32, |largest, x| largest.max(x.abs()));
                let scale = f16::from_f32(largest / 127.0).to_f32();
                let code = move |x: &f32| (x / scale).round_ties_even().clamp(-127.0, 127.0);
                group.iter().map(move |x| scale * code(x))
            });
            rounded.collect()
        };
        Sequence {
            keys: round(&self.keys),
            values: round(&self.values),
            ..Sequence::new(self.spec.clone(), self.group, self.tokens)
        }
    }

    /// The definition, in f64.
    fn exact(&self) -> Vec<f64> {
        let head_dim = self.spec.head_dim;
        let (kv_width, heads) = (
            self.spec.kv_heads * head_dim,
            self.spec.kv_heads * self.group,
        );
        let mut out = Vec::new();
        for position in 0..self.tokens {
            let first = (position + 1).saturating_sub(self.spec.window.unwrap_or(usize::MAX));
            for head in 0..heads {
                let q = &self.queries[(position * heads + head) * head_dim..][..head_dim];
                let element = |data: &[f32], seen: usize, d: usize| {
                    f64::from(data[seen * kv_width + head / self.group * head_dim + d])
                };
                let scores: Vec<f64> = (first..=position)
                    .map(|seen| {
                        (0..head_dim)
                            .map(|d| f64::from(q[d]) * element(&self.keys, seen, d))
                            .sum()
                    })
                    .collect();
                let largest = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
                let weights: Vec<f64> = scores.iter().map(|s| (s - largest).exp()).collect();
                let sum: f64 = weights.iter().sum();
                out.extend((0..head_dim).map(|d| {
                    (first..=position)
                        .zip(&weights)
                        .map(|(seen, weight)| weight * element(&self.values, seen, d))
                        .sum::<f64>()
                        / sum
                }));
            }
        }
        out
    }
}

/// Largest distance of each type from the definition. A code of Q8_0 is off by 0.29 steps on average (their root mean square), a
/// step is a 127th of the largest of 32 values, and that is 2 to 3 times their own root mean square.
const BOUNDS: [(KvType, f64); 2] = [(KvType::F16, 1e-3), (KvType::Q8_0, 1e-2)];

fn spec(kv_heads: usize, head_dim: usize, window: Option<usize>) -> SlotSpec {
    SlotSpec {
        group: KvGroup::Sliding,
        kv_heads,
        head_dim,
        window,
        borrowed: None,
    }
}

#[test]
fn keys_that_follow_from_values_are_close_to_the_definition_and_have_no_place() {
    for (kv_heads, group, head_dim, turning) in [
        (1, 4, 32, 4),
        (2, 1, 64, 32),
        (2, 2, 96, 7),
        (1, 16, 512, 64),
        (2, 8, 512, 64),
        (1, 3, 128, 33),
    ] {
        for (kv, bound) in BOUNDS {
            let spec = SlotSpec {
                group: KvGroup::Full,
                ..spec(kv_heads, head_dim, None)
            };
            assert_eq!(
                2 * kv::page_bytes(&spec, kv, true),
                kv::page_bytes(&spec, kv, false)
            );
            let sequence = Sequence::new(spec, group, 150).tied(kv, turning);
            let exact = sequence.exact();
            let expected = bits(&sequence.run(kv, Kernels::all()[0], 1, 150));
            for kernels in Kernels::all() {
                let whole = sequence.run(kv, kernels, 2, 150);
                let error = relative_error(&whole, &exact);
                assert!(
                    error < bound,
                    "{kv:?} {kv_heads} {group} {head_dim}: {error}"
                );
                for (threads, chunk) in [(3, 150), (2, 1), (4, 33)] {
                    let found = bits(&sequence.run(kv, kernels, threads, chunk));
                    assert!(found == expected, "{kv:?} {head_dim}: {:?}", kernels.isa());
                }
            }
        }
    }
}

#[test]
fn every_shape_is_close_to_the_definition() {
    for (kv_heads, group, head_dim) in [
        (1, 1, 16),
        (2, 2, 24),
        (2, 4, 64),
        (1, 8, 34),
        (1, 16, 128),
        (2, 1, 256),
        (1, 2, 512),
    ] {
        for window in [None, Some(1), Some(40)] {
            let sequence = Sequence::new(spec(kv_heads, head_dim, window), group, 70);
            let exact = sequence.exact();
            for (kv, bound) in BOUNDS {
                for kernels in Kernels::all() {
                    let error = relative_error(&sequence.run(kv, kernels, 2, 70), &exact);
                    assert!(
                        error < bound,
                        "{kv:?} {kv_heads} {group} {head_dim}: {error}"
                    );
                }
            }
        }
    }
}

/// All that Q8_0 adds is that keys and values are rounded.
#[test]
fn codes_are_attended_to_as_what_they_stand_for() {
    for (group, head_dim, window) in [(8, 64, None), (3, 34, Some(40)), (1, 16, None)] {
        let sequence = Sequence::new(spec(2, head_dim, window), group, 150);
        let exact = sequence.rounded().exact();
        for kernels in Kernels::all() {
            let error = relative_error(&sequence.run(KvType::Q8_0, kernels, 2, 150), &exact);
            assert!(
                error < 1e-5,
                "{:?} {group} {head_dim}: {error}",
                kernels.isa()
            );
        }
    }
}

/// Zeros, and numbers so small that F16 has few bits or none for their scale.
#[test]
fn groups_of_tiny_values_are_off_by_little() {
    for kernels in Kernels::all() {
        for size in [0.0, 1e-12, 3e-6, 7.6e-6, 1e-5] {
            let x: [f32; KvType::GROUP] = std::array::from_fn(|i| size * (i as f32 / 16.0 - 0.9));
            let mut codes = [0; KvType::GROUP];
            let scale = f16::from_le_bytes(kernels.to_q8_0(&x, &mut codes)).to_f32();
            for (x, code) in x.iter().zip(codes) {
                let found = scale * f32::from(code.cast_signed());
                // A scale of few bits is off by half of the least there is, 127 times.
                assert!((found - x).abs() < 127.0 * 3e-8, "{x:e} became {found:e}");
            }
        }
    }
}

#[test]
fn lengths_around_pages_splits_and_windows() {
    let kernels = Kernels::for_isa(crate::Isa::detect());
    for window in [
        None,
        Some(PAGE_TOKENS),
        Some(SPLIT_TOKENS),
        Some(SPLIT_TOKENS + 1),
    ] {
        for tokens in [1, 31, 32, 33, 127, 128, 129, 160, 257, 300] {
            let sequence = Sequence::new(spec(1, 32, window), 4, tokens);
            let exact = sequence.exact();
            for (kv, bound) in BOUNDS {
                let error = relative_error(&sequence.run(kv, kernels, 2, tokens), &exact);
                assert!(error < bound, "{kv:?} {tokens} {window:?}: {error}");
            }
        }
    }
}

#[test]
fn chunks_threads_and_instruction_sets_give_the_same_bits() {
    for (group, head_dim, window) in [
        (1, 64, None),
        (8, 32, Some(50)),
        (3, 24, Some(140)),
        (2, 80, None),
    ] {
        let sequence = Sequence::new(spec(2, head_dim, window), group, 300);
        for (kv, _) in BOUNDS {
            let whole = sequence.run(kv, Kernels::all()[0], 1, 300);
            for kernels in Kernels::all() {
                for (threads, chunk) in [(1, 1), (3, 1), (2, 7), (4, 33), (3, 300)] {
                    assert_eq!(
                        bits(&sequence.run(kv, kernels, threads, chunk)),
                        bits(&whole),
                        "{kv:?}, {:?}, {threads} threads, chunks of {chunk}",
                        kernels.isa()
                    );
                }
            }
        }
    }
}
