//! Whole models: logits of a published implementation, models of every variant in every format against the reference, and
//! what must agree bit for bit.

mod harness;

use std::sync::Arc;

use carat_cuda::{CudaBackend, Fusion, Graphs, TablePlace};
use carat_gguf::QuantType;
use carat_model::{
    Model, TokenId,
    backend::{
        Backend, Batch, CompileOptions, Executor, Outputs, PageId, PerGroup, RowOutput, Run,
    },
    evaluate, gemma4,
    reference::Reference,
    sampling::Sampling,
};
use carat_testkit::{
    close, fixtures,
    tiny::{Tiny, Variant},
};
use libtest_mimic::{Failed, Trial};

/// Of f32 activations with keys and values in half precision, over a whole model.
const GOLDEN_BOUND: f64 = 5e-3;
const CHUNKS: [usize; 4] = [usize::MAX, 1, 7, 16];

/// The same card with different choices.
#[derive(Clone)]
struct Cards {
    fused: Arc<CudaBackend>,
    single: Arc<CudaBackend>,
    host_tables: Arc<CudaBackend>,
    eager: Arc<CudaBackend>,
}

fn main() {
    let cards = open();
    let mut cases = Cases {
        cards: cards.as_ref().ok().cloned(),
        trials: Vec::new(),
    };
    for fixture in &fixtures::ALL {
        for chunk in CHUNKS {
            let label = if chunk == usize::MAX {
                "whole".to_owned()
            } else {
                chunk.to_string()
            };
            cases.add(
                format!("fixture/{}/fused/{label}", fixture.name),
                move |cards| golden(&cards.fused, fixture, chunk),
            );
        }
        cases.add(format!("fixture/{}/single/whole", fixture.name), |cards| {
            golden(&cards.single, fixture, usize::MAX)
        });
        cases.add(format!("exact/{}", fixture.name), |cards| {
            exact(cards, fixture)
        });
    }
    for variant in Variant::ALL {
        for quant in QuantType::all() {
            cases.add(format!("tiny/{variant:?}/{quant}"), move |cards| {
                tiny(cards, variant, quant)
            });
        }
        cases.add(format!("batched/{variant:?}"), move |cards| {
            batched(cards, variant)
        });
        cases.add(format!("drawn/{variant:?}"), move |cards| {
            drawn(cards, variant)
        });
    }
    harness::run(cards.map(drop), cases.trials);
}

fn open() -> Result<Cards, String> {
    Ok(Cards {
        fused: harness::open(|config| config.fusion = Fusion::On)?,
        single: harness::open(|config| config.fusion = Fusion::Off)?,
        host_tables: harness::open(|config| config.tables = TablePlace::Host)?,
        eager: harness::open(|config| config.graphs = Graphs::Off)?,
    })
}

struct Cases {
    cards: Option<Cards>,
    trials: Vec<Trial>,
}

impl Cases {
    fn add(
        &mut self,
        name: String,
        check: impl FnOnce(&Cards) -> Result<(), String> + Send + 'static,
    ) {
        let cards = self.cards.clone();
        let ignored = cards.is_none();
        let trial = Trial::test(name, move || {
            check(&cards.ok_or("no card")?).map_err(Failed::from)
        });
        self.trials.push(trial.with_ignored_flag(ignored));
    }
}

fn logits(
    backend: &dyn Backend,
    model: &Model,
    tokens: &[TokenId],
    chunk: usize,
) -> Result<Vec<f32>, String> {
    let plan = gemma4::plan(model);
    let options = evaluate::options(tokens.len(), chunk);
    let weights = Arc::clone(&model.weights);
    let mut executor = backend
        .compile(&plan, weights, &options)
        .map_err(|e| e.to_string())?;
    let chunk = chunk.min(tokens.len());
    evaluate::logits(executor.as_mut(), tokens, chunk).map_err(|e| e.to_string())
}

fn golden(card: &CudaBackend, fixture: &fixtures::Fixture, chunk: usize) -> Result<(), String> {
    let found = logits(card, &fixture.model(), &fixture.tokens(), chunk)?;
    within(&found, &fixture.logits(), GOLDEN_BOUND)
}

