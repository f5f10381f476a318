//! Ollama's dialect, in process, on the demo model.

use crate::support::{Answer, demo, get, plain, post, request};
use http::Method;
use serde_json::{Value, json};

const HELLO: &str = "Hello! How can I help you today?";

fn chat(content: &str, more: Value) -> Value {
    let mut body = json!({
        "model": "pip", "options": {"temperature": 0},
        "messages": [{"role": "user", "content": content}],
    });
    if let (Value::Object(body), Value::Object(more)) = (&mut body, more) {
        body.extend(more);
    }
    body
}

fn weather() -> Value {
    json!({"type": "function", "function": {
        "name": "get_weather",
        "description": "Get the weather in a city",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "description": "The name of the city"}},
            "required": ["city"],
        },
    }})
}

/// The lines of a stream: the last is done, and no other.
fn lines(answer: &Answer) -> Vec<Value> {
    assert_eq!(answer.status, 200, "{}", answer.text);
    assert_eq!(answer.headers["content-type"], "application/x-ndjson");
    assert!(answer.text.ends_with('\n'));
    let lines: Vec<Value> = answer
        .text
        .lines()
        .map(|line| serde_json::from_str(line).unwrap())
        .collect();
    for (n, line) in lines.iter().enumerate() {
        assert_eq!(line["done"], n + 1 == lines.len());
        assert_eq!(line["model"], "pip:latest");
    }
    lines
}

fn check_end(end: &Value) {
    assert_eq!(end["done"], true);
    assert_eq!(end["done_reason"], "stop");
    assert_eq!(end["eval_count"], 10);
    assert_eq!(end["prompt_eval_count"], 11);
    assert!(end["total_duration"].as_u64() >= end["eval_duration"].as_u64());
    assert!(end["eval_duration"].as_u64() > Some(0));
}

#[tokio::test]
async fn a_chat_streams_unless_told_otherwise() {
    let app = demo();
    let streamed = lines(&post(&app, "/api/chat", chat("Hello!", json!({}))).await);
    assert!(streamed.len() > 2);
    let text: String = streamed
        .iter()
        .map(|line| line["message"]["content"].as_str().unwrap())
        .collect();
    assert_eq!(text, HELLO);
    check_end(streamed.last().unwrap());
    let whole = post(&app, "/api/chat", chat("Hello!", json!({"stream": false}))).await;
    assert_eq!(whole.headers["content-type"], "application/json");
    let whole = whole.json();
    assert_eq!(
        whole["message"],
        json!({"role": "assistant", "content": HELLO})
    );
    check_end(&whole);
}

#[tokio::test]
async fn a_prompt_is_answered_as_a_question() {
    let app = demo();
    let asked = json!({"model": "pip:latest", "prompt": "Hello!", "options": {"temperature": 0}});
    let streamed = lines(&post(&app, "/api/generate", asked.clone()).await);
    let text: String = streamed
        .iter()
        .map(|line| line["response"].as_str().unwrap())
        .collect();
    assert_eq!(text, HELLO);
    check_end(streamed.last().unwrap());
    let mut raw = asked;
    raw["raw"] = true.into();
    raw["stream"] = false.into();
    raw["options"]["num_predict"] = 3.into();
    let raw = post(&app, "/api/generate", raw).await.json();
    assert_eq!(raw["eval_count"], 3);
    assert_eq!(raw["done_reason"], "length");
    let load = post(&app, "/api/generate", json!({"model": "pip"})).await;
    assert_eq!(load.json()["done_reason"], "load");
}

#[tokio::test]
async fn a_thought_is_beside_the_content() {
    let more = json!({"think": true, "stream": false});
    let body = post(&demo(), "/api/chat", chat("What is 347 + 285?", more))
        .await
        .json();
    assert_eq!(body["message"]["content"], "347 + 285 = 632.");
    assert!(!body["message"]["thinking"].as_str().unwrap().is_empty());
}

