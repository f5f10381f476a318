//! The engine over real (tiny) models: a crowded engine that chunks, shares, evicts and preempts must
//! give every request exactly the answer it gets from one that does nothing of the kind. The reference interpreter
//! computes each row by itself, so not even log-probabilities may differ.

use std::sync::Arc;

use carat_engine::{
    Counts, EngineConfig, EngineHandle, Event, FinishReason, ModelFacts, PrefixReuse, Request,
    TokenStream,
};
use carat_gguf::QuantType;
use carat_model::{TokenId, gemma4, reference::Reference, sampling::Sampling};
use carat_testkit::tiny::{Tiny, Variant};

/// More than a page, so that windows reach across a page's border.
const WINDOW: usize = 40;
const CONTEXT: usize = 160;

fn tiny(variant: Variant) -> Tiny {
    let mut tiny = Tiny::new(variant, QuantType::F32);
    tiny.dimensions.window = WINDOW;
    tiny
}

fn start(tiny: &Tiny, change: impl FnOnce(&mut EngineConfig)) -> EngineHandle {
    let model = tiny.model();
    let plan = gemma4::plan(&model);
    let mut config = EngineConfig::comfortable(CONTEXT, 1, 64, ModelFacts::from(&plan));
    change(&mut config);
    EngineHandle::start(
        config,
        Box::new(Reference),
        plan,
        Arc::clone(&model.weights),
    )
    .unwrap()
}

/// Two groups of prompts that begin alike, some greedy and some sampled.
fn requests(tiny: &Tiny) -> Vec<Request> {
    let text = tiny.prompt(110);
    (0..5)
        .map(|n| {
            let shared = if n % 2 == 0 {
                &text[..70]
            } else {
                &text[5..75]
            };
            let own = &text[n..n + 4 * n];
            Request {
                max_tokens: Some(70),
                sampling: Sampling {
                    temperature: (n % 3) as f32,
                    seed: n as u64,
                    ..Sampling::default()
                },
                logprobs: Some(2),
                ..Request::new([shared, own].concat())
            }
        })
        .collect()
}

#[derive(Debug, PartialEq)]
struct Answer {
    tokens: Vec<Event>,
    reason: FinishReason,
}

fn read(stream: TokenStream) -> (Answer, Counts) {
    let mut tokens = Vec::new();
    for event in stream {
        match event.unwrap() {
            Event::Finished { reason, usage } => return (Answer { tokens, reason }, usage.counts),
            Event::Started { .. } => {}
            token => tokens.push(token),
        }
    }
    panic!("a stream without an end");
}

#[test]
fn a_crowded_engine_answers_as_an_idle_one_does() {
    // One whose prompts run through some layers only, and one whose rows pick experts.
    for variant in [Variant::E2b, Variant::Moe26b] {
        let tiny = tiny(variant);
        let requests = requests(&tiny);
        let idle = start(&tiny, |config| config.prefix_reuse = PrefixReuse::Disabled);
        let alone: Vec<Answer> = requests
            .iter()
            .map(|r| read(idle.submit(r.clone()).unwrap()).0)
            .collect();

        let crowded = start(&tiny, |config| {
            config.max_sequences = 3;
            config.max_rows = 20;
            config.pages.full = 7;
            config.pages.sliding = 7;
        });
        let mut preemptions = 0;
        let mut cached = 0;
        for round in 0..2 {
            let streams: Vec<TokenStream> = requests
                .iter()
                .map(|r| crowded.submit(r.clone()).unwrap())
                .collect();
            for (stream, alone) in streams.into_iter().zip(&alone) {
                let (answer, counts) = read(stream);
                assert_eq!(&answer, alone, "{variant:?}, round {round}");
                preemptions += counts.preemptions;
                cached += counts.cached_tokens;
            }
        }
        assert!(preemptions > 0, "{variant:?} was not crowded");
        assert!(cached > 0, "{variant:?} reused nothing");
    }
}

#[test]
fn a_token_outside_the_vocabulary_is_rejected_before_it_reaches_a_batch() {
    let tiny = tiny(Variant::Dense12b);
    let engine = start(&tiny, |_| {});
    let outside = Request::new(vec![tiny.dimensions.vocab as TokenId]);
    assert!(engine.submit(outside).is_err());
}
