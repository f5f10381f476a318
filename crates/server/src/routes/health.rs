//! Health: the server lives, it takes requests; and its counters.

use http::{Response, StatusCode};
use serde_json::{Value, json};

use crate::{
    app::unfinished,
    body::Body,
    error::{ApiError, Kind},
    http::Call,
    metrics::Facts,
    models::Status,
};

/// 200 while the process and its engines live. Where models come and go, it says how each stands.
pub(super) fn health(call: &Call) -> Response<Body> {
    let models = match call.app.models() {
        Ok(models) => models,
        Err(error) if error.kind == Kind::Loading => {
            return unavailable(&json!({ "status": "loading" }));
        }
        Err(error) => return failed(&error.message),
    };
    if let Some(error) = call.app.failure() {
        return failed(&error.to_string());
    }
    let mut state = json!({ "status": "ok" });
    if models.residency().is_some() {
        let each = models.statuses().into_iter();
        let each = each.map(|model| {
            json!({
                "name": model.info.name,
                "state": model.state.name(),
                "waiting": model.waiting,
                "failure": model.failure,
            })
        });
        state["models"] = each.collect();
    }
    Body::json(&state)
}

fn failed(reason: &str) -> Response<Body> {
    unavailable(&json!({ "status": "failed", "reason": reason }))
}

fn unavailable(state: &Value) -> Response<Body> {
    let mut response = Body::json(state);
    *response.status_mut() = StatusCode::SERVICE_UNAVAILABLE;
    response
}

/// 200 only if a request sent now would be taken, by one model at least: routers ask for it.
pub(super) fn ready(call: &Call) -> Result<Response<Body>, ApiError> {
    if call.app.is_draining() {
        return Err(ApiError::new(
            Kind::Draining,
            "this server is shutting down",
        ));
    }
    let models = call.app.models()?.statuses();
    if let Some(error) = call.app.failure() {
        return Err(ApiError::new(Kind::Draining, error.to_string()));
    }
    let has_room = |model: &Status| unfinished(model) < model.max_unfinished;
    if !models.iter().any(has_room) {
        let most: usize = models.iter().map(|model| model.max_unfinished).sum();
        return Err(ApiError::new(
            Kind::Draining,
            format!("the queue of {most} requests is full"),
        ));
    }
    Ok(Body::json(&json!({ "status": "ready" })))
}

pub(super) fn metrics(call: &Call) -> Response<Body> {
    let models = call.app.models().ok();
    let statuses = models.as_ref().map_or_else(Vec::new, |m| m.statuses());
    let page = call.app.metrics.page(&Facts {
        prefix: &call.app.config.metrics_prefix,
        models: &statuses,
        residency: models.as_ref().and_then(|models| models.residency()),
    });
    Body::whole("text/plain; version=0.0.4; charset=utf-8", page)
}
