// The chat page: one conversation open, one answer under way at most.

import { answer, stop, takeResult } from "./answer.js";
import * as api from "./api.js";
import { $, copyText, download, fillIcons, h, icon, iconButton, notify } from "./dom.js";
import { showList } from "./list.js";
import { codeButtons, MessageView } from "./message.js";
import * as settings from "./settings.js";
import { state } from "./state.js";
import * as store from "./store.js";
import * as tools from "./tools.js";
import * as tree from "./tree.js";

/** A paste longer than this becomes an attachment. */
const LONG_PASTE = 4000;
const MAX_FILE = 1 << 20;

/** Of the messages that are shown or were. */
export const views = new Map();

function showState(kind, text) {
	$("state").dataset.state = kind;
	$("state-text").textContent = text;
}

let next;

const again = (ms) => {
	clearTimeout(next);
	next = setTimeout(connect, ms);
};

export async function connect() {
	try {
		const health = await fetch("/health").then((r) => r.json()).catch(() => null);
		if (!health) throw new api.Failure("offline", 0);
		if (health.status !== "ok") {
			const percent = Number.isFinite(health.progress) ? ` ${Math.round(health.progress * 100)} %` : "";
			showState("loading", health.status === "loading" ? `loading${percent}` : `failed: ${health.reason ?? "see the server's log"}`);
			again(1000);
			return;
		}
		const { data: models } = await api.get("/v1/models");
		const { id: name, max_model_len: context, status } = models.find(({ id }) => id === state.current.settings.model) ?? models[0];
		const loaded = status.value === "loaded";
		if (state.model?.name !== name || state.model.loaded !== loaded) {
			const props = await api.get(`/props?model=${encodeURIComponent(name)}`);
			state.model = { name, context, loaded, defaults: props.default_generation_settings.params };
			countContext();
		}
		const moves = status.value.endsWith("ing");
		const several = models.length > 1;
		$("model").hidden = !several;
		if ($("model").length !== models.length) $("model").replaceChildren(...models.map(({ id }) => h("option", null, id)));
		$("model").value = name;
		showState(moves ? "loading" : status.failure ? "off" : "ready", several ? (status.failure ?? status.value) : name);
		again(moves || (several && state.running) ? 1000 : 15000);
	} catch (error) {
		if (error instanceof api.Failure && error.status === 401) return askKey(error.message);
		showState("off", "not reachable");
		again(2000);
	}
}

export function askKey(why) {
	showState("off", "wants a key");
	$("key-why").textContent = `${why} It is kept until this tab is closed.`;
	if (!$("key").open) $("key").showModal();
}

export async function begin() {
	stop();
	const { model } = state.current.settings;
	state.current = tree.create({ ...structuredClone(settings.page.defaults), ...(model && { model }) });
	show();
	$("input").focus();
}

export async function openConversation(id) {
	closeSide();
	if (id === state.current.id) return;
	const body = await store.load(id);
	if (!body) return;
	stop();
	state.current = body;
	show();
	connect();
	toEnd();
}

export async function save() {
	state.current.updated = Date.now();
	try {
		await store.save(state.current);
	} catch (error) {
		notify(`This browser could not keep the conversation: ${error.message}`);
	}
	showList();
}

function show() {
	views.clear();
	cancelEdit();
	$("messages").replaceChildren();
	showMessages();
	showTitle();
	showSettings();
	showList();
	countContext();
}

export function showTitle() {
	const title = state.current.title || "New conversation";
	$("title").textContent = title;
	document.title = state.current.title ? `${title} · Carat` : "Carat";
}

function showSettings() {
	const set = state.current.settings;
	$("think").value = set.thinking ?? "none";
	const chips = [];
	if (set.format === "json" || set.format === "schema") chips.push(set.format === "json" ? "JSON" : "Schema");
	for (const name of set.tools ?? []) chips.push(name);
	$("chips").replaceChildren(...chips.map((name) => h("button", { type: "button", className: "chip", onclick: openSettings }, name)));
}

