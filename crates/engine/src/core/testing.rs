//! A fake model whose every output depends on every KV entry it is supposed to read.
//!
//! [`FakeExecutor`] keeps real page contents. An entry is a token, its position and a digest of all that was fed up to it, as
//! real KV depends on them; where rows see each other both ways, on those behind it as well. Each row reads its whole history
//! through the full table and its window through the sliding table; a missing, stale or foreign entry panics. A draw depends on
//! what was read, on the history (which must be what the pages hold) and on the mask. [`alone`] says what a request must come
//! to, without pages or batches.

mod executor;

use std::collections::{HashMap, HashSet, VecDeque};

use carat_model::{
    TokenId,
    backend::{
        BackendError, Batch, CompileOptions, DraftRun, Draw, Executor, Feed, Interrupt, Outputs,
        RowOutput, RowResult, Run, TableRef, Ticket,
    },
    kv::{HostPageId, KvGroup, PAGE_TOKENS, PageId, PageMove, PerGroup},
    plan::Value,
    sampling::{Sampling, TokenMask},
};

use super::{
    Constraint, ConstraintSource, FinishReason, Media, MediaAttention, Request, RequestId,
    Scheduler, StepCosts, Update,
};
use crate::config::{DraftConfig, EngineConfig, Limits, ModelFacts, PrefixReuse, minimum_pages};

pub(crate) use self::executor::{FakeExecutor, Lookahead};

pub(crate) const VOCAB: usize = 50;
/// Columns of an embedding.
pub(crate) const WIDTH: usize = 2;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Entry {
    pub(crate) token: TokenId,
    pub(crate) position: usize,
    /// Of what was fed here, and of what the row sees ahead.
    identity: u64,
    /// Of all up to and including this one.
    pub(crate) digest: u64,
}

pub(crate) fn mix(state: u64, with: u64) -> u64 {
    let x = (state ^ with).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    (x ^ (x >> 29)).wrapping_mul(0xbf58_476d_1ce4_e5b9)
}

fn fold(values: impl IntoIterator<Item = u64>) -> u64 {
    values.into_iter().fold(0, mix)
}

fn fed_identity(token: TokenId, row: Option<&[f32]>) -> u64 {
    let row = row.map(|row| fold(row.iter().map(|x| u64::from(x.to_bits()))));
    mix(u64::from(token) + 1, row.unwrap_or(0))
}

/// Digests that the positions of some content add, one each.
fn identities(tokens: &[TokenId], media: &[Media], window: Option<usize>) -> Vec<u64> {
    let of = |place: usize| {
        let media = media.iter().find(|m| m.places.contains(&place));
        let row = media.map(|m| &m.rows[(place - m.places.start) * WIDTH..][..WIDTH]);
        fed_identity(tokens[place], row)
    };
    let plain: Vec<u64> = (0..tokens.len()).map(of).collect();
    let ahead = |place: usize| {
        let media = media.iter().find(|m| m.places.contains(&place));
        let both = media.filter(|m| m.attention == MediaAttention::BothWays && window.is_some());
        let end = both.map_or(place + 1, |m| m.places.end);
        fold(plain[place..end].iter().copied())
    };
    (0..tokens.len()).map(ahead).collect()
}

/// The digests of the entries that these tokens make.
pub(crate) fn digests(tokens: &[TokenId], media: &[Media], window: Option<usize>) -> Vec<u64> {
    let mut digest = 0;
    let step = |identity: u64| {
        digest = mix(digest, identity);
        digest
    };
    let identities = identities(tokens, media, window);
    identities.into_iter().map(step).collect()
}

/// The token that follows what was read, under the draw's own terms.
fn drawn(read: u64, draw: &Draw<'_>) -> TokenId {
    let recent = if draw.sampling.penalizes() {
        let window = draw.sampling.penalty_window;
        &draw.history[draw.history.len().saturating_sub(window)..]
    } else {
        &[]
    };
    let candidate = |n: u64| ((mix(read, n) >> 32) % VOCAB as u64) as TokenId;
    let allowed = |t: &TokenId| draw.mask.is_none_or(|mask| mask.allows(*t));
    let fresh = (0..400)
        .map(candidate)
        .find(|t| allowed(t) && !recent.contains(t));
    let any = fresh.or_else(|| (0..400).map(candidate).find(allowed));
    let lowest = draw.mask.and_then(TokenMask::lowest).unwrap_or(0);
    any.unwrap_or(lowest)
}

