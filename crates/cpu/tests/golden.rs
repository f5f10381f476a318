//! Whole models on this backend: as near to published logits as the peer's engine, and the same bits however they are fed.

use carat_cpu::{CpuBackend, CpuConfig, Isa};
use carat_model::{
    backend::{
        Backend, Batch, CompileOptions, Executor, Outputs, PAGE_TOKENS, PageId, PerGroup,
        RowOutput, Run,
    },
    evaluate, gemma4,
    sampling::Sampling,
};
use carat_testkit::{
    close,
    fixtures::{self, Fixture},
};

fn backend(threads: usize, isa: Option<Isa>) -> CpuBackend {
    CpuBackend::new(&CpuConfig {
        threads: Some(threads),
        isa,
    })
}

fn compile(backend: &CpuBackend, fixture: &Fixture, options: &CompileOptions) -> Box<dyn Executor> {
    let model = fixture.model();
    let plan = gemma4::plan(&model);
    backend
        .compile(&plan, model.weights, options)
        .expect("tiny models fit")
}

fn logits(backend: &CpuBackend, fixture: &Fixture, chunk: usize) -> Vec<f32> {
    let tokens = fixture.tokens();
    let mut executor = compile(backend, fixture, &evaluate::options(tokens.len(), chunk));
    evaluate::logits(executor.as_mut(), &tokens, chunk).expect("runs")
}

#[test]
fn logits_are_as_near_to_the_published_ones_as_the_peers() {
    for fixture in &fixtures::ALL {
        let (found, expected) = (
            logits(&backend(2, None), fixture, usize::MAX),
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

#[test]
fn chunks_single_tokens_and_threads_give_the_same_bits() {
    for fixture in &fixtures::ALL {
        let whole = logits(&backend(1, None), fixture, usize::MAX);
        for (threads, chunk) in [(1, 1), (2, 7), (3, 16), (2, 1), (4, usize::MAX)] {
            assert!(
                whole == logits(&backend(threads, None), fixture, chunk),
                "{} in chunks of {chunk} on {threads} threads",
                fixture.name
            );
        }
    }
}

#[test]
fn every_level_of_instructions_gives_the_same_bits() {
    for fixture in &fixtures::ALL {
        let best = logits(&backend(2, None), fixture, 16);
        for isa in Isa::ALL.into_iter().filter(|isa| isa.available()) {
            let found = logits(&backend(2, Some(isa)), fixture, 16);
            assert!(best == found, "{} on {isa:?}", fixture.name);
        }
    }
}

/// One sequence of a mixed batch: its tokens, its pages, and how many are already fed.
struct Sequence {
    tokens: Vec<u32>,
    pages: Vec<PageId>,
    fed: usize,
}

#[test]
fn company_in_the_batch_changes_nothing() {
    for fixture in &fixtures::ALL {
        let tokens = fixture.tokens();
        let alone = logits(&backend(2, None), fixture, usize::MAX);
        let vocab = alone.len() / tokens.len();
        let each = tokens.len().div_ceil(PAGE_TOKENS);
        let mut options = evaluate::options(tokens.len() * 3, usize::MAX);
        options.pages = options.pages.map(|_| 3 * each);
        let mut executor = compile(&backend(2, None), fixture, &options);
        // The same text three times, at different places: pages interleaved, fed 1, 5 and 19 tokens at a time.
        let steps = [1, 5, 19];
        let mut sequences: Vec<Sequence> = (0..3)
            .map(|s| Sequence {
                tokens: tokens.clone(),
                pages: (0..each).map(|p| PageId((3 * p + s) as u32)).collect(),
                fed: 0,
            })
            .collect();
        let sampling = Sampling::greedy();
        while sequences.iter().any(|s| s.fed < s.tokens.len()) {
            let mut batch_tokens = Vec::new();
            let mut runs = Vec::new();
            let mut expected = Vec::new();
            for (sequence, step) in sequences.iter().zip(steps) {
                let end = sequence.tokens.len().min(sequence.fed + step);
                if sequence.fed == end {
                    continue;
                }
                let start = batch_tokens.len();
                batch_tokens.extend_from_slice(&sequence.tokens[sequence.fed..end]);
                let sampled = 1.min(end - sequence.fed);
                expected.push(end - 1);
                runs.push(Run {
                    rows: start..batch_tokens.len(),
                    position: sequence.fed,
                    pages: PerGroup {
                        full: &sequence.pages,
                        sliding: &sequence.pages,
                    },
                    sampled,
                    sampling: &sampling,
                    history: &sequence.tokens[..end],
                    output: RowOutput::Logits,
                });
            }
            let batch = Batch {
                tokens: &batch_tokens,
                runs: &runs,
            };
            let ticket = executor.submit(&batch).expect("runs");
            let mut outputs = Outputs::default();
            executor.collect(ticket, &mut outputs).expect("collects");
            for (row, position) in outputs.rows.iter().zip(expected) {
                let alone = &alone[position * vocab..][..vocab];
                assert!(row.logits == alone, "{} at {position}", fixture.name);
            }
            for (sequence, step) in sequences.iter_mut().zip(steps) {
                sequence.fed = sequence.tokens.len().min(sequence.fed + step);
            }
        }
    }
}

#[test]
fn a_batch_without_sampled_rows_fills_the_cache_only() {
    for fixture in &fixtures::ALL {
        let tokens = fixture.tokens();
        let whole = logits(&backend(2, None), fixture, usize::MAX);
        let options = evaluate::options(tokens.len(), usize::MAX);
        let mut executor = compile(&backend(2, None), fixture, &options);
        let pages: Vec<PageId> = (0..tokens.len().div_ceil(PAGE_TOKENS) as u32)
            .map(PageId)
            .collect();
        let middle = tokens.len() / 2;
        let mut outputs = Outputs::default();
        for (rows, sampled) in [(0..middle, 0), (middle..tokens.len(), 1)] {
            let run = Run {
                rows: 0..rows.len(),
                position: rows.start,
                pages: PerGroup {
                    full: &pages,
                    sliding: &pages,
                },
                sampled,
                sampling: &Sampling::greedy(),
                history: &tokens[..rows.end],
                output: RowOutput::Logits,
            };
            let batch = Batch {
                tokens: &tokens[rows],
                runs: &[run],
            };
            let ticket = executor.submit(&batch).expect("runs");
            executor.collect(ticket, &mut outputs).expect("collects");
            assert_eq!(outputs.rows.len(), sampled);
        }
        assert!(whole.ends_with(&outputs.rows[0].logits), "{}", fixture.name);
    }
}
