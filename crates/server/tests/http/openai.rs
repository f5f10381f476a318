//! OpenAI's dialect, in process, on the demo model. Greedy answers are those of the reference, in `assets` too.

use crate::support::{app, demo, get, post};
use carat_server::Config;
use serde_json::{Value, json};

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

#[expect(clippy::needless_pass_by_value, reason = "calls read better")]
fn chat(content: &str, more: Value) -> Value {
    let mut body = json!({
        "model": "pip", "temperature": 0, "messages": [{"role": "user", "content": content}],
    });
    body.as_object_mut()
        .unwrap()
        .extend(more.as_object().unwrap().clone());
    body
}

const CHAT: &str = "/v1/chat/completions";

#[tokio::test]
async fn a_whole_answer_is_the_reference_s() {
    let answer = post(&demo(), CHAT, chat("Hello!", json!({}))).await;
    assert_eq!(answer.status, 200, "{}", answer.text);
    let body = answer.json();
    assert_eq!(
        body["choices"],
        json!([{
            "index": 0,
            "message": {"role": "assistant", "content": "Hello! How can I help you today?"},
            "logprobs": null,
            "finish_reason": "stop",
        }])
    );
    assert_eq!(body["object"], "chat.completion");
    assert_eq!(body["model"], "pip");
    assert_eq!(body["usage"]["prompt_tokens"], 11);
    assert_eq!(body["usage"]["completion_tokens"], 10);
    assert_eq!(body["usage"]["total_tokens"], 21);
    assert!(answer.headers.contains_key("x-request-id"));
}

#[tokio::test]
async fn the_head_says_what_was_cached_of_the_prompt_and_why_not_more() {
    let app = app(Config::default());
    let long = |end: &str| "The red fox likes the wood. ".repeat(20) + end;
    let first = post(&app, CHAT, chat(&long("Why?"), json!({"max_tokens": 1}))).await;
    let prompt = first.json()["usage"]["prompt_tokens"].as_u64().unwrap();
    let told = first.headers["x-carat-cache"].to_str().unwrap();
    assert_eq!(told, format!("0/{prompt}; miss=no_match; at=0; turn=0"));
    let key = first.headers["x-carat-prefix"].to_str().unwrap();
    assert!(key.len() == 16 && key.bytes().all(|byte| byte.is_ascii_hexdigit()));
    // A stream's head comes with its first token, and knows.
    let owl = "The red fox likes the wood. ".repeat(10) + &"The blue owl sleeps. ".repeat(20);
    let other = chat(&owl, json!({"max_tokens": 1, "stream": true}));
    let second = post(&app, CHAT, other).await;
    let told = second.headers["x-carat-cache"].to_str().unwrap().to_owned();
    let (cached, rest) = told.split_once('/').unwrap();
    let cached: u64 = cached.parse().unwrap();
    assert!(cached >= 32 && cached < prompt, "{told}");
    assert!(
        rest.contains(&format!("miss=diverged; at={cached}; turn=0")),
        "{told}"
    );
    let again = chat(&long("Why?"), json!({"max_tokens": 1, "explain": true}));
    let again = post(&app, CHAT, again).await.json();
    let cache = &again["carat"]["cache"];
    assert_eq!((&cache["miss"], &cache["at"]), (&Value::Null, &Value::Null));
    assert_eq!(cache["from"]["device"], cache["cached"]);
    let text = "The red fox likes the wood. ".repeat(10) + &"A green frog jumps far. ".repeat(20);
    let other = chat(&text, json!({"max_tokens": 1, "explain": true}));
    let other = post(&app, CHAT, other).await.json();
    let cache = &other["carat"]["cache"];
    assert_eq!(
        (&cache["miss"], &cache["turn"]),
        (&json!("diverged"), &json!(0))
    );
    let (before, after) = (
        cache["before"].as_str().unwrap(),
        cache["after"].as_str().unwrap(),
    );
    assert!(
        before.len() == 40 && before.contains("fox likes the wood."),
        "{cache}"
    );
    assert!(after.len() == 40, "{cache}");
    assert!(text.contains(&format!("{before}{after}")), "{cache}");
}