fn within(found: &[f32], expected: &[f32], bound: f64) -> Result<(), String> {
    let error = close::relative_l2(found, expected);
    if error <= bound {
        return Ok(());
    }
    Err(format!(
        "relative error {error:.2e}, at most {bound:.1e} allowed"
    ))
}

fn same_bits(what: &str, a: &[f32], b: &[f32]) -> Result<(), String> {
    let differs = a
        .iter()
        .zip(b)
        .filter(|(a, b)| a.to_bits() != b.to_bits())
        .count();
    if differs == 0 && a.len() == b.len() {
        return Ok(());
    }
    let error = close::relative_l2(a, b);
    Err(format!(
        "{what}: {differs} of {} logits differ, by {error:.2e}",
        a.len()
    ))
}

/// Fused or not, in any chunks, launched one by one or as a graph, tables on either side of the bus: the same bits.
fn exact(cards: &Cards, fixture: &fixtures::Fixture) -> Result<(), String> {
    let (model, tokens) = (fixture.model(), fixture.tokens());
    let expected = logits(&*cards.fused, &model, &tokens, usize::MAX)?;
    let single = logits(&*cards.single, &model, &tokens, usize::MAX)?;
    same_bits("fused and single steps", &expected, &single)?;
    for chunk in &CHUNKS[1..] {
        let chunked = logits(&*cards.fused, &model, &tokens, *chunk)?;
        same_bits(&format!("chunks of {chunk}"), &expected, &chunked)?;
        let eager = logits(&*cards.eager, &model, &tokens, *chunk)?;
        same_bits(
            &format!("a graph of {chunk} rows and eager"),
            &chunked,
            &eager,
        )?;
    }
    let tables = logits(&*cards.host_tables, &model, &tokens, usize::MAX)?;
    same_bits("tables in host memory", &expected, &tables)
}

/// A model of every variant in every format, long enough to leave the window.
fn tiny(cards: &Cards, variant: Variant, quant: QuantType) -> Result<(), String> {
    let tiny = Tiny::new(variant, quant);
    let (model, tokens) = (tiny.model(), tiny.prompt(45));
    let expected = logits(&Reference, &model, &tokens, 45)?;
    let found = logits(&*cards.fused, &model, &tokens, 13)?;
    within(&found, &expected, 2e-3)
}

/// Three sequences side by side, their pages in disorder and freed behind the window, give what each gives alone.
fn batched(cards: &Cards, variant: Variant) -> Result<(), String> {
    let tiny = Tiny::new(variant, QuantType::Q8_0);
    let model = tiny.model();
    let plan = gemma4::plan(&model);
    let prompt = tiny.prompt(210);
    let sequences = [&prompt[..75], &prompt[75..140], &prompt[140..]];
    let alone = |tokens: &[TokenId]| logits(&*cards.fused, &model, tokens, 5);
    let options = CompileOptions {
        pages: PerGroup {
            full: 12,
            sliding: 12,
        },
        max_rows: 40,
        max_sampled: 40,
        probe: false,
    };
    let weights = Arc::clone(&model.weights);
    let compiled = cards.fused.compile(&plan, weights, &options);
    let mut executor = compiled.map_err(|e| e.to_string())?;
    let mut found: [Vec<f32>; 3] = Default::default();
    let mut fed = [0; 3];
    // Ragged: each sequence advances by another number of tokens.
    while fed.iter().zip(sequences).any(|(fed, s)| *fed < s.len()) {
        let take: [usize; 3] =
            std::array::from_fn(|s| [1, 7, 16][s].min(sequences[s].len() - fed[s]));
        step(executor.as_mut(), sequences, fed, take, &mut found)?;
        for (fed, take) in fed.iter_mut().zip(take) {
            *fed += take;
        }
    }
    for (tokens, found) in sequences.iter().zip(&found) {
        same_bits("in a batch and alone", found, &alone(tokens)?)?;
    }
    Ok(())
}

