//! Many random walks, judged by a validator that knows nothing of grammars.

use std::{fmt::Display, ops::Range};

use carat_engine::ConstraintSource;
use carat_grammar::{Answer, Format, Thinking, ToolChoice, Tools};
use carat_model::TokenId;
use carat_text::Tool;
use serde_json::Value;

use super::{
    Model, Random, schemas, tool,
    walk::{Walk, walk},
};

/// Longest walk, in tokens.
const MAX_TOKENS: usize = 400;

/// Kind of answers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
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
    /// Fails if an answer was wrong, or a smaller share than this came to its end.
    pub(crate) fn check(&self, least: f64) {
        assert!(self.wrong.is_empty(), "{}", self.wrong.join("\n"));
        let all = self.finished + self.long + self.refused + self.out_of_range;
        assert!(
            self.finished as f64 > all as f64 * least,
            "too few came to an end: {self:?}"
        );
    }
}

/// Walks with these seeds.
pub(crate) fn run(model: &Model, kind: Kind, seeds: Range<u64>) -> Report {
    let mut report = Report::default();
    for seed in seeds {
        let (case, mut random) = Case::new(kind, seed);
        let Some(source) = case.compile(model, &mut report) else {
            continue;
        };
        match walk(model, source.start().as_mut(), &mut random, MAX_TOKENS) {
            Walk::Finished(ids) => case.judge(model, &ids, &mut report),
            Walk::Long => report.long += 1,
            Walk::Stuck(ids) => {
                let text = model.show(&ids);
                case.wrong(format_args!("stuck after {text:?}"), &mut report);
            }
        }
    }
    report
}

/// A random schema, and what it is asked for.
pub(crate) struct Case {
    seed: u64,
    kind: Kind,
    schema: Value,
    thinking: Thinking,
    tools: [Tool; 1],
}

impl Case {
    /// The case of a seed, and what the seed is good for besides.
    pub(crate) fn new(kind: Kind, seed: u64) -> (Case, Random) {
        let mut random = Random(seed.wrapping_mul(0x5851_f42d_4c95_7f2d));
        let schema = match kind {
            _ if random.one_in(12) => schemas::recursive(&mut random),
            Kind::Json => schemas::schema(&mut random, 3),
            Kind::Calls => schemas::object(&mut random, 3),
        };
        let thinking = if random.one_in(4) {
            let budget = Some(random.below(5));
            Thinking::Allowed { budget }
        } else {
            Thinking::Off
        };
        let case = Case {
            seed,
            kind,
            thinking,
            tools: [tool("f", schema.clone())],
            schema,
        };
        (case, random)
    }

    /// `None` for what nothing fits; other refusals are wrong.
    pub(crate) fn compile(&self, model: &Model, report: &mut Report) -> Option<ConstraintSource> {
        let free = Answer {
            thinking: self.thinking,
            ..Answer::default()
        };
        let answer = match self.kind {
            Kind::Json => Answer {
                format: Some(Format::JsonSchema {
                    schema: self.schema.clone(),
                    strict: true,
                }),
                ..free
            },
            Kind::Calls => Answer {
                tools: Some(Tools {
                    tools: &self.tools,
                    choice: ToolChoice::Required,
                    parallel: true,
                }),
                ..free
            },
        };
        match model.grammars.compile(&answer) {
            Ok(compiled) => Some(compiled.expect("the answer is constrained").source),
            Err(error) => {
                report.refused += 1;
                let expected = ["nsatisfiable", "empty", "no text"];
                if !expected.iter().any(|word| error.to_string().contains(word)) {
                    self.wrong(error, report);
                }
                None
            }
        }
    }

    /// Holds an answer that came to its end against the schema.
    pub(crate) fn judge(&self, model: &Model, ids: &[TokenId], report: &mut Report) {
        let text = model.show(ids);
        let reply = model.parse(ids, &self.tools);
        let values: Vec<Value> = match self.kind {
            Kind::Json => match serde_json::from_str(&reply.content) {
                Ok(value) => vec![value],
                Err(error) if error.to_string().contains("out of range") => {
                    report.out_of_range += 1;
                    return;
                }
                Err(error) => return self.wrong(format_args!("{error}: {text:?}"), report),
            },
            Kind::Calls => {
                let calls = reply.tool_calls.iter();
                let values: Vec<_> = calls.map(|call| call.arguments.clone()).collect();
                let is_clean = reply.invalid_calls.is_empty() && reply.content.is_empty();
                if values.is_empty() || !is_clean {
                    return self.wrong(format_args!("{reply:?}: {text:?}"), report);
                }
                values
            }
        };
        let options = jsonschema::options().should_validate_formats(true);
        let validator = options.build(&self.schema).expect("the schema is a schema");
        let error = values
            .iter()
            .find_map(|value| validator.validate(value).err());
        match error {
            None => report.finished += 1,
            Some(_) if self.kind == Kind::Json && has_long_number(&text) => {
                report.out_of_range += 1;
            }
            Some(error) => self.wrong(format_args!("{error}: {text:?}"), report),
        }
    }

    fn wrong(&self, what: impl Display, report: &mut Report) {
        let Case { seed, schema, .. } = self;
        report.wrong.push(format!("{seed}: {what}: {schema}"));
    }
}

/// True where digits go on past what a float holds exactly.
fn has_long_number(text: &str) -> bool {
    let is_digit = |c: char| c.is_ascii_digit();
    text.split(|c| !is_digit(c)).any(|digits| digits.len() > 15)
}
