use carat_engine::chat::{ChatFinish, Conversation};
use expect_test::{Expect, expect};
use serde_json::{Value, json};

use super::{super::samples, *};
use crate::{
    ask::{Ask, Prompt},
    testing::sse,
};

fn request(more: Value) -> ResponsesRequest {
    let mut request = json!({ "input": "Hi" });
    if let (Value::Object(request), Value::Object(more)) = (&mut request, more) {
        request.extend(more);
    }
    serde_json::from_value(request).unwrap()
}

/// With a frame short enough to read.
fn events(more: Value) -> Events {
    let frame = json!({ "id": "resp_1", "status": "in_progress" });
    Events::new(&request(more), frame)
}

fn check(more: Value, outputs: Vec<Output>, expected: &Expect) {
    expected.assert_eq(&samples::transcript(events(more), outputs));
}

#[test]
fn a_message_is_announced_written_and_repeated() {
    let outputs = vec![
        samples::content("Hel"),
        samples::content("lo"),
        samples::finished(ChatFinish::Stop),
    ];
    check(
        json!({}),
        outputs,
        &expect![[r#"
        event: response.created
        data: {"type":"response.created","sequence_number":0,"response":{"id":"resp_1","status":"in_progress","output":[]}}

        event: response.in_progress
        data: {"type":"response.in_progress","sequence_number":1,"response":{"id":"resp_1","status":"in_progress","output":[]}}

        event: response.output_item.added
        data: {"type":"response.output_item.added","sequence_number":2,"output_index":0,"item":{"id":"msg_...","type":"message","status":"in_progress","role":"assistant","content":[]}}

        event: response.content_part.added
        data: {"type":"response.content_part.added","sequence_number":3,"item_id":"msg_...","output_index":0,"content_index":0,"part":{"type":"output_text","text":"","annotations":[],"logprobs":[]}}

        event: response.output_text.delta
        data: {"type":"response.output_text.delta","sequence_number":4,"item_id":"msg_...","output_index":0,"content_index":0,"delta":"Hel","logprobs":[]}

        event: response.output_text.delta
        data: {"type":"response.output_text.delta","sequence_number":5,"item_id":"msg_...","output_index":0,"content_index":0,"delta":"lo","logprobs":[]}

        event: response.output_text.done
        data: {"type":"response.output_text.done","sequence_number":6,"item_id":"msg_...","output_index":0,"content_index":0,"text":"Hello","logprobs":[]}

        event: response.content_part.done
        data: {"type":"response.content_part.done","sequence_number":7,"item_id":"msg_...","output_index":0,"content_index":0,"part":{"type":"output_text","text":"Hello","annotations":[],"logprobs":[]}}

        event: response.output_item.done
        data: {"type":"response.output_item.done","sequence_number":8,"output_index":0,"item":{"id":"msg_...","type":"message","status":"completed","role":"assistant","content":[{"type":"output_text","text":"Hello","annotations":[],"logprobs":[]}]}}

        event: response.completed
        data: {"type":"response.completed","sequence_number":9,"response":{"id":"resp_1","status":"completed","output":[{"id":"msg_...","type":"message","status":"completed","role":"assistant","content":[{"type":"output_text","text":"Hello","annotations":[],"logprobs":[]}]}],"usage":{"input_tokens":10,"input_tokens_details":{"cached_tokens":4,"cache_write_tokens":0},"output_tokens":7,"output_tokens_details":{"reasoning_tokens":2},"total_tokens":17}}}

    "#]],
    );
}

#[test]
fn a_thought_comes_plain_and_sealed_before_a_call() {
    let outputs = vec![
        samples::thinking("Hm."),
        samples::call("get_weather", json!({ "city": "Oslo" })),
        samples::finished(ChatFinish::ToolCalls),
    ];
    let more = json!({ "include": ["reasoning.encrypted_content"] });
    check(
        more,
        outputs,
        &expect![[r#"
        event: response.created
        data: {"type":"response.created","sequence_number":0,"response":{"id":"resp_1","status":"in_progress","output":[]}}

        event: response.in_progress
        data: {"type":"response.in_progress","sequence_number":1,"response":{"id":"resp_1","status":"in_progress","output":[]}}

        event: response.output_item.added
        data: {"type":"response.output_item.added","sequence_number":2,"output_index":0,"item":{"id":"rs_...","type":"reasoning","status":"in_progress","summary":[],"content":[]}}

        event: response.content_part.added
        data: {"type":"response.content_part.added","sequence_number":3,"item_id":"rs_...","output_index":0,"content_index":0,"part":{"type":"reasoning_text","text":""}}

        event: response.reasoning_text.delta
        data: {"type":"response.reasoning_text.delta","sequence_number":4,"item_id":"rs_...","output_index":0,"content_index":0,"delta":"Hm."}

        event: response.reasoning_text.done
        data: {"type":"response.reasoning_text.done","sequence_number":5,"item_id":"rs_...","output_index":0,"content_index":0,"text":"Hm."}

        event: response.content_part.done
        data: {"type":"response.content_part.done","sequence_number":6,"item_id":"rs_...","output_index":0,"content_index":0,"part":{"type":"reasoning_text","text":"Hm."}}

        event: response.output_item.done
        data: {"type":"response.output_item.done","sequence_number":7,"output_index":0,"item":{"id":"rs_...","type":"reasoning","status":"completed","summary":[],"content":[{"type":"reasoning_text","text":"Hm."}],"encrypted_content":"SG0u"}}

        event: response.output_item.added
        data: {"type":"response.output_item.added","sequence_number":8,"output_index":1,"item":{"id":"fc_...","type":"function_call","status":"in_progress","call_id":"call_get_weather","name":"get_weather","arguments":""}}

        event: response.function_call_arguments.delta
        data: {"type":"response.function_call_arguments.delta","sequence_number":9,"item_id":"fc_...","output_index":1,"delta":"{\"city\":\"Oslo\"}"}

        event: response.function_call_arguments.done
        data: {"type":"response.function_call_arguments.done","sequence_number":10,"item_id":"fc_...","output_index":1,"name":"get_weather","arguments":"{\"city\":\"Oslo\"}"}

        event: response.output_item.done
        data: {"type":"response.output_item.done","sequence_number":11,"output_index":1,"item":{"id":"fc_...","type":"function_call","status":"completed","call_id":"call_get_weather","name":"get_weather","arguments":"{\"city\":\"Oslo\"}"}}

        event: response.completed
        data: {"type":"response.completed","sequence_number":12,"response":{"id":"resp_1","status":"completed","output":[{"id":"rs_...","type":"reasoning","status":"completed","summary":[],"content":[{"type":"reasoning_text","text":"Hm."}],"encrypted_content":"SG0u"},{"id":"fc_...","type":"function_call","status":"completed","call_id":"call_get_weather","name":"get_weather","arguments":"{\"city\":\"Oslo\"}"}],"usage":{"input_tokens":10,"input_tokens_details":{"cached_tokens":4,"cache_write_tokens":0},"output_tokens":7,"output_tokens_details":{"reasoning_tokens":2},"total_tokens":17}}}

    "#]],
    );
}

#[test]
fn a_thought_comes_as_a_summary_if_one_is_asked_for() {
    let outputs = vec![
        samples::thinking("Hm."),
        samples::finished(ChatFinish::Length),
    ];
    let more = json!({ "reasoning": { "effort": "low", "summary": "auto" } });
    check(
        more,
        outputs,
        &expect![[r#"
        event: response.created
        data: {"type":"response.created","sequence_number":0,"response":{"id":"resp_1","status":"in_progress","output":[]}}

        event: response.in_progress
        data: {"type":"response.in_progress","sequence_number":1,"response":{"id":"resp_1","status":"in_progress","output":[]}}

        event: response.output_item.added
        data: {"type":"response.output_item.added","sequence_number":2,"output_index":0,"item":{"id":"rs_...","type":"reasoning","status":"in_progress","summary":[],"content":[]}}

        event: response.reasoning_summary_part.added
        data: {"type":"response.reasoning_summary_part.added","sequence_number":3,"item_id":"rs_...","output_index":0,"summary_index":0,"part":{"type":"summary_text","text":""}}

        event: response.reasoning_summary_text.delta
        data: {"type":"response.reasoning_summary_text.delta","sequence_number":4,"item_id":"rs_...","output_index":0,"summary_index":0,"delta":"Hm."}

        event: response.reasoning_summary_text.done
        data: {"type":"response.reasoning_summary_text.done","sequence_number":5,"item_id":"rs_...","output_index":0,"summary_index":0,"text":"Hm."}

        event: response.reasoning_summary_part.done
        data: {"type":"response.reasoning_summary_part.done","sequence_number":6,"item_id":"rs_...","output_index":0,"summary_index":0,"part":{"type":"summary_text","text":"Hm."}}

        event: response.output_item.done
        data: {"type":"response.output_item.done","sequence_number":7,"output_index":0,"item":{"id":"rs_...","type":"reasoning","status":"incomplete","summary":[{"type":"summary_text","text":"Hm."}],"content":[]}}

        event: response.incomplete
        data: {"type":"response.incomplete","sequence_number":8,"response":{"id":"resp_1","status":"incomplete","output":[{"id":"rs_...","type":"reasoning","status":"incomplete","summary":[{"type":"summary_text","text":"Hm."}],"content":[]}],"incomplete_details":{"reason":"max_output_tokens"},"usage":{"input_tokens":10,"input_tokens_details":{"cached_tokens":4,"cache_write_tokens":0},"output_tokens":7,"output_tokens_details":{"reasoning_tokens":2},"total_tokens":17}}}

    "#]],
    );
}

#[test]
fn a_failure_ends_the_item_and_the_response() {
    let mut encoder = events(json!({}));
    let mut out = Vec::new();
    encoder.output(0, samples::content("Hel"), &mut out);
    out.clear();
    let error = ApiError::new(crate::error::Kind::EngineFailed, "the device is gone");
    encoder.fail(&error, &mut out);
    let names: Vec<String> = sse(&out).into_iter().map(|event| event.name).collect();
    assert_eq!(
        names,
        [
            "response.output_text.done",
            "response.content_part.done",
            "response.output_item.done",
            "response.failed"
        ]
    );
    let response = encoder.response();
    assert_eq!(response["status"], "failed");
    assert_eq!(response["error"]["message"], "the device is gone");
    assert_eq!(response["output"][0]["status"], "incomplete");
}

/// Reads a stream as OpenAI's helpers do: indices must exist before something is added to them.
fn read_back(bytes: &[u8]) -> Value {
    let mut items: Vec<Value> = Vec::new();
    for (n, event) in sse(bytes).into_iter().enumerate() {
        let data: Value = serde_json::from_str(&event.data).unwrap();
        assert_eq!(data["type"], event.name.as_str());
        assert_eq!(data["sequence_number"], n);
        let index = data["output_index"].as_u64().unwrap_or(0) as usize;
        let text = |value: &Value, piece: &Value| -> Value {
            (value.as_str().unwrap().to_owned() + piece.as_str().unwrap()).into()
        };
        match event.name.strip_prefix("response.").unwrap() {
            "created" => assert_eq!(n, 0),
            "in_progress" => {}
            "output_item.added" => {
                assert_eq!(index, items.len());
                items.push(data["item"].clone());
            }
            "content_part.added" => {
                let part = data["part"].clone();
                items[index]["content"].as_array_mut().unwrap().push(part);
            }
            "output_text.delta" | "reasoning_text.delta" => {
                let part = &mut items[index]["content"][0]["text"];
                *part = text(part, &data["delta"]);
            }
            "function_call_arguments.delta" => {
                let arguments = &mut items[index]["arguments"];
                *arguments = text(arguments, &data["delta"]);
            }
            "output_text.done" | "reasoning_text.done" => {
                assert_eq!(items[index]["content"][0]["text"], data["text"]);
            }
            "content_part.done" => assert_eq!(items[index]["content"][0], data["part"]),
            "function_call_arguments.done" => {
                assert_eq!(items[index]["arguments"], data["arguments"]);
                assert_eq!(items[index]["name"], data["name"]);
            }
            "output_item.done" => {
                items[index]["status"] = data["item"]["status"].clone();
                assert_eq!(items[index], data["item"]);
            }
            "completed" => {
                assert_eq!(data["response"]["output"], json!(items));
                return data["response"].clone();
            }
            other => panic!("an event {other}"),
        }
    }
    panic!("the stream does not end");
}

#[test]
fn streams_add_up_to_their_last_event_however_they_are_cut() {
    for pieces in samples::splits(samples::AWKWARD) {
        let mut outputs = Vec::new();
        outputs.extend(pieces.iter().map(|piece| samples::thinking(piece)));
        outputs.extend(pieces.iter().map(|piece| samples::content(piece)));
        outputs.push(samples::call("f", json!({ "text": samples::AWKWARD })));
        outputs.push(samples::finished(ChatFinish::ToolCalls));
        let response = read_back(&samples::bytes(events(json!({})), outputs));
        let output = &response["output"];
        assert_eq!(output[0]["content"][0]["text"], samples::AWKWARD);
        assert_eq!(output[1]["content"][0]["text"], samples::AWKWARD);
        let arguments = output[2]["arguments"].as_str().unwrap();
        let arguments: Value = serde_json::from_str(arguments).unwrap();
        assert_eq!(arguments["text"], samples::AWKWARD);
        assert_eq!(response["usage"]["total_tokens"], 17);
    }
}

fn asked(more: Value) -> Result<(Ask, Vec<String>), ApiError> {
    request(more).ask()
}

fn conversation(more: Value) -> Conversation {
    match asked(more).unwrap().0.prompt {
        Prompt::Chat(conversation) => conversation,
        Prompt::Texts(_) => panic!("no conversation"),
    }
}

#[test]
fn items_of_one_turn_become_one_message() {
    let conversation = conversation(json!({
        "instructions": "Be brief.",
        "input": [
            { "role": "user", "content": "Weather?" },
            { "type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": convert::sealed("H\u{e9}.") },
            { "type": "message", "role": "assistant", "content": [{ "type": "output_text", "text": "Wait." }] },
            { "type": "function_call", "call_id": "call_1", "name": "f", "arguments": "{\"a\":1}" },
            { "type": "function_call", "call_id": "call_2", "name": "g", "arguments": "" },
            { "type": "function_call_output", "call_id": "call_2", "output": "rain" },
            { "type": "function_call_output", "call_id": "call_1", "output": [{ "type": "input_text", "text": "sun" }] },
            { "type": "reasoning", "summary": [{ "type": "summary_text", "text": "So." }] },
            { "role": "assistant", "content": "Both." },
            { "role": "developer", "content": [{ "type": "input_text", "text": "Go on." }] },
        ],
    }));
    let shown: Vec<String> = conversation
        .messages
        .iter()
        .map(|message| serde_json::to_string(message).unwrap())
        .collect();
    expect![[r#"
        {"role":"system","content":"Be brief."}
        {"role":"user","content":"Weather?"}
        {"role":"assistant","content":"Wait.","thinking":"Hé.","tool_calls":[{"id":"call_1","name":"f","arguments":"{\"a\":1}"},{"id":"call_2","name":"g","arguments":""}]}
        {"role":"tool","content":"rain","tool_call_id":"call_2"}
        {"role":"tool","content":"sun","tool_call_id":"call_1"}
        {"role":"assistant","content":"Both.","thinking":"So."}
        {"role":"developer","content":"Go on."}"#]].assert_eq(&shown.join("\n"));
}

#[test]
fn parts_of_text_stay_parts() {
    let parts =
        json!([{ "type": "input_text", "text": "a " }, { "type": "input_text", "text": " b" }]);
    let conversation = conversation(json!({
        "input": [{ "role": "user", "content": parts }, { "role": "assistant", "content": parts }],
    }));
    for message in conversation.messages {
        assert_eq!(message.content, "a  b");
        assert_eq!(message.content_parts, ["a ", " b"]);
    }
}

#[test]
fn tools_that_are_no_functions_are_named_and_left_out() {
    let more = |choice: Value| {
        json!({
            "tools": [
                { "type": "web_search" },
                { "type": "function", "name": "f", "parameters": { "type": "object" }, "strict": true },
                { "type": "function", "name": "g", "parameters": null },
                { "type": "local_shell" },
            ],
            "tool_choice": choice,
        })
    };
    let (ask, ignored) = asked(more(json!("auto"))).unwrap();
    assert_eq!(ignored, ["web_search", "local_shell"]);
    assert_eq!(ask.tool_choice, carat_grammar::ToolChoice::Auto);
    let allowed = json!({
        "type": "allowed_tools", "mode": "required", "tools": [{ "type": "function", "name": "g" }],
    });
    let (ask, _) = asked(more(allowed)).unwrap();
    assert_eq!(ask.tool_choice, carat_grammar::ToolChoice::Required);
    let Prompt::Chat(conversation) = ask.prompt else {
        panic!("no conversation");
    };
    assert_eq!(conversation.tools.len(), 1);
    for wrong in [
        json!({ "type": "web_search" }),
        json!({ "type": "custom", "name": "f" }),
        json!({ "type": "function", "name": "h" }),
    ] {
        let error = asked(more(wrong)).unwrap_err();
        assert_eq!(error.param.as_deref(), Some("tool_choice"));
    }
}

#[test]
fn refusals_say_where() {
    let item = |item: Value| json!({ "input": [item] });
    let cases = [
        (
            json!({ "previous_response_id": "resp_1" }),
            "previous_response_id",
        ),
        (json!({ "conversation": "conv_1" }), "conversation"),
        (json!({ "background": true }), "background"),
        (json!({ "input": null }), "input"),
        (
            json!({ "reasoning": { "effort": "huge" } }),
            "reasoning.effort",
        ),
        (
            json!({ "text": { "format": { "type": "xml" } } }),
            "text.format.type",
        ),
        (json!({ "max_output_tokens": 0 }), "max_output_tokens"),
        (
            item(json!({ "type": "item_reference", "id": "msg_1" })),
            "input[0].type",
        ),
        (item(json!({ "type": "computer_call" })), "input[0].type"),
        (
            item(json!({ "role": "king", "content": "" })),
            "input[0].role",
        ),
        (
            item(
                json!({ "role": "user", "content": [{ "type": "input_image", "image_url": "x" }] }),
            ),
            "input[0].content[0].type",
        ),
        (
            item(json!({ "type": "function_call_output", "call_id": "x", "output": "" })),
            "input[0].call_id",
        ),
        (
            item(
                json!({ "type": "function_call", "call_id": "x", "name": "f", "arguments": "[]" }),
            ),
            "input[0].arguments",
        ),
        (
            item(json!({ "type": "reasoning", "encrypted_content": "gAAAA*" })),
            "input[0].encrypted_content",
        ),
    ];
    for (more, param) in cases {
        assert_eq!(asked(more).unwrap_err().param.as_deref(), Some(param));
    }
}
