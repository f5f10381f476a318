//! A fake model whose every output depends on every KV entry it is supposed to read.
//!
//! [`FakeExecutor`] keeps real page contents. An entry is a token, its position and a digest of all that was fed up to it, as
//! real KV depends on them; where rows see each other both ways, on those behind it as well. Each row reads its whole history
//! through the full table and its window through the sliding table; a missing, stale or foreign entry panics. A draw depends on
//! what was read, on the history (which must be what the pages hold) and on the mask. [`alone`] says what a request must come
//! to, without pages or batches.

use std::collections::{HashMap, HashSet, VecDeque};

use carat_model::{
    TokenId,
    backend::{
        BackendError, Batch, CompileOptions, DraftRun, Draw, Executor, Feed, Interrupt, Outputs,
        RowOutput, RowResult, Run, TableRef, Ticket,
    },
    kv::{KvGroup, PAGE_TOKENS, PageId, PageMove, PerGroup},
    plan::Value,
    sampling::{Sampling, TokenMask},
};

use super::{
    Constraint, ConstraintSource, FinishReason, Media, MediaAttention, Request, RequestId,
    Scheduler, StepCosts, Update,
};
use crate::config::{DraftConfig, EngineConfig, Limits, ModelShape, PrefixReuse, minimum_pages};

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

/// What each position of some content adds to the digest.
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

/// What the request generates when it runs by itself.
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

/// A batch that was submitted and not collected.
struct InFlight {
    ticket: u64,
    /// Per sampled row: what was read, and the tokens up to it.
    sampled: Vec<(u64, Vec<TokenId>)>,
    outputs: Option<Outputs>,
    /// The host draws it, when it is collected.
    on_host: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Lookahead {
    Never,
    Always,
    /// But for some batches, which the host draws.
    Mostly,
}

pub(crate) struct FakeExecutor {
    pub(crate) pages: PerGroup<Vec<PageContents>>,
    /// By page: the batch and the run that wrote it last.
    writers: PerGroup<Vec<(u64, usize)>>,
    window: Option<usize>,
    options: CompileOptions,
    /// Page tables by their names, as they were last.
    tables: HashMap<u32, PerGroup<Vec<PageId>>>,
    batches: u64,
    in_flight: VecDeque<InFlight>,
    /// Of the batch collected last: the tokens up to each of its sampled rows.
    last_sampled: Vec<Vec<TokenId>>,
    /// Drafts that were made.
    pub(crate) drafts: usize,
    pub(crate) lookahead: Lookahead,
    interrupt: Interrupt,
    /// Batches that were interrupted.
    pub(crate) interrupted: usize,
    /// Calls until one fails; 0 for none.
    pub(crate) fails_in: u64,
    /// The most runs of a batch; more are refused.
    pub(crate) max_runs: usize,
    /// A batch with a row at this position or behind it is refused.
    pub(crate) refused_from: usize,
    /// Batches that were refused.
    pub(crate) refused: usize,
    /// Rows of all batches.
    pub(crate) rows: usize,
    /// Batches that were submitted while another was in flight.
    pub(crate) ahead: usize,
}

impl FakeExecutor {
    pub(crate) fn new(limits: &Limits) -> FakeExecutor {
        let options = limits.compile_options();
        FakeExecutor {
            pages: options.pages.map(|n| vec![[None; PAGE_TOKENS]; n]),
            writers: options.pages.map(|n| vec![(0, 0); n]),
            window: limits.shape().window,
            options,
            tables: HashMap::new(),
            batches: 0,
            in_flight: VecDeque::new(),
            last_sampled: Vec::new(),
            drafts: 0,
            lookahead: Lookahead::Never,
            interrupt: Interrupt::default(),
            interrupted: 0,
            fails_in: 0,
            max_runs: usize::MAX,
            refused_from: usize::MAX,
            refused: 0,
            rows: 0,
            ahead: 0,
        }
    }

