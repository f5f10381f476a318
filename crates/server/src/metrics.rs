//! Counters and histograms, and the text that Prometheus reads. Fixed arrays of atomics: no registry, no lock, and no series that
//! a request could invent.

use std::{
    fmt::Write as _,
    sync::atomic::{AtomicI64, AtomicU64, Ordering},
    time::Duration,
};

use carat_engine::{MissReason, Snapshot};
use carat_grammar::{BUCKET_MICROS, Meter};
use carat_model::kv::KvGroup;
use http::StatusCode;
use serde_json::{Map, Value, json};

use crate::{
    models::{self, Residency, State, Status},
    routes::ROUTES,
};

/// Bounds in seconds, from a millisecond to most of an hour.
const FIRST_TOKEN: &[f64] = &[
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0,
    20.0, 40.0, 80.0, 160.0, 640.0, 2560.0,
];
/// An inter-token time is mostly below ten milliseconds, where others' first bucket ends.
const INTER_TOKEN: &[f64] = &[
    0.0005, 0.001, 0.002, 0.003, 0.005, 0.0075, 0.01, 0.015, 0.025, 0.05, 0.1, 0.25, 1.0, 5.0,
];
const REQUEST: &[f64] = &[
    0.01, 0.05, 0.1, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0,
    60.0, 120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0,
];
const TOKENS: &[f64] = &[
    1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0, 200.0, 500.0, 1000.0, 2000.0, 5000.0, 10000.0, 20000.0,
    50000.0, 100000.0, 200000.0,
];
/// Counts of values up to each bound, their number and their sum.
pub(crate) struct Histogram {
    bounds: &'static [f64],
    /// One per bound and one above them all.
    counts: Box<[AtomicU64]>,
    /// In millionths, so that it is an integer.
    sum: AtomicU64,
}

impl Histogram {
    fn new(bounds: &'static [f64]) -> Histogram {
        Histogram {
            bounds,
            counts: (0..=bounds.len()).map(|_| AtomicU64::new(0)).collect(),
            sum: AtomicU64::new(0),
        }
    }

    pub(crate) fn add(&self, value: f64) {
        let at = self.bounds.partition_point(|bound| *bound < value);
        self.counts[at].fetch_add(1, Ordering::Relaxed);
        let millionths = (value * 1e6).round() as u64;
        self.sum.fetch_add(millionths, Ordering::Relaxed);
    }

    /// `None` if nothing was counted.
    pub(crate) fn mean(&self) -> Option<f64> {
        let counts = self.counts.iter().map(|c| c.load(Ordering::Relaxed));
        let count: u64 = counts.sum();
        let sum = self.sum.load(Ordering::Relaxed) as f64 / 1e6;
        (count > 0).then(|| sum / count as f64)
    }

    pub(crate) fn time(&self, took: Duration) {
        self.add(took.as_secs_f64());
    }

    /// Bounds, and how many values lie up to each and above them all.
    pub(crate) fn shares(&self) -> Value {
        let counts = self.counts.iter().map(|c| c.load(Ordering::Relaxed));
        json!({ "bounds": self.bounds, "counts": counts.collect::<Vec<_>>() })
    }

    fn write(&self, out: &mut Page, name: &str, help: &str) {
        out.head(name, "histogram", help);
        let mut below = 0;
        for (bound, count) in self.bounds.iter().zip(&self.counts) {
            below += count.load(Ordering::Relaxed);
            out.line(
                &format!("{name}_bucket"),
                &[("le", &bound.to_string())],
                below,
            );
        }
        below += self.counts[self.bounds.len()].load(Ordering::Relaxed);
        out.line(&format!("{name}_bucket"), &[("le", "+Inf")], below);
        let sum = self.sum.load(Ordering::Relaxed) as f64 / 1e6;
        out.line(&format!("{name}_sum"), &[], sum);
        out.line(&format!("{name}_count"), &[], below);
    }
}

