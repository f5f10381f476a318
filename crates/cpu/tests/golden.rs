//! Whole models on this backend: as near to published logits as the peer's engine, and the same bits however they are fed,
//! within a class of batches: up to 32 rows, or more.

use carat_cpu::{CpuBackend, CpuConfig, Fusion, Isa};
use carat_gguf::QuantType;
use carat_model::{
    backend::{
        Backend, Batch, CompileOptions, Draw, Executor, KvType, Outputs, PAGE_TOKENS, PageId,
        PerGroup, Run, token_feeds,
    },
    evaluate::{self, Pages},
    gemma4,
    kv::first_visible_page,
    plan::Plan,
    reference::Reference,
    sampling::Sampling,
};
use carat_testkit::{
    close,
    fixtures::{self, Fixture},
};

/// Types of the cache: all that is tested holds for each.
const KV_TYPES: [KvType; 2] = [KvType::F16, KvType::Q8_0];

fn backend(threads: usize, isa: Option<Isa>) -> CpuBackend {
    CpuBackend::new(&CpuConfig {
        threads: Some(threads),
        isa,
        ..CpuConfig::default()
    })
}

fn compile(
    backend: &CpuBackend,
    fixture: &Fixture,
    options: &CompileOptions,
) -> (Plan, Box<dyn Executor>) {
    let model = fixture.model();
    let plan = gemma4::plan(&model);
    let executor = backend
        .compile(&plan, model.weights, options)
        .expect("tiny models fit");
    (plan, executor)
}

