//! Admission of requests: room in pages, and whose turn it is.

use carat_model::kv::PAGE_TOKENS;

use super::{
    super::{
        kv::{Found, MissReason},
        sequence::Sequence,
    },
    Scheduler, Update,
};

/// Tokens of an answer that count when turns are given: how long answers get is unknown.
const ANSWER_COST: usize = 512;
/// Requests that are tried when there is no room for the one whose turn it is.
const MAX_TRIED: usize = 16;

impl Scheduler {
    /// Starts waiting sequences, in turn, as long as there is room.
    pub(super) fn admit(&mut self) {
        while self.running.len() < self.limits.config().max_sequences && !self.waiting.is_empty() {
            // Looking up a long prompt takes longer than planning a step.
            if self.full_since == Some(self.changes) {
                return;
            }
            let Some((mut sequence, found)) = self.take_next() else {
                self.full_since = Some(self.changes);
                return;
            };
            let prompt = sequence.counts.prompt_tokens;
            sequence.table = self.kv.claim(sequence.content(), found, prompt);
            sequence.claimed = sequence.table.computed;
            sequence.fed = sequence.table.computed;
            let is_first = sequence.counts.preemptions == 0;
            if is_first {
                sequence.counts.cached_tokens = sequence.table.computed;
                let on_disk = &mut sequence.counts.cached_on_disk;
                *on_disk = (*on_disk).min(sequence.table.computed);
                sequence.counts.cached_in_host = found.in_host * PAGE_TOKENS;
                sequence.counts.known_tokens = found.matched * PAGE_TOKENS;
                sequence.counts.miss = found.miss.map(|miss| sequence.store_miss.unwrap_or(miss));
                let (id, counts) = (sequence.id, sequence.counts);
                self.updates.push(Update::Started { id, counts });
            }
            self.running.push(sequence);
            let last = self.running.len() - 1;
            if is_first && let Some(reason) = self.force(last) {
                self.finish(last, reason);
            }
        }
    }

    /// Takes the next one for which there is room out of the queue.
    fn take_next(&mut self) -> Option<(Sequence, Found)> {
        let kv = &self.kv;
        let head = self.waiting.head(|s| cost(s, &find(kv, s)))?;
        let tried = self.waiting.behind(head).take(MAX_TRIED);
        let (place, found) = std::iter::once(head)
            .chain(tried)
            .find_map(|place| Some((place, self.room_for(self.waiting.get(place))?)))?;
        let cost = cost(self.waiting.get(place), &found);
        Some((self.waiting.take(place, head, cost), found))
    }

    /// Cached part that a sequence would begin with, if it can be started now.
    fn room_for(&self, sequence: &Sequence) -> Option<Found> {
        let found = find(&self.kv, sequence);
        // Those running must be able to finish their prompts and to go on by a page each, or the newcomer would be
        // preempted at once.
        let promised = self
            .running
            .iter()
            .map(|s| s.pages_soon().saturating_sub(s.table.pages.full.len()) + 1);
        let needed = sequence.pages_soon() - found.reusable + found.unheld;
        let reserved = self.reserved_sliding() + sequence.reservation;
        let fits = promised.sum::<usize>() + needed <= self.kv.available()
            && reserved <= self.limits.config().pages.sliding;
        fits.then_some(found)
    }

    /// Sliding pages that are reserved, or held for a chunk.
    pub(super) fn reserved_sliding(&self) -> usize {
        let taken = |s: &Sequence| s.reservation.max(s.table.held_sliding());
        self.running.iter().map(taken).sum()
    }

    /// Sliding pages that nobody has reserved or holds.
    pub(super) fn spare_sliding(&self) -> usize {
        let pages = self.limits.config().pages.sliding;
        pages.saturating_sub(self.reserved_sliding())
    }
}

fn find(kv: &super::Kv, sequence: &Sequence) -> Found {
    if sequence.reports() {
        return Found::nothing(MissReason::Logprobs);
    }
    kv.find(sequence.content())
}

/// Tokens that are to be computed for a sequence, as far as that can be told.
fn cost(sequence: &Sequence, found: &Found) -> usize {
    let known = sequence.content().tokens.len();
    let cached = found.reusable * PAGE_TOKENS;
    let answer = sequence.max_positions() + 1 - known;
    known - cached + answer.min(ANSWER_COST)
}
