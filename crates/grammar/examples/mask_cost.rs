//! Cost of masks and of compiling on the published vocabulary, by kind of answer.
#![expect(clippy::print_stdout, reason = "printing figures is its purpose")]

#[path = "../tests/support/mod.rs"]
mod support;

use std::{
    sync::LazyLock,
    time::{Duration, Instant},
};

use carat_engine::Constraint;
use carat_grammar::{Answer, Format, Grammars, Settings, Thinking, ToolChoice, Tools};
use serde_json::{Value, json};
use support::{GEMMA, Model, Random, tool};

fn main() {
    let start = Instant::now();
    LazyLock::force(&GEMMA);
    println!("vocabulary, tokenizer and slices: {:.0?}", start.elapsed());
    println!(
        "{:<28} compile   first     p50      p99      max      accept   forced",
        "answer"
    );
    let schema = |schema: Value| Answer {
        format: Some(Format::JsonSchema {
            schema,
            strict: true,
        }),
        ..Answer::default()
    };
    let tools: Vec<_> = (0..8)
        .map(|n| {
            let parameters = json!({
                "type": "object",
                "properties": {
                    "city": {"type": "string"},
                    "days": {"type": "integer", "minimum": 1, "maximum": 14},
                    "unit": {"enum": ["c", "f"]},
                    "tags": {"type": "array", "items": {"type": "string"}},
                },
                "required": ["city", "days"],
            });
            tool(&format!("get_thing_{n}"), parameters)
        })
        .collect();
    let wide: serde_json::Map<String, Value> = (0..60)
        .map(|n| (format!("property_{n}"), json!({"anyOf": [{"type": "string"}, {"type": "number"}, {"type": "boolean"}, {"type": "null"}]})))
        .collect();
    let many = [tool(
        "f",
        json!({"type": "object", "properties": wide.clone()}),
    )];
    let called = |tools, thinking| Answer {
        tools: Some(Tools {
            tools,
            choice: ToolChoice::Required,
            parallel: true,
        }),
        thinking,
        ..Answer::default()
    };
    let person = json!({
        "type": "object",
        "properties": {
            "name": {"type": "string"},
            "age": {"type": "integer", "minimum": 0, "maximum": 150},
            "tags": {"type": "array", "items": {"type": "string"}},
        },
        "required": ["name", "age", "tags"],
        "additionalProperties": false,
    });
    let regex = |text: &str| Answer {
        format: Some(Format::Regex(text.to_owned())),
        ..Answer::default()
    };
    let cases = [
        ("object of three", schema(person)),
        ("any object", schema(json!({"type": "object"}))),
        (
            "short strings",
            schema(json!({"type": "array", "items": {"type": "string", "maxLength": 20}})),
        ),
        (
            "e-mail",
            schema(json!({"type": "array", "items": {"type": "string", "format": "email"}})),
        ),
        (
            "60 properties, 4-way anyOf",
            schema(json!({"type": "object", "properties": wide})),
        ),
        ("8 tools", called(&tools, Thinking::Off)),
        ("tool of 60 properties", called(&many, Thinking::Off)),
        ("(a|b)*a(a|b){20}", regex("(a|b)*a(a|b){20}")),
        (".*x.{200}y", regex(".*x.{200}y")),
    ];
    for (name, answer) in &cases {
        report(&GEMMA, name, answer);
    }
    report_crowds(&cases);
}

/// 32 answers of each kind at once.
fn report_crowds(cases: &[(&str, Answer<'_>)]) {
    let asked = Settings {
        masks_ahead: false,
        ..Settings::default()
    };
    let plain = Grammars::with(asked, GEMMA.tokenizer.clone()).unwrap();
    println!("\n32 answers, from their last tokens to all masks of the next, by kind of answer");
    println!(
        "{:<28} one thread p50   p99      several p50      p99      4 ms later p50   p99",
        ""
    );
    for (name, answer) in cases {
        print!("{name:<28}");
        for (grammars, pause) in [
            (&plain, Duration::ZERO),
            (&GEMMA.grammars, Duration::ZERO),
            (&GEMMA.grammars, Duration::from_millis(4)),
        ] {
            let times = crowd(&GEMMA, grammars, answer, pause);
            print!(" {:<16.1?} {:<8.1?}", at(&times, 0.5), at(&times, 0.99));
        }
        println!();
    }
}

/// Time from the tokens of 32 answers, with a forward pass of so long after them, to the masks of all; sorted.
fn crowd(model: &Model, grammars: &Grammars, answer: &Answer<'_>, pass: Duration) -> Vec<Duration> {
    let source = grammars.compile(answer).unwrap();
    let source = source.expect("the answer is constrained").source;
    let random = &mut Random(1);
    let mut answers: Vec<(usize, Box<dyn Constraint>)> =
        (0..32).map(|_| (0, source.start())).collect();
    let mut masks = vec![model.mask(); answers.len()];
    let mut times = Vec::new();
    for _ in 0..100 {
        for ((length, constraint), mask) in answers.iter_mut().zip(&masks) {
            *length += 1;
            match support::walk::step(model, mask, random, *length) {
                Some(token) if *length < 80 => constraint.accept(token),
                _ => (*length, *constraint) = (0, source.start()),
            }
            while let Some(token) = constraint.forced() {
                constraint.accept(token);
                if model.tokenizer.vocab().is_stop(token) {
                    (*length, *constraint) = (0, source.start());
                    break;
                }
            }
        }
        if !pass.is_zero() {
            #[expect(clippy::disallowed_methods, reason = "stands for a device at work")]
            std::thread::sleep(pass);
        }
        let begun = Instant::now();
        for ((_, constraint), mask) in answers.iter_mut().zip(&mut masks) {
            mask.clear();
            constraint.mask(mask);
        }
        times.push(begun.elapsed());
    }
    times.sort_unstable();
    times
}

fn at(times: &[Duration], share: f64) -> Duration {
    let place = (times.len() as f64 * share) as usize;
    times.get(place).copied().unwrap_or_default()
}

fn report(model: &Model, name: &str, answer: &Answer<'_>) {
    let start = Instant::now();
    let compiled = model.grammars.compile(answer).unwrap();
    let compile = start.elapsed();
    let source = compiled.expect("the answer is constrained").source;
    let (mut masks, mut accepts) = (Vec::new(), Vec::new());
    let mut first = Duration::ZERO;
    let (mut tokens, mut forced) = (0, 0);
    let random = &mut Random(1);
    let mut mask = model.mask();
    for _ in 0..40 {
        let mut constraint = source.start();
        for step in 0..80 {
            tokens += 1;
            mask.clear();
            if let Some(token) = constraint.forced() {
                forced += 1;
                mask.allow(token);
            } else {
                let start = Instant::now();
                constraint.mask(&mut mask);
                masks.push(start.elapsed());
                if step == 0 {
                    first = first.max(start.elapsed());
                }
            }
            let Some(token) = support::walk::step(model, &mask, random, step) else {
                break;
            };
            let start = Instant::now();
            constraint.accept(token);
            accepts.push(start.elapsed());
        }
    }
    masks.sort_unstable();
    accepts.sort_unstable();
    println!(
        "{name:<28} {compile:<9.1?} {first:<9.1?} {:<8.1?} {:<8.1?} {:<8.1?} {:<8.1?} {forced} of {tokens}",
        at(&masks, 0.5),
        at(&masks, 0.99),
        masks.last().copied().unwrap_or_default(),
        at(&accepts, 0.5),
    );
}
