//! Everything at once for as long as one likes: dialects, streams, tools, schemas, thoughts, clients that leave.
//!
//! At temperature 0 an answer of an invariant engine is the same whoever else asks, so each is compared with what the same
//! request came to alone.

use std::{net::SocketAddr, sync::Arc, time::Duration};

use carat_model::backend::Batching;
use serde_json::{Value, json};
use tokio::time::Instant;

use super::{
    client::{Connection, ask, idle_after, metric, request},
    host::Hosted,
    options::{Failure, Options},
    random::Random,
    report::Report,
    server::Server,
};

const CLIENTS: usize = 6;
const THREADS: usize = 2;
/// Requests of a client that leaves before the end, out of so many.
const LEAVES: usize = 8;
/// Until caches are full and the allocator has its pools: this, or a third of the time.
const WARM: Duration = Duration::from_mins(10);
/// Growth of memory from there to the end, in percent, and how often it is looked at on the way.
const GROWTH: f64 = 5.0;
const SAMPLES: u32 = 6;
const IDLE: Duration = Duration::from_secs(20);

/// A request, and what it came to when nothing else ran.
struct Known {
    path: &'static str,
    body: String,
    alone: String,
}

/// Results that a client saw.
#[derive(Default)]
struct Tally {
    answered: usize,
    left: usize,
    parted: Vec<String>,
    failed: Vec<String>,
}

pub(super) fn server() -> Result<Server, Failure> {
    Server::demo(4, THREADS, |engine| engine.batching = Batching::Invariant)
}

pub(super) async fn run(options: &Options, report: &mut Report) -> Result<(), Failure> {
    let time = options.time(60);
    let server = Hosted::new("soak", options)?;
    let address = server.address;
    let mut known = Vec::new();
    for (path, body) in requests() {
        let body = body.to_string();
        let answer = ask(address, "POST", path, &body).await?;
        if answer.head.status != 200 {
            let text = answer.text();
            return Err(format!("{path}: {} {text}", answer.head.status).into());
        }
        let alone = essence(path, &answer.text());
        known.push(Known { path, body, alone });
    }
    let known = Arc::new(known);
    let asked_before = metric(address, "http_requests_total", "status=\"200\"").await?;
    let begun = Instant::now();
    let clients: Vec<_> = (0..CLIENTS)
        .map(|n| tokio::spawn(client(address, n as u64, Arc::clone(&known), begun + time)))
        .collect();
    let warm_after = (time / 3).min(WARM);
    let mut resident = Vec::new();
    for sample in 0..=SAMPLES {
        let at = warm_after + time.saturating_sub(warm_after) * sample / SAMPLES;
        tokio::time::sleep_until(begun + at).await;
        resident.extend(server.resident_kib());
    }
    let mut tally = Tally::default();
    for one in clients {
        let one = one.await??;
        tally.answered += one.answered;
        tally.left += one.left;
        tally.parted.extend(one.parted);
        tally.failed.extend(one.failed);
    }
    report.figure(
        "answered, left",
        format_args!("{}, {}", tally.answered, tally.left),
    );
    let failed = tally.failed.len();
    report.must(failed == 0, format_args!("{failed} failed"));
    for one in tally.failed.iter().take(5) {
        report.figure("failed", one);
    }
    let parted = tally.parted.len();
    report.must(parted == 0, format_args!("{parted} other than alone"));
    for one in tally.parted.iter().take(5) {
        report.figure("other than alone", one);
    }
    let idle = idle_after(address, IDLE).await?;
    report.must(idle.is_some(), "nothing runs on");
    let held = metric(address, "kv_pages", "state=\"held\"").await?;
    report.must(held == 0.0, format_args!("pages still held: {held}"));
    let answered = metric(address, "http_requests_total", "status=\"200\"").await? - asked_before;
    // Pages of metrics are requests too, and who left early may have been answered.
    let least = tally.answered as f64;
    report.must(
        answered >= least && answered <= least + tally.left as f64 + 2000.0,
        format_args!("{answered} counted as answered"),
    );
    if let [warm, .., end] = resident[..] {
        let mib: Vec<_> = resident
            .iter()
            .map(|kib| format!("{:.1}", kib / 1024.0))
            .collect();
        let from = warm_after.as_secs();
        report.figure(format_args!("MiB from {from} s on"), mib.join(" "));
        report.at_most("growth of memory", (end / warm - 1.0) * 100.0, GROWTH, "%");
    }
    report.must(server.end()?, "nothing in the server panicked");
    Ok(())
}

