//! Continuous batching: which rows of which sequences make up the next step.
//!
//! Requests wait in lanes ([`Queue`]) and run side by side once there is room for them. A step has one row for each sequence that
//! is decoding, the rows of drafts, and then prompts, first come first served: whoever shares the rows of a step evenly makes all
//! prompts end last. How many rows a prompt is given depends on its depth alone, and beside those that decode on
//! [`EngineConfig::prefill_rows`](crate::EngineConfig::prefill_rows), so that nobody waits long for a token. Rows of an image that see
//! each other are in one step, all of them.
//!
//! Sliding pages are reserved at admission, so they never run out. Full pages are not: how long an answer gets is
//! unknown. When they run out a sequence is preempted: it gives back its pages and waits, to be computed again from its tokens so
//! far. Whoever needs a page takes it from those started after it, from the one that loses the least work. The one started
//! first can take from all others and loses to nobody, so every step gets something done.
//!
//! A step can be planned while the one before it is under way and its tokens are not known yet: who decodes is fed what that step
//! will have sampled, prompts go on, and who waits is admitted. Nobody is preempted for it; if pages are short the step waits for
//! the results. A sequence that turns out to have ended has computed a row for nothing.
//!
//! A step that the executor refuses is taken back, and can be planned again with some of its sequences.

mod admission;
mod drafts;
mod rows;

use std::{
    collections::VecDeque,
    ops::{Deref, Range},
};

use carat_model::{
    TokenId,
    backend::{Batch, Draw, Feed, Outputs, PageMove, RowOutput, Run},
    kv::PerGroup,
    sampling::Sampling,
};

use super::{
    draft::{DraftPolicy, Drafting},
    kv::{Kv, MissReason},
    masks::MaskPool,
    media::Content,
    pages::PageCounts,
    queue::Queue,
    request::{Counts, FinishReason, Rejected, Request, RequestId},
    sequence::Sequence,
    store::StoreStats,
};
use crate::config::Limits;

/// Event in the life of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Update {
    /// It left the queue. Happens once, however often it is preempted afterwards.
    Started {
        /// The request it is about.
        id: RequestId,
        /// Of its prompt: what was found, and why not more.
        counts: Counts,
    },
    /// The next token of its answer is the result of this row of the outputs just applied.
    Token {
        /// The request it is about.
        id: RequestId,
        /// Into [`Outputs::rows`].
        row: usize,
    },
    /// The next token of its answer is one that its constraint forced.
    Forced {
        /// The request it is about.
        id: RequestId,
        /// The token.
        token: TokenId,
    },
    /// Log probability of a token of the prompt: the result of this row of the outputs just applied. Told once of each
    /// token but the first, in order, if asked for.
    PromptToken {
        /// The request it is about.
        id: RequestId,
        /// In the prompt; 1 at the least.
        position: usize,
        /// Into [`Outputs::rows`].
        row: usize,
    },
    /// It is over.
    Finished {
        /// The request it is about.
        id: RequestId,
        /// Reason of the end.
        reason: FinishReason,
        /// Tokens and rows it came to.
        counts: Counts,
    },
    /// It was part of a batch that failed, and is over.
    Abandoned {
        /// The request it is about.
        id: RequestId,
    },
}

/// A step for an executor.
pub struct Work<'a> {
    feeds: Vec<Feed<'a>>,
    runs: Vec<Run<'a>>,
    moves: Vec<Vec<PageMove>>,
}

impl Work<'_> {
    /// As an executor takes it.
    pub fn batch(&self) -> Batch<'_> {
        Batch {
            feeds: &self.feeds,
            runs: &self.runs,
        }
    }

    /// Copies of pages to be made before it, a call of the executor each.
    pub fn moves(&self) -> &[Vec<PageMove>] {
        &self.moves
    }

    /// Memory left of it when the executor has it, for [`Scheduler::reuse`].
    pub fn into_memory(self) -> StepMemory {
        StepMemory {
            feeds: emptied(self.feeds),
            runs: emptied(self.runs),
            draws: Vec::new(),
        }
    }
}