#[tokio::test]
async fn a_tool_is_called_whole_and_its_result_is_used() {
    let app = demo();
    let question = "What is the weather in Paris?";
    let streamed = post(
        &app,
        "/api/chat",
        chat(question, json!({"tools": [weather()]})),
    )
    .await;
    let calls: Vec<Value> = lines(&streamed)
        .iter()
        .filter_map(|line| line["message"]["tool_calls"].as_array().cloned())
        .flatten()
        .collect();
    assert_eq!(calls.len(), 1);
    assert_eq!(
        calls[0]["function"],
        json!({"name": "get_weather", "arguments": {"city": "Paris"}})
    );
    let second = json!({"stream": false, "tools": [weather()], "messages": [
        {"role": "user", "content": question},
        {"role": "assistant", "content": "", "tool_calls": calls},
        {"role": "tool", "tool_name": "get_weather", "content": "{\"temperature\": 21, \"sky\": \"clear\"}"},
    ]});
    let body = post(&app, "/api/chat", chat(question, second)).await.json();
    let text = body["message"]["content"].as_str().unwrap();
    assert!(text.contains("21"), "{body}");
}

#[tokio::test]
async fn a_schema_shapes_the_answer() {
    let schema = json!({
        "type": "object",
        "properties": {"city": {"enum": ["Paris", "Oslo"]}},
        "required": ["city"],
        "additionalProperties": false,
    });
    let more = json!({"format": schema, "stream": false});
    let body = post(&demo(), "/api/chat", chat("Name a city.", more))
        .await
        .json();
    let text = body["message"]["content"].as_str().unwrap();
    let value: Value = serde_json::from_str(text).unwrap();
    assert!(
        value == json!({"city": "Paris"}) || value == json!({"city": "Oslo"}),
        "{value}"
    );
}

#[tokio::test]
async fn the_model_is_described_by_either_name() {
    let app = demo();
    let tags = get(&app, "/api/tags").await.json();
    assert_eq!(tags["models"][0]["name"], "pip:latest");
    assert_eq!(tags["models"][0]["details"]["family"], "gemma4");
    let ps = get(&app, "/api/ps").await.json();
    assert_eq!(ps["models"][0]["model"], "pip:latest");
    assert_eq!(ps["models"][0]["context_length"], crate::support::CONTEXT);
    for name in [json!({"name": "pip"}), json!({"model": "pip:latest"})] {
        let shown = post(&app, "/api/show", name).await.json();
        assert_eq!(
            shown["model_info"]["gemma4.context_length"],
            crate::support::CONTEXT
        );
        assert_eq!(
            shown["capabilities"],
            json!(["completion", "tools", "thinking"])
        );
        assert_eq!(shown["details"]["format"], "gguf");
    }
    let version = get(&app, "/api/version").await.json();
    assert!(version["version"].is_string());
}

#[tokio::test]
async fn nothing_manages_model_files() {
    let app = demo();
    for (method, path) in [
        (Method::POST, "/api/pull"),
        (Method::POST, "/api/push"),
        (Method::POST, "/api/create"),
        (Method::POST, "/api/copy"),
        (Method::DELETE, "/api/delete"),
        (Method::POST, "/api/blobs/sha256:00"),
        (Method::HEAD, "/api/blobs/sha256:00"),
    ] {
        let answer = request(&app, plain(method, path, "{\"model\": \"pip\"}")).await;
        assert_eq!(answer.status, 501, "{path}");
        assert!(answer.json()["error"].is_string());
    }
}

#[tokio::test]
async fn refusals_are_a_sentence() {
    let app = demo();
    let wrong = post(&app, "/api/chat", chat("Hello!", json!({"think": 3}))).await;
    assert_eq!(wrong.status, 400);
    assert_eq!(
        wrong.json(),
        json!({"error": "think must be true, false or a level such as \"low\""})
    );
    let options = json!({"options": {"top_k": "many"}});
    let wrong = post(&app, "/api/chat", chat("Hello!", options)).await;
    let text = wrong.json()["error"].as_str().unwrap().to_owned();
    assert!(text.starts_with("options.top_k: "), "{text}");
}
