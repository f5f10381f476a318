"""What can be tested without llama.cpp: `python3 -m unittest discover bench`."""

import contextlib
import ctypes
import io
import json
import stat
import sys
import tempfile
import textwrap
import unittest
import xml.etree.ElementTree as xml
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import cells
import figures
import llama
import peer
import plot
from cells import Cell
from engines import Carat, EngineError, Setup, Turn

SVG = "{http://www.w3.org/2000/svg}"


def result(*names):
    """A result with two pairs a cell, in which Carat is twice and three times as fast."""
    rows = []
    for name in names:
        cell = cells.parse(name)
        pairs = [
            figures.pair(cell, Turn(2.0, 1e9), Turn(4.0)),
            figures.pair(cell, Turn(1.0, 4e9), Turn(3.0)),
        ]
        rows.append(figures.record(cell, pairs, {"bytes": 1_000_000_000, "limited_by": "memory"}))
    return {
        "format": figures.FORMAT,
        "model": "a<b&c.gguf",
        "model_bytes": 2**30,
        "threads": 2,
        "machine": "a machine",
        "cells": rows,
    }


def run(*words):
    """Exit status, output, complaint."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        status = peer.main([str(word) for word in words])
    return status, out.getvalue(), err.getvalue()


class Cells(unittest.TestCase):
    def test_names_are_read_and_written_alike(self):
        for name in ("pp512", "tg64", "tg64@2048", "tg64x8", "tg64x8@100", "pp32@64"):
            self.assertEqual(cells.parse(name).name, name)
        self.assertEqual(cells.parse("tg64x8@100"), Cell(generate=64, depth=100, sequences=8))
        self.assertEqual(cells.parse("tg64x8").tokens, 512)

    def test_other_names_are_refused(self):
        for name in ("", "pp", "tg0", "pp12x4", "512", "tg64@", "tg64x0", "pp-3", "pp1 pp2"):
            with self.assertRaises(cells.BadCell, msg=name):
                cells.parse_list(name)


class Figures(unittest.TestCase):
    def test_ratios_are_of_pairs(self):
        row = result("pp128")["cells"][0]
        # The ratio of the medians would be 96 / 37.3.
        self.assertEqual(row["ratio"], {"median": 2.5, "least": 2.0, "most": 3.0})
        self.assertEqual(row["carat"], {"median": 96.0, "least": 64.0, "most": 128.0})

    def test_the_read_rate_is_that_of_each_turn_and_only_for_generation(self):
        saved = result("pp128", "tg64")
        self.assertNotIn("percent_of_read_rate", saved["cells"][0])
        self.assertEqual(saved["cells"][1]["percent_of_read_rate"], {"median": 37.5, "least": 25.0, "most": 50.0})

    def test_a_rate_that_was_not_measured_gives_no_percentage(self):
        cell = Cell(generate=4)
        row = figures.record(cell, [figures.pair(cell, Turn(1.0), Turn(1.0))], None)
        self.assertNotIn("percent_of_read_rate", row)
        self.assertEqual(figures.percent(row), "")

    def test_the_table_is_markdown_with_columns_in_line(self):
        lines = figures.table(result("pp128", "tg64@2048")).splitlines()
        self.assertEqual(len(lines), 4)
        self.assertEqual(len({len(line) for line in lines}), 1)
        self.assertEqual([part.strip() for part in lines[3].split("|")[1:5]], ["tg64@2048", "48.0", "18.7", "2.50 (2.00 to 3.00)"])

    def test_numbers_keep_three_digits(self):
        self.assertEqual([figures.number(x) for x in (0.5, 9.876, 98.76, 987.6)], ["0.500", "9.88", "98.8", "988"])


class Plot(unittest.TestCase):
    def test_a_plot_is_well_formed_and_names_what_it_shows(self):
        root = xml.fromstring(plot.draw(result("pp32", "pp512", "pp4096", "tg32", "tg32@512", "tg64", "tg32x8")))
        words = [element.text for element in root.iter(f"{SVG}text")]
        self.assertIn("a<b&c.gguf, 2 threads: tokens a second", words)
        for word in ("Carat", "llama.cpp", "Prompt", "tokens in the prompt", "32", "4096", "Generation", "512"):
            self.assertIn(word, words)
        # A line an engine and panel, and one an engine in the legend; tg64 and tg32x8 are other tests than tg32.
        self.assertEqual(len(list(root.iter(f"{SVG}polyline"))), 4)
        self.assertEqual(len(list(root.iter(f"{SVG}circle"))), 1 + 3 + 2)

    def test_points_lie_inside_their_panel(self):
        root = xml.fromstring(plot.draw(result("pp32", "pp4096")))
        for circle in list(root.iter(f"{SVG}circle"))[1:]:
            self.assertTrue(plot.LEFT <= float(circle.get("cx")) <= plot.LEFT + plot.PANEL_WIDTH)
            self.assertTrue(plot.TOP <= float(circle.get("cy")) <= plot.TOP + plot.PANEL_HEIGHT)

    def test_one_point_is_enough_and_none_is_a_sentence(self):
        xml.fromstring(plot.draw(result("tg8")))
        with self.assertRaises(plot.NothingToDraw):
            plot.draw(result("tg8x4"))

    def test_steps_are_round(self):
        self.assertEqual([plot.nice_step(top) for top in (1, 7, 12, 260, 90_000)], [0.2, 2, 5, 100, 20_000])


class Command(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = Path(folder.name)

    def refusal(self, *words):
        status, _, complaint = run(*words)
        self.assertEqual(status, 1)
        self.assertEqual(complaint.count("\n"), 1, complaint)
        return complaint

    def test_bad_input_is_one_sentence(self):
        model = self.folder / "model.gguf"
        model.write_bytes(b"GGUF")
        self.assertIn("command", self.refusal())
        self.assertIn("which model", self.refusal("compare"))
        self.assertIn("no/such.gguf does not exist", self.refusal("compare", "--model", "no/such.gguf"))
        self.assertIn("`pp` is no cell", self.refusal("compare", "--model", model, "--cells", "pp"))
        self.assertIn("`0` is not a number above 0", self.refusal("compare", "--model", model, "--pairs", "0"))
        self.assertIn("`soup`", self.refusal("compare", "--model", model, "--variant", "soup"))
        self.assertIn("folder does not exist", self.refusal("compare", "--model", model, "--json", "no/such/folder/x.json"))
        self.assertIn("peer.py fetch", self.refusal("compare", "--model", model, "--peer", self.folder))
        self.assertIn("--out", self.refusal("plot", "--model", model))
        self.assertIn("list of numbers", self.refusal("plot", "--out", "x.svg", "--prompts", "1,,2"))

    def test_a_saved_result_is_drawn(self):
        saved, drawn = self.folder / "saved.json", self.folder / "drawn.svg"
        saved.write_text(json.dumps(result("pp32", "tg8")))
        self.assertEqual(run("plot", "--from", saved, "--out", drawn)[0], 0)
        self.assertEqual(xml.parse(drawn).getroot().tag, f"{SVG}svg")
        saved.write_text("{}")
        self.assertIn("not written by", self.refusal("plot", "--from", saved, "--out", drawn))
        saved.write_text("soup")
        self.assertIn("cannot be read", self.refusal("plot", "--from", saved, "--out", drawn))

    def test_a_library_of_another_release_is_refused(self):
        self.assertEqual(llama.variants(self.folder), [])
        for name in (f"libllama.{llama.RELEASE}.so", "libggml-cpu-haswell.so"):
            (self.folder / name).write_bytes(b"no library")
        self.assertEqual(llama.variants(self.folder), ["haswell"])
        with self.assertRaisesRegex(llama.PeerError, "does not load"):
            llama.Library(self.folder, None)


class Engines(unittest.TestCase):
    """Carat's side, against a program that speaks as `carat bench --paced` does."""

    def carat(self, body):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        path = Path(folder.name) / "carat"
        path.write_text(f"#!{sys.executable}\nimport sys\n" + textwrap.dedent(body))
        path.chmod(path.stat().st_mode | stat.S_IXUSR)
        engine = Carat(Setup(Path("model.gguf"), 2, path, Path("peer"), "haswell"))
        self.addCleanup(engine.stop)
        return engine

    def test_turns_are_taken_and_the_end_brings_the_report(self):
        engine = self.carat(
            """
            if sys.argv[1] == "--version":
                sys.exit(print("carat 9"))
            assert sys.argv[1:8] == ["bench", "-m", "model.gguf", "--backend", "cpu", "-t", "2"], sys.argv
            assert "--isa avx2 -p 0 -n 4 -d 7 --sequences 8" in " ".join(sys.argv), sys.argv
            print('{"waiting": "tg4"}', flush=True)
            for seconds, _ in enumerate(sys.stdin, 1):
                print('{"turn": "tg4", "seconds": %d, "measured_read_bytes_per_second": 5.0}' % seconds)
                print('{"waiting": "tg4"}', flush=True)
            print('{"bound": {"bytes": 10, "limited_by": "memory"}}')
            """
        )
        self.assertEqual(engine.version, "carat 9")
        engine.prepare(Cell(generate=4, depth=7, sequences=8))
        self.assertEqual([engine.turn(), engine.turn()], [Turn(1, 5.0), Turn(2, 5.0)])
        self.assertEqual(engine.end(), {"bytes": 10, "limited_by": "memory"})

    def test_a_program_that_ends_early_is_quoted(self):
        engine = self.carat(
            """
            if sys.argv[1] == "bench":
                sys.exit("error: unexpected argument '--paced' found\\n\\nmore words")
            """
        )
        with self.assertRaisesRegex(EngineError, "carat ended: error: unexpected argument '--paced' found$"):
            engine.prepare(Cell(prompt=4))

    def test_a_program_that_is_not_there_is_a_sentence(self):
        with self.assertRaisesRegex(EngineError, "does not exist: build it"):
            Carat(Setup(Path("model.gguf"), 2, Path("no/such/carat"), Path("peer")))


class Layout(unittest.TestCase):
    def test_structs_have_the_sizes_of_the_release(self):
        sizes = [ctypes.sizeof(kind) for kind in (llama.ModelParams, llama.ContextParams, llama.Batch)]
        self.assertEqual(sizes, [80, 160, 56])


if __name__ == "__main__":
    unittest.main()
