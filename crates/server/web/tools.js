// Tools that the page answers itself: a calculator, a clock, and functions of the reader's own, which run in a frame that reaches
// neither this page nor any network.

/** Longest that a function may take. */
const LIMIT_MS = 5000;

export const BUILTIN = [
	{
		name: "calculator",
		description: "Computes an arithmetic expression exactly as written, for example (3 + 4) * 2.5 ^ 2",
		parameters: { type: "object", properties: { expression: { type: "string", description: "The expression" } }, required: ["expression"] },
		builtin: true,
	},
	{
		name: "clock",
		description: "Tells the current date and time",
		parameters: { type: "object", properties: {}, required: [] },
		builtin: true,
	},
];

/** Numbers, + - * / % ^, parentheses and a few functions. */
export function calculate(text) {
	const tokens = text.replace(/,(?=\d{3}\b)/g, "").match(/\d+\.?\d*(?:e[+-]?\d+)?|\.\d+|[a-z]+|\*\*|[-+*/%^()]|\S/gi) ?? [];
	const functions = { sqrt: Math.sqrt, abs: Math.abs, ln: Math.log, log: Math.log10, exp: Math.exp, round: Math.round };
	let at = 0;
	let depth = 0;
	const take = (/** */ ...wanted) => (wanted.includes(tokens[at]) ? tokens[at++] : null);
	const sum = () => {
		let value = product();
		for (let sign; (sign = take("+", "-", "\u2212")); ) value = sign === "+" ? value + product() : value - product();
		return value;
	};
	const product = () => {
		let value = signed();
		for (let sign; (sign = take("*", "/", "%", "\u00d7", "\u00f7")); ) {
			const by = signed();
			value = sign === "*" || sign === "\u00d7" ? value * by : sign === "%" ? value % by : value / by;
		}
		return value;
	};
	const signed = () => {
		if (++depth > 200) throw new Error("the expression is nested too deeply");
		const value = take("-", "\u2212") ? -signed() : take("+") ? signed() : power();
		depth--;
		return value;
	};
	const power = () => {
		const base = atom();
		return take("^", "**") ? base ** signed() : base;
	};
	const atom = () => {
		const token = tokens[at++];
		if (token === "(") {
			const value = sum();
			if (!take(")")) throw new Error("a parenthesis is not closed");
			return value;
		}
		if (token === "pi") return Math.PI;
		if (token === "e") return Math.E;
		if (token && Object.hasOwn(functions, token)) {
			if (!take("(")) throw new Error(`${token} wants a parenthesis`);
			const value = sum();
			if (!take(")")) throw new Error("a parenthesis is not closed");
			return functions[token](value);
		}
		const value = Number(token);
		if (token === undefined || Number.isNaN(value)) throw new Error(token === undefined ? "the expression breaks off" : `\`${token}\` is no number`);
		return value;
	};
	const value = sum();
	if (at < tokens.length) throw new Error(`\`${tokens[at]}\` was not expected`);
	return value;
}

const runCalculator = (args) => String(Number(calculate(String(args.expression ?? "")).toPrecision(15)));

function runClock() {
	const now = new Date();
	const zone = Intl.DateTimeFormat().resolvedOptions().timeZone;
	return `${now.toLocaleString("en-GB", { dateStyle: "full", timeStyle: "medium" })} (${zone})`;
}

/** Whether a call is answered without the reader. */
export const isAutomatic = (tool) => Boolean(tool && (tool.builtin || tool.code?.trim()));

export async function run(tool, args) {
	const parsed = JSON.parse(args || "{}");
	if (tool.builtin) return tool.name === "clock" ? runClock() : runCalculator(parsed);
	return sandboxed(tool.code ?? "", parsed);
}

/** Runs the body of a function of `args` in the frame. */
function sandboxed(code, args) {
	return new Promise((resolve, reject) => {
		const frame = document.createElement("iframe");
		frame.hidden = true;
		frame.setAttribute("sandbox", "allow-scripts");
		frame.src = "/web/sandbox.html";
		const end = (act) => {
			clearTimeout(timer);
			removeEventListener("message", listen);
			frame.remove();
			act();
		};
		const listen = (event) => {
			if (event.source !== frame.contentWindow) return;
			const { error, value } = event.data ?? {};
			end(() => (error === undefined ? resolve(String(value)) : reject(new Error(String(error)))));
		};
		const timer = setTimeout(() => end(() => reject(new Error(`the function took longer than ${LIMIT_MS / 1000} s`))), LIMIT_MS);
		addEventListener("message", listen);
		frame.addEventListener("load", () => frame.contentWindow?.postMessage({ code, args }, "*"));
		document.body.append(frame);
	});
}
