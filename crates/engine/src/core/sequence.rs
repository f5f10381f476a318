//! One request's life: its tokens so far, the pages they fill, and when it is over.
//!
//! Prompt and generated tokens are one list, and a sequence only ever has tokens to feed that are not fed yet: the whole list at
//! first, one while decoding, some when a constraint forces them, the whole list again after a preemption. The step that feeds
//! the last of them samples the next. While that step is under way the next token is *awaited*: a row can be fed whatever it
//! will be.

use std::{collections::VecDeque, ops::Range};

use carat_model::{
    TokenId,
    backend::{Draw, Feed, RowOutput, RowResult, Run},
    kv::{PerGroup, pages_of, window_pages},
    sampling::{Sampling, TokenMask},
};

use super::{
    constraint::Constraint,
    draft::{Decision, DraftPolicy, Drafting, Load, Source},
    kv::{MissReason, Table},
    masks::MaskPool,
    media::{Content, Media},
    request::{Counts, FinishReason, LaneId, Request, RequestId},
};
use crate::config::Limits;

/// Rows of a sequence in a step under way.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Share {
    /// Number of the step.
    pub(crate) step: u64,
    pub(crate) rows: usize,
    /// Of these the last, which are drafted.
    pub(crate) drafted: usize,
    /// Results that tell of tokens of the prompt, in front of the others.
    pub(crate) reports: usize,
    /// Results that are tokens of the answer: none in mid-prompt, otherwise one and one more per drafted row.
    pub(crate) results: usize,
    /// Of these the first that can be taken: all, unless a constraint has nothing to follow a drafted token.
    pub(crate) usable: usize,
    /// The first result of either kind, among those of the step.
    pub(crate) first_result: usize,
    /// The token that the first result which is one of the answer is, counted from the start of the prompt.
    pub(crate) at: usize,
}

impl Share {
    /// Rows that are sampled, all of them at its end.
    pub(crate) fn sampled(&self) -> usize {
        self.reports + self.results
    }

    /// The first token that is reported, counted from the start of the prompt.
    pub(crate) fn first_reported(&self) -> usize {
        let end = self.at + self.drafted;
        end + 1 - self.sampled()
    }
}

#[expect(
    clippy::struct_excessive_bools,
    reason = "facts that have nothing to do with each other"
)]
pub(crate) struct Sequence {
    pub(crate) id: RequestId,
    /// The prompt, what was generated, and at the end what is merely drafted.
    tokens: Vec<TokenId>,
    drafted: usize,
    media: Vec<Media>,
    has_sliding: bool,
    salt: Option<[u8; 16]>,
    pub(crate) table: Table,
    /// Positions computed or under way.
    pub(crate) fed: usize,
    /// Its part in the steps under way, the oldest first.
    pub(crate) shares: VecDeque<Share>,
    /// Reason it ends before the next step, whatever that would bring.
    pub(crate) ending: Option<FinishReason>,
    /// It has no rows in the step that is being planned, whatever is ready.
    pub(crate) sits_out: bool,
    pub(crate) counts: Counts,
    pub(crate) drafts: bool,
    /// State of its drafts; `None` if only callers propose some, or nobody does.
    pub(crate) drafting: Option<Box<Drafting>>,
    /// The step that its last token was drawn in, and the result that it was.
    pub(crate) last_result: Option<(u64, usize)>,
    /// Of the results that were taken last, those whose tokens the constraint had forced: a draft met them.
    pub(crate) forced_results: Vec<usize>,
    /// Of the draft that was verified last: whose it was, how much of it was looked at, and how much was right.
    pub(crate) verified: Option<(Source, usize, usize)>,
    pub(crate) lane: Option<LaneId>,
    /// Sliding pages that it holds at most between two steps, the places of its next rows included: one, those of a draft behind
    /// it, or those that see each other.
    pub(crate) reservation: usize,
    /// Reason a store had no more of its prompt, if that was looked for.
    pub(crate) store_miss: Option<MissReason>,
    /// Its prompt has been computed.
    pub(crate) has_begun: bool,
    /// Positions that its pages held when it was started last.
    pub(crate) claimed: usize,
    /// Number of the likeliest tokens that are reported for each position of the prompt.
    prompt_logprobs: Option<usize>,
    /// Tokens of the prompt that have been reported, the first included, of which there is nothing to tell.
    pub(crate) reported: usize,
    /// The most tokens it may come to.
    limit: usize,
    sampling: Sampling,
    constraint: Option<Box<dyn Constraint>>,
    stop_tokens: Vec<TokenId>,
    output: RowOutput,
}

