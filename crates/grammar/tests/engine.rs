//! Constraints through the engine, on the demo model at a temperature that makes nonsense of everything it is free to say.

mod support;

use std::{
    collections::VecDeque,
    io::{self, Write},
    ops::Range,
    sync::Arc,
};

use carat_cpu::{CpuBackend, CpuConfig};
use carat_engine::{
    ConstraintSource, EngineConfig, EngineHandle, Event, FinishReason, ModelFacts, Request,
    TokenStream,
};
use carat_grammar::{Answer, Format, Start, Thinking, ToolChoice, Tools};
use carat_model::{Model, TokenId, gemma4, sampling::Sampling};
use serde_json::{Value, json};

use support::{
    DEMO, demo_gguf, tool,
    walks::{Case, Kind, Report},
};

/// Requests at once.
const CROWD: usize = 16;
/// Share of the answers that must come to their end: at this temperature a string goes on and on.
const LEAST: f64 = 0.5;

fn engine() -> EngineHandle {
    let model = Model::load(Arc::new(demo_gguf())).unwrap();
    let plan = gemma4::plan(&model);
    let config = EngineConfig::comfortable(512, 8, 64, ModelFacts::from(&plan));
    let backend = Box::new(CpuBackend::new(&CpuConfig {
        threads: Some(1),
        ..CpuConfig::default()
    }));
    EngineHandle::start(config, backend, plan, model.weights).unwrap()
}

/// Answers of a crowd: each constraint is one request, all at once.
fn answers(
    engine: &EngineHandle,
    sources: impl Iterator<Item = ConstraintSource>,
    max_tokens: usize,
) -> Vec<(Vec<TokenId>, FinishReason)> {
    let streams: Vec<_> = sources
        .zip(1..)
        .map(|(source, seed)| ask(engine, source, seed, max_tokens))
        .collect();
    streams.into_iter().map(read).collect()
}

fn ask(
    engine: &EngineHandle,
    source: ConstraintSource,
    seed: u64,
    max_tokens: usize,
) -> TokenStream {
    let prompt = DEMO.encode("<bos><|turn>user\nTell me something.<turn|>\n<|turn>model\n");
    let request = Request {
        max_tokens: Some(max_tokens),
        sampling: Sampling {
            temperature: 2.0,
            seed,
            ..Sampling::default()
        },
        stop_tokens: DEMO.tokenizer.vocab().stop_tokens().to_vec(),
        constraint: Some(source),
        ..Request::new(prompt)
    };
    engine.submit(request).unwrap()
}

fn read(stream: TokenStream) -> (Vec<TokenId>, FinishReason) {
    let mut ids = Vec::new();
    for event in stream {
        match event {
            Ok(Event::Token { id, .. }) => ids.push(id),
            Ok(Event::Started { .. }) => {}
            Ok(Event::PromptToken { .. }) => panic!("nobody asked for the prompt"),
            Ok(Event::Finished { reason, .. }) => return (ids, reason),
            Err(error) => panic!("{error}"),
        }
    }
    panic!("a stream without an end")
}

/// Random schemas with these seeds, a crowd of them at any time.
fn random_schemas(kind: Kind, seeds: Range<u64>) -> Report {
    let engine = engine();
    let mut report = Report::default();
    let mut under_way = VecDeque::new();
    let finish = |under_way: &mut VecDeque<(Case, TokenStream)>, report: &mut Report| {
        let (case, stream) = under_way.pop_front().expect("one is under way");
        match read(stream) {
            (ids, FinishReason::Stop { .. }) => case.judge(&DEMO, &ids, report),
            (_, FinishReason::Length) => report.long += 1,
            (ids, other) => panic!("{other:?}: {}", DEMO.show(&ids)),
        }
    };
    for seed in seeds {
        let (case, _) = Case::new(kind, seed);
        if let Some(source) = case.compile(&DEMO, &mut report) {
            let stream = ask(&engine, source, seed, 400);
            under_way.push_back((case, stream));
        }
        if under_way.len() == CROWD {
            finish(&mut under_way, &mut report);
        }
    }
    while !under_way.is_empty() {
        finish(&mut under_way, &mut report);
    }
    report
}

