//! Anthropic's dialect, in process, on the demo model.

use crate::support::{Answer, CONTEXT, demo, post};
use serde_json::{Value, json};

const MESSAGES: &str = "/v1/messages";

fn ask(content: &str, more: Value) -> Value {
    let mut body = json!({
        "model": "pip", "temperature": 0, "max_tokens": 200,
        "messages": [{"role": "user", "content": content}],
    });
    if let (Value::Object(body), Value::Object(more)) = (&mut body, more) {
        body.extend(more);
    }
    body
}

fn weather() -> Value {
    json!({
        "name": "get_weather",
        "description": "Get the weather in a city",
        "input_schema": {
            "type": "object",
            "properties": {"city": {"type": "string", "description": "The name of the city"}},
            "required": ["city"],
        },
    })
}

fn prompt_tokens(usage: &Value) -> u64 {
    usage["input_tokens"].as_u64().unwrap() + usage["cache_read_input_tokens"].as_u64().unwrap()
}

/// The names of a stream's events, repeated deltas once.
fn names(answer: &Answer) -> Vec<String> {
    let mut names: Vec<String> = answer.events().into_iter().map(|event| event.0).collect();
    names.dedup();
    names
}

fn deltas(answer: &Answer, kind: &str) -> String {
    let chunks = answer.chunks(false);
    let texts = chunks
        .iter()
        .filter_map(|chunk| chunk["delta"][kind].as_str());
    texts.collect()
}

#[tokio::test]
async fn a_whole_answer_is_the_reference_s_and_its_prompt_counts_alike() {
    let app = demo();
    let answer = post(&app, MESSAGES, ask("Hello!", json!({}))).await;
    assert_eq!(answer.status, 200, "{}", answer.text);
    let body = answer.json();
    assert_eq!(body["type"], "message");
    assert_eq!(body["role"], "assistant");
    assert_eq!(
        body["content"],
        json!([{"type": "text", "text": "Hello! How can I help you today?"}])
    );
    assert_eq!(body["stop_reason"], "end_turn");
    assert_eq!(body["stop_sequence"], Value::Null);
    assert_eq!(body["usage"]["output_tokens"], 10);
    assert!(body["id"].as_str().unwrap().starts_with("msg_"));
    assert!(answer.headers.contains_key("request-id"));
    let mut counted = ask("Hello!", json!({}));
    counted.as_object_mut().unwrap().remove("max_tokens");
    let counted = post(&app, "/v1/messages/count_tokens", counted).await;
    assert_eq!(counted.json(), json!({ "input_tokens": 11 }));
    assert_eq!(prompt_tokens(&body["usage"]), 11);
}

#[tokio::test]
async fn a_stream_is_made_of_named_events() {
    let answer = post(&demo(), MESSAGES, ask("Hello!", json!({"stream": true}))).await;
    assert_eq!(
        answer.headers["content-type"],
        "text/event-stream; charset=utf-8"
    );
    assert_eq!(
        names(&answer),
        [
            "message_start",
            "ping",
            "content_block_start",
            "content_block_delta",
            "content_block_stop",
            "message_delta",
            "message_stop"
        ]
    );
    assert_eq!(deltas(&answer, "text"), "Hello! How can I help you today?");
    let chunks = answer.chunks(false);
    let end = &chunks[chunks.len() - 2];
    assert_eq!(end["delta"]["stop_reason"], "end_turn");
    assert_eq!(prompt_tokens(&end["usage"]), 11);
    assert_eq!(prompt_tokens(&chunks[0]["message"]["usage"]), 11);
}

#[tokio::test]
async fn a_thought_is_a_signed_block_before_the_answer() {
    let app = demo();
    let thinking = json!({"thinking": {"type": "enabled", "budget_tokens": 1024}});
    let asked = ask("What is 347 + 285?", thinking);
    let body = post(&app, MESSAGES, asked.clone()).await.json();
    let [thought, answer] = &body["content"].as_array().unwrap()[..] else {
        panic!("{body}");
    };
    assert_eq!(thought["type"], "thinking");
    assert!(!thought["signature"].as_str().unwrap().is_empty());
    assert_eq!(*answer, json!({"type": "text", "text": "347 + 285 = 632."}));
    let mut streams = asked.clone();
    streams["stream"] = true.into();
    let streamed = post(&app, MESSAGES, streams).await;
    assert_eq!(deltas(&streamed, "thinking"), thought["thinking"]);
    assert_eq!(deltas(&streamed, "signature"), thought["signature"]);
    assert_eq!(deltas(&streamed, "text"), "347 + 285 = 632.");
    let mut second = asked;
    second["messages"] = json!([
        {"role": "user", "content": "What is 347 + 285?"},
        {"role": "assistant", "content": body["content"]},
        {"role": "user", "content": "Hello!"},
    ]);
    assert_eq!(post(&app, MESSAGES, second).await.status, 200);
}

