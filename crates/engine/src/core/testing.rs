//! A fake model whose every output depends on every KV entry it is supposed to read.
//!
//! [`FakeExecutor`] keeps real page contents. An entry is a token, its position and a digest of all tokens up to it, as
//! real KV depends on them. Each row reads its whole history through the full table and its window through the sliding
//! table; a missing, stale or foreign entry panics, and the next token is a digest of what was read. [`alone`] says
//! what a request must come to, without pages or batches.

use std::collections::VecDeque;

use carat_model::{
    TokenId,
    backend::{
        BackendError, Batch, CompileOptions, Executor, Outputs, RowOutput, RowResult, Run, Ticket,
    },
    kv::{KvGroup, PAGE_TOKENS, PageId, PerGroup},
    plan::Value,
    sampling::Sampling,
};

use super::{FinishReason, Request, RequestId, Scheduler, Update};
use crate::config::{EngineConfig, Limits, ModelShape, PrefixReuse, minimum_pages};

pub(crate) const VOCAB: usize = 50;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Entry {
    pub(crate) token: TokenId,
    pub(crate) position: usize,
    /// Of all tokens up to and including this one.
    pub(crate) digest: u64,
}

pub(crate) fn mix(state: u64, with: u64) -> u64 {
    let x = (state ^ with).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    (x ^ (x >> 29)).wrapping_mul(0xbf58_476d_1ce4_e5b9)
}

fn next_token(full: u64, window: u64) -> TokenId {
    ((mix(full, window) >> 32) % VOCAB as u64) as TokenId
}

pub(crate) fn digests(tokens: &[TokenId]) -> Vec<u64> {
    let mut digest = 0;
    let step = |token: &TokenId| {
        digest = mix(digest, u64::from(*token) + 1);
        digest
    };
    tokens.iter().map(step).collect()
}

/// What the request generates when it runs by itself.
pub(crate) fn alone(
    request: &Request,
    limit: usize,
    window: Option<usize>,
) -> (Vec<TokenId>, FinishReason) {
    let mut tokens = request.prompt.clone();
    let mut entries = digests(&tokens);
    let mut full = entries.iter().fold(0, |f, d| mix(f, *d));
    loop {
        let seen = window.map_or(entries.len(), |w| entries.len().saturating_sub(w));
        let token = next_token(full, entries[seen..].iter().fold(0, |f, d| mix(f, *d)));
        let answer = request.prompt.len();
        if request.stop_tokens.contains(&token) && !request.ignore_eos {
            return (tokens.split_off(answer), FinishReason::Stop { token });
        }
        tokens.push(token);
        if tokens.len() == limit {
            return (tokens.split_off(answer), FinishReason::Length);
        }
        entries.push(mix(entries[entries.len() - 1], u64::from(token) + 1));
        full = mix(full, entries[entries.len() - 1]);
    }
}

type PageContents = [Option<Entry>; PAGE_TOKENS];

pub(crate) struct FakeExecutor {
    pub(crate) pages: PerGroup<Vec<PageContents>>,
    /// By page: the batch and the run that wrote it last.
    writers: PerGroup<Vec<(u64, usize)>>,
    window: Option<usize>,
    options: CompileOptions,
    batches: u64,
    results: VecDeque<(u64, Outputs)>,
}

