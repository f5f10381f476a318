//! The engine over the CPU backend, past position 4,096: requests in company, with pages shared, evicted and taken away, give the
//! greedy text they give alone, with the same log-probabilities. Batches stay within the small class, in which a row has the same bits in any company.

use std::{collections::BTreeSet, sync::Arc};

use carat_cpu::{CpuBackend, CpuConfig};
use carat_engine::{
    Counts, EngineConfig, EngineHandle, Event, LaneId, ModelFacts, PrefixReuse, Request,
    TokenStream,
};
use carat_gguf::QuantType;
use carat_model::{TokenId, gemma4, sampling::Sampling};
use carat_testkit::tiny::{Tiny, Variant};

const CONTEXT: usize = 4400;
/// Rows of the small class.
const ROWS: usize = 32;

fn start(tiny: &Tiny, change: impl FnOnce(&mut EngineConfig)) -> EngineHandle {
    let model = tiny.model();
    let plan = gemma4::plan(&model);
    let mut config = EngineConfig::comfortable(CONTEXT, 1, ROWS, ModelFacts::from(&plan));
    change(&mut config);
    let backend = Box::new(CpuBackend::new(&CpuConfig::default()));
    EngineHandle::start(config, backend, plan, Arc::clone(&model.weights)).unwrap()
}

/// Two that share all but their ends, one of its own, and short ones beside them.
fn requests(tiny: &Tiny) -> Vec<Request> {
    let text = tiny.prompt(4300);
    let prompts = [
        text[..4130].to_vec(),
        text[7..300].to_vec(),
        [&text[..4120], &text[50..70]].concat(),
        text[30..90].to_vec(),
        text[100..4280].to_vec(),
    ];
    let asked = prompts.into_iter().zip(0..).map(|(prompt, n)| Request {
        max_tokens: Some(100),
        sampling: Sampling::greedy(),
        logprobs: Some(0),
        lane: Some(LaneId(n % 2)),
        ..Request::new(prompt)
    });
    asked.collect()
}

/// Tokens with the bits of their log-probabilities.
fn read(stream: TokenStream) -> (Vec<(TokenId, u32)>, Counts) {
    let mut tokens = Vec::new();
    for event in stream {
        match event.unwrap() {
            Event::Token { id, logprob, .. } => tokens.push((id, logprob.unwrap().to_bits())),
            Event::Started { .. } => {}
            Event::PromptToken { .. } => panic!("nobody asked for it"),
            Event::Finished { usage, .. } => return (tokens, usage.counts),
        }
    }
    panic!("a stream without an end");
}

#[test]
fn company_changes_no_token_behind_position_4096() {
    // One whose layers share keys and values, and one whose rows pick experts.
    for variant in [Variant::E2b, Variant::Moe26b] {
        let mut tiny = Tiny::new(variant, QuantType::Q8_0);
        tiny.dimensions.window = 40;
        let requests = requests(&tiny);
        let solo = start(&tiny, |config| config.prefix_reuse = PrefixReuse::Disabled);
        let alone: Vec<_> = (requests.iter())
            .map(|request| read(solo.submit(request.clone()).unwrap()).0)
            .collect();
        // A tiny model repeats itself, but never in the same words.
        let distinct: BTreeSet<_> = alone.iter().flatten().collect();
        assert!(distinct.len() > 400, "{variant:?} says nothing");

        let crowded = start(&tiny, |config| {
            config.max_sequences = 4;
            config.prefill_rows = 20;
            // Two of the long ones, and what the short ones leave: they are of another lane, which keeps it.
            config.pages.full = 282;
            config.pages.sliding = 24;
        });
        let streams: Vec<_> = (requests.iter())
            .map(|request| crowded.submit(request.clone()).unwrap())
            .collect();
        let mut cached = 0;
        for (n, (stream, alone)) in streams.into_iter().zip(&alone).enumerate() {
            let (answer, counts) = read(stream);
            assert_eq!(&answer, alone, "{variant:?}, request {n}");
            cached += counts.cached_tokens;
        }
        // Those that share a prefix compute it side by side; whoever comes later finds it.
        let again = crowded.submit(requests[2].clone()).unwrap();
        let (answer, counts) = read(again);
        assert_eq!(answer, alone[2], "{variant:?}, again");
        assert!(
            cached + counts.cached_tokens > 4000,
            "{variant:?} reused nothing"
        );
    }
}