/// Tokens that the request generates when it runs by itself.
pub(crate) fn alone(
    request: &Request,
    limit: usize,
    window: Option<usize>,
) -> (Vec<TokenId>, FinishReason) {
    let mut tokens = request.prompt.clone();
    let mut entries = digests(&tokens, &request.media, window);
    let mut full = fold(entries.iter().copied());
    let mut constraint = request.constraint.as_ref().map(ConstraintSource::start);
    loop {
        let seen = window.map_or(entries.len(), |w| entries.len().saturating_sub(w));
        let read = mix(full, fold(entries[seen..].iter().copied()));
        let forced = constraint.as_ref().and_then(|c| c.forced());
        let mask = constraint.as_mut().map(|c| {
            let mut mask = TokenMask::none(VOCAB);
            c.mask(&mut mask);
            mask
        });
        let answer = request.prompt.len();
        let dead = mask.as_ref().is_some_and(|mask| mask.lowest().is_none());
        if forced.is_none() && dead {
            return (tokens.split_off(answer), FinishReason::DeadEnd);
        }
        let draw = Draw {
            sampling: &request.sampling,
            history: &tokens,
            mask: mask.as_ref(),
            output: RowOutput::Token,
        };
        let token = forced.unwrap_or_else(|| drawn(read, &draw));
        if request.stop_tokens.contains(&token) && !request.ignore_eos {
            return (tokens.split_off(answer), FinishReason::Stop { token });
        }
        tokens.push(token);
        if let Some(constraint) = &mut constraint {
            constraint.accept(token);
        }
        if tokens.len() == limit {
            return (tokens.split_off(answer), FinishReason::Length);
        }
        let identity = fold([fed_identity(token, None)]);
        entries.push(mix(entries[entries.len() - 1], identity));
        full = mix(full, entries[entries.len() - 1]);
    }
}

/// Allows about half of the tokens, forces some, and rarely allows none; all by what was accepted before.
#[derive(Clone)]
pub(crate) struct FakeConstraint {
    state: u64,
    /// In how many states a token is forced, of sixteen.
    forces: u64,
}

impl FakeConstraint {
    pub(crate) fn source(seed: u64, forces: u64) -> ConstraintSource {
        let start = FakeConstraint {
            state: mix(seed, 11),
            forces,
        };
        ConstraintSource::new(move || Box::new(start.clone()))
    }
}

impl Constraint for FakeConstraint {
    fn accept(&mut self, token: TokenId) {
        let forced = self.forced();
        assert!(
            forced.is_none_or(|forced| forced == token),
            "a token instead of the one that is forced"
        );
        self.state = mix(self.state, u64::from(token));
    }

    fn mask(&mut self, mask: &mut TokenMask) {
        if self.state.is_multiple_of(211) {
            return;
        }
        for token in 0..VOCAB as TokenId {
            if mix(self.state, 1000 + u64::from(token)) >> 63 == 0 {
                mask.allow(token);
            }
        }
    }

    fn forced(&self) -> Option<TokenId> {
        let some = (self.state >> 20) % 16 < self.forces;
        some.then_some(((self.state >> 32) % VOCAB as u64) as TokenId)
    }

    fn fork(&self) -> Box<dyn Constraint> {
        Box::new(self.clone())
    }
}

type PageContents = [Option<Entry>; PAGE_TOKENS];

/// Greedy, with nothing to stop it but its length.
pub(crate) fn request(prompt: impl IntoIterator<Item = TokenId>, max_tokens: usize) -> Request {
    Request {
        max_tokens: Some(max_tokens),
        sampling: Sampling::greedy(),
        ..Request::new(prompt.into_iter().collect())
    }
}

/// `count` tokens that differ from those of other seeds.
pub(crate) fn text(seed: u64, count: usize) -> Vec<TokenId> {
    (0..count as u64)
        .map(|i| ((mix(mix(seed, 7), i) >> 32) % VOCAB as u64) as TokenId)
        .collect()
}

/// An image whose rows are made from `seed`.
pub(crate) fn image(places: std::ops::Range<usize>, seed: u64) -> Media {
    let values = 0..(places.len() * WIDTH) as u64;
    Media {
        rows: values.map(|i| mix(seed, i) as f32).collect(),
        digest: u128::from(mix(seed, 3)).to_le_bytes(),
        attention: MediaAttention::BothWays,
        places,
    }
}

/// Room for four sequences of 256 tokens, in batches of 64 rows.
pub(crate) fn roomy(window: Option<usize>) -> (EngineConfig, ModelFacts) {
    let config = EngineConfig::comfortable(256, 4, 64, facts(window));
    (config, facts(window))
}

pub(crate) fn facts(window: Option<usize>) -> ModelFacts {
    ModelFacts {
        vocab: VOCAB,
        width: Some(WIDTH),
        window,
        layers_take_turns: true,
        even_depth: None,
    }
}

/// The scheduler and the fake model together, stepped by hand.
pub(crate) struct Bench {
    pub(crate) scheduler: Scheduler,
    pub(crate) executor: FakeExecutor,
    pub(crate) outputs: Outputs,
    submitted: u64,
}

impl Bench {
    pub(crate) fn new((config, facts): (EngineConfig, ModelFacts)) -> Bench {
        let limits = Limits::new(config, facts).unwrap();
        Bench {
            scheduler: Scheduler::new(limits.clone()),
            executor: FakeExecutor::new(&limits),
            outputs: Outputs::default(),
            submitted: 0,
        }
    }

    pub(crate) fn submit(&mut self, request: Request) -> RequestId {
        self.submitted += 1;
        let id = RequestId(self.submitted);
        self.scheduler.submit(id, request).unwrap();
        id
    }

