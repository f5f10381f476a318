//! Draws: from the logits of a sampled row to a token, and the report of it.

use crate::{
    TokenId,
    backend::BackendError,
    plan::Plan,
    sampling::{self, Sampling, Scratch, TokenMask},
};

/// Settings that one sampled row is drawn by.
#[derive(Clone, Copy, Debug)]
pub struct Draw<'a> {
    /// Parameters, defined in [`sampling`].
    pub sampling: &'a Sampling,
    /// All tokens of the sequence up to and including the row's own, for penalties.
    pub history: &'a [TokenId],
    /// Tokens it may be given; `None` allows all. At least one is allowed.
    pub mask: Option<&'a TokenMask>,
    /// Extent of the report.
    pub output: RowOutput,
}

/// Report of a sampled row.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RowOutput {
    /// The token.
    Token,
    /// The token, its log-probability and those of the `top` likeliest tokens.
    Logprobs {
        /// Count, at most the vocabulary.
        top: usize,
    },
    /// The token and the whole row of logits.
    Logits,
}

/// Results of a batch: one entry per sampled row, in batch order.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Outputs {
    /// Empty for a batch that was not drawn.
    pub rows: Vec<RowResult>,
}

/// Result of a sampled row.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct RowResult {
    /// The token that follows the row.
    pub token: TokenId,
    /// Log-probability of `token` under the model itself, before mask, penalties, temperature and truncation.
    pub logprob: Option<f32>,
    /// The likeliest tokens, best first, in the same measure.
    pub top: Vec<(TokenId, f32)>,
    /// Empty unless [`RowOutput::Logits`].
    pub logits: Vec<f32>,
}

impl<'a> Draw<'a> {
    /// The likeliest token of a row, with all of its logits.
    pub fn logits(sampling: &'a Sampling) -> Draw<'a> {
        Draw {
            sampling,
            history: &[],
            mask: None,
            output: RowOutput::Logits,
        }
    }

    /// Report of a row with these logits at this position, by the definition in [`sampling`]. Any backend that has the
    /// logits in memory may use it.
    pub fn report(&self, logits: &[f32], position: usize, scratch: &mut Scratch) -> RowResult {
        let Draw {
            sampling,
            history,
            mask,
            output,
        } = *self;
        let token = sampling::sample(logits, sampling, history, mask, position, scratch);
        let mut result = RowResult {
            token,
            ..RowResult::default()
        };
        match output {
            RowOutput::Token => {}
            RowOutput::Logprobs { top } => {
                let (logprob, top) = sampling::logprobs(logits, token, top);
                (result.logprob, result.top) = (Some(logprob), top);
            }
            RowOutput::Logits => result.logits = logits.to_vec(),
        }
        result
    }

    /// Everything an executor relies on in the draws of a batch that samples `sampled` rows.
    pub fn check(draws: &[Draw<'_>], sampled: usize, plan: &Plan) -> Result<(), BackendError> {
        let wrong = |what: String| Err(BackendError::Unsupported { what });
        if draws.len() != sampled {
            return wrong(format!("{} draws of {sampled} sampled rows", draws.len()));
        }
        let columns = plan.columns(plan.logits);
        for mask in draws.iter().filter_map(|draw| draw.mask) {
            if mask.vocab() != columns {
                return wrong(format!(
                    "a mask of {} tokens for logits of {columns}",
                    mask.vocab()
                ));
            }
            if mask.lowest().is_none() {
                return wrong("a mask allows no token".to_owned());
            }
        }
        Ok(())
    }
}
