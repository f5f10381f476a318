// Marks inside a line: emphasis, code, links, formulas. Elements are made by createElement and hold text nodes; what an answer spells
// as markup stays text, and only http, https and mailto become links.

/** Controls that make text read in another order than it is stored. */
const REORDERING = /[\u202a-\u202e\u2066-\u2069]/g;
export const make = (tag, kind) => {
	const element = document.createElement(tag);
	if (kind) element.className = kind;
	return element;
};

/** Text as it is shown: what reorders it is made visible. */
export const visible = (text) => text.replace(REORDERING, "\ufffd");

/** The address of a link that may be followed, or nothing. */
export function safeAddress(text) {
	try {
		const url = new URL(text);
		return ["http:", "https:", "mailto:"].includes(url.protocol) ? url.href : null;
	} catch {
		return null;
	}
}

const SPECIAL = /[\\`*_~[\]!<&$\n]|https?:\/\//g;
const ENTITIES = { amp: "&", lt: "<", gt: ">", quot: '"', apos: "'", nbsp: "\u00a0" };

/**
 * Nodes of a line of text. Where it is not the last word, marks that are open stay open to its end, so that text does not jump
 * from plain to bold when the closing mark comes.
 */
export function inline(text, last, depth = 0) {
	const items = [];
	let plain = "";
	const flush = () => {
		if (plain) items.push({ node: document.createTextNode(visible(plain)) });
		plain = "";
	};
	const node = (made) => {
		flush();
		items.push({ node: made });
	};
	let at = 0;
	while (at < text.length) {
		SPECIAL.lastIndex = at;
		const next = SPECIAL.exec(text);
		if (!next) break;
		plain += text.slice(at, next.index);
		at = next.index;
		const c = text[at];
		const rest = text.slice(at);
		let match;
		if (c === "\n") {
			plain = plain.replace(/ +$/, "");
			node(make("br"));
			at += 1;
		} else if (c === "\\" && (match = /^\\\((.+?)\\\)|^\\\[([^]+?)\\\]/.exec(rest))) {
			node(formula(match[0]));
			at += match[0].length;
		} else if (c === "\\" && /[!-/:-@[-`{-~]/.test(text[at + 1] ?? "")) {
			plain += text[at + 1];
			at += 2;
		} else if (c === "$" && (match = /^\$\$[^]+?\$\$|^\$(?=\S)[^$\n]*?[^\s$]\$(?!\d)/.exec(rest))) {
			node(formula(match[0]));
			at += match[0].length;
		} else if (c === "`") {
			const ticks = /^`+/.exec(rest)[0];
			const close = closingTicks(text, at + ticks.length, ticks.length);
			if (close < 0 && last) {
				plain += ticks;
				at += ticks.length;
			} else {
				const inner = close < 0 ? text.slice(at + ticks.length) : text.slice(at + ticks.length, close);
				const code = make("code");
				code.textContent = visible(/^ .*\S.* $/.test(inner) ? inner.slice(1, -1) : inner);
				node(code);
				at = close < 0 ? text.length : close + ticks.length;
			}
		} else if (c === "*" || c === "_" || c === "~") {
			const run = /^(\*+|_+|~+)/.exec(rest)[0];
			if (c === "~" && run.length !== 2) {
				plain += run;
			} else {
				flush();
				items.push(mark(text, at, run));
			}
			at += run.length;
		} else if ((c === "[" || (c === "!" && text[at + 1] === "[")) && depth < 4 && (match = link(rest, last))) {
			const [whole, , label, address] = match;
			const inner = inline(label, last || whole.endsWith(")"), depth + 1);
			const href = safeAddress(address);
			if (href) node(anchor(href, inner));
			else {
				flush();
				for (const child of inner) items.push({ node: child });
			}
			at += whole.length;
		} else if (c === "<" && (match = /^<((?:https?:\/\/|mailto:)[^\s<>]+)>/.exec(rest))) {
			const href = safeAddress(match[1]);
			if (href) node(anchor(href, [document.createTextNode(visible(match[1]))]));
			else plain += match[0];
			at += match[0].length;
		} else if (c === "h" && (match = /^https?:\/\/[^\s<>"`\u202a-\u202e\u2066-\u2069]+/.exec(rest)) && !/\w$/.test(plain)) {
			let address = match[0].replace(/[.,;:!?*_~'"]+$/, "");
			while (address.endsWith(")") && count(address, ")") > count(address, "(")) address = address.slice(0, -1);
			const href = safeAddress(address);
			if (href) node(anchor(href, [document.createTextNode(visible(address))]));
			else plain += address;
			at += address.length;
		} else if (c === "&" && (match = /^&(amp|lt|gt|quot|apos|nbsp);/.exec(rest))) {
			plain += ENTITIES[match[1]];
			at += match[0].length;
		} else {
			plain += c;
			at += 1;
		}
	}
	plain += text.slice(at);
	flush();
	return emphasize(items, last);
}

