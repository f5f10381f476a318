// Has a message answered: asks, shows what comes, runs the tools that the model calls, and asks again.

import * as api from "./api.js";
import { askKey, atEnd, connect, countContext, keepEnd, save, showMessages, toEnd, views } from "./app.js";
import { $, h } from "./dom.js";
import { showList } from "./list.js";
import * as settings from "./settings.js";
import { state } from "./state.js";
import * as store from "./store.js";
import * as tools from "./tools.js";
import * as tree from "./tree.js";

/** Has a message answered, or goes on with it. */
export async function answer(node, change = {}, continues = false) {
	stop();
	const conversation = state.current;
	const before = tree.path(conversation);
	const earlier = before.slice(0, before.indexOf(node));
	delete node.error;
	delete node.finish;
	const abort = new AbortController();
	const mine = { node, abort };
	state.running = mine;
	showMessages();
	toEnd();
	connect();
	const id = `web-${tree.newId()}`;
	const waits = watchQueue(id, abort.signal, node);
	const started = performance.now();
	let first = 0;
	let thoughtSince = 0;
	let last = {};
	const paint = painter(node);
	const says = speaker();
	try {
		const messages = tree.wire(conversation, continues ? [...earlier, node] : earlier);
		const body = { model: state.model?.name, messages, ...settings.request(conversation.settings), ...change, ...(continues && { add_generation_prompt: false }) };
		if (continues) delete body.reasoning_effort;
		for await (const chunk of api.chat(body, abort.signal, id)) {
			const delta = chunk.choices[0]?.delta ?? {};
			if (!first && (delta.content || delta.reasoning_content || delta.tool_calls)) {
				first = performance.now() - started;
				waits();
			}
			if (delta.reasoning_content) {
				thoughtSince ||= performance.now();
				node.thinking = (node.thinking ?? "") + delta.reasoning_content;
				node.thought = performance.now() - thoughtSince;
			}
			if (delta.content) {
				node.text += delta.content;
				says(delta.content);
			}
			for (const part of delta.tool_calls ?? []) {
				node.calls ??= [];
				const call = (node.calls[part.index] ??= { id: part.id, name: part.function.name, arguments: "" });
				call.arguments += part.function.arguments ?? "";
			}
			const reason = chunk.choices[0]?.finish_reason;
			if (reason) node.finish = reason;
			for (const key of ["usage", "timings", "carat"]) if (chunk[key]) last[key] = chunk[key];
			paint();
		}
		node.stats = figures(last, first);
	} catch (error) {
		if (abort.signal.aborted) {
			node.finish = "stopped";
		} else {
			node.error = error instanceof Error ? error.message : String(error);
			if (error instanceof api.Failure && error.status === 401) askKey(node.error);
		}
	} finally {
		waits();
	}
	says("", true);
	if (state.running === mine) state.running = null;
	// Stopped before anything came: nothing to keep but the place to try again.
	if (node.finish === "stopped" && !node.text && !node.thinking) node.error = "Stopped before the answer began.";
	if (conversation !== state.current) {
		await store.save(conversation).catch(() => {});
		return showList();
	}
	showMessages();
	keepEnd();
	await save();
	countContext(node.stats);
	if (node.finish === "tool_calls" && !node.error) runCalls(node);
}

function figures({ usage, timings, carat }, first) {
	return {
		tokens: usage?.completion_tokens ?? timings?.predicted_n ?? 0,
		prompt: usage?.prompt_tokens,
		cached: usage?.prompt_tokens_details?.cached_tokens ?? 0,
		total: usage?.total_tokens,
		rate: timings?.predicted_n > 1 ? timings.predicted_per_second : undefined,
		first,
		miss: carat?.cache?.miss ?? undefined,
		seed: carat?.seed,
	};
}

/** Shows what has come once per frame. */
function painter(node) {
	let waits = false;
	return () => {
		if (waits) return;
		waits = true;
		requestAnimationFrame(() => {
			waits = false;
			if (state.running?.node !== node) return;
			const follows = atEnd();
			views.get(node.id)?.update();
			if (follows) toEnd();
		});
	};
}

/** Reads an answer out by sentences, to those who listen. */
function speaker() {
	let sentence = "";
	return (text, last = false) => {
		sentence += text;
		const end = last ? sentence.length : sentence.search(/[.!?:]\s[^]*$|\n/) + 1;
		if (end <= 0 || !sentence.trim()) return;
		$("live").textContent = sentence.slice(0, end).trim();
		sentence = sentence.slice(end);
	};
}

/** Tells the place in the queue if the answer does not begin at once. */
function watchQueue(id, signal, node) {
	let over = false;
	const line = h("p", { className: "waiting" }, h("i"), h("span", null, ""));
	const body = views.get(node.id)?.body;
	const appear = setTimeout(() => !over && body?.append(line), 150);
	const ask = async () => {
		if (over || signal.aborted) return;
		const listed = await api.get("/internal/requests").catch(() => null);
		const place = listed?.waiting?.indexOf(id) ?? -1;
		if (over) return;
		const reading = state.model?.loaded === false ? "loading the model" : "reading";
		if (line.lastChild) line.lastChild.textContent = place >= 0 ? (place ? `${place} before this one` : "next in the queue") : reading;
		timer = setTimeout(ask, 1000);
	};
	let timer = setTimeout(ask, 1000);
	return () => {
		over = true;
		clearTimeout(timer);
		clearTimeout(appear);
		line.remove();
	};
}

export function stop() {
	const was = state.running;
	state.running = null;
	was?.abort.abort();
}

async function runCalls(node) {
	for (const call of node.calls ?? []) {
		const tool = settings.tools().find(({ name }) => name === call.name);
		if (!tool || !tools.isAutomatic(tool)) continue;
		const text = await tools.run(tool, call.arguments).catch((error) => `Error: ${error.message}`);
		takeResult(node, call, text);
	}
}

/** The results of a message's calls stand one after the other below it. */
export function takeResult(node, call, text) {
	const shown = tree.path(state.current);
	const at = shown.indexOf(node);
	if (at < 0) return;
	const given = shown.slice(at + 1).filter((other) => other.role === "tool");
	if (given.some((other) => other.call === call.id)) return;
	const last = tree.add(state.current, (given.at(-1) ?? node).id, { role: "tool", call: call.id, name: call.name, text });
	showMessages();
	if (given.length + 1 === node.calls?.length) answer(tree.add(state.current, last.id, { role: "assistant" }));
	else save();
}
