#!/usr/bin/env python3
"""Carat and llama.cpp on the same file, turn by turn. bench/README.md tells what is compared and how."""

import argparse
import json
import platform
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

import cells
import figures
import llama
import plot
from cells import Cell
from engines import Carat, EngineError, ISA_OF_VARIANT, Llama, Setup

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = "@node-llama-cpp/linux-x64@3.22.1"
TABLE_CELLS = "pp128,pp512,pp2048,tg64,tg64@2048"
PLOT_PROMPTS = "32,64,128,256,512,1024,2048,4096"
PLOT_DEPTHS = "0,512,1024,2048,4096,8192"
STARTS = 3
INTERRUPTED = 130


class BadInput(Exception):
    """The text is a sentence for the user."""


class Parser(argparse.ArgumentParser):
    def error(self, message):
        raise BadInput(f"{message} (see {self.prog} --help)")


def count(word):
    if not word.isdigit() or not 1 <= int(word) <= 100_000:
        raise argparse.ArgumentTypeError(f"`{word}` is not a number above 0")
    return int(word)


def counts(words):
    values = words.split(",")
    if not all(value.strip().isdigit() for value in values):
        raise argparse.ArgumentTypeError(f"`{words}` is not a list of numbers such as 32,512")
    return [int(value) for value in values]


def arguments(words):
    parser = Parser(prog="peer.py", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True, parser_class=Parser)

    fetch = commands.add_parser("fetch", help=f"get llama.cpp {llama.RELEASE} with npm, as it is set up on this machine")
    compare = commands.add_parser("compare", help="measure some cells and print ratios")
    curve = commands.add_parser("plot", help="draw speed over prompt length and over depth")
    for command in (fetch, compare, curve):
        command.add_argument("--peer", type=Path, default=ROOT / "target/peer", metavar="DIR", help="llama.cpp's libraries")
    for command in (compare, curve):
        command.add_argument("--model", type=Path, metavar="FILE", help="the GGUF file both load")
        command.add_argument("--threads", "-t", type=count, default=2, metavar="N")
        command.add_argument("--carat", type=Path, default=ROOT / "target/release/carat", metavar="PATH")
        command.add_argument("--variant", metavar="NAME", help="a CPU build of llama.cpp, such as haswell; Carat gets the like")
        command.add_argument("--json", type=Path, metavar="OUT", help="write all pairs to this file")
    compare.add_argument("--cells", default=TABLE_CELLS, metavar="LIST", help=f"such as pp512,tg64@2048,tg64x8 ({TABLE_CELLS})")
    compare.add_argument("--pairs", type=count, default=5, metavar="N", help="turns of each in a cell (5)")
    compare.add_argument("--plot", type=Path, metavar="OUT.svg", help="draw the cells, too")
    curve.add_argument("--from", dest="saved", type=Path, metavar="JSON", help="draw what was saved instead of measuring")
    curve.add_argument("--out", type=Path, required=True, metavar="OUT.svg")
    curve.add_argument("--prompts", type=counts, default=counts(PLOT_PROMPTS), metavar="LIST", help=PLOT_PROMPTS)
    curve.add_argument("--depths", type=counts, default=counts(PLOT_DEPTHS), metavar="LIST", help=PLOT_DEPTHS)
    curve.add_argument("--generate", type=count, default=32, metavar="N", help="tokens to generate at each depth (32)")
    curve.add_argument("--pairs", type=count, default=3, metavar="N", help="turns of each at a point (3)")
    return parser.parse_args(words)


def fetch(folder):
    """Unpacks the libraries of the package into a folder, with the files that tell their version and licence."""
    if not shutil.which("npm"):
        raise BadInput("npm is not installed, and the package comes through it")
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as place:
        done = subprocess.run(["npm", "pack", "--silent", PACKAGE], cwd=place, capture_output=True, text=True)
        archives = list(Path(place).glob("*.tgz"))
        if done.returncode != 0 or not archives:
            raise BadInput(f"npm cannot get {PACKAGE}: {done.stderr.strip() or 'it gives no reason'}")
        with tarfile.open(archives[0]) as archive:
            for member in archive:
                name = Path(member.name).name
                if member.isfile() and (name.endswith(".so") or name in ("package.json", "LICENSE")):
                    (folder / name).write_bytes(archive.extractfile(member).read())
    print(f"llama.cpp {llama.RELEASE} with the CPU builds {', '.join(llama.variants(folder))} is in {folder}")


