// How a message looks, while it comes and after.

import { copyText, h, icon, iconButton, notify } from "./dom.js";
import { visible } from "./inline.js";
import { Markdown } from "./markdown.js";

export const MISSES = {
	disabled: "the prefix cache is off",
	too_short: "too short",
	no_match: "nothing begins like it",
	diverged: "it differs after that",
	evicted: "it was given away",
	sliding_evicted: "its last window was given away",
	logprobs: "logprobs need it all",
	not_worth: "computing is faster",
	restore_failed: "its file was damaged",
};

const round = (value) => (value >= 100 ? Math.round(value).toLocaleString("en") : value.toPrecision(3));

export const duration = (ms) => (ms < 1000 ? `${Math.round(ms)} ms` : ms < 60000 ? `${(ms / 1000).toFixed(1)} s` : `${Math.floor(ms / 60000)} min ${Math.round((ms % 60000) / 1000)} s`);

export class MessageView {
	constructor(node, acts) {
		this.node = node;
		this.acts = acts;
		this.body = h("div", { className: "body" });
		this.foot = h("div", { className: "foot" });
		this.markdown = null;
		this.shown = 0;
		const name = { user: "You", assistant: "Model", tool: "Tool" }[node.role];
		this.element = h("article", { className: `message ${node.role}`, "aria-label": name, data: { id: node.id } }, this.body, this.foot);
	}

	/** Everything, from what the message holds. */
	render(around) {
		const { node } = this;
		const results = (node.calls ?? []).map(({ id }) => around.results.has(id));
		const key = JSON.stringify([{ ...around, results }, node.raw, node.error, node.finish]);
		if (key === this.key) return;
		this.key = key;
		this.around = around;
		const wasOpen = this.fold?.open;
		this.fold = this.markdown = null;
		this.text = undefined;
		this.shown = 0;
		this.body.replaceChildren();
		for (const file of node.attachments ?? []) this.body.append(attachment(file));
		if (node.role === "user") {
			this.body.append(h("div", { className: "typed" }, visible(node.text)));
		} else {
			if (node.thinking) this.showThought(false);
			if (this.fold) this.fold.open = Boolean(wasOpen);
			this.showText(!around.busy);
			if (node.calls?.length) this.showCalls(around.results);
		}
		this.showFoot();
	}

	/** What has come since. */
	update() {
		if (this.node.thinking) this.showThought(!this.node.text && !this.node.calls?.length);
		this.showText(false);
	}

	showThought(runs) {
		const { node } = this;
		if (!this.fold) {
			this.label = h("span");
			this.thought = h("div", { className: "thought" });
			this.fold = h("details", { className: "thinking" }, h("summary", null, icon("right"), this.label), this.thought);
			this.body.prepend(this.fold);
			this.written = 0;
		}
		this.thought?.append(visible(node.thinking.slice(this.written)));
		this.written = node.thinking.length;
		this.fold.classList.toggle("runs", runs);
		const seconds = duration(node.thought ?? 0);
		if (this.label) this.label.textContent = runs ? `Thinking for ${seconds}` : `Thought for ${seconds}`;
	}

	showText(whole) {
		const { node } = this;
		if (!this.text) {
			if (!node.text) return;
			this.text = h("div", { className: node.raw ? "raw" : "prose" });
			if (!node.raw) this.markdown = new Markdown(this.text);
			this.body.append(this.text);
		}
		const piece = node.text.slice(this.shown);
		this.shown = node.text.length;
		if (!this.markdown) this.text.append(visible(piece));
		else if (piece) this.markdown.push(piece);
		if (whole) this.markdown?.end();
	}

	showCalls(results) {
		for (const call of this.node.calls) {
			const result = results.get(call.id);
			const card = h("section", { className: "call", "aria-label": `Call of ${call.name}` }, h("h3", null, icon("raw"), visible(call.name)), argumentTable(call.arguments));
			if (result) {
				card.append(h("div", { className: "result" }, h("span", null, "Result"), h("pre", { tabIndex: 0 }, visible(result.text))));
			} else if (this.acts.tool(call.name) === "automatic") {
				card.append(h("p", { className: "faint" }, "Running…"));
			} else {
				const input = h("textarea", { rows: 2, "aria-label": `Result of ${call.name}`, placeholder: "What the tool answers" });
				const submit = () => this.acts.result(call, input.value);
				input.addEventListener("keydown", (event) => {
					if (event.key === "Enter" && !event.shiftKey) {
						event.preventDefault();
						submit();
					}
				});
				card.append(h("div", { className: "answer" }, input, h("button", { type: "button", className: "primary", onclick: submit }, "Send result")));
			}
			this.body.append(card);
		}
	}

