"""The questions of kv_quality.py: what needs no program to run."""

import sys
import unittest
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from kv_quality import DISTANCES, question


class Questions(unittest.TestCase):
    def test_a_question_is_the_same_whenever_it_is_asked(self):
        self.assertEqual(question(512, 7), question(512, 7))
        self.assertNotEqual(question(512, 7), question(512, 8))

    def test_the_answer_was_told_among_the_first_five_turns_and_not_after(self):
        for distance in DISTANCES:
            for index in range(40):
                messages, expected = question(distance, index)
                fact = expected.rstrip(".").rsplit(" ", 1)[-1]
                told = " ".join(m["content"] for m in messages[:10])
                self.assertIn(fact, told)
                self.assertNotIn(expected, " ".join(m["content"] for m in messages))

    def test_every_kind_of_fact_is_asked_for_but_the_cat(self):
        asked = {question(128, index)[0][-1]["content"] for index in range(8)}
        self.assertEqual(len(asked), 4)
        self.assertFalse(any("cat" in text.split() for text in asked))

    def test_distances_grow_with_the_turns_between(self):
        lengths = [len(question(distance, 0)[0]) for distance in DISTANCES]
        self.assertEqual(lengths, sorted(lengths))


if __name__ == "__main__":
    unittest.main()
