//! Drafts of many texts at once: each as it is alone, and nothing of what cannot be.

use carat_model::{
    TokenId,
    backend::{
        Backend, Batch, Batching, CompileOptions, DraftRun, Draw, Executor, Outputs, Run,
        token_feeds,
    },
    gemma4,
    gemma4_assistant::{self, Head},
    kv::{PageId, PerGroup, pages_of},
    sampling::Sampling,
};

use super::{Checked, same, tables};
use crate::pairs::Pair;

/// More than any device takes at a time.
const TEXTS: usize = 11;
/// Tokens of the longest text: beyond a page, and beyond the windows of all pairs.
const LONGEST: usize = 41;
/// Tokens of the longest draft: more than any device queues at a time.
const LONGEST_DRAFT: usize = 19;

/// Drafts of several texts and lengths are those that each text gets alone, and those that cannot be made are refused.
pub(super) fn own_text_alone(backend: &dyn Backend) -> Checked {
    for name in ["e-series-centroids", "moe-like"] {
        let pair = Pair::load(name);
        let plan = gemma4::plan(&pair.target);
        let drafter = gemma4_assistant::plan(&pair.drafter, Head::Clusters);
        let pages_each = pages_of(LONGEST + 1);
        let options = CompileOptions {
            pages: PerGroup {
                full: TEXTS * pages_each,
                sliding: TEXTS * pages_each + 1,
            },
            chunk_pages: 0,
            host_pages: PerGroup::default(),
            kv: PerGroup::default(),
            max_rows: 64,
            max_sampled: TEXTS,
            probe: false,
            batching: Batching::Fast,
        };
        let compiled = backend.compile(&plan, pair.target.weights.clone(), &options);
        let mut executor = compiled.map_err(|error| error.to_string())?;
        executor
            .attach_drafter(&drafter, pair.drafter.weights.clone(), TEXTS)
            .map_err(|error| error.to_string())?;
        let texts: Vec<Text> = (0..TEXTS)
            .map(|i| Text::new(i, pages_each, plan.vocab()))
            .collect();
        let next = feed(executor.as_mut(), &texts)?;
        let run = |row: usize| DraftRun {
            row,
            token: next[row],
            position: texts[row].tokens.len(),
            pages: tables(&texts[row].pages),
            length: 1 + row * (LONGEST_DRAFT - 1) / (TEXTS - 1),
        };
        let mut draft = |drafts: &[DraftRun<'_>]| {
            let drafted = executor.draft(drafts);
            drafted.map_err(|error| error.to_string())
        };
        let mut alone = Vec::new();
        for row in 0..TEXTS {
            alone.append(&mut draft(&[run(row)])?);
        }
        let lengths: Vec<usize> = alone.iter().map(Vec::len).collect();
        let asked: Vec<usize> = (0..TEXTS).map(|row| run(row).length).collect();
        same("tokens of each draft", &lengths, &asked)?;
        // The other way round, and again and again: what was captured is replayed.
        alone.reverse();
        let all: Vec<DraftRun<'_>> = (0..TEXTS).rev().map(run).collect();
        for _ in 0..3 {
            same(name, &draft(&all)?, &alone)?;
        }
        let wrong = [
            DraftRun {
                row: TEXTS,
                ..run(0)
            },
            DraftRun {
                length: 0,
                ..run(0)
            },
            DraftRun {
                position: 0,
                ..run(0)
            },
        ];
        for wrong in wrong {
            if draft(&[run(1), wrong]).is_ok() {
                return Err(format!("{wrong:?} was drafted"));
            }
        }
        same("after a refusal", &draft(&all)?, &alone)?;
    }
    Ok(())
}

/// A text and its pages.
struct Text {
    tokens: Vec<TokenId>,
    pages: PerGroup<Vec<PageId>>,
}

impl Text {
    fn new(index: usize, pages: usize, vocab: usize) -> Text {
        let length = LONGEST - 3 * index;
        let token = |i: usize| ((i * i + 7 * i * index + 3 * index + 1) % vocab) as TokenId;
        let all = (index * pages..(index + 1) * pages).map(|page| page as u32);
        Text {
            tokens: (0..length).map(token).collect(),
            pages: PerGroup {
                full: all.clone().map(PageId).collect(),
                sliding: all.rev().map(|page| PageId(page + 1)).collect(),
            },
        }
    }
}

/// Feeds all but the last token of each text, then those together; returns the tokens that follow.
fn feed(executor: &mut dyn Executor, texts: &[Text]) -> Result<Vec<TokenId>, String> {
    let mut outputs = Outputs::default();
    for text in texts {
        let before = text.tokens.len() - 1;
        let run = Run {
            rows: 0..before,
            position: 0,
            pages: tables(&text.pages),
            sampled: 0,
            table: None,
            visible_end: None,
        };
        let batch = Batch {
            feeds: &token_feeds(&text.tokens[..before]),
            runs: &[run],
        };
        let ticket = executor.submit(&batch).map_err(|error| error.to_string())?;
        let collected = executor.collect(ticket, &mut outputs);
        collected.map_err(|error| error.to_string())?;
    }
    let last: Vec<TokenId> = texts
        .iter()
        .map(|text| text.tokens[text.tokens.len() - 1])
        .collect();
    let run = |(row, text)| {
        let text: &Text = text;
        Run {
            rows: row..row + 1,
            position: text.tokens.len() - 1,
            pages: tables(&text.pages),
            sampled: 1,
            table: None,
            visible_end: None,
        }
    };
    let runs: Vec<Run<'_>> = texts.iter().enumerate().map(run).collect();
    let batch = Batch {
        feeds: &token_feeds(&last),
        runs: &runs,
    };
    let sampling = Sampling::greedy();
    let draw = Draw::logits(&sampling);
    let ticket = executor.submit(&batch).map_err(|error| error.to_string())?;
    let drawn = executor.draw(&ticket, &vec![draw; texts.len()]);
    drawn.map_err(|error| error.to_string())?;
    let collected = executor.collect(ticket, &mut outputs);
    collected.map_err(|error| error.to_string())?;
    Ok(outputs.rows.iter().map(|row| row.token).collect())
}
