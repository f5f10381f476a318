//! Integers beyond 64 bits from a tool's schema to the call in the answer, digit for digit.

use http::Method;
use serde_json::{Value, json};

use crate::support::{demo, plain, post, request};

const LARGE: &str = "12345678901234567890123";

#[tokio::test]
async fn a_call_has_every_digit_of_its_schema() {
    let app = demo();
    let schema = format!(
        r#"{{"type": "object", "properties": {{"n": {{"const": {LARGE}}}}}, "required": ["n"]}}"#
    );
    let rest = r#""max_tokens": 60, "temperature": 0"#;
    let messages = r#""messages": [{"role": "user", "content": "Call it."}]"#;
    for (path, body, expected) in [
        (
            "/v1/chat/completions",
            format!(
                r#"{{{messages}, {rest}, "tool_choice": "required",
                    "tools": [{{"type": "function", "function": {{"name": "f", "parameters": {schema}}}}}]}}"#
            ),
            format!(r#""arguments":"{{\"n\":{LARGE}}}""#),
        ),
        (
            "/v1/messages",
            format!(
                r#"{{{messages}, {rest}, "tool_choice": {{"type": "any"}},
                    "tools": [{{"name": "f", "input_schema": {schema}}}]}}"#
            ),
            format!(r#""input":{{"n":{LARGE}}}"#),
        ),
        (
            "/v1/responses",
            format!(
                r#"{{"input": "Call it.", "temperature": 0, "max_output_tokens": 60, "tool_choice": "required",
                    "tools": [{{"type": "function", "name": "f", "parameters": {schema}}}]}}"#
            ),
            format!(r#""arguments":"{{\"n\":{LARGE}}}""#),
        ),
    ] {
        let answer = request(&app, plain(Method::POST, path, &body)).await;
        assert_eq!(answer.status, 200, "{}", answer.text);
        assert!(answer.text.contains(&expected), "{path}: {}", answer.text);
    }
}

#[tokio::test]
async fn results_beside_their_calls_reach_the_prompt() {
    let app = demo();
    let body = format!(
        r#"{{"messages": [
            {{"role": "user", "content": "x"}},
            {{"role": "assistant", "tool_calls": [{{"function": {{"name": "f", "arguments": {{}}}}}}],
              "tool_responses": [{{"name": "f", "response": {{"n": {LARGE}}}}}]}},
            {{"role": "user", "content": "y"}}]}}"#
    );
    let tokens = request(&app, plain(Method::POST, "/tokenize", &body)).await;
    assert_eq!(tokens.status, 200, "{}", tokens.text);
    let tokens = json!({"tokens": tokens.json()["tokens"]});
    let prompt = post(&app, "/detokenize", tokens).await.json();
    let prompt = prompt["content"].as_str().unwrap();
    assert!(prompt.contains(&format!("{{n:{LARGE}}}")), "{prompt}");
}

#[tokio::test]
async fn a_wrong_schema_is_told_from_a_wrong_tool() {
    let app = demo();
    let said = async |parameters: Value| {
        let body = json!({
            "messages": [{"role": "user", "content": "x"}],
            "tools": [{"type": "function", "function": {"name": "f", "parameters": parameters}}],
        });
        let answer = post(&app, "/v1/chat/completions", body).await;
        assert_eq!(answer.status, 400, "{}", answer.text);
        answer.json()["error"]["message"].to_string()
    };
    let required = said(json!({"type": "object", "required": "ab"})).await;
    assert!(
        required.contains("`required` is a text; a list of names is expected"),
        "{required}"
    );
    let schema = said(json!([1])).await;
    assert!(
        schema.contains("`parameters` of the tool `f` is a list"),
        "{schema}"
    );
}