#[tokio::test]
async fn a_stream_has_one_role_pieces_and_one_reason() {
    let asked = chat(
        "Hello!",
        json!({"stream": true, "stream_options": {"include_usage": true}}),
    );
    let answer = post(&demo(), CHAT, asked).await;
    assert_eq!(
        answer.headers["content-type"],
        "text/event-stream; charset=utf-8"
    );
    let chunks = answer.chunks(true);
    let (usage, chunks) = chunks.split_last().unwrap();
    assert_eq!(usage["choices"], json!([]));
    assert_eq!(usage["usage"]["completion_tokens"], 10);
    let id = &chunks[0]["id"];
    let mut text = String::new();
    for (n, chunk) in chunks.iter().enumerate() {
        assert_eq!(&chunk["id"], id);
        assert_eq!(chunk["object"], "chat.completion.chunk");
        assert!(
            chunk.get("usage").is_none(),
            "usage comes in the last chunk alone"
        );
        let delta = &chunk["choices"][0]["delta"];
        assert_eq!(
            delta.get("role").is_some(),
            n == 0,
            "the role comes once, first"
        );
        text += delta["content"].as_str().unwrap_or("");
        let reason = &chunk["choices"][0]["finish_reason"];
        let expected = if n + 1 == chunks.len() {
            json!("stop")
        } else {
            Value::Null
        };
        assert_eq!(*reason, expected);
    }
    assert_eq!(text, "Hello! How can I help you today?");
}

#[tokio::test]
async fn a_thought_is_apart_from_the_answer() {
    let asked = chat("What is 347 + 285?", json!({"reasoning_effort": "low"}));
    let body = post(&demo(), CHAT, asked).await.json();
    let message = &body["choices"][0]["message"];
    assert_eq!(message["content"], "347 + 285 = 632.");
    let thought = message["reasoning_content"].as_str().unwrap();
    assert!(!thought.is_empty() && !thought.contains('<'), "{thought}");
    let thinking = &body["usage"]["completion_tokens_details"]["reasoning_tokens"];
    let all = &body["usage"]["completion_tokens"];
    assert!(thinking.as_u64() > Some(0) && thinking.as_u64() < all.as_u64());
}

#[tokio::test]
async fn a_thought_ends_at_its_budget() {
    let more = json!({"thinking": {"type": "enabled", "budget_tokens": 4}});
    let body = post(&demo(), CHAT, chat("What is 347 + 285?", more))
        .await
        .json();
    let thinking = &body["usage"]["completion_tokens_details"]["reasoning_tokens"];
    assert!(thinking.as_u64().unwrap() <= 8, "{body}");
    let content = body["choices"][0]["message"]["content"].as_str().unwrap();
    assert!(!content.is_empty());
}

#[tokio::test]
async fn a_tool_is_called_and_its_result_is_used() {
    let app = demo();
    let question = "What is the weather in Paris?";
    let body = post(&app, CHAT, chat(question, json!({"tools": [weather()]})))
        .await
        .json();
    let choice = &body["choices"][0];
    assert_eq!(choice["finish_reason"], "tool_calls");
    assert_eq!(choice["message"]["content"], Value::Null);
    let call = &choice["message"]["tool_calls"][0];
    assert_eq!(call["type"], "function");
    assert_eq!(
        call["function"],
        json!({"name": "get_weather", "arguments": "{\"city\":\"Paris\"}"})
    );
    let id = call["id"].as_str().unwrap();
    assert!(id.starts_with("call_"));
    let mut second = chat(question, json!({"tools": [weather()]}));
    second["messages"] = json!([
        {"role": "user", "content": question},
        choice["message"],
        {"role": "tool", "tool_call_id": id, "content": "{\"temperature\": 21, \"sky\": \"clear\"}"},
    ]);
    let body = post(&app, CHAT, second).await.json();
    assert_eq!(body["choices"][0]["finish_reason"], "stop", "{body}");
    let content = body["choices"][0]["message"]["content"].as_str().unwrap();
    assert!(content.contains("21"), "{content}");
}

