//! Requests and their results, in tokens.

use std::time::Duration;

use carat_model::{TokenId, sampling::Sampling};

use super::{ConstraintSource, Media, MissReason};

/// A prompt to continue.
#[derive(Clone, Debug)]
pub struct Request {
    /// Its tokens; where there are media, the tokens that stand beside them.
    pub prompt: Vec<TokenId>,
    /// Images and sounds in the prompt, in order.
    pub media: Vec<Media>,
    /// The most tokens to generate; `None` goes on to the end of the context or of the pages, whichever is nearer.
    pub max_tokens: Option<usize>,
    /// Parameters by which tokens are drawn.
    pub sampling: Sampling,
    /// Constraint that the answer must satisfy.
    pub constraint: Option<ConstraintSource>,
    /// Drafts may be made for it ([`EngineConfig::drafts`](crate::EngineConfig)), or proposed
    /// ([`Scheduler::propose`](super::Scheduler)). Where one may be behind its next row, that depends on more than one token, so no
    /// step is handed out ahead of those it is in. The answer is the same with drafts and without.
    pub drafts: bool,
    /// Only requests with the same salt continue from each other's KV: one per tenant or adapter.
    pub cache_salt: Option<[u8; 16]>,
    /// Tokens that end the answer. The one that did is reported by [`FinishReason::Stop`], not as part of the answer.
    pub stop_tokens: Vec<TokenId>,
    /// Generate past stop tokens as if they were ordinary ones: for benchmarks.
    pub ignore_eos: bool,
    /// Report the log-probability of each token, and those of this many of the likeliest.
    pub logprobs: Option<usize>,
    /// Report the log-probability of each token of the prompt but the first, and those of this many of the likeliest in its
    /// place. The whole prompt is computed for it.
    pub prompt_logprobs: Option<usize>,
    /// Lane whose turn it takes: lanes are served in turn, requests of one lane in the order they came. `None` is a lane too.
    pub lane: Option<LaneId>,
    /// The most time it may take from its submission on. Whoever keeps time ends it with
    /// [`Scheduler::expire`](super::Scheduler::expire).
    pub deadline: Option<Duration>,
    /// The most time it may wait to be started; ended in the same way.
    pub queue_limit: Option<Duration>,
    /// A request with the same prompt, submitted before: this one waits until that is computed and has its first token, or is
    /// over.
    pub after: Option<RequestId>,
}

impl Request {
    /// Continues `prompt` with the model's own sampling settings and no stop token.
    pub fn new(prompt: Vec<TokenId>) -> Request {
        Request {
            prompt,
            media: Vec::new(),
            max_tokens: None,
            sampling: Sampling::default(),
            constraint: None,
            drafts: false,
            cache_salt: None,
            stop_tokens: Vec::new(),
            ignore_eos: false,
            logprobs: None,
            prompt_logprobs: None,
            lane: None,
            deadline: None,
            queue_limit: None,
            after: None,
        }
    }
}

/// Names those whose requests share a turn: a user, or a key.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct LaneId(pub u64);

/// Names a request from its submission to its end; never used twice.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct RequestId(pub u64);

/// Reason an answer is over.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FinishReason {
    /// The model, or what constrains it, ended the answer with this stop token.
    Stop {
        /// Not part of the answer.
        token: TokenId,
    },
    /// The most tokens asked for were generated.
    Length,
    /// The constraint allows no token.
    DeadEnd,
    /// The caller lost interest.
    Cancelled,
    /// Its time was up.
    Deadline,
}

/// Tokens and rows that a request came to.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    /// Tokens of the prompt, media included.
    pub prompt_tokens: usize,
    /// Prompt tokens that were not computed because an earlier request had computed them.
    pub cached_tokens: usize,
    /// Of these, those whose keys and values had to be copied from host memory to the device.
    pub cached_in_host: usize,
    /// Of these, those that were read from disk.
    pub cached_on_disk: usize,
    /// Tokens from its start that some cached prompt has in common with it, in whole pages. What was cached is less where a window
    /// is lost.
    pub known_tokens: usize,
    /// Reason there were not more of them; `None` if all that can be reused was.
    pub miss: Option<MissReason>,
    /// Tokens sampled or forced, the stop token included.
    pub generated_tokens: usize,
    /// Times the request lost its pages to others and was computed again.
    pub preemptions: usize,
    /// Outcome of its drafts.
    pub drafts: DraftCounts,
}

/// Outcome of the drafts of a request, or of many.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DraftCounts {
    /// Passes of the model that gave a token or more.
    pub passes: u64,
    /// Of these, those that verified a draft.
    pub drafted_passes: u64,
    /// Tokens that were proposed.
    pub drafted: u64,
    /// Tokens that were proposed and are part of the answer.
    pub accepted: u64,
    /// By place in a draft, the last for all behind it: tokens that were proposed.
    pub drafted_at: [u32; DraftCounts::PLACES],
    /// By place in a draft: tokens that are part of the answer.
    pub accepted_at: [u32; DraftCounts::PLACES],
}

