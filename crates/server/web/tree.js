// A conversation is a tree of messages: an edit or another answer is a sibling, and one path from the root is shown.

/**
 * @typedef {{ id: string, name: string, arguments: string }} Call
 * @typedef {{ name: string, text: string }} Attachment
 * @typedef {{ id: string, parent: string | null, chosen?: string, role: "user" | "assistant" | "tool", text: string, created: number,
 *   thinking?: string, thought?: number, calls?: Call[], call?: string, name?: string, attachments?: Attachment[],
 *   finish?: string, error?: string, stats?: any, raw?: boolean }} Message
 * @typedef {{ id: string, title: string, created: number, updated: number, root?: string, nodes: Record<string, Message>,
 *   settings: Record<string, any> }} Conversation
 */

export const newId = () => Array.from(crypto.getRandomValues(new Uint8Array(9)), (b) => b.toString(36).padStart(2, "0")).join("");

export function create(settings) {
	const now = Date.now();
	return { id: newId(), title: "", created: now, updated: now, nodes: {}, settings };
}

/** Children of a message in the order they were made; of none: the first messages. */
export const children = (c, parent) =>
	Object.values(c.nodes).filter((node) => node.parent === parent).sort((a, b) => a.created - b.created);

function chosen(c, parent) {
	const id = parent === null ? c.root : c.nodes[parent].chosen;
	return (id && c.nodes[id]) || children(c, parent).at(-1);
}

/** The messages that are shown. */
export function path(c) {
	const shown = [];
	for (let node = chosen(c, null); node; node = chosen(c, node.id)) shown.push(node);
	return shown;
}

/** Makes a message the one that is shown among its siblings. */
export function choose(c, node) {
	if (node.parent === null) c.root = node.id;
	else c.nodes[node.parent].chosen = node.id;
}

export function add(c, parent, what) {
	const latest = Object.values(c.nodes).reduce((most, node) => Math.max(most, node.created), 0);
	// Later than all others even within a millisecond, so that siblings keep their order.
	const node = { text: "", ...what, id: newId(), parent, created: Math.max(Date.now(), latest + 1) };
	c.nodes[node.id] = node;
	choose(c, node);
	return node;
}

/** Takes a message out, with all that follows it. */
export function remove(c, node) {
	for (const child of children(c, node.id)) remove(c, child);
	delete c.nodes[node.id];
	const rest = children(c, node.parent).at(-1);
	if (node.parent === null) c.root = rest?.id;
	else if (c.nodes[node.parent]) c.nodes[node.parent].chosen = rest?.id;
}

export function fullText(node) {
	const files = (node.attachments ?? []).map(({ name, text }) => `${name}:\n\`\`\`\n${text}\n\`\`\``);
	return [...files, node.text].filter(Boolean).join("\n\n");
}

/** As the server takes them. Thoughts go back only within the turn they belong to. */
export function wire(c, nodes) {
	const system = c.settings.system?.trim();
	const lastUser = nodes.findLastIndex((node) => node.role === "user");
	const messages = nodes.map((node, n) => {
		if (node.role === "user") return { role: "user", content: fullText(node) };
		if (node.role === "tool") return { role: "tool", tool_call_id: node.call, name: node.name, content: node.text };
		return {
			role: "assistant",
			content: node.text,
			...(node.calls?.length && {
				tool_calls: node.calls.map(({ id, name, arguments: text }) => ({ id, type: "function", function: { name, arguments: text } })),
				...(node.thinking && n > lastUser && { reasoning_content: node.thinking }),
			}),
		};
	});
	return system ? [{ role: "system", content: system }, ...messages] : messages;
}

/** What messages and settings of a file may be: text, numbers, lists and objects of them. */
const FIELDS = ["id", "parent", "chosen", "role", "text", "created", "thinking", "thought", "calls", "call", "name", "attachments", "finish", "stats"];

/** A conversation from a file: ours, or a list of messages as OpenAI's clients have them. Throws what is wrong with it. */
export function read(value) {
	const c = create({});
	if (Array.isArray(value?.messages)) {
		let parent = null;
		for (const { role, content } of value.messages) {
			if (role === "system") c.settings.system = String(content);
			else if (role === "user" || role === "assistant") parent = add(c, parent, { role, text: String(content ?? "") }).id;
		}
	} else {
		if (!value?.nodes) throw new Error("there are no messages in it");
		for (const [id, node] of Object.entries(value.nodes)) {
			const isSound = node.id === id && ["user", "assistant", "tool"].includes(node.role) && typeof node.text === "string";
			const follows = node.parent === null || (value.nodes[node.parent]?.created < node.created && node.parent !== id);
			if (!isSound || !follows) throw new Error(`message ${id} is damaged`);
			c.nodes[id] = Object.fromEntries(FIELDS.filter((name) => name in node).map((name) => [name, node[name]]));
		}
		Object.assign(c, { root: value.root, settings: { ...value.settings } });
	}
	c.title = String(value.title ?? "").slice(0, 200) || path(c)[0]?.text.slice(0, 80) || "";
	if (Number.isFinite(value.updated)) c.updated = value.updated;
	return c;
}
