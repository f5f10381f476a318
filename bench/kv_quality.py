"""What smaller keys and values cost, or weights in host memory: questions about facts told long before, and the perplexity of two texts,
in two KV types or with weights in two places.

    cargo build --release
    python3 bench/kv_quality.py                       # q8_0 beside f16, on the CPU
    python3 bench/kv_quality.py --types f16:full=q8_0 --backend cuda
    python3 bench/kv_quality.py --types f16:f16 --backend cuda --place FILE   # the second as FILE says (docs/cli.md, --place)

The demo model is told five facts about its user, then chats about sums, capitals, heights and words for a while, all of which hold
other numbers, names and places, and is asked for one of the facts. Its window is 64 tokens, so an old fact is found by the
full-attention layers alone. An answer is right if it is the expected sentence, word for word, at temperature 0.

The texts are short, and any change of rounding moves a perplexity by a few tenths of a percent, one way or the other. So each text is
read from several of its first words on, and what counts is the mean over all of them; its standard error is printed beside it.

Exits with 1 if the second is right in less than 99 % of the cases that the first is, at any distance, or if a perplexity rises by more
than 0.4 % in any of several sizes of batches, which have kernels of their own. With --place there are batches of eight tokens only:
larger ones are the card's alone.

Needs Python 3.10 or newer and nothing from outside its standard library.
"""

import argparse
import json
import math
import random
import re
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TEXTS = [ROOT / "assets" / name for name in ("heldout-prose.txt", "heldout-story.txt")]

# Tokens from facts to question, roughly, and the turns in between that come to so many.
DISTANCES = {128: 4, 256: 7, 512: 14, 900: 24, 1500: 40}
SIDE_BY_SIDE = 4
# Rows of a batch: those of decoding, in which the CPU may take part, and more.
SMALL_BATCH = 8
BATCHES = (SMALL_BATCH, 64, 512)
# From one beginning of a text to the next.
WORDS_APART = 10

LEAST_SHARE = 0.99
MOST_PERPLEXITY = 1.004

NAMES = (
    "Anna Ben Sam Tom Lily Max Mia Leo Nora Jack Emma Lucy Henry Rosa Marco Ella Oscar Ruby Sara Paul Nina Kate Adam Clara David Grace"
).split()
COLORS = "red blue green yellow orange purple pink brown black white gray silver gold".split()
CAPITALS = {
    "France": "Paris",
    "Japan": "Tokyo",
    "Italy": "Rome",
    "Spain": "Madrid",
    "Germany": "Berlin",
    "Greece": "Athens",
    "Egypt": "Cairo",
    "Peru": "Lima",
    "Norway": "Oslo",
    "Poland": "Warsaw",
    "Austria": "Vienna",
    "Portugal": "Lisbon",
    "Ireland": "Dublin",
    "Kenya": "Nairobi",
    "Cuba": "Havana",
    "Hungary": "Budapest",
}
WORDS = "garden river apple house table winter summer horse bread music water stone window forest".split()


def facts(rng: random.Random) -> list[tuple[str, str, str | None, str]]:
    """Five facts in any order: how each is told and answered, its question and the right reply. The cat is there to mislead: its name
    is never asked for."""
    name, cat = rng.sample(NAMES, 2)
    color, number, city = rng.choice(COLORS), rng.randint(100, 999), rng.choice(list(CAPITALS.values()))
    all_five = [
        (f"My name is {name}.", f"Nice to meet you, {name}!", "What is my name?", f"Your name is {name}."),
        (
            f"My favorite color is {color}.",
            f"{color.capitalize()} is a beautiful color!",
            "What is my favorite color?",
            f"Your favorite color is {color}.",
        ),
        (
            f"Remember the number {number}.",
            f"I will remember the number {number}.",
            "What was the number?",
            f"The number is {number}.",
        ),
        (f"I live in {city}.", f"{city} is an interesting place!", "Where do I live?", f"You live in {city}."),
        (f"My cat is called {cat}.", f"{cat} is a nice name!", None, ""),
    ]
    rng.shuffle(all_five)
    return all_five


