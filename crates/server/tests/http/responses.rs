//! OpenAI's interface of items, in process, on the demo model.

use crate::support::{Answer, demo, post};
use serde_json::{Value, json};

const RESPONSES: &str = "/v1/responses";

fn ask(input: impl Into<Value>, more: Value) -> Value {
    let mut body = json!({ "model": "pip", "temperature": 0, "input": input.into() });
    if let (Value::Object(body), Value::Object(more)) = (&mut body, more) {
        body.extend(more);
    }
    body
}

fn weather() -> Value {
    json!({
        "type": "function",
        "name": "get_weather",
        "description": "Get the weather in a city",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "description": "The name of the city"}},
            "required": ["city"],
            "additionalProperties": false,
        },
        "strict": true,
    })
}

fn names(answer: &Answer) -> Vec<String> {
    let mut names: Vec<String> = answer.events().into_iter().map(|event| event.0).collect();
    names.dedup();
    names
}

/// The response of the last event.
fn last(answer: &Answer) -> Value {
    answer.chunks(false).pop().unwrap()["response"].take()
}

fn without_ids(mut output: Value) -> Value {
    for item in output.as_array_mut().unwrap() {
        for key in ["id", "call_id"] {
            item.as_object_mut().unwrap().remove(key);
        }
    }
    output
}

#[tokio::test]
async fn a_whole_answer_is_the_reference_s() {
    let body = post(&demo(), RESPONSES, ask("Hello!", json!({}))).await;
    assert_eq!(body.status, 200, "{}", body.text);
    let body = body.json();
    assert_eq!(body["object"], "response");
    assert_eq!(body["status"], "completed");
    assert_eq!(body["model"], "pip");
    let text = json!({
        "type": "output_text", "text": "Hello! How can I help you today?",
        "annotations": [], "logprobs": [],
    });
    assert_eq!(
        without_ids(body["output"].clone()),
        json!([{"type": "message", "status": "completed", "role": "assistant", "content": [text]}])
    );
    assert_eq!(body["usage"]["input_tokens"], 11);
    assert_eq!(body["usage"]["output_tokens"], 10);
    assert_eq!(body["usage"]["total_tokens"], 21);
}

#[tokio::test]
async fn a_stream_ends_with_what_a_whole_answer_says() {
    let app = demo();
    let more = json!({"instructions": "Be brief.", "metadata": {"a": "b"}});
    let whole = post(&app, RESPONSES, ask("Hello!", more.clone()))
        .await
        .json();
    let mut streams = ask("Hello!", more);
    streams["stream"] = true.into();
    let streamed = post(&app, RESPONSES, streams).await;
    assert_eq!(
        names(&streamed),
        [
            "response.created",
            "response.in_progress",
            "response.output_item.added",
            "response.content_part.added",
            "response.output_text.delta",
            "response.output_text.done",
            "response.content_part.done",
            "response.output_item.done",
            "response.completed"
        ]
    );
    for (n, chunk) in streamed.chunks(false).iter().enumerate() {
        assert_eq!(chunk["sequence_number"], n);
    }
    let end = last(&streamed);
    assert_eq!(
        without_ids(end["output"].clone()),
        without_ids(whole["output"].clone())
    );
    let keys =
        |value: &Value| -> Vec<String> { value.as_object().unwrap().keys().cloned().collect() };
    assert_eq!(keys(&end), keys(&whole));
    assert_eq!(end["metadata"], json!({"a": "b"}));
    assert_eq!(end["instructions"], "Be brief.");
}

#[tokio::test]
async fn a_thought_is_an_item_that_may_come_back() {
    let app = demo();
    let question = "What is 347 + 285?";
    let more = json!({
        "reasoning": {"effort": "low"}, "include": ["reasoning.encrypted_content"],
    });
    let body = post(&app, RESPONSES, ask(question, more.clone()))
        .await
        .json();
    let [thought, answer] = &body["output"].as_array().unwrap()[..] else {
        panic!("{body}");
    };
    assert_eq!(thought["type"], "reasoning");
    assert!(!thought["content"][0]["text"].as_str().unwrap().is_empty());
    assert_eq!(answer["content"][0]["text"], "347 + 285 = 632.");
    let mut sealed = thought.clone();
    sealed["content"] = json!([]);
    let again = json!([
        {"role": "user", "content": question}, sealed, answer,
        {"role": "user", "content": "Hello!"},
    ]);
    let again = post(&app, RESPONSES, ask(again, more)).await;
    assert_eq!(again.status, 200, "{}", again.text);
    let summary = json!({"reasoning": {"effort": "low", "summary": "auto"}, "stream": true});
    let streamed = post(&app, RESPONSES, ask(question, summary)).await;
    let names = names(&streamed);
    assert!(names.contains(&"response.reasoning_summary_text.delta".to_owned()));
    assert!(!names.contains(&"response.reasoning_text.delta".to_owned()));
    assert_eq!(
        last(&streamed)["output"][0]["summary"][0]["text"],
        thought["content"][0]["text"]
    );
}