#[tokio::test]
async fn a_streamed_call_has_its_head_once() {
    let more = json!({"tools": [weather()], "stream": true});
    let answer = post(&demo(), CHAT, chat("What is the weather in Paris?", more)).await;
    let deltas: Vec<Value> = answer
        .chunks(true)
        .iter()
        .filter_map(|c| c["choices"][0]["delta"]["tool_calls"].as_array().cloned())
        .flatten()
        .collect();
    let (head, rest) = deltas.split_first().unwrap();
    assert_eq!(head["index"], 0);
    assert_eq!(head["type"], "function");
    assert_eq!(
        head["function"],
        json!({"name": "get_weather", "arguments": ""})
    );
    assert!(head["id"].is_string());
    let mut arguments = String::new();
    for delta in rest {
        let keys: Vec<&String> = delta.as_object().unwrap().keys().collect();
        assert_eq!(
            keys,
            ["index", "function"],
            "neither id nor type come again"
        );
        assert!(delta["function"].get("name").is_none());
        arguments += delta["function"]["arguments"].as_str().unwrap();
    }
    assert_eq!(arguments, "{\"city\":\"Paris\"}");
    assert!(
        rest.len() > 2,
        "as they are written, not all at once: {rest:?}"
    );
}

/// Without a grammar nobody knows before its end whether a call is sound.
#[tokio::test]
async fn a_call_that_nothing_holds_comes_whole() {
    let app = app(Config {
        tool_grammar: false,
        ..Config::default()
    });
    let more = json!({"tools": [weather()], "stream": true});
    let answer = post(&app, CHAT, chat("What is the weather in Paris?", more)).await;
    let pieces: Vec<Value> = answer
        .chunks(true)
        .iter()
        .filter_map(|c| c["choices"][0]["delta"].get("tool_calls").cloned())
        .map(|calls| calls[0]["function"]["arguments"].clone())
        .collect();
    assert_eq!(pieces, ["", "{\"city\":\"Paris\"}"]);
}

#[tokio::test]
async fn a_streamed_call_that_is_cut_off_is_told_once() {
    let app = demo();
    let cut = |streams: bool| {
        let more = json!({"tools": [weather()], "tool_choice": "required", "max_tokens": 14, "stream": streams});
        post(&app, CHAT, chat("What is the weather in Paris?", more))
    };
    let answer = cut(true).await;
    let chunks = answer.chunks(true);
    let deltas: Vec<&Value> = chunks.iter().map(|c| &c["choices"][0]["delta"]).collect();
    let arguments = deltas.iter().filter_map(|delta| delta.get("tool_calls"));
    let arguments = arguments.filter_map(|calls| calls[0]["function"]["arguments"].as_str());
    let arguments: String = arguments.collect();
    assert_eq!(arguments, "{\"city\":\"Paris", "{}", answer.text);
    let contents = deltas.iter().filter_map(|delta| delta["content"].as_str());
    assert_eq!(
        contents.collect::<String>(),
        "",
        "what is in the call is not text too"
    );
    let last = chunks
        .iter()
        .find(|c| c["choices"][0]["finish_reason"] == "length");
    let last = last.expect("it was cut off");
    assert_eq!(
        last["carat"]["invalid_calls"].as_array().map(Vec::len),
        Some(1),
        "{last}"
    );
    // Whole answers have it as text, since there is no call to make.
    let body = cut(false).await.json();
    let message = &body["choices"][0]["message"];
    assert!(message.get("tool_calls").is_none(), "{body}");
    assert!(
        message["content"].as_str().unwrap().contains("get_weather"),
        "{body}"
    );
}

