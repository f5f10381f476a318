// Lines over time on a canvas: the last ten minutes, one value per second.

export const KEPT = 600;

export class Chart {
	/** `lines` name the colours of the page. */
	constructor(canvas, lines) {
		this.canvas = canvas;
		canvas.ariaHidden = true;
		this.lines = lines;
		this.values = lines.map(() => []);
		new ResizeObserver(() => this.draw()).observe(canvas);
	}

	/** One value per line; what is not a number leaves a gap. */
	add(...values) {
		for (const [n, value] of values.entries()) {
			this.values[n].push(value);
			if (this.values[n].length > KEPT) this.values[n].shift();
		}
		this.draw();
	}

	draw() {
		const { canvas } = this;
		const scale = devicePixelRatio;
		const [width, height] = [canvas.clientWidth, canvas.clientHeight];
		canvas.width = width * scale;
		canvas.height = height * scale;
		const pen = canvas.getContext("2d");
		const style = getComputedStyle(canvas);
		// A canvas wants colours, not names of them.
		const ink = (name) => ((canvas.style.color = `var(${name})`), style.color);
		pen.scale(scale, scale);
		pen.font = `11px ${style.fontFamily}`;
		const most = nice(Math.max(1e-9, ...this.values.flat().filter(Number.isFinite)));
		const foot = height - 4;
		const y = (value) => foot - (value / most) * (foot - 14);
		pen.lineWidth = 1;
		for (const share of [0, 0.5, 1]) {
			const at = Math.round(y(most * share)) + 0.5;
			pen.strokeStyle = ink("--line");
			pen.beginPath();
			pen.moveTo(0, at);
			pen.lineTo(width, at);
			pen.stroke();
			pen.fillStyle = ink("--faint");
			if (share) pen.fillText(short(most * share), 0, at - 3);
		}
		pen.lineWidth = 1.75;
		pen.lineJoin = "round";
		for (const [n, values] of this.values.entries()) {
			pen.strokeStyle = ink(this.lines[n]);
			pen.beginPath();
			let isDown = false;
			for (const [at, value] of values.entries()) {
				const x = width - ((values.length - 1 - at) / (KEPT - 1)) * width;
				if (!Number.isFinite(value)) isDown = false;
				else if (isDown) pen.lineTo(x, y(value));
				else pen.moveTo(x, y(value)), (isDown = true);
			}
			pen.stroke();
		}
	}
}

/** The next of 1, 2, 5, 10, … */
export function nice(value) {
	const unit = 10 ** Math.floor(Math.log10(value));
	return unit * ([1, 2, 5].find((step) => step * unit >= value) ?? 10);
}

export const short = (value) => (value >= 1e6 ? `${+(value / 1e6).toPrecision(3)} M` : value >= 1e4 ? `${+(value / 1e3).toPrecision(3)} k` : String(+value.toPrecision(3)));