/// A counter per member of a small closed set.
struct Counters<const N: usize> {
    names: [&'static str; N],
    counts: [AtomicU64; N],
}

impl<const N: usize> Counters<N> {
    fn new(names: [&'static str; N]) -> Counters<N> {
        Counters {
            names,
            counts: [const { AtomicU64::new(0) }; N],
        }
    }

    fn add(&self, name: &str) {
        if let Some(at) = self.names.iter().position(|n| *n == name) {
            self.counts[at].fetch_add(1, Ordering::Relaxed);
        }
    }

    fn total(&self) -> u64 {
        self.counts.iter().map(|c| c.load(Ordering::Relaxed)).sum()
    }

    fn counts(&self) -> Value {
        let each = self.names.iter().zip(&self.counts);
        each.map(|(name, count)| ((*name).to_owned(), count.load(Ordering::Relaxed).into()))
            .collect::<Map<String, Value>>()
            .into()
    }

    fn write(&self, out: &mut Page, metric: &str, label: &str, help: &str) {
        out.head(metric, "counter", help);
        for (name, count) in self.names.iter().zip(&self.counts) {
            out.line(metric, &[(label, name)], count.load(Ordering::Relaxed));
        }
    }
}

/// Statuses that are counted one by one; all others count as 0.
const STATUSES: [u16; 18] = [
    0, 200, 204, 304, 400, 401, 403, 404, 405, 408, 413, 415, 429, 431, 500, 501, 503, 529,
];

/// Everything that is counted.
pub(crate) struct Metrics {
    pub(crate) first_token: Histogram,
    pub(crate) inter_token: Histogram,
    pub(crate) request: Histogram,
    pub(crate) queue: Histogram,
    pub(crate) prefill: Histogram,
    pub(crate) decode: Histogram,
    pub(crate) prompt_tokens: Histogram,
    pub(crate) generated_tokens: Histogram,
    finished: Counters<6>,
    rejected: Counters<4>,
    missed: Counters<10>,
    http: Box<[[AtomicU64; STATUSES.len()]]>,
    pub(crate) streams_open: AtomicI64,
    pub(crate) disconnects: AtomicU64,
    pub(crate) slow_clients: AtomicU64,
    pub(crate) invalid_calls: AtomicU64,
}

/// Facts on the page besides counters.
pub(crate) struct Facts<'a> {
    pub(crate) prefix: &'a str,
    pub(crate) models: &'a [Status],
    /// Set if models come and go.
    pub(crate) residency: Option<&'a Residency>,
}

impl Metrics {
    pub(crate) fn new() -> Metrics {
        Metrics {
            first_token: Histogram::new(FIRST_TOKEN),
            inter_token: Histogram::new(INTER_TOKEN),
            request: Histogram::new(REQUEST),
            queue: Histogram::new(FIRST_TOKEN),
            prefill: Histogram::new(FIRST_TOKEN),
            decode: Histogram::new(REQUEST),
            prompt_tokens: Histogram::new(TOKENS),
            generated_tokens: Histogram::new(TOKENS),
            finished: Counters::new(["stop", "length", "tool_calls", "abort", "error", "deadline"]),
            rejected: Counters::new(["queue_full", "lane_full", "too_long", "timeout"]),
            missed: Counters::new([
                "disabled",
                "too_short",
                "no_match",
                "diverged",
                "evicted",
                "sliding_evicted",
                "logprobs",
                "not_worth",
                "restore_failed",
                "other",
            ]),
            http: (0..=ROUTES.len())
                .map(|_| [const { AtomicU64::new(0) }; STATUSES.len()])
                .collect(),
            streams_open: AtomicI64::new(0),
            disconnects: AtomicU64::new(0),
            slow_clients: AtomicU64::new(0),
            invalid_calls: AtomicU64::new(0),
        }
    }

    pub(crate) fn finished(&self, reason: &'static str) {
        self.finished.add(reason);
    }

    pub(crate) fn rejected(&self, reason: &'static str) {
        self.rejected.add(reason);
    }