#[tokio::test]
async fn tool_choice_is_kept() {
    let app = demo();
    let required = json!({"tools": [weather()], "tool_choice": "required", "max_tokens": 60});
    let body = post(&app, CHAT, chat("Hello!", required)).await.json();
    assert_eq!(body["choices"][0]["finish_reason"], "tool_calls", "{body}");
    let none = json!({"tools": [weather()], "tool_choice": "none"});
    let body = post(&app, CHAT, chat("What is the weather in Paris?", none))
        .await
        .json();
    assert!(
        body["choices"][0]["message"].get("tool_calls").is_none(),
        "{body}"
    );
    let named = json!({"tools": [weather()], "tool_choice": {"type": "function", "function": {"name": "get_time"}}});
    let answer = post(&app, CHAT, chat("Hello!", named)).await;
    assert_eq!(answer.status, 400);
    assert_eq!(answer.json()["error"]["param"], "tool_choice");
}

#[tokio::test]
async fn a_schema_is_kept_at_any_temperature() {
    let schema = json!({
        "type": "object",
        "properties": {"name": {"type": "string", "maxLength": 12}, "age": {"type": "integer", "minimum": 0, "maximum": 150}},
        "required": ["name", "age"], "additionalProperties": false,
    });
    for seed in 0..4 {
        let more = json!({
            "temperature": 2.0, "seed": seed, "max_tokens": 300,
            "response_format": {"type": "json_schema", "json_schema": {"name": "person", "strict": true, "schema": schema}},
        });
        let body = post(&demo(), CHAT, chat("Make up a person.", more))
            .await
            .json();
        let choice = &body["choices"][0];
        assert_eq!(choice["finish_reason"], "stop", "{body}");
        let value: Value =
            serde_json::from_str(choice["message"]["content"].as_str().unwrap()).unwrap();
        assert!(value["name"].as_str().unwrap().chars().count() <= 12);
        assert!(value["age"].as_u64().unwrap() <= 150);
    }
}

#[tokio::test]
async fn a_schema_that_cannot_be_kept_is_refused_by_name() {
    let more = json!({"response_format": {"type": "json_schema", "json_schema": {
        "name": "x", "strict": true, "schema": {"type": "object", "not": {"type": "string"}},
    }}});
    let answer = post(&demo(), CHAT, chat("Hello!", more)).await;
    assert_eq!(answer.status, 400);
    let error = &answer.json()["error"];
    assert_eq!(error["code"], "unsupported_schema");
    assert!(
        error["message"].as_str().unwrap().contains("not"),
        "{error}"
    );
}

#[tokio::test]
async fn other_servers_names_for_formats_are_understood() {
    let app = demo();
    for more in [
        json!({"guided_choice": ["yes", "no"]}),
        json!({"guided_regex": "yes|no"}),
        json!({"structured_outputs": {"choice": ["yes", "no"]}}),
        json!({"grammar": "root ::= \"yes\" | \"no\""}),
        json!({"response_format": {"type": "regex", "pattern": "yes|no"}}),
    ] {
        let body = post(&app, CHAT, chat("Is the sky blue?", more.clone()))
            .await
            .json();
        let content = body["choices"][0]["message"]["content"]
            .as_str()
            .unwrap_or("");
        assert!(content == "yes" || content == "no", "{more}: {body}");
    }
}

#[tokio::test]
async fn a_stop_string_ends_the_text_before_it() {
    let body = post(&demo(), CHAT, chat("Hello!", json!({"stop": ["help yo"]})))
        .await
        .json();
    assert_eq!(
        body["choices"][0]["message"]["content"],
        "Hello! How can I "
    );
    assert_eq!(body["choices"][0]["finish_reason"], "stop");
}

#[tokio::test]
async fn several_choices_come_from_seeds_in_a_row() {
    let app = demo();
    let asked = |seed: u64, n: u64| {
        chat(
            "Tell me a story about a fox.",
            json!({"temperature": 1.0, "seed": seed, "n": n, "max_tokens": 12}),
        )
    };
    let three = post(&app, CHAT, asked(7, 3)).await.json();
    for n in 0..3 {
        let one = post(&app, CHAT, asked(7 + n, 1)).await.json();
        let choice = &three["choices"][n as usize];
        assert_eq!(choice["index"], n);
        assert_eq!(choice["message"], one["choices"][0]["message"]);
    }
}

