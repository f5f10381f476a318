//! Whether the server lives, whether it takes requests, what it has counted.

use http::{Response, StatusCode};
use serde_json::json;

use crate::{
    body::Body,
    error::{ApiError, Kind},
    http::Call,
    metrics::Facts,
};

/// 200 while the process and its engine live.
pub(super) fn health(call: &Call) -> Response<Body> {
    let state = match call.app.served() {
        Ok(_) => match call.app.failure() {
            None => return Body::json(&json!({ "status": "ok" })),
            Some(error) => json!({ "status": "failed", "reason": error.to_string() }),
        },
        Err(error) if error.kind == Kind::Loading => json!({ "status": "loading" }),
        Err(error) => json!({ "status": "failed", "reason": error.message }),
    };
    let mut response = Body::json(&state);
    *response.status_mut() = StatusCode::SERVICE_UNAVAILABLE;
    response
}

/// 200 only if a request sent now would be taken: routers ask for it.
pub(super) fn ready(call: &Call) -> Result<Response<Body>, ApiError> {
    if call.app.is_draining() {
        return Err(ApiError::new(
            Kind::Draining,
            "this server is shutting down",
        ));
    }
    let served = call.app.served()?;
    if let Some(error) = call.app.failure() {
        return Err(ApiError::new(Kind::Draining, error.to_string()));
    }
    let engine = served.model.chat.engine();
    let most = engine.limits().config().max_unfinished;
    if call.app.unfinished() >= most {
        return Err(ApiError::new(
            Kind::Draining,
            format!("the queue of {most} requests is full"),
        ));
    }
    Ok(Body::json(&json!({ "status": "ready" })))
}

pub(super) fn metrics(call: &Call) -> Response<Body> {
    let served = call.app.served().ok();
    let snapshot = served
        .as_ref()
        .map(|served| served.model.chat.engine().snapshot());
    let info = served.as_ref().map(|served| &served.model.info);
    let page = call.app.metrics.page(&Facts {
        prefix: &call.app.config.metrics_prefix,
        model: info.map_or("", |info| &info.name),
        snapshot: snapshot.as_ref(),
        backend: info.map_or("", |info| &info.backend),
        grammars: served
            .as_ref()
            .and_then(|served| served.grammars_if_made())
            .map(carat_grammar::Grammars::meter),
    });
    Body::whole("text/plain; version=0.0.4; charset=utf-8", page)
}
