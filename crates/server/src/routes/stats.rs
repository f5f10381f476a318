//! Figures of the dashboard: once per second, with the requests under way, and a way to end one of them.
//!
//! With several keys everybody sees the figures of all and the requests of his own key only.

use std::{sync::Arc, time::Duration};

use bytes::Bytes;
use carat_engine::PageCounts;
use carat_model::kv::KvGroup;
use http::Response;
use serde_json::{Map, Value, json};
use tokio::sync::mpsc;

use crate::{
    app::App,
    body::Body,
    error::{ApiError, Kind},
    http::Call,
    metrics::miss_name,
    models::{self, Status},
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
    stream::response(stream::SSE, stream::pieces(receiver))
}

/// Requests under way, oldest first, and the names of those that wait.
pub(super) fn requests(call: &Call) -> Response<Body> {
    let listed = visible(&call.app, call.key.as_deref());
    let statuses = statuses(&call.app);
    let waits = statuses.iter().any(|model| waiting(model) > 0);
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

/// Prompts of the asker that were not cached as far as they could be, the latest first.
fn latest_misses(app: &App, key: Option<&str>) -> Vec<Value> {
    let is_alone = app.config.keys.len() <= 1;
    let misses = app.watch.misses().into_iter().rev();
    let own = misses.filter(|miss| is_alone || miss.key.as_deref() == key);
    own.map(|miss| {
        json!({
            "time": miss.time,
            "id": miss.request_id,
            "why": miss.counts.miss.map(miss_name),
            "at": miss.counts.known_tokens,
            "turn": miss.turn,
            "cached": miss.counts.cached_tokens,
            "prompt": miss.counts.prompt_tokens,
        })
    })
    .collect()
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
        "latest_misses": latest_misses(app, key),
        "first_token": metrics.first_token.shares(),
        "inter_token": metrics.inter_token.shares(),
        "resident_bytes": resident_bytes(),
    });
    let Ok(models) = app.models() else {
        return figures;
    };
    let statuses = models.statuses();
    if let Some(residency) = models.residency() {
        figures["models"] = statuses.iter().map(describe_model).collect();
        figures["models_memory"] = residency.memory_bytes.into();
        figures["models_held"] = models::held_bytes(&statuses).into();
    }
    // Where there are several, what is told of one is told of the latest in use.
    let latest = statuses.iter().min_by_key(|m| (m.look.is_none(), m.idle));
    let Some(Status { info, .. }) = latest else {
        return figures;
    };
    let sum = |of: fn(&Status) -> usize| statuses.iter().map(of).sum::<usize>();
    figures["model"] = json!({
        "name": info.name, "backend": info.backend, "quantization": info.quantization,
        "context": info.context, "bytes": info.bytes,
        "most_running": sum(|m| m.parallel),
        "most_unfinished": sum(|m| m.max_unfinished),
    });
    let pages = |group| {
        let of = |count: fn(&PageCounts) -> usize| {
            let each = statuses.iter();
            each.map(|m| count(m.snapshot.stats.pages.get(group)))
                .sum::<usize>()
        };
        json!({ "free": of(|p| p.free), "cached": of(|p| p.cached), "held": of(|p| p.held) })
    };
    figures["running"] = sum(|m| m.snapshot.stats.running).into();
    figures["waiting"] = sum(waiting).into();
    figures["pages"] = json!({ "full": pages(KvGroup::Full), "sliding": pages(KvGroup::Sliding) });
    let totals = models::totals(&statuses);
    figures["totals"] = json!({
        "batches": totals.batches, "failed_batches": totals.failed_batches,
        "requests": totals.requests, "preemptions": totals.preemptions,
        "prompt_tokens": totals.prompt_tokens, "cached_tokens": totals.cached_tokens,
        "cached_in_host": totals.cached_in_host, "cached_on_disk": totals.cached_on_disk,
        "generated_tokens": totals.generated_tokens,
    });
    figures
}

/// A model that comes and goes.
fn describe_model(model: &Status) -> Value {
    json!({
        "name": model.info.name,
        "state": model.state.name(),
        "memory_bytes": model.memory_bytes,
        "running": model.snapshot.stats.running,
        "waiting": waiting(model),
        "loads": model.counts.loads,
    })
}

/// Requests that have not started: in the engine, or in the line for a model that is not in memory.
fn waiting(model: &Status) -> usize {
    model.snapshot.stats.waiting + model.waiting
}

fn statuses(app: &App) -> Vec<Status> {
    app.models()
        .map_or_else(|_| Vec::new(), |models| models.statuses())
}

/// Memory of the process, where the system tells.
fn resident_bytes() -> Option<u64> {
    let status = std::fs::read_to_string("/proc/self/status").ok()?;
    let line = status.lines().find_map(|l| l.strip_prefix("VmRSS:"))?;
    let kib: u64 = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
    Some(kib * 1024)
}
