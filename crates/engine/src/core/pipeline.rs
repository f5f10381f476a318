//! The order of work between scheduler and executor, for whoever runs them: a thread, or a test.
//!
//! With an executor that looks ahead, two batches are in flight: while the device computes the later, the results of the earlier are
//! applied, the later is drawn with all tokens before it known, and the one after it is submitted, fed by what that draw gives.
//! Only then does the caller hand results on. So the device never waits for the host, and no token waits for a batch that it is
//! no part of: where the executor does not look ahead, nothing is submitted until results have been handed on.
//!
//! A batch that is refused has changed nothing. Its sequences are then run in two halves, one after the other, and those again
//! if need be: only a sequence that is refused alone is given up. A batch ahead that is refused is planned anew when results are in.
//!
//! A batch that is computed in `submit` may take a second, and a cancelled request is not to wait for its end: [`Interrupt`] stops it.
//! Its step is taken back, and the next is seen through whatever is wished, so that cancellations without end stop nobody's work.

mod store;

use std::collections::VecDeque;

use carat_model::backend::{BackendError, Executor, Interrupt, Outputs, Ticket};

use super::{RequestId, Scheduler, Stats};

/// A scheduler and the executor that its steps run on.
pub struct Pipeline<E> {
    scheduler: Scheduler,
    executor: E,
    /// Of batches in flight, the oldest first: at most two.
    tickets: VecDeque<Ticket>,
    /// Of a refused batch, the sequences of each part that is yet to be run; the next is the last.
    parts: Vec<Vec<RequestId>>,
    interrupt: Interrupt,
    outputs: Outputs,
    /// Pages beyond memory.
    tier: Option<store::Tier>,
    /// Rows of prompts that have been submitted.
    prompt_rows: usize,
}

impl<E: Executor> Pipeline<E> {
    /// With nothing in flight.
    pub fn new(scheduler: Scheduler, mut executor: E) -> Pipeline<E> {
        let interrupt = Interrupt::default();
        executor.interrupt_by(interrupt.clone());
        Pipeline {
            interrupt,
            scheduler,
            executor,
            tickets: VecDeque::new(),
            parts: Vec::new(),
            outputs: Outputs::default(),
            tier: None,
            prompt_rows: 0,
        }
    }

    /// To submit, cancel and propose, and for updates.
    pub fn scheduler(&mut self) -> &mut Scheduler {
        &mut self.scheduler
    }

    /// Load of the scheduler.
    pub fn stats(&self) -> Stats {
        Stats {
            store: self.tier.as_ref().map(store::Tier::stats),
            ..self.scheduler.stats()
        }
    }

    /// Rows of prompts that have been submitted so far.
    pub fn prompt_rows(&self) -> usize {
        self.prompt_rows
    }

    /// To stop the batch that is being computed, from any thread. [`Pipeline::step`] then returns `false` with nothing done; whoever
    /// calls it takes the wish back before the next step.
    pub fn interrupt(&self) -> &Interrupt {
        &self.interrupt
    }

    /// The executor that runs the batches.
    pub fn executor(&mut self) -> &mut E {
        &mut self.executor
    }

    /// Results of the step completed last, to which [`Update::Token`](super::Update) refers, and all that has happened.
    pub fn results(&mut self) -> (&mut Outputs, impl Iterator<Item = super::Update>) {
        (&mut self.outputs, self.scheduler.updates())
    }

    /// Whether there is neither a request nor a batch.
    pub fn is_idle(&self) -> bool {
        self.scheduler.is_idle() && self.tickets.is_empty()
    }

    /// Completes one step, and hands the next to the executor where that looks ahead. `false` if there is nothing to do, or if it
    /// was interrupted. After an
    /// error, [`Pipeline::give_up`].
    pub fn step(&mut self) -> Result<bool, BackendError> {
        self.restore()?;
        if self.tickets.is_empty() {
            self.draft()?;
            if !self.submit_next()? {
                if self.is_restoring() {
                    self.await_restore()?;
                }
                return Ok(false);
            }
            self.draw_and_look_ahead()?;
        }
        let Some(ticket) = self.tickets.pop_front() else {
            return Ok(false);
        };
        self.executor.collect(ticket, &mut self.outputs)?;
        self.scheduler.apply(&self.outputs);
        if !self.tickets.is_empty() {
            self.draw_and_look_ahead()?;
        }
        Ok(true)
    }

