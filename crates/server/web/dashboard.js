// The dashboard: one event per second from the server, drawn.

import * as api from "./api.js";
import { Chart, short } from "./chart.js";
import { $, h, notify } from "./dom.js";
import { duration, MISSES } from "./message.js";
import "./settings.js";

/** Seconds that percentiles look back. */
const WINDOW = 60;
const charts = Object.fromEntries(["speed", "load", "gap", "first"].map((id) => [id, new Chart($(id).nextElementSibling, ["--accent", "--warn"])]));
/** Events of the last minute, oldest first. */
let past = [];

const list = (id, pairs) => $(id).replaceChildren(...pairs.map(([name, value]) => h("div", null, h("dt", null, name), h("dd", null, value))));
const bytes = (n) => (n >= 2 ** 30 ? `${(n / 2 ** 30).toFixed(1)} GiB` : `${Math.round(n / 2 ** 20)} MiB`);
const percent = (share) => (Number.isFinite(share) ? `${(share * 100).toFixed(1)} %` : "–");

const time = (seconds) => new Date(seconds * 1000).toLocaleTimeString();

/** A table that can be scrolled, by keyboard as well. */
function table(id, heads, rows, empty) {
	const box = $(id);
	box.className = "table";
	box.tabIndex = 0;
	if (!rows.length) return box.replaceChildren(h("p", { className: "faint" }, empty));
	const cell = (tag) => (value, n) => h(tag, { className: n ? "num" : "" }, value);
	box.replaceChildren(h("table", null, h("thead", null, h("tr", null, heads.map(cell("th")))), h("tbody", null, rows.map((row) => h("tr", null, row.map(cell("td")))))));
}

/** Of what came between two counts of a histogram, in ms; within a bucket values are taken to lie evenly. */
export function percentile(before, after, share) {
	const counts = after.counts.map((count, n) => count - (before?.counts[n] ?? 0));
	const wanted = counts.reduce((sum, count) => sum + count, 0) * share;
	if (!wanted) return NaN;
	let below = 0;
	for (const [n, count] of counts.entries()) {
		if (below + count >= wanted) {
			const from = after.bounds[n - 1] ?? 0;
			const to = after.bounds[n] ?? from;
			return (from + ((to - from) * (wanted - below)) / count) * 1000;
		}
		below += count;
	}
	return NaN;
}

