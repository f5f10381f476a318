//! Limits of the engine, decided once, and what follows from them for a request.
//!
//! [`EngineConfig`] is plain data. Joined with what the scheduler must know of the model ([`ModelFacts`]) and checked
//! it becomes [`Limits`], which can say of any request whether it could ever run. Nothing here knows the state of the
//! engine: a request that is merely early is queued, not rejected.

use std::{path::PathBuf, time::Duration};

use carat_model::{
    TokenId,
    backend::{Batching, CompileOptions},
    cost::{self, BatchShape},
    kv::{KvGroup, KvType, PAGE_TOKENS, PerGroup, pages_of, window_pages},
    plan::Plan,
    weights::Weights,
};

use crate::{
    core::{MediaAttention, Rejected, Request, StepCosts},
    disk::Namespace,
    kept_costs::KeptCosts,
};

/// Lengths that chunks of a prompt can have, apart from the shortest: few, because kernels are chosen by it.
const CHUNK_LENGTHS: usize = 8;
/// The fewest rows of a chunk, whatever the depth: with fewer, weights are read too often.
const SHORTEST_CHUNK: usize = 256;

/// Sliding pages before a window that are kept with the end of a prompt, for a next turn that repeats all but its last tokens.
const LANDMARK_PAGES: usize = 2;

/// The most of the likeliest tokens that are reported in one place.
const MAX_LOGPROBS: usize = 20;
/// The most biases that are numbers: each is looked up for every token. Those that forbid a token come besides, from the model's
/// own list too.
const MAX_BIASES: usize = 1024;
/// The largest bias, either way: logits differ by less.
const LARGEST_BIAS: f32 = 100.0;
/// The most tokens that penalties look at: they are counted anew for every token.
const MAX_PENALIZED: usize = 1 << 16;
/// The most stop tokens: each token is compared with all of them.
const MAX_STOP_TOKENS: usize = 256;

/// Limits of what runs at a time, and the KV pages it runs in.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EngineConfig {
    /// The most tokens a request may have, prompt and generated together.
    pub context: usize,
    /// The most rows of a batch: decode rows of all running requests and chunks of prompts.
    pub max_rows: usize,
    /// The most rows of prompts in a batch that others decode in: however deep and however many, they keep nobody waiting longer
    /// than that for a token.
    pub prefill_rows: usize,
    /// The most requests that run side by side; the others wait. At most `max_rows`, so that none is left out of a
    /// step.
    pub max_sequences: usize,
    /// The most requests that have not finished; any more are turned away.
    pub max_unfinished: usize,
    /// KV pages to hold. [`comfortable_pages`] and [`minimum_pages`] tell what is sensible.
    pub pages: PerGroup<usize>,
    /// Sliding pages besides, for the parts of long chunks that no later step sees: all layers have them at the same place, one after
    /// another. 0 of a model whose layers [do not](ModelFacts::layers_take_turns).
    pub chunk_pages: usize,
    /// Pages that host memory has room for: those that are given away on the device are kept there. None on a device that computes in
    /// host memory anyway.
    pub host_pages: PerGroup<usize>,
    /// Places in host memory that pages pass through on their way to a store and back, per group; 0 without one.
    pub staging_pages: usize,
    /// Store of prefixes beyond memory; [`EngineConfig::keep_on_disk`].
    pub disk: Option<DiskConfig>,
    /// The most tokens of a draft that are verified in a step, per request; 0 verifies none.
    pub max_draft: usize,
    /// Source of drafts; `None` leaves it to callers of the scheduler.
    pub drafts: Option<DraftConfig>,
    /// Number format of keys and values, per group of layers.
    pub kv: PerGroup<KvType>,
    /// Reuse of the prompts of earlier requests.
    pub prefix_reuse: PrefixReuse,
    /// Independence of a request's tokens from its company, at near ties.
    pub batching: Batching,
    /// The longest that a batch may take; past it the device is taken for dead and everybody is told.
    pub stall_limit: Duration,
}

