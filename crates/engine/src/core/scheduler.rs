//! Continuous batching: which rows of which sequences make up the next step.
//!
//! Requests are admitted in the order they came and run side by side. A step has one row for each sequence that is
//! decoding, the rows of drafts, and shares the rest evenly among the prompts being computed, so neither kind waits for the
//! other. Rows of an image that see each other are in one step, all of them.
//!
//! Sliding pages are reserved at admission, so they never run out. Full pages are not: how long an answer gets is
//! unknown. When they run out the youngest sequence is preempted: it gives back its pages and waits, to be computed
//! again from its tokens so far. The oldest can take from all others, so every step gets something done.
//!
//! A step can be planned while the one before it is under way and its tokens are not known yet: who decodes is fed what that step
//! will have sampled, prompts go on, and who waits is admitted. Nobody is preempted for it; if pages are short the step waits for
//! the results. A sequence that turns out to have ended has computed a row for nothing.

use std::collections::VecDeque;

use carat_model::{
    TokenId,
    backend::{Batch, Draw, Feed, Outputs, RowOutput, Run},
    kv::{PerGroup, pages_of, window_pages},
    sampling::{Sampling, TokenMask},
};

use super::{
    kv::{Kv, Table},
    pages::PageCounts,
    request::{Counts, FinishReason, Rejected, Request, RequestId},
    sequence::Sequence,
};
use crate::config::Limits;

/// What happened to a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Update {
    /// It left the queue. Happens once, however often it is preempted afterwards.
    Started {
        /// Whose update it is.
        id: RequestId,
    },
    /// The next token of its answer is the result of this row of the outputs just applied.
    Token {
        /// Whose update it is.
        id: RequestId,
        /// Into [`Outputs::rows`].
        row: usize,
    },
    /// The next token of its answer is one that its constraint forced.
    Forced {
        /// Whose update it is.
        id: RequestId,
        /// The token.
        token: TokenId,
    },
    /// It is over.
    Finished {
        /// Whose update it is.
        id: RequestId,
        /// Why.
        reason: FinishReason,
        /// What it came to.
        counts: Counts,
    },
    /// It was part of a batch that failed, and is over.
    Abandoned {
        /// Whose update it is.
        id: RequestId,
    },
}

/// A step for an executor.
pub struct Work<'a> {
    feeds: Vec<Feed<'a>>,
    runs: Vec<Run<'a>>,
}

impl Work<'_> {
    /// As an executor takes it.
    pub fn batch(&self) -> Batch<'_> {
        Batch {
            feeds: &self.feeds,
            runs: &self.runs,
        }
    }
}

/// How busy the engine is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Stats {
    /// Requests being computed.
    pub running: usize,
    /// Requests that have not started, or lost their pages.
    pub waiting: usize,
    /// KV pages by state.
    pub pages: PerGroup<PageCounts>,
}

/// A step under way.
struct Step {
    number: u64,
    /// Rows that are sampled.
    sampled: usize,
    is_drawn: bool,
}

/// Requests in, batches out; outputs in, updates out.
///
/// [`Scheduler::next`] plans a step, [`Scheduler::draws`] says how it is sampled, [`Scheduler::apply`] takes its results. A second
/// step may be planned when the first is drawn; it is drawn when the first is applied. [`Scheduler::abandon`] gives up whatever is
/// under way. Requests may come and go at any time. [`Pipeline`](super::Pipeline) keeps this order.
pub struct Scheduler {
    limits: Limits,
    kv: Kv,
    /// Oldest first, and all older than those waiting: admission is in order, and preemption takes the last.
    running: Vec<Sequence>,
    waiting: VecDeque<Sequence>,
    /// At most two, the oldest first.
    steps: VecDeque<Step>,
    last_step: u64,
    masks: Vec<TokenMask>,
    /// Where rows stop to see, of all runs that see ahead.
    visible_ends: Vec<u32>,
    /// For rows whose results nobody wants.
    unwanted: Sampling,
    updates: Vec<Update>,
}

impl Scheduler {
    /// Without requests.
    pub fn new(limits: Limits) -> Scheduler {
        Scheduler {
            kv: Kv::new(&limits),
            running: Vec::with_capacity(limits.config().max_sequences),
            waiting: VecDeque::new(),
            steps: VecDeque::new(),
            last_step: 0,
            masks: Vec::new(),
            visible_ends: Vec::new(),
            unwanted: Sampling::greedy(),
            updates: Vec::new(),
            limits,
        }
    }

