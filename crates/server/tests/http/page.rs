//! The page's files and what its dashboard asks for.

use std::{
    collections::BTreeSet,
    sync::Arc,
    time::{Duration, Instant},
};

use crate::support::{Answer, PATIENCE, app, demo, get, plain, post, request};
use bytes::Bytes;
use carat_server::{App, Config, Key, handle};
use http::{Method, Request};
use http_body_util::{BodyExt, Full};
use serde_json::{Value, json};

#[tokio::test]
async fn the_page_is_there_without_a_key_and_holds_browsers_to_its_rules() {
    let app = app(Config {
        keys: vec![Key::parse("alice=wonderland").unwrap()],
        ..Config::default()
    });
    for path in ["/", "/dashboard", "/web/app.js", "/web/style.css"] {
        let answer = get(&app, path).await;
        assert_eq!(answer.status, 200, "{path}");
        let rules = answer.headers["content-security-policy"].to_str().unwrap();
        for rule in [
            "default-src 'none'",
            "script-src 'self'",
            "frame-ancestors 'none'",
            "require-trusted-types-for 'script'",
        ] {
            assert!(rules.contains(rule), "{path}: {rules}");
        }
        assert!(!rules.contains("unsafe"), "{path}: {rules}");
        assert_eq!(answer.headers["x-content-type-options"], "nosniff");
        assert_eq!(answer.headers["referrer-policy"], "no-referrer");
    }
    assert!(get(&app, "/").await.text.starts_with("<!doctype html>"));
    let sandbox = get(&app, "/web/sandbox.html").await;
    let rules = sandbox.headers["content-security-policy"].to_str().unwrap();
    assert!(rules.starts_with("sandbox allow-scripts;"), "{rules}");
    for path in ["/internal/stats", "/internal/requests"] {
        assert_eq!(get(&app, path).await.status, 401, "{path}");
    }
    for path in ["/web/", "/web/nothing", "/web/../Cargo.toml", "/web/%2e%2e"] {
        assert_eq!(get(&app, path).await.status, 404, "{path}");
    }
}

#[tokio::test]
async fn a_file_that_has_not_changed_is_not_sent_again() {
    let app = demo();
    let first = get(&app, "/web/app.js").await;
    let tag = first.headers["etag"].clone();
    for (given, status) in [
        (tag.to_str().unwrap().to_owned(), 304),
        (format!("\"other\", W/{}", tag.to_str().unwrap()), 304),
        ("\"other\"".to_owned(), 200),
    ] {
        let mut again = plain(Method::GET, "/web/app.js", "");
        again
            .headers_mut()
            .insert("if-none-match", given.parse().unwrap());
        let again = request(&app, again).await;
        assert_eq!(again.status, status, "{given}");
        assert_eq!(again.text.is_empty(), status == 304);
        assert_eq!(again.headers["etag"], tag);
    }
}

/// Goes on until it is cancelled.
fn endless(id: &str) -> Request<Full<Bytes>> {
    let body = json!({
        "messages": [{"role": "user", "content": "Go on."}], "ignore_eos": true, "max_tokens": 900,
    });
    let mut asked = plain(Method::POST, "/v1/chat/completions", &body.to_string());
    let headers = asked.headers_mut();
    headers.insert("x-request-id", id.parse().unwrap());
    asked
}

fn with_key(mut request: Request<Full<Bytes>>, key: &str) -> Request<Full<Bytes>> {
    let headers = request.headers_mut();
    headers.insert("x-api-key", key.parse().unwrap());
    request
}

