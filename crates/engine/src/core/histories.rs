//! Thousands of random serving histories, each checked after every step.
//!
//! Requests that share prefixes, repeat or continue each other arrive, are cancelled and fail at random times in
//! configurations that are mostly too small. After each step every page is accounted for ([`Scheduler::audit`]); in
//! each step the fake model checks every KV entry that any row sees; in the end every answer is what the request gives
//! by itself.

use std::{
    collections::BTreeMap,
    panic::{AssertUnwindSafe, catch_unwind},
};

use carat_model::{
    TokenId,
    kv::{PAGE_TOKENS, PerGroup},
};

use super::{
    Counts, FinishReason, MissReason, Request, RequestId, Update,
    testing::{Bench, Random, alone},
};
use crate::config::{PrefixReuse, comfortable_pages};

const HISTORIES: u64 = 4000;

/// What has been seen of a request.
struct Record {
    request: Request,
    limit: usize,
    answer: Vec<TokenId>,
    rows: usize,
    /// How much had been answered when it was cancelled.
    cancelled_after: Option<usize>,
    end: Option<End>,
}

enum End {
    Finished(FinishReason, Counts),
    Abandoned,
}

#[expect(clippy::struct_excessive_bools, reason = "what may happen in it")]
struct History {
    random: Random,
    bench: Bench,
    /// What prompts begin with.
    documents: Vec<Vec<TokenId>>,
    records: BTreeMap<RequestId, Record>,
    /// Some steps fail.
    abandons: bool,
    /// Some requests are cancelled.
    cancels: bool,
    /// Some batches are submitted before the tokens they are fed are known.
    goes_ahead: bool,
    /// Short prompts, and answers as long as they may be, so that sequences outgrow the pages together.
    long_answers: bool,
}

/// What all histories together came to, to be sure that they exercise what they are meant to.
#[derive(Debug, Default)]
struct Totals {
    steps: usize,
    ahead: usize,
    finished: usize,
    stopped: usize,
    cancelled: usize,
    abandoned: usize,
    rejected: usize,
    preemptions: usize,
    cached_tokens: usize,
    sliding_evicted: usize,
}

impl Totals {
    fn are_telling(&self) -> bool {
        let often = HISTORIES as usize;
        let at_times = [
            self.stopped,
            self.cancelled,
            self.abandoned,
            self.rejected,
            self.preemptions,
            self.cached_tokens / PAGE_TOKENS,
            self.sliding_evicted,
        ];
        self.steps > 50 * often
            && self.ahead > 10 * often
            && self.finished > 3 * often
            && at_times.iter().all(|count| *count > often / 10)
    }
}

impl History {
    fn new(seed: u64) -> History {
        let mut random = Random(seed);
        let bench = Bench::new(random.config());
        let mut documents: Vec<Vec<TokenId>> = (0..3)
            .map(|_| {
                let length = random.within(1..=200);
                random.tokens(length)
            })
            .collect();
        // The same page over and over: only its place tells one from another.
        documents.push(random.tokens(PAGE_TOKENS).repeat(random.within(1..=6)));
        History {
            abandons: random.one_in(6),
            cancels: random.one_in(3),
            goes_ahead: random.one_in(2),
            long_answers: random.one_in(3),
            random,
            bench,
            documents,
            records: BTreeMap::new(),
        }
    }

