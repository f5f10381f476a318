//! Drafts: tokens that a small model proposes to follow some rows, to be verified by the target in its next batch.
//!
//! A draft starts from the target's hidden state of a row that was sampled, and from the token drawn there. Each step gives a token
//! and a state, from which the next goes on; the target's keys and values are read and nothing is written.

use crate::{
    TokenId,
    backend::{BackendError, Batch, CompileOptions, Feed, Run},
    kv::{PageId, PerGroup},
    plan::Plan,
    sampling,
};

/// A draft that is asked for.
#[derive(Clone, Copy, Debug)]
pub struct DraftRun<'a> {
    /// Row to start from, among the sampled rows of the batch collected last.
    pub row: usize,
    /// The token that follows it, which is in no batch yet.
    pub token: TokenId,
    /// Of that token. All positions before it are in the pages.
    pub position: usize,
    /// As in [`Run::pages`].
    pub pages: PerGroup<&'a [PageId]>,
    /// Tokens to draft; at least 1.
    pub length: usize,
}

impl DraftRun<'_> {
    /// Everything an executor relies on. `plan` is the drafter's, `options` the target's, and `sampled` the rows that the batch
    /// collected last has sampled.
    pub fn check(
        drafts: &[DraftRun<'_>],
        plan: &Plan,
        options: &CompileOptions,
        sampled: usize,
    ) -> Result<(), BackendError> {
        for draft in drafts {
            if draft.row >= sampled || draft.position == 0 || draft.length == 0 {
                return Err(BackendError::Unsupported {
                    what: format!(
                        "a draft of {} tokens at position {} from sampled row {} of {sampled}",
                        draft.length, draft.position, draft.row
                    ),
                });
            }
        }
        let (feeds, runs) = rows(drafts.iter().map(|draft| (draft, draft.token)));
        let batch = Batch {
            feeds: &feeds,
            runs: &runs,
        };
        let as_many = CompileOptions {
            max_rows: drafts.len(),
            max_sampled: drafts.len(),
            ..options.clone()
        };
        batch.check(plan, &as_many, 0)
    }
}

/// One row per draft, at the last position that is cached.
pub fn rows<'a>(
    drafts: impl Iterator<Item = (&'a DraftRun<'a>, TokenId)>,
) -> (Vec<Feed<'a>>, Vec<Run<'a>>) {
    let row = |(i, (draft, token)): (usize, (&'a DraftRun<'a>, TokenId))| {
        let run = Run {
            rows: i..i + 1,
            position: draft.position - 1,
            pages: draft.pages,
            sampled: 1,
            table: None,
            visible_end: None,
        };
        (Feed::Token(token), run)
    };
    drafts.enumerate().map(row).unzip()
}

/// Runs drafts step by step, for executors that compute each step when they are asked to. `states` are those of the rows that the
/// drafts start from. `step` takes a batch of one row per draft that goes on and their states `[rows, width]`, and leaves logits
/// and the states that follow.
pub fn run(
    drafts: &[DraftRun<'_>],
    states: Vec<f32>,
    mut step: impl FnMut(&Batch<'_>, &[f32]) -> DraftStep,
) -> Vec<Vec<TokenId>> {
    let width = states.len() / drafts.len().max(1);
    let mut out: Vec<Vec<TokenId>> = vec![Vec::new(); drafts.len()];
    let mut active: Vec<usize> = (0..drafts.len()).collect();
    let mut states = states;
    while !active.is_empty() {
        let last = |i: usize| *out[i].last().unwrap_or(&drafts[i].token);
        let (feeds, runs) = rows(active.iter().map(|&i| (&drafts[i], last(i))));
        let batch = Batch {
            feeds: &feeds,
            runs: &runs,
        };
        let result = step(&batch, &states);
        let vocab = result.logits.len() / active.len();
        for (&i, logits) in active.iter().zip(result.logits.chunks(vocab)) {
            out[i].push(sampling::arg_max(logits));
        }
        let goes_on = |i: usize| out[i].len() < drafts[i].length;
        states = active
            .iter()
            .zip(result.states.chunks(width))
            .filter(|(i, _)| goes_on(**i))
            .flat_map(|(_, state)| state.iter().copied())
            .collect();
        active.retain(|&i| goes_on(i));
    }
    out
}

/// Tokens of the `top` clusters whose scores are largest, the lower cluster on ties. All clusters are equally large, and `tokens`
/// lists them one after the other.
pub fn nearest<'a>(
    scores: &[f32],
    tokens: &'a [TokenId],
    top: usize,
) -> impl Iterator<Item = TokenId> + use<'a> {
    let mut order: Vec<usize> = (0..scores.len()).collect();
    order.sort_by(|&a, &b| scores[b].total_cmp(&scores[a]).then(a.cmp(&b)));
    order.truncate(top);
    let size = tokens.len() / scores.len();
    order
        .into_iter()
        .flat_map(move |cluster| tokens[cluster * size..][..size].iter().copied())
}

/// Result of one step of some drafts.
pub struct DraftStep {
    /// `[rows, vocab]`.
    pub logits: Vec<f32>,
    /// `[rows, width]`, for the step after it.
    pub states: Vec<f32>,
}