/// The entry of a request, when it has come up.
async fn listed(app: &Arc<App>, id: &str, key: &str) -> Value {
    let end = Instant::now() + PATIENCE;
    while Instant::now() < end {
        let asked = with_key(plain(Method::GET, "/internal/requests", ""), key);
        let answer = request(app, asked).await.json();
        let requests = answer["requests"].as_array().unwrap();
        if let Some(found) = requests.iter().find(|r| r["id"] == id) {
            return found.clone();
        }
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    panic!("{id} never came up");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_request_under_way_is_listed_and_can_be_ended_by_its_own_key() {
    let app = app(Config {
        keys: vec![
            Key::parse("alice=wonderland").unwrap(),
            Key::parse("bob=builders1").unwrap(),
        ],
        ..Config::default()
    });
    let its_app = Arc::clone(&app);
    let answer = tokio::spawn(async move {
        request(&its_app, with_key(endless("one"), "wonderland"))
            .await
            .json()
    });
    let entry = listed(&app, "one", "wonderland").await;
    assert_eq!(entry["route"], "/v1/chat/completions");
    assert_eq!(entry["lane"], "alice");
    assert!(entry["prompt_tokens"].as_u64().unwrap() > 0);
    let path = format!("/internal/requests/{}", entry["number"]);
    let others = with_key(plain(Method::GET, "/internal/requests", ""), "builders1");
    assert_eq!(request(&app, others).await.json()["requests"], json!([]));
    let stranger = with_key(plain(Method::DELETE, &path, ""), "builders1");
    assert_eq!(request(&app, stranger).await.status, 404);
    let own = with_key(plain(Method::DELETE, &path, ""), "wonderland");
    assert_eq!(request(&app, own).await.status, 200);
    let answer = answer.await.unwrap();
    let tokens = answer["usage"]["completion_tokens"].as_u64().unwrap();
    assert!(tokens < 900, "{tokens} tokens came all the same");
    let after = with_key(plain(Method::GET, "/internal/requests", ""), "wonderland");
    assert_eq!(request(&app, after).await.json()["requests"], json!([]));
}

/// The first event of the figures; their stream has no end.
async fn figures(app: &Arc<App>) -> Value {
    first_figures(app, plain(Method::GET, "/internal/stats", "")).await
}

async fn first_figures(app: &Arc<App>, asked: Request<Full<Bytes>>) -> Value {
    let mut body = handle(Arc::clone(app), asked).await.into_body();
    let frame = body.frame().await.unwrap().unwrap();
    let text = String::from_utf8(frame.into_data().unwrap().to_vec()).unwrap();
    serde_json::from_str(text.strip_prefix("data: ").unwrap().trim()).unwrap()
}

#[tokio::test]
async fn the_figures_add_up() {
    let app = app(Config::default());
    let hello = json!({"messages": [{"role": "user", "content": "Hello!"}], "temperature": 0});
    let answer = post(&app, "/v1/chat/completions", hello).await.json();
    let figures = figures(&app).await;
    let generated = &answer["usage"]["completion_tokens"];
    assert_eq!(&figures["finished"]["stop"], 1);
    assert_eq!(
        &figures["totals"]["prompt_tokens"],
        &answer["usage"]["prompt_tokens"]
    );
    let counted = |name: &str| -> u64 {
        let counts = figures[name]["counts"].as_array().unwrap();
        assert_eq!(
            counts.len(),
            figures[name]["bounds"].as_array().unwrap().len() + 1
        );
        counts.iter().map(|count| count.as_u64().unwrap()).sum()
    };
    assert_eq!(counted("first_token"), 1);
    assert!(counted("inter_token") < generated.as_u64().unwrap());
    assert_eq!(figures["running"], 0);
    assert_eq!(figures["requests"], json!([]));
    assert_eq!(figures["faults"], json!([]));
}

#[tokio::test]
async fn the_latest_misses_are_listed_with_their_reasons_for_their_own_key() {
    let app = app(Config {
        keys: vec![
            Key::parse("alice=wonderland").unwrap(),
            Key::parse("bob=builders1").unwrap(),
        ],
        ..Config::default()
    });
    let ask = async |content: &str, id: &str, key: &str| {
        let body = json!({"messages": [{"role": "user", "content": content}], "max_tokens": 1});
        let mut asked = plain(Method::POST, "/v1/chat/completions", &body.to_string());
        let headers = asked.headers_mut();
        headers.insert("x-request-id", id.parse().unwrap());
        let answer = request(&app, with_key(asked, key)).await;
        assert_eq!(answer.status, 200, "{}", answer.text);
    };
    let latest = async |key: &str| {
        let asked = with_key(plain(Method::GET, "/internal/stats", ""), key);
        first_figures(&app, asked).await["latest_misses"].clone()
    };
    let long = "word ".repeat(100);
    ask(&long, "first", "wonderland").await;
    // All of it that can be is cached: no miss.
    ask(&long, "again", "wonderland").await;
    ask(&format!("{long} and {long}"), "longer", "wonderland").await;
    ask(&long, "other", "builders1").await;
    let misses = latest("wonderland").await;
    let told = |miss: &Value| (miss["id"].clone(), miss["why"].clone());
    let all: Vec<_> = misses.as_array().unwrap().iter().map(told).collect();
    let expected = [("longer", "diverged"), ("first", "no_match")];
    assert_eq!(all, expected.map(|(id, why)| (json!(id), json!(why))));
    let [longer, first] = [&misses[0], &misses[1]];
    assert_eq!(longer["at"], longer["cached"]);
    assert!(longer["cached"].as_u64().unwrap() >= 64, "{longer}");
    assert!(longer["prompt"].as_u64() > first["prompt"].as_u64());
    assert_eq!((&first["at"], &first["turn"]), (&json!(0), &json!(0)));
    let others = latest("builders1").await;
    assert_eq!(others.as_array().unwrap().len(), 1, "{others}");
    // The oldest go when there are more than fifty.
    for n in 0..49 {
        ask(&format!("{n} {long}"), &format!("n{n}"), "builders1").await;
    }
    assert_eq!(latest("wonderland").await, json!([]));
    let others = latest("builders1").await;
    assert_eq!(others.as_array().unwrap().len(), 50);
    assert_eq!(
        (&others[0]["id"], &others[49]["id"]),
        (&json!("n48"), &json!("other"))
    );
}

#[tokio::test]
async fn whoever_only_watches_keeps_no_server_from_ending() {
    let app = app(Config::default());
    app.drain();
    let asked = plain(Method::GET, "/internal/stats", "");
    let body = handle(Arc::clone(&app), asked).await.into_body();
    let all = tokio::time::timeout(PATIENCE, body.collect()).await;
    assert!(all.is_ok(), "the stream goes on");
}

/// Names of metrics in a text: what follows `carat:`.
fn names(text: &str) -> BTreeSet<&str> {
    let after = text.split("carat:").skip(1);
    after
        .map(|rest| {
            let end = rest.find(|c: char| !c.is_ascii_alphanumeric() && c != '_');
            &rest[..end.unwrap_or(rest.len())]
        })
        .collect()
}

#[tokio::test]
async fn grammars_are_made_ready_when_nothing_else_is_to_do() {
    const MADE: &str = "carat:grammar_mask_seconds";
    let app = app(Config::default());
    let hello = json!({"messages": [{"role": "user", "content": "Hello!"}], "max_tokens": 2});
    let preparing = tokio::spawn(Arc::clone(&app).prepare_grammars_when_idle());
    let busy = Instant::now();
    while busy.elapsed() < Duration::from_millis(2500) {
        post(&app, "/v1/chat/completions", hello.clone()).await;
        let made = get(&app, "/metrics").await.text.contains(MADE);
        assert!(!made, "after {:?} of requests", busy.elapsed());
    }
    tokio::time::timeout(PATIENCE, preparing)
        .await
        .expect("they are made")
        .unwrap();
    assert!(get(&app, "/metrics").await.text.contains(MADE));
}

#[tokio::test]
async fn every_metric_of_the_grafana_dashboard_is_there() {
    let dashboard = include_str!("../../../../deploy/grafana/carat.json");
    serde_json::from_str::<Value>(dashboard).unwrap();
    let wanted = names(dashboard);
    assert!(wanted.len() > 20, "{wanted:?}");
    let app = app(Config::default());
    app.prepare_grammars();
    let hello = json!({"messages": [{"role": "user", "content": "Hello!"}], "max_tokens": 2});
    post(&app, "/v1/chat/completions", hello).await;
    let Answer { text, .. } = get(&app, "/metrics").await;
    let there = names(&text);
    let missing: Vec<_> = wanted.difference(&there).collect();
    assert!(missing.is_empty(), "{missing:?} are not in\n{text}");
}
