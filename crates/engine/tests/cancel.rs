//! Cancelling in the middle of a long chunk on the CPU: the batch is interrupted, and nobody waits for its end.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use carat_cpu::{CpuBackend, CpuConfig, Isa};
use carat_engine::{EngineConfig, EngineHandle, Event, FinishReason, ModelFacts, Request};
use carat_gguf::QuantType;
use carat_model::{TokenId, gemma4, sampling::Sampling};
use carat_testkit::tiny::{Tiny, Variant};

/// Rows of the chunk: a batch of them takes long on one thread without vector instructions.
const ROWS: usize = 2000;

fn answer(engine: &EngineHandle, request: Request) -> Vec<TokenId> {
    let mut tokens = Vec::new();
    for event in engine.submit(request).unwrap() {
        if let Event::Token { id, .. } = event.unwrap() {
            tokens.push(id);
        }
    }
    tokens
}

#[test]
fn a_long_chunk_does_not_hold_up_a_cancellation() {
    let tiny = Tiny::new(Variant::Dense12b, QuantType::Q8_0);
    let model = tiny.model();
    let plan = gemma4::plan(&model);
    let mut config = EngineConfig::comfortable(4096, 2, ROWS, ModelFacts::from(&plan));
    config.prefill_rows = ROWS;
    let backend = Box::new(CpuBackend::new(&CpuConfig {
        threads: Some(1),
        isa: Some(Isa::Scalar),
        ..CpuConfig::default()
    }));
    let engine = EngineHandle::start(config, backend, plan, Arc::clone(&model.weights)).unwrap();
    let long = |seed: usize| Request {
        max_tokens: Some(1),
        sampling: Sampling::greedy(),
        ..Request::new(tiny.prompt(ROWS + seed)[seed..].to_vec())
    };
    let begun = Instant::now();
    let expected = answer(&engine, long(0));
    let whole = begun.elapsed();
    // Operations of a layer are a small part of the batch each. The best of a few: the machine may pause now and then.
    let waited = (1..=5).filter_map(|n| cancelled_after(&engine, long(n)));
    let waited = waited.min().expect("one is cancelled in its batch");
    assert!(waited < whole / 4, "{waited:?} of a batch of {whole:?}");

    // What was interrupted has left nothing behind.
    assert_eq!(answer(&engine, long(0)), expected);
}

/// Cancels a request in its first batch; returns how long it goes on. `None` if that was over before the cancellation came.
fn cancelled_after(engine: &EngineHandle, request: Request) -> Option<Duration> {
    let begun = Instant::now();
    let mut stream = engine.submit(request).unwrap();
    while engine
        .snapshot()
        .batch_since
        .is_none_or(|since| since < begun)
    {
        std::hint::spin_loop();
    }
    let cancelled = Instant::now();
    stream.cancel();
    let mut end = stream.wait(Duration::from_mins(10)).unwrap().unwrap();
    if matches!(end, Event::Started { .. }) {
        end = stream.wait(Duration::from_mins(10)).unwrap().unwrap();
    }
    let waited = cancelled.elapsed();
    match end {
        Event::Finished { reason, .. } => {
            assert_eq!(reason, FinishReason::Cancelled);
            Some(waited)
        }
        Event::Token { .. } => None,
        _ => panic!("{end:?}"),
    }
}
