//! One request's life: its tokens so far, the pages they fill, and when it is over.
//!
//! Prompt and generated tokens are one list, and a sequence only ever has *pending* tokens to feed: the whole list at
//! first, one while decoding, the whole list again after a preemption. The step that feeds the last of them samples the
//! next.

use std::ops::Range;

use carat_model::{
    TokenId,
    backend::{RowOutput, Run},
    kv::{PerGroup, pages_of},
    sampling::Sampling,
};

use super::{
    kv::Table,
    request::{Counts, FinishReason, Request, RequestId},
};

pub(crate) struct Sequence {
    pub(crate) id: RequestId,
    /// The prompt and what was generated.
    pub(crate) tokens: Vec<TokenId>,
    pub(crate) table: Table,
    /// Rows in the step that is being prepared or under way.
    pub(crate) rows: usize,
    pub(crate) cancelled: bool,
    pub(crate) counts: Counts,
    /// The most tokens it may come to.
    limit: usize,
    sampling: Sampling,
    stop_tokens: Vec<TokenId>,
    output: RowOutput,
}

impl Sequence {
    /// `limit` is what [`Limits::check`](crate::Limits::check) allows the request.
    pub(crate) fn new(id: RequestId, request: Request, limit: usize) -> Sequence {
        Sequence {
            id,
            counts: Counts {
                prompt_tokens: request.prompt.len(),
                ..Counts::default()
            },
            tokens: request.prompt,
            table: Table::empty(),
            rows: 0,
            cancelled: false,
            limit,
            sampling: request.sampling,
            stop_tokens: if request.ignore_eos {
                Vec::new()
            } else {
                request.stop_tokens
            },
            output: request
                .logprobs
                .map_or(RowOutput::Token, |top| RowOutput::Logprobs { top }),
        }
    }

    /// Tokens not yet fed: one while decoding, more while a prompt is being computed.
    pub(crate) fn pending(&self) -> usize {
        self.tokens.len() - self.table.computed
    }

    pub(crate) fn is_decoding(&self) -> bool {
        self.pending() == 1
    }

    /// Whether the step's rows end with the last token there is, so that another is sampled.
    pub(crate) fn samples(&self) -> bool {
        self.rows == self.pending()
    }

    /// Full pages for the tokens there are and the next one.
    pub(crate) fn pages_soon(&self) -> usize {
        pages_of((self.tokens.len() + 1).min(self.most_positions()))
    }

    /// Positions it may ever fill. The last token is not fed back.
    pub(crate) fn most_positions(&self) -> usize {
        self.limit - 1
    }

    /// The tokens of the step's rows.
    pub(crate) fn fed(&self) -> &[TokenId] {
        &self.tokens[self.table.computed..][..self.rows]
    }

    /// The step's rows as the sequence's share of a batch.
    pub(crate) fn run(&self, rows: Range<usize>) -> Run<'_> {
        Run {
            rows,
            position: self.table.computed,
            pages: PerGroup {
                full: &self.table.pages.full,
                sliding: &self.table.pages.sliding,
            },
            sampled: usize::from(self.samples()),
            sampling: &self.sampling,
            history: &self.tokens[..self.table.computed + self.rows],
            output: self.output,
        }
    }

    /// Whether the row after the step's can be run before its token is known: the step samples that token, it will not be the
    /// last by length, and nothing but the token itself depends on it.
    pub(crate) fn can_go_ahead(&self) -> bool {
        self.rows > 0
            && self.samples()
            && !self.cancelled
            && self.tokens.len() + 1 < self.limit
            && self.output == RowOutput::Token
            && !self.sampling.penalizes()
    }

    /// The row after the step's.
    pub(crate) fn run_ahead(&self, row: usize) -> Run<'_> {
        Run {
            rows: row..row + 1,
            position: self.tokens.len(),
            pages: PerGroup {
                full: &self.table.pages.full,
                sliding: &self.table.pages.sliding,
            },
            sampled: 1,
            sampling: &self.sampling,
            history: &self.tokens,
            output: self.output,
        }
    }

    /// Takes a sampled token; says so if it is the last.
    pub(crate) fn push(&mut self, token: TokenId) -> Option<FinishReason> {
        self.tokens.push(token);
        self.counts.generated_tokens += 1;
        if self.stop_tokens.contains(&token) {
            Some(FinishReason::Stop { token })
        } else if self.tokens.len() == self.limit {
            Some(FinishReason::Length)
        } else {
            None
        }
    }
}

#[cfg(test)]
mod tests;
