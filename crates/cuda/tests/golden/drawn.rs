//! Tokens that the device draws, beside those that the host draws from logits.

use std::sync::Arc;

use carat_cuda::CudaBackend;
use carat_gguf::QuantType;
use carat_model::{
    TokenId,
    backend::{
        Backend, Batch, Batching, CompileOptions, Draw, Executor, Feed, Outputs, RowOutput, Run,
        Ticket, token_feeds,
    },
    evaluate, gemma4,
    kv::{PageId, PerGroup},
    sampling::Sampling,
};
use carat_testkit::tiny::{Tiny, Variant};

use super::{Ways, batches::compute};

/// Answers of three requests with different sampling: from the device in graphs and without, and from logits on the host.
/// Also with every batch submitted before the one before is collected.
pub(super) fn drawn(ways: &Ways, variant: Variant) -> Result<(), String> {
    let tiny = Tiny::new(variant, QuantType::Q8_0);
    let expected = answers(&ways.usual, &tiny, RowOutput::Logits)?;
    for card in [&ways.usual, &ways.eager] {
        if answers(card, &tiny, RowOutput::Token)? != expected {
            return Err("the device draws other tokens than the host".to_owned());
        }
    }
    let expected = answers_ahead(&ways.usual, &tiny, false)?;
    profile(&ways.usual, &tiny)?;
    if answers_ahead(&ways.usual, &tiny, true)? != expected {
        return Err("batches fed ahead give other tokens".to_owned());
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
        visible_end: None,
        table: None,
    };
    let batch = Batch {
        feeds: &token_feeds(&[3]),
        runs: &[run],
    };
    let sampling = Sampling::greedy();
    let draw = Draw {
        output: RowOutput::Token,
        ..Draw::logits(&sampling)
    };
    let times = executor.profile(&batch, &[draw]);
    let times = times.map_err(|e| e.to_string())?;
    let times = times.ok_or("no times")?;
    let labels: Vec<&str> = times.iter().map(|launch| launch.label.as_str()).collect();
    let all_timed = times.iter().all(|launch| !launch.time.is_zero());
    if labels.len() > 10 && labels.last() == Some(&"sample") && all_timed {
        return Ok(());
    }
    Err(format!("{times:?}"))
}

/// Tokens that follow two tokens, in batches of a row each, which are submitted before the one before is collected if `ahead`.
fn answers_ahead(
    card: &CudaBackend,
    tiny: &Tiny,
    ahead: bool,
) -> Result<Vec<Vec<TokenId>>, String> {
    let model = tiny.model();
    let penalized = Sampling {
        repeat_penalty: 1.3,
        seed: 4,
        ..Sampling::default()
    };
    let settings = [Sampling::greedy(), penalized];
    let options = CompileOptions {
        pages: PerGroup {
            full: 2,
            sliding: 2,
        },
        chunk_pages: 0,
        host_pages: PerGroup::default(),
        kv: PerGroup::default(),
        max_rows: 4,
        max_sampled: 4,
        probe: false,
        batching: Batching::Fast,
    };
    let compiled = card.compile(&gemma4::plan(&model), Arc::clone(&model.weights), &options);
    let mut executor = compiled.map_err(|e| e.to_string())?;
    let pages = [[PageId(0)], [PageId(1)]];
    let mut sequences = vec![vec![3], vec![7]];
    let mut outputs = Outputs::default();
    let mut before: Option<Ticket> = None;
    for position in 0..12 {
        let feed = |s: usize| match before {
            Some(_) => Feed::Sampled(s as u32),
            None => Feed::Token(sequences[s][position]),
        };
        let feeds = [feed(0), feed(1)];
        let run = |s: usize| Run {
            rows: s..s + 1,
            position,
            pages: PerGroup {
                full: &pages[s],
                sliding: &pages[1 - s],
            },
            sampled: 1,
            visible_end: None,
            table: None,
        };
        let batch = Batch {
            feeds: &feeds,
            runs: &[run(0), run(1)],
        };
        let ticket = executor.submit(&batch).map_err(|e| e.to_string())?;
        if let Some(before) = before.take() {
            let collected = executor.collect(before, &mut outputs);
            collected.map_err(|e| e.to_string())?;
            for (sequence, row) in sequences.iter_mut().zip(&outputs.rows) {
                sequence.push(row.token);
            }
        }
        let draw = |s: usize| Draw {
            sampling: &settings[s],
            history: &sequences[s],
            mask: None,
            // Now and then the host samples one of them.
            output: match position {
                5 if s == 1 => RowOutput::Logits,
                _ => RowOutput::Token,
            },
        };
        let drawn = executor.draw(&ticket, &[draw(0), draw(1)]);
        drawn.map_err(|e| e.to_string())?;
        if executor.lookahead(&ticket) != (position != 5) {
            return Err(format!("lookahead at {position}"));
        }
        if ahead {
            before = Some(ticket);
            continue;
        }
        let collected = executor.collect(ticket, &mut outputs);
        collected.map_err(|e| e.to_string())?;
        for (sequence, row) in sequences.iter_mut().zip(&outputs.rows) {
            sequence.push(row.token);
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
        chunk_pages: 0,
        host_pages: PerGroup::default(),
        kv: PerGroup::default(),
        max_rows: 64,
        max_sampled: 4,
        probe: false,
        batching: Batching::Fast,
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
                visible_end: None,
                table: None,
            });
            fed[s] = sequence.len();
        }
        let batch = Batch {
            feeds: &token_feeds(&tokens),
            runs: &runs,
        };
        let draw = |(sampling, history)| Draw {
            sampling,
            history,
            mask: None,
            output,
        };
        let histories = sequences.iter().map(Vec::as_slice);
        let draws: Vec<Draw<'_>> = settings.iter().zip(histories).map(draw).collect();
        let computed = compute(executor.as_mut(), &batch, &draws, &mut outputs);
        computed.map_err(|e| e.to_string())?;
        for (sequence, row) in sequences.iter_mut().zip(&outputs.rows) {
            sequence.push(row.token);
        }
    }
    Ok(sequences)
}