/// Draws of the sampled rows of a step, one per row.
pub struct Draws<'a>(Vec<Draw<'a>>);

impl Draws<'_> {
    /// Memory left of them when the executor has them, for [`Scheduler::reuse`].
    pub fn into_memory(self) -> StepMemory {
        StepMemory {
            draws: emptied(self.0),
            ..StepMemory::default()
        }
    }
}

impl<'a> Deref for Draws<'a> {
    type Target = [Draw<'a>];

    fn deref(&self) -> &[Draw<'a>] {
        &self.0
    }
}

/// Memory of steps that are over, empty.
#[derive(Default)]
pub struct StepMemory {
    feeds: Vec<Feed<'static>>,
    runs: Vec<Run<'static>>,
    draws: Vec<Draw<'static>>,
}

/// An empty vector in the memory of another one. Collecting in place keeps it, since the types differ in a lifetime alone.
fn emptied<T, U>(mut full: Vec<T>) -> Vec<U> {
    full.clear();
    let nothing = full.into_iter().map(|_| unreachable!("it is empty"));
    nothing.collect()
}

/// Load of the engine.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Stats {
    /// Requests being computed.
    pub running: usize,
    /// Requests that have not started, or lost their pages.
    pub waiting: usize,
    /// KV pages by state.
    pub pages: PerGroup<PageCounts>,
    /// Pages in host memory by state.
    pub host_pages: PerGroup<PageCounts>,
    /// Of the store behind them, if there is one.
    pub store: Option<StoreStats>,
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
    /// In the order they were started, those that lost their pages in the order they were started again.
    running: Vec<Sequence>,
    waiting: Queue,
    /// Counts what may make room for somebody who waits.
    changes: u64,
    /// The count when nobody who waits was found to have room.
    full_since: Option<u64>,
    /// Somebody is to end before the next step.
    any_ending: bool,
    /// At most two, the oldest first.
    steps: VecDeque<Step>,
    last_step: u64,
    /// The step applied last.
    last_applied: u64,
    /// `None` if only callers propose drafts.
    draft_policy: Option<DraftPolicy>,
    /// Drafts that the model is asked for.
    wanted: Vec<drafts::Wanted>,
    masks: MaskPool,
    /// Last visible position of each row, of all runs that see ahead.
    visible_ends: Vec<u32>,
    /// Of these, the part of each run of the step.
    ends: Vec<Option<Range<usize>>>,
    memory: StepMemory,
    /// Prompt rows of the step being planned by the chunk that they are part of.
    spent: Vec<rows::Spent>,
    /// For rows whose results nobody wants, or that are given.
    plain: Sampling,
    updates: Vec<Update>,
}

impl Scheduler {
    /// Without requests.
    pub fn new(limits: Limits) -> Scheduler {
        Scheduler {
            kv: Kv::new(&limits),
            running: Vec::with_capacity(limits.config().max_sequences),
            waiting: Queue::default(),
            changes: 0,
            full_since: None,
            any_ending: false,
            steps: VecDeque::new(),
            last_step: 0,
            last_applied: 0,
            draft_policy: drafts::policy(&limits),
            wanted: Vec::new(),
            masks: MaskPool::new(limits.model().vocab),
            visible_ends: Vec::new(),
            ends: Vec::new(),
            memory: StepMemory::default(),
            spent: Vec::new(),
            plain: Sampling::greedy(),
            updates: Vec::new(),
            limits,
        }
    }

    /// Queues a request. `id` must be new.
    pub fn submit(&mut self, id: RequestId, request: Request) -> Result<(), Rejected> {
        self.submit_held(id, request, |_, _| false)
    }