/// A prefix cache on disk.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DiskConfig {
    /// Prompts and answers lie in it in clear.
    pub folder: PathBuf,
    /// Everything that pages depend on apart from tokens.
    pub namespace: Namespace,
    /// The most that it may hold.
    pub max_bytes: u64,
}

/// Places that pages pass through on their way to the disk and back.
const STAGING_PAGES: usize = 16;

/// Source of drafts, and the known cost of verifying them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DraftConfig {
    /// The executor has a draft model.
    pub model: bool,
    /// Sequences are looked up in themselves.
    pub lookup: bool,
    /// Rows that drafts may bring a step to: those up to which a batch gives a row the same result, whatever else is in it.
    pub rows: usize,
    /// Cost of rows; `None` measures it at start.
    pub costs: Option<StepCosts>,
    /// Where measured costs are kept for later starts; `None` measures at each.
    pub kept_costs: Option<KeptCosts>,
}

/// Of [`EngineConfig::stall_limit`], where nobody says otherwise: far above the slowest batch of a slow machine.
const STALL_LIMIT: Duration = Duration::from_mins(10);

/// Reuse of KV that earlier requests computed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PrefixReuse {
    /// Pages are kept as long as nobody needs them.
    Enabled,
    /// Every prompt is computed in full: for measurements, and for bisecting.
    Disabled,
}

/// Facts of a model that scheduling needs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ModelFacts {
    /// Entries of the vocabulary.
    pub vocab: usize,
    /// Columns of an embedding that a prompt may have in place of a token; `None` if the model takes tokens alone.
    pub width: Option<usize>,
    /// Positions a row of a sliding-window layer sees, itself included; `None` without such layers.
    pub window: Option<usize>,
    /// Whether sliding-window layers can have pages at the same place, one after another.
    pub layers_take_turns: bool,
    /// The depth at which attending to everything before a row costs as much as all else that is computed for it; `None` if chunks
    /// of prompts are to be equally long at every depth.
    pub even_depth: Option<usize>,
}

impl From<&Plan> for ModelFacts {
    fn from(plan: &Plan) -> ModelFacts {
        ModelFacts {
            vocab: plan.vocab(),
            width: plan.input_width(),
            window: plan.uses(KvGroup::Sliding).then(|| plan.window()).flatten(),
            layers_take_turns: plan.sliding_layers_take_turns(),
            even_depth: None,
        }
    }
}

impl ModelFacts {
    /// With what its rows cost.
    pub fn with_costs(plan: &Plan, weights: &Weights) -> ModelFacts {
        // Both beyond every window, so that full attention alone makes the difference.
        let (shallow, deep) = (1 << 18, 1 << 19);
        let at = |depth| {
            let row = BatchShape {
                sampled: 0,
                ..BatchShape::decode(depth, PerGroup::default())
            };
            u128::from(cost::of(plan, weights, row).multiply_adds)
        };
        let (near, far) = (at(shallow), at(deep));
        let positions = (deep - shallow) as u128;
        // Of so many positions; all else is what is left of a row without that of the shallow depth.
        let attention = far.saturating_sub(near);
        let rest = (near * positions).saturating_sub(attention * shallow as u128);
        let even_depth = rest.checked_div(attention);
        ModelFacts {
            even_depth: even_depth.and_then(|depth| usize::try_from(depth).ok()),
            ..ModelFacts::from(plan)
        }
    }
}

/// Reason a configuration cannot work.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ConfigError {
    /// A count that must not be 0 is.
    #[error("{setting} is 0; it must be at least 1")]
    Zero {
        /// Its name.
        setting: &'static str,
    },
    /// Some requests would be left out of each step.
    #[error(
        "max_rows is {max_rows}, below max_sequences, {max_sequences}: every running request needs a row of each batch"
    )]
    TooFewRows {
        /// As configured.
        max_rows: usize,
        /// As configured.
        max_sequences: usize,
    },
    /// Not even one request could run.
    #[error("{held} pages of the {group:?} group; one request alone needs {needed}")]
    TooFewPages {
        /// Group of layers that the pages belong to.
        group: KvGroup,
        /// As configured.
        held: usize,
        /// At the least.
        needed: usize,
    },
}