#[test]
fn answers_to_random_schemas_fit() {
    for kind in [Kind::Json, Kind::Calls] {
        random_schemas(kind, 0..100).check(LEAST);
    }
}

#[test]
#[ignore = "takes minutes: cargo test --release -p carat-grammar --test engine -- --ignored"]
fn ten_thousand_answers_to_random_schemas_fit() {
    ten_thousand(Kind::Json);
}

#[test]
#[ignore = "takes minutes: cargo test --release -p carat-grammar --test engine -- --ignored"]
fn ten_thousand_calls_of_random_tools_fit() {
    ten_thousand(Kind::Calls);
}

fn ten_thousand(kind: Kind) {
    let report = random_schemas(kind, 0..10_000);
    let _ = writeln!(io::stdout(), "{kind:?}: {report:?}");
    report.check(LEAST);
}

fn person() -> Value {
    json!({
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 12},
            "age": {"type": "integer", "minimum": 0, "maximum": 150},
            "tags": {"type": "array", "items": {"enum": ["a", "b", "c d"]}, "maxItems": 3},
            "more": {"anyOf": [{"type": "null"}, {"type": "number", "minimum": 0, "maximum": 9}]},
        },
        "required": ["name", "age"],
        "additionalProperties": false,
    })
}

#[test]
fn answers_of_the_engine_fit() {
    let engine = engine();
    let schema = person();
    let validator = jsonschema::validator_for(&schema).unwrap();
    let tools = [tool("save", schema.clone()), tool("forget", Value::Null)];
    let thinking = Thinking::Allowed { budget: Some(6) };
    let json = Answer {
        format: Some(Format::JsonSchema {
            schema,
            strict: true,
        }),
        thinking,
        start: Start::InThought,
        ..Answer::default()
    };
    let call = Answer {
        tools: Some(Tools {
            tools: &tools,
            choice: ToolChoice::Required,
            parallel: true,
        }),
        thinking,
        start: Start::InThought,
        ..Answer::default()
    };
    let sources = [json, call].map(|answer| {
        let compiled = DEMO.grammars.compile(&answer).unwrap();
        compiled.expect("the answer is constrained").source
    });
    let count = 60;
    let crowd = (0..count).map(|n| sources[n % 2].clone());
    let (mut texts, mut calls, mut cut) = (0, 0, 0);
    for (n, (ids, reason)) in answers(&engine, crowd, 250).into_iter().enumerate() {
        let all = [DEMO.encode("<|channel>thought\n"), ids].concat();
        let text = DEMO.show(&all);
        match reason {
            FinishReason::Stop { .. } => {}
            FinishReason::Length => {
                cut += 1;
                continue;
            }
            other => panic!("{other:?}: {text}"),
        }
        let reply = DEMO.parse(&all, &tools);
        if n % 2 == 0 {
            let value =
                serde_json::from_str(&reply.content).unwrap_or_else(|e| panic!("{e}: {text}"));
            assert!(validator.is_valid(&value), "{text}");
            texts += 1;
        } else {
            assert!(
                reply.invalid_calls.is_empty() && reply.content.is_empty(),
                "{text}"
            );
            assert!(!reply.tool_calls.is_empty(), "{text}");
            for call in &reply.tool_calls {
                let fits = match call.name.as_str() {
                    "save" => validator.is_valid(&call.arguments),
                    _ => call.arguments == json!({}),
                };
                assert!(fits, "{text}");
            }
            calls += 1;
        }
    }
    assert!(
        texts > 10 && calls > 10,
        "{texts} texts, {calls} calls, {cut} cut off"
    );
}

#[test]
fn a_choice_of_one_needs_no_model() {
    let engine = engine();
    let answer = Answer {
        format: Some(Format::Choice(vec![
            "Just this, and nothing else.".to_owned(),
        ])),
        ..Answer::default()
    };
    let source = DEMO.grammars.compile(&answer).unwrap().unwrap().source;
    let answers = answers(&engine, std::iter::once(source), 50);
    let (ids, reason) = &answers[0];
    assert_eq!(DEMO.show(ids), "Just this, and nothing else.");
    assert!(matches!(reason, FinishReason::Stop { .. }));
}
