"""Draws a result as SVG: speed over prompt length, and over depth, a line an engine.

Written by hand, so that it needs nothing but Python. Colours follow the reader's light or dark setting; markers differ too, so
that the lines can be told apart without colour. A bar at each point goes from the slowest to the fastest turn.
"""

import math
from html import escape

ENGINES = (("carat", "Carat"), ("llama.cpp", "llama.cpp"))
PANEL_WIDTH, PANEL_HEIGHT = 380, 260
LEFT, TOP, GAP, BOTTOM, RIGHT = 64, 84, 76, 62, 24
WIDTH = LEFT + 2 * PANEL_WIDTH + GAP + RIGHT
HEIGHT = TOP + PANEL_HEIGHT + BOTTOM
MARK = 4

# Plain rules, for readers that know no CSS variables; those that know no media queries show the light ones.
STYLE = """
  text { fill: #1f2328; font: 13px system-ui, sans-serif; }
  .paper { fill: #ffffff; }
  .title { font-weight: 600; font-size: 15px; }
  .tick { fill: #59636e; font-size: 12px; }
  .grid { stroke: #d9dee3; stroke-width: 1; }
  .line { fill: none; stroke-width: 2; stroke-linejoin: round; }
  .bar { stroke-width: 1.5; opacity: 0.6; }
  .carat { stroke: #b45309; }
  .llama { stroke: #1d4ed8; }
  .mark.carat { fill: #b45309; }
  .mark.llama { fill: #1d4ed8; }
  @media (prefers-color-scheme: dark) {
    text { fill: #e6edf3; }
    .paper { fill: #0d1117; }
    .tick { fill: #9ba6b2; }
    .grid { stroke: #30363d; }
    .carat { stroke: #fbbf24; }
    .llama { stroke: #79b0ff; }
    .mark.carat { fill: #fbbf24; }
    .mark.llama { fill: #79b0ff; }
  }
"""


class NothingToDraw(ValueError):
    """The text is a sentence for the user."""


class Panel:
    """One set of axes: where a value lies on the page, and what stands beside the axes."""

    def __init__(self, left, title, axis, rows, position):
        """`position` maps a row to its place on the x axis; the axis runs evenly in it."""
        self.left, self.title, self.axis, self.rows, self.position = left, title, axis, rows, position
        places = [position(row) for row in rows]
        self.first, self.last = min(places), max(places)
        top = max(row[name]["most"] for row in rows for name, _ in ENGINES)
        self.step = nice_step(top)
        self.top = self.step * math.ceil(top / self.step)

    def x(self, row):
        width = self.last - self.first
        share = (self.position(row) - self.first) / width if width else 0.5
        return self.left + share * PANEL_WIDTH

    def y(self, speed):
        return TOP + PANEL_HEIGHT * (1 - speed / self.top)

    def draw(self, label):
        yield text(self.left, TOP - 18, self.title, "title")
        yield text(self.left - 8, TOP - 18, "tok/s", "tick", "end")
        for tick in range(round(self.top / self.step) + 1):
            speed = tick * self.step
            y = self.y(speed)
            yield f'<line class="grid" x1="{self.left}" y1="{y:.1f}" x2="{self.left + PANEL_WIDTH}" y2="{y:.1f}"/>'
            yield text(self.left - 8, y + 4, f"{speed:g}", "tick", "end")
        base, free_from = TOP + PANEL_HEIGHT, -math.inf
        for row in self.rows:
            x, words = self.x(row), label(row)
            yield f'<line class="grid" x1="{x:.1f}" y1="{base}" x2="{x:.1f}" y2="{base + 5}"/>'
            # Names that would run into each other are left out.
            half = 4 * len(words)
            if x - half > free_from:
                yield text(x, base + 20, words, "tick", "middle")
                free_from = x + half
        yield text(self.left + PANEL_WIDTH / 2, base + 44, self.axis, "", "middle")
        for name, _ in ENGINES:
            yield from self.draw_engine(name)

    def draw_engine(self, name):
        points = [(self.x(row), row[name]) for row in self.rows]
        for x, speeds in points:
            yield (
                f'<line class="bar {css(name)}" x1="{x:.1f}" y1="{self.y(speeds["least"]):.1f}" '
                f'x2="{x:.1f}" y2="{self.y(speeds["most"]):.1f}"/>'
            )
        path = " ".join(f"{x:.1f},{self.y(speeds['median']):.1f}" for x, speeds in points)
        yield f'<polyline class="line {css(name)}" points="{path}"/>'
        for x, speeds in points:
            yield mark(name, x, self.y(speeds["median"]), f"{speeds['median']:.1f} tok/s")


def css(name):
    return name.split(".")[0]


def text(x, y, words, style, anchor="start"):
    return f'<text class="{style}" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(words)}</text>'


def mark(name, x, y, hint):
    title = f"<title>{escape(hint)}</title>"
    if name == "carat":
        return f'<circle class="mark {css(name)}" cx="{x:.1f}" cy="{y:.1f}" r="{MARK}">{title}</circle>'
    return (
        f'<rect class="mark {css(name)}" x="{x - MARK:.1f}" y="{y - MARK:.1f}" '
        f'width="{2 * MARK}" height="{2 * MARK}">{title}</rect>'
    )


def nice_step(top):
    """A step of 1, 2 or 5 times a power of ten that makes four to eight of them up to `top`."""
    rough = top / 5
    power = 10 ** math.floor(math.log10(rough))
    return next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough)


def panels(result):
    rows = [row for row in result["cells"] if row["sequences"] == 1]
    prompts = sorted((row for row in rows if row["prompt"] and not row["depth"]), key=lambda row: row["prompt"])
    # One line is of one test: the count of tokens that was measured at most depths.
    counts = [row["generate"] for row in rows if row["generate"]]
    count = max(counts, key=counts.count, default=None)
    depths = sorted((row for row in rows if row["generate"] == count), key=lambda row: row["depth"])
    if prompts:
        panel = Panel(LEFT, "Prompt", "tokens in the prompt", prompts, lambda row: math.log2(row["prompt"]))
        yield panel, lambda row: str(row["prompt"])
    if depths:
        left = LEFT + PANEL_WIDTH + GAP
        panel = Panel(left, "Generation", "tokens already in the context", depths, lambda row: row["depth"])
        yield panel, lambda row: str(row["depth"])


def draw(result):
    """The SVG document."""
    drawn = list(panels(result))
    if not drawn:
        raise NothingToDraw("the result has no prompts and no generation of one sequence, so there is nothing to draw")
    threads = result["threads"]
    subject = f"{result['model']}, {threads} thread{'' if threads == 1 else 's'}: tokens a second"
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}" role="img">',
        f"<title>{escape(subject)}, Carat and llama.cpp</title>",
        f"<style>{STYLE}</style>",
        f'<rect class="paper" width="{WIDTH}" height="{HEIGHT}"/>',
        text(LEFT, 30, subject, "title"),
    ]
    x = WIDTH - RIGHT - 200
    for name, label in ENGINES:
        parts.append(f'<line class="line {css(name)}" x1="{x}" y1="26" x2="{x + 28}" y2="26"/>')
        parts.append(mark(name, x + 14, 26, label))
        parts.append(text(x + 36, 30, label, ""))
        x += 96
    for panel, label in drawn:
        parts.extend(panel.draw(label))
    parts.append("</svg>")
    return "\n".join(parts) + "\n"