    pub(crate) fn missed(&self, miss: MissReason) {
        self.missed.add(miss_name(miss));
    }

    /// Requests that have ended, however, and those that were refused.
    pub(crate) fn ended_total(&self) -> u64 {
        let counts = self
            .http
            .iter()
            .flat_map(|of_route| STATUSES.iter().zip(of_route));
        let refused = counts.filter(|(status, _)| **status >= 400);
        let refused = refused.map(|(_, count)| count.load(Ordering::Relaxed));
        self.finished.total() + refused.sum::<u64>()
    }

    /// Requests by how they ended.
    pub(crate) fn finished_counts(&self) -> Value {
        self.finished.counts()
    }

    /// Requests that were turned away, by reason.
    pub(crate) fn rejected_counts(&self) -> Value {
        self.rejected.counts()
    }

    /// Requests by why no more of their prompt was cached.
    pub(crate) fn miss_counts(&self) -> Value {
        self.missed.counts()
    }

    /// `route` is an index into the table of routes; past its end for paths that are none.
    pub(crate) fn answered(&self, route: usize, status: StatusCode) {
        let at = STATUSES.iter().position(|s| *s == status.as_u16());
        self.http[route][at.unwrap_or(0)].fetch_add(1, Ordering::Relaxed);
    }

    fn histograms(&self, out: &mut Page) {
        let histograms: [(&Histogram, &str, &str); 8] = [
            (
                &self.first_token,
                "time_to_first_token_seconds",
                "From the request's arrival to its first token.",
            ),
            (
                &self.inter_token,
                "inter_token_latency_seconds",
                "Between two tokens of a request.",
            ),
            (
                &self.request,
                "e2e_request_latency_seconds",
                "From a request's arrival to its end.",
            ),
            (
                &self.queue,
                "request_queue_time_seconds",
                "Time spent waiting.",
            ),
            (
                &self.prefill,
                "request_prefill_time_seconds",
                "From start to first token.",
            ),
            (
                &self.decode,
                "request_decode_time_seconds",
                "From first token to end.",
            ),
            (
                &self.prompt_tokens,
                "request_prompt_tokens",
                "Tokens of prompts.",
            ),
            (
                &self.generated_tokens,
                "request_generation_tokens",
                "Tokens of answers.",
            ),
        ];
        for (histogram, name, help) in histograms {
            histogram.write(out, name, help);
        }
    }

    fn http(&self, out: &mut Page) {
        out.head("http_requests_total", "counter", "Answers by route.");
        let names = ROUTES.iter().map(|route| route.path).chain(["other"]);
        for (name, counts) in names.zip(&self.http) {
            for (status, count) in STATUSES.iter().zip(counts) {
                let count = count.load(Ordering::Relaxed);
                if count > 0 {
                    let labels = [("route", name), ("status", &status.to_string())];
                    out.line("http_requests_total", &labels, count);
                }
            }
        }
    }