/// The logits of all sampled rows.
fn run(executor: &mut dyn Executor, tokens: &[u32], runs: &[Run<'_>]) -> Vec<Vec<f32>> {
    let batch = Batch {
        feeds: &token_feeds(tokens),
        runs,
    };
    let sampling = Sampling::greedy();
    let draws = vec![Draw::logits(&sampling); batch.sampled_count()];
    let ticket = executor.submit(&batch).expect("runs");
    if !draws.is_empty() {
        executor.draw(&ticket, &draws).expect("draws");
    }
    let mut outputs = Outputs::default();
    executor.collect(ticket, &mut outputs).expect("collects");
    outputs.rows.into_iter().map(|row| row.logits).collect()
}

fn options(kv: KvType, tokens: usize, chunk: usize) -> CompileOptions {
    CompileOptions {
        kv: kv.into(),
        ..evaluate::options(tokens, chunk)
    }
}

fn logits(backend: &CpuBackend, kv: KvType, fixture: &Fixture, chunk: usize) -> Vec<f32> {
    logits_of(backend, kv, fixture, &fixture.tokens(), chunk)
}

fn logits_of(
    backend: &CpuBackend,
    kv: KvType,
    fixture: &Fixture,
    tokens: &[u32],
    chunk: usize,
) -> Vec<f32> {
    let (plan, mut executor) = compile(backend, fixture, &options(kv, tokens.len(), chunk));
    evaluate::logits(executor.as_mut(), &plan, tokens, chunk).expect("runs")
}

fn reference_logits(fixture: &Fixture, kv: KvType) -> Vec<f32> {
    let model = fixture.model();
    let tokens = fixture.tokens();
    let options = options(kv, tokens.len(), usize::MAX);
    let plan = gemma4::plan(&model);
    let mut reference = Reference
        .compile(&plan, model.weights, &options)
        .expect("tiny models fit");
    evaluate::logits(reference.as_mut(), &plan, &tokens, usize::MAX).expect("runs")
}

fn fixtures_and_kv_types() -> impl Iterator<Item = (&'static Fixture, KvType)> {
    let all = fixtures::ALL.iter();
    all.flat_map(|fixture| KV_TYPES.map(|kv| (fixture, kv)))
}

#[test]
fn logits_are_as_near_to_the_published_ones_as_the_peers() {
    for fixture in &fixtures::ALL {
        let (found, expected) = (
            logits(&backend(2, None), KvType::F16, fixture, usize::MAX),
            fixture.logits(),
        );
        let error = close::relative_l2(&found, &expected);
        let columns = expected.len() / fixture.tokens().len();
        let agreement = close::arg_max_agreement(&found, &expected, columns);
        let figures = format!(
            "{}: error {error:.4} (peer {:.4}), same arg max {agreement:.3} (peer {:.3})",
            fixture.name, fixture.peer_error, fixture.peer_agreement
        );
        assert!(error <= 1.1 * fixture.peer_error, "{figures}");
        assert!(agreement >= fixture.peer_agreement - 0.03, "{figures}");
    }
}

/// What 8 bits cost is what the reference shows with the same rounding, beside what the products' own rounding costs; and where
/// weights are floats, so that nothing else is rounded, both compute the same.
#[test]
fn eight_bit_keys_and_values_cost_what_rounding_them_costs() {
    for fixture in &fixtures::ALL {
        let expected = fixture.logits();
        let columns = expected.len() / fixture.tokens().len();
        let found = |isa, kv| logits(&backend(2, Some(isa)), kv, fixture, usize::MAX);
        let rounded = reference_logits(fixture, KvType::Q8_0);
        let kv_error = close::relative_l2(&rounded, &expected);
        let f16_error = close::relative_l2(&found(Isa::Scalar, KvType::F16), &expected);
        for isa in [Isa::Scalar, Isa::detect()] {
            let codes = found(isa, KvType::Q8_0);
            let error = close::relative_l2(&codes, &expected);
            let agreement = close::arg_max_agreement(&codes, &expected, columns);
            let figures = format!(
                "{} on {isa:?}: error {error:.4} (F16 {f16_error:.4}, rounding alone {kv_error:.4}), same arg max {agreement:.3} (peer {:.3})",
                fixture.name, fixture.peer_agreement
            );
            if fixture.name.ends_with("f32") {
                let apart = close::relative_l2(&codes, &rounded);
                assert!(apart <= 1e-4, "{figures}: {apart:.2e} from the reference");
            }
            // Another rounding of products rounds other keys up: the same error, drawn again.
            assert!(
                error <= (1.1 * f16_error).hypot(1.25 * kv_error),
                "{figures}"
            );
            assert!(agreement >= fixture.peer_agreement - 0.05, "{figures}");
        }
    }
}

#[test]
fn small_batches_have_the_same_bits_in_any_chunks_on_any_threads() {
    for (fixture, kv) in fixtures_and_kv_types() {
        let single = logits(&backend(1, None), kv, fixture, 1);
        for (threads, chunk) in [(2, 7), (3, 16), (2, 1), (4, 32)] {
            assert!(
                single == logits(&backend(threads, None), kv, fixture, chunk),
                "{} with {kv:?} in chunks of {chunk} on {threads} threads",
                fixture.name
            );
        }
    }
}

#[test]
fn large_batches_have_the_same_bits_in_any_chunks_on_any_threads() {
    for (fixture, kv) in fixtures_and_kv_types() {
        let tokens = fixture.tokens().repeat(3);
        let whole = logits_of(&backend(1, None), kv, fixture, &tokens, usize::MAX);
        for (threads, chunk) in [
            (2, tokens.len() / 3),
            (3, tokens.len() / 2),
            (4, usize::MAX),
        ] {
            assert!(
                whole == logits_of(&backend(threads, None), kv, fixture, &tokens, chunk),
                "{} with {kv:?} in chunks of {chunk} on {threads} threads",
                fixture.name
            );
        }
    }
}

/// None, some and all of them; only where there are tiles is anything kept.
#[test]
fn repacked_weights_change_no_bit() {
    for fixture in &fixtures::ALL {
        let tokens = fixture.tokens().repeat(3);
        let keeping = |repack_bytes| {
            let backend = CpuBackend::new(&CpuConfig {
                threads: Some(2),
                repack_bytes,
                ..CpuConfig::default()
            });
            // Several batches: the first unpacks, the others find what it left.
            logits_of(&backend, KvType::F16, fixture, &tokens, 48)
        };
        let unpacked = keeping(0);
        for bytes in [100_000, 1 << 30] {
            assert!(unpacked == keeping(bytes), "{} with {bytes}", fixture.name);
        }
    }
}

/// In batches of both classes.
#[test]
fn operations_that_stand_alone_give_the_same_bits_as_those_together() {
    for fixture in &fixtures::ALL {
        for chunk in [5, usize::MAX] {
            let with = |fusion| {
                let backend = CpuBackend::new(&CpuConfig {
                    threads: Some(2),
                    fusion,
                    ..CpuConfig::default()
                });
                logits(&backend, KvType::F16, fixture, chunk)
            };
            assert!(
                with(Fusion::On) == with(Fusion::Off),
                "{} in chunks of {chunk}",
                fixture.name
            );
        }
    }
}

#[test]
fn every_level_of_instructions_gives_the_same_bits_to_small_batches() {
    for (fixture, kv) in fixtures_and_kv_types() {
        let best = logits(&backend(2, None), kv, fixture, 16);
        for isa in Isa::ALL.into_iter().filter(|isa| isa.available()) {
            let found = logits(&backend(2, Some(isa)), kv, fixture, 16);
            assert!(best == found, "{} with {kv:?} on {isa:?}", fixture.name);
        }
    }
}

/// Levels without tiles have one result for all batches. That of tiles is nearer to what the weights say.
#[test]
fn large_batches_in_tiles_are_nearer_to_the_reference() {
    for fixture in &fixtures::ALL {
        let exact = reference_logits(fixture, KvType::F16);
        let plain = logits(
            &backend(2, Some(Isa::Scalar)),
            KvType::F16,
            fixture,
            usize::MAX,
        );
        let eight_bit = close::relative_l2(&plain, &exact);
        for isa in Isa::ALL.into_iter().filter(|isa| isa.available()) {
            let found = logits(&backend(2, Some(isa)), KvType::F16, fixture, usize::MAX);
            if isa == Isa::Amx {
                let error = close::relative_l2(&found, &exact);
                // Where weights are floats, F16 in the cache is nearly all of the error.
                let share = if fixture.name.ends_with("f32") {
                    1.01
                } else {
                    0.6
                };
                let figures = format!("{}: {error:.2e}, eight bits {eight_bit:.2e}", fixture.name);
                assert!(error <= share * eight_bit, "{figures}");
            } else {
                assert!(plain == found, "{} on {isa:?}", fixture.name);
            }
        }
    }
}

/// One sequence of a mixed batch: its tokens, its pages, and how many are already fed.
struct Sequence {
    tokens: Vec<u32>,
    pages: PerGroup<Vec<PageId>>,
    fed: usize,
}

impl Sequence {
    /// The `index`th of `count` that have `each` pages in both groups, whose numbers are nowhere the same.
    fn new(tokens: &[u32], index: usize, count: usize, each: usize) -> Sequence {
        let place = |page: usize| count * page + index;
        Sequence {
            tokens: tokens.to_vec(),
            pages: PerGroup {
                full: (0..each).map(|p| PageId(place(p) as u32)).collect(),
                sliding: (0..each)
                    .map(|p| PageId((count * each - place(p)) as u32))
                    .collect(),
            },
            fed: 0,
        }
    }

    /// The next tokens as a run of rows from `first` on. Sliding pages behind the window are freed.
    fn run(&mut self, plan: &Plan, first: usize, count: usize) -> (&[u32], Run<'_>) {
        let position = self.fed;
        self.fed += count;
        if let Some(window) = plan.window() {
            let seen = first_visible_page(position, window);
            self.pages.sliding[..seen].fill(PageId::FREED);
        }
        let run = Run {
            rows: first..first + count,
            position,
            pages: PerGroup {
                full: &self.pages.full,
                sliding: &self.pages.sliding,
            },
            sampled: 1,
            visible_end: None,
            table: None,
        };
        (&self.tokens[position..position + count], run)
    }
}

/// [`evaluate::options`] for several sequences of so many pages.
fn shared_options(kv: KvType, rows: usize, sequences: usize, each: usize) -> CompileOptions {
    let mut options = options(kv, rows, usize::MAX);
    options.pages = options.pages.map(|_| sequences * each + 1);
    options
}

#[test]
fn company_in_the_batch_changes_nothing() {
    for (fixture, kv) in fixtures_and_kv_types() {
        let tokens = fixture.tokens();
        let alone = logits(&backend(2, None), kv, fixture, 16);
        let vocab = alone.len() / tokens.len();
        let each = tokens.len().div_ceil(PAGE_TOKENS);
        let options = shared_options(kv, tokens.len() * 3, 3, each);
        let (plan, mut executor) = compile(&backend(2, None), fixture, &options);
        // The same text three times, with pages interleaved, fed 1, 5 and 19 tokens at a time.
        let steps = [1, 5, 19];
        let mut sequences: Vec<Sequence> =
            (0..3).map(|s| Sequence::new(&tokens, s, 3, each)).collect();
        while sequences.iter().any(|s| s.fed < s.tokens.len()) {
            let mut batch_tokens = Vec::new();
            let mut runs = Vec::new();
            let mut expected = Vec::new();
            for (sequence, step) in sequences.iter_mut().zip(steps) {
                let count = step.min(sequence.tokens.len() - sequence.fed);
                if count == 0 {
                    continue;
                }
                let (tokens, run) = sequence.run(&plan, batch_tokens.len(), count);
                batch_tokens.extend_from_slice(tokens);
                expected.push(run.position + count - 1);
                runs.push(run);
            }
            let rows = self::run(executor.as_mut(), &batch_tokens, &runs);
            for (row, position) in rows.iter().zip(expected) {
                let alone = &alone[position * vocab..][..vocab];
                assert!(row == alone, "{} with {kv:?} at {position}", fixture.name);
            }
        }
    }
}

/// The logits after the first of some prompts, all fed as one batch.
fn logits_of_the_first(fixture: &Fixture, prompts: &[&[u32]]) -> Vec<f32> {
    let rows: usize = prompts.iter().map(|prompt| prompt.len()).sum();
    let each = rows.div_ceil(PAGE_TOKENS);
    let options = shared_options(KvType::F16, rows, prompts.len(), each);
    let (plan, mut executor) = compile(&backend(2, None), fixture, &options);
    let mut sequences: Vec<Sequence> = (prompts.iter().enumerate())
        .map(|(i, prompt)| Sequence::new(prompt, i, prompts.len(), each))
        .collect();
    let mut tokens = Vec::new();
    let mut runs = Vec::new();
    for sequence in &mut sequences {
        let count = sequence.tokens.len();
        let (fed, run) = sequence.run(&plan, tokens.len(), count);
        tokens.extend_from_slice(fed);
        runs.push(run);
    }
    run(executor.as_mut(), &tokens, &runs).swap_remove(0)
}

#[test]
fn company_in_a_large_batch_changes_nothing() {
    for fixture in &fixtures::ALL {
        let tokens = fixture.tokens();
        let alone = logits_of_the_first(fixture, &[&tokens]);
        let company: [&[u32]; 3] = [&tokens, &tokens[7..11], &tokens[3..]];
        assert!(
            alone == logits_of_the_first(fixture, &company),
            "{}",
            fixture.name
        );
    }
}

#[test]
fn a_batch_without_sampled_rows_fills_the_cache_only() {
    for fixture in &fixtures::ALL {
        let tokens = fixture.tokens();
        let whole = logits(&backend(2, None), KvType::F16, fixture, 16);
        let options = evaluate::options(tokens.len(), usize::MAX);
        let (plan, mut executor) = compile(&backend(2, None), fixture, &options);
        let mut pages = Pages::new(&plan, options.pages);
        let mut last = Vec::new();
        for start in (0..tokens.len()).step_by(24) {
            let rows = start..tokens.len().min(start + 24);
            let sampled = usize::from(rows.end == tokens.len());
            pages.advance(start);
            let run = Run {
                rows: 0..rows.len(),
                position: rows.start,
                pages: pages.tables(),
                sampled,
                visible_end: None,
                table: None,
            };
            last = self::run(executor.as_mut(), &tokens[rows], &[run]);
            assert_eq!(last.len(), sampled);
        }
        assert!(whole.ends_with(&last[0]), "{}", fixture.name);
    }
}

/// F32 matrices are read from copies in BF16 where their values allow it: the bits of a file that has them in BF16.
#[test]
fn copied_floats_give_the_bits_of_floats_in_the_file() {
    let fixture = fixtures::ALL
        .iter()
        .find(|fixture| fixture.name == "e2b-like-q4_0")
        .expect("is there");
    let tokens = &fixture.tokens()[..40];
    let [copied, stored] = [QuantType::F32, QuantType::BF16].map(|quant| {
        let model = fixture.model_of_rounded_floats(quant);
        let narrowed = model.weights.with_floats_narrowed();
        let is_copied = |(weight, m)| narrowed.matrix(weight) != m;
        assert_eq!(
            model.weights.iter().any(is_copied),
            quant == QuantType::F32,
            "{quant}"
        );
        let plan = gemma4::plan(&model);
        let options = evaluate::options(tokens.len(), tokens.len());
        let mut executor = backend(2, None)
            .compile(&plan, model.weights, &options)
            .expect("tiny models fit");
        [1, 40].map(|chunk| {
            let logits = evaluate::logits(executor.as_mut(), &plan, tokens, chunk).expect("runs");
            logits.into_iter().map(f32::to_bits).collect::<Vec<_>>()
        })
    });
    assert!(copied == stored);
}
