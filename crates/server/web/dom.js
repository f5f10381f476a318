// Making and finding elements. Text becomes text nodes, always.

/** An element with properties (`on…` listens, `data` and `aria-…` go to attributes) and children. */
export function h(tag, props, ...children) {
	const element = document.createElement(tag);
	for (const [name, value] of Object.entries(props ?? {})) {
		if (value === undefined || value === null) continue;
		if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
		else if (name.startsWith("aria-") || name === "role" || name === "for") element.setAttribute(name, value);
		else if (name === "data") Object.assign(element.dataset, value);
		else element[name] = value;
	}
	for (const child of children.flat()) if (child !== null && child !== undefined && child !== false) element.append(child);
	return element;
}

export const $ = (id) => document.getElementById(id);

const SVG = "http://www.w3.org/2000/svg";

/** Lines of the icons, on a grid of 24. */
const ICONS = {
	menu: "M4 7h16M4 12h16M4 17h16",
	plus: "M12 5v14M5 12h14",
	search: "M11 5a6 6 0 1 0 0 12a6 6 0 0 0 0-12M20 20l-4.5-4.5",
	gear: "M4 8h9M17 8h3M4 16h3M11 16h9M15 5.5v5M9 13.5v5",
	send: "M12 19V5M6 11l6-6 6 6",
	stop: "M7 7h10v10H7z",
	copy: "M9 9h10v10H9zM5 15V5h10",
	edit: "M5 19h4L19 9l-4-4L5 15zM13 7l4 4",
	again: "M19 12a7 7 0 1 1-2-5M19 4v4h-4",
	trash: "M5 7h14M10 7V5h4v2M7 7l1 12h8l1-12",
	left: "M14 6l-6 6 6 6",
	right: "M10 6l6 6-6 6",
	clip: "M8 12l6-6a3 3 0 0 1 4 4l-8 8a5 5 0 0 1-7-7l7-7",
	raw: "M9 8l-4 4 4 4M15 8l4 4-4 4",
	go: "M6 5v14l12-7z",
	more: "M5 12h.01M12 12h.01M19 12h.01",
	chart: "M5 19V11M12 19V5M19 19v-6",
	close: "M6 6l12 12M18 6L6 18",
};

export function icon(name) {
	const svg = document.createElementNS(SVG, "svg");
	svg.setAttribute("viewBox", "0 0 24 24");
	svg.setAttribute("aria-hidden", "true");
	const path = document.createElementNS(SVG, "path");
	path.setAttribute("d", ICONS[name]);
	svg.append(path);
	return svg;
}

/** A button that shows an icon and says its name. */
export function iconButton(name, label, act) {
	return h("button", { type: "button", className: "icon", title: label, "aria-label": label, onclick: act }, icon(name));
}

/** Puts icons where the page asks for them. */
export function fillIcons(root = document) {
	for (const place of root.querySelectorAll("[data-icon]")) {
		place.prepend(icon(place.dataset.icon ?? ""));
	}
}

let timer;

/** A short notice at the foot of the page. */
export function notify(text) {
	const place = $("notice");
	place.textContent = text;
	place.hidden = false;
	clearTimeout(timer);
	timer = setTimeout(() => (place.hidden = true), 5000);
}

export function download(name, value) {
	const blob = new Blob([JSON.stringify(value, null, 1)], { type: "application/json" });
	const link = h("a", { href: URL.createObjectURL(blob), download: name });
	link.click();
	setTimeout(() => URL.revokeObjectURL(link.href), 10000);
}

export async function copyText(text) {
	try {
		await navigator.clipboard.writeText(text);
	} catch {
		// Pages without TLS have no clipboard but the old one.
		const area = h("textarea", { value: text, className: "hidden" });
		document.body.append(area);
		area.select();
		document.execCommand("copy");
		area.remove();
	}
}

/** Light, dark, or as the system has it. */
export const applyTheme = (theme) => (document.documentElement.dataset.theme = theme);
