use std::time::{Duration, Instant};

use carat_engine::chat::ChatFinish;
use carat_grammar::Format;
use expect_test::{Expect, expect};
use serde_json::{Value, json};

use super::{super::samples, *};
use crate::ask::Prompt;

fn lines(endpoint: Endpoint) -> Lines {
    Lines {
        endpoint,
        model: "pip:latest".to_owned(),
        arrived: Instant::now(),
    }
}

/// The lines, with the clock's part of them checked and taken out.
fn read(bytes: &[u8]) -> Vec<Value> {
    assert_eq!(bytes.last(), Some(&b'\n'));
    let text = std::str::from_utf8(bytes).unwrap();
    text.lines()
        .map(|line| {
            let mut line: Value = serde_json::from_str(line).unwrap();
            let fields = line.as_object_mut().unwrap();
            let date = fields.shift_remove("created_at").unwrap();
            assert_eq!(
                date.as_str().map(str::len),
                Some("2026-01-01T00:00:00Z".len())
            );
            if fields["done"] == true {
                let total = fields.shift_remove("total_duration").unwrap();
                assert!(total.as_u64().unwrap() < Duration::from_mins(1).as_nanos() as u64);
            }
            line
        })
        .collect()
}

fn check(endpoint: Endpoint, outputs: Vec<Output>, expected: &Expect) {
    let read = read(&samples::bytes(lines(endpoint), outputs));
    let text: Vec<String> = read.iter().map(Value::to_string).collect();
    expected.assert_eq(&text.join("\n"));
}

