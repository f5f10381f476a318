//! The contract between the engine and a device: two traits and the batch they run.
//!
//! A backend compiles a plan once; the executor then runs ragged batches of prompt chunks and single decode tokens.
//! Nothing here knows about requests, text or scheduling.

use std::{ops::Range, sync::Arc, time::Duration};

use crate::{
    TokenId,
    cost::Roofline,
    kv::pages_of,
    phase::Origin,
    plan::{Plan, Value},
    sampling::Sampling,
    weights::Weights,
};

pub use crate::kv::{KvGroup, KvType, PAGE_TOKENS, PageId, PerGroup};

/// Compiles plans for one device.
pub trait Backend: Send {
    /// What `--backend` calls it.
    fn name(&self) -> &'static str;

    fn memory(&self) -> Result<Memory, BackendError>;

    /// Rows of a prompt to feed at a time: enough to keep the device busy, few enough to stay responsive.
    fn chunk_rows(&self) -> usize {
        512
    }

    /// What compiling would take of [`Backend::memory`], where that can be told: on devices that copy the weights.
    fn need(
        &self,
        _plan: &Plan,
        _weights: &Weights,
        _options: &CompileOptions,
    ) -> Result<Option<Need>, BackendError> {
        Ok(None)
    }

    /// The most device memory held at a time, where that is counted.
    fn peak_bytes(&self) -> Option<u64> {
        None
    }

    /// What the device can do at the most, measured now, in about a second; `None` where nobody would ask.
    fn roofline(&self) -> Result<Option<Roofline>, BackendError> {
        Ok(None)
    }

    /// Prepares everything a batch needs. Running then allocates nothing of the plan's size.
    fn compile(
        &self,
        plan: &Plan,
        weights: Arc<Weights>,
        options: &CompileOptions,
    ) -> Result<Box<dyn Executor>, BackendError>;
}

/// A loaded model and its KV pages. Made on the engine's thread and never leaving it, hence not `Send`.
pub trait Executor {
    /// Starts one forward pass and its sampling. May return before the device is done.
    fn submit(&mut self, batch: &Batch<'_>) -> Result<Ticket, BackendError>;

    /// Whether [`Executor::submit_chained`] works, and two batches may be in flight.
    fn chains(&self) -> bool {
        false
    }

    /// Starts a batch before the one in flight is collected: its row `r` is fed the token that sampled row `r` of that one will
    /// have. So all runs have one row, and there are as many as that batch samples. `batch.tokens` are any tokens, and histories
    /// end before the row's, so there must be no penalties.
    fn submit_chained(&mut self, batch: &Batch<'_>) -> Result<Ticket, BackendError> {
        let _ = batch;
        Err(BackendError::Unsupported {
            what: "batches cannot be chained".to_owned(),
        })
    }

    /// Waits for a submitted batch and replaces `out` with its results. A ticket is used once, in the order of submission.
    fn collect(&mut self, ticket: Ticket, out: &mut Outputs) -> Result<(), BackendError>;

    /// A value of the last batch, `[rows, columns]`; `None` unless compiled with [`CompileOptions::probe`].
    fn probed(&self, value: Value) -> Option<&[f32]>;

    /// Runs a batch once and times every launch, in order. Its tokens are not reported. `None` where times are not told apart.
    fn profile(&mut self, batch: &Batch<'_>) -> Result<Option<Vec<LaunchTime>>, BackendError> {
        let _ = batch;
        Ok(None)
    }
}

/// One launch of a profiled batch.
#[derive(Clone, Debug, PartialEq)]
pub struct LaunchTime {
    /// Label of the step, or of the steps, that it computes.
    pub label: String,
    /// Layer and phase it is counted with.
    pub origin: Origin,
    /// Time on the device.
    pub time: Duration,
}

/// Bytes of device memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Memory {
    pub total_bytes: u64,
    pub free_bytes: u64,
}

/// Bytes of device memory that a compiled plan takes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Need {
    pub bytes: u64,
    /// By purpose, in lines for a person.
    pub parts: String,
}

#[derive(Clone, Debug)]
pub struct CompileOptions {
    /// KV pages to hold, per group.
    pub pages: PerGroup<usize>,
    pub kv: KvType,
    /// The most rows a batch will have.
    pub max_rows: usize,
    /// The most sampled rows a batch will have.
    pub max_sampled: usize,
    /// Keep every value of the last batch for [`Executor::probed`].
    pub probe: bool,
}

/// Proof that a batch was submitted.
#[derive(Debug, PartialEq, Eq)]
#[must_use = "a submitted batch must be collected"]
pub struct Ticket(pub u64);

/// A ragged batch: prompt chunks and single decode tokens side by side.
#[derive(Clone, Copy, Debug)]
pub struct Batch<'a> {
    pub tokens: &'a [TokenId],
    /// In order, covering `tokens` without gaps. Each run belongs to another sequence.
    pub runs: &'a [Run<'a>],
}