function openSettings() {
	settings.open(state.current.settings, state.model?.defaults ?? {}, () => {
		showSettings();
		if (Object.keys(state.current.nodes).length) save();
	});
}

/** Brings what is shown in line with the tree. */
export function showMessages() {
	const shown = tree.path(state.current);
	const results = new Map(shown.filter((node) => node.role === "tool").map((node) => [node.call ?? "", node]));
	const visible = shown.filter((node) => node.role !== "tool");
	const elements = visible.map((node, n) => {
		let view = views.get(node.id);
		const busy = state.running?.node === node;
		if (!view) views.set(node.id, (view = new MessageView(node, acts(node))));
		const siblings = tree.children(state.current, node.parent);
		view.render({ place: siblings.indexOf(node), of: siblings.length, busy, isLast: n === visible.length - 1, results });
		return view.element;
	});
	$("messages").replaceChildren(...(elements.length ? elements : [welcome()]));
	$("send").hidden = Boolean(state.running);
	$("stop").hidden = !state.running;
}

function welcome() {
	const offer = (text) => h("button", { type: "button", className: "offer", onclick: () => { $("input").value = text; send(); } }, text);
	return h("div", { className: "welcome" }, h("img", { src: "/web/icon.svg", alt: "", width: 56, height: 56 }), h("h2", null, "What is on your mind?"),
		h("p", null, "It is answered on this server; conversations stay in this browser."),
		h("div", { className: "offers" }, ["Tell me a story about a fox.", "What is 347 + 285?", "Hello! Who are you?"].map(offer)));
}

function acts(node) {
	const step = (by) => () => {
		const siblings = tree.children(state.current, node.parent);
		const other = siblings[siblings.indexOf(node) + by];
		if (!other) return;
		stop();
		tree.choose(state.current, other);
		showMessages();
		countContext();
		save();
	};
	const again = (/** */ change = {}) => {
		stop();
		answer(tree.add(state.current, node.parent, { role: "assistant" }), change);
	};
	return {
		copy: () => copyText(node.role === "user" ? tree.fullText(node) : node.text).then(() => notify("Copied.")),
		edit: () => (node.role === "user" ? startEdit(node) : editAnswer(node)),
		again: () => again(),
		seed: () => again({ seed: node.stats.seed }),
		retry: () => {
			const parent = node.parent;
			stop();
			tree.remove(state.current, node);
			answer(tree.add(state.current, parent, { role: "assistant" }));
		},
		go: () => answer(node, {}, true),
		raw: () => {
			node.raw = !node.raw;
			showMessages();
		},
		remove: async () => {
			const follows = tree.children(state.current, node.id).length > 0;
			if (follows && !confirm("Delete this message and all that follow it?")) return;
			stop();
			tree.remove(state.current, node);
			showMessages();
			countContext();
			save();
		},
		before: step(-1),
		after: step(1),
		tool: (name) => (tools.isAutomatic(settings.tools().find((tool) => tool.name === name)) ? "automatic" : "typed"),
		result: (call, text) => takeResult(node, call, text),
	};
}

function send() {
	const text = $("input").value.trim();
	if ((!text && !state.files.length) || state.running) return;
	const shown = tree.path(state.current);
	const parent = state.editing ? state.editing.parent : (shown.at(-1)?.id ?? null);
	if (state.editing && text === state.editing.text && !state.files.length) return cancelEdit();
	const kept = state.editing?.attachments ?? [];
	const asked = tree.add(state.current, parent, { role: "user", text, ...((state.files.length || kept.length) && { attachments: [...kept, ...state.files] }) });
	state.current.title ||= (text || state.files[0].name).replace(/\s+/g, " ").slice(0, 80);
	state.files = [];
	cancelEdit();
	$("input").value = "";
	fitInput();
	showFiles();
	showTitle();
	answer(tree.add(state.current, asked.id, { role: "assistant" }));
}

function startEdit(node) {
	state.editing = node;
	$("input").value = node.text;
	$("composer").classList.add("editing");
	fitInput();
	$("input").focus();
	$("input").setSelectionRange(node.text.length, node.text.length);
	showFiles();
}

