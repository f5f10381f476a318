// Colours of code: comments, strings, numbers, keywords and called names, line by line.

const CURLY =
	"abstract any as async auto await bool boolean break case catch char class const continue crate default defer delete do double dyn else enum export extends extern false final finally float fn for from func function go if impl implements import in inline instanceof int interface is let long loop match mod move mut namespace new nil null nullptr NULL of operator override package private protected pub public range ref return self Self short sizeof static string struct super switch template this throw trait true try type typedef typeof undefined union unsafe unsigned use using val var virtual void when where while yield #include #define #if #ifdef #ifndef #endif #else";
const HASH =
	"and as assert async await break case class continue def del do echo elif else end except export False false fi finally for from function if import in is lambda local match nil None not null or pass raise require return self then True true try when while with yield";
const SQL =
	"alter and as asc between by case create default delete desc distinct drop else end exists from group having in inner insert into is join left like limit not null on or order right select set table union update using values when where with";
const curly = { line: "//", block: ["/*", "*/"], quotes: "\"'", words: CURLY };
const hash = { line: "#", quotes: "\"'", words: HASH };
/** Families: languages that differ in a few keywords share one. */
const LANGUAGES = [
	["js jsx mjs javascript ts tsx typescript go golang jsonc", { ...curly, quotes: "\"'`" }],
	["rs rust swift", { ...curly, quotes: '"' }],
	["c h cpp c++ hpp cuda cs csharp java kt kotlin", curly],
	["py python python3", { ...hash, triple: true }],
	["sh bash shell zsh console rb ruby yaml yml toml ini lua", hash],
	["sql", { line: "--", block: ["/*", "*/"], quotes: "'\"", fold: true, words: SQL }],
	["json", { quotes: '"', words: "true false null" }],
	["css scss", { block: ["/*", "*/"], quotes: "\"'", words: "@media @import @keyframes @supports" }],
	["html xml svg", { block: ["<!--", "-->"], quotes: "\"'", tags: true, words: "" }],
];

const escape = (text) => text.replace(/[.*+?^${}()|[\]\\/-]/g, "\\$&");

function language(name) {
	const found = LANGUAGES.find(([names]) => names.split(" ").includes(name.toLowerCase()))?.[1];
	if (found && !found.pattern) {
		found.set = new Set(found.words.split(" "));
		const parts = [];
		if (found.block) parts.push(`(?<open>${escape(found.block[0])})`);
		if (found.line) parts.push(`(?<comment>${escape(found.line)}.*)`);
		if (found.triple) parts.push(`(?<triple>"""|''')`);
		if (found.quotes) parts.push(...[...found.quotes].map((q, n) => `(?<string${n}>${q}(?:[^${q}\\\\]|\\\\.)*(?:${q}|$))`));
		if (found.tags) parts.push("(?<tag></?[A-Za-z][\\w-]*|/?>)");
		parts.push("(?<number>\\b(?:0[xXbBoO][\\da-fA-F_]+|\\d[\\d_]*(?:\\.\\d+)?(?:[eE][+-]?\\d+)?)[a-z]*\\d*\\b)");
		parts.push("(?<word>[@#]?[A-Za-z_$][\\w$]*)");
		found.pattern = new RegExp(parts.join("|"), "g");
	}
	return found;
}

export class Highlighter {
	constructor(element, name) {
		this.element = element;
		this.language = language(name);
		/** What ends the comment or string that is open over lines. */
		this.open = null;
		this.isFirst = true;
	}

	add(kind, text) {
		if (!text) return;
		if (!kind) {
			this.element.append(text);
			return;
		}
		const span = document.createElement("span");
		span.className = kind;
		span.textContent = text;
		this.element.append(span);
	}

	line(text) {
		if (!this.isFirst) this.element.append("\n");
		this.isFirst = false;
		// What has no end in sight is no program.
		if (!this.language || text.length > 2000) {
			this.add("", text);
			return;
		}
		let at = 0;
		let plain = 0;
		while (at <= text.length) {
			if (this.open) {
				const end = text.indexOf(this.open.end, at);
				const to = end < 0 ? text.length : end + this.open.end.length;
				this.add(this.open.kind, text.slice(at, to));
				at = plain = to;
				if (end < 0) return;
				this.open = null;
			}
			const { pattern } = this.language;
			pattern.lastIndex = at;
			const match = pattern.exec(text);
			if (!match) break;
			const groups = match.groups;
			const kind = this.kind(groups, text[pattern.lastIndex]);
			if (groups.open || groups.triple) {
				this.add("", text.slice(plain, match.index));
				const end = groups.open ? this.language.block[1] : groups.triple;
				this.open = { end, kind: groups.open ? "c" : "s" };
				this.add(this.open.kind, match[0]);
				at = plain = match.index + match[0].length;
			} else {
				if (kind) {
					this.add("", text.slice(plain, match.index));
					this.add(kind, match[0]);
					plain = match.index + match[0].length;
				}
				at = match.index + Math.max(1, match[0].length);
			}
		}
		this.add("", text.slice(plain));
	}

	kind(groups, next) {
		if (groups.comment) return "c";
		if (groups.string0 || groups.string1 || groups.string2) return "s";
		if (groups.number) return "n";
		if (groups.tag) return "k";
		if (groups.word) {
			const word = this.language.fold ? groups.word.toLowerCase() : groups.word;
			if (this.language.set.has(word)) return "k";
			return next === "(" ? "f" : "";
		}
		return "";
	}
}
