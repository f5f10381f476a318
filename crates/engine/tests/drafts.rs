//! Drafts change no answer: random requests with a drafter and with lookups, in random company, give the tokens, log-probabilities
//! and ends that they give without. Batches stay within the small class, in which a row has the same bits in any company.
//!
//! `cargo test -p carat-engine --test drafts -- --ignored` asks for twenty times as many of them.

use std::{collections::VecDeque, sync::Arc, time::Duration};

use carat_cpu::{CpuBackend, CpuConfig};
use carat_engine::{
    Constraint, ConstraintSource, DraftConfig, DraftCounts, EngineConfig, EngineHandle, Event,
    FinishReason, KeptCosts, ModelFacts, Request, StepCosts, TokenStream,
};
use carat_model::{
    TokenId,
    backend::DraftPlan,
    gemma4,
    gemma4_assistant::{self, Head},
    sampling::{Sampling, TokenMask},
};
use carat_testkit::pairs::Pair;

/// Enough for every kind of request in every company, in seconds.
const GENERATIONS: usize = 500;
/// So many that rare meetings of theirs come up, too.
const MANY_GENERATIONS: usize = 10_000;
const CONTEXT: usize = 128;
/// Rows of the small class.
const ROWS: usize = 32;
const VOCAB: u64 = 448;

/// Costs that make drafts pay however seldom they are right, so that many are verified.
fn free_rows() -> StepCosts {
    let pass = Duration::from_millis(1);
    StepCosts {
        target: vec![(1, pass), (64, pass)],
        drafter: vec![(1, Duration::from_nanos(1))],
    }
}

fn start(pair: &Pair, sequences: usize, most: usize) -> EngineHandle {
    start_by(pair, sequences, most, |_| {})
}

fn start_by(
    pair: &Pair,
    sequences: usize,
    most: usize,
    change: impl FnOnce(&mut DraftConfig),
) -> EngineHandle {
    let plan = gemma4::plan(&pair.target);
    let facts = ModelFacts::from(&plan);
    let reaching = ModelFacts {
        window: facts.window.map(|window| window + most),
        ..facts
    };
    let mut config = EngineConfig::comfortable(CONTEXT, sequences, ROWS, reaching);
    config.max_unfinished = 64;
    config.max_draft = most;
    let mut drafts = DraftConfig {
        model: true,
        lookup: true,
        rows: ROWS,
        costs: Some(free_rows()),
        kept_costs: None,
    };
    change(&mut drafts);
    config.drafts = Some(drafts);
    let drafter = gemma4_assistant::plan(&pair.drafter, Head::Clusters);
    let backend = Box::new(CpuBackend::new(&CpuConfig::default()));
    let target = (plan, Arc::clone(&pair.target.weights));
    let drafter = DraftPlan {
        plan: drafter,
        weights: Arc::clone(&pair.drafter.weights),
        max_drafts: sequences,
    };
    EngineHandle::start_with_drafter(config, backend, target, drafter).unwrap()
}

#[test]
fn costs_are_measured_once_and_kept() {
    let pair = Pair::load("e-series");
    let folder = tempfile::tempdir().unwrap();
    let start_measured = || {
        start_by(&pair, 2, 3, |drafts| {
            drafts.costs = None;
            drafts.kept_costs = Some(KeptCosts {
                folder: folder.path().to_owned(),
                holds_for: "this machine".to_owned(),
            });
        })
    };
    let kept = || {
        let entries = std::fs::read_dir(folder.path()).unwrap();
        let paths: Vec<_> = entries.map(|entry| entry.unwrap().path()).collect();
        assert_eq!(paths.len(), 1, "{paths:?}");
        std::fs::read_to_string(&paths[0]).unwrap()
    };
    drop(start_measured());
    let measured = kept();
    assert!(
        measured.contains("target 1 ") && measured.contains("drafter 1 "),
        "{measured}"
    );
    // Nanoseconds never come out the same twice.
    drop(start_measured());
    assert_eq!(kept(), measured);
}

struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 += 1;
        carat_model::sampling::random(3, self.0, 0)
    }

    fn below(&mut self, most: usize) -> usize {
        (self.next() % most as u64) as usize
    }

    fn one_in(&mut self, n: u64) -> bool {
        self.next().is_multiple_of(n)
    }

    fn tokens(&mut self, count: usize) -> Vec<TokenId> {
        (0..count).map(|_| (self.next() % VOCAB) as u32).collect()
    }

    fn biases(&mut self) -> Vec<(TokenId, f32)> {
        self.tokens(3).into_iter().zip([9.0, -9.0, 2.0]).collect()
    }

    fn request(&mut self) -> Request {
        let length = 1 + self.below(40);
        let mut prompt = self.tokens(length);
        if self.one_in(3) {
            // Something to look up.
            let again = prompt.clone();
            prompt.extend(again);
        }
        let stops = self.below(4);
        Request {
            max_tokens: Some(1 + self.below(24)),
            sampling: Sampling {
                temperature: self.below(2) as f32,
                top_k: if self.one_in(4) {
                    1 + self.below(40)
                } else {
                    0
                },
                top_p: if self.one_in(4) { 0.8 } else { 1.0 },
                min_p: if self.one_in(4) { 0.05 } else { 0.0 },
                frequency_penalty: if self.one_in(4) { 0.5 } else { 0.0 },
                logit_bias: if self.one_in(4) {
                    self.biases()
                } else {
                    Vec::new()
                },
                repeat_penalty: if self.one_in(4) { 1.3 } else { 1.0 },
                presence_penalty: if self.one_in(4) { 0.5 } else { 0.0 },
                penalty_window: 1 + self.below(30),
                seed: self.next(),
            },
            stop_tokens: self.tokens(stops),
            logprobs: self.one_in(2).then_some(2),
            constraint: self.one_in(2).then(|| grammar(self.next(), self.below(2))),
            ..Request::new(prompt)
        }
    }
}

