//! What Ollama's clients want to know before they ask: the one model that is here, and how it may be used.

use http::Response;
use serde::Deserialize;
use serde_json::{Value, json};

use super::super::models::rfc3339;
use crate::{
    app::{ModelInfo, Served},
    body::Body,
    error::{ApiError, Kind},
    http::Call,
};

/// Of Ollama's interface, as far as it is spoken here. VS Code asks for at least this.
const INTERFACE: &str = "0.6.4";
const ARCHITECTURE: &str = "gemma4";

/// A name as Ollama writes it.
pub(super) fn tagged(name: &str) -> String {
    if name.contains(':') {
        name.to_owned()
    } else {
        format!("{name}:latest")
    }
}

fn details(info: &ModelInfo) -> Value {
    json!({
        "parent_model": "",
        "format": "gguf",
        "family": ARCHITECTURE,
        "families": [ARCHITECTURE],
        "parameter_size": size(info.parameters),
        "quantization_level": info.quantization,
    })
}

fn describe(info: &ModelInfo) -> Value {
    let name = tagged(&info.name);
    json!({
        "name": name,
        "model": name,
        "modified_at": rfc3339(info.loaded),
        "size": info.bytes,
        "digest": info.fingerprint,
        "details": details(info),
    })
}

/// A count as people say it.
fn size(parameters: u64) -> String {
    let count = parameters as f64;
    match parameters {
        1_000_000_000.. => format!("{:.1}B", count / 1e9),
        1_000_000.. => format!("{:.1}M", count / 1e6),
        _ => format!("{:.1}K", count / 1e3),
    }
}

/// What there is; nothing while it is being loaded.
fn list(call: &Call, describe: impl Fn(&Served) -> Value) -> Result<Response<Body>, ApiError> {
    let models: Vec<Value> = match call.app.served() {
        Ok(served) => vec![describe(&served)],
        Err(error) if error.kind == Kind::Loading => Vec::new(),
        Err(error) => return Err(error),
    };
    Ok(Body::json(&json!({ "models": models })))
}

pub(in super::super) fn tags(call: &Call) -> Result<Response<Body>, ApiError> {
    list(call, |served| describe(&served.model.info))
}

pub(in super::super) fn ps(call: &Call) -> Result<Response<Body>, ApiError> {
    list(call, |served| {
        let info = &served.model.info;
        let on_device = info.backend.to_ascii_lowercase().starts_with("cuda");
        let mut model = describe(info);
        model["size_vram"] = if on_device { info.bytes } else { 0 }.into();
        model["context_length"] = info.context.into();
        // It stays as long as the server does; clients want a date.
        model["expires_at"] = "9999-12-31T23:59:59Z".into();
        model
    })
}

/// By either name: clients disagree.
#[derive(Debug, Deserialize)]
struct ShowRequest {
    #[serde(default)]
    model: Option<String>,
    #[serde(default)]
    name: Option<String>,
}

pub(in super::super) fn show(call: &Call) -> Result<Response<Body>, ApiError> {
    let request: ShowRequest = call.json()?;
    let served = call.app.model(request.model.or(request.name).as_deref())?;
    Ok(Body::json(&shown(&served)))
}

fn shown(served: &Served) -> Value {
    let (info, sampling) = (&served.model.info, &served.model.sampling);
    let parameters = [
        format!("num_ctx {}", info.context),
        format!("temperature {}", sampling.temperature),
        format!("top_k {}", sampling.top_k),
        format!("top_p {}", sampling.top_p),
    ];
    json!({
        "modelfile": format!("FROM {}\n", info.name),
        "parameters": parameters.join("\n"),
        "template": info.template.as_deref().unwrap_or(""),
        "details": details(info),
        "model_info": {
            "general.architecture": ARCHITECTURE,
            "general.basename": info.name,
            "general.parameter_count": info.parameters,
            "gemma4.context_length": info.context,
        },
        "capabilities": ["completion", "tools", "thinking"],
        "modified_at": rfc3339(info.loaded),
    })
}

pub(in super::super) fn version() -> Response<Body> {
    Body::json(&json!({ "version": INTERFACE }))
}
