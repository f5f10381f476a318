// What is open on the chat page.

import * as tree from "./tree.js";

export const state = {
	current: tree.create({}),
	/** The answer under way. */
	running: null,
	/** The message whose text is in the box instead of a new one. */
	editing: null,
	/** Attached to the next message. */
	files: [],
	/** Its name, its context, whether it is in memory and how it draws tokens, once the server has told. */
	model: null,
};
