"""The most memory that a program takes on the card, as the driver counts it.

    python3 bench/vram.py --limit 12GiB -- target/release/carat bench -m model.gguf --vram 12GiB -p 2048 -n 128

Runs what stands behind the `--`, asks the driver every few milliseconds how much of the card is in use, and prints the most of it, less
what was in use before: the program's context, kernels and buffers, everything. Exits with 1 if that is more than --limit, else with
the program's own status. Nothing else may use the card meanwhile.

Needs an NVIDIA driver, Python 3.10 or newer and nothing from outside its standard library.
"""

import argparse
import ctypes
import re
import subprocess
import sys
import time

MIB = 1 << 20
EVERY_SECONDS = 0.004


class Memory(ctypes.Structure):
    """nvmlMemory_t."""

    _fields_ = [("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong)]


class Card:
    """What the driver's management library tells of one card."""

    def __init__(self, index: int) -> None:
        try:
            self.nvml = ctypes.CDLL("libnvidia-ml.so.1")
        except OSError as error:
            sys.exit(f"the driver's libnvidia-ml.so.1 is not here ({error}): this needs an NVIDIA card")
        self.handle = ctypes.c_void_p()
        self.check("nvmlInit_v2", self.nvml.nvmlInit_v2())
        found = self.nvml.nvmlDeviceGetHandleByIndex_v2(index, ctypes.byref(self.handle))
        self.check(f"nvmlDeviceGetHandleByIndex_v2({index})", found)

    @staticmethod
    def check(call: str, status: int) -> None:
        if status != 0:
            sys.exit(f"{call} failed with status {status}")

    def used(self) -> int:
        memory = Memory()
        self.check("nvmlDeviceGetMemoryInfo", self.nvml.nvmlDeviceGetMemoryInfo(self.handle, ctypes.byref(memory)))
        return memory.used


def size(text: str) -> int:
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)(MiB|GiB)", text)
    if not match:
        raise argparse.ArgumentTypeError(f"`{text}` is no size: 12GiB and 512MiB are examples")
    return int(float(match[1]) * (MIB if match[2] == "MiB" else 1024 * MIB))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--limit", type=size, help="more than this is a failure: 12GiB, 512MiB")
    parser.add_argument("--card", type=int, default=0, help="which card, as nvidia-smi counts them")
    parser.add_argument("command", nargs="+", help="the program and its arguments, behind --")
    options = parser.parse_args()

    card = Card(options.card)
    before = most = card.used()
    samples = 0
    with subprocess.Popen(options.command) as program:
        while program.poll() is None:
            most = max(most, card.used())
            samples += 1
            time.sleep(EVERY_SECONDS)
    taken = most - before
    print(f"the driver counted {taken / MIB:,.0f} MiB at the most ({samples:,} samples, {before / MIB:,.0f} MiB before)", file=sys.stderr)
    if options.limit is not None and taken > options.limit:
        sys.exit(f"that is {(taken - options.limit) / MIB:,.1f} MiB more than {options.limit / MIB:,.0f} MiB")
    sys.exit(program.returncode)


if __name__ == "__main__":
    main()
