use carat_engine::chat::ChatFinish;
use expect_test::{Expect, expect};
use serde_json::{Value, json};

use super::{super::samples, convert::MessagesRequest, *};
use crate::testing::{SseEvent, sse};

fn events() -> Events {
    Events {
        id: "msg_1".to_owned(),
        model: "pip".to_owned(),
        request_id: "req_1".to_owned(),
        prompt_tokens: 10,
        content: Vec::new(),
        open: None,
        finished: None,
    }
}

fn check(outputs: Vec<Output>, expected: &Expect) {
    expected.assert_eq(&samples::transcript(events(), outputs));
}

#[test]
fn a_thought_a_text_and_a_call_are_blocks_of_their_own() {
    let outputs = vec![
        samples::thinking("Let me"),
        samples::thinking(" see."),
        samples::content("I ask"),
        samples::content(" around."),
        samples::call("get_weather", json!({ "city": "Oslo" })),
        samples::finished(ChatFinish::ToolCalls),
    ];
    check(
        outputs,
        &expect![[r#"
        event: message_start
        data: {"type":"message_start","message":{"id":"msg_1","type":"message","role":"assistant","model":"pip","content":[],"stop_reason":null,"stop_sequence":null,"usage":{"input_tokens":10,"cache_creation_input_tokens":0,"cache_read_input_tokens":0,"output_tokens":0}}}

        event: ping
        data: {"type":"ping"}

        event: content_block_start
        data: {"type":"content_block_start","index":0,"content_block":{"type":"thinking","thinking":"","signature":""}}

        event: content_block_delta
        data: {"type":"content_block_delta","index":0,"delta":{"type":"thinking_delta","thinking":"Let me"}}

        event: content_block_delta
        data: {"type":"content_block_delta","index":0,"delta":{"type":"thinking_delta","thinking":" see."}}

        event: content_block_delta
        data: {"type":"content_block_delta","index":0,"delta":{"type":"signature_delta","signature":"carat"}}

        event: content_block_stop
        data: {"type":"content_block_stop","index":0}

        event: content_block_start
        data: {"type":"content_block_start","index":1,"content_block":{"type":"text","text":""}}

        event: content_block_delta
        data: {"type":"content_block_delta","index":1,"delta":{"type":"text_delta","text":"I ask"}}

        event: content_block_delta
        data: {"type":"content_block_delta","index":1,"delta":{"type":"text_delta","text":" around."}}

        event: content_block_stop
        data: {"type":"content_block_stop","index":1}

        event: content_block_start
        data: {"type":"content_block_start","index":2,"content_block":{"type":"tool_use","id":"call_get_weather","name":"get_weather","input":{}}}

        event: content_block_delta
        data: {"type":"content_block_delta","index":2,"delta":{"type":"input_json_delta","partial_json":""}}

        event: content_block_delta
        data: {"type":"content_block_delta","index":2,"delta":{"type":"input_json_delta","partial_json":"{\"city\":\"Oslo\"}"}}

        event: content_block_stop
        data: {"type":"content_block_stop","index":2}

        event: message_delta
        data: {"type":"message_delta","delta":{"stop_reason":"tool_use","stop_sequence":null},"usage":{"input_tokens":6,"cache_creation_input_tokens":0,"cache_read_input_tokens":4,"output_tokens":7}}

        event: message_stop
        data: {"type":"message_stop"}

    "#]],
    );
}

#[test]
fn a_stop_string_is_named() {
    let outputs = vec![samples::content("one, "), samples::stopped("two")];
    check(
        outputs,
        &expect![[r#"
        event: message_start
        data: {"type":"message_start","message":{"id":"msg_1","type":"message","role":"assistant","model":"pip","content":[],"stop_reason":null,"stop_sequence":null,"usage":{"input_tokens":10,"cache_creation_input_tokens":0,"cache_read_input_tokens":0,"output_tokens":0}}}

        event: ping
        data: {"type":"ping"}

        event: content_block_start
        data: {"type":"content_block_start","index":0,"content_block":{"type":"text","text":""}}

        event: content_block_delta
        data: {"type":"content_block_delta","index":0,"delta":{"type":"text_delta","text":"one, "}}

        event: content_block_stop
        data: {"type":"content_block_stop","index":0}

        event: message_delta
        data: {"type":"message_delta","delta":{"stop_reason":"stop_sequence","stop_sequence":"two"},"usage":{"input_tokens":6,"cache_creation_input_tokens":0,"cache_read_input_tokens":4,"output_tokens":7}}

        event: message_stop
        data: {"type":"message_stop"}

    "#]],
    );
}

#[test]
fn a_failure_is_an_event_and_nothing_follows() {
    let mut out = Vec::new();
    let error = ApiError::new(crate::error::Kind::EngineFailed, "the device is gone");
    events().fail(&error, &mut out);
    expect![[r#"
        event: error
        data: {"type":"error","error":{"type":"api_error","message":"the device is gone"},"request_id":"req_1"}

    "#]].assert_eq(&String::from_utf8_lossy(&out));
}

/// Adds events up as Anthropic's clients do.
fn added_up(events: &[SseEvent]) -> Value {
    let mut message = Value::Null;
    let mut json = String::new();
    for event in events {
        let data: Value = serde_json::from_str(&event.data).unwrap();
        assert_eq!(data["type"], event.name.as_str());
        let index = data["index"].as_u64().unwrap_or(0) as usize;
        match event.name.as_str() {
            "message_start" => message = data["message"].clone(),
            "content_block_start" => {
                let content = message["content"].as_array_mut().unwrap();
                assert_eq!(index, content.len());
                content.push(data["content_block"].clone());
                json.clear();
            }
            "content_block_delta" => {
                let block = &mut message["content"][index];
                let delta = &data["delta"];
                let (key, piece) = match delta["type"].as_str().unwrap() {
                    "text_delta" => ("text", &delta["text"]),
                    "thinking_delta" => ("thinking", &delta["thinking"]),
                    "signature_delta" => ("signature", &delta["signature"]),
                    "input_json_delta" => {
                        json.push_str(delta["partial_json"].as_str().unwrap());
                        continue;
                    }
                    other => panic!("a delta of type {other}"),
                };
                let text = block[key].as_str().unwrap().to_owned();
                block[key] = (text + piece.as_str().unwrap()).into();
            }
            "content_block_stop" => {
                if message["content"][index]["type"] == "tool_use" {
                    message["content"][index]["input"] = serde_json::from_str(&json).unwrap();
                }
            }
            "message_delta" => {
                message["stop_reason"] = data["delta"]["stop_reason"].clone();
                message["stop_sequence"] = data["delta"]["stop_sequence"].clone();
                message["usage"] = data["usage"].clone();
            }
            "ping" | "message_stop" => {}
            other => panic!("an event {other}"),
        }
    }
    message
}

#[test]
fn streams_add_up_to_the_buffered_answer_however_they_are_cut() {
    let call = || samples::call("f", json!({ "text": samples::AWKWARD }));
    for pieces in samples::splits(samples::AWKWARD) {
        let mut outputs = Vec::new();
        outputs.extend(pieces.iter().map(|piece| samples::thinking(piece)));
        outputs.push(call());
        outputs.extend(pieces.iter().map(|piece| samples::content(piece)));
        outputs.push(samples::finished(ChatFinish::Length));
        let streamed = added_up(&sse(&samples::bytes(events(), outputs.clone())));
        let mut encoder = events();
        for output in outputs {
            encoder.output(0, output, &mut Vec::new());
        }
        assert_eq!(streamed, encoder.message());
        assert_eq!(streamed["content"][0]["thinking"], samples::AWKWARD);
        assert_eq!(streamed["content"][1]["input"]["text"], samples::AWKWARD);
        assert_eq!(streamed["content"][2]["text"], samples::AWKWARD);
    }
}

fn asked(request: Value) -> Result<(crate::ask::Ask, Vec<String>), ApiError> {
    serde_json::from_value::<MessagesRequest>(request)
        .unwrap()
        .ask()
}

fn conversation(request: Value) -> carat_engine::chat::Conversation {
    match asked(request).unwrap().0.prompt {
        Prompt::Chat(conversation) => conversation,
        Prompt::Texts(_) => panic!("no conversation"),
    }
}

#[test]
fn blocks_become_messages_in_their_order() {
    let conversation = conversation(json!({
        "max_tokens": 5,
        "system": [{ "type": "text", "text": "Be", "cache_control": { "type": "ephemeral" } }, { "type": "text", "text": " brief." }],
        "messages": [
            { "role": "user", "content": "Weather?" },
            { "role": "assistant", "content": [
                { "type": "thinking", "thinking": "Hm.", "signature": "x" },
                { "type": "redacted_thinking", "data": "secret" },
                { "type": "text", "text": "Wait." },
                { "type": "tool_use", "id": "toolu_1", "name": "f", "input": { "a": 1 } },
                { "type": "tool_use", "id": "toolu_2", "name": "g", "input": {} },
            ]},
            { "role": "user", "content": [
                { "type": "tool_result", "tool_use_id": "toolu_2", "content": "bad", "is_error": true },
                { "type": "tool_result", "tool_use_id": "toolu_1", "content": [{ "type": "text", "text": "sun" }] },
                { "type": "text", "text": "Well?" },
            ]},
        ],
    }));
    let shown: Vec<String> = conversation
        .messages
        .iter()
        .map(|message| serde_json::to_string(message).unwrap())
        .collect();
    assert!(!conversation.continues);
    expect![[r#"
        {"role":"system","content":"Be brief."}
        {"role":"user","content":"Weather?"}
        {"role":"assistant","content":"Wait.","thinking":"Hm.","tool_calls":[{"id":"toolu_1","name":"f","arguments":{"a":1}},{"id":"toolu_2","name":"g","arguments":{}}]}
        {"role":"tool","content":"error: bad","tool_call_id":"toolu_2"}
        {"role":"tool","content":"sun","tool_call_id":"toolu_1"}
        {"role":"user","content":"Well?"}"#]].assert_eq(&shown.join("\n"));
}

#[test]
fn parts_of_text_stay_parts() {
    let parts = json!([{ "type": "text", "text": "a " }, { "type": "text", "text": " b" }]);
    let conversation = conversation(json!({
        "max_tokens": 5,
        "messages": [{ "role": "user", "content": parts }, { "role": "assistant", "content": parts }],
    }));
    for message in conversation.messages {
        assert_eq!(message.content, "a  b");
        assert_eq!(message.content_parts, ["a ", " b"]);
    }
}

#[test]
fn an_assistants_last_words_are_continued() {
    let last =
        json!([{ "role": "user", "content": "Hi" }, { "role": "assistant", "content": "He" }]);
    let conversation = conversation(json!({ "max_tokens": 5, "messages": last }));
    assert!(conversation.continues);
}

#[test]
fn tools_of_others_are_named_and_left_out() {
    let request = |choice: &str| {
        json!({
            "max_tokens": 5,
            "messages": [{ "role": "user", "content": "Hi" }],
            "tools": [
                { "type": "web_search_20250305", "name": "web_search" },
                { "name": "f", "input_schema": { "type": "object" } },
            ],
            "tool_choice": { "type": "tool", "name": choice, "disable_parallel_tool_use": true },
        })
    };
    let (ask, ignored) = asked(request("f")).unwrap();
    assert_eq!(ignored, ["web_search_20250305"]);
    assert_eq!(
        ask.tool_choice,
        carat_grammar::ToolChoice::Named("f".to_owned())
    );
    assert!(!ask.parallel_calls);
    assert_eq!(
        asked(request("web_search")).unwrap_err().param.as_deref(),
        Some("tool_choice")
    );
}

#[test]
fn refusals_say_where() {
    let cases = [
        (
            json!({ "messages": [{ "role": "king", "content": "Hi" }] }),
            "messages[0].role",
        ),
        (
            json!({ "messages": [{ "role": "user", "content": [{ "type": "image", "source": {} }] }] }),
            "messages[0].content[0].type",
        ),
        (
            json!({ "messages": [{ "role": "user", "content": [{ "type": "tool_result", "tool_use_id": "x" }] }] }),
            "messages[0].content[0].tool_use_id",
        ),
        (
            json!({ "messages": [{ "role": "assistant", "content": [{ "type": "tool_use", "id": "x", "name": "f", "input": "{}" }] }] }),
            "messages[0].content[0].input",
        ),
        (json!({ "messages": [], "max_tokens": -1 }), "max_tokens"),
        (
            json!({ "messages": [], "thinking": { "type": "enabled" } }),
            "thinking.budget_tokens",
        ),
        (
            json!({ "messages": [], "thinking": { "type": "deep" } }),
            "thinking.type",
        ),
        (
            json!({ "messages": [], "tool_choice": { "type": "any" } }),
            "tool_choice",
        ),
        (
            json!({ "messages": [], "tools": [{ "name": "f" }] }),
            "tools[0]",
        ),
    ];
    for (request, param) in cases {
        let error = asked(request).unwrap_err();
        assert_eq!(error.param.as_deref(), Some(param));
        let body = error.body(Dialect::Anthropic, "req_1");
        let message = body["error"]["message"].as_str().unwrap();
        assert!(message.contains(param), "{message}");
    }
}

#[test]
fn thinking_is_asked_for_in_three_ways() {
    let thought = |more: Value| {
        let mut request = json!({ "messages": [{ "role": "user", "content": "Hi" }] });
        for (key, value) in more.as_object().unwrap() {
            request[key] = value.clone();
        }
        let (ask, _) = asked(request).unwrap();
        match ask.prompt {
            Prompt::Chat(conversation) => (conversation.thinking, ask.thinking_budget),
            Prompt::Texts(_) => panic!("no conversation"),
        }
    };
    assert_eq!(thought(json!({})), (false, None));
    assert_eq!(
        thought(json!({ "thinking": { "type": "disabled" } })),
        (false, None)
    );
    assert_eq!(
        thought(json!({ "thinking": { "type": "enabled", "budget_tokens": 2000 } })),
        (true, Some(2000))
    );
    assert_eq!(
        thought(json!({ "thinking": { "type": "adaptive" } })),
        (true, None)
    );
    assert_eq!(
        thought(
            json!({ "thinking": { "type": "adaptive" }, "output_config": { "effort": "low" } })
        ),
        (true, Some(1024))
    );
}
