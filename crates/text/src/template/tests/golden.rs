//! Prompts held to published implementations, and to the demo model's reference.

use super::*;
use crate::{Specials, TokenId};

#[test]
fn the_demo_models_reference_prompts_come_out_exactly() {
    let golden: Value =
        serde_json::from_str(include_str!("../../../../../assets/golden.json")).unwrap();
    let template = demo();
    for case in golden["cases"].as_array().unwrap() {
        let expected: Vec<TokenId> = serde_json::from_value(case["prompt_ids"].clone()).unwrap();
        let text = case["prompt_text"].as_str().unwrap();
        let ids = if let Some(messages) = case.get("messages") {
            let messages: Vec<Message> = serde_json::from_value(messages.clone()).unwrap();
            let tools = case.get("tools").cloned().unwrap_or(json!([]));
            let tools: Vec<Tool> = serde_json::from_value(tools).unwrap();
            let options = RenderOptions {
                thinking: case.get("enable_thinking") == Some(&json!(true)),
                ..RenderOptions::default()
            };
            let rendered = template.render(&messages, &tools, &options).unwrap();
            assert_eq!(rendered.text(), text);
            DEMO_TOKENIZER.encode_rendered(&rendered)
        } else {
            DEMO_TOKENIZER.encode_prompt(text, Specials::Ignore)
        };
        assert_eq!(ids, expected, "{}", case["name"]);
    }
}

/// Renders of a published implementation: see `tests/data/render_templates.py`.
#[test]
fn random_conversations_render_as_jinja2_does() {
    // Straight from the text: a `Value` between would lose digits of large integers.
    #[derive(serde::Deserialize)]
    struct Case {
        messages: Vec<Message>,
        tools: Vec<Tool>,
        thinking: bool,
        generation_prompt: bool,
        renders: std::collections::HashMap<String, Option<String>>,
    }

    let mut renders = Vec::new();
    let compressed = include_bytes!("../../../tests/data/renders.json.xz");
    lzma_rs::xz_decompress(&mut std::io::Cursor::new(compressed), &mut renders).unwrap();
    let cases: Vec<Case> = serde_json::from_slice(&renders).unwrap();
    let mut compared = 0;
    for (name, source) in [
        ("31b", GEMMA_31B),
        ("31b-interleaved", GEMMA_31B_INTERLEAVED),
    ] {
        let template = template(source);
        for (number, case) in cases.iter().enumerate() {
            let options = RenderOptions {
                thinking: case.thinking,
                add_generation_prompt: case.generation_prompt,
                unix_time: None,
            };
            let (messages, tools) = (&case.messages, &case.tools);
            let rendered = template.render(messages, tools, &options).unwrap();
            let Some(expected) = &case.renders[name] else {
                continue;
            };
            compared += 1;
            assert_eq!(
                rendered.text(),
                expected.as_str(),
                "{name}, conversation {number}: {messages:#?}"
            );
        }
    }
    assert!(compared > 280, "{compared}");
}
