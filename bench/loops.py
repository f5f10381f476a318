"""Instructions of the innermost loops of compiled CUDA kernels, without a card.

    carat kernels build --only gemm_medium_sm90.q4 --arch sm_90a --out target/read
    python3 bench/loops.py target/read/*.cubin

For every entry point: its instructions, then each loop that holds no other, the largest first, with what it issues most. A kernel that
issues all the time is as slow as this count: multiply it by the warps of a scheduler, and compare with the cycles that memory would take.

Needs nvdisasm, which comes with the CUDA toolkit and in the wheel of triton (`triton/backends/nvidia/bin`), Python 3.10 or newer and
nothing else.
"""

import argparse
import collections
import dataclasses
import re
import subprocess
import sys
import tempfile
from pathlib import Path

LEAST = 16  # instructions of a loop that is shown
SHOWN_KINDS = 8

SECTION = re.compile(r"^\s*\.section\s+\.text\.(\w+)")
LABEL = re.compile(r"^\s*(\.L_x_\d+):")
INSTRUCTION = re.compile(r"^\s*/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?(\w+)(.*)")
TARGET = re.compile(r"`\((\.L_x_\d+)\)")


@dataclasses.dataclass
class Loop:
    first: int
    last: int


@dataclasses.dataclass
class Entry:
    """An entry point: its instructions in order, and what its labels stand before."""

    name: str
    kinds: list[str] = dataclasses.field(default_factory=list)
    labels: dict[str, int] = dataclasses.field(default_factory=dict)
    branches: list[tuple[int, str]] = dataclasses.field(default_factory=list)

    def innermost_loops(self) -> list[Loop]:
        """What branches lead back over, where no other such branch lies between."""
        loops = {}
        for at, label in self.branches:
            first = self.labels.get(label, at + 1)
            if first <= at:
                loops[first] = Loop(first, max(at, loops[first].last if first in loops else at))
        every = loops.values()
        inner = [a for a in every if not any(b is not a and a.first <= b.first and b.last <= a.last for b in every)]
        return sorted(inner, key=lambda loop: loop.first - loop.last)


def entries(listing: str) -> list[Entry]:
    """The entry points of what nvdisasm prints."""
    found: list[Entry] = []
    for line in listing.splitlines():
        if section := SECTION.match(line):
            found.append(Entry(section[1]))
        elif found and (label := LABEL.match(line)):
            found[-1].labels[label[1]] = len(found[-1].kinds)
        elif found and (instruction := INSTRUCTION.match(line)):
            if target := TARGET.search(instruction[2]):
                found[-1].branches.append((len(found[-1].kinds), target[1]))
            found[-1].kinds.append(instruction[1])
    return found


def describe(entry: Entry) -> list[str]:
    lines = [f"{entry.name}: {len(entry.kinds)} instructions"]
    for loop in entry.innermost_loops():
        kinds = entry.kinds[loop.first : loop.last + 1]
        if len(kinds) < LEAST:
            continue
        most = collections.Counter(kinds).most_common(SHOWN_KINDS)
        lines.append(f"  {len(kinds):5} in a loop: " + ", ".join(f"{kind} {count}" for kind, count in most))
    return lines


def machine_code(file: Path) -> bytes:
    """The ELF image in a file, which Carat's own have behind a head."""
    data = file.read_bytes()
    start = data.find(b"\x7fELF")
    if start < 0:
        sys.exit(f"{file}: no machine code in it; `carat kernels build` writes such files")
    return data[start:]


def listing(image: bytes, nvdisasm: str) -> str:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(image)
        file.flush()
        try:
            done = subprocess.run([nvdisasm, "-c", file.name], capture_output=True, text=True, check=False)
        except OSError as error:
            sys.exit(f"{nvdisasm} does not start ({error}); it is in the CUDA toolkit and in the wheel of triton, --nvdisasm names it")
    if done.returncode != 0:
        sys.exit(f"{nvdisasm}: {done.stderr.strip()}")
    return done.stdout


def main() -> None:
    parser = argparse.ArgumentParser(prog="loops.py", description=__doc__.split("\n", 1)[0])
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE")
    parser.add_argument("--nvdisasm", default="nvdisasm", metavar="PROGRAM")
    args = parser.parse_args()
    for file in args.files:
        try:
            image = machine_code(file)
        except OSError as error:
            sys.exit(f"{file}: {error.strerror}")
        for entry in entries(listing(image, args.nvdisasm)):
            print("\n".join(describe(entry)))


if __name__ == "__main__":
    main()
