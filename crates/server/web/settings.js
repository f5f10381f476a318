// What can be set: per conversation how it is answered, for the whole page its looks and its tools.

import { applyTheme, h, $, notify } from "./dom.js";
import { BUILTIN } from "./tools.js";

const PAGE = "carat.page";

const NUMBERS = [
	{ key: "temperature", label: "Temperature", min: 0, max: 5, hint: "0 always takes the likeliest" },
	{ key: "top_p", label: "Top-p", min: 0, max: 1, hint: "share of probability kept" },
	{ key: "top_k", label: "Top-k", min: 0, max: 1000, hint: "candidates kept; 0 keeps all" },
	{ key: "min_p", label: "Min-p", min: 0, max: 1, hint: "least share of the likeliest" },
	{ key: "repeat_penalty", label: "Repeat penalty", min: 0.5, max: 2, hint: "1 is none" },
	{ key: "max_tokens", label: "Most tokens", min: 1, max: 1000000, hint: "of an answer; empty: as many as fit" },
	{ key: "seed", label: "Seed", min: 0, max: Number.MAX_SAFE_INTEGER, hint: "empty: another each time" },
];

/** Of the whole page. */
export const page = { theme: "system", tools: [], defaults: {} };
try {
	Object.assign(page, JSON.parse(localStorage.getItem(PAGE) ?? "{}"));
} catch {
	// What cannot be read is as good as none.
}
applyTheme(page.theme);

const keep = () => localStorage.setItem(PAGE, JSON.stringify(page));

/** Built in or the reader's own. */
export const tools = () => [...BUILTIN, ...page.tools];

function parseSchema(text) {
	const schema = JSON.parse(text);
	if (!schema || typeof schema !== "object" || Array.isArray(schema)) throw new Error("a schema is an object");
	return schema;
}

/** What the settings add to a request. */
export function request(settings) {
	const body = {};
	for (const { key } of NUMBERS) if (Number.isFinite(settings[key])) body[key] = settings[key];
	if (settings.stop?.length) body.stop = settings.stop;
	if (settings.thinking && settings.thinking !== "none") body.reasoning_effort = settings.thinking;
	if (settings.format === "json") body.response_format = { type: "json_object" };
	if (settings.format === "schema" && settings.schema?.trim()) {
		body.response_format = { type: "json_schema", json_schema: { name: "answer", schema: parseSchema(settings.schema) } };
	}
	const enabled = tools().filter((tool) => settings.tools?.includes(tool.name));
	if (enabled.length) {
		body.tools = enabled.map(({ name, description, parameters }) => ({ type: "function", function: { name, description, parameters } }));
		if (settings.tool_choice === "required") body.tool_choice = "required";
	}
	return body;
}

const field = (label, input, hint) => h("label", { className: "field" }, h("span", null, label), input, hint && h("small", null, hint));