    /// Runs one step; returns the rows of each run, or `None` when nothing is left to do.
    pub(crate) fn step(&mut self) -> Option<Vec<usize>> {
        let rows = self.begin()?;
        self.scheduler.apply(&self.outputs);
        self.scheduler.audit();
        Some(rows)
    }

    /// A step's first half: the batch has run, but its results are not applied.
    pub(crate) fn begin(&mut self) -> Option<Vec<usize>> {
        let work = self.scheduler.next()?;
        let batch = work.batch();
        for call in work.moves() {
            self.executor.move_pages(call).unwrap();
        }
        let ticket = self.executor.submit(&batch).unwrap();
        let rows = batch.runs.iter().map(|r| r.rows.len()).collect();
        drop(work);
        let draws = self.scheduler.draws();
        if !draws.is_empty() {
            self.executor.draw(&ticket, &draws).unwrap();
        }
        drop(draws);
        self.executor.collect(ticket, &mut self.outputs).unwrap();
        Some(rows)
    }

    /// Steps until nothing is left; returns all updates.
    pub(crate) fn run(&mut self) -> Vec<Update> {
        let mut updates = Vec::new();
        while self.step().is_some() {
            updates.extend(self.scheduler.updates());
        }
        updates.extend(self.scheduler.updates());
        updates
    }

    /// Runs one request to its end and returns what it came to.
    pub(crate) fn finish(&mut self, request: Request) -> super::Counts {
        let id = self.submit(request);
        let updates = self.run();
        let counts = updates.iter().find_map(|u| match u {
            Update::Finished { id: of, counts, .. } if *of == id => Some(*counts),
            _ => None,
        });
        counts.expect("the request finishes")
    }
}

/// [`roomy`] with other numbers of pages.
pub(crate) fn with_pages(
    (mut config, facts): (EngineConfig, ModelFacts),
    full: usize,
    sliding: usize,
) -> (EngineConfig, ModelFacts) {
    config.pages = PerGroup { full, sliding };
    (config, facts)
}

/// A splitmix generator: histories must be the same on every machine.
pub(crate) struct Random(pub(crate) u64);

impl Random {
    pub(crate) fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let x = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        x ^ (x >> 31)
    }

    /// Within the range, both ends included.
    pub(crate) fn within(&mut self, range: std::ops::RangeInclusive<usize>) -> usize {
        range.start() + (self.next() % (range.end() - range.start() + 1) as u64) as usize
    }

    pub(crate) fn one_in(&mut self, n: u64) -> bool {
        self.next().is_multiple_of(n)
    }

    pub(crate) fn tokens(&mut self, count: usize) -> Vec<TokenId> {
        (0..count)
            .map(|_| (self.next() % VOCAB as u64) as TokenId)
            .collect()
    }

    /// A configuration that is often tight, sometimes hardly workable.
    pub(crate) fn config(&mut self) -> (EngineConfig, ModelFacts) {
        let window = match self.within(0..=5) {
            0 => None,
            1 => Some(self.within(1..=8)),
            2 => Some(self.within(31..=34)),
            3 => Some(self.within(9..=64)),
            _ => Some(self.within(60..=130)),
        };
        let max_sequences = self.within(1..=6);
        let more_rows = match self.within(0..=2) {
            0 => self.within(0..=3),
            1 => self.within(0..=40),
            _ => self.within(0..=300),
        };
        let context = self.within(40..=320);
        let facts = facts(window);
        let mut config =
            EngineConfig::comfortable(context, max_sequences, max_sequences + more_rows, facts);
        match self.within(0..=3) {
            0 => config.chunk_pages = 0,
            1 => config.chunk_pages = self.within(0..=config.chunk_pages),
            _ => (),
        }
        if self.one_in(2) {
            config.max_draft = self.within(1..=40);
            if self.one_in(2) {
                config.drafts = Some(DraftConfig {
                    model: !self.one_in(3),
                    lookup: !self.one_in(3),
                    rows: self.within(1..=80),
                    costs: Some(StepCosts::assumed()),
                    kept_costs: None,
                });
            }
        }
        let drafting = ModelFacts {
            window: window.map(|window| window + config.max_draft),
            ..facts
        };
        let minimum = minimum_pages(context, drafting);
        if !self.one_in(4) {
            config.pages.full = self.within(2..=minimum.full + 4);
        }
        config.pages.sliding = config.pages.sliding.max(minimum.sliding);
        if window.is_some() && !self.one_in(4) {
            config.pages.sliding = match self.within(0..=2) {
                0 => minimum.sliding + self.within(0..=3),
                // What is between two windows may be in chunk pages.
                1 => 2 * minimum.sliding + self.within(0..=2),
                _ => self.within(minimum.sliding..=config.pages.sliding),
            };
        }
        if self.one_in(2) {
            let more = |most: usize, random: &mut Self| random.within(0..=2 * most);
            config.host_pages.full = more(config.pages.full, self);
            if window.is_some() {
                config.host_pages.sliding = more(config.pages.sliding, self);
            }
        }
        if self.one_in(2) {
            config.prefill_rows = self.within(1..=60);
        }
        if self.one_in(8) {
            config.prefix_reuse = PrefixReuse::Disabled;
        }
        (config, facts)
    }
}