    /// Queues a request that stands aside until [`Scheduler::release_held`], if `is_held` says so of what it is made from.
    pub(crate) fn submit_held(
        &mut self,
        id: RequestId,
        request: Request,
        is_held: impl FnOnce(&Kv, Content<'_>) -> bool,
    ) -> Result<(), Rejected> {
        let limit = self.limits.check(&request)?;
        let sibling = request.after.filter(|after| {
            let mut all = self.running.iter().chain(self.waiting.iter());
            all.any(|s| s.id == *after && !s.has_begun)
        });
        let mut sequence = Sequence::new(id, request, limit, &self.limits);
        if sequence.drafts && self.draft_policy.is_some() {
            sequence.drafting = Some(Box::new(Drafting::new()));
        }
        // One that waits for a sibling will find what that has computed.
        let may_hold = sibling.is_none() && !sequence.reports();
        let held = may_hold && is_held(&self.kv, sequence.content());
        // It waits for itself, so to speak.
        self.waiting.push(sequence, sibling.or(held.then_some(id)));
        self.full_since = None;
        Ok(())
    }

    /// Lets a request that stood aside take its place; so many tokens of its prompt were restored. If not all that it waited for has come its miss says so.
    pub(crate) fn release_held(&mut self, id: RequestId, is_whole: bool, restored: usize) {
        if !is_whole {
            self.explain(id, MissReason::RestoreFailed);
        }
        if let Some(sequence) = self.waiting.iter_mut().find(|s| s.id == id) {
            sequence.counts.cached_on_disk = restored;
        }
        self.waiting.release(id);
        self.changes += 1;
        self.full_since = None;
    }

    /// Says why a request that waits will find no more.
    pub(crate) fn explain(&mut self, id: RequestId, miss: MissReason) {
        if let Some(sequence) = self.waiting.iter_mut().find(|s| s.id == id) {
            sequence.store_miss = Some(miss);
        }
    }

    /// Remembers from now on what ended requests leave behind.
    pub(crate) fn keep_ended(&mut self) {
        self.kv.keep_ended();
    }

    /// The pages.
    pub(crate) fn kv(&mut self) -> &mut Kv {
        &mut self.kv
    }

    /// Ends a request before the next step. Unknown and finished ones are ignored.
    pub fn cancel(&mut self, id: RequestId) {
        self.end(id, FinishReason::Cancelled);
    }

    /// Ends a request whose time is up ([`Request::deadline`]), before the next step. Unknown and finished ones are ignored.
    pub fn expire(&mut self, id: RequestId) {
        self.end(id, FinishReason::Deadline);
    }

    fn end(&mut self, id: RequestId, reason: FinishReason) {
        let mut all = self.running.iter_mut().chain(self.waiting.iter_mut());
        if let Some(sequence) = all.find(|s| s.id == id) {
            sequence.ending.get_or_insert(reason);
            self.any_ending = true;
        }
    }

    /// Proposes what follows the tokens of a request, to be verified in the next step: those that the model would have drawn in
    /// any case are kept. Ignored for one that does not draft
    /// ([`Request::drafts`]), is not running or has rows under way, and forgotten after that step.
    pub fn propose(&mut self, id: RequestId, draft: &[TokenId]) {
        let (most, vocab) = (self.limits.config().max_draft, self.limits.model().vocab);
        let found = self.running.iter_mut().find(|s| s.id == id);
        // Who has not said so has no sliding pages reserved for it.
        if let Some(sequence) = found.filter(|s| s.drafts) {
            sequence.draft(draft, most, vocab);
        }
    }

    /// Everything that has happened since the last call, in order.
    pub fn updates(&mut self) -> impl Iterator<Item = Update> {
        self.updates.drain(..)
    }

    /// Whether no request is running or waiting.
    pub fn is_idle(&self) -> bool {
        self.running.is_empty() && self.waiting.is_empty()
    }

    /// Load of the scheduler.
    pub fn stats(&self) -> Stats {
        Stats {
            running: self.running.len(),
            waiting: self.waiting.len(),
            pages: self.kv.counts(),
            host_pages: self.kv.host_counts(),
            store: None,
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
        for sequence in &mut self.running {
            sequence.sits_out = false;
        }
        self.drop_ending();
        self.admit();
        self.plan(ahead)
    }

    /// The next step, of some of the running sequences alone. `None` when none of them is left. Nothing may be under way.
    pub fn next_of(&mut self, some: &[RequestId]) -> Option<Work<'_>> {
        assert!(self.steps.is_empty(), "a step is under way");
        self.drop_ending();
        for sequence in &mut self.running {
            sequence.sits_out = !some.contains(&sequence.id);
        }
        self.plan(false)
    }

    /// Takes back the step planned last, which the executor has refused: nothing has been computed, and pages for it are given
    /// back. Returns who was in it.
    pub fn take_back(&mut self) -> Vec<RequestId> {
        let step = self.steps.pop_back().expect("a step is planned");
        assert!(!step.is_drawn, "the step was accepted");
        let members = self.running.iter_mut().filter(|s| s.is_in(step.number));
        let ids = members.map(|sequence| {
            sequence.take_back();
            self.kv.shrink(&mut sequence.table, sequence.fed);
            sequence.id
        });
        let ids = ids.collect();
        self.changes += 1;
        ids
    }

    fn plan(&mut self, ahead: bool) -> Option<Work<'_>> {
        self.last_step += 1;
        if ahead && !self.can_decode_ahead() {
            return None;
        }
        self.kv.begin_step();
        if ahead {
            for sequence in self.running.iter_mut().filter(|s| s.is_reading()) {
                let fed = sequence.fed;
                self.kv.release_behind_steps(&mut sequence.table, fed);
            }
        }
        self.share_rows(ahead);
        let number = self.last_step;
        // Rows are given to who decodes first, but stand in the order of sequences, and so do results.
        let mut sampled = 0;
        for sequence in self.running.iter_mut().filter(|s| s.is_in(number)) {
            let share = sequence.shares.back_mut().expect("it is in the step");
            share.first_result = sampled;
            sampled += share.sampled();
            sequence.table.offer();
        }
        if !self.running.iter().any(|s| s.is_in(number)) {
            let first = self.running.first();
            debug_assert!(
                ahead || first.is_none_or(|s| s.sits_out),
                "the first always gets a row"
            );
            return None;
        }
        self.steps.push_back(Step {
            number,
            sampled,
            is_drawn: false,
        });

        self.visible_ends.clear();
        self.ends.clear();
        let members = self.running.iter().filter(|s| s.is_in(number));
        for sequence in members.clone() {
            self.ends
                .push(sequence.visible_ends(&mut self.visible_ends));
        }
        let mut work = Work {
            feeds: emptied(std::mem::take(&mut self.memory.feeds)),
            runs: emptied(std::mem::take(&mut self.memory.runs)),
            moves: self.kv.take_moves(),
        };
        for (sequence, ends) in members.zip(&self.ends) {
            let start = work.feeds.len();
            work.feeds.extend(sequence.feeds());
            let ends = ends.clone().map(|range| &self.visible_ends[range]);
            work.runs.push(sequence.run(start..work.feeds.len(), ends));
        }
        Some(work)
    }

