//! An executor that sleeps for a step's time and returns a word: what is measured is everything around it.

use std::{
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicUsize, Ordering},
    },
    time::{Duration, Instant},
};

use carat_model::{
    TokenId,
    backend::{
        BackendError, Batch, Draw, Executor, HostPageId, KvGroup, Outputs, PageMove, Ticket,
    },
    draw::{RowOutput, RowResult},
    plan::Value,
    sampling::TokenMask,
};

use super::process::WANTED;

/// Cost of a batch.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Pace {
    /// Any batch.
    pub(super) step: Duration,
    /// Each row of a prompt, besides.
    pub(super) row: Duration,
}

/// Fault of the next batch.
#[derive(Clone, Copy, Debug)]
pub(super) enum Fault {
    /// It is refused; the device is as it was.
    Refused,
    /// The device is lost.
    Device,
    /// It takes this long.
    Stall(Duration),
    Panic,
}

/// Held by the scenario while the executor is the engine's.
#[derive(Default)]
pub(super) struct Controls {
    fault: Mutex<Option<Fault>>,
    /// The most rows of prompts in a batch that others decoded in.
    joined_rows: AtomicUsize,
}

impl Controls {
    /// Breaks the next batch.
    pub(super) fn inject(&self, fault: Fault) {
        *self.fault.lock().unwrap_or_else(PoisonError::into_inner) = Some(fault);
    }

    pub(super) fn joined_rows(&self) -> usize {
        self.joined_rows.load(Ordering::Relaxed)
    }
}

pub(super) struct Synthetic {
    pub(super) word: TokenId,
    pub(super) pace: Pace,
    pub(super) controls: Arc<Controls>,
    due: Instant,
    drawn: Vec<RowResult>,
    batches: u64,
}

impl Synthetic {
    pub(super) fn new(word: TokenId, pace: Pace, controls: Arc<Controls>) -> Synthetic {
        Synthetic {
            word,
            pace,
            controls,
            due: Instant::now(),
            drawn: Vec::new(),
            batches: 0,
        }
    }

    fn fault(&self) -> Result<(), BackendError> {
        let fault = self.controls.fault.lock();
        let fault = fault.unwrap_or_else(PoisonError::into_inner).take();
        match fault {
            None => Ok(()),
            Some(Fault::Refused) => Err(BackendError::Unsupported {
                what: WANTED.to_owned(),
            }),
            Some(Fault::Device) => Err(BackendError::Device(WANTED.into())),
            Some(Fault::Stall(time)) => {
                sleep_until(Instant::now() + time);
                Ok(())
            }
            Some(Fault::Panic) => panic!("{WANTED}"),
        }
    }

    fn row(&self, draw: &Draw<'_>) -> RowResult {
        let allowed = draw.mask.is_none_or(|mask| mask.allows(self.word));
        let lowest = draw.mask.and_then(TokenMask::lowest);
        let (logprob, top) = match draw.output {
            RowOutput::Logprobs { top } => {
                let top = (0..top).map(|n| (self.word + n as TokenId, -1.25 - n as f32));
                (Some(-1.25), top.collect())
            }
            RowOutput::Token | RowOutput::Logits => (None, Vec::new()),
        };
        RowResult {
            token: if allowed {
                self.word
            } else {
                lowest.unwrap_or(self.word)
            },
            logprob,
            top,
            logits: Vec::new(),
        }
    }
}

impl Executor for Synthetic {
    fn submit(&mut self, batch: &Batch<'_>) -> Result<Ticket, BackendError> {
        self.fault()?;
        let decodes = batch.runs.iter().filter(|run| run.rows.len() == 1).count();
        let prompts = batch.feeds.len() - decodes;
        if decodes > 0 {
            let most = &self.controls.joined_rows;
            most.fetch_max(prompts, Ordering::Relaxed);
        }
        let cost = self.pace.step + self.pace.row * prompts as u32;
        // A device goes on at its own pace, unless the host has kept it waiting for a whole batch.
        let now = Instant::now();
        let idle_since = now.checked_sub(cost).unwrap_or(now);
        self.due = self.due.max(idle_since) + cost;
        self.drawn.clear();
        self.batches += 1;
        Ok(Ticket(self.batches))
    }

    fn draw(&mut self, _ticket: &Ticket, draws: &[Draw<'_>]) -> Result<(), BackendError> {
        self.drawn = draws.iter().map(|draw| self.row(draw)).collect();
        Ok(())
    }

    fn collect(&mut self, _ticket: Ticket, out: &mut Outputs) -> Result<(), BackendError> {
        sleep_until(self.due);
        out.rows = std::mem::take(&mut self.drawn);
        Ok(())
    }

    fn move_pages(&mut self, _moves: &[PageMove]) -> Result<(), BackendError> {
        Ok(())
    }

    fn host_page(&mut self, _: KvGroup, _: HostPageId) -> Result<&mut [u8], BackendError> {
        Ok(&mut [])
    }

    fn probed(&self, _value: Value) -> Option<&[f32]> {
        None
    }
}

#[expect(
    clippy::disallowed_methods,
    reason = "this thread stands for a device that computes"
)]
fn sleep_until(when: Instant) {
    let left = when.saturating_duration_since(Instant::now());
    if !left.is_zero() {
        std::thread::sleep(left);
    }
}
