"""The gate between two builds: what needs no program to run."""

import os
import sys
import tempfile
import unittest
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import gate
from cells import Cell

# Answers as `carat bench --paced` does: SECONDS a repetition.
FAKE = """#!/bin/sh
[ "$1" = --version ] && { echo carat of SECONDS; exit 0; }
echo '{"waiting": "test"}'
while read -r _; do
  echo '{"seconds": SECONDS, "measured_read_bytes_per_second": 1.0}'
  echo '{"waiting": "test"}'
done
"""


class Gate(unittest.TestCase):
    def run_gate(self, old, new, *more):
        with tempfile.TemporaryDirectory() as folder:
            programs = []
            for name, seconds in (("old", old), ("new", new)):
                program = Path(folder, name)
                program.write_text(FAKE.replace("SECONDS", str(seconds)))
                program.chmod(0o755)
                programs.append(str(program))
            with open(os.devnull, "w") as nowhere:
                kept, sys.stdout, sys.stderr = (sys.stdout, sys.stderr), nowhere, nowhere
                try:
                    return gate.main([*programs, "--model", "some.gguf", "--turns", "3", *more])
                finally:
                    sys.stdout, sys.stderr = kept

    def test_a_build_that_is_as_fast_or_faster_passes(self):
        self.assertEqual(self.run_gate(0.1, 0.1), 0)
        self.assertEqual(self.run_gate(0.1, 0.05), 0)

    def test_a_loss_of_two_percent_is_let_through_and_one_of_three_is_not(self):
        self.assertEqual(self.run_gate(0.1, 0.1018), 0)
        self.assertEqual(self.run_gate(0.1, 0.1032), 1)
        self.assertEqual(self.run_gate(0.1, 0.1032, "--most-loss", "5"), 0)

    def test_what_stands_behind_two_dashes_is_for_both_builds(self):
        self.assertEqual(self.run_gate(0.1, 0.1, "--", "--backend", "cuda"), 0)

    def test_what_cannot_be_measured_is_no_loss(self):
        self.assertEqual(self.run_gate(0.1, 0.1, "--cells", "no such cell"), 2)
        with open(os.devnull, "w") as nowhere:
            kept, sys.stderr = sys.stderr, nowhere
            try:
                self.assertEqual(gate.main(["/nowhere/old", "/nowhere/new", "--model", "some.gguf"]), 2)
            finally:
                sys.stderr = kept

    def test_one_slow_turn_decides_nothing(self):
        ratios = gate.ratios([1.0, 1.0, 1.0, 1.0, 1.0], [1.0, 1.0, 3.0, 1.0, 1.01])
        self.assertFalse(gate.is_lost(ratios, 2))
        self.assertTrue(gate.is_lost([0.97, 0.97, 1.5], 2))

    def test_a_row_tells_speeds_and_the_verdict(self):
        row, lost = gate.line(Cell(generate=64, sequences=8), [[0.5, 0.5], [0.6, 0.6]], 2)
        self.assertTrue(lost)
        for part in ("tg64x8", "1024", "853", "0.833", "LOST"):
            self.assertIn(part, row)


if __name__ == "__main__":
    unittest.main()
