// Markdown to nodes while it is still being written.
//
// Lines open blocks as soon as their beginning leaves no doubt, and a block that is closed is never touched again: a token costs the
// paragraph it lands in, at most. Nodes are made by createElement and text nodes alone; nothing here takes markup, so whatever an
// answer spells stays text.

import { Highlighter } from "./highlight.js";
import { inline, make, visible } from "./inline.js";

const SETTLE = 4096;
/** Of lists and quotes in each other. */
const MAX_DEPTH = 24;
const DELIMITERS = /^\|?[ \t]*:?-+:?[ \t]*(\|[ \t]*:?-+:?[ \t]*)*\|?[ \t]*$/;

/** What a line, or its beginning, says it is. `null` while more characters may change that. */
function classify(text, whole) {
	const bare = text.trimEnd();
	if (!bare) return whole ? { kind: "blank" } : null;
	const first = text[0];
	if (first === ">") return { kind: "quote", rest: text.slice(text[1] === " " ? 2 : 1) };
	if (first === "#") {
		const heading = /^(#{1,6})[ \t]+(?=\S)/.exec(text);
		if (heading) return { kind: "heading", level: heading[1].length, rest: text.slice(heading[0].length) };
		return whole || !/^#{1,6}[ \t]*$/.test(text) ? { kind: "text" } : null;
	}
	if (first === "`" || first === "~") {
		if (/^(`{3,}[^`]*|~{3,}.*)$/.test(text)) {
			if (!whole) return null;
			const [, fence, language] = /** */ (/^(`{3,}|~{3,})[ \t]*([^\s`]*)/.exec(text));
			return { kind: "fence", fence, language };
		}
		return whole || !/^(`{1,2}|~{1,2})$/.test(text) ? { kind: "text" } : null;
	}
	if (first === "|") return whole ? { kind: "row" } : null;
	if (/^([-*_])[ \t]*(\1[ \t]*)*$/.test(text)) {
		if (!whole) return null;
		if (bare.replace(/[ \t]/g, "").length >= 3) return { kind: "rule" };
	}
	const item = /^([-*+]|(\d{1,9})[.)])([ \t]+)(?=\S)/.exec(text);
	if (item) {
		const width = item[3].length > 4 ? item[1].length + 1 : item[0].length;
		return { kind: "item", start: item[2], width, rest: text.slice(width) };
	}
	if (/^([-*+]|\d{1,9}[.)]?)[ \t]*$/.test(text) && !whole) return null;
	return { kind: "text" };
}

export class Markdown {
	constructor(root) {
		this.root = root;
		/** Containers that are open, outermost first. */
		this.stack = [{ kind: "root", element: root }];
		/** The block that takes text. */
		this.leaf = null;
		this.line = "";
		/** Whether the line's beginning has been read, so that the rest is the leaf's. */
		this.begun = false;
		this.blank = false;
		/** A row that is a table's head if the next line says so. */
		this.head = null;
	}

	push(piece) {
		const text = piece.replace(/\r/g, "");
		let from = 0;
		for (;;) {
			const end = text.indexOf("\n", from);
			if (end < 0) break;
			this.piece(text.slice(from, end), true);
			from = end + 1;
		}
		if (from < text.length) this.piece(text.slice(from), false);
		if (this.leaf?.kind === "code") this.showLine();
		else if (this.leaf) this.show(false);
	}

	end() {
		if (this.line) this.piece("", true);
		this.settleHead();
		this.close(1);
		this.closeLeaf();
	}

	piece(text, whole) {
		if (this.begun) {
			this.leaf.text += text;
		} else {
			this.line += text;
			this.begun = this.read(this.line, whole);
		}
		if (whole) {
			this.line = "";
			this.begun = false;
		}
	}

	/** Reads the beginning of a line; `false` if it is too short to tell. */
	read(line, whole) {
		if (this.leaf?.kind === "code") return this.readCode(line, whole);
		let rest = line.replace(/^\t+/, (tabs) => "    ".repeat(tabs.length));
		let depth = 1;
		const isBlank = !rest.trim();
		if (isBlank && !whole) return false;
		// Containers that go on.
		for (; depth < this.stack.length; depth++) {
			const open = this.stack[depth];
			if (open.kind === "quote") {
				const mark = /^ {0,3}> ?/.exec(rest);
				if (!mark) break;
				rest = rest.slice(mark[0].length);
			} else if (open.kind === "item" && !isBlank) {
				const indent = /^ */.exec(rest)[0].length;
				const nested = indent >= open.marker + 2 && /^([-*+]|\d{1,9}[.)])[ \t]/.test(rest.trimStart());
				if (indent < open.indent && !nested) break;
				rest = rest.slice(Math.min(indent, open.indent));
			}
		}
		if (!whole && !rest.trim()) return false;
		// What the line opens, from the outside in; nothing is built before all of it is certain.
		const opens = [];
		let indent = /^ */.exec(rest)[0].length;
		let text = rest.slice(indent);
		let found;
		for (;;) {
			found = classify(text, whole);
			if (!found) return false;
			const nests = found.kind === "quote" || found.kind === "item";
			if (!nests || this.stack.length + opens.length > MAX_DEPTH) break;
			opens.push({ ...found, marker: indent, indent: indent + (found.width ?? 0) });
			indent = /^ */.exec(found.rest)[0].length;
			text = found.rest.slice(indent);
			if (!text) {
				if (!whole) return false;
				found = { kind: "blank" };
				break;
			}
		}
		if (this.head !== null) {
			const isDelimiters = DELIMITERS.test(text) && !opens.length;
			if (isDelimiters && !whole) return false;
			if (isDelimiters && text.includes("-")) {
				this.openTable(text);
				return true;
			}
			this.settleHead();
		}
		return this.build(depth, opens, found, text);
	}

	build(depth, opens, found, text) {
		if (found.kind === "blank" && !opens.length) {
			this.blank = true;
			this.closeLeaf();
			// A quote ends with a line that is not quoted.
			const quote = this.stack.findIndex((open, n) => n >= depth && open.kind === "quote");
			if (quote >= 0) this.close(quote);
			return true;
		}
		// A paragraph takes lines without the marks of what it is in.
		if (!opens.length && this.leaf?.kind === "p" && !this.blank) {
			if (found.kind === "text") this.leaf.text += "\n" + text;
			if (found.kind === "row") this.head = text;
			if (found.kind === "text" || found.kind === "row") return true;
		}
		if (found.kind === "row" && this.leaf?.kind === "table" && !opens.length) {
			this.fillRow(this.leaf.body, text, "td");
			return true;
		}
		this.close(depth);
		this.closeLeaf();
		for (const open of opens) this.openContainer(open);
		if (!opens.length && this.stack.at(-1).kind === "list") this.stack.pop();
		this.blank = false;
		switch (found.kind) {
			case "heading":
				this.openLeaf("h", make("h" + Math.min(6, found.level + 1)));
				this.leaf.text = found.rest;
				break;
			case "rule":
				this.append(make("hr"));
				break;
			case "fence":
				this.openCode(found);
				break;
			case "row":
				this.head = text;
				break;
			case "blank":
				break;
			default:
				this.openLeaf("p", make("p"));
				this.leaf.text = text;
		}
		return true;
	}

	openContainer(open) {
		if (open.kind === "quote") {
			if (this.stack.at(-1).kind === "list") this.stack.pop();
			const element = make("blockquote");
			this.append(element);
			this.stack.push({ kind: "quote", element });
			return;
		}
		const ordered = open.start !== undefined;
		let list = this.stack.at(-1);
		if (list.kind === "list" && list.ordered !== ordered) {
			this.stack.pop();
			list = this.stack.at(-1);
		}
		if (list.kind !== "list") {
			const element = make(ordered ? "ol" : "ul");
			if (ordered && open.start !== "1") element.setAttribute("start", String(Number(open.start)));
			this.append(element);
			list = { kind: "list", element, ordered };
			this.stack.push(list);
		}
		const element = make("li");
		list.element.append(element);
		this.stack.push({ kind: "item", element, marker: open.marker, indent: open.indent });
	}

	/** Closes containers from the given depth on; the list of a closed item stays open for the next. */
	close(depth) {
		if (depth >= this.stack.length) return;
		this.closeLeaf();
		this.stack.length = depth;
	}

	append(element) {
		const parent = this.stack.at(-1).element;
		parent.append(element);
	}

	openLeaf(kind, element) {
		this.append(element);
		this.leaf = { kind, element, text: "", settled: 0, shown: "" };
	}

	closeLeaf() {
		if (!this.leaf) return;
		this.show(true);
		this.leaf = null;
	}

	show(last) {
		const leaf = this.leaf;
		if (leaf.kind !== "p" && leaf.kind !== "h") return;
		// Parts of a very long one are settled, so that a token never costs more than the rest.
		while (leaf.text.length - leaf.settled > SETTLE) {
			const window = leaf.text.slice(leaf.settled, leaf.settled + SETTLE);
			const cut = Math.max(window.lastIndexOf("\n"), window.lastIndexOf(" ")) + 1 || SETTLE;
			leaf.tail?.forEach((node) => node.remove());
			leaf.tail = null;
			leaf.element.append(...inline(window.slice(0, cut), true));
			leaf.settled += cut;
			leaf.shown = "";
		}
		const text = leaf.text.slice(leaf.settled);
		if (text === leaf.shown && !last) return;
		leaf.shown = text;
		leaf.tail?.forEach((node) => node.remove());
		const trimmed = leaf.kind === "h" ? text.replace(/[ \t]+#*[ \t]*$/, "") : text.replace(/[ \t]+$/, "");
		leaf.tail = inline(trimmed, last);
		leaf.element.append(...leaf.tail);
	}

	/** The line of code that is being written, without colours. */
	showLine() {
		const { fence, element, highlighter } = this.leaf;
		this.leaf.tail?.remove();
		this.leaf.tail = null;
		if (!this.line || this.line.trim().startsWith(fence[0])) return;
		this.leaf.tail = document.createTextNode((highlighter.isFirst ? "" : "\n") + visible(this.line));
		element.append(this.leaf.tail);
	}

	openCode({ fence, language }) {
		const block = make("figure", "code");
		const bar = make("figcaption");
		const name = make("span");
		name.textContent = visible(language.slice(0, 40)) || "text";
		bar.append(name);
		for (const act of ["wrap", "copy"]) {
			const button = make("button");
			button.type = "button";
			button.dataset.act = act;
			button.textContent = act === "wrap" ? "Wrap" : "Copy";
			bar.append(button);
		}
		const pre = make("pre");
		pre.tabIndex = 0;
		const code = make("code");
		pre.append(code);
		block.append(bar, pre);
		this.append(block);
		this.leaf = { kind: "code", element: code, fence, highlighter: new Highlighter(code, language) };
	}

	readCode(line, whole) {
		if (!whole) return false;
		const { fence, highlighter } = this.leaf;
		this.leaf.tail?.remove();
		this.leaf.tail = null;
		const trimmed = line.trim();
		if (trimmed.length >= fence.length && trimmed === fence[0].repeat(trimmed.length)) {
			this.closeLeaf();
			return true;
		}
		let text = line;
		for (const open of this.stack) {
			if (open.kind === "quote") text = text.replace(/^ {0,3}> ?/, "");
			if (open.kind === "item") text = text.replace(new RegExp(`^ {0,${open.indent}}`), "");
		}
		highlighter.line(visible(text));
		return true;
	}

	settleHead() {
		if (this.head === null) return;
		const text = this.head;
		this.head = null;
		if (this.leaf?.kind !== "p") {
			this.closeLeaf();
			this.openLeaf("p", make("p"));
			this.leaf.text = text;
		} else {
			this.leaf.text += "\n" + text;
		}
	}

	openTable(delimiters) {
		const head = this.head ?? "";
		this.head = null;
		this.closeLeaf();
		const aligns = cells(delimiters).map((cell) => {
			const [left, right] = [cell.startsWith(":"), cell.endsWith(":")];
			return left && right ? "center" : right ? "right" : "";
		});
		const frame = make("div", "table");
		frame.tabIndex = 0;
		frame.setAttribute("role", "group");
		frame.setAttribute("aria-label", "table");
		const table = make("table");
		const top = make("thead");
		const body = make("tbody");
		table.append(top, body);
		frame.append(table);
		this.append(frame);
		this.leaf = { kind: "table", body, aligns };
		this.fillRow(top, head, "th");
	}

	fillRow(parent, line, tag) {
		const row = make("tr");
		const texts = cells(line);
		for (const [n, align] of this.leaf.aligns.entries()) {
			const cell = make(tag, align);
			cell.append(...inline(texts[n] ?? "", true));
			row.append(cell);
		}
		parent.append(row);
	}
}

/** Cells of a row; `\|` and bars in code do not part them. */
function cells(line) {
	const text = line.trim().replace(/^\|/, "").replace(/(?<!\\)\|$/, "");
	const parts = [""];
	let ticks = false;
	for (let at = 0; at < text.length && parts.length <= 256; at++) {
		const c = text[at];
		if (c === "\\" && text[at + 1] === "|") {
			parts[parts.length - 1] += "|";
			at++;
		} else if (c === "|" && !ticks) {
			parts.push("");
		} else {
			if (c === "`") ticks = !ticks;
			parts[parts.length - 1] += c;
		}
	}
	return parts.map((part) => part.trim());
}