async fn client(
    address: SocketAddr,
    seed: u64,
    known: Arc<Vec<Known>>,
    end: Instant,
) -> Result<Tally, Failure> {
    let mut random = Random(seed);
    let mut tally = Tally::default();
    while Instant::now() < end {
        let one = &known[random.below(known.len())];
        if random.below(LEAVES) == 0 {
            let mut connection = Connection::open(address).await?;
            connection
                .send(&request("POST", one.path, &one.body))
                .await?;
            tokio::time::sleep(Duration::from_millis(random.below(100) as u64)).await;
            tally.left += 1;
            continue;
        }
        let answer = ask(address, "POST", one.path, &one.body).await?;
        if answer.head.status != 200 {
            let text = answer.text();
            let status = answer.head.status;
            tally.failed.push(format!("{}: {status} {text}", one.path));
            continue;
        }
        tally.answered += 1;
        let here = essence(one.path, &answer.text());
        if here != one.alone {
            tally.parted.push(format!(
                "{} {}\n      alone {}\n      here  {here}",
                one.path, one.body, one.alone
            ));
        }
    }
    Ok(tally)
}

/// The requests, each good for an answer that does not depend on chance.
fn requests() -> Vec<(&'static str, Value)> {
    let user = |content: &str| json!([{"role": "user", "content": content}]);
    let parameters = json!({
        "type": "object",
        "properties": {"city": {"type": "string", "description": "The name of the city"}},
        "required": ["city"],
    });
    let tool = json!({"type": "function", "function": {
        "name": "get_weather", "description": "Get the weather in a city", "parameters": parameters}});
    let chat = "/v1/chat/completions";
    let weather = "What is the weather in Paris?";
    let schema = json!({"type": "object", "properties": {"name": {"type": "string", "maxLength": 12}, "age": {"type": "integer", "minimum": 0, "maximum": 99}},
        "required": ["name", "age"], "additionalProperties": false});
    let story = "Tell me a story about a fox.";
    let mut all = vec![
        (
            "/v1/completions",
            json!({"prompt": "Once upon a time", "max_tokens": 24, "temperature": 0}),
        ),
        (
            "/v1/completions",
            json!({"prompt": "Once upon a time", "max_tokens": 24, "temperature": 0, "stream": true}),
        ),
        (
            "/v1/messages",
            json!({"messages": user(weather), "max_tokens": 60, "temperature": 0,
            "tools": [{"name": "get_weather", "description": "Get the weather in a city", "input_schema": parameters}]}),
        ),
        (
            chat,
            json!({"messages": user("What is 347 + 285?"), "reasoning_effort": "low", "max_tokens": 200, "temperature": 0}),
        ),
        (
            chat,
            json!({"messages": user("Invent a person."), "max_tokens": 60, "temperature": 0,
            "response_format": {"type": "json_schema", "json_schema": {"name": "person", "schema": schema}}}),
        ),
        (
            chat,
            json!({"messages": user(weather), "tools": [tool], "tool_choice": "required", "max_tokens": 60, "temperature": 0}),
        ),
        (
            chat,
            json!({"messages": user(story), "max_tokens": 40, "temperature": 0, "n": 2, "stop": ["zebra"]}),
        ),
    ];
    for content in ["Hello!", story] {
        for stream in [false, true] {
            let messages = user(content);
            all.extend([
                (chat, json!({"messages": messages, "max_tokens": 48, "temperature": 0, "stream": stream})),
                ("/v1/responses", json!({"input": messages, "max_output_tokens": 48, "temperature": 0, "stream": stream})),
                ("/v1/messages", json!({"messages": messages, "max_tokens": 48, "temperature": 0, "stream": stream})),
                ("/api/chat", json!({"model": "pip", "messages": messages, "stream": stream, "options": {"temperature": 0, "num_predict": 48}})),
            ]);
        }
    }
    all
}

/// Texts of an answer in order, without ids, times and how pieces were cut.
fn essence(path: &str, text: &str) -> String {
    let mut out = String::new();
    for line in text.lines() {
        let line = line.strip_prefix("data: ").unwrap_or(line);
        let Ok(value) = serde_json::from_str::<Value>(line) else {
            continue;
        };
        // The events of this interface repeat the whole at the end; that is enough.
        let value = match path {
            "/v1/responses" if value.get("type").is_some() => match value.get("response") {
                Some(response)
                    if value["type"] == "response.completed"
                        || value["type"] == "response.incomplete" =>
                {
                    response.clone()
                }
                _ => continue,
            },
            _ => value,
        };
        gather(&value, &mut out);
    }
    out
}

const TEXTS: [&str; 9] = [
    "content",
    "text",
    "reasoning_content",
    "thinking",
    "arguments",
    "partial_json",
    "finish_reason",
    "stop_reason",
    "done_reason",
];

fn gather(value: &Value, out: &mut String) {
    match value {
        Value::Object(map) => {
            for (key, inner) in map {
                match inner {
                    Value::String(text) if TEXTS.contains(&key.as_str()) => out.push_str(text),
                    Value::Object(input) if key == "input" => {
                        out.push_str(&Value::Object(input.clone()).to_string());
                    }
                    Value::Object(_) | Value::Array(_) => gather(inner, out),
                    _ => {}
                }
            }
        }
        Value::Array(list) => {
            for inner in list {
                gather(inner, out);
            }
        }
        _ => {}
    }
}