#[tokio::test]
async fn a_tool_is_called_and_its_result_is_used() {
    let app = demo();
    let question = "What is the weather in Paris?";
    let body = post(&app, MESSAGES, ask(question, json!({"tools": [weather()]})))
        .await
        .json();
    assert_eq!(body["stop_reason"], "tool_use");
    let call = &body["content"][0];
    assert_eq!(call["type"], "tool_use");
    assert_eq!(call["input"], json!({"city": "Paris"}));
    let id = call["id"].as_str().unwrap();
    assert!(id.starts_with("toolu_"));
    let streamed = ask(question, json!({"tools": [weather()], "stream": true}));
    let streamed = post(&app, MESSAGES, streamed).await;
    assert_eq!(deltas(&streamed, "partial_json"), "{\"city\":\"Paris\"}");
    let pieces = streamed.text.matches("input_json_delta").count();
    assert!(
        pieces > 3,
        "as it is written, not all at once: {}",
        streamed.text
    );
    let mut second = ask(question, json!({"tools": [weather()]}));
    second["messages"] = json!([
        {"role": "user", "content": question},
        {"role": "assistant", "content": body["content"]},
        {"role": "user", "content": [{
            "type": "tool_result", "tool_use_id": id,
            "content": [{"type": "text", "text": "{\"temperature\": 21, \"sky\": \"clear\"}"}],
        }]},
    ]);
    let body = post(&app, MESSAGES, second).await.json();
    assert_eq!(body["stop_reason"], "end_turn", "{body}");
    assert!(body["content"][0]["text"].as_str().unwrap().contains("21"));
}

#[tokio::test]
async fn what_ends_an_answer_is_said() {
    let app = demo();
    let stops = ask("Hello!", json!({"stop_sequences": ["you", "help"]}));
    let body = post(&app, MESSAGES, stops).await.json();
    assert_eq!(body["stop_reason"], "stop_sequence");
    assert_eq!(body["stop_sequence"], "help");
    assert_eq!(body["content"][0]["text"], "Hello! How can I ");
    let short = ask("Hello!", json!({"max_tokens": 3}));
    let body = post(&app, MESSAGES, short).await.json();
    assert_eq!(body["stop_reason"], "max_tokens");
    assert_eq!(body["usage"]["output_tokens"], 3);
}

#[tokio::test]
async fn words_put_into_the_model_s_mouth_are_continued() {
    let more = json!({"messages": [
        {"role": "user", "content": "Hello!"},
        {"role": "assistant", "content": "Hello! How"},
    ]});
    let body = post(&demo(), MESSAGES, ask("", more)).await.json();
    assert_eq!(body["content"][0]["text"], " can I help you today?");
}

#[tokio::test]
async fn instructions_may_come_in_the_middle() {
    let app = demo();
    let plain = post(&app, MESSAGES, ask("Hello!", json!({}))).await.json();
    let between = json!({"messages": [
        {"role": "user", "content": "Hello!"},
        {"role": "system", "content": [{"type": "text", "text": "Answer in one word."}]},
    ]});
    let answer = post(&app, MESSAGES, ask("", between)).await;
    assert_eq!(answer.status, 200, "{}", answer.text);
    let (with, without) = (answer.json(), plain);
    assert!(prompt_tokens(&with["usage"]) > prompt_tokens(&without["usage"]) + 4);
}

#[tokio::test]
async fn a_schema_shapes_the_answer() {
    let schema = json!({
        "type": "object",
        "properties": {"city": {"enum": ["Paris", "Oslo"]}},
        "required": ["city"],
        "additionalProperties": false,
    });
    let more = json!({"output_config": {"format": {"type": "json_schema", "schema": schema}}});
    let body = post(&demo(), MESSAGES, ask("Name a city.", more))
        .await
        .json();
    let text = body["content"][0]["text"].as_str().unwrap();
    let value: Value = serde_json::from_str(text).unwrap();
    assert!(
        value == json!({"city": "Paris"}) || value == json!({"city": "Oslo"}),
        "{value}"
    );
}

#[tokio::test]
async fn refusals_have_anthropic_s_shape() {
    let app = demo();
    let mut without = ask("Hello!", json!({}));
    without.as_object_mut().unwrap().remove("max_tokens");
    let answer = post(&app, MESSAGES, without).await;
    assert_eq!(answer.status, 400);
    let body = answer.json();
    assert_eq!(body["type"], "error");
    assert_eq!(body["error"]["type"], "invalid_request_error");
    assert_eq!(
        body["request_id"],
        answer.headers["request-id"].to_str().unwrap()
    );
    let long = post(&app, MESSAGES, ask(&"word ".repeat(3000), json!({}))).await;
    assert_eq!(long.status, 400);
    let message = long.json()["error"]["message"].as_str().unwrap().to_owned();
    assert!(message.starts_with("prompt is too long: "), "{message}");
    assert!(
        message.contains(&format!(" tokens > {} maximum", CONTEXT - 1)),
        "{message}"
    );
    let wrong = post(&app, MESSAGES, ask("Hello!", json!({"top_p": "high"}))).await;
    let message = wrong.json()["error"]["message"]
        .as_str()
        .unwrap()
        .to_owned();
    assert!(message.starts_with("top_p: "), "{message}");
}

#[tokio::test]
async fn tools_that_only_others_run_are_named_in_a_header() {
    let tools = json!({"tools": [{"type": "web_search_20250305", "name": "web_search"}]});
    let answer = post(&demo(), MESSAGES, ask("Hello!", tools)).await;
    assert_eq!(answer.status, 200, "{}", answer.text);
    assert_eq!(answer.headers["x-carat-ignored"], "web_search_20250305");
}