    /// The page at `/metrics`.
    pub(crate) fn page(&self, facts: &Facts<'_>) -> String {
        let mut out = Page::new(facts.prefix);
        for model in facts.models {
            out.model.clone_from(&model.info.name);
            engine(&mut out, &model.snapshot);
            if facts.residency.is_some() {
                residence(&mut out, model);
            }
        }
        // What is counted for all models together is no single one's.
        if facts.models.len() != 1 {
            out.model.clear();
        }
        if let Some(residency) = facts.residency {
            out.gauge(
                "models_memory_bytes",
                "Memory of all loaded models.",
                models::held_bytes(facts.models),
            );
            out.gauge(
                "models_memory_limit_bytes",
                "Memory that loaded models may take.",
                residency.memory_bytes,
            );
        }
        self.finished.write(
            &mut out,
            "request_success_total",
            "finished_reason",
            "Requests by how they ended.",
        );
        self.rejected.write(
            &mut out,
            "admission_rejections_total",
            "reason",
            "Requests that were turned away.",
        );
        self.missed.write(
            &mut out,
            "prefix_cache_miss_total",
            "reason",
            "Requests by why no more of their prompt was cached.",
        );
        self.histograms(&mut out);
        self.http(&mut out);
        let open = self.streams_open.load(Ordering::Relaxed);
        out.gauge("http_streams_open", "Answers being streamed.", open);
        let counters: [(&AtomicU64, &str, &str); 3] = [
            (
                &self.disconnects,
                "client_disconnects_total",
                "Clients that left before their answer ended.",
            ),
            (
                &self.slow_clients,
                "slow_clients_total",
                "Clients that were cut off because they did not read.",
            ),
            (
                &self.invalid_calls,
                "invalid_tool_calls_total",
                "Tool calls that could not be read.",
            ),
        ];
        for (counter, name, help) in counters {
            out.counter(name, help, counter.load(Ordering::Relaxed));
        }
        for model in facts.models {
            let served = model.look.as_ref();
            if let Some(made) = served.and_then(|served| served.grammars_if_made()) {
                out.model.clone_from(&model.info.name);
                grammars(&mut out, made.meter());
            }
        }
        if facts.models.len() != 1 {
            out.model.clear();
        }
        let backend = facts.models.first().map_or("", |m| &m.info.backend);
        out.head("build_info", "gauge", "What runs here.");
        let labels = [("version", env!("CARGO_PKG_VERSION")), ("backend", backend)];
        out.line("build_info", &labels, 1);
        out.text()
    }
}

/// Prefixes found by tier, and the contents of the tiers behind the device.
fn tiers(out: &mut Page, snapshot: &Snapshot) {
    let (stats, totals) = (&snapshot.stats, &snapshot.totals);
    let name = "prefix_cache_tier_hits_total";
    out.head(name, "counter", "Prompt tokens that were cached, by where.");
    let elsewhere = totals.cached_in_host + totals.cached_on_disk;
    for (tier, tokens) in [
        ("device", totals.cached_tokens.saturating_sub(elsewhere)),
        ("host", totals.cached_in_host),
        ("disk", totals.cached_on_disk),
    ] {
        out.line(name, &[("tier", tier)], tokens);
    }
    let host = stats.host_pages;
    if host.full.free + host.full.cached > 0 {
        let name = "kv_host_pages";
        out.head(name, "gauge", "KV pages in host memory by state.");
        for (group, pages) in [("full", host.full), ("sliding", host.sliding)] {
            for (state, count) in [("free", pages.free), ("cached", pages.cached)] {
                out.line(name, &[("group", group), ("state", state)], count);
            }
        }
    }
    if let Some(disk) = stats.store {
        out.gauge("prefix_disk_bytes", "Prefixes on disk.", disk.bytes);
        for (name, help, count) in [
            (
                "prefix_disk_pages_read_total",
                "Pages read from disk.",
                disk.pages_read,
            ),
            (
                "prefix_disk_pages_written_total",
                "Pages written to disk.",
                disk.pages_written,
            ),
            (
                "prefix_disk_refused_total",
                "Files on disk that were refused.",
                disk.refused,
            ),
        ] {
            out.counter(name, help, count);
        }
    }
}

fn engine(out: &mut Page, snapshot: &Snapshot) {
    let (stats, totals) = (&snapshot.stats, &snapshot.totals);
    out.gauge(
        "num_requests_running",
        "Requests being computed.",
        stats.running,
    );
    out.gauge("num_requests_waiting", "Requests that wait.", stats.waiting);
    out.head("kv_pages", "gauge", "KV pages by state.");
    let mut usage = Vec::new();
    for (group, name) in [(KvGroup::Full, "full"), (KvGroup::Sliding, "sliding")] {
        let pages = stats.pages.get(group);
        for (state, count) in [
            ("free", pages.free),
            ("cached", pages.cached),
            ("held", pages.held),
        ] {
            out.line("kv_pages", &[("group", name), ("state", state)], count);
        }
        let all = (pages.free + pages.cached + pages.held).max(1);
        usage.push((name, pages.held as f64 / all as f64));
    }
    out.head("kv_cache_usage_perc", "gauge", "Share of pages in use.");
    for (name, share) in usage {
        out.line("kv_cache_usage_perc", &[("group", name)], share);
    }
    tiers(out, snapshot);
    for (name, help, count) in [
        (
            "prefix_cache_queries_total",
            "Prompt tokens that were looked up.",
            totals.prompt_tokens,
        ),
        (
            "prefix_cache_hits_total",
            "Prompt tokens that were cached.",
            totals.cached_tokens,
        ),
        (
            "prompt_tokens_total",
            "Prompt tokens of finished requests.",
            totals.prompt_tokens,
        ),
        (
            "generation_tokens_total",
            "Tokens of answers.",
            totals.generated_tokens,
        ),
        (
            "spec_decode_num_drafts_total",
            "Drafts that were verified, of finished requests.",
            totals.drafts.drafted_passes,
        ),
        (
            "spec_decode_num_draft_tokens_total",
            "Tokens that were drafted.",
            totals.drafts.drafted,
        ),
        (
            "spec_decode_num_accepted_tokens_total",
            "Tokens that were drafted and are part of an answer.",
            totals.drafts.accepted,
        ),
        (
            "num_preemptions_total",
            "Requests that lost their pages for a while.",
            totals.preemptions,
        ),
        ("batches_total", "Batches run.", totals.batches),
        (
            "failed_batches_total",
            "Batches that failed.",
            totals.failed_batches,
        ),
    ] {
        out.counter(name, help, count);
    }
    let name = "spec_decode_num_accepted_tokens_per_pos_total";
    out.head(name, "counter", "Accepted tokens by place in a draft.");
    for (place, count) in totals.drafts.accepted_at.iter().enumerate() {
        out.line(name, &[("position", place.to_string().as_str())], count);
    }
}

/// State of a model that comes and goes.
fn residence(out: &mut Page, model: &Status) {
    out.head("model_state", "gauge", "1 for the state a model is in.");
    for state in State::ALL {
        let is = u8::from(state == model.state);
        out.line("model_state", &[("state", state.name())], is);
    }
    out.gauge(
        "model_memory_bytes",
        "Memory that the model takes while it is loaded.",
        model.memory_bytes,
    );
    out.gauge(
        "model_requests_waiting",
        "Requests that wait for the model to be loaded.",
        model.waiting,
    );
    let counts = &model.counts;
    for (name, help, count) in [
        ("model_loads_total", "Loads of the model.", counts.loads),
        (
            "model_load_failures_total",
            "Loads of the model that failed.",
            counts.failures,
        ),
        (
            "model_unloads_total",
            "Times that the model was unloaded.",
            counts.unloads,
        ),
    ] {
        out.counter(name, help, count);
    }
    let name = "model_load_seconds_total";
    out.head(name, "counter", "Time that loading the model has taken.");
    out.line(name, &[], counts.load_time.as_secs_f64());
}

fn grammars(out: &mut Page, meter: &Meter) {
    for (name, help, histogram) in [
        (
            "grammar_compile_seconds",
            "Compiling a schema or a grammar.",
            &meter.compile,
        ),
        (
            "grammar_mask_seconds",
            "Working out which tokens may come next.",
            &meter.mask,
        ),
        (
            "grammar_mask_wait_seconds",
            "Waiting of a draw for a mask.",
            &meter.mask_wait,
        ),
    ] {
        out.head(name, "histogram", help);
        let counts = histogram.counts();
        let bucket = format!("{name}_bucket");
        let mut below = 0;
        for (micros, count) in BUCKET_MICROS.iter().zip(&counts) {
            below += count;
            let bound = (*micros as f64 / 1e6).to_string();
            out.line(&bucket, &[("le", &bound)], below);
        }
        below += counts[BUCKET_MICROS.len()];
        out.line(&bucket, &[("le", "+Inf")], below);
        let sum = histogram.total().as_secs_f64();
        out.line(&format!("{name}_sum"), &[], sum);
        out.line(&format!("{name}_count"), &[], below);
    }
    out.counter(
        "grammar_forced_tokens_total",
        "Tokens that a grammar left no choice about.",
        meter.forced_tokens(),
    );
}

/// The name a reason has in metrics, headers and answers.
pub(crate) fn miss_name(miss: MissReason) -> &'static str {
    match miss {
        MissReason::Disabled => "disabled",
        MissReason::TooShort => "too_short",
        MissReason::NoMatch => "no_match",
        MissReason::Diverged => "diverged",
        MissReason::Evicted => "evicted",
        MissReason::SlidingEvicted => "sliding_evicted",
        MissReason::Logprobs => "logprobs",
        MissReason::NotWorth => "not_worth",
        MissReason::RestoreFailed => "restore_failed",
        MissReason::MediaCut => "other",
    }
}