    /// Queues a request. `id` must be new.
    pub fn submit(&mut self, id: RequestId, request: Request) -> Result<(), Rejected> {
        let limit = self.limits.check(&request)?;
        let has_sliding = self.limits.shape().window.is_some();
        let sequence = Sequence::new(id, request, limit, has_sliding);
        self.waiting.push_back(sequence);
        Ok(())
    }

    /// Ends a request before the next step. Unknown and finished ones are ignored.
    pub fn cancel(&mut self, id: RequestId) {
        let mut all = self.running.iter_mut().chain(&mut self.waiting);
        if let Some(sequence) = all.find(|s| s.id == id) {
            sequence.cancelled = true;
        }
    }

    /// Proposes what follows the tokens of a request, to be verified in the next step: those that the model would have drawn in
    /// any case are kept. Ignored for one that does not draft
    /// ([`Request::drafts`]), is not running or has rows under way, and forgotten after that step.
    pub fn propose(&mut self, id: RequestId, draft: &[TokenId]) {
        let (most, vocab) = (self.limits.config().max_draft, self.limits.shape().vocab);
        let found = self.running.iter_mut().find(|s| s.id == id);
        // Who has not said so has no sliding pages reserved for it.
        if let Some(sequence) = found.filter(|s| s.drafts) {
            sequence.draft(draft, most, vocab);
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

    /// How busy it is.
    pub fn stats(&self) -> Stats {
        Stats {
            running: self.running.len(),
            waiting: self.waiting.len(),
            pages: self.kv.counts(),
        }
    }

    /// The next step. `None` when no request is left, or when results of the step under way are needed first.
    #[expect(
        clippy::should_implement_trait,
        reason = "the step borrows from the scheduler, which an iterator's items cannot"
    )]
    pub fn next(&mut self) -> Option<Work<'_>> {
        assert!(
            self.steps.len() < 2 && self.steps.iter().all(|step| step.is_drawn),
            "the step before was not drawn, or two are under way"
        );
        let ahead = !self.steps.is_empty();
        if ahead && self.running.iter().any(Sequence::is_unsettled) {
            return None;
        }
        self.drop_cancelled();
        self.admit();
        self.last_step += 1;
        if ahead && !self.can_decode_ahead() {
            return None;
        }
        self.share_rows(ahead);
        let number = self.last_step;
        // Rows are given to who decodes first, but stand in the order of sequences, and so do results.
        let mut sampled = 0;
        for sequence in self.running.iter_mut().filter(|s| s.is_in(number)) {
            let share = sequence.shares.back_mut().expect("it is in the step");
            share.first_result = sampled;
            sampled += share.results;
        }
        if !self.running.iter().any(|s| s.is_in(number)) {
            debug_assert!(ahead || self.is_idle(), "the oldest always gets a row");
            return None;
        }
        self.steps.push_back(Step {
            number,
            sampled,
            is_drawn: false,
        });