/// Feeds the next tokens of each sequence as one batch.
fn step(
    executor: &mut dyn Executor,
    sequences: [&[TokenId]; 3],
    fed: [usize; 3],
    take: [usize; 3],
    found: &mut [Vec<f32>; 3],
) -> Result<(), String> {
    let sampling = Sampling::greedy();
    // Page `i` of sequence `s`, in an order that has nothing to do with either.
    let table =
        |s: usize| -> Vec<PageId> { (0..4).map(|i| PageId(11 - (3 * i + s as u32))).collect() };
    let full: Vec<Vec<PageId>> = (0..3).map(table).collect();
    let mut sliding = full.clone();
    for (s, table) in sliding.iter_mut().enumerate() {
        let freed = (fed[s] + 1).saturating_sub(8) / 32;
        table[..freed].fill(PageId::FREED);
    }
    let mut tokens = Vec::new();
    let mut runs = Vec::new();
    let mut owners = Vec::new();
    for s in (0..3).filter(|&s| take[s] > 0) {
        let start = tokens.len();
        tokens.extend_from_slice(&sequences[s][fed[s]..fed[s] + take[s]]);
        runs.push(Run {
            rows: start..tokens.len(),
            position: fed[s],
            pages: PerGroup {
                full: &full[s],
                sliding: &sliding[s],
            },
            sampled: take[s],
            sampling: &sampling,
            history: &sequences[s][..fed[s] + take[s]],
            output: RowOutput::Logits,
        });
        owners.extend(std::iter::repeat_n(s, take[s]));
    }
    let batch = Batch {
        tokens: &tokens,
        runs: &runs,
    };
    let ticket = executor.submit(&batch).map_err(|e| e.to_string())?;
    let mut outputs = Outputs::default();
    executor
        .collect(ticket, &mut outputs)
        .map_err(|e| e.to_string())?;
    for (owner, row) in owners.into_iter().zip(&outputs.rows) {
        found[owner].extend_from_slice(&row.logits);
    }
    Ok(())
}

/// Answers of three requests with different sampling: from the device in graphs and without, and from logits on the host.
/// Without penalties also with every batch submitted before the one before is collected.
fn drawn(cards: &Cards, variant: Variant) -> Result<(), String> {
    let tiny = Tiny::new(variant, QuantType::Q8_0);
    let expected = answers(&cards.fused, &tiny, RowOutput::Logits)?;
    for card in [&cards.fused, &cards.eager] {
        if answers(card, &tiny, RowOutput::Token)? != expected {
            return Err("the device draws other tokens than the host".to_owned());
        }
    }
    let expected = chained_answers(&cards.fused, &tiny, false)?;
    profile(&cards.fused, &tiny)?;
    if chained_answers(&cards.fused, &tiny, true)? != expected {
        return Err("chained batches give other tokens".to_owned());
    }
    Ok(())
}

/// Every launch of a step is timed, sampling last.
fn profile(card: &CudaBackend, tiny: &Tiny) -> Result<(), String> {
    let model = tiny.model();
    let options = evaluate::options(1, 1);
    let compiled = card.compile(&gemma4::plan(&model), Arc::clone(&model.weights), &options);
    let mut executor = compiled.map_err(|e| e.to_string())?;
    let pages = [PageId(0)];
    let pages = PerGroup {
        full: pages.as_slice(),
        sliding: pages.as_slice(),
    };
    let run = Run {
        rows: 0..1,
        position: 0,
        pages,
        sampled: 1,
        sampling: &Sampling::greedy(),
        history: &[3],
        output: RowOutput::Token,
    };
    let batch = Batch {
        tokens: &[3],
        runs: &[run],
    };
    let times = executor.profile(&batch).map_err(|e| e.to_string())?;
    let times = times.ok_or("no times")?;
    let labels: Vec<&str> = times.iter().map(|(label, _)| label.as_str()).collect();
    let all_timed = times.iter().all(|(_, time)| !time.is_zero());
    if labels.len() > 10 && labels.last() == Some(&"sample") && all_timed {
        return Ok(());
    }
    Err(format!("{times:?}"))
}