const count = (text, c) => text.split(c).length - 1;

function closingTicks(text, from, length) {
	const runs = /`+/g;
	runs.lastIndex = from;
	for (let run; (run = runs.exec(text)); ) if (run[0].length === length) return run.index;
	return -1;
}

/** `[label](address)`, or its beginning while it is being written. */
function link(text, last) {
	const whole = /^(!?)\[((?:[^[\]\\]|\\.|\[[^[\]]*\])*)\]\(\s*<?([^\s<>()]*(?:\([^\s()]*\)[^\s<>()]*)*)>?(?:\s+["'][^"'\n]*["'])?\s*\)/.exec(text);
	if (whole || last) return whole;
	return /^(!?)\[((?:[^[\]\\\n]|\\.)*)\]\([^\s()]*$/.exec(text);
}

function anchor(href, inner) {
	const a = make("a");
	a.href = href;
	a.title = href;
	a.target = "_blank";
	a.rel = "noopener noreferrer nofollow";
	a.append(...inner);
	return a;
}

function formula(text) {
	const span = make("span", "formula");
	span.textContent = visible(text);
	return span;
}

/** A run of marks, with what it may do by what stands beside it. */
function mark(text, at, run) {
	const before = text[at - 1] ?? " ";
	const after = text[at + run.length] ?? " ";
	const isSpace = (c) => /\s/.test(c);
	const isSign = (c) => /[\p{P}\p{S}]/u.test(c);
	const left = !isSpace(after) && (!isSign(after) || isSpace(before) || isSign(before));
	const right = !isSpace(before) && (!isSign(before) || isSpace(after) || isSign(after));
	const inWord = run[0] === "_";
	return {
		run: run[0],
		length: run.length,
		opens: left && (!inWord || !right || isSign(before)),
		closes: right && (!inWord || !left || isSign(after)),
	};
}

/** Pairs marks and wraps what is between them. */
function emphasize(items, last) {
	const bottom = {};
	const wrap = (from, to, run, size) => {
		const element = make(run === "~" ? "del" : size === 2 ? "strong" : "em");
		element.append(...items.splice(from, to - from).flatMap(literal));
		items.splice(from, 0, { node: element });
	};
	for (let at = 0; at < items.length; at++) {
		const closer = items[at];
		if (!closer.run || !closer.closes) continue;
		const least = bottom[closer.run] ?? 0;
		let from = at - 1;
		const pairs = (opener) =>
			opener.run === closer.run &&
			opener.opens &&
			opener.length > 0 &&
			((!opener.closes && !closer.opens) || (opener.length + closer.length) % 3 !== 0 || closer.length % 3 === 0);
		while (from >= least && !pairs(items[from])) from--;
		if (from < least) {
			if (!closer.opens) bottom[closer.run] = at;
			continue;
		}
		const opener = items[from];
		const size = opener.length >= 2 && closer.length >= 2 ? 2 : 1;
		opener.length -= size;
		closer.length -= size;
		wrap(from + 1, at, closer.run, size);
		at = from + 2;
		for (const run of Object.keys(bottom)) bottom[run] = Math.min(bottom[run], from);
		if (opener.length === 0) {
			items.splice(from, 1);
			at--;
		}
		// What is left of the closer is looked at again.
		if (closer.length > 0) at--;
		else items.splice(at--, 1);
	}
	if (!last) {
		// Only the latest few, so that marks alone nest no deeper than that.
		for (let at = items.length - 2; at >= Math.max(0, items.length - 64); at--) {
			const { run, opens, length } = items[at];
			if (run && opens && length > 0 && length < 4) {
				wrap(at + 1, items.length, run, length >= 2 ? 2 : 1);
				items.splice(at, 1);
			}
		}
	}
	return items.flatMap(literal);
}

function literal(item) {
	if (item.node) return [item.node];
	return item.length > 0 ? [document.createTextNode(item.run.repeat(item.length))] : [];
}