#[tokio::test]
async fn roles_of_all_choices_come_first() {
    let asked = chat("Hello!", json!({"n": 3, "stream": true, "max_tokens": 3}));
    let chunks = post(&demo(), CHAT, asked).await.chunks(true);
    for (n, chunk) in chunks.iter().take(3).enumerate() {
        assert_eq!(chunk["choices"][0]["index"], n);
        assert_eq!(chunk["choices"][0]["delta"]["role"], "assistant");
    }
    let ends = chunks
        .iter()
        .filter(|c| c["choices"][0]["finish_reason"] == "length")
        .count();
    assert_eq!(ends, 3);
}

#[tokio::test]
async fn log_probabilities_belong_to_the_text() {
    let asked = chat("Hello!", json!({"logprobs": true, "top_logprobs": 2}));
    let body = post(&demo(), CHAT, asked).await.json();
    let choice = &body["choices"][0];
    let tokens = choice["logprobs"]["content"].as_array().unwrap();
    let text: String = tokens
        .iter()
        .map(|t| t["token"].as_str().unwrap())
        .collect();
    assert_eq!(text, choice["message"]["content"].as_str().unwrap());
    for token in tokens {
        assert_eq!(token["top_logprobs"].as_array().unwrap().len(), 2);
        assert_eq!(
            token["top_logprobs"][0]["logprob"], token["logprob"],
            "greedy takes the first"
        );
        assert!(token["bytes"].is_array());
    }
}

#[tokio::test]
async fn a_forbidden_token_does_not_come() {
    let app = demo();
    // The answer's first token.
    let body = post(
        &app,
        CHAT,
        chat("Hello!", json!({"logit_bias": {"861": -100}})),
    )
    .await
    .json();
    let text = body["choices"][0]["message"]["content"].as_str().unwrap();
    assert!(!text.starts_with("Hello"), "{text}");
    let answer = post(
        &app,
        CHAT,
        chat("Hello!", json!({"logit_bias": {"861": -101}})),
    )
    .await;
    assert_eq!(answer.json()["error"]["param"], "logit_bias.861");
}

#[tokio::test]
async fn an_answer_is_gone_on_with() {
    let mut asked = chat("", json!({"add_generation_prompt": false}));
    asked["messages"] = json!([
        {"role": "user", "content": "Hello!"},
        {"role": "assistant", "content": "Hello! How can"},
    ]);
    let body = post(&demo(), CHAT, asked).await.json();
    assert_eq!(
        body["choices"][0]["message"]["content"], " I help you today?",
        "{body}"
    );
}

#[tokio::test]
async fn more_tokens_than_there_is_room_for_are_fewer() {
    let app = demo();
    let body = post(&app, CHAT, chat("Hello!", json!({"max_tokens": 1_000_000})))
        .await
        .json();
    assert_eq!(body["choices"][0]["finish_reason"], "stop");
    let long = "word ".repeat(2000);
    let answer = post(&app, CHAT, chat(&long, json!({}))).await;
    assert_eq!(answer.status, 400);
    let error = &answer.json()["error"];
    assert_eq!(error["code"], "context_length_exceeded");
    assert_eq!(error["n_ctx"], crate::support::CONTEXT);
    assert!(
        error["message"]
            .as_str()
            .unwrap()
            .contains("maximum context length")
    );
}

