//! Batch-invariant mode over the CPU backend: a request has the same tokens, with the same log-probabilities to the bit, alone and
//! among many, whether its prompt is read in one piece or in the gaps that others leave. Without it the company chooses the class
//! of kernels, on processors that have two.

use std::{path::Path, sync::Arc};

use carat_cpu::{CpuBackend, CpuConfig};
use carat_engine::{
    EngineConfig, EngineHandle, Event, ModelFacts, PrefixReuse, Request, TokenStream,
};
use carat_gguf::Gguf;
use carat_model::{Model, TokenId, backend::Batching, gemma4, sampling::Sampling};

const CONTEXT: usize = 512;
const OTHERS: usize = 64;

fn start(side_by_side: usize, change: impl FnOnce(&mut EngineConfig)) -> EngineHandle {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../assets/pip-q8_0.gguf");
    let model = Model::load(Arc::new(Gguf::open(&path).unwrap())).unwrap();
    let plan = gemma4::plan(&model);
    let facts = ModelFacts::from(&plan);
    let mut config = EngineConfig::comfortable(CONTEXT, side_by_side, 512, facts);
    config.batching = Batching::Invariant;
    change(&mut config);
    let backend = Box::new(CpuBackend::new(&CpuConfig::default()));
    EngineHandle::start(config, backend, plan, Arc::clone(&model.weights)).unwrap()
}

/// Prompts of all lengths, half of them greedy and half sampled hot.
fn request(n: usize) -> Request {
    let length = 3 + 37 * n % 190;
    let token = |i: usize| (300 + (i * i * 7 + n * 1013) % 3500) as TokenId;
    Request {
        max_tokens: Some(12),
        sampling: if n.is_multiple_of(2) {
            Sampling::greedy()
        } else {
            Sampling {
                temperature: 1.5,
                seed: n as u64,
                ..Sampling::default()
            }
        },
        logprobs: Some(0),
        ignore_eos: true,
        ..Request::new((0..length).map(token).collect())
    }
}

fn read(stream: TokenStream) -> Vec<(TokenId, u32)> {
    let mut tokens = Vec::new();
    for event in stream {
        match event.unwrap() {
            Event::Token { id, logprob, .. } => tokens.push((id, logprob.unwrap().to_bits())),
            Event::Started { .. } => {}
            Event::PromptToken { .. } => panic!("nobody asked for it"),
            Event::Finished { .. } => return tokens,
        }
    }
    panic!("a stream without an end");
}

#[test]
fn tokens_are_the_same_alone_and_among_64_others() {
    let asked: Vec<usize> = (0..=OTHERS).collect();
    let solo = start(1, |config| config.prefix_reuse = PrefixReuse::Disabled);
    let watched = [0, 1, 5, 8, 17, 30, 41, 64];
    let alone = watched.map(|n| read(solo.submit(request(n)).unwrap()));
    drop(solo);
    let crowded = start(OTHERS + 1, |config| config.prefill_rows = 70);
    let streams: Vec<_> = asked
        .iter()
        .map(|n| crowded.submit(request(*n)).unwrap())
        .collect();
    let crowd: Vec<_> = streams.into_iter().map(read).collect();
    for (n, alone) in watched.into_iter().zip(&alone) {
        assert_eq!(alone.len(), 12);
        assert_eq!(&crowd[n], alone, "request {n}");
    }
}