function show(now) {
	const before = past.at(-1);
	past.push(now);
	if (past.length > WINDOW) past.shift();
	const [oldest] = past;
	if (!now.totals) return state("loading", "loading the model");
	state("ready", now.draining ? "shutting down" : now.model.name);
	const gained = (name) => (before?.totals ? now.totals[name] - before.totals[name] : NaN);
	const generated = gained("generated_tokens");
	const prompt = gained("prompt_tokens") - gained("cached_tokens");
	const batches = gained("batches");
	charts.speed.add(generated, prompt);
	list("speed", [["generated", Number.isFinite(generated) ? short(generated) : "–"], ["tokens per batch", batches > 0 ? (generated / batches).toFixed(1) : "–"], ["in all", short(now.totals.generated_tokens)]]);
	charts.load.add(now.running, now.waiting);
	list("load", [["running", `${now.running} of ${now.model.most_running}`], ["waiting", now.waiting], ["ended", short(now.totals.requests)]]);
	const shares = (name, second) => [0.5, second].map((share) => percentile(oldest === now ? null : oldest[name], now[name], share));
	for (const [id, name, second] of [["gap", "inter_token", 0.99], ["first", "first_token", 0.95]]) {
		const [median, high] = shares(name, second);
		charts[id].add(median, high);
		const text = (ms) => (Number.isFinite(ms) ? (ms < 10 ? `${ms.toFixed(1)} ms` : duration(ms)) : "–");
		list(id, [["median", text(median)], [`${second * 100} %`, text(high)]]);
	}
	$("pages").replaceChildren(...Object.entries(now.pages).flatMap(([group, { held, cached, free }]) => {
		const all = held + cached + free;
		if (!all) return [];
		const part = (kind, count) => {
			const bar = h("i", { className: kind });
			bar.style.width = `${(count / all) * 100}%`;
			return bar;
		};
		return [h("b", null, group === "full" ? "Full attention" : "Sliding windows"), h("div", { className: "split" }, part("held", held), part("cached", cached)),
			h("p", { className: "key" }, h("span", { className: "held" }, `${held} in use`), h("span", { className: "cached" }, `${cached} cached`), h("span", null, `${free} free`))];
	}));
	list("cache", [["of prompt tokens cached", percent(now.totals.cached_tokens / now.totals.prompt_tokens)], ["tokens saved", short(now.totals.cached_tokens)], ["from disk", short(now.totals.cached_on_disk)]]);
	const rows = (counts, words = {}) => Object.entries(counts).filter(([, count]) => count).map(([name, count]) => [words[name] ?? name.replaceAll("_", " "), count]);
	table("misses", ["why not more", "requests"], rows(now.misses, MISSES), "No misses yet.");
	table("latest", ["request", "why not more", "known tokens", "cached", "at"], now.latest_misses.map((one) => [one.id, MISSES[one.why] ?? one.why, one.at + (one.turn === null ? "" : `, to turn ${one.turn}`), `${one.cached} of ${one.prompt}`, time(one.time)]), "None yet.");
	list("server", [["memory", now.resident_bytes ? bytes(now.resident_bytes) : "–"], ["model file", bytes(now.model.bytes)], ["backend", now.model.backend], ["format", now.model.quantization], ["preemptions", now.totals.preemptions]]);
	if (now.models) {
		$("models-card").hidden = false;
		list("budget", [["in memory", bytes(now.models_held)], ["at most", bytes(now.models_memory)]]);
		table("models", ["model", "state", "memory", "runs", "waits", "loads"], now.models.map((one) => [one.name, one.state, bytes(one.memory_bytes), one.running, one.waiting, one.loads]));
	}
	table("ends", ["ended or refused by", "requests"], [...rows(now.finished), ...rows(now.rejected)], "No requests yet.");
	table("lanes", ["lane", "answering", "before the first token"], Object.entries(now.lanes).map(([name, [runs, waits]]) => [name || "everybody", runs, waits]), "Nobody asks at the moment.");
	table("requests", ["request", "route", "lane", "since", "prompt", "generated", "end it"], now.requests.map((one) => [one.id, one.route, one.lane ?? "–", duration(one.seconds * 1000), one.prompt_tokens, one.generated_tokens,
		h("button", { type: "button", className: "plain", "aria-label": `Cancel ${one.id}`, onclick: () => cancel(one.number) }, "Cancel")]), "No requests under way.");
	table("faults", ["error", "at"], now.faults.toReversed().map(({ time: at, message }) => [message, time(at)]), "None since the start.");
}

const cancel = (number) => api.ask(`/internal/requests/${number}`, { method: "DELETE" }).then(() => notify("Cancelled."), (error) => notify(error.message));

function state(kind, text) {
	$("state").dataset.state = kind;
	$("state-text").textContent = text;
}

async function follow() {
	try {
		for await (const data of api.events(await api.ask("/internal/stats"))) show(JSON.parse(data));
		state("off", "the server has ended");
	} catch (error) {
		state("off", error.status === 401 ? "wants a key" : "not reachable");
		if (error.status === 401) return void ($("key").hidden = false);
	}
	past = [];
	setTimeout(follow, 2000);
}

$("key").addEventListener("submit", (event) => {
	event.preventDefault();
	api.setKey($("key-input").value.trim());
	$("key").hidden = true;
	follow();
});
follow();
document.documentElement.dataset.ready = String(Math.round(performance.now()));