/// A checked configuration for one model.
#[derive(Clone, Debug)]
pub struct Limits {
    config: EngineConfig,
    model: ModelFacts,
}

impl Limits {
    /// Checks a configuration.
    pub fn new(config: EngineConfig, facts: ModelFacts) -> Result<Limits, ConfigError> {
        let counts = [
            ("context", config.context),
            ("max_rows", config.max_rows),
            ("prefill_rows", config.prefill_rows),
            ("max_sequences", config.max_sequences),
            ("max_unfinished", config.max_unfinished),
        ];
        if let Some(&(setting, _)) = counts.iter().find(|(_, count)| *count == 0) {
            return Err(ConfigError::Zero { setting });
        }
        if facts.window == Some(0) {
            return Err(ConfigError::Zero {
                setting: "the model's window",
            });
        }
        if config.max_rows < config.max_sequences {
            return Err(ConfigError::TooFewRows {
                max_rows: config.max_rows,
                max_sequences: config.max_sequences,
            });
        }
        let drafting = ModelFacts {
            window: facts.window.map(|window| window + config.max_draft),
            ..facts
        };
        let minimum = minimum_pages(config.context, drafting);
        // The full group may be smaller than the context: longer requests are then rejected one by one.
        let needed = PerGroup {
            full: 1,
            sliding: minimum.sliding,
        };
        for group in KvGroup::ALL {
            let (held, needed) = (*config.pages.get(group), *needed.get(group));
            if held < needed {
                return Err(ConfigError::TooFewPages {
                    group,
                    held,
                    needed,
                });
            }
        }
        Ok(Limits {
            config,
            model: facts,
        })
    }

    /// As it was given.
    pub fn config(&self) -> &EngineConfig {
        &self.config
    }

    /// The model it is for.
    pub fn model(&self) -> ModelFacts {
        self.model
    }

    /// Options to compile a plan with, so that its executor can run every batch scheduled under these limits.
    pub fn compile_options(&self) -> CompileOptions {
        CompileOptions {
            pages: self.config.pages,
            chunk_pages: self.config.chunk_pages,
            host_pages: self.all_host_pages(),
            kv: self.config.kv,
            max_rows: self.config.max_rows,
            max_sampled: self.max_sampled(),
            probe: false,
            batching: self.config.batching,
        }
    }

    /// Places in host memory, those that pages only pass through included.
    fn all_host_pages(&self) -> PerGroup<usize> {
        let staging = self.config.staging_pages;
        let sliding = self.model.window.map_or(0, |_| staging);
        PerGroup {
            full: self.config.host_pages.full + staging,
            sliding: self.config.host_pages.sliding + sliding,
        }
    }

    /// The most sampled rows of a batch.
    pub(crate) fn max_sampled(&self) -> usize {
        let drafting = self.config.max_sequences * (self.config.max_draft + 1);
        // Drafts keep to their rows; those whose prompts end in the same step come besides.
        let drafts = self.config.drafts.as_ref();
        let most = drafts.map_or(drafting, |drafts| {
            drafts.rows.saturating_add(self.config.max_sequences)
        });
        drafting.min(most).min(self.config.max_rows)
    }

    /// Rows of a prompt to compute at a time from some depth on: fewer where attention takes the most time, so that a step takes
    /// about as long at every depth. What else there is to compute plays no part, so that company changes as little as possible.
    pub(crate) fn chunk_rows(&self, depth: usize) -> usize {
        let most = self.config.max_rows;
        let Some(even) = self.model.even_depth else {
            return most;
        };
        let granule = most.div_ceil(CHUNK_LENGTHS);
        let rows = (most as u128 * even as u128) / (even as u128 + depth as u128).max(1);
        let rows = (rows as usize + granule / 2) / granule * granule;
        rows.clamp(SHORTEST_CHUNK.min(most), most)
    }

    /// The most tokens that can follow a prompt of so many; 0 if it is too long itself.
    pub fn room(&self, prompt: usize) -> usize {
        // The last token is never fed back, so it needs no room in the pages.
        let pages = self.config.pages.full.saturating_mul(PAGE_TOKENS) + 1;
        self.config.context.min(pages).saturating_sub(prompt)
    }

