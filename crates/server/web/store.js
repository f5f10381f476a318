// Conversations in this browser: a list to show, and bodies to open. Nothing of it goes to the server.

let opened;

const done = (request) =>
	new Promise((resolve, reject) => {
		request.onsuccess = () => resolve(request.result);
		request.onerror = () => reject(request.error);
	});

function database() {
	opened ??= new Promise((resolve, reject) => {
		const request = indexedDB.open("carat", 1);
		request.onupgradeneeded = () => {
			request.result.createObjectStore("list", { keyPath: "id" });
			request.result.createObjectStore("bodies", { keyPath: "id" });
		};
		request.onsuccess = () => resolve(request.result);
		request.onerror = () => reject(request.error);
	});
	return opened;
}

async function store(name, mode) {
	return (await database()).transaction(name, mode).objectStore(name);
}

/** What the list shows, latest first. */
export async function list() {
	const all = await done((await store("list", "readonly")).getAll());
	return all.sort((a, b) => b.updated - a.updated);
}

export const load = async (id) => done((await store("bodies", "readonly")).get(id));

export async function save(conversation) {
	const { id, title, updated } = conversation;
	const both = (await database()).transaction(["list", "bodies"], "readwrite");
	both.objectStore("list").put({ id, title, updated });
	both.objectStore("bodies").put(conversation);
	await new Promise((resolve, reject) => {
		both.oncomplete = resolve;
		both.onerror = () => reject(both.error);
		both.onabort = () => reject(both.error);
	});
}

export async function remove(id) {
	await done((await store("list", "readwrite")).delete(id));
	await done((await store("bodies", "readwrite")).delete(id));
}

export async function clear() {
	await done((await store("list", "readwrite")).clear());
	await done((await store("bodies", "readwrite")).clear());
}

export const all = async () => done((await store("bodies", "readonly")).getAll());

/** Ids of conversations in whose text the words stand. */
export async function search(words) {
	const wanted = words.toLowerCase();
	const found = new Set();
	const bodies = await store("bodies", "readonly");
	await new Promise((resolve, reject) => {
		const request = bodies.openCursor();
		request.onerror = () => reject(request.error);
		request.onsuccess = () => {
			const cursor = request.result;
			if (!cursor) return resolve(undefined);
			const { id, title, nodes } = cursor.value;
			const texts = Object.values(nodes).map((node) => node.text ?? "");
			if ([title, ...texts].some((text) => text.toLowerCase().includes(wanted))) found.add(id);
			cursor.continue();
		};
	});
	return found;
}
