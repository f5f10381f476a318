#!/usr/bin/env python3
"""Two builds of Carat on the same file, turn by turn; fails if the second has lost speed in any cell.

    python3 bench/gate.py OLD NEW --model model.gguf --cells pp512,pp2048,tg64,tg64x8,tg64@32768 -- --backend cuda

OLD and NEW are programs. Both are loaded at the same time, so a card must have room for two; what stands behind the `--` goes to
`carat bench` of both. In each cell they take turns, and each pair of neighbours gives one ratio. A cell is lost if the median of its
ratios is below 1 by more than --most-loss percent. Exits with 1 if one is, with 2 if something cannot be measured.

Needs Python 3.10 or newer and nothing from outside its standard library.
"""

import argparse
import sys
from pathlib import Path

import cells
from engines import Build, EngineError
from figures import number, spread

CELLS = "pp512,pp2048,tg64,tg64x8,tg64x32"


def ratios(old, new):
    """Of speeds, from the seconds of each pair."""
    return [before / after for before, after in zip(old, new, strict=True)]


def is_lost(values, most_loss):
    """Whether the median of some ratios is below 1 by more than so many percent."""
    return spread(values)["median"] < 1 - most_loss / 100


def measure(cell, builds, turns):
    """Seconds of each build, a list each. Who begins changes from pair to pair: the second finds a warmer machine."""
    seconds = [[], []]
    for build in builds:
        build.prepare(cell)
    for turn in range(turns):
        for which in (0, 1) if turn % 2 == 0 else (1, 0):
            seconds[which].append(builds[which].turn().seconds)
    for build in builds:
        build.end()
    return seconds


def line(cell, seconds, most_loss):
    """A row of the table, and whether the cell is lost."""
    old, new = (cell.tokens / spread(each)["median"] for each in seconds)
    found = ratios(*seconds)
    shown, lost = spread(found), is_lost(found, most_loss)
    ratio = f"{shown['median']:.3f} ({shown['least']:.3f} to {shown['most']:.3f})"
    return f"| {cell.name:<14} | {number(old):>9} | {number(new):>9} | {ratio:>22} | {'LOST' if lost else '':<4} |", lost


def arguments(words):
    parser = argparse.ArgumentParser(prog="gate.py", description=__doc__.split("\n", 1)[0])
    parser.add_argument("old", type=Path)
    parser.add_argument("new", type=Path)
    parser.add_argument("--model", type=Path, required=True, metavar="FILE")
    parser.add_argument("--cells", default=CELLS, metavar="LIST", help=f"such as pp512,tg64@2048,tg64x8 ({CELLS})")
    parser.add_argument("--turns", type=int, default=5, metavar="N", help="of each build in a cell (5)")
    parser.add_argument("--most-loss", type=float, default=2, metavar="PERCENT", help="that is let through (2)")
    parser.usage = "gate.py OLD NEW --model FILE [options] [-- options of `carat bench`, for both]"
    return parser.parse_args(words)


def main(words):
    end = words.index("--") if "--" in words else len(words)
    options, of_bench = arguments(words[:end]), words[end + 1 :]
    builds, lost = [], []
    try:
        names = cells.parse_list(options.cells)
        for program in (options.old, options.new):
            builds.append(Build(program, ["-m", str(options.model), *of_bench]))
        print(f"old: {builds[0].version}\nnew: {builds[1].version}")
        print(f"| {'test':<14} | {'old tok/s':>9} | {'new tok/s':>9} | {'ratio (least to most)':>22} |      |")
        print("| -------------- | --------: | --------: | ---------------------: | ---- |", flush=True)
        for cell in names:
            row, is_worse = line(cell, measure(cell, builds, options.turns), options.most_loss)
            print(row, flush=True)
            lost += [cell.name] * is_worse
    except (EngineError, cells.BadCell) as problem:
        print(f"gate.py: {problem}", file=sys.stderr)
        return 2
    finally:
        for build in builds:
            build.stop()
    if lost:
        print(f"slower by more than {options.most_loss:g} %: {', '.join(lost)}", file=sys.stderr)
    return 1 if lost else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
