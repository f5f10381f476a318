//! Answers that Ollama's clients want before they ask: the models that are here, and how they may be used.

use http::Response;
use serde::Deserialize;
use serde_json::{Value, json};

use super::super::models::rfc3339;
use crate::{
    app::ModelInfo,
    body::Body,
    error::{ApiError, Kind},
    http::Call,
    ids,
    models::{Residency, Status},
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

fn describe(model: &Status) -> Value {
    let info = &model.info;
    let name = tagged(&info.name);
    json!({
        "name": name,
        "model": name,
        "modified_at": rfc3339(info.loaded),
        "size": info.bytes,
        "digest": info.fingerprint,
        "details": details(info),
        "state": model.state.name(),
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

/// The models there are; none while the only one is being loaded.
fn all(call: &Call) -> Result<(Option<Residency>, Vec<Status>), ApiError> {
    match call.app.models() {
        Ok(models) => Ok((models.residency().copied(), models.statuses())),
        Err(error) if error.kind == Kind::Loading => Ok((None, Vec::new())),
        Err(error) => Err(error),
    }
}

pub(in super::super) fn tags(call: &Call) -> Result<Response<Body>, ApiError> {
    let (_, models) = all(call)?;
    let models: Vec<Value> = models.iter().map(describe).collect();
    Ok(Body::json(&json!({ "models": models })))
}

/// Those that take memory.
pub(in super::super) fn ps(call: &Call) -> Result<Response<Body>, ApiError> {
    let (residency, models) = all(call)?;
    let idle = residency.and_then(|residency| residency.idle);
    let in_memory = models.iter().filter(|model| model.takes_memory());
    let models = in_memory.map(|model| {
        let info = &model.info;
        let on_device = info.backend.to_ascii_lowercase().starts_with("cuda");
        let mut told = describe(model);
        told["size"] = model.memory_bytes.into();
        told["size_vram"] = if on_device { model.memory_bytes } else { 0 }.into();
        told["context_length"] = info.context.into();
        told["expires_at"] = match idle {
            Some(idle) => {
                let left = idle.saturating_sub(model.idle);
                rfc3339(ids::unix_time() + left.as_secs()).into()
            }
            // It stays as long as the server does, or until its room is needed; clients want a date.
            None => "9999-12-31T23:59:59Z".into(),
        };
        told
    });
    let models: Vec<Value> = models.collect();
    Ok(Body::json(&json!({ "models": models })))
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
    let model = call.app.told(request.model.or(request.name).as_deref())?;
    Ok(Body::json(&shown(&model)))
}

fn shown(model: &Status) -> Value {
    let (info, sampling) = (&model.info, &model.sampling);
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
        "state": model.state.name(),
    })
}

pub(in super::super) fn version() -> Response<Body> {
    Body::json(&json!({ "version": INTERFACE }))
}