/// Allows two thirds of the tokens, others after each, and may force some.
#[derive(Clone)]
struct Grammar {
    state: u64,
    forces: bool,
}

fn grammar(state: u64, forces: usize) -> ConstraintSource {
    let forces = forces > 0;
    ConstraintSource::new(move || Box::new(Grammar { state, forces }))
}

impl Constraint for Grammar {
    fn accept(&mut self, token: TokenId) {
        self.state = self.state.rotate_left(5) ^ u64::from(token);
    }

    fn mask(&mut self, mask: &mut TokenMask) {
        for token in 0..VOCAB {
            if !(token ^ self.state).is_multiple_of(3) {
                mask.allow(token as u32);
            }
        }
    }

    fn forced(&self) -> Option<TokenId> {
        let forces = self.forces && self.state.is_multiple_of(5);
        forces.then_some((self.state / 5 % VOCAB) as TokenId)
    }

    fn fork(&self) -> Box<dyn Constraint> {
        Box::new(self.clone())
    }
}

/// A token with the bits of what is said of it and of the likeliest in its place.
type Told = (TokenId, Option<u32>, Vec<(TokenId, u32)>);

/// Reads up to so many tokens of an answer, and why it ended and how drafts went, if it has. Dropping the rest cancels it.
fn read(stream: TokenStream, most: usize) -> (Vec<Told>, Option<(FinishReason, DraftCounts)>) {
    let mut tokens = Vec::new();
    for event in stream {
        match event.unwrap() {
            Event::Token { id, logprob, top } => {
                let top = top.iter().map(|(token, x)| (*token, x.to_bits()));
                tokens.push((id, logprob.map(f32::to_bits), top.collect()));
            }
            Event::Started { .. } => {}
            Event::PromptToken { .. } => panic!("nobody asked for it"),
            Event::Finished { reason, usage } => {
                return (tokens, Some((reason, usage.counts.drafts)));
            }
        }
        if tokens.len() == most {
            return (tokens, None);
        }
    }
    panic!("a stream without an end");
}

#[test]
fn answers_are_the_same_with_drafts_and_without() {
    compare(GENERATIONS, 0);
}

#[test]
#[ignore = "takes minutes: cargo test -p carat-engine --test drafts -- --ignored"]
fn ten_thousand_answers_are_the_same_with_drafts_and_without() {
    compare(MANY_GENERATIONS, 1 << 40);
}

/// Answers so many random requests with drafts and without.
fn compare(generations: usize, seed: u64) {
    let mut random = Random(seed);
    let mut total = DraftCounts::default();
    let names = ["e-series", "e-series-centroids", "12b-like", "moe-like"];
    for name in names {
        let pair = Pair::load(name);
        let plain = start(&pair, 1, 1);
        let engines = [(1, 7), (4, 3), (16, 1)].map(|(n, most)| (n, start(&pair, n, most)));
        let mut left = generations / names.len();
        while left > 0 {
            let (company, engine) = &engines[random.below(3)];
            let mut under_way: VecDeque<(Request, TokenStream)> = VecDeque::new();
            for _ in 0..=random.below(2 * company) {
                let request = Request {
                    drafts: !random.one_in(5),
                    ..random.request()
                };
                let stream = engine.submit(request.clone()).unwrap();
                under_way.push_back((request, stream));
                if random.one_in(8) {
                    // Dropping it cancels it.
                    under_way.swap_remove_back(random.below(under_way.len()));
                }
            }
            for (request, stream) in under_way {
                // Some are cancelled on the way.
                let most = if random.one_in(8) {
                    1 + random.below(12)
                } else {
                    usize::MAX
                };
                let (answer, end) = read(stream, most);
                let request = Request {
                    drafts: false,
                    ..request
                };
                let (alone, alone_end) = read(plain.submit(request).unwrap(), usize::MAX);
                let (alone_reason, without) = alone_end.expect("it was read to its end");
                assert_eq!(without.drafted, 0);
                if let Some((reason, drafts)) = end {
                    total.add(&drafts);
                    assert_eq!((answer, reason), (alone, alone_reason), "{name}");
                } else {
                    assert_eq!(answer, alone[..answer.len()], "{name}, cancelled");
                }
                left = left.saturating_sub(1);
            }
        }
        for (_, engine) in &engines {
            // Whoever was cancelled has left when the next is answered.
            read(engine.submit(random.request()).unwrap(), usize::MAX);
            let stats = engine.snapshot().stats;
            let held = stats.pages.map(|pages| pages.held);
            assert_eq!((held.full, held.sliding), (0, 0), "a leak");
        }
    }
    // Drafts were made, and some were right.
    assert!(total.accepted > generations as u64 / 20, "{total:?}");
    assert!(total.drafted > total.accepted, "{total:?}");
}