#[test]
fn a_chat_is_a_line_per_piece_and_one_that_is_done() {
    let outputs = vec![
        samples::thinking("Hm."),
        samples::content("I ask."),
        samples::call("get_weather", json!({ "city": "Oslo" })),
        samples::finished(ChatFinish::ToolCalls),
    ];
    check(
        Endpoint::Chat,
        outputs,
        &expect![[r#"
        {"model":"pip:latest","message":{"role":"assistant","content":"","thinking":"Hm."},"done":false}
        {"model":"pip:latest","message":{"role":"assistant","content":"I ask."},"done":false}
        {"model":"pip:latest","message":{"role":"assistant","content":"","tool_calls":[{"id":"call_get_weather","function":{"name":"get_weather","arguments":{"city":"Oslo"}}}]},"done":false}
        {"model":"pip:latest","message":{"role":"assistant","content":""},"done":true,"done_reason":"stop","load_duration":0,"prompt_eval_count":10,"prompt_eval_duration":2000000,"eval_count":7,"eval_duration":3000000}"#]],
    );
}

#[test]
fn a_prompt_is_answered_beside_its_thought() {
    let outputs = vec![
        samples::thinking("Hm."),
        samples::content("Yes"),
        samples::finished(ChatFinish::Length),
    ];
    check(
        Endpoint::Generate,
        outputs,
        &expect![[r#"
        {"model":"pip:latest","response":"","thinking":"Hm.","done":false}
        {"model":"pip:latest","response":"Yes","done":false}
        {"model":"pip:latest","response":"","done":true,"done_reason":"length","load_duration":0,"prompt_eval_count":10,"prompt_eval_duration":2000000,"eval_count":7,"eval_duration":3000000}"#]],
    );
}

#[test]
fn a_failure_and_a_ping_are_lines_of_json() {
    let mut out = Vec::new();
    let mut lines = lines(Endpoint::Chat);
    lines.ping(&mut out);
    let ping = &read(&out)[0];
    assert_eq!(ping["message"]["content"], "");
    assert_eq!(ping["done"], false);
    out.clear();
    let error = ApiError::new(crate::error::Kind::EngineFailed, "the device is gone");
    lines.fail(&error, &mut out);
    assert_eq!(out, b"{\"error\":\"the device is gone\"}\n");
}

#[test]
fn lines_add_up_however_they_are_cut() {
    for endpoint in [Endpoint::Chat, Endpoint::Generate] {
        for pieces in samples::splits(samples::AWKWARD) {
            let mut outputs: Vec<Output> = pieces
                .iter()
                .map(|piece| samples::thinking(piece))
                .collect();
            outputs.extend(pieces.iter().map(|piece| samples::content(piece)));
            outputs.push(samples::finished(ChatFinish::Stop));
            let (mut content, mut thinking) = (String::new(), String::new());
            let read = read(&samples::bytes(lines(endpoint), outputs));
            for line in &read {
                let said = match endpoint {
                    Endpoint::Chat => &line["message"],
                    Endpoint::Generate => line,
                };
                let key = match endpoint {
                    Endpoint::Chat => "content",
                    Endpoint::Generate => "response",
                };
                content.push_str(said[key].as_str().unwrap());
                thinking.push_str(said["thinking"].as_str().unwrap_or(""));
            }
            assert_eq!(content, samples::AWKWARD);
            assert_eq!(thinking, samples::AWKWARD);
            let done = read.iter().filter(|line| line["done"] == true).count();
            assert_eq!(done, 1);
        }
    }
}

fn chat_ask(more: Value) -> Result<Ask, ApiError> {
    let mut request = json!({ "messages": [{ "role": "user", "content": "Hi" }] });
    if let (Value::Object(request), Value::Object(more)) = (&mut request, more) {
        request.extend(more);
    }
    serde_json::from_value::<ChatRequest>(request)
        .unwrap()
        .ask()
}

fn generate_ask(request: Value) -> Result<Ask, ApiError> {
    serde_json::from_value::<GenerateRequest>(request)
        .unwrap()
        .ask()
}

#[test]
fn options_reach_the_sampler() {
    let ask = chat_ask(json!({
        "options": {
            "num_predict": 7, "temperature": 0.5, "top_k": 3, "top_p": 0.9, "min_p": 0.1, "seed": 11,
            "stop": ["a", "b"], "repeat_penalty": 1.5, "num_ctx": 8192,
        },
        "format": "json",
    }))
    .unwrap();
    assert_eq!(ask.max_tokens, Some(7));
    assert_eq!(ask.stop, ["a", "b"]);
    assert_eq!(ask.sampling.temperature, Some(0.5));
    assert_eq!(ask.sampling.top_k, Some(3));
    assert_eq!(ask.sampling.top_p, Some(0.9));
    assert_eq!(ask.sampling.min_p, Some(0.1));
    assert_eq!(ask.sampling.seed, Some(11));
    assert_eq!(ask.sampling.repeat_penalty, Some(1.5));
    assert!(matches!(ask.format, Some(Format::JsonObject)));
    for all in [-1, -2] {
        let ask = chat_ask(json!({ "options": { "num_predict": all } })).unwrap();
        assert_eq!(ask.max_tokens, None);
    }
    let ask = chat_ask(json!({ "options": null, "format": { "type": "object" } })).unwrap();
    assert!(matches!(ask.format, Some(Format::JsonSchema { .. })));
}

#[test]
fn thinking_is_a_switch_or_a_level() {
    let thought = |think: Value| {
        let ask = chat_ask(json!({ "think": think })).unwrap();
        match ask.prompt {
            Prompt::Chat(conversation) => (conversation.thinking, ask.thinking_budget),
            Prompt::Texts(_) => panic!("no conversation"),
        }
    };
    assert_eq!(thought(Value::Null), (false, None));
    assert_eq!(thought(json!(true)), (true, None));
    assert_eq!(thought(json!("low")), (true, Some(1024)));
}

#[test]
fn a_prompt_is_a_question_unless_it_is_raw() {
    let ask = generate_ask(json!({ "system": "Be brief.", "prompt": "Hi" })).unwrap();
    let Prompt::Chat(conversation) = ask.prompt else {
        panic!("no conversation");
    };
    assert_eq!(conversation.messages.len(), 2);
    let ask = generate_ask(json!({ "prompt": "Once", "raw": true })).unwrap();
    assert!(matches!(ask.prompt, Prompt::Texts(texts) if texts.len() == 1));
}

#[test]
fn results_of_tools_may_come_by_name_or_id() {
    let ask = chat_ask(json!({ "messages": [
        { "role": "user", "content": "Weather?" },
        { "role": "assistant", "content": "", "reasoning_content": "", "reasoning": null, "thinking": "Hm.", "tool_calls": [
            { "id": "call_1", "function": { "name": "f", "arguments": { "a": 1 } } },
        ]},
        { "role": "tool", "tool_name": "f", "name": "f", "content": "sun" },
    ]}))
    .unwrap();
    let Prompt::Chat(conversation) = ask.prompt else {
        panic!("no conversation");
    };
    assert_eq!(conversation.messages[1].thinking, "Hm.");
    assert_eq!(conversation.messages[2].name.as_deref(), Some("f"));
}

#[test]
fn parts_results_and_schemas_come_through_whole() {
    let request = r#"{
        "messages": [
            { "role": "user", "content": [{ "type": "text", "text": "a " }, { "type": "text", "text": " b" }] },
            { "role": "assistant", "content": "", "tool_calls": [{ "function": { "name": "f", "arguments": {} } }],
              "tool_responses": [{ "name": "f", "response": "sun" }] }
        ],
        "tools": [{ "function": { "name": "f", "parameters": { "enum": [12345678901234567890123] } } }]
    }"#;
    let request: ChatRequest = serde_json::from_str(request).unwrap();
    let Prompt::Chat(conversation) = request.ask().unwrap().prompt else {
        panic!("no conversation");
    };
    assert_eq!(conversation.messages[0].content_parts, ["a ", " b"]);
    assert_eq!(conversation.messages[1].tool_responses.len(), 1);
    let schema = serde_json::to_string(&conversation.tools[0].parameters).unwrap();
    assert!(schema.contains("[12345678901234567890123]"), "{schema}");
}

#[test]
fn refusals_say_where() {
    let image = json!([{ "role": "user", "content": "", "images": ["iVBORw0KGgo="] }]);
    for (more, param) in [
        (json!({ "messages": image }), "messages[0].images"),
        (json!({ "think": 3 }), "think"),
        (json!({ "think": "deep" }), "think"),
        (json!({ "format": "xml" }), "format"),
        (json!({ "format": 3 }), "format"),
        (
            json!({ "options": { "num_predict": 0 } }),
            "options.num_predict",
        ),
    ] {
        let error = chat_ask(more).unwrap_err();
        assert_eq!(error.param.as_deref(), Some(param));
        let message = error.body(Dialect::Ollama, "");
        assert!(message["error"].as_str().unwrap().contains(param));
    }
    for (request, param) in [
        (json!({ "prompt": "a", "suffix": "b" }), "suffix"),
        (json!({ "prompt": "a", "template": "b" }), "template"),
        (json!({ "prompt": "a", "images": ["b"] }), "images"),
    ] {
        assert_eq!(
            generate_ask(request).unwrap_err().param.as_deref(),
            Some(param)
        );
    }
}
