// Runs one function in a worker of its own and tells what it returned. The frame around this has no origin, no network and no storage.
addEventListener("message", ({ data, source }) => {
	const tell = (message) => source?.postMessage(message, { targetOrigin: "*" });
	const script = `onmessage = async ({ data: args }) => {
		try {
			const value = await (async (args) => { ${data.code}\n })(args);
			postMessage({ value: typeof value === "string" ? value : JSON.stringify(value) ?? "" });
		} catch (error) { postMessage({ error: String(error) }); }
	};`;
	const worker = new Worker(URL.createObjectURL(new Blob([script], { type: "text/javascript" })));
	worker.onmessage = (event) => tell(event.data);
	worker.onerror = (event) => tell({ error: event.message || "the function cannot be read" });
	worker.postMessage(data.args);
});