/// Tokens that follow two tokens, in batches of a row each.
fn chained_answers(
    card: &CudaBackend,
    tiny: &Tiny,
    chained: bool,
) -> Result<Vec<Vec<TokenId>>, String> {
    let model = tiny.model();
    let settings = [Sampling::greedy(), Sampling::default()];
    let options = CompileOptions {
        pages: PerGroup {
            full: 2,
            sliding: 2,
        },
        max_rows: 4,
        max_sampled: 4,
        probe: false,
    };
    let compiled = card.compile(&gemma4::plan(&model), Arc::clone(&model.weights), &options);
    let mut executor = compiled.map_err(|e| e.to_string())?;
    let pages = [[PageId(0)], [PageId(1)]];
    let mut sequences = vec![vec![3], vec![7]];
    let mut outputs = Outputs::default();
    let mut before = None;
    for position in 0..12 {
        // What is not known yet is any token.
        let tokens: Vec<TokenId> = (sequences.iter())
            .map(|s| s.get(position).copied().unwrap_or(0))
            .collect();
        let run = |s: usize| Run {
            rows: s..s + 1,
            position,
            pages: PerGroup {
                full: &pages[s],
                sliding: &pages[s],
            },
            sampled: 1,
            sampling: &settings[s],
            history: &[],
            // Now and then the host samples.
            output: match position {
                5 => RowOutput::Logprobs { top: 1 },
                _ => RowOutput::Token,
            },
        };
        let runs = [run(0), run(1)];
        let batch = Batch {
            tokens: &tokens,
            runs: &runs,
        };
        let submitted = match before {
            None => executor.submit(&batch),
            Some(_) => executor.submit_chained(&batch),
        };
        let ticket = submitted.map_err(|e| e.to_string())?;
        let waiting = if chained {
            before.replace(ticket)
        } else {
            Some(ticket)
        };
        if let Some(ticket) = waiting {
            let collected = executor.collect(ticket, &mut outputs);
            collected.map_err(|e| e.to_string())?;
            for (sequence, row) in sequences.iter_mut().zip(&outputs.rows) {
                sequence.push(row.token);
            }
        }
    }
    if let Some(ticket) = before {
        let collected = executor.collect(ticket, &mut outputs);
        collected.map_err(|e| e.to_string())?;
        for (sequence, row) in sequences.iter_mut().zip(&outputs.rows) {
            sequence.push(row.token);
        }
    }
    Ok(sequences)
}

/// Tokens that follow a prompt, in three requests side by side.
fn answers(
    card: &CudaBackend,
    tiny: &Tiny,
    output: RowOutput,
) -> Result<Vec<Vec<TokenId>>, String> {
    let model = tiny.model();
    let penalized = Sampling {
        repeat_penalty: 1.3,
        logit_bias: vec![(3, 2.0), (5, f32::NEG_INFINITY)],
        seed: 3,
        ..Sampling::default()
    };
    let open = Sampling {
        top_k: 0,
        top_p: 1.0,
        min_p: 0.01,
        ..Sampling::default()
    };
    let settings = [Sampling::greedy(), penalized, open];
    let options = CompileOptions {
        pages: PerGroup {
            full: 3,
            sliding: 3,
        },
        max_rows: 64,
        max_sampled: 4,
        probe: false,
    };
    let compiled = card.compile(&gemma4::plan(&model), Arc::clone(&model.weights), &options);
    let mut executor = compiled.map_err(|e| e.to_string())?;
    let mut sequences: Vec<Vec<TokenId>> = (5..8).map(|n| tiny.prompt(n)).collect();
    let mut fed = [0; 3];
    let mut outputs = Outputs::default();
    for _ in 0..20 {
        let (mut tokens, mut runs) = (Vec::new(), Vec::new());
        let pages = [[PageId(0)], [PageId(1)], [PageId(2)]];
        for (s, sequence) in sequences.iter().enumerate() {
            let start = tokens.len();
            tokens.extend_from_slice(&sequence[fed[s]..]);
            runs.push(Run {
                rows: start..tokens.len(),
                position: fed[s],
                pages: PerGroup {
                    full: &pages[s],
                    sliding: &pages[s],
                },
                sampled: 1,
                sampling: &settings[s],
                history: sequence,
                output,
            });
            fed[s] = sequence.len();
        }
        let batch = Batch {
            tokens: &tokens,
            runs: &runs,
        };
        let submitted = executor.submit(&batch);
        let collected = submitted.and_then(|ticket| executor.collect(ticket, &mut outputs));
        collected.map_err(|e| e.to_string())?;
        for (sequence, row) in sequences.iter_mut().zip(&outputs.rows) {
            sequence.push(row.token);
        }
    }
    Ok(sequences)
}
