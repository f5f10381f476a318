//! What a request asks for and what it comes to, in tokens.

use carat_model::{TokenId, sampling::Sampling};

use super::MissReason;

/// A prompt to continue.
#[derive(Clone, Debug, PartialEq)]
pub struct Request {
    pub prompt: Vec<TokenId>,
    /// The most tokens to generate; `None` goes on to the end of the context or of the pages, whichever is nearer.
    pub max_tokens: Option<usize>,
    pub sampling: Sampling,
    /// Tokens that end the answer. The one that did is reported by [`FinishReason::Stop`], not as part of the answer.
    pub stop_tokens: Vec<TokenId>,
    /// Generate past stop tokens as if they were ordinary ones: for benchmarks.
    pub ignore_eos: bool,
    /// Report the log-probability of each token, and those of this many of the likeliest.
    pub logprobs: Option<usize>,
}

impl Request {
    /// Continues `prompt` with the model's own sampling settings and no stop token.
    pub fn new(prompt: Vec<TokenId>) -> Request {
        Request {
            prompt,
            max_tokens: None,
            sampling: Sampling::default(),
            stop_tokens: Vec::new(),
            ignore_eos: false,
            logprobs: None,
        }
    }
}

/// Names a request from its submission to its end; never used twice.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct RequestId(pub u64);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FinishReason {
    /// The model ended the answer with this stop token.
    Stop { token: TokenId },
    /// The most tokens asked for were generated.
    Length,
    /// The caller lost interest.
    Cancelled,
}

/// What a request came to.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    pub prompt_tokens: usize,
    /// Prompt tokens that were not computed because an earlier request had computed them.
    pub cached_tokens: usize,
    /// Why there were not more of them; `None` if all that can be reused was.
    pub miss: Option<MissReason>,
    /// Tokens sampled, the stop token included.
    pub generated_tokens: usize,
    /// How often the request lost its pages to older ones and was computed again.
    pub preemptions: usize,
}

/// Why a request was not accepted.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum Rejected {
    #[error("the prompt is empty; there is nothing to continue")]
    EmptyPrompt,
    #[error("0 tokens to generate; ask for at least 1")]
    NothingToGenerate,
    #[error("token {token} is outside the vocabulary of {vocab}")]
    OutsideVocabulary { token: TokenId, vocab: usize },
    #[error("{0}")]
    BadSampling(String),
    #[error(
        "a prompt of {prompt} tokens and {max_tokens} to generate exceed the context of {context}; \
         shorten the prompt, ask for fewer, or give a larger context"
    )]
    OverContext {
        prompt: usize,
        max_tokens: usize,
        context: usize,
    },
    #[error(
        "a prompt of {prompt} tokens and {max_tokens} to generate exceed the {room} tokens that all KV pages together \
         hold; shorten the prompt, ask for fewer, or start with more pages"
    )]
    OverPages {
        prompt: usize,
        max_tokens: usize,
        room: usize,
    },
    #[error(
        "{unfinished} requests are running or waiting, as many as are accepted; try again later"
    )]
    Busy { unfinished: usize },
    #[error("the engine has stopped")]
    Stopped,
}
