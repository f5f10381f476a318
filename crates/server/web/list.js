// The list of conversations.

import { begin, openConversation, showTitle } from "./app.js";
import { $, h, iconButton } from "./dom.js";
import { state } from "./state.js";
import * as store from "./store.js";

export async function showList() {
	const words = $("search").value.trim();
	const listed = await store.list();
	const found = words ? await store.search(words) : null;
	const shown = found ? listed.filter(({ id }) => found.has(id)) : listed;
	const row = ({ id, title }) => {
		const open = h("button", { type: "button", className: "open", title, onclick: () => openConversation(id) }, title || "Untitled");
		if (id === state.current.id) open.setAttribute("aria-current", "true");
		return h("li", null, open, iconButton("edit", `Rename ${title}`, () => rename(id, open)), iconButton("trash", `Delete ${title}`, () => removeConversation(id, title)));
	};
	$("list").replaceChildren(...shown.map(row));
	if (!shown.length) $("list").append(h("li", { className: "faint" }, words ? "Nothing found." : "Your conversations will be listed here."));
}

async function rename(id, place) {
	const body = id === state.current.id ? state.current : await store.load(id);
	const input = h("input", { value: body.title, "aria-label": "Title", className: "open" });
	let over = false;
	const end = async (keeps) => {
		if (over) return;
		over = true;
		const title = input.value.trim();
		input.replaceWith(place);
		if (keeps && title && title !== body.title) {
			body.title = title;
			await store.save(body);
			if (id === state.current.id) showTitle();
			showList();
		}
	};
	input.addEventListener("keydown", (event) => {
		if (event.key === "Enter") end(true);
		if (event.key === "Escape") end(false);
	});
	input.addEventListener("blur", () => end(true));
	place.replaceWith(input);
	input.select();
}

async function removeConversation(id, title) {
	if (!confirm(`Delete “${title || "Untitled"}”?`)) return;
	await store.remove(id);
	if (id === state.current.id) await begin();
	else showList();
}