/** The dialog over a conversation's settings. `changed` hears of every change that holds. */
export function open(settings, defaults, changed) {
	const dialog = $("settings");
	const put = (key, value) => {
		if (value === undefined || value === "" || value === null) delete settings[key];
		else settings[key] = value;
		changed();
	};
	const text = (key, props) =>
		h("textarea", { value: settings[key] ?? "", ...props, oninput: (e) => put(key, e.target.value) });
	const numbers = NUMBERS.map(({ key, label, min, max, hint }) => {
		const shown = defaults[key];
		const input = h("input", {
			type: "number", inputMode: "decimal", min, max, step: "any", value: settings[key] ?? "",
			placeholder: Number.isFinite(shown) ? String(Number(shown.toPrecision(6))) : "",
			oninput: (e) => {
				const valid = e.target.value === "" || e.target.validity.valid;
				e.target.setAttribute("aria-invalid", String(!valid));
				if (valid) put(key, e.target.value === "" ? undefined : Number(e.target.value));
			},
		});
		return field(label, input, hint);
	});
	const select = (key, label, options) =>
		h("select", { "aria-label": label, onchange: (e) => { put(key, e.target.value); refresh(); } },
			options.map(([value, name]) => h("option", { value, selected: (settings[key] ?? options[0][0]) === value }, name)));
	const schemaError = h("small", { className: "bad", role: "alert" });
	const schema = text("schema", {
		rows: 6, spellcheck: false, className: "mono", "aria-label": "JSON schema",
		placeholder: '{ "type": "object", "properties": { … } }',
	});
	const checkSchema = () => {
		try {
			if (schema.value.trim()) parseSchema(schema.value);
			schemaError.textContent = "";
		} catch (error) {
			schemaError.textContent = `This is no JSON schema yet: ${error.message}`;
		}
	};
	schema.addEventListener("input", checkSchema);
	const toolList = h("div", { className: "tools" });
	const ownError = h("small", { className: "bad", role: "alert" });
	const own = h("textarea", {
		rows: 4, spellcheck: false, className: "mono", value: page.tools.length ? JSON.stringify(page.tools, null, 1) : "",
		placeholder: '[{ "name": "add", "description": "Adds two numbers",\n   "parameters": { … }, "code": "return args.a + args.b" }]',
		oninput: () => {
			try {
				page.tools = readTools(own.value);
				ownError.textContent = "";
				keep();
				refresh();
			} catch (error) {
				ownError.textContent = `Not taken over yet: ${error.message}`;
			}
		},
	});
	const refresh = () => {
		const wants = settings.format === "schema";
		schema.hidden = schemaError.hidden = !wants;
		if (wants) checkSchema();
		toolList.replaceChildren(...tools().map((tool) => toolRow(tool, settings, put)));
	};
	const theme = h("select", { "aria-label": "Theme", onchange: (e) => { page.theme = e.target.value; keep(); applyTheme(page.theme); } },
		["system", "light", "dark"].map((name) => h("option", { value: name, selected: page.theme === name }, name[0].toUpperCase() + name.slice(1))));
	$("settings-body").replaceChildren(
		h("section", null, h("h3", null, "This conversation"),
			field("System prompt", text("system", { rows: 3, placeholder: "How the model should behave" })),
			h("div", { className: "grid" },
				field("Thinking", select("thinking", "Thinking", [["none", "Off"], ["low", "Low"], ["medium", "Medium"], ["high", "High"]])),
				numbers),
			field("Stop at", h("textarea", { rows: 2, value: (settings.stop ?? []).join("\n"), placeholder: "one text per line",
				oninput: (e) => put("stop", e.target.value.split("\n").filter(Boolean)) })),
			field("Answer as", select("format", "Answer as", [["text", "Text"], ["json", "Any JSON object"], ["schema", "JSON that fits a schema"]])),
			schema, schemaError),
		h("section", null, h("h3", null, "Tools"), toolList,
			field("Calls", select("tool_choice", "Calls", [["auto", "When the model wants"], ["required", "Always at least one"]])),
			field("Your own", own, "JSON. The code is JavaScript over args and runs apart from this page; without it you type each result."), ownError),
		h("section", null, h("h3", null, "This page"),
			field("Theme", theme),
			h("p", { className: "row" },
				h("button", { type: "button", className: "plain", onclick: () => {
					const { seed, ...rest } = settings;
					page.defaults = structuredClone(rest);
					keep();
					notify("New conversations begin with these settings.");
				} }, "Use for new conversations"),
				h("button", { type: "button", className: "plain", onclick: () => { for (const key of Object.keys(settings)) delete settings[key]; changed(); open(settings, defaults, changed); } }, "Reset"))));
	refresh();
	if (!dialog.open) dialog.showModal();
}

function toolRow({ name, description }, settings, put) {
	const toggle = (e) => {
		const rest = (settings.tools ?? []).filter((other) => other !== name);
		put("tools", e.target.checked ? [...rest, name] : rest);
	};
	const box = h("input", { type: "checkbox", checked: settings.tools?.includes(name) ?? false, onchange: toggle });
	return h("label", { className: "check" }, box, h("b", null, name), h("span", null, description));
}

/** The reader's own tools, as JSON. Throws what is wrong with it. */
function readTools(text) {
	const list = text.trim() ? JSON.parse(text) : [];
	if (!Array.isArray(list)) throw new Error("write a list: [ { … } ]");
	return list.map(({ name, description = "", parameters = { type: "object", properties: {} }, code = "" }) => {
		if (!/^[\w.-]{1,64}$/.test(name)) throw new Error(`\`${name}\` is no name: use 1 to 64 letters, digits, _, . and -`);
		if (BUILTIN.some((tool) => tool.name === name)) throw new Error(`\`${name}\` is built in`);
		return { name, description, parameters, code };
	});
}
