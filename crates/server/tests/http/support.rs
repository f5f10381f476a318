//! The demo model behind the server's own request handler, in process.

use std::{
    path::Path,
    sync::{Arc, OnceLock, Weak},
    time::Duration,
};

use bytes::Bytes;
use carat_cpu::{CpuBackend, CpuConfig};
use carat_engine::{EngineConfig, EngineHandle, ModelFacts, chat::Chat};
use carat_gguf::Gguf;
use carat_model::{backend::Batching, gemma4, sampling::Sampling};
use carat_server::{App, Config, Model, ModelInfo, handle};
use carat_text::{ChatTemplate, Tokenizer};
use http::{HeaderMap, Method, Request, StatusCode};
use http_body_util::{BodyExt, Full};
use serde_json::Value;

const DEMO: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../assets/pip-q8_0.gguf");
pub(crate) const CONTEXT: usize = 1024;
/// Longest wait for what must come, on a machine that does much else besides.
pub(crate) const PATIENCE: Duration = Duration::from_mins(2);

/// The demo model, with a change to how much runs at a time.
pub(crate) fn model(change: impl FnOnce(&mut EngineConfig)) -> Model {
    tracked("pip", change).0
}

/// The same under a name, with its file: it is open as long as its engine is there.
pub(crate) fn tracked(name: &str, change: impl FnOnce(&mut EngineConfig)) -> (Model, Weak<Gguf>) {
    let file = Arc::new(Gguf::open(Path::new(DEMO)).unwrap());
    let model = carat_model::Model::load(Arc::clone(&file)).unwrap();
    let plan = gemma4::plan(&model);
    let mut config = EngineConfig::comfortable(CONTEXT, 4, 256, ModelFacts::from(&plan));
    change(&mut config);
    let backend = CpuBackend::new(&CpuConfig {
        threads: Some(1),
        ..CpuConfig::default()
    });
    let weights = Arc::clone(&model.weights);
    let watched = Arc::downgrade(&file);
    let engine = EngineHandle::start(config, Box::new(backend), plan, weights).unwrap();
    let tokenizer = Tokenizer::from_metadata(file.metadata()).unwrap();
    let template = ChatTemplate::from_metadata(file.metadata(), tokenizer.vocab()).unwrap();
    let model = Model {
        chat: Chat::new(engine, Arc::new(tokenizer), Arc::new(template)),
        sampling: Sampling::default(),
        info: info(name),
    };
    (model, watched)
}

pub(crate) fn info(name: &str) -> ModelInfo {
    ModelInfo {
        name: name.to_owned(),
        context: CONTEXT,
        trained_context: CONTEXT,
        fingerprint: "fp_test".to_owned(),
        ..ModelInfo::default()
    }
}

pub(crate) fn app(config: Config) -> Arc<App> {
    let app = App::new(config);
    // Whatever else the tests of this program ask at the same time, an answer is the same.
    app.ready(model(|config| config.batching = Batching::Invariant));
    app
}

/// One that tests share: it has no settings, and requests do not change each other's answers.
pub(crate) fn demo() -> Arc<App> {
    static DEMO: OnceLock<Arc<App>> = OnceLock::new();
    Arc::clone(DEMO.get_or_init(|| app(Config::default())))
}

pub(crate) struct Answer {
    pub(crate) status: StatusCode,
    pub(crate) headers: HeaderMap,
    pub(crate) text: String,
}

impl Answer {
    pub(crate) fn json(&self) -> Value {
        serde_json::from_str(&self.text).unwrap_or_else(|error| panic!("{error}: {}", self.text))
    }

    /// The events of a stream, read by the rules of server-sent events: name and data.
    pub(crate) fn events(&self) -> Vec<(String, String)> {
        let mut events = Vec::new();
        let (mut name, mut data) = (String::new(), Vec::new());
        for line in self.text.split('\n') {
            match line.split_once(':') {
                _ if line.is_empty() => {
                    if !data.is_empty() {
                        events.push((std::mem::take(&mut name), data.join("\n")));
                    }
                    (name, data) = (String::new(), Vec::new());
                }
                Some(("", _)) => {}
                Some(("event", value)) => value.trim_start().clone_into(&mut name),
                Some(("data", value)) => {
                    data.push(value.strip_prefix(' ').unwrap_or(value).to_owned());
                }
                other => panic!("a line that is no event's: {other:?}"),
            }
        }
        assert!(data.is_empty(), "the last event is cut off");
        events
    }

    /// The JSON of each event but a closing `[DONE]`, which must be there or not.
    pub(crate) fn chunks(&self, done: bool) -> Vec<Value> {
        let mut events = self.events();
        if done {
            assert_eq!(events.pop().map(|e| e.1).as_deref(), Some("[DONE]"));
        }
        let parse = |(_, data): (String, String)| serde_json::from_str(&data).unwrap();
        events.into_iter().map(parse).collect()
    }
}

pub(crate) async fn request(app: &Arc<App>, request: Request<Full<Bytes>>) -> Answer {
    let (parts, body) = handle(Arc::clone(app), request).await.into_parts();
    let body = body.collect().await.unwrap().to_bytes();
    Answer {
        status: parts.status,
        headers: parts.headers,
        text: String::from_utf8(body.to_vec()).unwrap(),
    }
}

pub(crate) fn plain(method: Method, path: &str, body: &str) -> Request<Full<Bytes>> {
    Request::builder()
        .method(method)
        .uri(path)
        .header("host", "localhost:8080")
        .header("content-type", "application/json")
        .body(Full::new(Bytes::from(body.to_owned())))
        .unwrap()
}

pub(crate) async fn post(app: &Arc<App>, path: &str, body: Value) -> Answer {
    request(app, plain(Method::POST, path, &body.to_string())).await
}

pub(crate) async fn get(app: &Arc<App>, path: &str) -> Answer {
    request(app, plain(Method::GET, path, "")).await
}
