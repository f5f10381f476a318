//! Thousands of random serving histories, each checked after every step.
//!
//! Requests that share prefixes, repeat or continue each other or wait for siblings, in a few lanes, with images, constraints,
//! penalties, drafts and log-probabilities of their prompts, arrive, are cancelled and run out of time at random in configurations
//! that are mostly too small, on executors that look ahead or do not, that refuse batches, and that fail in any of their calls.
//! After each step every page is accounted for ([`Scheduler::audit`](super::Scheduler)); in each step the fake
//! model checks every KV entry that any row sees; in the end every answer is what the request gives by itself.

use std::{
    collections::BTreeMap,
    panic::{AssertUnwindSafe, catch_unwind},
};

use carat_model::{
    TokenId,
    kv::{PAGE_TOKENS, PerGroup},
    sampling::Sampling,
};

use super::{
    Counts, FinishReason, LaneId, Media, MediaAttention, MissReason, Pipeline, Request, RequestId,
    Scheduler, Update,
    testing::{FakeConstraint, FakeExecutor, Lookahead, Random, alone, image},
};
use crate::config::{Limits, PrefixReuse};

const HISTORIES: u64 = 4000;

/// Everything seen of a request.
struct Record {
    request: Request,
    limit: usize,
    answer: Vec<TokenId>,
    forced: usize,
    /// Tokens of the prompt that were told of, the first included.
    told: usize,
    /// The end it is to have, and how much had been answered when that was decided.
    ended_after: Option<(FinishReason, usize)>,
    end: Option<End>,
}

enum End {
    Finished(FinishReason, Counts),
    Abandoned,
}

#[expect(clippy::struct_excessive_bools, reason = "what may happen in it")]
struct History {
    random: Random,
    limits: Limits,
    pipeline: Pipeline<FakeExecutor>,
    /// Beginnings of prompts.
    documents: Vec<Vec<TokenId>>,
    records: BTreeMap<RequestId, Record>,
    /// The lowest position that a batch was refused for.
    refused_from: usize,
    /// Some calls of the executor fail.
    fails: bool,
    /// Some batches are refused, whoever is in them.
    refuses: bool,
    /// Some requests are cancelled, or run out of time.
    cancels: bool,
    /// Some requests have images.
    has_media: bool,
    /// Some requests are constrained.
    constrains: bool,
    /// All requests are of the same lane: cached pages go by age alone.
    one_lane: bool,
    /// Short prompts, and answers as long as they may be, so that sequences outgrow the pages together.
    long_answers: bool,
}

/// Sums over all histories, to be sure that they exercise what they are meant to.
#[derive(Debug, Default)]
struct Totals {
    steps: usize,
    ahead: usize,
    finished: usize,
    stopped: usize,
    cancelled: usize,
    expired: usize,
    abandoned: usize,
    refused: usize,
    siblings: usize,
    told: usize,
    rejected: usize,
    preemptions: usize,
    cached_tokens: usize,
    /// Of these, those that came from host memory, and pages of both groups that did.
    host_tokens: usize,
    loads: usize,
    sliding_evicted: usize,
    media_cut: usize,
    with_media: usize,
    dead_ends: usize,
    forced: usize,
    penalized: usize,
    drafts: usize,
    /// Tokens that a drafter or a lookup proposed, and those of them that were right.
    drafted: usize,
    accepted: usize,
    chunk_pages: usize,
}

