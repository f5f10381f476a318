//! The second turn of a long conversation over the CPU backend: after other work has taken its pages, and after a restart, the new
//! tokens alone are computed, and the answer is the same.

use std::{path::Path, sync::Arc};

use carat_cpu::{CpuBackend, CpuConfig};
use carat_engine::{
    Counts, DiskConfig, EngineConfig, EngineHandle, Event, MissReason, ModelFacts, Namespace,
    Request,
};
use carat_gguf::QuantType;
use carat_model::{
    TokenId, gemma4,
    kv::{PAGE_TOKENS, PerGroup, pages_of},
    sampling::Sampling,
};
use carat_testkit::tiny::{Tiny, Variant};

const TURN: usize = 8192;
const NEXT: usize = 64;
const CONTEXT: usize = TURN + NEXT + 32;

fn start(tiny: &Tiny, host_pages: PerGroup<usize>, disk: Option<&Path>) -> EngineHandle {
    let model = tiny.model();
    let plan = gemma4::plan(&model);
    // Room for one conversation.
    let mut config = EngineConfig::comfortable(CONTEXT, 1, 512, ModelFacts::from(&plan));
    config.host_pages = host_pages;
    if let Some(folder) = disk {
        config.keep_on_disk(DiskConfig {
            folder: folder.to_owned(),
            namespace: Namespace::new([b"tiny".as_slice()]),
            max_bytes: 1 << 30,
        });
    }
    let backend = Box::new(CpuBackend::new(&CpuConfig::default()));
    EngineHandle::start(config, backend, plan, Arc::clone(&model.weights)).unwrap()
}

fn ask(engine: &EngineHandle, prompt: &[TokenId]) -> (Vec<TokenId>, Counts) {
    let request = Request {
        max_tokens: Some(8),
        sampling: Sampling::greedy(),
        ignore_eos: true,
        ..Request::new(prompt.to_vec())
    };
    let mut tokens = Vec::new();
    for event in engine.submit(request).unwrap() {
        match event.unwrap() {
            Event::Token { id, .. } => tokens.push(id),
            Event::Started { .. } => {}
            Event::PromptToken { .. } => panic!("nobody asked for it"),
            Event::Finished { usage, .. } => return (tokens, usage.counts),
        }
    }
    panic!("a stream without an end");
}

/// Waits until all that ended requests have left is on disk.
fn settle(engine: &EngineHandle, pages: u64) {
    let begun = std::time::Instant::now();
    while engine.snapshot().stats.store.unwrap().pages_written < pages {
        assert!(begun.elapsed().as_secs() < 60, "nothing is written");
        std::thread::yield_now();
    }
}

#[test]
fn the_second_turn_of_a_long_conversation_computes_its_new_tokens_alone() {
    let tiny = Tiny::new(Variant::E4b, QuantType::Q8_0);
    let text = tiny.prompt(TURN + NEXT + 100);
    let first = &text[..TURN];
    let second = &text[..TURN + NEXT];
    let other: Vec<TokenId> = text.iter().rev().take(CONTEXT - 8).copied().collect();
    // The last token of a prompt is always computed, and pages are found whole.
    let found = TURN / PAGE_TOKENS * PAGE_TOKENS;
    assert_eq!(found, TURN);

    let none = PerGroup::default();
    let engine = start(&tiny, none, None);
    ask(&engine, first);
    let (right, counts) = ask(&engine, second);
    assert_eq!(counts.cached_tokens, found, "{counts:?}");
    ask(&engine, &other);
    let (_, counts) = ask(&engine, second);
    assert_eq!(counts.cached_tokens, 0, "nobody kept it: {counts:?}");
    assert_eq!(counts.miss, Some(MissReason::Evicted));
    drop(engine);

    let all = pages_of(CONTEXT);
    let host = PerGroup {
        full: all,
        sliding: all,
    };
    let engine = start(&tiny, host, None);
    ask(&engine, first);
    ask(&engine, &other);
    let (answer, counts) = ask(&engine, second);
    assert_eq!(counts.cached_tokens, found, "{counts:?}");
    assert_eq!((counts.cached_in_host, answer == right), (found, true));
    drop(engine);

    let folder = tempfile::tempdir().unwrap();
    let disk = Some(folder.path());
    let engine = start(&tiny, none, disk);
    ask(&engine, first);
    settle(&engine, (TURN / PAGE_TOKENS) as u64);
    ask(&engine, &other);
    let (answer, counts) = ask(&engine, second);
    assert_eq!(counts.cached_tokens, found, "{counts:?}");
    assert_eq!((counts.cached_on_disk, answer == right), (found, true));
    drop(engine);

    let engine = start(&tiny, none, disk);
    let (answer, counts) = ask(&engine, second);
    // The answer to the second turn was kept as well, when the engine stopped.
    assert!(counts.cached_on_disk >= found, "{counts:?}");
    assert_eq!(answer, right);
}
