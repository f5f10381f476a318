//! Several models in one process: loaded when they are asked for, within a budget, and let go.

use std::{
    collections::BTreeMap,
    sync::{
        Arc, Mutex, Weak,
        atomic::{AtomicBool, AtomicUsize, Ordering},
        mpsc,
    },
    time::{Duration, Instant},
};

use bytes::Bytes;
use carat_gguf::Gguf;
use carat_model::sampling::Sampling;
use carat_server::{App, Config, Load, Model, Offer, Residency, handle};
use http::{Method, StatusCode};
use http_body_util::BodyExt;
use serde_json::{Value, json};

use crate::support::{Answer, PATIENCE, get, info, plain, post, request, tracked};

/// Memory that a model is said to take; two of them are more than [`ONE`].
const BYTES: u64 = 60 << 20;
const ONE: u64 = 100 << 20;
const TWO: u64 = 120 << 20;

const RETRY: Duration = Duration::from_millis(200);

/// Loads the demo model under names, and sees how many are in memory.
#[derive(Default)]
struct Shelf {
    alive: Mutex<Vec<Weak<Gguf>>>,
    /// At a time, at the most.
    most: AtomicUsize,
    loads: AtomicUsize,
}

impl Shelf {
    fn load(&self, name: &str) -> Model {
        let (model, file) = tracked(name, |_| {});
        self.loads.fetch_add(1, Ordering::Relaxed);
        let mut alive = self.alive.lock().unwrap();
        alive.retain(|file| file.strong_count() > 0);
        alive.push(file);
        self.most.fetch_max(alive.len(), Ordering::Relaxed);
        model
    }

    fn loader(self: &Arc<Shelf>, name: &'static str) -> Load {
        let shelf = Arc::clone(self);
        Arc::new(move || Ok(shelf.load(name)))
    }
}

fn offer(name: &str, load: Load) -> Offer {
    Offer {
        info: info(name),
        sampling: Sampling::default(),
        parallel: 4,
        max_unfinished: 64,
        memory_bytes: BYTES,
        load,
    }
}

fn residency(memory_bytes: u64) -> Residency {
    Residency {
        memory_bytes,
        idle: None,
        retry: RETRY,
    }
}

fn app(config: Config, offers: Vec<Offer>, residency: Residency) -> Arc<App> {
    let app = App::new(config);
    app.offer(offers, residency).unwrap();
    app
}

/// `a` and `b` from one shelf.
fn pair(shelf: &Arc<Shelf>, residency: Residency) -> Arc<App> {
    let offers = ["a", "b"].map(|name| offer(name, shelf.loader(name)));
    app(Config::default(), offers.into(), residency)
}

fn ask(model: &str, tokens: usize) -> Value {
    json!({
        "model": model, "max_tokens": tokens, "temperature": 0,
        "messages": [{ "role": "user", "content": "Tell me a story." }],
    })
}

async fn chat(app: &Arc<App>, model: &str) -> Answer {
    post(app, "/v1/chat/completions", ask(model, 4)).await
}

async fn states(app: &Arc<App>) -> BTreeMap<String, String> {
    let listed = get(app, "/v1/models").await.json();
    let each = listed["data"].as_array().unwrap().iter();
    each.map(|model| {
        let text = |value: &Value| value.as_str().unwrap().to_owned();
        (text(&model["id"]), text(&model["status"]["value"]))
    })
    .collect()
}