    pub(crate) fn in_flight(&self) -> usize {
        self.in_flight.len()
    }

    /// Fails when it is time to.
    fn call(&mut self) -> Result<(), BackendError> {
        self.fails_in = self.fails_in.saturating_sub(1);
        if self.fails_in == 1 {
            let what = "as this test wants".to_owned();
            return Err(BackendError::Unsupported { what });
        }
        Ok(())
    }

    /// Refuses a batch before anything is done.
    fn refuse(&mut self, batch: &Batch<'_>) -> Result<(), BackendError> {
        let deepest = batch.runs.iter().map(|r| r.position + r.rows.len()).max();
        if batch.runs.len() > self.max_runs || deepest > Some(self.refused_from) {
            self.refused += 1;
            let what = "more than this test wants".to_owned();
            return Err(BackendError::Unsupported { what });
        }
        Ok(())
    }

    /// Whatever is said to be unchanged is, and the tables are remembered.
    fn remember(&mut self, batch: &Batch<'_>) {
        let mut named = HashSet::new();
        for run in batch.runs {
            let TableRef { id, unchanged } = run.table.expect("the engine names its tables");
            assert!(named.insert(id), "two tables of one name");
            let before = self.tables.entry(id).or_default();
            for group in KvGroup::ALL {
                let (before, now) = (before.get_mut(group), run.pages.get(group));
                for i in 0..*unchanged.get(group) {
                    let same = now[i] == before[i] || now[i] == PageId::FREED;
                    assert!(same, "{group:?} entry {i} of table {id} has changed");
                }
                before.clear();
                before.extend_from_slice(now);
            }
        }
    }

    fn groups(&self) -> &'static [KvGroup] {
        match self.window {
            Some(_) => &KvGroup::ALL,
            None => &[KvGroup::Full],
        }
    }

    /// What `Batch::check` demands, which needs a plan.
    fn check(&self, batch: &Batch<'_>) {
        assert!(!batch.runs.is_empty(), "an empty batch");
        assert!(batch.feeds.len() <= self.options.max_rows, "too many rows");
        assert!(
            batch.sampled_count() <= self.options.max_sampled,
            "too many sampled rows"
        );
        let mut next = 0;
        for run in batch.runs {
            assert!(run.rows.start == next && !run.rows.is_empty(), "a gap");
            assert!(run.sampled <= run.rows.len());
            next = run.rows.end;
            let end = run.position + run.rows.len();
            for (place, visible) in run.visible_end.into_iter().flatten().enumerate() {
                let own = run.position + place + 1;
                assert!((own..=end).contains(&(*visible as usize)), "sees too far");
            }
        }
        assert_eq!(next, batch.feeds.len(), "rows without a run");
    }