        self.visible_ends.clear();
        let members = self.running.iter().filter(|s| s.is_in(number));
        let ends: Vec<_> = members
            .clone()
            .map(|s| s.visible_ends(&mut self.visible_ends))
            .collect();
        let mut work = Work {
            feeds: Vec::with_capacity(self.limits.config().max_rows),
            runs: Vec::with_capacity(ends.len()),
        };
        for (sequence, ends) in members.zip(ends) {
            let start = work.feeds.len();
            work.feeds.extend(sequence.feeds());
            let ends = ends.map(|range| &self.visible_ends[range]);
            work.runs.push(sequence.run(start..work.feeds.len(), ends));
        }
        Some(work)
    }

    /// How the step planned last is sampled, one draw per sampled row; to be asked once, when all steps before it are applied.
    pub fn draws(&mut self) -> Vec<Draw<'_>> {
        assert!(self.steps.len() == 1, "draws follow the results before");
        let step = &mut self.steps[0];
        assert!(
            !std::mem::replace(&mut step.is_drawn, true),
            "a step is drawn once"
        );
        let (number, sampled) = (step.number, step.sampled);
        let vocab = self.limits.shape().vocab;
        self.masks.clear();
        let mut i = 0;
        while i < self.running.len() {
            let sequence = &mut self.running[i];
            if sequence.is_in(number) && !sequence.masks(vocab, &mut self.masks) {
                self.finish(i, FinishReason::DeadEnd);
            } else {
                i += 1;
            }
        }
        // Rows of those that have ended or were cancelled since are drawn as well; nobody looks at them.
        let mut draws = vec![unwanted(&self.unwanted); sampled];
        let mut masks = self.masks.iter();
        let members = self.running.iter().filter(|s| s.is_in(number));
        for sequence in members.filter(|s| !s.cancelled) {
            for (result, draw) in sequence.draws(&mut masks) {
                draws[result] = draw;
            }
        }
        draws
    }

    /// Takes the results of the oldest step: sequences grow, completed pages become findable, finished requests leave.
    pub fn apply(&mut self, outputs: &Outputs) {
        let step = self.steps.pop_front().expect("a step is under way");
        let mut i = 0;
        while i < self.running.len() {
            let sequence = &mut self.running[i];
            i += 1;
            if sequence
                .shares
                .front()
                .is_none_or(|s| s.step != step.number)
            {
                continue;
            }
            let share = sequence.shares.pop_front().expect("looked at above");
            let rows = share.first_result..share.first_result + share.results;
            let (computed, taken, finish) = sequence.take(&share, &outputs.rows[rows]);
            let mut table = std::mem::replace(&mut sequence.table, Table::empty());
            self.kv.commit(&mut table, sequence.content(), computed);
            sequence.table = table;
            if sequence.shares.is_empty() {
                sequence.fed = sequence.table.computed;
            }
            let stopped = matches!(finish, Some(FinishReason::Stop { .. }));
            let told = taken - usize::from(stopped);
            let id = sequence.id;
            let updates = (0..told).map(|n| Update::Token {
                id,
                row: share.first_result + n,
            });
            self.updates.extend(updates);
            let finish = finish.or_else(|| {
                let awaits = taken > 0;
                awaits.then(|| self.force(i - 1)).flatten()
            });
            if let Some(reason) = finish {
                i -= 1;
                self.finish(i, reason);
            }
        }
    }

    /// The step under way failed, or one after it: their sequences end, and nothing they computed in them is kept.
    pub fn abandon(&mut self) {
        self.steps.clear();
        for i in (0..self.running.len()).rev() {
            if !self.running[i].shares.is_empty() {
                let sequence = self.leave(i);
                self.updates.push(Update::Abandoned { id: sequence.id });
            }
        }
    }

    /// Takes all tokens that the constraint of a running sequence forces.
    fn force(&mut self, i: usize) -> Option<FinishReason> {
        let sequence = &mut self.running[i];
        while let Some((token, finish)) = sequence.force() {
            if !matches!(finish, Some(FinishReason::Stop { .. })) {
                let id = sequence.id;
                self.updates.push(Update::Forced { id, token });
            }
            if finish.is_some() {
                return finish;
            }
        }
        None
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
            let found = self.kv.find(head.content());

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
            sequence.table = self.kv.claim(sequence.content(), found, prompt);
            sequence.fed = sequence.table.computed;
            let is_first = sequence.counts.preemptions == 0;
            if is_first {
                sequence.counts.cached_tokens = sequence.table.computed;
                sequence.counts.miss = found.miss;
                self.updates.push(Update::Started { id: sequence.id });
            }
            self.running.push(sequence);
            let last = self.running.len() - 1;
            if is_first && let Some(reason) = self.force(last) {
                self.finish(last, reason);
            }
        }
    }

    /// Sliding pages that a sequence holds at most between two steps, the places of its next rows included: one, those of a draft
    /// behind it, or those that see each other.
    fn reservation(&self, sequence: &Sequence) -> usize {
        let config = self.limits.config();
        let drafted = if sequence.drafts { config.max_draft } else { 0 };
        let beyond = drafted.max(sequence.content().longest_span() - 1);
        self.limits.shape().window.map_or(0, |window| {
            window_pages(window + beyond).min(pages_of(sequence.most_positions()))
        })
    }

    /// Sliding pages that are reserved, or held for a chunk.
    fn reserved_sliding(&self) -> usize {
        let taken = |s: &Sequence| self.reservation(s).max(s.table.held_sliding());
        self.running.iter().map(taken).sum()
    }

    /// Sliding pages that nobody has reserved or holds.
    fn spare_sliding(&self) -> usize {
        let pages = self.limits.config().pages.sliding;
        pages.saturating_sub(self.reserved_sliding())
    }

    /// Whether everybody who decodes can have a row more without anybody losing pages.
    fn can_decode_ahead(&self) -> bool {
        let decoding = || self.running.iter().filter(|s| s.is_decoding());
        let more = |s: &Sequence| {
            let pages = pages_of(s.fed + 1);
            let held = s.table.held_sliding();
            let after = held + pages.saturating_sub(s.table.pages.sliding.len());
            after.saturating_sub(self.reservation(s).max(held))
        };
        let sliding = self.limits.shape().window.is_none()
            || decoding().map(more).sum::<usize>() <= self.spare_sliding();
        sliding && self.kv.can_grow(decoding().map(|s| (&s.table, s.fed + 1)))
    }

    /// Decides how many rows each sequence has in the next step, and gets the pages for them.
    fn share_rows(&mut self, ahead: bool) {
        let decoding = self.running.iter().filter(|s| s.is_decoding()).count();
        let prompts = || self.running.iter().filter(|s| s.ready() > 1);
        let rest = self.limits.config().max_rows - decoding;
        // Prompts go on by as little as they can, if there are drafts for all other rows.
        let first = prompts().next().map_or(0, Sequence::least_rows);
        let others = prompts().count().saturating_sub(1);
        let mut for_drafts = rest.saturating_sub(first + others);
        let mut drafted = 0;
        let mut i = 0;
        while i < self.running.len() {
            if self.running[i].is_decoding() {
                self.running[i].cut_draft(for_drafts);
                let before = self.running[i].drafted();
                self.schedule(i, 1, ahead);
                for_drafts -= before;
                drafted += before;
            }
            i += 1;
        }

        let prompts = self.running.iter().filter(|s| s.ready() > 1);
        let Some(share) = Share::of(prompts, rest - drafted) else {
            return;
        };
        let Share {
            rows,
            mut spare_rows,
            count,
        } = share;
        // A chunk is in the sliding pages as a whole before the window moves on; what nobody reserved is for that.
        let spare_pages = self.spare_sliding() / count;
        let mut left = rest - drafted;
        let mut is_first = true;
        let mut i = 0;
        while i < self.running.len() {
            let sequence = &mut self.running[i];
            let pending = sequence.ready();
            if pending > 1 {
                sequence.drop_draft();
                let extra = pending.saturating_sub(rows).min(spare_rows);
                spare_rows -= extra;
                let mut wanted = pending.min(rows) + extra;
                if std::mem::take(&mut is_first) {
                    // However many share the step, the oldest gets on.
                    wanted = wanted.max(sequence.least_rows());
                }
                let wanted = wanted.min(left).min(self.sliding_rows(i, spare_pages));
                left -= self.schedule(i, wanted, ahead);
            }
            i += 1;
        }
    }

    /// Rows for which a sequence's sliding pages suffice, with some more.
    fn sliding_rows(&self, i: usize, spare_pages: usize) -> usize {
        let sequence = &self.running[i];
        if self.limits.shape().window.is_none() {
            return usize::MAX;
        }
        let held = sequence.table.held_sliding();
        let pages = self.reservation(sequence).max(held) + spare_pages;
        sequence
            .table
            .sliding_room(pages)
            .saturating_sub(sequence.fed)
    }

    /// Gives a sequence up to `wanted` rows and those of its draft: as many as there are pages for. Younger sequences are
    /// preempted only if there is not room for the fewest rows that go together, so that scarcity makes chunks shorter before it
    /// makes work undone, and never for a step ahead. Returns how many rows they are.
    fn schedule(&mut self, i: usize, wanted: usize, ahead: bool) -> usize {
        let room = |scheduler: &Scheduler| {
            let sequence = &scheduler.running[i];
            let room = scheduler.kv.room(&sequence.table);
            room.saturating_sub(sequence.fed)
        };
        let mut fitting = room(self);
        let least = self.running[i].least_rows().min(wanted);
        while !ahead && fitting < least && self.running.len() > i + 1 {
            self.preempt_youngest();
            fitting = room(self);
        }
        let sequence = &mut self.running[i];
        let rows = sequence.uncut(wanted.min(fitting));
        if rows == 0 {
            sequence.drop_draft();
            return 0;
        }
        sequence.cut_draft(fitting - rows);
        sequence.enter(self.last_step, rows);
        self.kv.grow(&mut sequence.table, sequence.fed);
        rows
    }

    fn preempt_youngest(&mut self) {
        let mut sequence = self.leave(self.running.len() - 1);
        // It may have rows already in the step that is being planned, and in no other.
        sequence.shares.clear();
        sequence.fed = 0;
        sequence.drop_draft();
        sequence.counts.preemptions += 1;
        self.waiting.push_front(sequence);
    }
}

/// Of a row whose sequence is over.
fn unwanted(sampling: &Sampling) -> Draw<'_> {
    Draw {
        sampling,
        history: &[],
        mask: None,
        output: RowOutput::Token,
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
        let taken: usize = prompts.map(|s| s.ready().min(rows)).sum();
        Some(Share {
            rows,
            spare_rows: total - taken,
            count,
        })
    }
}

#[cfg(test)]
mod tests;