    fn request(&mut self) -> Request {
        let random = &mut self.random;
        let earlier: Vec<&Record> = self.records.values().collect();
        let mut prompt = if !earlier.is_empty() && random.one_in(3) {
            // The next turn of a conversation, perhaps with the end of the answer left out.
            let turn = earlier[random.within(0..=earlier.len() - 1)];
            let left_out = random.within(0..=turn.answer.len()) * random.within(0..=1);
            let kept = turn.answer.len() - left_out;
            [&turn.request.prompt, &turn.answer[..kept]].concat()
        } else {
            let document = &self.documents[random.within(0..=3)];
            let kept = match random.within(0..=2) {
                0 => document.len(),
                1 => document.len() / 32 * 32,
                _ => random.within(0..=document.len()),
            };
            document[..kept].to_vec()
        };
        let tail = random.within(0..=3) * random.within(0..=12);
        prompt.extend(random.tokens(tail));
        let context = self.bench.limits.config().context;
        let long = self.long_answers && !random.one_in(4);
        if long {
            prompt.truncate(random.within(1..=50));
        }
        if !random.one_in(10) {
            prompt.truncate(context - 1);
        }
        let room = context.saturating_sub(prompt.len()).max(1);
        let stops = random.within(0..=2);
        Request {
            max_tokens: match random.within(0..=20) {
                0 => None,
                1 => Some(random.within(0..=2 * context)),
                _ if long => Some(room),
                2..5 => Some(room),
                _ => Some(random.within(1..=40).min(room)),
            },
            stop_tokens: random.tokens(stops),
            ignore_eos: long || random.one_in(8),
            logprobs: random.one_in(8).then_some(2),
            ..Request::new(prompt)
        }
    }

    fn submit(&mut self, totals: &mut Totals) {
        let request = self.request();
        let Ok(limit) = self.bench.limits.check(&request) else {
            totals.rejected += 1;
            return;
        };
        let id = self.bench.submit(request.clone());
        let record = Record {
            request,
            limit,
            answer: Vec::new(),
            rows: 0,
            cancelled_after: None,
            end: None,
        };
        self.records.insert(id, record);
    }

    fn cancel_one(&mut self) {
        if let Some(id) = self.records.keys().copied().max() {
            let id = RequestId(self.random.within(1..=id.0 as usize) as u64);
            self.bench.scheduler.cancel(id);
            let record = self.records.get_mut(&id).unwrap();
            if record.end.is_none() {
                record.cancelled_after.get_or_insert(record.answer.len());
            }
        }
    }

    fn has_enough_pages(&self) -> bool {
        let (config, shape) = (self.bench.limits.config(), self.bench.limits.shape());
        let (sequences, rows) = (config.max_sequences, config.max_rows);
        config.pages == comfortable_pages(config.context, sequences, rows, shape)
    }

    /// One step, perhaps with a cancellation or a failure in the middle.
    fn step(&mut self) -> bool {
        let was_ahead = self.bench.is_ahead();
        let go_ahead = self.goes_ahead && !self.random.one_in(8);
        if !self.bench.begin_ahead(go_ahead) {
            self.bench.scheduler.audit();
            return false;
        }
        for (id, rows) in self.bench.scheduler.scheduled() {
            self.records.get_mut(&id).unwrap().rows += rows;
        }
        // One that was cancelled since has no part in a batch submitted ahead.
        if self.has_enough_pages() && !was_ahead {
            assert!(
                self.bench.scheduler.scheduled().all(|(_, rows)| rows > 0),
                "with enough pages nobody is left out"
            );
        }
        if self.cancels && self.random.one_in(40) {
            self.cancel_one();
        }
        if self.abandons && self.random.one_in(25) {
            self.bench.forget_ahead();
            self.bench.scheduler.abandon();
        } else {
            self.bench.scheduler.apply(&self.bench.outputs);
        }
        self.bench.scheduler.audit();
        true
    }

    fn take_updates(&mut self) {
        for update in self.bench.scheduler.updates() {
            let (Update::Started { id }
            | Update::Token { id, .. }
            | Update::Finished { id, .. }
            | Update::Abandoned { id }) = update;
            let record = self.records.get_mut(&id).unwrap();
            assert!(record.end.is_none(), "{id:?} goes on after its end");
            match update {
                Update::Started { .. } => assert!(record.answer.is_empty()),
                Update::Token { row, .. } => {
                    let result = &self.bench.outputs.rows[row];
                    let top = record.request.logprobs.unwrap_or(0);
                    assert_eq!(result.top.len(), top, "the row of another request");
                    record.answer.push(result.token);
                }
                Update::Finished { reason, counts, .. } => {
                    record.end = Some(End::Finished(reason, counts));
                }
                Update::Abandoned { .. } => record.end = Some(End::Abandoned),
            }
        }
    }

