//! Division of a step's rows among the sequences, and preemption when pages run out.

use carat_model::kv::pages_of;

use super::{
    super::{kv::Between, sequence::Sequence},
    Scheduler,
};

/// A sequence that lost its pages so often is the last to lose them again.
const MAX_PREEMPTIONS: usize = 3;

/// Rows of prompts in a step that are part of chunks of the same length.
pub(super) struct Spent {
    rows: usize,
    chunk: usize,
}

/// Share of a step that prompts may have.
struct ForPrompts {
    rows: usize,
    /// Rows that one of them has at the most, as far as depth allows.
    longest_chunk: usize,
    /// Rows that tell of tokens of the prompt, besides one per sequence.
    reports: usize,
}

/// Result for a sequence that asked for rows.
enum Outcome {
    /// It has so many.
    Rows(usize),
    /// It has lost its pages.
    Preempted,
}

impl Scheduler {
    /// Whether everybody who decodes can have a row more without anybody losing pages.
    pub(super) fn can_decode_ahead(&self) -> bool {
        let decoding = || self.running.iter().filter(|s| s.is_decoding());
        let more = |s: &Sequence| {
            let pages = pages_of(s.fed + 1);
            let held = s.table.held_sliding();
            let after = held + pages.saturating_sub(s.table.pages.sliding.len());
            after.saturating_sub(s.reservation.max(held))
        };
        let sliding = self.limits.model().window.is_none()
            || decoding().map(more).sum::<usize>() <= self.spare_sliding();
        sliding && self.kv.can_grow(decoding().map(|s| (&s.table, s.fed + 1)))
    }

    /// Decides how many rows each sequence has in the next step, and gets the pages for them.
    pub(super) fn share_rows(&mut self, ahead: bool) {
        let max_rows = self.limits.config().max_rows;
        let decoding = self.running.iter().filter(|s| s.is_decoding()).count();
        let rest = max_rows - decoding;
        // The first prompt goes on by as little as it can, if there are drafts for all other rows.
        let first = self.running.iter().find(|s| s.ready() > 1);
        let for_drafts = rest.saturating_sub(first.map_or(0, Sequence::min_rows));
        let mut for_drafts = for_drafts.min(self.draft_rows(decoding));
        let mut drafted = 0;
        let mut i = 0;
        while i < self.running.len() {
            if self.running[i].is_decoding() {
                self.running[i].cut_draft(for_drafts);
                let before = self.running[i].drafted();
                if let Outcome::Preempted = self.schedule(i, 1, Between::Held, ahead) {
                    continue;
                }
                for_drafts -= before;
                drafted += before;
            }
            i += 1;
        }
        let config = self.limits.config();
        let for_prompts = ForPrompts {
            rows: rest - drafted,
            longest_chunk: if decoding > 0 {
                config.prefill_rows
            } else {
                max_rows
            },
            // Whoever is in the step may sample a row.
            reports: (self.limits.max_sampled()).saturating_sub(self.running.len() + drafted),
        };
        self.share_among_prompts(for_prompts, ahead);
    }

    /// Gives rows to prompts, in the order they were started.
    fn share_among_prompts(&mut self, mut for_prompts: ForPrompts, ahead: bool) {
        self.spent.clear();
        let mut is_first = true;
        let mut i = 0;
        while i < self.running.len() {
            let sequence = &mut self.running[i];
            let pending = sequence.ready();
            if pending > 1 {
                sequence.drop_draft();
            }
            if pending <= 1 || for_prompts.rows == 0 {
                i += 1;
                continue;
            }
            let least = sequence.min_rows();
            let chunk = self.limits.chunk_rows(sequence.fed);
            let chunk = chunk.min(for_prompts.longest_chunk);
            let mut wanted = pending.min(self.unspent(chunk));
            if std::mem::take(&mut is_first) {
                // However small a chunk is to be, the first gets on.
                wanted = wanted.max(least);
            }
            if wanted == 0 {
                i += 1;
                continue;
            }
            let sequence = &self.running[i];
            let wanted = sequence.reportable(wanted.min(for_prompts.rows), 1 + for_prompts.reports);
            let (wanted, between) = self.sliding_rows(i, wanted, least);
            let Outcome::Rows(rows) = self.schedule(i, wanted, between, ahead) else {
                continue;
            };
            if self.running[i].reports() {
                let more = rows.saturating_sub(1);
                for_prompts.reports = for_prompts.reports.saturating_sub(more);
            }
            for_prompts.rows -= rows;
            match self.spent.iter_mut().find(|spent| spent.chunk == chunk) {
                Some(spent) => spent.rows += rows,
                None => self.spent.push(Spent { rows, chunk }),
            }
            i += 1;
        }
    }