    /// The token and identity of every row, with what it sees ahead.
    fn resolve(&self, batch: &Batch<'_>) -> Vec<(TokenId, u64)> {
        let before = self.in_flight.back();
        let token = |feed: &Feed<'_>| match feed {
            Feed::Token(token) | Feed::Embedding { token, .. } => *token,
            Feed::Sampled(row) => {
                let before = before.expect("a batch in flight to be fed by");
                assert!(!before.on_host, "fed by what the host has yet to draw");
                let outputs = before.outputs.as_ref().expect("it is drawn");
                outputs.rows[*row as usize].token
            }
        };
        let plain = |feed: &Feed<'_>| match feed {
            Feed::Embedding { row, token } => fed_identity(*token, Some(row)),
            other => fed_identity(token(other), None),
        };
        let plain: Vec<u64> = batch.feeds.iter().map(plain).collect();
        let places = batch.all_rows().map(|place| {
            let run = &batch.runs[place.run];
            let ahead = run.sliding_end(place.row) - place.position;
            let identity = fold(plain[place.row..place.row + ahead].iter().copied());
            (token(&batch.feeds[place.row]), identity)
        });
        places.collect()
    }

    fn place(run: &Run<'_>, group: KvGroup, position: usize) -> (PageId, usize) {
        let page = run.pages.get(group)[position / PAGE_TOKENS];
        assert_ne!(
            page,
            PageId::FREED,
            "{group:?} position {position} is freed"
        );
        (page, position % PAGE_TOKENS)
    }

    fn write(&mut self, number: usize, run: &Run<'_>, fed: &[(TokenId, u64)]) {
        let mut digest = match run.position.checked_sub(1) {
            Some(before) => self.read(number, run, KvGroup::Full, before).digest,
            None => 0,
        };
        for (position, &(token, identity)) in (run.position..).zip(&fed[run.rows.clone()]) {
            digest = mix(digest, identity);
            let entry = Entry {
                token,
                position,
                identity,
                digest,
            };
            for &group in self.groups() {
                let (page, slot) = FakeExecutor::place(run, group, position);
                let writer = &mut self.writers.get_mut(group)[page.0 as usize];
                assert!(
                    writer.0 < self.batches || writer.1 == number,
                    "two runs write {group:?} {page:?}"
                );
                *writer = (self.batches, number);
                let contents = &mut self.pages.get_mut(group)[page.0 as usize];
                if slot == 0 {
                    *contents = [None; PAGE_TOKENS];
                }
                contents[slot] = Some(entry);
            }
        }
    }

    fn read(&self, number: usize, run: &Run<'_>, group: KvGroup, position: usize) -> Entry {
        let (page, slot) = FakeExecutor::place(run, group, position);
        let writer = self.writers.get(group)[page.0 as usize];
        assert!(
            writer.0 < self.batches || writer.1 == number,
            "a run reads {group:?} {page:?}, which another writes"
        );
        let entry = self.pages.get(group)[page.0 as usize][slot]
            .unwrap_or_else(|| panic!("{group:?} {page:?} slot {slot} was never written"));
        assert_eq!(
            entry.position, position,
            "{group:?} {page:?} slot {slot} is another's"
        );
        entry
    }

    /// Reads all that the rows of a run see; returns what the sampled ones have read, with the tokens up to them.
    fn attend(&self, number: usize, run: &Run<'_>) -> Vec<(u64, Vec<TokenId>)> {
        let end = run.position + run.rows.len();
        let (mut chain, mut full) = (0, 0);
        let mut tokens = Vec::new();
        let mut sampled = Vec::new();
        let mut window_digests = VecDeque::new();
        for position in 0..end {
            let entry = self.read(number, run, KvGroup::Full, position);
            chain = mix(chain, entry.identity);
            assert_eq!(entry.digest, chain, "KV of another prefix at {position}");
            full = mix(full, entry.digest);
            tokens.push(entry.token);
            if self
                .window
                .is_some_and(|window| position + window > run.position)
            {
                let twin = self.read(number, run, KvGroup::Sliding, position);
                assert_eq!(entry, twin, "sliding KV of another prefix at {position}");
            }
            window_digests.push_back(entry.digest);
            if window_digests.len() > self.window.unwrap_or(0) {
                window_digests.pop_front();
            }
            if position + run.sampled >= end {
                let read = mix(full, fold(window_digests.iter().copied()));
                sampled.push((read, tokens.clone()));
            }
        }
        sampled
    }
}

