//! Continuous batching: which rows of which sequences make up the next step.
//!
//! Requests are admitted in the order they came and run side by side. A step has one row for each sequence that is
//! decoding and shares the rest of its rows evenly among the prompts being computed, so neither kind waits for the
//! other.
//!
//! Sliding pages are reserved at admission, so they never run out. Full pages are not: how long an answer gets is
//! unknown. When they run out the youngest sequence is preempted: it gives back its pages and waits, to be computed
//! again from its tokens so far. The oldest can take from all others, so every step gets something done.
//!
//! While all that runs is sampled, the step after the one under way can be handed out before its tokens are known
//! ([`Scheduler::ahead`]), so that the device does not wait for anybody. A sequence that turns out to have ended has computed a
//! row for nothing.

use std::collections::VecDeque;

use carat_model::{
    TokenId,
    backend::{Batch, Outputs, Run},
    kv::{PAGE_TOKENS, PerGroup, first_visible_page, pages_of, window_pages},
};

use super::{
    kv::Kv,
    pages::PageCounts,
    request::{Counts, FinishReason, Rejected, Request, RequestId},
    sequence::Sequence,
};
use crate::config::Limits;

/// What happened to a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Update {
    /// It left the queue. Happens once, however often it is preempted afterwards.
    Started { id: RequestId },
    /// The next token of its answer is the result of this row of the outputs just applied.
    Token { id: RequestId, row: usize },
    Finished {
        id: RequestId,
        reason: FinishReason,
        counts: Counts,
    },
    /// It was part of a batch that failed, and is over.
    Abandoned { id: RequestId },
}

/// A step for an executor.
pub struct Work<'a> {
    tokens: &'a [TokenId],
    runs: Vec<Run<'a>>,
}

impl Work<'_> {
    pub fn batch(&self) -> Batch<'_> {
        Batch {
            tokens: self.tokens,
            runs: &self.runs,
        }
    }
}

/// How busy the engine is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Stats {
    pub running: usize,
    pub waiting: usize,
    pub pages: PerGroup<PageCounts>,
}

/// Requests in, batches out; outputs in, updates out.
///
/// [`Scheduler::next`] and then [`Scheduler::apply`] (or [`Scheduler::abandon`]), in turn; requests may come and go at
/// any time. Where [`Scheduler::ahead`] gave a step in between, [`Scheduler::apply`] comes once more before the next.
pub struct Scheduler {
    limits: Limits,
    kv: Kv,
    /// Oldest first, and all older than those waiting: admission is in order, and preemption takes the last.
    running: Vec<Sequence>,
    waiting: VecDeque<Sequence>,
    /// A step is under way: pages in it may not change hands.
    in_step: bool,
    /// So is the one after it.
    is_ahead: bool,
    /// Who is sampled in the steps under way, in the order of their results.
    sampled: VecDeque<Vec<RequestId>>,
    /// Tokens of the step's rows.
    tokens: Vec<TokenId>,
    updates: Vec<Update>,
}

impl Scheduler {
    pub fn new(limits: Limits) -> Scheduler {
        Scheduler {
            kv: Kv::new(&limits),
            running: Vec::with_capacity(limits.config().max_sequences),
            waiting: VecDeque::new(),
            in_step: false,
            is_ahead: false,
            sampled: VecDeque::new(),
            tokens: Vec::with_capacity(limits.config().max_rows),
            updates: Vec::new(),
            limits,
        }
    }

    /// Queues a request. `id` must be new.
    pub fn submit(&mut self, id: RequestId, request: Request) -> Result<(), Rejected> {
        let limit = self.limits.check(&request)?;
        self.waiting.push_back(Sequence::new(id, request, limit));
        Ok(())
    }

    /// Ends a request before the next step. Unknown and finished ones are ignored.
    pub fn cancel(&mut self, id: RequestId) {
        let mut all = self.running.iter_mut().chain(&mut self.waiting);
        if let Some(sequence) = all.find(|s| s.id == id) {
            sequence.cancelled = true;
        }
    }

    /// What has happened since the last call, in order.
    pub fn updates(&mut self) -> impl Iterator<Item = Update> {
        self.updates.drain(..)
    }

    /// Whether no request is running or waiting.
    pub fn is_idle(&self) -> bool {
        self.running.is_empty() && self.waiting.is_empty()
    }

    pub fn stats(&self) -> Stats {
        Stats {
            running: self.running.len(),
            waiting: self.waiting.len(),
            pages: self.kv.counts(),
        }
    }

