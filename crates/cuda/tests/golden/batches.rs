//! Rows of several sequences in one batch, and how many of them are sampled: no row changes by it.

use std::sync::Arc;

use carat_cuda::CudaBackend;
use carat_gguf::QuantType;
use carat_model::{
    Model, TokenId,
    backend::{
        Backend, BackendError, Batch, Batching, CompileOptions, Draw, Executor, Outputs, Run,
        token_feeds,
    },
    evaluate, gemma4,
    kv::{PageId, PerGroup},
    sampling::Sampling,
};
use carat_testkit::tiny::{Tiny, Variant};

use super::{logits, same_bits};

/// The number of sampled rows changes nothing for the last one, as long as that leaves the rows behind the cut in their class
/// and bucket.
pub(super) fn select_sampled(card: &CudaBackend, variant: Variant) -> Result<(), String> {
    let tiny = Tiny::new(variant, QuantType::Q8_0);
    let model = tiny.model();
    for (rows, few, many) in [(8, 1, 8), (16, 1, 8), (16, 9, 16)] {
        let tokens = tiny.prompt(rows);
        let last = |sampled| last_logits(card, &model, &tokens, sampled, Batching::Fast);
        let what = format!("{few} and {many} of {rows} rows sampled");
        same_bits(&what, &last(many)?, &last(few)?)?;
    }
    Ok(())
}

/// Logits of the last row of a batch whose last rows are sampled.
fn last_logits(
    card: &CudaBackend,
    model: &Model,
    tokens: &[TokenId],
    sampled: usize,
    batching: Batching,
) -> Result<Vec<f32>, String> {
    let options = CompileOptions {
        batching,
        ..evaluate::options(tokens.len(), tokens.len())
    };
    let compiled = card.compile(&gemma4::plan(model), Arc::clone(&model.weights), &options);
    let mut executor = compiled.map_err(|e| e.to_string())?;
    let pages = [PageId(0)];
    let run = Run {
        rows: 0..tokens.len(),
        position: 0,
        pages: PerGroup {
            full: &pages,
            sliding: &pages,
        },
        sampled,
        visible_end: None,
        table: None,
    };
    let batch = Batch {
        feeds: &token_feeds(tokens),
        runs: &[run],
    };
    let mut outputs = Outputs::default();
    let sampling = Sampling::greedy();
    let draws = vec![Draw::logits(&sampling); sampled];
    compute(executor.as_mut(), &batch, &draws, &mut outputs).map_err(|e| e.to_string())?;
    let last = outputs.rows.pop().ok_or("no rows")?;
    Ok(last.logits)
}