impl DraftCounts {
    /// Places of a draft that are counted apart.
    pub const PLACES: usize = 8;

    /// Counts a pass of the model that verified a draft of so many tokens, perhaps none.
    pub(crate) fn count(&mut self, drafted: usize, accepted: usize) {
        self.passes += 1;
        self.drafted_passes += u64::from(drafted > 0);
        self.drafted += drafted as u64;
        self.accepted += accepted as u64;
        for place in 0..drafted {
            let entry = place.min(DraftCounts::PLACES - 1);
            self.drafted_at[entry] += 1;
            self.accepted_at[entry] += u32::from(place < accepted);
        }
    }

    /// Counts those of another as well. What is counted by place starts anew after four thousand millions.
    pub fn add(&mut self, other: &DraftCounts) {
        self.passes += other.passes;
        self.drafted_passes += other.drafted_passes;
        self.drafted += other.drafted;
        self.accepted += other.accepted;
        for place in 0..DraftCounts::PLACES {
            for (sum, more) in [
                (&mut self.drafted_at, &other.drafted_at),
                (&mut self.accepted_at, &other.accepted_at),
            ] {
                sum[place] = sum[place].wrapping_add(more[place]);
            }
        }
    }

    /// Tokens that a pass of the model gave; 1 without drafts.
    pub fn tokens_per_pass(&self) -> f64 {
        match self.passes {
            0 => 1.0,
            passes => (passes + self.accepted) as f64 / passes as f64,
        }
    }
}

/// Reason a request was not accepted.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum Rejected {
    /// Without a token there is no row to sample from.
    #[error("the prompt is empty; there is nothing to continue")]
    EmptyPrompt,
    /// An answer has a token at least.
    #[error("0 tokens to generate; ask for at least 1")]
    NothingToGenerate,
    /// The prompt or a bias names a token that the model has not.
    #[error("token {token} is outside the vocabulary of {vocab}")]
    OutsideVocabulary {
        /// The token.
        token: TokenId,
        /// Tokens there are.
        vocab: usize,
    },
    /// A sampling parameter is out of its range.
    #[error("{0}")]
    BadSampling(String),
    /// More log-probabilities than are reported.
    #[error(
        "log-probabilities of {asked} tokens in each place; at most {most} are reported, ask for fewer"
    )]
    TooManyLogprobs {
        /// Of the answer or of the prompt, whichever asks for more.
        asked: usize,
        /// The most there are.
        most: usize,
    },
    /// More biases than are looked at for every token.
    #[error("biases of {asked} tokens; at most {most} are taken, give fewer or a constraint")]
    TooManyBiases {
        /// Those that are numbers, or those that forbid a token.
        asked: usize,
        /// The most of that kind.
        most: usize,
    },
    /// A bias that leaves nothing of the logits.
    #[error(
        "the bias of token {token} is {bias}; it must be within -100 and 100, or -inf to forbid the token"
    )]
    BiasOutOfRange {
        /// The token.
        token: TokenId,
        /// Its bias.
        bias: f32,
    },
    /// Penalties that would look at too many tokens.
    #[error(
        "a penalty window of {asked} tokens; at most {most} are looked at, give a smaller window"
    )]
    PenaltyWindow {
        /// Tokens to look at.
        asked: usize,
        /// The most that are.
        most: usize,
    },
    /// More stop tokens than are looked for.
    #[error("{asked} stop tokens; at most {most} are looked for, give fewer")]
    TooManyStopTokens {
        /// As given.
        asked: usize,
        /// The most there are.
        most: usize,
    },
    /// Media do not fit the prompt, the model or a batch.
    #[error("{0}")]
    BadMedia(String),
    /// It is longer than any request may be.
    #[error(
        "a prompt of {prompt} tokens and {max_tokens} to generate exceed the context of {context}; \
         shorten the prompt, ask for fewer, or give a larger context"
    )]
    OverContext {
        /// Tokens of the prompt.
        prompt: usize,
        /// Tokens to generate.
        max_tokens: usize,
        /// The most of both together.
        context: usize,
    },
    /// It would not fit even if it ran alone.
    #[error(
        "a prompt of {prompt} tokens and {max_tokens} to generate exceed the {room} tokens that all KV pages together \
         hold; shorten the prompt, ask for fewer, or start with more pages"
    )]
    OverPages {
        /// Tokens of the prompt.
        prompt: usize,
        /// Tokens to generate.
        max_tokens: usize,
        /// The most of both together.
        room: usize,
    },
    /// The queue is full.
    #[error(
        "{unfinished} requests are running or waiting, as many as are accepted; try again later"
    )]
    Busy {
        /// Requests that have not finished.
        unfinished: usize,
    },
    /// Nobody is there to run it.
    #[error("the engine has stopped")]
    Stopped,
}
