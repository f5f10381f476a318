//! Many random walks, judged by a validator that knows nothing of grammars.

use std::ops::Range;

use carat_grammar::{Answer, Format, Thinking, ToolChoice, Tools};
use serde_json::Value;

use super::{
    Model, Random, schemas, tool,
    walk::{Walk, walk},
};

/// Longest walk, in tokens.
const MAX_TOKENS: usize = 400;

/// Kind of answers.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kind {
    Json,
    Calls,
}

/// Counts of walks by their end.
#[derive(Debug, Default)]
pub(crate) struct Report {
    pub(crate) finished: usize,
    pub(crate) long: usize,
    /// Schemas that nothing fits, or that are refused for another good reason.
    pub(crate) refused: usize,
    /// Numbers that JSON can write and the validator cannot hold.
    pub(crate) out_of_range: usize,
    pub(crate) wrong: Vec<String>,
}

impl Report {
    /// Fails if an answer was wrong, or too few were right to tell.
    pub(crate) fn check(&self) {
        assert!(self.wrong.is_empty(), "{}", self.wrong.join("\n"));
        let all = self.finished + self.long + self.refused + self.out_of_range;
        assert!(
            self.finished * 10 > all * 8,
            "too few came to an end: {self:?}"
        );
    }
}

/// Walks with these seeds.
pub(crate) fn run(model: &Model, kind: Kind, seeds: Range<u64>) -> Report {
    let mut report = Report::default();
    for seed in seeds {
        one(model, kind, seed, &mut report);
    }
    report
}

fn one(model: &Model, kind: Kind, seed: u64, report: &mut Report) {
    let random = &mut Random(seed.wrapping_mul(0x5851_f42d_4c95_7f2d));
    let schema = match kind {
        _ if random.one_in(12) => schemas::recursive(random),
        Kind::Json => schemas::schema(random, 3),
        Kind::Calls => schemas::object(random, 3),
    };
    let thinking = if random.one_in(4) {
        let budget = Some(random.below(5));
        Thinking::Allowed { budget }
    } else {
        Thinking::Off
    };
    let tools = [tool("f", schema.clone())];
    let answer = match kind {
        Kind::Json => Answer {
            format: Some(Format::JsonSchema {
                schema: schema.clone(),
                strict: true,
            }),
            thinking,
            ..Answer::default()
        },
        Kind::Calls => Answer {
            tools: Some(Tools {
                tools: &tools,
                choice: ToolChoice::Required,
                parallel: true,
            }),
            thinking,
            ..Answer::default()
        },
    };
    let compiled = match model.grammars.compile(&answer) {
        Ok(compiled) => compiled.expect("the answer is constrained"),
        Err(error) => {
            report.refused += 1;
            let expected = ["nsatisfiable", "empty", "no text"];
            if !expected.iter().any(|word| error.to_string().contains(word)) {
                report.wrong.push(format!("{seed}: {error}: {schema}"));
            }
            return;
        }
    };
    let mut constraint = compiled.source.start();
    let ids = match walk(model, constraint.as_mut(), random, MAX_TOKENS) {
        Walk::Finished(ids) => ids,
        Walk::Long => {
            report.long += 1;
            return;
        }
        Walk::Stuck(ids) => {
            let text = model.show(&ids);
            report
                .wrong
                .push(format!("{seed}: stuck after {text:?}: {schema}"));
            return;
        }
    };
    let text = model.show(&ids);
    let reply = model.parse(&ids, &tools);
    let values: Vec<Value> = match kind {
        Kind::Json => match serde_json::from_str(&reply.content) {
            Ok(value) => vec![value],
            Err(error) if error.to_string().contains("out of range") => {
                report.out_of_range += 1;
                return;
            }
            Err(error) => {
                report
                    .wrong
                    .push(format!("{seed}: {error}: {text:?}: {schema}"));
                return;
            }
        },
        Kind::Calls => {
            let calls = reply.tool_calls.iter();
            let values: Vec<_> = calls.map(|call| call.arguments.clone()).collect();
            let is_clean = reply.invalid_calls.is_empty() && reply.content.is_empty();
            if values.is_empty() || !is_clean {
                report
                    .wrong
                    .push(format!("{seed}: {reply:?}: {text:?}: {schema}"));
                return;
            }
            values
        }
    };
    let options = jsonschema::options().should_validate_formats(true);
    let validator = options.build(&schema).expect("the schema is a schema");
    let error = values
        .iter()
        .find_map(|value| validator.validate(value).err());
    match error {
        None => report.finished += 1,
        Some(_) if kind == Kind::Json && has_long_number(&text) => report.out_of_range += 1,
        Some(error) => {
            let wrong = format!("{seed}: {error}: {text:?}: {schema}");
            report.wrong.push(wrong);
        }
    }
}

/// True where digits go on past what a float holds exactly.
fn has_long_number(text: &str) -> bool {
    let is_digit = |c: char| c.is_ascii_digit();
    text.split(|c| !is_digit(c)).any(|digits| digits.len() > 15)
}
