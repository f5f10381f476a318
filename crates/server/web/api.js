// The server, as this page speaks to it: OpenAI's chat route and a few of its own.

const KEY = "carat.key";

/** What went wrong, with the status if there was one: 0 means that the connection failed. */
export class Failure extends Error {
	constructor(message, status, begun = false) {
		super(message);
		this.status = status;
		/** Whether part of the answer had come. */
		this.begun = begun;
	}
}

/** Kept as long as the tab. */
export const setKey = (key) => sessionStorage.setItem(KEY, key);

function headers() {
	const key = sessionStorage.getItem(KEY);
	return { "Content-Type": "application/json", ...(key && { Authorization: `Bearer ${key}` }) };
}

export async function ask(path, { json, ...options } = {}) {
	let response;
	try {
		const body = json === undefined ? undefined : JSON.stringify(json);
		response = await fetch(path, { method: body ? "POST" : "GET", body, ...options, headers: { ...headers(), ...options.headers } });
	} catch (error) {
		if (options.signal?.aborted) throw error;
		throw new Failure("The server cannot be reached.", 0);
	}
	if (response.ok) return response;
	const told = await response.json().catch(() => null);
	throw new Failure(told?.error?.message ?? `The server answered ${response.status}.`, response.status);
}

export const get = async (path) => (await ask(path)).json();

export const post = async (path, json) => (await ask(path, { json })).json();

/** Data of server-sent events, as it comes. */
export async function* events(response) {
	const reader = response.body.getReader();
	const decoder = new TextDecoder();
	let rest = "";
	try {
		for (;;) {
			const { done, value } = await reader.read();
			if (done) return;
			rest += decoder.decode(value, { stream: true });
			const lines = rest.split("\n");
			rest = lines.pop() ?? "";
			for (const line of lines) if (line.startsWith("data: ")) yield line.slice(6);
		}
	} finally {
		reader.cancel().catch(() => {});
	}
}

/** Chunks of an answer. Ends only with `[DONE]`: a stream that merely stops has failed. */
export async function* chat(body, signal, id) {
	const request = { ...body, stream: true, explain: true, stream_options: { include_usage: true } };
	const response = await ask("/v1/chat/completions", { json: request, signal, headers: { "x-request-id": id } });
	try {
		for await (const data of events(response)) {
			if (data === "[DONE]") return;
			const chunk = JSON.parse(data);
			if (chunk.error) throw new Failure(chunk.error.message, 500, true);
			yield chunk;
		}
	} catch (error) {
		if (error instanceof Failure || signal.aborted) throw error;
	}
	throw new Failure("The connection was lost before the answer was complete.", 0, true);
}