    /// The most tokens the request may come to, prompt included, or why it could never run.
    pub fn check(&self, request: &Request) -> Result<usize, Rejected> {
        let prompt = request.prompt.len();
        if prompt == 0 {
            return Err(Rejected::EmptyPrompt);
        }
        if request.max_tokens == Some(0) {
            return Err(Rejected::NothingToGenerate);
        }
        let outside = |token: &&TokenId| **token as usize >= self.model.vocab;
        let biased = request.sampling.logit_bias.iter().map(|(token, _)| token);
        if let Some(&token) = request.prompt.iter().chain(biased).find(outside) {
            return Err(Rejected::OutsideVocabulary {
                token,
                vocab: self.model.vocab,
            });
        }
        if let Some(complaint) = request.sampling.complaint() {
            return Err(Rejected::BadSampling(complaint));
        }
        self.check_amounts(request)?;
        self.check_media(request)?;
        let context = self.config.context;
        let max_tokens = request.max_tokens.unwrap_or(1);
        let total = prompt.saturating_add(max_tokens);
        if total > context {
            return Err(Rejected::OverContext {
                prompt,
                max_tokens,
                context,
            });
        }
        // The last token is never fed back, so it needs no place in the pages.
        let room = self.config.pages.full.saturating_mul(PAGE_TOKENS) + 1;
        if total > room {
            return Err(Rejected::OverPages {
                prompt,
                max_tokens,
                room,
            });
        }
        Ok(match request.max_tokens {
            Some(_) => total,
            None => context.min(room),
        })
    }
}

impl Limits {
    /// Sliding pages that a request holds at the most whose rows are computed in steps that go on by so many positions at once,
    /// besides the first: all from the window before them, or those of two windows where the rest can be in chunk pages.
    pub(crate) fn sliding_pages(&self, window: usize, beyond: usize) -> usize {
        let all = window_pages(window + beyond);
        if pages_of(beyond) <= self.config.chunk_pages {
            all.min(2 * window_pages(window) + 1)
        } else {
            all
        }
    }

    /// Whatever costs the engine something for every token.
    fn check_amounts(&self, request: &Request) -> Result<(), Rejected> {
        let logprobs = request.logprobs.max(request.prompt_logprobs).unwrap_or(0);
        if logprobs > MAX_LOGPROBS {
            return Err(Rejected::TooManyLogprobs {
                asked: logprobs,
                most: MAX_LOGPROBS,
            });
        }
        let sampling = &request.sampling;
        let biases = &sampling.logit_bias;
        let numbers = biases.iter().filter(|(_, bias)| bias.is_finite());
        let odd = numbers.clone().find(|(_, bias)| bias.abs() > LARGEST_BIAS);
        if let Some(&(token, bias)) = odd {
            return Err(Rejected::BiasOutOfRange { token, bias });
        }
        let numbers = numbers.count();
        let forbidding = biases.len() - numbers;
        for (asked, most) in [(numbers, MAX_BIASES), (forbidding, self.model.vocab)] {
            if asked > most {
                return Err(Rejected::TooManyBiases { asked, most });
            }
        }
        if sampling.penalty_window > MAX_PENALIZED {
            return Err(Rejected::PenaltyWindow {
                asked: sampling.penalty_window,
                most: MAX_PENALIZED,
            });
        }
        let stop_tokens = request.stop_tokens.len();
        if stop_tokens > MAX_STOP_TOKENS {
            return Err(Rejected::TooManyStopTokens {
                asked: stop_tokens,
                most: MAX_STOP_TOKENS,
            });
        }
        Ok(())
    }

