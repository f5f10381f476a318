//! What the dashboard shows: figures once per second, the requests under way, and a way to end one of them.
//!
//! With several keys everybody sees the figures of all and the requests of his own key only.

use std::{
    pin::Pin,
    sync::Arc,
    task::{Context, Poll},
    time::Duration,
};

use bytes::Bytes;
use carat_model::kv::KvGroup;
use futures_core::Stream;
use http::{HeaderValue, Response, header};
use serde_json::{Map, Value, json};
use tokio::sync::mpsc::{self, Receiver};

use crate::{
    app::App,
    body::Body,
    error::{ApiError, Kind},
    http::Call,
    stream,
    watch::Entry,
};

const PERIOD: Duration = Duration::from_secs(1);

/// A stream of figures, until the client leaves or the server ends.
pub(super) fn stats(call: &Call) -> Response<Body> {
    let (sender, receiver) = mpsc::channel(2);
    let (app, key) = (Arc::clone(&call.app), call.key.clone());
    tokio::spawn(async move {
        let mut ticks = tokio::time::interval(PERIOD);
        loop {
            ticks.tick().await;
            let mut piece = Vec::new();
            stream::data(&mut piece, &figures(&app, key.as_deref()));
            // Whoever only watches keeps no server from ending.
            if sender.send(Bytes::from(piece)).await.is_err() || app.is_draining() {
                return;
            }
        }
    });
    let mut response = Body::response(stream::SSE, Body::Pieces(Box::pin(Ticks(receiver))));
    let headers = response.headers_mut();
    headers.insert(header::CACHE_CONTROL, HeaderValue::from_static("no-cache"));
    headers.insert("x-accel-buffering", HeaderValue::from_static("no"));
    response
}

struct Ticks(Receiver<Bytes>);

impl Stream for Ticks {
    type Item = Bytes;

    fn poll_next(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Bytes>> {
        self.0.poll_recv(context)
    }
}

/// Requests under way, oldest first, and the names of those that wait.
pub(super) fn requests(call: &Call) -> Response<Body> {
    let listed = visible(&call.app, call.key.as_deref());
    let waits = call.app.served().is_ok_and(|served| {
        let stats = served.model.chat.engine().snapshot().stats;
        stats.waiting > 0
    });
    let waiting: Vec<&str> = listed
        .iter()
        .filter(|(_, entry)| waits && entry.generated() == 0)
        .map(|(_, entry)| entry.request_id.as_str())
        .collect();
    Body::json(&json!({
        "waiting": waiting,
        "requests": listed.iter().map(describe).collect::<Vec<_>>(),
    }))
}

/// Ends a request as if its client had asked for no more tokens.
pub(super) fn cancel(call: &Call) -> Result<Response<Body>, ApiError> {
    let last = call.parts.uri.path().rsplit('/').next().unwrap_or("");
    let number: Option<u64> = last.parse().ok();
    let listed = visible(&call.app, call.key.as_deref());
    let Some((_, entry)) = listed.iter().find(|(n, _)| Some(*n) == number) else {
        let shown: String = last.chars().take(40).collect();
        return Err(ApiError::new(
            Kind::UnknownRoute,
            format!(
                "no request under way has the number `{}`; GET /internal/requests lists them",
                shown.escape_debug()
            ),
        ));
    };
    for cancel in &entry.cancels {
        cancel.cancel();
    }
    Ok(Body::json(&json!({ "cancelled": number })))
}

/// With one key or none all requests are the asker's own.
fn visible(app: &App, key: Option<&str>) -> Vec<(u64, Entry)> {
    let mut listed = app.watch.requests();
    if app.config.keys.len() > 1 {
        listed.retain(|(_, entry)| entry.key.as_deref() == key);
    }
    listed
}

fn describe((number, entry): &(u64, Entry)) -> Value {
    json!({
        "number": number,
        "id": entry.request_id,
        "lane": entry.lane,
        "route": entry.route,
        "seconds": entry.arrived.elapsed().as_secs_f64(),
        "prompt_tokens": entry.prompt_tokens,
        "generated_tokens": entry.generated(),
    })
}

fn figures(app: &App, key: Option<&str>) -> Value {
    let metrics = &app.metrics;
    let listed = visible(app, key);
    let mut lanes: Map<String, Value> = Map::new();
    for (_, entry) in &listed {
        let name = entry.lane.clone().unwrap_or_default();
        let lane = lanes.entry(name).or_insert_with(|| json!([0, 0]));
        let at = usize::from(entry.generated() == 0);
        lane[at] = (lane[at].as_u64().unwrap_or(0) + 1).into();
    }
    let faults = app.watch.faults().into_iter();
    let faults = faults.map(|fault| json!({ "time": fault.time, "message": fault.message }));
    let mut figures = json!({
        "draining": app.is_draining(),
        "lanes": lanes,
        "requests": listed.iter().map(describe).collect::<Vec<_>>(),
        "faults": faults.collect::<Vec<_>>(),
        "finished": metrics.finished_counts(),
        "rejected": metrics.rejected_counts(),
        "misses": metrics.miss_counts(),
        "first_token": metrics.first_token.shares(),
        "inter_token": metrics.inter_token.shares(),
        "resident_bytes": resident_bytes(),
    });
    let Ok(served) = app.served() else {
        return figures;
    };
    let engine = served.model.chat.engine();
    let (info, snapshot) = (&served.model.info, engine.snapshot());
    let (stats, totals) = (&snapshot.stats, &snapshot.totals);
    let pages = |group| {
        let pages = stats.pages.get(group);
        json!({ "free": pages.free, "cached": pages.cached, "held": pages.held })
    };
    figures["model"] = json!({
        "name": info.name, "backend": info.backend, "quantization": info.quantization,
        "context": info.context, "bytes": info.bytes,
        "most_running": engine.limits().config().max_sequences,
        "most_unfinished": engine.limits().config().max_unfinished,
    });
    figures["running"] = stats.running.into();
    figures["waiting"] = stats.waiting.into();
    figures["pages"] = json!({ "full": pages(KvGroup::Full), "sliding": pages(KvGroup::Sliding) });
    figures["totals"] = json!({
        "batches": totals.batches, "failed_batches": totals.failed_batches,
        "requests": totals.requests, "preemptions": totals.preemptions,
        "prompt_tokens": totals.prompt_tokens, "cached_tokens": totals.cached_tokens,
        "generated_tokens": totals.generated_tokens,
    });
    figures
}

/// Memory of the process, where the system tells.
fn resident_bytes() -> Option<u64> {
    let status = std::fs::read_to_string("/proc/self/status").ok()?;
    let line = status.lines().find_map(|l| l.strip_prefix("VmRSS:"))?;
    let kib: u64 = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
    Some(kib * 1024)
}