impl FakeExecutor {
    /// What follows, as long as neither a penalty nor a constraint has a say in it, and at times something else. Reads all that a
    /// drafter would.
    fn foresee(&self, draft: &DraftRun<'_>) -> Vec<TokenId> {
        let history = &self.last_sampled[draft.row];
        assert_eq!(history.len(), draft.position, "another row's state");
        let run = Run {
            rows: 0..1,
            position: draft.position,
            pages: draft.pages,
            sampled: 1,
            table: None,
            visible_end: None,
        };
        let entries = (0..draft.position).map(|position| {
            let (page, slot) = FakeExecutor::place(&run, KvGroup::Full, position);
            let entry = self.pages.full[page.0 as usize][slot].expect("it was written");
            assert_eq!(entry.token, history[position], "KV of another prefix");
            let seen = self.window.is_some_and(|w| position + w > draft.position);
            if seen {
                let (page, slot) = FakeExecutor::place(&run, KvGroup::Sliding, position);
                let twin = self.pages.sliding[page.0 as usize][slot];
                assert_eq!(twin, Some(entry), "sliding KV of another prefix");
            }
            entry.digest
        });
        let mut entries: Vec<u64> = entries.collect();
        let mut full = fold(entries.iter().copied());
        let mut tokens = vec![draft.token];
        while tokens.len() <= draft.length {
            let identity = fold([fed_identity(tokens[tokens.len() - 1], None)]);
            entries.push(mix(entries[entries.len() - 1], identity));
            full = mix(full, entries[entries.len() - 1]);
            let seen = self
                .window
                .map_or(entries.len(), |w| entries.len().saturating_sub(w));
            let read = mix(full, fold(entries[seen..].iter().copied()));
            let plain = Draw {
                sampling: &Sampling::greedy(),
                history: &[],
                mask: None,
                output: RowOutput::Token,
            };
            let right = drawn(read, &plain);
            let wrong = mix(read, 77).is_multiple_of(4);
            tokens.push((right + u32::from(wrong)) % VOCAB as u32);
        }
        tokens.split_off(1)
    }
}

impl Executor for FakeExecutor {
    fn submit(&mut self, batch: &Batch<'_>) -> Result<Ticket, BackendError> {
        self.call().inspect_err(|_| self.refused += 1)?;
        self.refuse(batch)?;
        if self.interrupt.is_raised() {
            self.interrupted += 1;
            return Err(BackendError::Interrupted);
        }
        assert!(self.in_flight.len() < 2, "a third batch in flight");
        if let Some(before) = self.in_flight.back() {
            assert!(
                before.outputs.is_some() || before.sampled.is_empty(),
                "the batch before is not drawn"
            );
            self.ahead += 1;
        }
        self.check(batch);
        self.remember(batch);
        let fed = self.resolve(batch);
        self.batches += 1;
        self.rows += batch.feeds.len();
        for (number, run) in batch.runs.iter().enumerate() {
            self.write(number, run, &fed);
        }
        let runs = batch.runs.iter().enumerate();
        self.in_flight.push_back(InFlight {
            ticket: self.batches,
            sampled: runs.flat_map(|(n, run)| self.attend(n, run)).collect(),
            outputs: None,
            on_host: false,
        });
        Ok(Ticket(self.batches))
    }