function cancelEdit() {
	if (state.editing) $("input").value = "";
	state.editing = null;
	$("composer").classList.remove("editing");
	fitInput();
	showFiles();
}

/** Another version of an answer, in the reader's words. */
function editAnswer(node) {
	const view = views.get(node.id);
	if (!view) return;
	const area = h("textarea", { value: node.text, className: "rewrite", "aria-label": "Answer", rows: Math.min(20, node.text.split("\n").length + 2) });
	const keep = () => {
		if (area.value === node.text) return showMessages();
		tree.add(state.current, node.parent, { role: "assistant", text: area.value, finish: "stop" });
		showMessages();
		save();
	};
	view.body.replaceChildren(area, h("p", { className: "row" }, h("button", { type: "button", className: "primary", onclick: keep }, "Keep as a new version"), h("button", { type: "button", className: "plain", onclick: () => showMessages() }, "Cancel")));
	area.focus();
}

function fitInput() {
	const input = $("input");
	input.style.height = "auto";
	input.style.height = `${Math.min(input.scrollHeight, innerHeight * 0.4)}px`;
}

function showFiles() {
	const chips = state.files.map((file, n) => h("span", { className: "chip" }, icon("clip"), file.name, iconButton("close", `Remove ${file.name}`, () => { state.files.splice(n, 1); showFiles(); })));
	if (state.editing) chips.unshift(h("span", { className: "chip" }, icon("edit"), "Editing: the answer becomes a new version", iconButton("close", "Do not edit", cancelEdit)));
	$("files").replaceChildren(...chips);
}

async function attach(picked) {
	for (const file of picked) {
		if (file.type.startsWith("image/")) notify(`${file.name || "The picture"} was left out: this server takes text only.`);
		else if (file.size > MAX_FILE) notify(`${file.name} was left out: it is larger than 1 MB.`);
		else {
			const text = await file.text();
			if (text.includes("\0") || text.includes("\ufffd")) notify(`${file.name} was left out: it is no text.`);
			else state.files.push({ name: file.name, text });
		}
	}
	showFiles();
}

export async function countContext(stats) {
	if (!state.model) return;
	let used = stats?.total;
	if (!used) {
		used = 0;
		const shown = tree.path(state.current).filter((node) => node.text || node.calls?.length);
		// Counting is not worth loading a model for.
		if (shown.length && state.model.loaded) {
			const counted = await api.post("/tokenize", { model: state.model.name, messages: tree.wire(state.current, shown) }).catch(() => null);
			used = counted?.count ?? 0;
		}
	}
	const share = Math.min(1, used / state.model.context);
	$("meter").hidden = !used;
	$("fill").style.width = `${(share * 100).toFixed(1)}%`;
	$("meter").classList.toggle("full", share > 0.85);
	$("used").textContent = `${used.toLocaleString("en")} / ${state.model.context.toLocaleString("en")}`;
	$("meter").title = `${used} of ${state.model.context} tokens of context`;
}

const scroller = $("scroll");
export const atEnd = () => scroller.scrollHeight - scroller.scrollTop - scroller.clientHeight < 60;
export const toEnd = () => (scroller.scrollTop = scroller.scrollHeight);
let wasAtEnd = true;
export const keepEnd = () => wasAtEnd && toEnd();
scroller.addEventListener("scroll", () => {
	wasAtEnd = atEnd();
	$("down").hidden = wasAtEnd;
}, { passive: true });

function closeSide() {
	document.body.classList.remove("side");
	$("menu").setAttribute("aria-expanded", "false");
}

function openSide() {
	document.body.classList.add("side");
	$("menu").setAttribute("aria-expanded", "true");
}

