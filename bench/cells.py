"""What is measured: one cell of the table, by the names that llama-bench made common.

    pp512          a prompt of 512 tokens
    tg64           64 generated tokens
    tg64@2048      the same after 2,048 tokens that are not timed
    tg64x8         64 tokens in each of 8 sequences that are computed together
    tg64x8@2048    both
"""

import re
from dataclasses import dataclass

NAME = re.compile(r"(pp|tg)([0-9]{1,7})(?:x([0-9]{1,4}))?(?:@([0-9]{1,7}))?")


class BadCell(ValueError):
    """A name that means nothing; the text is a sentence for the user."""


@dataclass(frozen=True)
class Cell:
    prompt: int = 0
    generate: int = 0
    depth: int = 0
    sequences: int = 1

    @property
    def name(self):
        test = f"pp{self.prompt}" if self.prompt else f"tg{self.generate}"
        together = f"x{self.sequences}" if self.sequences > 1 else ""
        depth = f"@{self.depth}" if self.depth else ""
        return test + together + depth

    @property
    def tokens(self):
        """Tokens that are timed, of all sequences."""
        return (self.prompt + self.generate) * self.sequences


def parse(name):
    match = NAME.fullmatch(name.strip())
    if not match:
        raise BadCell(f"`{name}` is no cell: pp512, tg64, tg64@2048 and tg64x8 are examples")
    kind, count, sequences, depth = match.groups()
    count, sequences, depth = int(count), int(sequences or 1), int(depth or 0)
    if count == 0 or sequences == 0:
        raise BadCell(f"`{name}` has nothing to measure: its numbers must be above 0")
    if kind == "pp" and sequences > 1:
        raise BadCell(f"`{name}`: only generation (tg) is measured with several sequences")
    if kind == "pp":
        return Cell(prompt=count, depth=depth)
    return Cell(generate=count, depth=depth, sequences=sequences)


def parse_list(names):
    cells = [parse(name) for name in names.split(",") if name.strip()]
    if not cells:
        raise BadCell("no cells are named: --cells pp512,tg64 is an example")
    return cells