    /// Ends the requests that have rows in flight, after a failure. What is in flight is waited for, whatever becomes of it: the
    /// pages it writes are given to others.
    pub fn give_up(&mut self) {
        let mut nobodys = Outputs::default();
        for ticket in self.tickets.drain(..) {
            // It failed, or belongs to requests that end here.
            let _ = self.executor.collect(ticket, &mut nobodys);
        }
        self.scheduler.abandon();
    }

    /// Has drafts made for the next step. A drafter that is refused is not asked again: answers are the same without.
    fn draft(&mut self) -> Result<(), BackendError> {
        if !self.parts.is_empty() || !self.scheduler.plan_drafts() {
            return Ok(());
        }
        match self.executor.draft(&self.scheduler.draft_runs()) {
            Ok(drafts) => self.scheduler.take_drafts(&drafts),
            Err(error @ BackendError::Device(_)) => return Err(error),
            Err(error) => {
                tracing::warn!(%error, "the draft model is switched off");
                self.scheduler.drop_draft_model();
            }
        }
        Ok(())
    }

    /// Submits the next step, if there is one: of the next part of a batch that was refused, or of everybody.
    fn submit_next(&mut self) -> Result<bool, BackendError> {
        loop {
            let part = self.parts.pop();
            let work = match &part {
                Some(part) => self.scheduler.next_of(part),
                None => self.scheduler.next(),
            };
            let Some(work) = work else {
                if part.is_some() {
                    // All of them have left meanwhile.
                    continue;
                }
                return Ok(false);
            };
            let batch = work.batch();
            let (rows, runs) = (batch.feeds.len(), batch.runs.len());
            let prompts = batch.runs.iter().map(|run| run.rows.len());
            let prompt_rows: usize = prompts.filter(|rows| *rows > 1).sum();
            tracing::trace!(rows, runs, "step");
            // A copy that fails leaves pages in doubt, whoever's they are.
            for call in work.moves() {
                self.executor.move_pages(call).map_err(in_doubt)?;
            }
            let submitted = self.executor.submit(&batch);
            let memory = work.into_memory();
            self.scheduler.reuse(memory);
            let error = match submitted {
                Ok(ticket) => {
                    self.interrupt.ignore(false);
                    self.prompt_rows += prompt_rows;
                    self.tickets.push_back(ticket);
                    return Ok(true);
                }
                Err(error) => error,
            };
            let is_ahead = !self.tickets.is_empty();
            if matches!(error, BackendError::Interrupted) {
                self.scheduler.take_back();
                self.parts.extend(part);
                self.interrupt.ignore(true);
                return Ok(false);
            }
            if matches!(error, BackendError::Device(_)) || (runs == 1 && !is_ahead) {
                return Err(error);
            }
            tracing::debug!(%error, rows, runs, is_ahead, "a batch was refused");
            let mut members = self.scheduler.take_back();
            if is_ahead {
                return Ok(false);
            }
            let later = members.split_off(members.len().div_ceil(2));
            self.parts.push(later);
            self.parts.push(members);
        }
    }

    /// Draws the only batch in flight, and submits the one after it.
    fn draw_and_look_ahead(&mut self) -> Result<(), BackendError> {
        let Some(ticket) = self.tickets.back() else {
            return Ok(());
        };
        let draws = self.scheduler.draws();
        if !draws.is_empty() {
            self.executor.draw(ticket, &draws)?;
        }
        let memory = draws.into_memory();
        self.scheduler.reuse(memory);
        if self.parts.is_empty() && self.executor.lookahead(ticket) {
            self.submit_next()?;
        }
        Ok(())
    }
}

fn in_doubt(error: BackendError) -> BackendError {
    match error {
        BackendError::Device(_) => error,
        other => BackendError::Device(other.to_string().into()),
    }
}

#[cfg(test)]
mod tests;