/// Waits for a model to be in a state, which it must come to by itself.
async fn until(app: &Arc<App>, model: &str, state: &str) {
    let end = Instant::now() + PATIENCE;
    while Instant::now() < end {
        if states(app).await[model] == state {
            return;
        }
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    panic!("`{model}` did not become {state}: {:?}", states(app).await);
}

/// A series of the page of metrics.
async fn metric(app: &Arc<App>, series: &str) -> f64 {
    let page = get(app, "/metrics").await.text;
    let line = page.lines().find_map(|line| line.strip_prefix(series));
    let value = line.unwrap_or_else(|| panic!("{series} is not in\n{page}"));
    value.trim().parse().unwrap()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn models_take_turns_under_load_and_no_request_fails() {
    let shelf = Arc::<Shelf>::default();
    let app = pair(&shelf, residency(ONE));
    let ended = Arc::new(AtomicBool::new(false));
    let watching = {
        let (app, ended) = (Arc::clone(&app), Arc::clone(&ended));
        tokio::spawn(async move {
            while !ended.load(Ordering::Relaxed) {
                let states = states(&app).await;
                let here = states.values().filter(|state| *state != "unloaded");
                assert!(here.count() <= 1, "{states:?}");
                tokio::time::sleep(Duration::from_millis(2)).await;
            }
        })
    };
    let clients = (0..8).map(|client| {
        let app = Arc::clone(&app);
        tokio::spawn(async move {
            for turn in 0..6 {
                let model = ["a", "b"][(client + turn) % 2];
                let mut body = ask(model, 2 + client);
                body["stream"] = (turn % 3 != 1).into();
                match turn % 3 {
                    0 => {
                        let answer = post(&app, "/v1/chat/completions", body).await;
                        assert_eq!(answer.status, StatusCode::OK, "{}", answer.text);
                        for chunk in answer.chunks(true) {
                            assert_eq!(chunk["model"], model, "{chunk}");
                        }
                    }
                    1 => {
                        let answer = post(&app, "/v1/messages", body).await;
                        assert_eq!(answer.status, StatusCode::OK, "{}", answer.text);
                        assert_eq!(answer.json()["model"], model);
                    }
                    _ => {
                        body["options"] = json!({ "num_predict": 2 + client, "temperature": 0 });
                        let answer = post(&app, "/api/chat", body).await;
                        assert_eq!(answer.status, StatusCode::OK, "{}", answer.text);
                        let last = answer.text.lines().last().unwrap();
                        let last: Value = serde_json::from_str(last).unwrap();
                        assert_eq!(last["model"], format!("{model}:latest"));
                        assert_eq!(last["done"], true, "{last}");
                    }
                }
            }
        })
    });
    for client in clients.collect::<Vec<_>>() {
        client.await.unwrap();
    }
    ended.store(true, Ordering::Relaxed);
    watching.await.unwrap();
    assert_eq!(shelf.most.load(Ordering::Relaxed), 1);
    for name in ["a", "b"] {
        let series = format!("carat:model_loads_total{{model_name=\"{name}\"}}");
        assert!(
            metric(&app, &series).await >= 2.0,
            "{name} did not take turns"
        );
    }
    let finished = "carat:request_success_total{model_name=\"\",finished_reason=\"length\"}";
    assert_eq!(metric(&app, finished).await, 48.0);
    // Sums of an engine go on over its unloads.
    let generated = |name| format!("carat:generation_tokens_total{{model_name=\"{name}\"}}");
    let tokens = metric(&app, &generated("a")).await + metric(&app, &generated("b")).await;
    assert_eq!(tokens, 6.0 * (2..10).sum::<usize>() as f64);
}

#[tokio::test]
async fn models_that_fit_stay_side_by_side() {
    let shelf = Arc::<Shelf>::default();
    let app = pair(&shelf, residency(TWO));
    for _ in 0..3 {
        for name in ["a", "b"] {
            assert_eq!(chat(&app, name).await.status, StatusCode::OK);
        }
    }
    assert_eq!(shelf.loads.load(Ordering::Relaxed), 2);
    assert_eq!(shelf.most.load(Ordering::Relaxed), 2);
    let page = get(&app, "/metrics").await.text;
    for line in [
        "carat:model_state{model_name=\"a\",state=\"loaded\"} 1",
        "carat:model_state{model_name=\"b\",state=\"loading\"} 0",
        &format!("carat:models_memory_bytes{{model_name=\"\"}} {TWO}"),
        &format!("carat:models_memory_limit_bytes{{model_name=\"\"}} {TWO}"),
    ] {
        assert!(page.lines().any(|l| l == line), "{line} is not in\n{page}");
    }
    let heads = page.lines().filter(|l| l.starts_with("# TYPE"));
    let mut heads: Vec<&str> = heads.collect();
    let all = heads.len();
    heads.sort_unstable();
    heads.dedup();
    assert_eq!(heads.len(), all, "a metric has two heads");
}

#[tokio::test]
async fn an_answer_under_way_is_not_cut_off_by_another_model() {
    let shelf = Arc::<Shelf>::default();
    let app = pair(&shelf, residency(ONE));
    let mut body = ask("a", 300);
    body["stream"] = true.into();
    body["ignore_eos"] = true.into();
    let asked = plain(Method::POST, "/v1/chat/completions", &body.to_string());
    let mut stream = handle(Arc::clone(&app), asked).await.into_body();
    let first = stream.frame().await.unwrap().unwrap();
    let other = {
        let app = Arc::clone(&app);
        tokio::spawn(async move { chat(&app, "b").await })
    };
    let mut bytes = first.into_data().unwrap().to_vec();
    bytes.extend(stream.collect().await.unwrap().to_bytes());
    let text = String::from_utf8(bytes).unwrap();
    assert!(text.ends_with("data: [DONE]\n\n"), "{text}");
    assert!(text.contains("\"finish_reason\":\"length\""), "{text}");
    assert_eq!(other.await.unwrap().status, StatusCode::OK);
    assert_eq!(shelf.most.load(Ordering::Relaxed), 1);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_model_that_is_always_asked_for_does_not_keep_others_out() {
    let shelf = Arc::<Shelf>::default();
    let app = pair(&shelf, residency(ONE));
    let ended = Arc::new(AtomicBool::new(false));
    let busy = (0..4).map(|_| {
        let (app, ended) = (Arc::clone(&app), Arc::clone(&ended));
        tokio::spawn(async move {
            while !ended.load(Ordering::Relaxed) {
                assert_eq!(chat(&app, "a").await.status, StatusCode::OK);
            }
        })
    });
    let busy: Vec<_> = busy.collect();
    until(&app, "a", "loaded").await;
    for _ in 0..3 {
        let other = tokio::time::timeout(PATIENCE, chat(&app, "b")).await;
        assert_eq!(other.expect("`b` had its turn").status, StatusCode::OK);
    }
    ended.store(true, Ordering::Relaxed);
    for client in busy {
        client.await.unwrap();
    }
}

#[tokio::test]
async fn idle_models_are_let_go_and_come_back() {
    let shelf = Arc::<Shelf>::default();
    let residency = Residency {
        idle: Some(Duration::from_millis(30)),
        ..residency(TWO)
    };
    let app = pair(&shelf, residency);
    assert_eq!(states(&app).await["a"], "unloaded");
    assert_eq!(chat(&app, "a").await.status, StatusCode::OK);
    // Those who watch keep nothing in memory.
    until(&app, "a", "unloaded").await;
    let gone = shelf.alive.lock().unwrap()[0].strong_count() == 0;
    assert!(gone, "the model is still in memory");
    assert_eq!(chat(&app, "a").await.status, StatusCode::OK);
    assert_eq!(shelf.loads.load(Ordering::Relaxed), 2);
    let unloads = "carat:model_unloads_total{model_name=\"a\"}";
    assert!(metric(&app, unloads).await >= 1.0);
}

#[tokio::test]
async fn a_load_that_fails_tells_why_and_is_tried_again_later() {
    let shelf = Arc::<Shelf>::default();
    let (tries, broken) = (
        Arc::new(AtomicUsize::new(0)),
        Arc::new(AtomicBool::new(true)),
    );
    let load: Load = {
        let (tries, broken, shelf) = (Arc::clone(&tries), Arc::clone(&broken), Arc::clone(&shelf));
        Arc::new(move || {
            tries.fetch_add(1, Ordering::Relaxed);
            if broken.load(Ordering::Relaxed) {
                return Err("the disk is on fire".to_owned());
            }
            Ok(shelf.load("a"))
        })
    };
    let offers = vec![offer("a", load), offer("b", shelf.loader("b"))];
    let app = app(Config::default(), offers, residency(ONE));
    for _ in 0..2 {
        let refused = chat(&app, "a").await;
        assert_eq!(refused.status, StatusCode::SERVICE_UNAVAILABLE);
        assert_eq!(refused.json()["error"]["code"], "model_load_failed");
        assert!(
            refused.text.contains("the disk is on fire"),
            "{}",
            refused.text
        );
        assert!(refused.headers.contains_key("retry-after"));
    }
    assert_eq!(
        tries.load(Ordering::Relaxed),
        1,
        "it was tried again at once"
    );
    let health = get(&app, "/health").await;
    assert_eq!(health.status, StatusCode::OK);
    assert_eq!(health.json()["models"][0]["state"], "failed");
    assert_eq!(health.json()["models"][0]["failure"], "the disk is on fire");
    assert_eq!(chat(&app, "b").await.status, StatusCode::OK);
    let failures = "carat:model_load_failures_total{model_name=\"a\"}";
    assert_eq!(metric(&app, failures).await, 1.0);
    broken.store(false, Ordering::Relaxed);
    tokio::time::sleep(RETRY).await;
    assert_eq!(chat(&app, "a").await.status, StatusCode::OK);
    assert_eq!(states(&app).await["a"], "loaded");
}

#[tokio::test]
async fn a_loader_that_panics_fails_its_requests_alone() {
    let shelf = Arc::<Shelf>::default();
    let load: Load = Arc::new(|| panic!("a mistake in the loader"));
    let offers = vec![offer("a", load), offer("b", shelf.loader("b"))];
    let app = app(Config::default(), offers, residency(ONE));
    assert_eq!(
        chat(&app, "a").await.status,
        StatusCode::SERVICE_UNAVAILABLE
    );
    assert_eq!(chat(&app, "b").await.status, StatusCode::OK);
}

#[tokio::test]
async fn names_choose_and_wrong_ones_are_refused() {
    let shelf = Arc::<Shelf>::default();
    let app = pair(&shelf, residency(TWO));
    let wrong = chat(&app, "gpt-5").await;
    assert_eq!(wrong.status, StatusCode::NOT_FOUND);
    let error = &wrong.json()["error"];
    assert_eq!(error["code"], "model_not_found");
    let message = error["message"].as_str().unwrap();
    assert!(
        message.contains("`gpt-5`") && message.contains("`a`, `b`"),
        "{message}"
    );
    let one = get(&app, "/v1/models/c").await;
    assert_eq!(one.status, StatusCode::NOT_FOUND);
    assert_eq!(
        shelf.loads.load(Ordering::Relaxed),
        0,
        "a wrong name loads nothing"
    );
    let mut unnamed = ask("", 2);
    unnamed.as_object_mut().unwrap().remove("model");
    let unnamed = post(&app, "/v1/chat/completions", unnamed).await;
    assert_eq!(
        unnamed.json()["model"],
        "a",
        "the first where none is named"
    );
    let tokens = post(
        &app,
        "/tokenize",
        json!({ "model": "b", "content": "hello" }),
    )
    .await;
    assert_eq!(tokens.status, StatusCode::OK);
    assert_eq!(states(&app).await["b"], "loaded");
}

#[tokio::test]
async fn bad_requests_load_nothing() {
    let shelf = Arc::<Shelf>::default();
    let app = pair(&shelf, residency(TWO));
    let mut bad = ask("a", 4);
    bad["n"] = 99.into();
    let refused = post(&app, "/v1/chat/completions", bad).await;
    assert_eq!(refused.status, StatusCode::BAD_REQUEST, "{}", refused.text);
    assert_eq!(shelf.loads.load(Ordering::Relaxed), 0);
}

#[tokio::test]
async fn a_model_larger_than_the_budget_is_refused_with_both_sizes() {
    let shelf = Arc::<Shelf>::default();
    let app = pair(&shelf, residency(50 << 20));
    let refused = chat(&app, "a").await;
    assert_eq!(refused.status, StatusCode::SERVICE_UNAVAILABLE);
    assert_eq!(refused.json()["error"]["code"], "model_over_budget");
    assert_eq!(refused.headers["x-should-retry"], "false");
    for part in ["`a`", "60.0 MiB", "50.0 MiB", "--models-memory"] {
        assert!(
            refused.text.contains(part),
            "{part} is not in {}",
            refused.text
        );
    }
}

#[tokio::test]
async fn all_models_are_told_of_without_being_loaded() {
    let shelf = Arc::<Shelf>::default();
    let app = pair(&shelf, residency(ONE));
    let tags = get(&app, "/api/tags").await.json();
    let names: Vec<&str> = tags["models"]
        .as_array()
        .unwrap()
        .iter()
        .map(|model| model["name"].as_str().unwrap())
        .collect();
    assert_eq!(names, ["a:latest", "b:latest"]);
    assert_eq!(tags["models"][0]["state"], "unloaded");
    let shown = post(&app, "/api/show", json!({ "model": "b:latest" })).await;
    assert_eq!(shown.json()["model_info"]["general.basename"], "b");
    assert_eq!(shown.json()["state"], "unloaded");
    assert_eq!(get(&app, "/api/ps").await.json()["models"], json!([]));
    assert_eq!(get(&app, "/ready").await.status, StatusCode::OK);
    let props = get(&app, "/props?model=b").await.json();
    assert_eq!(props["model_alias"], "b");
    assert_eq!(props["status"], "unloaded");
    assert_eq!(shelf.loads.load(Ordering::Relaxed), 0);
    // A request without words loads.
    let loaded = post(&app, "/api/generate", json!({ "model": "b" })).await;
    assert_eq!(loaded.json()["done_reason"], "load");
    let ps = get(&app, "/api/ps").await.json();
    assert_eq!(ps["models"][0]["name"], "b:latest");
    assert_eq!(ps["models"][0]["size"], BYTES);
    assert_eq!(ps["models"].as_array().unwrap().len(), 1);
}

/// A loader that waits to be let go on.
fn gated(shelf: &Arc<Shelf>, name: &'static str) -> (Load, mpsc::Sender<Result<(), String>>) {
    let (open, gate) = mpsc::channel::<Result<(), String>>();
    let (shelf, gate) = (Arc::clone(shelf), Mutex::new(gate));
    let load: Load = Arc::new(move || {
        gate.lock().unwrap().recv().expect("the test opens it")?;
        Ok(shelf.load(name))
    });
    (load, open)
}

/// Begins a stream whose model is not there yet; returns when the first sign of life has come.
async fn waiting(app: &Arc<App>, path: &str, model: &str) -> (carat_server::Body, Bytes) {
    let mut body = ask(model, 4);
    body["stream"] = true.into();
    let asked = plain(Method::POST, path, &body.to_string());
    let response = handle(Arc::clone(app), asked).await;
    assert_eq!(response.status(), StatusCode::OK);
    let mut body = response.into_body();
    let first = body.frame().await.unwrap().unwrap();
    (body, first.into_data().unwrap())
}

fn impatient() -> Config {
    Config {
        ping: Duration::from_millis(20),
        ..Config::default()
    }
}

#[tokio::test]
async fn streams_show_life_while_their_model_is_loaded() {
    let shelf = Arc::<Shelf>::default();
    let (load, open) = gated(&shelf, "a");
    let app = app(impatient(), vec![offer("a", load)], residency(ONE));
    let (chat, first) = waiting(&app, "/v1/chat/completions", "a").await;
    assert_eq!(first, ": ping\n\n");
    assert_eq!(states(&app).await["a"], "loading");
    let health = get(&app, "/health").await.json();
    assert_eq!(health["models"][0]["state"], "loading");
    let (ollama, line) = waiting(&app, "/api/chat", "a").await;
    let line: Value = serde_json::from_slice(&line).unwrap();
    assert_eq!(line["done"], false);
    assert_eq!(line["message"]["content"], "");
    open.send(Ok(())).unwrap();
    let text = chat.collect().await.unwrap().to_bytes();
    let text = String::from_utf8(text.to_vec()).unwrap();
    assert!(text.contains("\"role\":\"assistant\""), "{text}");
    assert!(text.ends_with("data: [DONE]\n\n"), "{text}");
    let lines = ollama.collect().await.unwrap().to_bytes();
    let lines = String::from_utf8(lines.to_vec()).unwrap();
    let last: Value = serde_json::from_str(lines.lines().last().unwrap()).unwrap();
    assert_eq!(last["done"], true, "{lines}");
}

#[tokio::test]
async fn streams_that_showed_life_say_when_the_load_fails() {
    let shelf = Arc::<Shelf>::default();
    let (load, open) = gated(&shelf, "a");
    let app = app(impatient(), vec![offer("a", load)], residency(ONE));
    let mut streams = Vec::new();
    for path in ["/v1/chat/completions", "/v1/messages", "/api/chat"] {
        streams.push((path, waiting(&app, path, "a").await.0));
    }
    open.send(Err("the disk is on fire".to_owned())).unwrap();
    for (path, stream) in streams {
        let text = stream.collect().await.unwrap().to_bytes();
        let text = String::from_utf8(text.to_vec()).unwrap();
        let last = text.trim_end().lines().last().unwrap();
        let json = last.strip_prefix("data: ").unwrap_or(last);
        let json: Value = serde_json::from_str(json).unwrap();
        let told = json["error"]["message"].as_str().or(json["error"].as_str());
        assert!(
            told.unwrap().contains("the disk is on fire"),
            "{path}: {text}"
        );
        assert_eq!(text.contains("event: error"), path == "/v1/messages");
    }
}

#[tokio::test]
async fn the_line_for_a_model_has_the_limits_of_the_queue() {
    let shelf = Arc::<Shelf>::default();
    let (load, open) = gated(&shelf, "a");
    let one = Offer {
        max_unfinished: 1,
        ..offer("a", load)
    };
    let config = Config {
        queue_timeout: Some(Duration::from_millis(50)),
        ..Config::default()
    };
    let app = app(
        config,
        vec![one, offer("b", shelf.loader("b"))],
        residency(ONE),
    );
    let (first, second) = tokio::join!(chat(&app, "a"), chat(&app, "a"));
    assert_eq!(
        second.status,
        StatusCode::TOO_MANY_REQUESTS,
        "{}",
        second.text
    );
    assert_eq!(first.status, StatusCode::SERVICE_UNAVAILABLE);
    assert_eq!(first.json()["error"]["code"], "queue_timeout");
    let series = "carat:admission_rejections_total{model_name=\"\",reason=\"timeout\"}";
    assert_eq!(metric(&app, series).await, 1.0);
    open.send(Ok(())).unwrap();
    until(&app, "a", "loaded").await;
}

#[tokio::test]
async fn a_client_that_leaves_the_line_opens_the_model_again() {
    let shelf = Arc::<Shelf>::default();
    let app = pair(&shelf, residency(ONE));
    let mut body = ask("a", 900);
    body["stream"] = true.into();
    body["ignore_eos"] = true.into();
    let asked = plain(Method::POST, "/v1/chat/completions", &body.to_string());
    let mut stream = handle(Arc::clone(&app), asked).await.into_body();
    stream.frame().await.unwrap().unwrap();
    let asked = plain(
        Method::POST,
        "/v1/chat/completions",
        &ask("b", 4).to_string(),
    );
    let left = tokio::time::timeout(Duration::from_millis(50), request(&app, asked)).await;
    assert!(left.is_err(), "`b` was answered beside `a`");
    // `a` is still being used, and takes requests again since nobody waits for its room.
    assert_eq!(chat(&app, "a").await.status, StatusCode::OK);
    assert_eq!(states(&app).await["b"], "unloaded");
    drop(stream);
}

#[tokio::test]
async fn the_dashboard_shows_every_model() {
    let shelf = Arc::<Shelf>::default();
    let app = pair(&shelf, residency(ONE));
    assert_eq!(chat(&app, "b").await.status, StatusCode::OK);
    let asked = plain(Method::GET, "/internal/stats", "");
    let mut stats = handle(Arc::clone(&app), asked).await.into_body();
    let event = stats.frame().await.unwrap().unwrap().into_data().unwrap();
    let figures: Value = serde_json::from_slice(event.strip_prefix(b"data: ").unwrap()).unwrap();
    assert_eq!(figures["models_memory"], ONE);
    assert_eq!(figures["models_held"], BYTES);
    assert_eq!(figures["models"][0]["state"], "unloaded");
    assert_eq!(figures["models"][1]["state"], "loaded");
    assert_eq!(figures["models"][1]["memory_bytes"], BYTES);
    assert_eq!(figures["model"]["name"], "b");
    assert_eq!(figures["totals"]["requests"], 1);
}