fillIcons();
$("composer").addEventListener("submit", (event) => {
	event.preventDefault();
	send();
});
$("stop").addEventListener("click", stop);
$("new").addEventListener("click", () => { closeSide(); begin(); });
$("gear").addEventListener("click", openSettings);
$("all").addEventListener("click", () => $("data").showModal());
$("menu").addEventListener("click", () => (document.body.classList.contains("side") ? closeSide() : openSide()));
$("shade").addEventListener("click", closeSide);
$("down").addEventListener("click", toEnd);
$("attach").addEventListener("click", () => $("picker").click());
$("picker").addEventListener("change", () => attach([...$("picker").files]).then(() => ($("picker").value = "")));
$("messages").addEventListener("click", codeButtons);
$("think").addEventListener("change", () => {
	state.current.settings.thinking = $("think").value;
	if (Object.keys(state.current.nodes).length) save();
});
$("model").addEventListener("change", () => {
	state.current.settings.model = $("model").value;
	if (Object.keys(state.current.nodes).length) save();
	connect();
});
for (const close of document.querySelectorAll("[data-close]")) close.addEventListener("click", () => close.closest("dialog")?.close());
for (const dialog of document.querySelectorAll("dialog")) {
	dialog.addEventListener("click", (event) => event.target === dialog && dialog.id !== "key" && dialog.close());
}
$("key-form").addEventListener("submit", () => {
	api.setKey($("key-input").value.trim());
	$("key-input").value = "";
	connect();
});

const input = $("input");
input.addEventListener("input", fitInput);
input.addEventListener("keydown", (event) => {
	if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
		event.preventDefault();
		send();
	} else if (event.key === "ArrowUp" && !input.value) {
		const last = tree.path(state.current).findLast((node) => node.role === "user");
		if (last && !state.running) {
			event.preventDefault();
			startEdit(last);
		}
	}
});
input.addEventListener("paste", (event) => {
	const data = event.clipboardData;
	if (data?.files.length) {
		event.preventDefault();
		attach([...data.files]);
		return;
	}
	const text = data?.getData("text/plain") ?? "";
	if (text.length > LONG_PASTE) {
		event.preventDefault();
		state.files.push({ name: `Pasted text ${state.files.length + 1}`, text });
		showFiles();
	}
});
addEventListener("dragover", (event) => event.preventDefault());
addEventListener("drop", (event) => {
	event.preventDefault();
	attach([...(event.dataTransfer?.files ?? [])]);
});
addEventListener("keydown", (event) => {
	const command = event.ctrlKey || event.metaKey;
	if (event.key === "Escape" && !document.querySelector("dialog[open]")) {
		if (state.running) stop();
		else if (state.editing) cancelEdit();
		closeSide();
	} else if (command && event.key.toLowerCase() === "k") {
		event.preventDefault();
		openSide();
		$("search").select();
		$("search").focus();
	} else if (command && event.shiftKey && event.key.toLowerCase() === "o") {
		event.preventDefault();
		begin();
	}
});

let typing;
$("search").addEventListener("input", () => {
	clearTimeout(typing);
	typing = setTimeout(showList, 120);
});
$("export-one").addEventListener("click", () => download("conversation.json", { carat: 1, conversations: [state.current] }));
$("export").addEventListener("click", async () => download("conversations.json", { carat: 1, conversations: await store.all() }));
$("import").addEventListener("click", () => $("import-file").click());
$("import-file").addEventListener("change", async () => {
	const [file] = $("import-file").files;
	try {
		const value = JSON.parse(await file.text());
		const found = (value.conversations ?? [value]).map(tree.read);
		for (const one of found) await store.save(one);
		notify(found.length === 1 ? "One conversation was imported." : `${found.length} conversations were imported.`);
		$("data").close();
		showList();
	} catch (error) {
		notify(`${file.name} could not be imported: ${error.message}`);
	}
	$("import-file").value = "";
});
$("clear").addEventListener("click", async () => {
	if (!confirm("Delete all conversations of this browser?")) return;
	await store.clear();
	$("data").close();
	begin();
});

state.current = tree.create(structuredClone(settings.page.defaults));
show();
connect();
input.focus();
document.documentElement.dataset.ready = String(Math.round(performance.now()));