/// Runs a batch by itself.
pub(super) fn compute(
    executor: &mut dyn Executor,
    batch: &Batch<'_>,
    draws: &[Draw<'_>],
    outputs: &mut Outputs,
) -> Result<(), BackendError> {
    let ticket = executor.submit(batch)?;
    executor.draw(&ticket, draws)?;
    executor.collect(ticket, outputs)
}

/// Three sequences side by side, their pages in disorder and freed behind the window, give what each gives alone.
pub(super) fn batched_small(card: &CudaBackend, variant: Variant) -> Result<(), String> {
    let tiny = Tiny::new(variant, QuantType::Q8_0);
    let model = tiny.model();
    let prompt = tiny.prompt(42 + 66 + 70);
    let sequences = [&prompt[..42], &prompt[42..108], &prompt[108..]];
    let found = side_by_side(card, &model, sequences, [1, 3, 4], Batching::Fast)?;
    for (tokens, found) in sequences.iter().zip(&found) {
        let alone = logits(card, &model, tokens, 5)?;
        same_bits("in a batch and alone", found, &alone)?;
    }
    Ok(())
}

/// A sequence among others gives the same whoever the others are.
pub(super) fn batched_large(card: &CudaBackend, variant: Variant) -> Result<(), String> {
    let tiny = Tiny::new(variant, QuantType::Q8_0);
    let model = tiny.model();
    let prompt = tiny.prompt(70 + 2 * (10 + 90));
    let (watched, others) = prompt.split_at(70);
    let with = |others: &[TokenId]| -> Result<Vec<f32>, String> {
        let sequences = [&others[..10], watched, &others[10..]];
        let [_, found, _] = side_by_side(card, &model, sequences, [1, 7, 9], Batching::Fast)?;
        Ok(found)
    };
    let (some, more) = others.split_at(100);
    same_bits("among others", &with(some)?, &with(more)?)
}

/// Batch-invariant: rows among more than a small batch of others, in chunks of any length and whether others are sampled or not, give
/// what they give in small batches alone.
pub(super) fn invariant(card: &CudaBackend, variant: Variant) -> Result<(), String> {
    let tiny = Tiny::new(variant, QuantType::Q8_0);
    let model = tiny.model();
    let prompt = tiny.prompt(42 + 66 + 70);
    let sequences = [&prompt[..42], &prompt[42..108], &prompt[108..]];
    for advance in [[1, 9, 30], [11, 13, 3]] {
        let found = side_by_side(card, &model, sequences, advance, Batching::Invariant)?;
        for (tokens, found) in sequences.iter().zip(&found) {
            let alone = logits(card, &model, tokens, 5)?;
            let what = format!("{advance:?} rows at a time and alone");
            same_bits(&what, found, &alone)?;
        }
    }
    let tokens = &prompt[..29];
    let alone = logits(card, &model, tokens, 4)?;
    let alone = &alone[alone.len() - alone.len() / tokens.len()..];
    for sampled in [1, 8, 10, 29] {
        let last = last_logits(card, &model, tokens, sampled, Batching::Invariant)?;
        same_bits(&format!("{sampled} of 29 rows sampled"), &last, alone)?;
    }
    Ok(())
}

/// Logits of three sequences in one batch, each of which advances by another number of tokens.
fn side_by_side(
    card: &CudaBackend,
    model: &Model,
    sequences: [&[TokenId]; 3],
    advance: [usize; 3],
    batching: Batching,
) -> Result<[Vec<f32>; 3], String> {
    let options = CompileOptions {
        pages: PerGroup {
            full: 12,
            sliding: 12,
        },
        chunk_pages: 0,
        host_pages: PerGroup::default(),
        kv: PerGroup::default(),
        max_rows: 40,
        max_sampled: 40,
        probe: false,
        batching,
    };
    let compiled = card.compile(&gemma4::plan(model), Arc::clone(&model.weights), &options);
    let mut executor = compiled.map_err(|e| e.to_string())?;
    let mut found: [Vec<f32>; 3] = Default::default();
    let mut fed = [0; 3];
    while fed.iter().zip(sequences).any(|(fed, s)| *fed < s.len()) {
        let take: [usize; 3] = std::array::from_fn(|s| advance[s].min(sequences[s].len() - fed[s]));
        step(executor.as_mut(), sequences, fed, take, &mut found)?;
        for (fed, take) in fed.iter_mut().zip(take) {
            *fed += take;
        }
    }
    Ok(found)
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
    // The other group has them the other way round.
    let mut sliding: Vec<Vec<PageId>> = full
        .iter()
        .map(|table| table.iter().map(|page| PageId(11 - page.0)).collect())
        .collect();
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
            visible_end: None,
            table: None,
        });
        owners.extend(std::iter::repeat_n(s, take[s]));
    }
    let batch = Batch {
        feeds: &token_feeds(&tokens),
        runs: &runs,
    };
    let mut outputs = Outputs::default();
    let draws = vec![Draw::logits(&sampling); owners.len()];
    compute(executor, &batch, &draws, &mut outputs).map_err(|e| e.to_string())?;
    for (owner, row) in owners.into_iter().zip(&outputs.rows) {
        found[owner].extend_from_slice(&row.logits);
    }
    Ok(())
}