    fn run(mut self, totals: &mut Totals) {
        let mut arrivals = self.random.within(1..=14);
        let bursts = self.random.one_in(2);
        let mut steps = 0;
        loop {
            while arrivals > 0 && (bursts || self.random.one_in(4)) {
                arrivals -= 1;
                self.submit(totals);
                if bursts && self.random.one_in(3) {
                    break;
                }
            }
            if self.cancels && self.random.one_in(40) {
                self.cancel_one();
            }
            let worked = self.step();
            totals.ahead += usize::from(self.bench.is_ahead());
            self.take_updates();
            if !worked && arrivals == 0 {
                break;
            }
            steps += usize::from(worked);
            // In each step the oldest request, which never loses what it has, advances by at least a position.
            let positions: usize = self.records.values().map(|r| r.limit).sum();
            assert!(steps <= positions, "a step without progress");
        }
        totals.steps += steps;
        self.check_outcome(totals);
    }

    fn check_outcome(&self, totals: &mut Totals) {
        let window = self.bench.limits.shape().window;
        let config = self.bench.limits.config();
        for (id, record) in &self.records {
            let end = record.end.as_ref().expect("every request ends");
            if let Some(answered) = record.cancelled_after {
                assert!(matches!(
                    end,
                    End::Abandoned | End::Finished(FinishReason::Cancelled, _)
                ));
                assert_eq!(record.answer.len(), answered, "{id:?} goes on");
            }
            let (answer, reason) = alone(&record.request, record.limit, window);
            match *end {
                End::Finished(FinishReason::Cancelled, _) => {
                    totals.cancelled += 1;
                    assert!(answer.starts_with(&record.answer), "{id:?} went astray");
                }
                End::Abandoned => {
                    totals.abandoned += 1;
                    assert!(answer.starts_with(&record.answer), "{id:?} went astray");
                }
                End::Finished(finish, counts) => {
                    assert_eq!((&record.answer, finish), (&answer, reason), "{id:?}");
                    let stopped = matches!(finish, FinishReason::Stop { .. });
                    let generated = answer.len() + usize::from(stopped);
                    assert_eq!(counts.generated_tokens, generated);
                    assert_eq!(counts.prompt_tokens, record.request.prompt.len());
                    assert!(counts.cached_tokens < counts.prompt_tokens);
                    if counts.preemptions == 0 {
                        let fed = counts.prompt_tokens - counts.cached_tokens + generated - 1;
                        assert_eq!(record.rows, fed, "each token is computed once");
                    }
                    if config.prefix_reuse == PrefixReuse::Disabled {
                        assert_eq!(counts.cached_tokens, 0);
                    }
                    totals.finished += 1;
                    totals.stopped += usize::from(stopped);
                    totals.preemptions += counts.preemptions;
                    totals.cached_tokens += counts.cached_tokens;
                    totals.sliding_evicted +=
                        usize::from(counts.miss == Some(MissReason::SlidingEvicted));
                }
            }
        }
        let stats = self.bench.scheduler.stats();
        assert_eq!((stats.running, stats.waiting), (0, 0));
        assert_eq!(stats.pages.map(|p| p.held), PerGroup::default(), "a leak");
        self.bench.scheduler.audit_contents(&self.bench.executor);
    }
}

#[test]
fn every_history_conserves_pages_and_answers_as_if_each_request_were_alone() {
    let mut totals = Totals::default();
    for seed in 0..HISTORIES {
        let history = AssertUnwindSafe(|| History::new(seed).run(&mut totals));
        assert!(
            catch_unwind(history).is_ok(),
            "seed {seed} failed, see above"
        );
    }
    assert!(totals.are_telling(), "{totals:?}");
}