#[tokio::test]
async fn wrong_values_are_named() {
    let app = demo();
    for (body, param) in [
        (chat("x", json!({"n": 17})), "n"),
        (chat("x", json!({"n": "two"})), "n"),
        (chat("x", json!({"temperature": "hot"})), "temperature"),
        (chat("x", json!({"guided_choice": 3})), "guided_choice"),
        (chat("x", json!({"top_logprobs": 3})), "top_logprobs"),
        (
            chat("x", json!({"top_logprobs": 21, "logprobs": true})),
            "top_logprobs",
        ),
        (chat("x", json!({"max_tokens": 0})), "max_tokens"),
        (chat("x", json!({"temperature": -1})), "sampling"),
        (chat("x", json!({"stop": vec!["x"; 17]})), "stop"),
        (chat("x", json!({"stop": ["y".repeat(257)]})), "stop[0]"),
        (
            chat(
                "x",
                json!({"tools": [{"type": "function", "function": {"name": "a b"}}]}),
            ),
            "tools[0].function.name",
        ),
        (
            chat("x", json!({"tools": [{"type": "web_search"}]})),
            "tools[0].type",
        ),
        (
            chat("x", json!({"reasoning_effort": "huge"})),
            "reasoning_effort",
        ),
        (
            chat("x", json!({"response_format": {"type": "xml"}})),
            "response_format.type",
        ),
        (json!({"messages": []}), "messages"),
        (
            json!({"messages": [{"role": "robot", "content": "x"}]}),
            "messages[0].role",
        ),
        (
            json!({"messages": [{"role": "user", "content": 3}]}),
            "messages[0].content",
        ),
        (
            json!({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}),
            "messages[0].content[0].type",
        ),
        (
            json!({"messages": [{"role": "tool", "tool_call_id": "x", "content": "y"}]}),
            "messages[0].tool_call_id",
        ),
    ] {
        let answer = post(&app, CHAT, body.clone()).await;
        assert_eq!(answer.status, 400, "{body}: {}", answer.text);
        let error = &answer.json()["error"];
        assert_eq!(error["param"], param, "{body}: {error}");
        assert_eq!(error["type"], "invalid_request_error");
        assert!(error["message"].as_str().is_some_and(|m| m.len() > 10));
    }
}

#[tokio::test]
async fn text_is_continued() {
    let app = demo();
    let asked = json!({"prompt": "Once upon a time", "max_tokens": 8, "temperature": 0});
    let body = post(&app, "/v1/completions", asked.clone()).await.json();
    let text = body["choices"][0]["text"].as_str().unwrap().to_owned();
    assert!(!text.is_empty());
    assert_eq!(body["choices"][0]["finish_reason"], "length");
    let mut streamed = asked.clone();
    streamed["stream"] = true.into();
    let chunks = post(&app, "/v1/completions", streamed).await.chunks(true);
    let joined: String = chunks
        .iter()
        .map(|c| c["choices"][0]["text"].as_str().unwrap())
        .collect();
    assert_eq!(joined, text);
    let mut echoed = asked.clone();
    echoed["echo"] = true.into();
    echoed["n"] = 2.into();
    let body = post(&app, "/v1/completions", echoed).await.json();
    assert_eq!(
        body["choices"][1]["text"],
        format!("Once upon a time{text}")
    );
    let ids = post(
        &app,
        "/tokenize",
        json!({"content": "Once upon a time", "add_special": true}),
    )
    .await
    .json();
    let by_id =
        json!({"prompt": [ids["tokens"]], "max_tokens": 8, "temperature": 0, "logprobs": 2});
    let body = post(&app, "/v1/completions", by_id).await.json();
    assert_eq!(body["choices"][0]["text"], text);
    let lists = &body["choices"][0]["logprobs"];
    for name in ["tokens", "token_logprobs", "top_logprobs", "text_offset"] {
        assert_eq!(lists[name].as_array().unwrap().len(), 8, "{name}");
    }
}