impl Totals {
    fn are_telling(&self) -> bool {
        let often = HISTORIES as usize;
        let at_times = [
            self.stopped,
            self.cancelled,
            2 * self.expired,
            self.abandoned,
            self.refused / 4,
            self.siblings,
            self.told / PAGE_TOKENS,
            self.rejected,
            self.preemptions,
            self.cached_tokens / PAGE_TOKENS,
            2 * self.host_tokens / PAGE_TOKENS,
            self.loads / 2,
            2 * self.sliding_evicted,
            self.with_media,
            self.forced,
            self.penalized,
            self.drafts,
            self.drafted / 2,
            self.accepted,
            10 * self.dead_ends,
            40 * self.media_cut,
            3 * self.chunk_pages,
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
        let (config, facts) = random.config();
        let limits = Limits::new(config, facts).unwrap();
        let mut executor = FakeExecutor::new(&limits);
        executor.lookahead = match random.within(0..=3) {
            0 => Lookahead::Never,
            1 => Lookahead::Mostly,
            _ => Lookahead::Always,
        };
        let mut documents: Vec<Vec<TokenId>> = (0..3)
            .map(|_| {
                let length = random.within(1..=200);
                random.tokens(length)
            })
            .collect();
        // The same page over and over: only its place tells one from another.
        documents.push(random.tokens(PAGE_TOKENS).repeat(random.within(1..=6)));
        History {
            fails: random.one_in(6),
            refuses: random.one_in(5),
            refused_from: usize::MAX,
            cancels: random.one_in(3),
            has_media: random.one_in(3),
            constrains: random.one_in(3),
            one_lane: random.one_in(3),
            long_answers: random.one_in(3),
            pipeline: Pipeline::new(Scheduler::new(limits.clone()), executor),
            limits,
            random,
            documents,
            records: BTreeMap::new(),
        }
    }

    /// Puts a few images into a request, of few kinds, and often where others have them.
    fn illustrate(&mut self, request: &mut Request) {
        let often = self.random.one_in(2);
        let mut start = 0;
        for _ in 0..self.random.within(1..=3) {
            let random = &mut self.random;
            // Across the end of the first page, or anywhere.
            let (before, length, attention) = if often && start == 0 {
                (20, 30, MediaAttention::BothWays)
            } else {
                let length = match random.within(0..=2) {
                    0 => random.within(1..=4),
                    _ => random.within(5..=45),
                };
                let attention = match random.within(0..=3) {
                    0 => MediaAttention::Causal,
                    _ => MediaAttention::BothWays,
                };
                let before = random.within(0..=3) * random.within(0..=12);
                (before, length, attention)
            };
            start += before;
            let picture = Media {
                attention,
                ..image(start..start + length, random.within(0..=2) as u64)
            };
            let end = start + length;
            if end > request.prompt.len() {
                return;
            }
            if self.random.one_in(4) {
                // What follows the image is another's.
                let behind = end..request.prompt.len().min(end + 3);
                let other = self.random.tokens(behind.len());
                request.prompt[behind].copy_from_slice(&other);
            }
            // What stands beside an image says nothing of it.
            request.prompt[picture.places.clone()].fill(0);
            start = end;
            request.media.push(picture);
        }
    }

    fn request(&mut self) -> Request {
        let random = &mut self.random;
        let mut media = Vec::new();
        let earlier: Vec<&Record> = self.records.values().collect();
        let mut prompt = if !earlier.is_empty() && random.one_in(3) {
            // The next turn of a conversation, perhaps with the end of the answer left out.
            let turn = earlier[random.within(0..=earlier.len() - 1)];
            let left_out = random.within(0..=turn.answer.len()) * random.within(0..=1);
            let kept = turn.answer.len() - left_out;
            media.clone_from(&turn.request.media);
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
        let context = self.limits.config().context;
        let long = self.long_answers && !random.one_in(4);
        if long {
            prompt.truncate(random.within(1..=50));
        }
        if !random.one_in(10) {
            prompt.truncate(context - 1);
        }
        media.retain(|m: &Media| m.places.end <= prompt.len());
        let room = context.saturating_sub(prompt.len()).max(1);
        let stops = random.within(0..=2);
        let mut request = Request {
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
            drafts: random.one_in(4),
            lane: (!self.one_lane && random.one_in(2)).then(|| LaneId(random.within(0..=2) as u64)),
            media,
            cache_salt: random.one_in(6).then_some([1; 16]),
            sampling: Sampling {
                presence_penalty: f32::from(u8::from(random.one_in(4))),
                penalty_window: random.within(1..=12),
                ..Sampling::greedy()
            },
            ..Request::new(prompt)
        };
        if self.constrains && random.one_in(2) {
            let forces = random.within(0..=1) * random.within(0..=15);
            let seed = random.next() % 5;
            request.constraint = Some(FakeConstraint::source(seed, forces as u64));
        }
        if self.has_media && request.media.is_empty() && self.random.one_in(2) {
            self.illustrate(&mut request);
        }
        if request.media.is_empty() && self.random.one_in(8) {
            request.prompt_logprobs = Some(self.random.within(0..=3));
        }
        if self.random.one_in(6) {
            // The same once more, or something else that waits all the same; at times for one that never comes.
            let last = self.records.len() + 1;
            let id = RequestId(self.random.within(1..=last) as u64);
            if let Some(record) = self.records.get(&id).filter(|_| self.random.one_in(2)) {
                request = record.request.clone();
            }
            request.after = Some(id);
        }
        request
    }

    fn submit(&mut self, totals: &mut Totals) {
        let request = self.request();
        let Ok(limit) = self.limits.check(&request) else {
            totals.rejected += 1;
            return;
        };
        let id = RequestId(self.records.len() as u64 + 1);
        let scheduler = self.pipeline.scheduler();
        scheduler.submit(id, request.clone()).unwrap();
        let record = Record {
            request,
            limit,
            answer: Vec::new(),
            forced: 0,
            told: 1,
            ended_after: None,
            end: None,
        };
        self.records.insert(id, record);
    }

    /// Cancels one, or its time is up.
    fn end_one(&mut self) {
        if let Some(id) = self.records.keys().copied().max() {
            let id = RequestId(self.random.within(1..=id.0 as usize) as u64);
            let reason = if self.random.one_in(2) {
                self.pipeline.scheduler().cancel(id);
                FinishReason::Cancelled
            } else {
                self.pipeline.scheduler().expire(id);
                FinishReason::Deadline
            };
            let record = self.records.get_mut(&id).unwrap();
            if record.end.is_none() {
                let answered = record.answer.len();
                record.ended_after.get_or_insert((reason, answered));
            }
        }
    }

    /// Changes what the executor refuses.
    fn change_refusals(&mut self) {
        let executor = self.pipeline.executor();
        executor.max_runs = match self.random.within(0..=2) {
            0 => usize::MAX,
            _ => self.random.within(1..=3),
        };
        let deep = self.random.one_in(8);
        executor.refused_from = if deep {
            self.random.within(60..=300)
        } else {
            usize::MAX
        };
    }

    /// Proposes what will come, or something else from some token on.
    fn propose(&mut self, totals: &mut Totals) {
        for (id, tokens) in self.pipeline.scheduler().draftable() {
            let record = &self.records[&id];
            let (answer, _) = alone(&record.request, record.limit, self.limits.model().window);
            let so_far = tokens.len() - record.request.prompt.len();
            let mut draft = answer[so_far.min(answer.len())..].to_vec();
            draft.truncate(self.random.within(0..=6) * self.random.within(0..=8));
            if self.random.one_in(2) && !draft.is_empty() {
                let wrong = self.random.within(0..=draft.len() - 1);
                draft[wrong] = self.random.tokens(1)[0];
            }
            totals.drafts += usize::from(!draft.is_empty());
            self.pipeline.scheduler().propose(id, &draft);
        }
    }

    /// One step, perhaps with a failure in any of its calls.
    fn step(&mut self, totals: &mut Totals) -> bool {
        if self.limits.config().max_draft > 0 && !self.random.one_in(4) {
            self.propose(totals);
        }
        if self.fails && self.random.one_in(15) {
            // The first call that fails is the second from here on at the earliest.
            self.pipeline.executor().fails_in = 1 + self.random.within(1..=4) as u64;
        }
        if self.refuses && self.random.one_in(10) {
            self.change_refusals();
        }
        // Somebody is in a hurry, and perhaps still is at the next step.
        match self.random.within(0..=29) {
            0 => self.pipeline.interrupt().raise(),
            1..=15 => self.pipeline.interrupt().clear(),
            _ => {}
        }
        let refused_from = self.pipeline.executor().refused_from;
        let interrupted = self.pipeline.executor().interrupted;
        let worked = self.pipeline.step().unwrap_or_else(|_| {
            self.refused_from = self.refused_from.min(refused_from);
            self.pipeline.give_up();
            let in_flight = self.pipeline.executor().in_flight();
            assert_eq!(in_flight, 0, "a batch is left in flight");
            true
        });
        self.pipeline.scheduler().audit();
        worked || self.pipeline.executor().interrupted > interrupted
    }

    fn take_updates(&mut self) {
        let (outputs, updates) = self.pipeline.results();
        for update in updates {
            let (Update::Started { id, .. }
            | Update::Token { id, .. }
            | Update::Forced { id, .. }
            | Update::PromptToken { id, .. }
            | Update::Finished { id, .. }
            | Update::Abandoned { id }) = update;
            let record = self.records.get_mut(&id).unwrap();
            assert!(record.end.is_none(), "{id:?} goes on after its end");
            match update {
                Update::Started { .. } => assert!(record.answer.is_empty()),
                Update::Token { row, .. } => {
                    let asked = record.request.prompt_logprobs.is_some();
                    let prompt = record.request.prompt.len();
                    assert!(!asked || record.told == prompt, "told of too late");
                    let result = &outputs.rows[row];
                    let top = record.request.logprobs.unwrap_or(0);
                    assert_eq!(result.top.len(), top, "the row of another request");
                    record.answer.push(result.token);
                }
                Update::Forced { token, .. } => {
                    record.answer.push(token);
                    record.forced += 1;
                }
                Update::PromptToken { position, row, .. } => {
                    let Request {
                        prompt,
                        prompt_logprobs,
                        ..
                    } = &record.request;
                    let result = &outputs.rows[row];
                    assert_eq!(position, record.told, "told of once, in order");
                    assert_eq!(result.token, prompt[position], "another token");
                    assert_eq!(Some(result.top.len()), *prompt_logprobs);
                    assert!(result.logprob.is_some());
                    record.told += 1;
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
                self.end_one();
            }
            let worked = self.step(totals);
            self.take_updates();
            if !worked && arrivals == 0 {
                break;
            }
            steps += usize::from(worked);
            // In each step the request started first, which never loses what it has, advances by at least a position; but for
            // batches of nobody, of which there is at most one after each end, those that fail or are run in parts, and those that
            // are interrupted.
            let positions: usize = self.records.values().map(|r| r.limit + 1).sum();
            let interrupted = self.pipeline.executor().interrupted;
            assert!(
                self.fails || self.refuses || steps <= positions + interrupted,
                "a step without progress"
            );
        }
        totals.steps += steps;
        totals.ahead += self.pipeline.executor().ahead;
        self.check_outcome(totals);
    }

    fn check_outcome(&mut self, totals: &mut Totals) {
        let window = self.limits.model().window;
        let config = self.limits.config();
        let mut fed = Some(0);
        for (id, record) in &self.records {
            let end = record.end.as_ref().expect("every request ends");
            if let Some((reason, answered)) = record.ended_after {
                let as_asked = match end {
                    End::Abandoned => true,
                    End::Finished(finish, _) => *finish == reason,
                };
                assert!(as_asked, "{id:?} ends otherwise");
                assert_eq!(record.answer.len(), answered, "{id:?} goes on");
            }
            totals.told += record.told - 1;
            totals.siblings += usize::from(record.request.after.is_some());
            let (answer, reason) = alone(&record.request, record.limit, window);
            match *end {
                End::Finished(reason @ (FinishReason::Cancelled | FinishReason::Deadline), _) => {
                    fed = None;
                    totals.cancelled += usize::from(reason == FinishReason::Cancelled);
                    totals.expired += usize::from(reason == FinishReason::Deadline);
                    assert!(answer.starts_with(&record.answer), "{id:?} went astray");
                }
                End::Abandoned => {
                    fed = None;
                    totals.abandoned += 1;
                    let reached =
                        record.request.prompt.len() + record.answer.len() + config.max_draft;
                    assert!(
                        self.fails || reached > self.refused_from,
                        "{id:?} is lost, and nobody refused it"
                    );
                    assert!(answer.starts_with(&record.answer), "{id:?} went astray");
                }
                End::Finished(finish, counts) => {
                    assert_eq!((&record.answer, finish), (&answer, reason), "{id:?}");
                    let stopped = matches!(finish, FinishReason::Stop { .. });
                    let generated = answer.len() + usize::from(stopped);
                    assert_eq!(counts.generated_tokens, generated);
                    assert_eq!(counts.prompt_tokens, record.request.prompt.len());
                    assert!(counts.cached_tokens < counts.prompt_tokens);
                    // A forced token at the end is not fed either, but there may be more of them, a stop token last.
                    let exact = counts.preemptions == 0
                        && record.request.constraint.is_none()
                        && finish != FinishReason::DeadEnd
                        && !record.request.drafts;
                    let rows =
                        (counts.prompt_tokens - counts.cached_tokens + generated).checked_sub(1);
                    fed = fed.zip(rows).filter(|_| exact).map(|(a, b)| a + b);
                    if config.prefix_reuse == PrefixReuse::Disabled {
                        assert_eq!(counts.cached_tokens, 0);
                    }
                    totals.finished += 1;
                    totals.stopped += usize::from(stopped);
                    totals.preemptions += counts.preemptions;
                    totals.cached_tokens += counts.cached_tokens;
                    totals.host_tokens += counts.cached_in_host;
                    assert!(counts.cached_in_host <= counts.cached_tokens);
                    totals.drafted += counts.drafts.drafted as usize;
                    totals.accepted += counts.drafts.accepted as usize;
                    let passes = counts.drafts.passes + counts.drafts.accepted;
                    let all = counts.generated_tokens as u64;
                    // A draft that ends the answer leaves nothing to be drawn behind it.
                    assert!(passes <= all + 1, "{counts:?}");
                    totals.forced += record.forced;
                    totals.dead_ends += usize::from(finish == FinishReason::DeadEnd);
                    totals.with_media += usize::from(!record.request.media.is_empty());
                    totals.penalized += usize::from(record.request.sampling.penalizes());
                    totals.media_cut += usize::from(counts.miss == Some(MissReason::MediaCut));
                    totals.sliding_evicted +=
                        usize::from(counts.miss == Some(MissReason::SlidingEvicted));
                }
            }
        }
        let executor = self.pipeline.executor();
        totals.refused += executor.refused;
        totals.loads += executor.loads;
        totals.chunk_pages += executor.chunk_pages_written;
        assert_eq!(executor.in_flight(), 0, "a batch is left in flight");
        if let Some(fed) = fed.filter(|_| executor.lookahead == Lookahead::Never) {
            assert_eq!(executor.rows, fed, "each token is computed once");
        }
        let stats = self.pipeline.scheduler().stats();
        assert_eq!((stats.running, stats.waiting), (0, 0));
        assert_eq!(stats.pages.map(|p| p.held), PerGroup::default(), "a leak");
        self.pipeline.audit_contents(self.has_media);
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