    /// Of a chunk of so many rows, those that the prompts before leave of a step.
    fn unspent(&self, chunk: usize) -> usize {
        let spent = self.spent.iter();
        let spent = spent.map(|spent| (spent.rows * chunk).div_ceil(spent.chunk));
        chunk.saturating_sub(spent.sum())
    }

    /// Of the rows that a prompt wants, at least some of which go together, those that its sliding pages suffice for, with what nobody
    /// has reserved: a chunk is in the pages as a whole before the window moves on.
    fn sliding_rows(&self, i: usize, wanted: usize, least: usize) -> (usize, Between) {
        let sequence = &self.running[i];
        let table = &sequence.table;
        let held = table.held_sliding();
        let most = sequence.reservation.max(held) + self.spare_sliding();
        let between = |rows| self.kv.between(table, sequence.fed + rows, most - held);
        let room = table.sliding_room(most).saturating_sub(sequence.fed);
        match between(wanted) {
            Some(between @ (Between::Held | Between::Passing)) => (wanted, between),
            // Rather a shorter chunk than one that loses landmarks.
            _ if room >= least => (wanted.min(room), Between::Held),
            Some(Between::AllPassing) => (wanted, Between::AllPassing),
            None => match between(least) {
                Some(between) => (wanted.min(least), between),
                None => (wanted.min(room), Between::Held),
            },
        }
    }

    /// Gives a sequence up to `wanted` rows and those of its draft: as many as there are pages for. Others are preempted only if
    /// there is not room for the fewest rows that go together, so that scarcity makes chunks shorter before it
    /// makes work undone, and never for a step ahead. Returns how many rows they are.
    fn schedule(&mut self, i: usize, wanted: usize, between: Between, ahead: bool) -> Outcome {
        let room = |scheduler: &Scheduler| {
            let sequence = &scheduler.running[i];
            let room = scheduler.kv.room(&sequence.table);
            room.saturating_sub(sequence.fed)
        };
        let mut fitting = room(self);
        let least = self.running[i].min_rows().min(wanted);
        while !ahead && fitting < least {
            let Some(victim) = self.victim(i) else { break };
            self.preempt(victim);
            if victim == i {
                return Outcome::Preempted;
            }
            fitting = room(self);
        }
        let sequence = &mut self.running[i];
        let rows = sequence.uncut(wanted.min(fitting));
        if rows == 0 {
            sequence.drop_draft();
            return Outcome::Rows(0);
        }
        sequence.cut_draft(fitting - rows);
        sequence.enter(self.last_step, rows);
        self.kv.grow(&mut sequence.table, sequence.fed, between);
        Outcome::Rows(rows)
    }

    /// Sequence that gives its pages to one that needs some: of those started after it, the one that loses the least work, but who
    /// lost its pages often before comes last. That may be the sequence itself, unless it was started first. `None` if nobody was
    /// started after it: then it waits.
    pub(super) fn victim(&self, i: usize) -> Option<usize> {
        let loss = |v: usize| {
            let sequence = &self.running[v];
            let is_spared = sequence.counts.preemptions >= MAX_PREEMPTIONS;
            (is_spared, sequence.work(), std::cmp::Reverse(v))
        };
        let least = (i + 1..self.running.len()).min_by_key(|v| loss(*v))?;
        Some(if i > 0 && loss(i) < loss(least) {
            i
        } else {
            least
        })
    }

    fn preempt(&mut self, i: usize) {
        let mut sequence = self.leave(i);
        // It may have rows already in the step that is being planned, and in no other.
        sequence.shares.clear();
        sequence.fed = 0;
        sequence.drop_draft();
        sequence.counts.preemptions += 1;
        self.waiting.put_back(sequence);
    }
}