    /// The next step; `None` when no request is left.
    #[expect(
        clippy::should_implement_trait,
        reason = "the step borrows from the scheduler, which an iterator's items cannot"
    )]
    pub fn next(&mut self) -> Option<Work<'_>> {
        assert!(
            !self.in_step,
            "the step before was neither applied nor abandoned"
        );
        self.drop_cancelled();
        self.admit();
        self.share_rows();

        self.tokens.clear();
        let mut runs = Vec::with_capacity(self.running.len());
        for sequence in self.running.iter().filter(|s| s.rows > 0) {
            let start = self.tokens.len();
            self.tokens.extend_from_slice(sequence.fed());
            runs.push(sequence.run(start..self.tokens.len()));
        }
        self.in_step = !runs.is_empty();
        if self.in_step {
            let sampled = self.running.iter().filter(|s| s.rows > 0 && s.samples());
            self.sampled.push_back(sampled.map(|s| s.id).collect());
        }
        debug_assert!(
            self.in_step || self.is_idle(),
            "the oldest always gets a row"
        );
        self.in_step.then_some(Work {
            tokens: &self.tokens,
            runs,
        })
    }

    /// The step after the one under way, if that is certain but for its tokens: row `r` is fed what row `r` of the results to come
    /// will have. `None` if any sequence may have to be treated otherwise, or if somebody could be admitted.
    pub fn ahead(&mut self) -> Option<Work<'_>> {
        assert!(self.in_step, "no step is under way");
        let is_full = self.running.len() == self.limits.config().max_sequences;
        // Who has ended since the step was handed out still has a row in it, which then is not the same in the step after.
        let ids = self.running.iter().map(|s| s.id);
        if self.is_ahead
            || self.running.is_empty()
            || !self.sampled.iter().flatten().copied().eq(ids)
            || !(is_full || self.waiting.is_empty())
            || !self.running.iter().all(Sequence::can_go_ahead)
        {
            return None;
        }
        let tables = self.running.iter().map(|s| (&s.table, s.rows + 1));
        if !self.kv.can_grow(tables) {
            return None;
        }
        for sequence in &mut self.running {
            self.kv.grow(&mut sequence.table, sequence.rows + 1);
        }
        self.is_ahead = true;
        let ids = self.running.iter().map(|s| s.id);
        self.sampled.push_back(ids.collect());
        self.tokens.clear();
        self.tokens.resize(self.running.len(), 0);
        let runs = self.running.iter().enumerate();
        Some(Work {
            runs: runs.map(|(row, s)| s.run_ahead(row)).collect(),
            tokens: &self.tokens,
        })
    }

    /// Takes the results of the step: sequences grow, completed pages become findable, finished requests leave.
    pub fn apply(&mut self, outputs: &Outputs) {
        assert!(self.in_step, "no step is under way");
        let is_ahead = std::mem::take(&mut self.is_ahead);
        self.in_step = is_ahead;
        let sampled = self.sampled.pop_front().expect("a list for each step");
        let mut results = outputs.rows.iter().zip(sampled).enumerate();
        let mut i = 0;
        while i < self.running.len() {
            let sequence = &mut self.running[i];
            i += 1;
            let rows = std::mem::take(&mut sequence.rows);
            if rows == 0 {
                continue;
            }
            let samples = rows == sequence.pending();
            self.kv.commit(&mut sequence.table, &sequence.tokens, rows);
            if !samples {
                continue;
            }
            let id = sequence.id;
            // Between them are results of those that have ended since.
            let (row, (result, _)) = results
                .find(|(_, (_, of))| *of == id)
                .expect("a result for each sampled row");
            if sequence.cancelled {
                continue;
            }
            let finish = sequence.push(result.token);
            sequence.rows = usize::from(is_ahead);
            if !matches!(finish, Some(FinishReason::Stop { .. })) {
                self.updates.push(Update::Token { id, row });
            }
            if let Some(reason) = finish {
                i -= 1;
                self.finish(i, reason);
            }
        }
    }

    /// The step failed, or the one after it: their sequences end, and nothing they computed in them is kept.
    pub fn abandon(&mut self) {
        self.in_step = false;
        self.is_ahead = false;
        self.sampled.clear();
        for i in (0..self.running.len()).rev() {
            if self.running[i].rows > 0 {
                let sequence = self.leave(i);
                self.updates.push(Update::Abandoned { id: sequence.id });
            }
        }
    }

    fn finish(&mut self, i: usize, reason: FinishReason) {
        let Sequence { id, counts, .. } = self.leave(i);
        self.updates.push(Update::Finished { id, reason, counts });
    }

    /// Takes a sequence out of the running ones and its pages from it.
    fn leave(&mut self, i: usize) -> Sequence {
        let mut sequence = self.running.remove(i);
        self.kv.release(&mut sequence.table);
        sequence
    }

    fn drop_cancelled(&mut self) {
        for i in (0..self.running.len()).rev() {
            if self.running[i].cancelled {
                self.finish(i, FinishReason::Cancelled);
            }
        }
        let updates = &mut self.updates;
        self.waiting.retain(|s| {
            if s.cancelled {
                updates.push(Update::Finished {
                    id: s.id,
                    reason: FinishReason::Cancelled,
                    counts: s.counts,
                });
            }
            !s.cancelled
        });
    }

    /// Starts waiting sequences, in order, as long as there is room.
    fn admit(&mut self) {
        while self.running.len() < self.limits.config().max_sequences {
            let Some(head) = self.waiting.front() else {
                return;
            };
            let found = self.kv.find(&head.tokens);

            // Those running must be able to finish their prompts and to go on by a page each, or the newcomer would be
            // preempted at once.
            let promised: usize = self
                .running
                .iter()
                .map(|s| s.pages_soon().saturating_sub(s.table.pages.full.len()) + 1)
                .sum();
            let needed = head.pages_soon() - found.reusable + found.unheld;
            let reserved = self.reserved_sliding() + self.reservation(head);
            if promised + needed > self.kv.available()
                || reserved > self.limits.config().pages.sliding
            {
                return;
            }

            let mut sequence = self.waiting.pop_front().expect("the head was looked at");
            let prompt = sequence.counts.prompt_tokens;
            sequence.table = self.kv.claim(&sequence.tokens, found, prompt);
            if sequence.counts.preemptions == 0 {
                sequence.counts.cached_tokens = sequence.table.computed;
                sequence.counts.miss = found.miss;
                self.updates.push(Update::Started { id: sequence.id });
            }
            self.running.push(sequence);
        }
    }

    /// Sliding pages that a sequence holds at most between two steps, the place of its next row included.
    fn reservation(&self, sequence: &Sequence) -> usize {
        self.limits.shape().window.map_or(0, |window| {
            window_pages(window).min(pages_of(sequence.most_positions()))
        })
    }

    fn reserved_sliding(&self) -> usize {
        self.running.iter().map(|s| self.reservation(s)).sum()
    }

    /// Decides how many rows each sequence has in the next step, and gets the pages for them.
    fn share_rows(&mut self) {
        let decoding = self.running.iter().filter(|s| s.is_decoding()).count();
        let mut i = 0;
        while i < self.running.len() {
            if self.running[i].is_decoding() {
                self.schedule(i, 1);
            }
            i += 1;
        }

        let prompts = self.running.iter().filter(|s| !s.is_decoding());
        let Some(share) = Share::of(prompts, self.limits.config().max_rows - decoding) else {
            return;
        };
        let Share {
            rows,
            mut spare_rows,
            count,
        } = share;
        // A chunk is in the sliding pages as a whole before the window moves on; what nobody reserved is for that.
        let spare_pages = (self.limits.config().pages.sliding - self.reserved_sliding()) / count;
        let mut i = 0;
        while i < self.running.len() {
            let sequence = &self.running[i];
            if !sequence.is_decoding() {
                let pending = sequence.pending();
                let extra = pending.saturating_sub(rows).min(spare_rows);
                spare_rows -= extra;
                let wanted = pending.min(rows) + extra;
                self.schedule(i, wanted.min(self.sliding_rows(sequence, spare_pages)));
            }
            i += 1;
        }
    }

    /// Rows for which a sequence's reserved sliding pages suffice, with some more.
    fn sliding_rows(&self, sequence: &Sequence, spare_pages: usize) -> usize {
        let position = sequence.table.computed;
        self.limits.shape().window.map_or(usize::MAX, |window| {
            let pages = self.reservation(sequence) + spare_pages;
            (first_visible_page(position, window) + pages) * PAGE_TOKENS - position
        })
    }

    /// Gives a sequence up to `wanted` rows: as many as there are pages for. Younger sequences are preempted only if
    /// there is not a single page, so that scarcity makes chunks shorter before it makes work undone.
    fn schedule(&mut self, i: usize, wanted: usize) {
        let mut fitting = self.kv.rows_that_fit(&self.running[i].table);
        while fitting == 0 && self.running.len() > i + 1 {
            self.preempt_youngest();
            fitting = self.kv.rows_that_fit(&self.running[i].table);
        }
        let sequence = &mut self.running[i];
        sequence.rows = wanted.min(fitting);
        self.kv.grow(&mut sequence.table, sequence.rows);
    }

    fn preempt_youngest(&mut self) {
        let mut sequence = self.leave(self.running.len() - 1);
        sequence.rows = 0;
        sequence.counts.preemptions += 1;
        self.waiting.push_front(sequence);
    }
}

/// An even share of a step's rows for each of some prompts.
struct Share {
    rows: usize,
    /// Rows that shorter prompts leave over.
    spare_rows: usize,
    count: usize,
}

impl Share {
    /// `None` without prompts. At least a row each, since there are no more sequences than rows.
    fn of<'a>(prompts: impl Iterator<Item = &'a Sequence> + Clone, total: usize) -> Option<Share> {
        let count = prompts.clone().count();
        let rows = total.checked_div(count)?;
        let taken: usize = prompts.map(|s| s.pending().min(rows)).sum();
        Some(Share {
            rows,
            spare_rows: total - taken,
            count,
        })
    }
}

#[cfg(test)]
mod tests;