impl Sequence {
    /// `limit` is what [`Limits::check`] allows the request.
    pub(crate) fn new(id: RequestId, request: Request, limit: usize, limits: &Limits) -> Sequence {
        let mut sequence = Sequence {
            id,
            counts: Counts {
                prompt_tokens: request.prompt.len(),
                ..Counts::default()
            },
            tokens: request.prompt,
            drafted: 0,
            media: request.media,
            has_sliding: limits.model().window.is_some(),
            salt: request.cache_salt,
            table: Table::empty(),
            fed: 0,
            shares: VecDeque::new(),
            ending: None,
            sits_out: false,
            drafts: request.drafts,
            drafting: None,
            last_result: None,
            forced_results: Vec::new(),
            verified: None,
            lane: request.lane,
            reservation: 0,
            store_miss: None,
            has_begun: false,
            claimed: 0,
            prompt_logprobs: request.prompt_logprobs,
            reported: 1,
            limit,
            sampling: request.sampling,
            constraint: request.constraint.map(|source| source.start()),
            stop_tokens: if request.ignore_eos {
                Vec::new()
            } else {
                request.stop_tokens
            },
            output: request
                .logprobs
                .map_or(RowOutput::Token, |top| RowOutput::Logprobs { top }),
        };
        if let Some(window) = limits.model().window {
            let drafted = if sequence.drafts {
                limits.config().max_draft
            } else {
                0
            };
            let span = sequence.content().longest_span();
            let most = pages_of(sequence.max_positions());
            sequence.reservation = window_pages(window + drafted)
                .max(limits.sliding_pages(window, span - 1))
                .min(most);
        }
        sequence
    }

    /// Tokens that are certain.
    pub(crate) fn known(&self) -> usize {
        self.tokens.len() - self.drafted
    }