    fn draw(&mut self, ticket: &Ticket, draws: &[Draw<'_>]) -> Result<(), BackendError> {
        self.call()?;
        assert_eq!(self.in_flight.len(), 1, "a draw follows the results before");
        let batch = &mut self.in_flight[0];
        assert!(batch.ticket == ticket.0 && batch.outputs.is_none());
        assert_eq!(draws.len(), batch.sampled.len(), "a draw per sampled row");
        let row = |(draw, (read, tokens)): (&Draw<'_>, &(u64, Vec<TokenId>))| {
            // Whoever is over by now has no history, and gets what nobody would take for an answer.
            let over = draw.history.is_empty();
            assert!(
                over || draw.history == tokens,
                "a history of {} tokens, {} in the pages",
                draw.history.len(),
                tokens.len()
            );
            assert!(draw.mask.is_none_or(|mask| mask.lowest().is_some()));
            let token = if over { 0 } else { drawn(*read, draw) };
            let mut result = RowResult {
                token,
                ..RowResult::default()
            };
            if let RowOutput::Logprobs { top } = draw.output {
                result.logprob = Some(-0.5);
                result.top = (0..top as u32).map(|t| (t, -1.0)).collect();
            }
            result
        };
        batch.outputs = Some(Outputs {
            rows: draws.iter().zip(&batch.sampled).map(row).collect(),
        });
        batch.on_host =
            self.lookahead == Lookahead::Mostly && mix(batch.ticket, 5).is_multiple_of(5);
        Ok(())
    }

    fn lookahead(&self, ticket: &Ticket) -> bool {
        let batch = self.in_flight.back().expect("it is in flight");
        assert_eq!(batch.ticket, ticket.0);
        self.lookahead != Lookahead::Never && !batch.on_host
    }

    fn collect(&mut self, ticket: Ticket, out: &mut Outputs) -> Result<(), BackendError> {
        let batch = self.in_flight.pop_front().expect("a batch was submitted");
        assert_eq!(ticket.0, batch.ticket, "tickets are collected in order");
        self.last_sampled = batch
            .sampled
            .into_iter()
            .map(|(_, tokens)| tokens)
            .collect();
        *out = batch.outputs.unwrap_or_default();
        self.call()
    }

    fn draft(&mut self, drafts: &[DraftRun<'_>]) -> Result<Vec<Vec<TokenId>>, BackendError> {
        self.call()?;
        assert!(self.in_flight.is_empty(), "a draft beside a batch");
        self.drafts += drafts.len();
        Ok(drafts.iter().map(|draft| self.foresee(draft)).collect())
    }

    fn interrupt_by(&mut self, interrupt: Interrupt) {
        self.interrupt = interrupt;
    }

    fn move_pages(&mut self, moves: &[PageMove]) -> Result<(), BackendError> {
        self.call()?;
        PageMove::check(moves, self.options.pages, self.options.host_pages)
    }

    fn probed(&self, _value: Value) -> Option<&[f32]> {
        None
    }
}

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
pub(crate) fn roomy(window: Option<usize>) -> (EngineConfig, ModelShape) {
    let config = EngineConfig::comfortable(256, 4, 64, shape(window));
    (config, shape(window))
}

pub(crate) fn shape(window: Option<usize>) -> ModelShape {
    ModelShape {
        vocab: VOCAB,
        width: Some(WIDTH),
        window,
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
    pub(crate) fn new((config, shape): (EngineConfig, ModelShape)) -> Bench {
        let limits = Limits::new(config, shape).unwrap();
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
    (mut config, shape): (EngineConfig, ModelShape),
    full: usize,
    sliding: usize,
) -> (EngineConfig, ModelShape) {
    config.pages = PerGroup { full, sliding };
    (config, shape)
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
    pub(crate) fn config(&mut self) -> (EngineConfig, ModelShape) {
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
            _ => self.within(0..=150),
        };
        let context = self.within(40..=320);
        let shape = shape(window);
        let mut config =
            EngineConfig::comfortable(context, max_sequences, max_sequences + more_rows, shape);
        if self.one_in(2) {
            config.max_draft = self.within(1..=40);
            if self.one_in(2) {
                config.drafts = Some(DraftConfig {
                    model: !self.one_in(3),
                    lookup: !self.one_in(3),
                    rows: self.within(1..=80),
                    costs: Some(StepCosts::assumed()),
                });
            }
        }
        let drafting = ModelShape {
            window: window.map(|window| window + config.max_draft),
            ..shape
        };
        let minimum = minimum_pages(context, drafting);
        if !self.one_in(4) {
            config.pages.full = self.within(2..=minimum.full + 4);
        }
        config.pages.sliding = config.pages.sliding.max(minimum.sliding);
        if window.is_some() && !self.one_in(4) {
            config.pages.sliding = match self.within(0..=1) {
                0 => minimum.sliding + self.within(0..=3),
                _ => self.within(minimum.sliding..=config.pages.sliding),
            };
        }
        if self.one_in(2) {
            config.prefill_rows = self.within(1..=60);
        }
        if self.one_in(8) {
            config.prefix_reuse = PrefixReuse::Disabled;
        }
        (config, shape)
    }
}