    /// Takes back what a step was described in, so that the next needs no memory of its own.
    pub fn reuse(&mut self, memory: StepMemory) {
        let larger = |own: usize, other: usize| other > own;
        if larger(self.memory.feeds.capacity(), memory.feeds.capacity()) {
            self.memory.feeds = memory.feeds;
        }
        if larger(self.memory.runs.capacity(), memory.runs.capacity()) {
            self.memory.runs = memory.runs;
        }
        if larger(self.memory.draws.capacity(), memory.draws.capacity()) {
            self.memory.draws = memory.draws;
        }
    }

    /// Draws of the step planned last, one per sampled row; to be asked once, when all steps before it are applied.
    pub fn draws(&mut self) -> Draws<'_> {
        assert!(self.steps.len() == 1, "draws follow the results before");
        let step = &mut self.steps[0];
        assert!(
            !std::mem::replace(&mut step.is_drawn, true),
            "a step is drawn once"
        );
        let (number, sampled) = (step.number, step.sampled);
        self.masks.clear();
        let mut i = 0;
        while i < self.running.len() {
            let sequence = &mut self.running[i];
            if sequence.is_in(number) && !sequence.masks(&mut self.masks) {
                self.finish(i, FinishReason::DeadEnd);
            } else {
                i += 1;
            }
        }
        // Rows of those that have ended or were cancelled since are drawn as well; nobody looks at them.
        let mut draws = emptied(std::mem::take(&mut self.memory.draws));
        draws.resize(sampled, unwanted(&self.plain));
        let mut masks = self.masks.iter();
        let members = self.running.iter().filter(|s| s.is_in(number));
        for sequence in members.filter(|s| s.ending.is_none()) {
            for (result, draw) in sequence.draws(&self.plain, &mut masks) {
                draws[result] = draw;
            }
        }
        Draws(draws)
    }

    /// Takes the results of the oldest step: sequences grow, completed pages become findable, finished requests leave.
    pub fn apply(&mut self, outputs: &Outputs) {
        let step = self.steps.pop_front().expect("a step is under way");
        self.last_applied = step.number;
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
            let first = share.first_result + share.reports;
            let rows = first..first + share.results;
            let (computed, taken, finish) = sequence.take(&share, &outputs.rows[rows]);
            sequence.last_result = taken.checked_sub(1).map(|last| (step.number, first + last));
            let verified = sequence.verified.take();
            if let (Some(policy), Some((source, offered, accepted))) =
                (&mut self.draft_policy, verified)
            {
                policy.observe(source, offered, accepted);
            }
            let (table, content) = sequence.table_and_content();
            self.kv.commit(table, content, computed);
            if sequence.shares.is_empty() {
                sequence.fed = sequence.table.computed;
            }
            let stopped = matches!(finish, Some(FinishReason::Stop { .. }));
            let told = taken - usize::from(stopped);
            let id = sequence.id;
            if sequence.ending.is_none() && share.reports > 0 {
                let reports = (0..share.reports).map(|n| Update::PromptToken {
                    id,
                    position: share.first_reported() + n,
                    row: share.first_result + n,
                });
                self.updates.extend(reports);
                sequence.reported = share.first_reported() + share.reports;
            }
            let forced = &sequence.forced_results;
            let updates = (0..told).map(|n| match first + n {
                // As without a draft, the model was not asked.
                row if forced.contains(&n) => Update::Forced {
                    id,
                    token: outputs.rows[row].token,
                },
                row => Update::Token { id, row },
            });
            self.updates.extend(updates);
            if !sequence.has_begun && sequence.table.computed >= sequence.counts.prompt_tokens {
                // Others may continue from its prompt.
                sequence.has_begun = true;
                self.waiting.release(id);
                self.changes += 1;
            }
            let finish = finish.or_else(|| {
                let awaits = taken > 0;
                awaits.then(|| self.force(i - 1)).flatten()
            });
            if let Some(reason) = finish {
                i -= 1;
                self.finish(i, reason);
            }
        }
        self.decide_drafts();
    }

    /// The step under way failed, or one after it: their sequences end, and nothing they computed in them is kept.
    pub fn abandon(&mut self) {
        self.steps.clear();
        // What failed may have come over the states that the last results were drawn from.
        for sequence in &mut self.running {
            sequence.last_result = None;
        }
        for i in (0..self.running.len()).rev() {
            if !self.running[i].shares.is_empty() {
                let id = self.leave(i).id;
                self.updates.push(Update::Abandoned { id });
                self.waiting.release(id);
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
        self.waiting.release(id);
    }

    /// Takes a sequence out of the running ones and its pages from it.
    fn leave(&mut self, i: usize) -> Sequence {
        let mut sequence = self.running.remove(i);
        self.kv.release(&mut sequence.table);
        self.changes += 1;
        sequence
    }

    fn drop_ending(&mut self) {
        if !std::mem::take(&mut self.any_ending) {
            return;
        }
        for i in (0..self.running.len()).rev() {
            if let Some(reason) = self.running[i].ending {
                self.finish(i, reason);
            }
        }
        let mut over = Vec::new();
        self.waiting.retain(|s| {
            if let Some(reason) = s.ending {
                let (id, counts) = (s.id, s.counts);
                over.push(Update::Finished { id, reason, counts });
            }
            s.ending.is_none()
        });
        for update in over {
            if let Update::Finished { id, .. } = update {
                self.waiting.release(id);
            }
            self.updates.push(update);
        }
        self.changes += 1;
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

#[cfg(test)]
mod tests;