	showFoot() {
		const { node, acts, around } = this;
		const { place, of, busy, isLast } = around ?? { place: 0, of: 1, busy: false, isLast: false };
		this.foot.replaceChildren();
		if (busy) return;
		if (node.error) {
			const again = node.text ? h("button", { type: "button", className: "plain", onclick: acts.go }, "Continue from here") : null;
			this.foot.append(h("div", { className: "error", role: "alert" }, h("p", null, node.error),
				h("p", { className: "row" }, again, h("button", { type: "button", className: "plain", onclick: acts.retry }, "Try again"))));
		}
		const bar = h("div", { className: "acts" });
		if (of > 1) {
			const before = iconButton("left", "Previous version", acts.before);
			const after = iconButton("right", "Next version", acts.after);
			before.disabled = place === 0;
			after.disabled = place === of - 1;
			bar.append(h("span", { className: "versions" }, before, h("span", { "aria-label": `Version ${place + 1} of ${of}` }, `${place + 1}/${of}`), after));
		}
		bar.append(iconButton("copy", "Copy", acts.copy));
		bar.append(iconButton("edit", node.role === "user" ? "Edit and ask again" : "Edit", acts.edit));
		if (node.role === "assistant") {
			bar.append(iconButton("again", "Another answer", acts.again));
			const canGo = isLast && node.text && !node.calls?.length;
			if (canGo) bar.append(iconButton("go", "Continue", acts.go));
			bar.append(iconButton("raw", node.raw ? "Show formatted" : "Show as written", acts.raw));
		}
		bar.append(iconButton("trash", "Delete from here", acts.remove));
		this.foot.append(bar);
		if (node.role === "assistant") this.foot.append(this.figures());
	}

	figures() {
		const { stats, finish } = this.node;
		const line = h("p", { className: "figures" });
		if (finish === "stopped") line.append("stopped · ");
		if (finish === "length") line.append("cut off: no room left or the most tokens reached · ");
		if (!stats) return line;
		const parts = [`${stats.tokens} tokens`];
		if (stats.rate) parts.push(`${round(stats.rate)}/s`);
		if (stats.first) parts.push(`first after ${duration(stats.first)}`);
		line.append(parts.join(" · "));
		if (stats.prompt) {
			const why = MISSES[stats.miss];
			line.append(` · ${stats.cached}/${stats.prompt} cached${why ? ` (${why})` : ""}`);
		}
		if (stats.seed !== undefined) {
			line.append(" · ", h("button", { type: "button", className: "link", title: "Another answer with this seed", onclick: this.acts.seed }, `seed ${stats.seed}`));
		}
		return line;
	}
}

const attachment = (file) =>
	h("details", { className: "file" }, h("summary", null, icon("clip"), visible(file.name), h("small", null, `${file.text.length.toLocaleString("en")} characters`)), h("pre", { tabIndex: 0 }, visible(file.text)));

function argumentTable(text) {
	let args;
	try {
		args = JSON.parse(text || "{}");
	} catch {
		return h("pre", null, visible(text));
	}
	const rows = Object.entries(args ?? {});
	if (!rows.length) return h("p", { className: "faint" }, "no arguments");
	return h("table", null, h("tbody", null, rows.map(([name, value]) =>
		h("tr", null, h("th", { scope: "row" }, visible(name)), h("td", null, visible(typeof value === "string" ? value : JSON.stringify(value)))))));
}

/** Buttons of code blocks. */
export function codeButtons(event) {
	const button = event.target.closest?.("figure.code button");
	const figure = button?.closest("figure");
	if (!button || !figure) return;
	if (button.dataset.act === "wrap") figure.classList.toggle("wrapped");
	else copyText(figure.querySelector("code")?.textContent ?? "").then(() => notify("Copied."));
}