def small_talk(rng: random.Random) -> tuple[str, str]:
    """A turn about something else, with numbers, names or places of its own."""
    kind = rng.randrange(5)
    if kind == 0:
        a, b = rng.randint(10, 999), rng.randint(10, 99)
        return f"What is {a} + {b}?", f"{a} + {b} = {a + b}."
    if kind == 1:
        country = rng.choice(list(CAPITALS))
        return f"What is the capital of {country}?", f"The capital of {country} is {CAPITALS[country]}."
    if kind == 2:
        word = rng.choice(WORDS)
        spelled = "-".join(word[::-1])
        return f"Spell the word {word} backwards.", f"{'-'.join(word)} backwards is {spelled}: {word[::-1]}."
    if kind == 3:
        a, b, c = rng.sample(NAMES, 3)
        return f"{a} is taller than {b}. {b} is taller than {c}. Who is the tallest?", f"{a} is the tallest."
    start = rng.randint(1, 20)
    counted = range(start, start + rng.randint(5, 10))
    return f"Count from {counted[0]} to {counted[-1]}.", ", ".join(map(str, counted)) + "."


def question(distance: int, index: int) -> tuple[list[dict[str, str]], str]:
    """A conversation that ends in a question, and the right answer. The same for the same numbers."""
    rng = random.Random(f"{distance} {index}")
    told = facts(rng)
    turns = [pair[:2] for pair in told] + [small_talk(rng) for _ in range(DISTANCES[distance])]
    askable = sorted((fact for fact in told if fact[2]), key=lambda fact: fact[2])
    asked = askable[index % len(askable)]
    messages = []
    for said, answered in turns:
        messages += [{"role": "user", "content": said}, {"role": "assistant", "content": answered}]
    return messages + [{"role": "user", "content": asked[2]}], asked[3]


@dataclass(frozen=True)
class Setup:
    """What is compared: the demo model by one program, with one KV type and its weights in one place."""

    carat: Path
    backend: str
    tier: str | None
    kv_type: str
    place: Path | None

    @property
    def options(self) -> list[str | Path]:
        tier = ["--tier", self.tier] if self.tier else []
        placed = ["--place", self.place] if self.place else []
        return ["--backend", self.backend, *tier, "--kv-type", self.kv_type, *placed]

    @property
    def name(self) -> str:
        return f"{self.kv_type}, placed" if self.place else self.kv_type