/// One sequence's share of a batch.
#[derive(Clone, Debug)]
pub struct Run<'a> {
    /// Into [`Batch::tokens`]; never empty.
    pub rows: Range<usize>,
    /// Of the first row. Everything before it is already in the KV pages.
    pub position: usize,
    /// Pages by absolute place: entry `i` holds positions `i * PAGE_TOKENS ..`. They cover all rows of this run;
    /// sliding entries wholly behind the window of the first row may be [`PageId::FREED`].
    pub pages: PerGroup<&'a [PageId]>,
    /// Trailing rows that get logits: 0 in mid-prompt, 1 usually, more for evaluation or a draft.
    pub sampled: usize,
    pub sampling: &'a Sampling,
    /// All tokens of the sequence up to and including the last row, for penalties.
    pub history: &'a [TokenId],
    pub output: RowOutput,
}

/// What a sampled row reports.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RowOutput {
    Token,
    /// The token, its log-probability and those of the `top` likeliest tokens.
    Logprobs {
        top: usize,
    },
    /// The token and the whole row of logits.
    Logits,
}

/// Results of a batch: one entry a sampled row, in batch order.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Outputs {
    pub rows: Vec<RowResult>,
}

#[derive(Clone, Debug, Default, PartialEq)]
pub struct RowResult {
    pub token: TokenId,
    /// Log-probability of `token` under the model itself, before penalties, temperature and truncation.
    pub logprob: Option<f32>,
    /// The likeliest tokens, best first, in the same measure.
    pub top: Vec<(TokenId, f32)>,
    /// Empty unless [`RowOutput::Logits`].
    pub logits: Vec<f32>,
}

/// Why a device could not do it: the three cases callers act on.
#[derive(Debug, thiserror::Error)]
pub enum BackendError {
    #[error("not enough memory: {} needed, {} free", mib(*.needed_bytes), mib(*.free_bytes))]
    OutOfMemory { needed_bytes: u64, free_bytes: u64 },
    #[error("{what}")]
    Unsupported { what: String },
    /// What the device has to say.
    #[error(transparent)]
    Device(Box<dyn std::error::Error + Send + Sync>),
}

fn mib(bytes: u64) -> String {
    format!("{:.1} MiB", bytes as f64 / f64::from(1 << 20))
}

/// A sampled row of a batch: which run it belongs to and where it stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RowPlace {
    /// Into [`Batch::runs`].
    pub run: usize,
    /// Into [`Batch::tokens`].
    pub row: usize,
    pub position: usize,
}

impl<'a> Batch<'a> {
    /// What the row's token may depend on: a row before a run's last is followed by tokens it must not know of.
    pub fn history(&self, place: &RowPlace) -> &'a [TokenId] {
        let run = &self.runs[place.run];
        let later = run.rows.end - 1 - place.row;
        &run.history[..run.history.len().saturating_sub(later)]
    }

    /// Every row, in order.
    pub fn all_rows(&self) -> impl Iterator<Item = RowPlace> {
        self.runs.iter().enumerate().flat_map(|(run, r)| {
            r.rows.clone().map(move |row| RowPlace {
                run,
                row,
                position: r.position + (row - r.rows.start),
            })
        })
    }

    /// The rows that get logits, in order.
    pub fn sampled_rows(&self) -> impl Iterator<Item = RowPlace> {
        self.all_rows().filter(|place| {
            place.row + self.runs[place.run].sampled >= self.runs[place.run].rows.end
        })
    }

    /// Everything that kernels rely on. Each executor checks a batch once, before anything is queued.
    pub fn check(&self, plan: &Plan, options: &CompileOptions) -> Result<(), BackendError> {
        let wrong = |what: String| Err(BackendError::Unsupported { what });
        let sampled: usize = self.runs.iter().map(|r| r.sampled).sum();
        if self.tokens.len() > options.max_rows || sampled > options.max_sampled {
            return wrong(format!(
                "a batch of {} rows with {sampled} sampled is over the compiled limits {} and {}",
                self.tokens.len(),
                options.max_rows,
                options.max_sampled
            ));
        }
        if let Some(token) = self.tokens.iter().find(|t| **t as usize >= plan.vocab()) {
            return wrong(format!(
                "token {token} is outside the vocabulary of {}",
                plan.vocab()
            ));
        }
        let mut next = 0;
        for run in self.runs {
            if run.rows.start != next || run.rows.is_empty() || run.sampled > run.rows.len() {
                return wrong(format!(
                    "run of rows {:?} with {} sampled does not follow row {next}",
                    run.rows, run.sampled
                ));
            }
            next = run.rows.end;
            let pages = pages_of(run.position + run.rows.len());
            for group in KvGroup::ALL {
                let table = run.pages.get(group);
                let first = if plan.uses(group) {
                    plan.first_visible_page(group, run.position)
                } else {
                    pages
                };
                let held = *options.pages.get(group);
                if (first..pages).any(|i| table.get(i).is_none_or(|p| p.0 as usize >= held)) {
                    return wrong(format!(
                        "{group:?} pages {first}..{pages} of a run at position {} are not all among the {held} held",
                        run.position
                    ));
                }
            }
        }
        if next != self.tokens.len() {
            return wrong(format!("{next} rows in runs, {} tokens", self.tokens.len()));
        }
        Ok(())
    }
}