def setup(args):
    if not args.model:
        raise BadInput("which model? --model FILE names it")
    if not args.model.is_file():
        raise BadInput(f"{args.model} does not exist")
    if args.variant and args.variant not in ISA_OF_VARIANT:
        raise BadInput(f"no level of Carat's is known to match `{args.variant}`: {', '.join(ISA_OF_VARIANT)} have one")
    for out in (args.json, getattr(args, "plot", None), getattr(args, "out", None)):
        if out and not out.resolve().parent.is_dir():
            raise BadInput(f"{out} cannot be written: its folder does not exist")
    llama.library_path(args.peer)
    return Setup(args.model, args.threads, args.carat, args.peer, args.variant)


def note(words):
    print(words, file=sys.stderr, flush=True)


class Run:
    """Measures cells one after the other, keeping what it has."""

    def __init__(self, setup, pairs):
        self.setup, self.pairs = setup, pairs
        self.result = {
            "format": figures.FORMAT,
            "model": setup.model.name,
            "model_bytes": setup.model.stat().st_size,
            "threads": setup.threads,
            "machine": processor(),
            "cells": [],
        }

    def measure(self, wanted):
        """True when all is measured, False when Ctrl-C ended it."""
        engines = []
        try:
            carat = Carat(self.setup)
            engines.append(carat)
            note("llama.cpp loads")
            peer = Llama(self.setup)
            engines.append(peer)
            self.result["carat_version"] = carat.version
            self.result["llama_version"] = f"{llama.RELEASE}, {PACKAGE}, {peer.variant}"
            for cell in wanted:
                self.measure_cell(cell, carat, peer)
            # A second copy of the model beside the loaded one would not fit everywhere.
            peer.stop()
            self.measure_starts(carat, peer)
        except KeyboardInterrupt:
            note("stopped; what was measured so far:")
            return False
        finally:
            for engine in engines:
                engine.stop()
        return True

    def measure_cell(self, cell, carat, peer):
        note(f"{cell.name}: warming up")
        carat.prepare(cell)
        peer.prepare(cell)
        pairs = []
        try:
            for _ in range(self.pairs):
                pairs.append(figures.pair(cell, carat.turn(), peer.turn()))
                last = pairs[-1]
                note(
                    f"{cell.name}: carat {figures.number(last['carat'])}, "
                    f"llama.cpp {figures.number(last['llama.cpp'])} tok/s, ratio {last['ratio']:.2f}"
                )
        finally:
            # Also after Ctrl-C, as long as there is a pair to show.
            if pairs:
                self.result["cells"].append(figures.record(cell, pairs, carat.end()))
        peer.end()

    def measure_starts(self, carat, peer):
        note("first token and peak memory")
        tokens = carat.prompt_tokens()
        starts = [(carat.first_token(tokens), peer.first_token(tokens)) for _ in range(min(self.pairs, STARTS))]
        self.result["start"] = {"prompt": tokens}
        for engine, times in zip((carat, peer), zip(*starts)):
            self.result["start"][engine.name] = {
                "seconds": figures.spread([start.seconds for start in times]),
                "peak_bytes": max(start.peak_bytes for start in times),
            }


def processor():
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def load(path):
    try:
        result = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise BadInput(f"{path} cannot be read: {error}") from None
    if not isinstance(result, dict) or result.get("format") != figures.FORMAT:
        raise BadInput(f"{path} was not written by this program's --json")
    return result


def write(path, words):
    try:
        path.write_text(words)
    except OSError as error:
        raise BadInput(f"{path} cannot be written: {error}") from None


def show(result):
    print(f"{result['model']}, {result['threads']} threads, {result['machine']}")
    if "llama_version" in result:
        print(f"{result['carat_version']} against llama.cpp {result['llama_version']}")
    print()
    print(figures.table(result) if result["cells"] else "nothing was measured")
    for line in figures.start_lines(result):
        print(line)


def measured(args, wanted, svg):
    """Measures, prints, and writes what was asked for. The exit status."""
    run = Run(setup(args), args.pairs)
    try:
        complete = run.measure(wanted)
    finally:
        # Also when one of the two gave up: hours of pairs must not be lost with it.
        if run.result["cells"]:
            show(run.result)
            if args.json:
                write(args.json, json.dumps(run.result, indent=1) + "\n")
            if svg:
                write(svg, plot.draw(run.result))
    return 0 if complete else INTERRUPTED


def main(words):
    try:
        args = arguments(words)
        if args.command == "fetch":
            fetch(args.peer)
            return 0
        if args.command == "compare":
            return measured(args, cells.parse_list(args.cells), args.plot)
        if args.saved:
            write(args.out, plot.draw(load(args.saved)))
            return 0
        points = [Cell(prompt=length) for length in args.prompts if length]
        points += [Cell(generate=args.generate, depth=depth) for depth in args.depths]
        return measured(args, points, args.out)
    except (BadInput, cells.BadCell, EngineError, llama.PeerError, plot.NothingToDraw) as error:
        print(f"peer.py: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return INTERRUPTED


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