/// Prometheus' text, as it grows. Lines of a metric stand together, however many models they come from.
struct Page {
    families: Vec<Family>,
    /// The one that lines are for.
    current: usize,
    prefix: String,
    model: String,
}

struct Family {
    name: String,
    text: String,
}

impl Page {
    fn new(prefix: &str) -> Page {
        Page {
            families: Vec::new(),
            current: 0,
            prefix: prefix.to_owned(),
            model: String::new(),
        }
    }

    fn text(self) -> String {
        self.families.into_iter().map(|f| f.text).collect()
    }

    /// Begins a metric, or goes on with it.
    fn head(&mut self, name: &str, kind: &str, help: &str) {
        if let Some(known) = self.families.iter().position(|f| f.name == name) {
            self.current = known;
            return;
        }
        let prefix = &self.prefix;
        self.current = self.families.len();
        self.families.push(Family {
            name: name.to_owned(),
            text: format!("# HELP {prefix}{name} {help}\n# TYPE {prefix}{name} {kind}\n"),
        });
    }

    fn line(&mut self, name: &str, labels: &[(&str, &str)], value: impl std::fmt::Display) {
        let text = &mut self.families[self.current].text;
        let _ = write!(
            text,
            "{}{name}{{model_name=\"{}\"",
            self.prefix,
            escaped(&self.model)
        );
        for (label, of) in labels {
            let _ = write!(text, ",{label}=\"{}\"", escaped(of));
        }
        let _ = writeln!(text, "}} {value}");
    }