class Server:
    """`carat serve`."""

    def __init__(self, setup: Setup) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        command = [setup.carat, "serve", *setup.options, "--port", str(self.port), "-c", "2048", "--parallel", str(SIDE_BY_SIDE)]
        self.process = subprocess.Popen(command, stderr=subprocess.DEVNULL)

    def __enter__(self) -> "Server":
        for _ in range(600):
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{self.port}/health", timeout=5).close()
                return self
            except (urllib.error.URLError, ConnectionError):
                if self.process.poll() is not None:
                    sys.exit("carat serve ended at once; run it by hand to see why")
                time.sleep(0.2)
        self.process.kill()
        sys.exit("carat serve was not ready within two minutes")

    def __exit__(self, *_: object) -> None:
        self.process.terminate()
        self.process.wait()

    def is_right(self, asked: tuple[int, int]) -> tuple[bool, int]:
        """Whether an answer is right, and the tokens of its prompt."""
        messages, expected = question(*asked)
        body = {"messages": messages, "temperature": 0, "max_tokens": 24}
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}/v1/chat/completions",
            json.dumps(body).encode(),
            {"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=600) as reply:
            answer = json.load(reply)
        text = answer["choices"][0]["message"]["content"]
        return text.strip() == expected, answer["usage"]["prompt_tokens"]


def scores(setup: Setup, count: int) -> dict[int, tuple[float, int]]:
    """By distance, the share of right answers and the longest prompt."""
    found = {}
    with Server(setup) as server, ThreadPoolExecutor(SIDE_BY_SIDE) as pool:
        for distance in DISTANCES:
            answers = list(pool.map(server.is_right, [(distance, i) for i in range(count)]))
            right = sum(is_right for is_right, _ in answers) / count
            found[distance] = (right, max(tokens for _, tokens in answers))
    return found


def mean_nats(setup: Setup, text: Path, batch: int) -> float:
    command = [setup.carat, "eval", "perplexity", *setup.options, "--file", text, "--chunk", str(batch)]
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    number = re.search(r"mean ([0-9.]+) nats", printed)
    if not number:
        sys.exit(f"carat eval perplexity printed no mean: {printed!r}")
    return float(number[1])


def beginnings(text: Path, count: int, folder: Path) -> list[Path]:
    """The text from its first word on, and from later ones."""
    words = text.read_text().split(" ")
    versions = [folder / f"{text.stem}-{i}.txt" for i in range(count)]
    for i, version in enumerate(versions):
        version.write_text(" ".join(words[i * WORDS_APART :]))
    return versions


def perplexities(setups: list[Setup], versions: list[Path], batch: int) -> tuple[float, float, float]:
    """Of both setups, over all versions of a text, and the standard error of their ratio."""
    with ThreadPoolExecutor(SIDE_BY_SIDE) as pool:
        base, other = (list(pool.map(lambda version: mean_nats(setup, version, batch), versions)) for setup in setups)
    rises = [b - a for a, b in zip(base, other)]
    error = statistics.stdev(rises) / math.sqrt(len(rises))
    return math.exp(statistics.mean(base)), math.exp(statistics.mean(other)), error


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--carat", type=Path, default=ROOT / "target" / "release" / "carat", help="the program")
    parser.add_argument("--backend", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--tier", choices=["best", "portable"], help="the card's kernels")
    parser.add_argument("--types", default="f16:q8_0", help="two KV types with a colon between them")
    parser.add_argument("--count", type=int, default=200, help="questions per distance")
    parser.add_argument("--beginnings", type=int, default=16, help="words to read each text from, at least 2")
    parser.add_argument("--place", type=Path, metavar="FILE", help="where the second has its weights, as of carat's --place")
    options = parser.parse_args()
    types = options.types.split(":")
    if len(types) != 2:
        parser.error("two KV types are compared, as in f16:q8_0")
    if options.place and options.backend != "cuda":
        parser.error("--place is about a card: it goes with --backend cuda")
    if options.tier and options.backend != "cuda":
        parser.error("--tier is about a card: it goes with --backend cuda")
    if options.beginnings < 2:
        parser.error("--beginnings: a standard error needs two or more")
    first = Setup(options.carat, options.backend, options.tier, types[0], None)
    setups = [first, replace(first, kv_type=types[1], place=options.place)]
    names = [setup.name for setup in setups]
    missed = False

    base, other = (scores(setup, options.count) for setup in setups)
    print(f"{'distance':>8} {'tokens':>7} {names[0]:>12} {names[1]:>12}   right answers, {options.count} questions each")
    for distance in DISTANCES:
        (expected, tokens), (found, _) = base[distance], other[distance]
        missed |= found < LEAST_SHARE * expected
        print(f"{distance:>8} {tokens:>7} {expected:>12.3f} {found:>12.3f}")
    with tempfile.TemporaryDirectory() as folder:
        for text in TEXTS:
            versions = beginnings(text, options.beginnings, Path(folder))
            for batch in [SMALL_BATCH] if options.place else BATCHES:
                expected, found, error = perplexities(setups, versions, batch)
                missed |= found > MOST_PERPLEXITY * expected
                rise = f"{100 * (found / expected - 1):+.2f} +- {100 * error:.2f} %"
                print(f"perplexity of {text.name} by {batch}: {expected:.4f} and {found:.4f} ({rise})")
    if missed:
        sys.exit(f"{names[1]} misses a bar: 99 % of {names[0]}'s right answers at every distance, perplexity +0.4 %")


if __name__ == "__main__":
    main()