impl FakeExecutor {
    pub(crate) fn new(limits: &Limits) -> FakeExecutor {
        let options = limits.compile_options();
        FakeExecutor {
            pages: options.pages.map(|n| vec![[None; PAGE_TOKENS]; n]),
            writers: options.pages.map(|n| vec![(0, 0); n]),
            window: limits.shape().window,
            options,
            batches: 0,
            results: VecDeque::new(),
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
        assert!(batch.tokens.len() <= self.options.max_rows, "too many rows");
        let sampled: usize = batch.runs.iter().map(|r| r.sampled).sum();
        assert!(sampled <= self.options.max_sampled, "too many sampled rows");
        let mut next = 0;
        for run in batch.runs {
            assert!(run.rows.start == next && !run.rows.is_empty(), "a gap");
            assert!(run.sampled <= run.rows.len());
            next = run.rows.end;
            let end = run.position + run.rows.len();
            assert_eq!(run.history.len(), end, "the history ends with the rows");
            assert_eq!(run.history[run.position..], batch.tokens[run.rows.clone()]);
        }
        assert_eq!(next, batch.tokens.len(), "rows without a run");
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

    fn write(&mut self, number: usize, run: &Run<'_>) {
        let mut digest = match run.position.checked_sub(1) {
            Some(before) => self.read(number, run, KvGroup::Full, before).digest,
            None => 0,
        };
        for position in run.position..run.history.len() {
            let token = run.history[position];
            digest = mix(digest, u64::from(token) + 1);
            let entry = Entry {
                token,
                position,
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
            (entry.position, entry.token),
            (position, run.history[position]),
            "{group:?} {page:?} slot {slot} is another's"
        );
        entry
    }

    /// Reads all that the rows of a run see; returns the token that follows the last.
    fn attend(&self, number: usize, run: &Run<'_>) -> TokenId {
        let end = run.history.len();
        let mut chain = 0;
        let mut full = 0;
        for position in 0..end {
            let entry = self.read(number, run, KvGroup::Full, position);
            chain = mix(chain, u64::from(entry.token) + 1);
            assert_eq!(entry.digest, chain, "KV of another prefix at {position}");
            full = mix(full, entry.digest);
        }
        let Some(window) = self.window else {
            return next_token(full, 0);
        };
        let mut seen = 0;
        for position in (run.position + 1).saturating_sub(window)..end {
            let entry = self.read(number, run, KvGroup::Sliding, position);
            let twin = self.read(number, run, KvGroup::Full, position);
            assert_eq!(entry, twin, "sliding KV of another prefix at {position}");
            if position + window >= end {
                seen = mix(seen, entry.digest);
            }
        }
        next_token(full, seen)
    }
}

impl Executor for FakeExecutor {
    fn submit(&mut self, batch: &Batch<'_>) -> Result<Ticket, BackendError> {
        self.check(batch);
        self.batches += 1;
        for (number, run) in batch.runs.iter().enumerate() {
            self.write(number, run);
        }
        let mut rows = Vec::new();
        for (number, run) in batch.runs.iter().enumerate() {
            let token = self.attend(number, run);
            assert!(run.sampled <= 1);
            if run.sampled == 1 {
                let mut result = RowResult {
                    token,
                    ..RowResult::default()
                };
                if let RowOutput::Logprobs { top } = run.output {
                    result.logprob = Some(-0.5);
                    result.top = (0..top as u32).map(|t| (t, -1.0)).collect();
                }
                rows.push(result);
            }
        }
        self.results.push_back((self.batches, Outputs { rows }));
        Ok(Ticket(self.batches))
    }

    fn chains(&self) -> bool {
        true
    }

    /// The tokens are there already; a scheduler cannot know.
    fn submit_chained(&mut self, batch: &Batch<'_>) -> Result<Ticket, BackendError> {
        assert_eq!(self.results.len(), 1, "one batch is in flight");
        let sampled: Vec<TokenId> = self.results[0].1.rows.iter().map(|r| r.token).collect();
        assert_eq!(sampled.len(), batch.tokens.len(), "a row for each result");
        let histories: Vec<Vec<TokenId>> = (batch.runs.iter().zip(&sampled))
            .map(|(run, token)| [run.history, &[*token]].concat())
            .collect();
        let runs: Vec<Run<'_>> = (batch.runs.iter().zip(&histories))
            .map(|(run, history)| Run {
                history,
                ..run.clone()
            })
            .collect();
        self.submit(&Batch {
            tokens: &sampled,
            runs: &runs,
        })
    }

    fn collect(&mut self, ticket: Ticket, out: &mut Outputs) -> Result<(), BackendError> {
        let (number, outputs) = self.results.pop_front().expect("a batch was submitted");
        assert_eq!(ticket, Ticket(number), "tickets are collected in order");
        *out = outputs;
        Ok(())
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

/// Room for four sequences of 256 tokens, in batches of 64 rows.
pub(crate) fn roomy(window: Option<usize>) -> (EngineConfig, ModelShape) {
    let config = EngineConfig::comfortable(256, 4, 64, shape(window));
    (config, shape(window))
}

pub(crate) fn shape(window: Option<usize>) -> ModelShape {
    ModelShape {
        vocab: VOCAB,
        window,
    }
}

/// The scheduler and the fake model together, stepped by hand.
pub(crate) struct Bench {
    pub(crate) scheduler: Scheduler,
    pub(crate) executor: FakeExecutor,
    pub(crate) limits: Limits,
    pub(crate) outputs: Outputs,
    submitted: u64,
    /// A batch submitted before the one before it was collected.
    ahead: Option<Ticket>,
}

impl Bench {
    pub(crate) fn new((config, shape): (EngineConfig, ModelShape)) -> Bench {
        let limits = Limits::new(config, shape).unwrap();
        Bench {
            scheduler: Scheduler::new(limits.clone()),
            executor: FakeExecutor::new(&limits),
            limits,
            outputs: Outputs::default(),
            submitted: 0,
            ahead: None,
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

    /// Whether a batch is under way that was submitted ahead.
    pub(crate) fn is_ahead(&self) -> bool {
        self.ahead.is_some()
    }

    /// Throws away what was submitted ahead.
    pub(crate) fn forget_ahead(&mut self) {
        if let Some(ticket) = self.ahead.take() {
            let mut outputs = Outputs::default();
            self.executor.collect(ticket, &mut outputs).unwrap();
        }
    }

    /// As [`Bench::begin`], for the batch under way if there is one. If `on`, the batch after it is submitted as well, where the
    /// scheduler knows it.
    pub(crate) fn begin_ahead(&mut self, on: bool) -> bool {
        let ticket = if let Some(ticket) = self.ahead.take() {
            ticket
        } else {
            let Some(work) = self.scheduler.next() else {
                return false;
            };
            self.executor.submit(&work.batch()).unwrap()
        };
        if on && let Some(work) = self.scheduler.ahead() {
            let batch = work.batch();
            self.ahead = Some(self.executor.submit_chained(&batch).unwrap());
        }
        self.executor.collect(ticket, &mut self.outputs).unwrap();
        true
    }

    /// A step's first half: the batch has run, but its results are not applied.
    pub(crate) fn begin(&mut self) -> Option<Vec<usize>> {
        let work = self.scheduler.next()?;
        let batch = work.batch();
        let ticket = self.executor.submit(&batch).unwrap();
        let rows = batch.runs.iter().map(|r| r.rows.len()).collect();
        drop(work);
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
        let minimum = minimum_pages(context, shape);
        if !self.one_in(4) {
            config.pages.full = self.within(2..=minimum.full + 4);
        }
        if window.is_some() && !self.one_in(4) {
            config.pages.sliding = match self.within(0..=1) {
                0 => minimum.sliding + self.within(0..=3),
                _ => self.within(minimum.sliding..=config.pages.sliding),
            };
        }
        if self.one_in(8) {
            config.prefix_reuse = PrefixReuse::Disabled;
        }
        (config, shape)
    }
}