    fn check_media(&self, request: &Request) -> Result<(), Rejected> {
        let wrong = |what: String| Err(Rejected::BadMedia(what));
        if request.prompt_logprobs.is_some() && !request.media.is_empty() {
            return wrong(
                "log-probabilities of a prompt with media; ask for those of the answer alone"
                    .to_owned(),
            );
        }
        let mut end = 0;
        for media in &request.media {
            let places = &media.places;
            if places.is_empty() || places.start < end || places.end > request.prompt.len() {
                return wrong(format!(
                    "media at {places:?} of a prompt of {} tokens; they must be in order, apart, and within it",
                    request.prompt.len()
                ));
            }
            end = places.end;
            let Some(width) = self.model.width else {
                return wrong("this model takes tokens alone".to_owned());
            };
            if media.rows.len() != places.len() * width {
                return wrong(format!(
                    "media of {} values at {} places; the model takes {width} at each",
                    media.rows.len(),
                    places.len()
                ));
            }
            let Some(window) = self.model.window else {
                continue;
            };
            if media.attention == MediaAttention::Causal {
                continue;
            }
            // All rows at once, beside a row of everybody else.
            let rows = self.config.max_rows - (self.config.max_sequences - 1);
            let pages = self.sliding_pages(window, places.len() - 1);
            let pages = pages.min(pages_of(self.config.context));
            if places.len() > rows || pages > self.config.pages.sliding {
                return wrong(format!(
                    "an image of {} rows, which are computed all at once: there is room for {rows} rows in a batch, and \
                     {} sliding pages of the {pages} it takes",
                    places.len(),
                    self.config.pages.sliding
                ));
            }
        }
        Ok(())
    }
}

/// The fewest pages with which one request of the full context runs. It runs alone, its prompt in short chunks.
pub fn minimum_pages(context: usize, facts: ModelFacts) -> PerGroup<usize> {
    let full = pages_of(context);
    PerGroup {
        full,
        sliding: facts.window.map_or(0, |w| window_pages(w).min(full)),
    }
}

/// Pages with which nothing is ever taken back from a running request, nor a chunk of a prompt cut short.
///
/// - full: every sequence at the whole context. Conversations rarely fill it, so fewer pages usually do as well: when
///   they run out, cached prefixes go first, then a request that has not got far starts over later.
/// - sliding: every sequence's window, and once more as many: for the window that a chunk leaves behind while its rows still see the
///   one before it, and to continue conversations that are not running. The part of a chunk in between is in
///   [`chunk_pages`], or else here too, because a chunk is written before any of its rows attends.
pub fn comfortable_pages(
    context: usize,
    max_sequences: usize,
    max_rows: usize,
    facts: ModelFacts,
) -> PerGroup<usize> {
    let one = minimum_pages(context, facts);
    let between = if facts.layers_take_turns {
        LANDMARK_PAGES
    } else {
        pages_of(max_rows)
    };
    // With a partial page for each.
    let sliding = 2 * one.sliding * max_sequences + between + max_sequences;
    PerGroup {
        full: one.full * max_sequences,
        sliding: facts.window.map_or(0, |_| sliding),
    }
}

/// Pages for the parts of chunks that no later step sees, where layers can have them at the same place.
pub fn chunk_pages(max_rows: usize, facts: ModelFacts) -> usize {
    match facts.window {
        Some(_) if facts.layers_take_turns => pages_of(max_rows),
        _ => 0,
    }
}

impl EngineConfig {
    /// Keeps prefixes on disk, too.
    pub fn keep_on_disk(&mut self, disk: DiskConfig) {
        self.staging_pages = STAGING_PAGES;
        self.disk = Some(disk);
    }

    /// With [`comfortable_pages`], and a queue of some requests for each that runs.
    pub fn comfortable(
        context: usize,
        max_sequences: usize,
        max_rows: usize,
        facts: ModelFacts,
    ) -> EngineConfig {
        let max_rows = max_rows.max(max_sequences);
        EngineConfig {
            context,
            max_rows,
            prefill_rows: 512,
            max_sequences,
            max_unfinished: max_sequences.saturating_mul(16),
            pages: comfortable_pages(context, max_sequences, max_rows, facts),
            chunk_pages: chunk_pages(max_rows, facts),
            host_pages: PerGroup::default(),
            staging_pages: 0,
            disk: None,
            max_draft: 0,
            drafts: None,
            kv: PerGroup::default(),
            prefix_reuse: PrefixReuse::Enabled,
            batching: Batching::Fast,
            stall_limit: STALL_LIMIT,
        }
    }
}

#[cfg(test)]
mod tests;