    fn gauge(&mut self, name: &str, help: &str, value: impl std::fmt::Display) {
        self.head(name, "gauge", help);
        self.line(name, &[], value);
    }

    fn counter(&mut self, name: &str, help: &str, value: u64) {
        self.head(name, "counter", help);
        self.line(name, &[], value);
    }
}

fn escaped(text: &str) -> String {
    text.replace('\\', "\\\\")
        .replace('"', "\\\"")
        .replace('\n', "\\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_value_counts_in_the_bucket_it_reaches() {
        let histogram = Histogram::new(FIRST_TOKEN);
        for value in [0.001, 0.002, 9999.0] {
            histogram.add(value);
        }
        let mut page = Page::new("carat:");
        page.model = "a\"b".to_owned();
        histogram.write(&mut page, "m", "Help.");
        let text = page.text();
        for line in [
            "# TYPE carat:m histogram",
            "carat:m_bucket{model_name=\"a\\\"b\",le=\"0.001\"} 1",
            "carat:m_bucket{model_name=\"a\\\"b\",le=\"0.005\"} 2",
            "carat:m_bucket{model_name=\"a\\\"b\",le=\"+Inf\"} 3",
            "carat:m_count{model_name=\"a\\\"b\"} 3",
            "carat:m_sum{model_name=\"a\\\"b\"} 9999.003",
        ] {
            assert!(text.contains(line), "{line} is not in\n{text}");
        }
    }
}
