//! Tests of rendering, a file for each of its concerns; here is what they share.

#![expect(
    clippy::needless_raw_string_hashes,
    reason = "expect-test writes snapshots this way"
)]

mod conversations;
mod fallback;
mod golden;
mod guard;
mod integers;
mod limits;
mod metered;
mod python;

use expect_test::Expect;
use serde_json::{Value, json};

use super::*;
use crate::{
    ToolCall,
    test_data::{DEMO, DEMO_TOKENIZER, GEMMA},
};

const GEMMA_31B: &str = include_str!("../../tests/data/gemma4-31b.jinja");
const GEMMA_31B_INTERLEAVED: &str = include_str!("../../tests/data/gemma4-31b-interleaved.jinja");

fn template(source: &str) -> ChatTemplate {
    ChatTemplate::new(source, GEMMA.vocab()).unwrap()
}

fn demo() -> ChatTemplate {
    ChatTemplate::from_metadata(DEMO.metadata(), DEMO_TOKENIZER.vocab()).unwrap()
}

fn weather_tool() -> Tool {
    serde_json::from_value(json!({
        "name": "get_weather", "description": "Weather in a city",
        "parameters": {"type": "object", "required": ["city"], "properties": {
            "days": {"type": ["integer", "null"]},
            "city": {"type": "string", "description": "Name"},
            "unit": {"type": "string", "enum": ["C", "F"]},
            "spots": {"type": "array", "items": {"type": "object", "properties": {"x": {"type": "number"}}}},
        }},
    }))
    .unwrap()
}

fn call(name: &str, arguments: Value) -> ToolCall {
    ToolCall {
        id: None,
        name: name.to_owned(),
        arguments,
    }
}

fn with_calls(content: &str, calls: Vec<ToolCall>) -> Message {
    Message {
        tool_calls: calls,
        ..Message::assistant(content)
    }
}

fn check(
    template: &ChatTemplate,
    messages: &[Message],
    tools: &[Tool],
    options: &RenderOptions,
    expected: &Expect,
) {
    let rendered = template.render(messages, tools, options).unwrap();
    expected.assert_eq(&rendered.text());
}

fn error_of(source: &str) -> String {
    match ChatTemplate::new(source, GEMMA.vocab()) {
        Err(error) => error.to_string(),
        Ok(template) => {
            let rendered = template.render(&[Message::user("x")], &[], &RenderOptions::default());
            rendered.unwrap_err().to_string()
        }
    }
}