#[tokio::test]
async fn a_tool_is_called_and_its_result_is_used() {
    let app = demo();
    let question = "What is the weather in Paris?";
    let tools = json!({"tools": [{"type": "web_search"}, weather()]});
    let answer = post(&app, RESPONSES, ask(question, tools.clone())).await;
    assert_eq!(answer.headers["x-carat-ignored"], "web_search");
    let body = answer.json();
    let call = &body["output"][0];
    assert_eq!(call["type"], "function_call", "{body}");
    assert_eq!(call["arguments"], "{\"city\":\"Paris\"}");
    assert_eq!(body["status"], "completed");
    let mut streams = ask(question, tools.clone());
    streams["stream"] = true.into();
    let streamed = post(&app, RESPONSES, streams).await;
    let pieces = streamed.events().into_iter();
    let pieces = pieces.filter(|event| event.0 == "response.function_call_arguments.delta");
    assert!(pieces.count() > 2, "as they are written: {}", streamed.text);
    let streamed = last(&streamed);
    assert_eq!(
        without_ids(streamed["output"].clone()),
        without_ids(body["output"].clone())
    );
    let second = json!([
        {"role": "user", "content": question},
        call,
        {"type": "function_call_output", "call_id": call["call_id"], "output": "{\"temperature\": 21, \"sky\": \"clear\"}"},
    ]);
    let body = post(&app, RESPONSES, ask(second, tools)).await.json();
    let text = body["output"][0]["content"][0]["text"].as_str().unwrap();
    assert!(text.contains("21"), "{body}");
}

#[tokio::test]
async fn an_answer_cut_short_is_incomplete() {
    let app = demo();
    let more = json!({"max_output_tokens": 3});
    let body = post(&app, RESPONSES, ask("Hello!", more)).await.json();
    assert_eq!(body["status"], "incomplete");
    assert_eq!(
        body["incomplete_details"],
        json!({"reason": "max_output_tokens"})
    );
    assert_eq!(body["output"][0]["status"], "incomplete");
    let more = json!({"max_output_tokens": 3, "stream": true});
    let streamed = post(&app, RESPONSES, ask("Hello!", more)).await;
    assert_eq!(
        names(&streamed).pop().as_deref(),
        Some("response.incomplete")
    );
}

#[tokio::test]
async fn a_schema_shapes_the_answer() {
    let format = json!({
        "type": "json_schema", "name": "city", "strict": true,
        "schema": {
            "type": "object",
            "properties": {"city": {"enum": ["Paris", "Oslo"]}},
            "required": ["city"],
            "additionalProperties": false,
        },
    });
    let more = json!({"text": {"format": format}});
    let body = post(&demo(), RESPONSES, ask("Name a city.", more))
        .await
        .json();
    let text = body["output"][0]["content"][0]["text"].as_str().unwrap();
    let value: Value = serde_json::from_str(text).unwrap();
    assert!(
        value == json!({"city": "Paris"}) || value == json!({"city": "Oslo"}),
        "{value}"
    );
}

#[tokio::test]
async fn log_probabilities_come_if_they_are_included() {
    let more = json!({"include": ["message.output_text.logprobs"], "top_logprobs": 2});
    let body = post(&demo(), RESPONSES, ask("Hello!", more)).await.json();
    let logprobs = body["output"][0]["content"][0]["logprobs"]
        .as_array()
        .unwrap();
    let text: String = logprobs
        .iter()
        .map(|entry| entry["token"].as_str().unwrap())
        .collect();
    assert_eq!(text, "Hello! How can I help you today?");
    assert_eq!(logprobs[0]["top_logprobs"].as_array().unwrap().len(), 2);
}

#[tokio::test]
async fn what_would_need_a_memory_is_refused() {
    let app = demo();
    for (more, param) in [
        (
            json!({"previous_response_id": "resp_1"}),
            "previous_response_id",
        ),
        (
            json!({"input": [{"type": "item_reference", "id": "msg_1"}]}),
            "input[0].type",
        ),
        (
            json!({"tool_choice": {"type": "web_search"}}),
            "tool_choice",
        ),
        (json!({"temperature": "hot"}), "temperature"),
    ] {
        let answer = post(&app, RESPONSES, ask("Hello!", more)).await;
        assert_eq!(answer.status, 400);
        assert_eq!(answer.json()["error"]["param"], param);
    }
    let stored = post(&app, RESPONSES, ask("Hello!", json!({"store": true}))).await;
    assert_eq!(stored.status, 200);
}
