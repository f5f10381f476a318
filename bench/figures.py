"""From times to figures: speeds, ratios of pairs, medians and spreads, and the table that shows them.

A result is plain JSON data, so that what was saved can be shown and drawn again.
"""

from statistics import median

FORMAT = "carat peer run 1"


def pair(cell, carat, llama):
    """One turn of each as a record."""
    speeds = {"carat": cell.tokens / carat.seconds, "llama.cpp": cell.tokens / llama.seconds}
    return {
        **speeds,
        "ratio": speeds["carat"] / speeds["llama.cpp"],
        "carat_seconds": carat.seconds,
        "read_bytes_per_second": carat.read_bytes_per_second,
    }


def record(cell, pairs, bound):
    """All pairs of a cell. `bound` is what Carat says of the bytes it must read."""
    row = {
        "cell": cell.name,
        "prompt": cell.prompt,
        "generate": cell.generate,
        "depth": cell.depth,
        "sequences": cell.sequences,
        "carat": spread([p["carat"] for p in pairs]),
        "llama.cpp": spread([p["llama.cpp"] for p in pairs]),
        "ratio": spread([p["ratio"] for p in pairs]),
        "pairs": pairs,
    }
    if cell.generate and bound:
        row["bytes"] = bound["bytes"]
        shares = [
            100 * bound["bytes"] / p["carat_seconds"] / p["read_bytes_per_second"]
            for p in pairs
            if p["read_bytes_per_second"]
        ]
        if shares:
            row["percent_of_read_rate"] = spread(shares)
    return row


def spread(values):
    return {"median": median(values), "least": min(values), "most": max(values)}


def number(value):
    """Three digits or more: 0.512, 9.87, 98.7, 987, 9870."""
    if value >= 100:
        return f"{value:.0f}"
    if value >= 10:
        return f"{value:.1f}"
    return f"{value:.2f}" if value >= 1 else f"{value:.3f}"


def ratio(values):
    return f"{values['median']:.2f} ({values['least']:.2f} to {values['most']:.2f})"


def percent(row):
    share = row.get("percent_of_read_rate")
    return f"{share['median']:.0f} % ({share['least']:.0f} to {share['most']:.0f})" if share else ""


def table(result):
    """Markdown, also readable as it is."""
    head = ["test", "Carat tok/s", "llama.cpp tok/s", "ratio (least to most)", "pairs", "Carat's share of the read rate"]
    rows = [
        [
            row["cell"],
            number(row["carat"]["median"]),
            number(row["llama.cpp"]["median"]),
            ratio(row["ratio"]),
            str(len(row["pairs"])),
            percent(row),
        ]
        for row in result["cells"]
    ]
    widths = [max(len(row[i]) for row in [head, *rows]) for i in range(len(head))]
    lines = [head, ["-" * widths[0]] + ["-" * (width - 1) + ":" for width in widths[1:]], *rows]

    def line(texts):
        first, *others = texts
        padded = [first.ljust(widths[0])] + [text.rjust(width) for text, width in zip(others, widths[1:])]
        return "| " + " | ".join(padded) + " |"

    return "\n".join(line(texts) for texts in lines)


def start_lines(result):
    """First token and peak memory, a line an engine."""
    lines = []
    for name, label in (("carat", "Carat"), ("llama.cpp", "llama.cpp")):
        start = result.get("start", {}).get(name)
        if start:
            size = start["peak_bytes"] / 2**30
            share = 100 * start["peak_bytes"] / result["model_bytes"]
            lines.append(
                f"{label}: first token of a fresh process after {start['seconds']['median']:.2f} s "
                f"({start['seconds']['least']:.2f} to {start['seconds']['most']:.2f}), "
                f"peak memory {size:.2f} GiB ({share:.0f} % of the file)"
            )
    return lines