    pub(crate) fn content(&self) -> Content<'_> {
        Content {
            tokens: &self.tokens[..self.known()],
            media: &self.media,
            has_sliding: self.has_sliding,
            salt: self.salt,
            lane: self.lane,
        }
    }

    /// Its pages, and what they are filled with.
    pub(crate) fn table_and_content(&mut self) -> (&mut Table, Content<'_>) {
        let known = self.known();
        let content = Content {
            tokens: &self.tokens[..known],
            media: &self.media,
            has_sliding: self.has_sliding,
            salt: self.salt,
            lane: self.lane,
        };
        (&mut self.table, content)
    }

    /// The result of a step under way that is the token after those known, if that step is the last.
    fn awaited(&self) -> Option<&Share> {
        let last = self.shares.back()?;
        (last.results == 1 && last.at == self.known() && self.fed == last.at).then_some(last)
    }

    /// Rows that could be fed now: all that is known, or the token that is awaited, unless it will be the last.
    pub(crate) fn ready(&self) -> usize {
        if self.sits_out {
            0
        } else if self.fed < self.known() {
            self.known() - self.fed
        } else {
            let goes_on = self.awaited().is_some() && self.known() + 1 < self.limit;
            usize::from(goes_on)
        }
    }

    pub(crate) fn is_decoding(&self) -> bool {
        self.ready() == 1
    }

    /// Whether its prompt goes on, so that all rows under way count, whatever they come to.
    pub(crate) fn is_reading(&self) -> bool {
        self.ready() > 1 && self.shares.iter().all(|share| share.results == 0)
    }

    /// Whether what it feeds next depends on more than one token that is under way.
    pub(crate) fn is_unsettled(&self) -> bool {
        let mut shares = self.shares.iter();
        shares.any(|share| share.results > 1 || (self.may_draft_next() && share.results > 0))
    }

    /// Whether a draft may be behind its next row. One that has decided for the plain path has none.
    fn may_draft_next(&self) -> bool {
        let decided = self.drafting.as_ref().map(|drafting| drafting.decision());
        self.drafts && decided.is_none_or(|decision| decision.is_some())
    }

    /// The draft to be made now, if it is one row that comes next.
    pub(crate) fn draftable(&self) -> Option<Decision> {
        let is_settled = self.shares.is_empty() && self.ending.is_none();
        let decision = self.drafting.as_ref()?.decision()?;
        (is_settled && self.known() == self.table.computed + 1).then_some(decision)
    }

    /// The tokens that followed where the end was the same before.
    pub(crate) fn look_up(&self, length: usize) -> Vec<TokenId> {
        let drafting = self.drafting.as_ref();
        drafting.map_or(Vec::new(), |d| {
            d.look_up(&self.tokens[..self.known()], length)
        })
    }

    pub(crate) fn decide_draft(&mut self, policy: &DraftPolicy, load: Load) {
        let known = self.known();
        if let Some(drafting) = &mut self.drafting {
            drafting.decide(&self.tokens[..known], policy, load);
        }
    }

    pub(crate) fn forget_decision(&mut self) {
        if self.drafting.is_some() {
            self.drafting = Some(Box::new(Drafting::new()));
        }
    }

    /// Counts how a draft went. Results that were taken tell of as many of its tokens.
    fn count_draft(&mut self, draft: &[TokenId], taken: &[RowResult]) {
        let right = |(token, result): &(&TokenId, &RowResult)| **token == result.token;
        let accepted = draft.iter().zip(taken).take_while(right).count();
        self.counts.drafts.count(draft.len(), accepted);
        if draft.is_empty() {
            return;
        }
        let offered = draft.len().min(taken.len());
        let drafting = self.drafting.as_mut();
        let source = drafting.and_then(|drafting| drafting.observe(offered, accepted));
        self.verified = source.map(|source| (source, offered, accepted));
    }

    /// Whether tokens of the prompt are yet to be reported: then all of it is computed.
    pub(crate) fn reports(&self) -> bool {
        self.prompt_logprobs.is_some() && self.reported < self.counts.prompt_tokens
    }

    /// As many rows as that, or fewer so that no more than `most` of them are sampled, and only rows at their end.
    pub(crate) fn reportable(&self, rows: usize, most: usize) -> usize {
        let end = self.fed + rows;
        // Tokens from here on up to the end of the prompt are told of by the rows before them.
        let first = self.fed.max(self.reported - 1);
        let last = self.counts.prompt_tokens - 1;
        if self.prompt_logprobs.is_none() || first >= last {
            return rows;
        }
        // Behind the prompt only the last row is sampled.
        let goes_on = end > last && self.known() > last + 1;
        let end = if goes_on { last } else { end };
        end.min(first + most) - self.fed
    }

    /// Positions computed that would be lost with its pages.
    pub(crate) fn work(&self) -> usize {
        self.table.computed.saturating_sub(self.claimed)
    }

    /// Rows of a draft that follow those that are ready.
    pub(crate) fn drafted(&self) -> usize {
        self.drafted
    }

    /// Full pages for the tokens there are and the next one.
    pub(crate) fn pages_soon(&self) -> usize {
        pages_of((self.known() + 1).min(self.max_positions()))
    }

    /// Positions it may ever fill. The last token is not fed back.
    pub(crate) fn max_positions(&self) -> usize {
        self.limit - 1
    }

    /// The fewest rows from here on that do not end within rows that see each other.
    pub(crate) fn min_rows(&self) -> usize {
        let boundary = self.fed + 1;
        let end = self.content().span_across(boundary);
        end.map_or(boundary, |span| span.end) - self.fed
    }

    /// As many rows as that, or fewer so as not to end within rows that see each other.
    pub(crate) fn uncut(&self, rows: usize) -> usize {
        match self.content().span_across(self.fed + rows) {
            Some(span) => span.start.saturating_sub(self.fed),
            None => rows,
        }
    }

    /// Takes a draft of what follows, as much of it as may come to be and no more than `most` tokens.
    pub(crate) fn draft(&mut self, draft: &[TokenId], most: usize, vocab: usize) {
        self.drop_draft();
        if !self.shares.is_empty() || self.ending.is_some() {
            return;
        }
        let room = (self.limit - 1).saturating_sub(self.known());
        let mut constraint = self.constraint.as_ref().map(|c| c.fork());
        let mut mask = TokenMask::none(vocab);
        for &token in draft.iter().take(most.min(room)) {
            if let Some(constraint) = &mut constraint {
                fill(&mut mask, constraint.as_mut());
                if !mask.allows(token) {
                    break;
                }
                constraint.accept(token);
            }
            if token as usize >= vocab {
                break;
            }
            self.tokens.push(token);
            self.drafted += 1;
            if self.stop_tokens.contains(&token) {
                break;
            }
        }
    }

    pub(crate) fn cut_draft(&mut self, most: usize) {
        let excess = self.drafted.saturating_sub(most);
        self.tokens.truncate(self.tokens.len() - excess);
        self.drafted -= excess;
    }

    pub(crate) fn drop_draft(&mut self) {
        self.cut_draft(0);
    }

    /// Enters rows that are ready, and all that is drafted behind them, in a step. Its place among the step's results is set later.
    pub(crate) fn enter(&mut self, step: u64, rows: usize) {
        let end = self.fed + rows;
        let samples = end >= self.known();
        if !samples {
            self.drop_draft();
        }
        let results = if samples { 1 + self.drafted } else { 0 };
        let reports = if self.prompt_logprobs.is_some() {
            let last = end.min(self.counts.prompt_tokens - 1);
            last.saturating_sub(self.fed.max(self.reported - 1))
        } else {
            0
        };
        self.shares.push_back(Share {
            step,
            rows: rows + self.drafted,
            drafted: self.drafted,
            reports,
            results,
            usable: results,
            first_result: 0,
            at: end,
        });
        self.fed = end + self.drafted;
    }

    /// Takes back the rows entered last, and their draft.
    pub(crate) fn take_back(&mut self) {
        let share = self.shares.pop_back().expect("it entered a step");
        self.fed -= share.rows;
        self.drop_draft();
    }

    /// Feeds of the rows of the share entered last.
    pub(crate) fn feeds(&self) -> impl Iterator<Item = Feed<'_>> {
        let share = self.shares.back().expect("it entered a step");
        let before = self.shares.len().checked_sub(2).map(|i| &self.shares[i]);
        let content = self.content();
        (self.fed - share.rows..self.fed).map(move |position| {
            let Some(&token) = self.tokens.get(position) else {
                let awaited = before.expect("a token that is not known is awaited");
                let result = awaited.first_result + awaited.reports;
                return Feed::Sampled(result as u32);
            };
            match content.media_at(position) {
                Some(media) => {
                    let width = media.rows.len() / media.places.len();
                    let row = position - media.places.start;
                    Feed::Embedding {
                        row: &media.rows[row * width..][..width],
                        token,
                    }
                }
                None => Feed::Token(token),
            }
        })
    }

    /// Last visible position of each row of the share entered last, if some see ahead.
    pub(crate) fn visible_ends(&self, ends: &mut Vec<u32>) -> Option<Range<usize>> {
        let share = self.shares.back().expect("it entered a step");
        let (start, content) = (self.fed - share.rows, self.content());
        let mut spans = self.media.iter().filter(|m| content.is_uncut(m));
        if !spans.any(|m| m.places.start < self.fed && m.places.end > start) {
            return None;
        }
        let first = ends.len();
        ends.extend((start..self.fed).map(|position| {
            let media = content.media_at(position).filter(|m| content.is_uncut(m));
            media.map_or(position + 1, |m| m.places.end) as u32
        }));
        Some(first..ends.len())
    }

    /// The share entered last as a run of a batch.
    pub(crate) fn run<'a>(&'a self, rows: Range<usize>, visible_end: Option<&'a [u32]>) -> Run<'a> {
        let share = self.shares.back().expect("it entered a step");
        Run {
            rows,
            position: self.fed - share.rows,
            pages: PerGroup {
                full: &self.table.pages.full,
                sliding: &self.table.pages.sliding,
            },
            sampled: share.sampled(),
            visible_end,
            table: self.table.table_ref(),
        }
    }

    /// Whether results of a share are wanted. Where tokens were forced meanwhile they are known already.
    fn wants(&self, share: &Share) -> bool {
        share.results > 0 && share.at == self.known() && self.ending.is_none()
    }

    /// Makes the masks of the results of the share entered last: those of tokens that are reported allow no other, and those of
    /// the answer are the constraint's, if it has one. `false` if nothing may follow.
    pub(crate) fn masks(&mut self, masks: &mut MaskPool) -> bool {
        let share = *self.shares.back().expect("it entered a step");
        if self.ending.is_some() {
            return true;
        }
        let first = share.first_reported();
        for token in &self.tokens[first..first + share.reports] {
            masks.next().allow(*token);
        }
        let wanted = self.wants(&share);
        let Some(constraint) = self.constraint.as_mut().filter(|_| wanted) else {
            return true;
        };
        let mask = masks.next();
        constraint.mask(mask);
        if mask.lowest().is_none() {
            masks.give_back(share.reports + 1);
            return false;
        }
        if share.drafted == 0 {
            return true;
        }
        let mut follower = constraint.fork();
        let draft = &self.tokens[self.tokens.len() - self.drafted..];
        for (place, &token) in draft.iter().enumerate() {
            let mask = masks.next();
            follower.accept(token);
            fill(mask, follower.as_mut());
            if mask.lowest().is_none() {
                // If the draft is right so far there is nothing to draw here, as the next step will find.
                let last = self.shares.back_mut().expect("looked at above");
                last.usable = last.usable.min(place + 1);
                mask.allow_all();
            }
        }
        true
    }

    /// Draws of the share entered last, and which of the step's results they are. Takes as many masks as
    /// [`Sequence::masks`] has made. `plain` draws tokens of the prompt, which are given.
    pub(crate) fn draws<'a>(
        &'a self,
        plain: &'a Sampling,
        masks: &mut impl Iterator<Item = &'a TokenMask>,
    ) -> impl Iterator<Item = (usize, Draw<'a>)> {
        let share = self.shares.back().expect("it entered a step");
        let is_masked = self.constraint.is_some() && self.wants(share);
        let prompt_output = RowOutput::Logprobs {
            top: self.prompt_logprobs.unwrap_or(0),
        };
        (0..share.sampled()).map(move |index| {
            let reports = index < share.reports;
            let (sampling, output) = if reports {
                (plain, prompt_output)
            } else {
                (&self.sampling, self.output)
            };
            let draw = Draw {
                sampling,
                history: &self.tokens[..share.first_reported() + index],
                mask: (reports || is_masked).then(|| masks.next()).flatten(),
                output,
            };
            (share.first_result + index, draw)
        })
    }

    /// Whether its last part in a step is in this one.
    pub(crate) fn is_in(&self, step: u64) -> bool {
        self.shares.back().is_some_and(|share| share.step == step)
    }

    /// Takes the results of a share that are tokens of the answer: as many as the draft was right, and one more. Returns how many rows count as computed and how
    /// many results were taken, and why the answer is over, if it is.
    pub(crate) fn take(
        &mut self,
        share: &Share,
        results: &[RowResult],
    ) -> (usize, usize, Option<FinishReason>) {
        let draft = self.tokens.split_off(self.known());
        self.drafted = 0;
        self.forced_results.clear();
        let certain = share.rows - share.drafted;
        if !self.wants(share) {
            // One that is about to end takes no token, so a row that was fed the next one counts for nothing.
            let known = self.known().saturating_sub(self.table.computed);
            return (certain.min(known), 0, None);
        }
        let mut taken = 0;
        loop {
            let token = results[taken].token;
            // Never the first: what is forced there was taken before the step.
            if taken > 0 && self.forced().is_some() {
                self.forced_results.push(taken);
            }
            taken += 1;
            let finish = self.push(token);
            let goes_on = draft.get(taken - 1) == Some(&token) && taken < share.usable;
            if finish.is_some() || !goes_on {
                self.count_draft(&draft, &results[..taken]);
                return (certain + taken - 1, taken, finish);
            }
        }
    }

    /// The next token that the constraint forces, taken.
    pub(crate) fn force(&mut self) -> Option<(TokenId, Option<FinishReason>)> {
        let token = self.forced()?;
        Some((token, self.push(token)))
    }

    fn forced(&self) -> Option<TokenId> {
        self.constraint.as_ref()?.forced()
    }

    /// Takes a token; says so if it is the last.
    fn push(&mut self, token: TokenId) -> Option<FinishReason> {
        self.tokens.push(token);
        self.counts.generated_tokens += 1;
        if self.stop_tokens.contains(&token) {
            return Some(FinishReason::Stop { token });
        }
        if let Some(constraint) = &mut self.constraint {
            constraint.accept(token);
        }
        (self.tokens.len() == self.limit).then_some(FinishReason::Length)
    }
}

/// Allows the tokens that may follow: the forced one alone, where that must be drawn like any other.
fn fill(mask: &mut TokenMask, constraint: &mut dyn Constraint) {
    mask.clear();
    match constraint.forced() {
        Some(token) => mask.allow(token),
        None => constraint.mask(mask),
    }
}

#[cfg(test)]
mod tests;