#[tokio::test]
async fn a_prompt_is_echoed_with_what_the_model_says_of_it() {
    let app = demo();
    let ids = json!([2, 861, 365, 894, 697]);
    let asked = json!({
        "prompt": [ids], "max_tokens": 1, "temperature": 0, "logprobs": 1, "echo": true, "seed": 1234,
    });
    let body = post(&app, "/v1/completions", asked).await.json();
    let lists = &body["choices"][0]["logprobs"];
    for name in ["tokens", "token_logprobs", "top_logprobs", "text_offset"] {
        assert_eq!(lists[name].as_array().unwrap().len(), 6, "{name}: {lists}");
    }
    assert_eq!(lists["token_logprobs"][0], Value::Null);
    assert_eq!(lists["top_logprobs"][0], Value::Null);
    for n in 1..6 {
        let logprob = lists["token_logprobs"][n].as_f64().unwrap();
        let top = lists["top_logprobs"][n].as_object().unwrap();
        let best = top.values().next().unwrap().as_f64().unwrap();
        assert!(logprob <= best && best <= 0.0);
        let name = lists["tokens"][n].as_str().unwrap();
        assert_eq!(top.contains_key(name), logprob == best, "{n}: {lists}");
    }
    // The last is the answer, drawn greedily.
    assert_eq!(lists["top_logprobs"][5].as_object().unwrap().len(), 1);
}

#[tokio::test]
async fn an_echoed_prompt_that_the_model_would_end_has_a_token_behind_it_too() {
    let app = demo();
    let golden: Value =
        serde_json::from_str(include_str!("../../../../assets/golden.json")).unwrap();
    let case = &golden["cases"][0];
    let list = |name: &str| case[name].as_array().unwrap().clone();
    let mut ids = [list("prompt_ids"), list("greedy_ids")].concat();
    let stop = ids.pop().unwrap();
    let asked = json!({
        "prompt": [ids], "max_tokens": 1, "temperature": 0, "logprobs": 1, "echo": true,
    });
    let body = post(&app, "/v1/completions", asked).await.json();
    let lists = &body["choices"][0]["logprobs"];
    for name in ["tokens", "token_logprobs", "top_logprobs", "text_offset"] {
        let length = lists[name].as_array().unwrap().len();
        assert_eq!(length, ids.len() + 1, "{name}: {lists}");
    }
    let told = post(
        &app,
        "/tokenize",
        json!({"prompt": lists["tokens"][ids.len()]}),
    )
    .await;
    assert_eq!(told.json()["tokens"], json!([stop]), "{lists}");
}

#[tokio::test]
async fn tokens_go_there_and_back() {
    let app = demo();
    let text = "Hello, wörld! <|turn>";
    let body = post(
        &app,
        "/tokenize",
        json!({"prompt": text, "with_pieces": false}),
    )
    .await
    .json();
    let tokens = body["tokens"].clone();
    assert_eq!(body["count"], tokens.as_array().unwrap().len());
    let back = post(&app, "/detokenize", json!({"tokens": tokens}))
        .await
        .json();
    assert_eq!(back, json!({"content": text, "prompt": text}));
    let begins = post(&app, "/tokenize", json!({"prompt": "<bos>"}))
        .await
        .json();
    assert_eq!(begins["tokens"], json!([2]));
    let spelt = json!({"content": "<bos>", "parse_special": false});
    let spelt = post(&app, "/tokenize", spelt).await.json();
    assert!(spelt["count"].as_u64() > Some(1), "{spelt}");
    let answer = post(&app, "/detokenize", json!({"tokens": [1, 4_000_000]})).await;
    assert_eq!(answer.json()["error"]["param"], "tokens[1]");
    let shown = post(&app, "/apply-template", chat("Hello!", json!({})))
        .await
        .json();
    assert_eq!(
        shown["prompt"],
        "<bos><|turn>user\nHello!<turn|>\n<|turn>model\n"
    );
    assert_eq!(shown["count"], 11);
}

#[tokio::test]
async fn models_are_listed_for_both_families_of_clients() {
    let body = get(&demo(), "/v1/models").await.json();
    assert_eq!(body["object"], "list");
    assert_eq!(body["has_more"], false);
    let model = &body["data"][0];
    for (key, value) in [
        ("id", "pip"),
        ("object", "model"),
        ("type", "model"),
        ("owned_by", "carat"),
    ] {
        assert_eq!(model[key], value);
    }
    assert_eq!(get(&demo(), "/v1/models/pip").await.json()["id"], "pip");
}
