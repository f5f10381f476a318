"""The second turn of a long conversation: the time to its first token, after others have taken the conversation's pages.

    target/release/carat synth 12b q4_0 12b-q4_0.gguf
    python3 bench/serve/second_turn.py -m 12b-q4_0.gguf --backend cuda --tokens 32768 --prefix-ram 8GiB --most 100

Starts `carat serve` with room for one conversation (`--parallel 1`, a context a little larger than it), then per round: the first turn of a
conversation of --tokens; where a tier behind the device is measured, other conversations of the same length, which need its pages; then the
second turn with about --new tokens more. Rounds without others come first: their second turn finds everything on the device. Printed are, of
every request, the milliseconds from sending it to its first token, the tokens computed, and the cached ones by tier.

With --prefix-disk the folder takes the place of host memory, unless --prefix-ram is given as well. --most MILLISECONDS makes a slower median of
the second turns after others a failure. Exit code 1 also where a second turn computed more than its own tokens, the answer and a page, or
where what it found came from no tier behind the device.

Needs Python's standard library alone.
"""

import argparse
import http.client
import json
import pathlib
import random
import statistics
import subprocess
import sys
import tempfile
import time

from ports import free_port

ROOT = pathlib.Path(__file__).resolve().parents[2]
PATIENCE = 600.0
# Tokens of a first answer, and of a page of keys and values: a prefix is found page by page.
ANSWER = 8
PAGE = 32
WORDS = "the fox and a river went over green hills to see what was there before night came so they sat down near old trees".split()


def words(pick, count):
    return " ".join(pick.choice(WORDS) for _ in range(count))


class Server:
    """A started server; `log` holds what it says."""

    def __init__(self, args, folder):
        self.port = free_port()
        self.log = open(pathlib.Path(folder) / "server.log", "w+")
        # Lengths are estimates.
        context = args.tokens + args.tokens // 32 + args.new + 512
        command = [args.carat, "serve", "-m", args.model, "--port", self.port, "--parallel", 1, "-c", context]
        command += ["--backend", args.backend, "--metrics-public", "--draft", "off"]
        if args.prefix_ram:
            command += ["--prefix-ram", args.prefix_ram]
        if args.prefix_disk:
            command += ["--prefix-disk", args.prefix_disk]
        command = [str(word) for word in command] + args.serve_args
        print("$", " ".join(command))
        self.process = subprocess.Popen(command, stdout=self.log, stderr=self.log)
        began = time.monotonic()
        while True:
            try:
                if self.ask("GET", "/ready")[0] == 200:
                    break
            except OSError:
                pass
            if self.process.poll() is not None or time.monotonic() - began > PATIENCE:
                self.stop()
                sys.exit(f"the server is not ready:\n{self.said()}")
            time.sleep(0.05)
        print(f"ready after {time.monotonic() - began:.1f} s")

    def said(self):
        self.log.seek(0)
        return self.log.read()[-2000:]

    def stop(self):
        self.process.terminate()
        self.process.wait()

    def ask(self, method, path, body=None):
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=PATIENCE)
        try:
            connection.request(method, path, json.dumps(body) if body else None, {"Content-Type": "application/json"})
            response = connection.getresponse()
            return response.status, response.read().decode()
        finally:
            connection.close()

    def count(self, text):
        """Tokens of a text."""
        status, answer = self.ask("POST", "/tokenize", {"content": text})
        if status != 200:
            sys.exit(f"/tokenize: {status} {answer[:300]}")
        return json.loads(answer)["count"]

    def turn(self, messages, tokens):
        """Answers as a stream. Returns the text, the milliseconds to the first token, and what was cached."""
        body = {
            "messages": messages, "max_tokens": tokens, "temperature": 0, "ignore_eos": True,
            "stream": True, "stream_options": {"include_usage": True}, "explain": True,
        }
        sent = json.dumps(body)
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=PATIENCE)
        connection.connect()
        began = time.perf_counter()
        connection.request("POST", "/v1/chat/completions", sent, {"Content-Type": "application/json"})
        response = connection.getresponse()
        if response.status != 200:
            sys.exit(f"status {response.status}: {response.read()[:500]!r}")
        text, first, cache, timings = "", None, None, {}
        for line in response:
            if not line.startswith(b"data: {"):
                continue
            chunk = json.loads(line[6:])
            for choice in chunk.get("choices", []):
                delta = choice.get("delta") or {}
                piece = delta.get("content") or ""
                # Noise may be no text: then the end, of one token, tells that it has come.
                came = piece or delta.get("reasoning_content") or choice.get("finish_reason")
                if came and first is None:
                    first = (time.perf_counter() - began) * 1e3
                text += piece
            cache = chunk.get("carat", {}).get("cache") or cache
            timings = chunk.get("timings") or timings
        connection.close()
        if first is None or cache is None:
            sys.exit("a stream without a token, or without an account of the cache")
        return text, first, cache, timings


def show(name, first, cache, timings):
    computed = cache["prompt"] - cache["cached"]
    tiers = ", ".join(f"{tier} {count}" for tier, count in cache["from"].items() if count) or "nothing"
    why = f", miss: {cache['miss']} at {cache['at']}" if cache["miss"] else ""
    print(
        f"{name:28} first token {first:9.1f} ms   computed {computed:6} of {cache['prompt']:6}   cached: {tiers}{why}"
        f"   (prefill {timings.get('prompt_ms', 0):.1f} ms)",
        flush=True,
    )


class Round:
    """One conversation."""

    def __init__(self, server, args, number, length):
        pick = random.Random(number)
        self.server, self.args, self.number = server, args, number
        self.messages = [{"role": "user", "content": f"Story {number}: " + words(pick, length)}]
        self.next = f"And {number}? " + words(pick, max(1, args.new - 24))
        self.others = [f"Another story, {number}.{n}: " + words(pick, length) for n in range(args.others)]

    def run(self, with_others):
        name = f"round {self.number}"
        answer, *told = self.server.turn(self.messages, ANSWER)
        before = told[1]["prompt"]
        show(f"{name}, first turn", *told)
        if with_others:
            for n, other in enumerate(self.others):
                _, *told = self.server.turn([{"role": "user", "content": other}], 1)
                show(f"{name}, other {n + 1}", *told)
        self.messages += [{"role": "assistant", "content": answer}, {"role": "user", "content": self.next}]
        _, first, cache, timings = self.server.turn(self.messages, 1)
        show(f"{name}, second turn", first, cache, timings)
        return first, cache, cache["prompt"] - before


def length(server, tokens):
    """Words that make about so many tokens."""
    sample = 1 << 14
    each = server.count(words(random.Random(0), sample)) / sample
    return max(8, int((tokens - 64) / each))


def measure(server, args):
    count = length(server, args.tokens)
    server.turn([{"role": "user", "content": "Hello!"}], 4)
    rounds = [Round(server, args, number, count) for number in range(1, 2 * args.rounds + 1)]
    warm = [one.run(False)[0] for one in rounds[: args.rounds]]
    cold = [one.run(True) for one in rounds[args.rounds :]]
    times = [first for first, *_ in cold]
    print(f"\nsecond turn, everything on the device: median {statistics.median(warm):.1f} ms ({min(warm):.1f} to {max(warm):.1f})")
    print(f"second turn, after {args.others} others:       median {statistics.median(times):.1f} ms ({min(times):.1f} to {max(times):.1f})")
    failures = []
    for number, (_, cache, new) in enumerate(cold, args.rounds + 1):
        computed = cache["prompt"] - cache["cached"]
        # Noise that was written need not be what its text is read as, so the answer counts as new. The page it began in may not be full.
        most = new + PAGE
        if computed > most:
            failures.append(f"round {number}: {computed} tokens computed, where the turn has no more than {most}")
        if cache["from"]["host"] + cache["from"]["disk"] == 0:
            failures.append(f"round {number}: nothing came from host memory or disk; are {args.others} others too few?")
    if args.most and statistics.median(times) > args.most:
        failures.append(f"the median is over {args.most:g} ms")
    for failure in failures:
        print(failure)
    return 1 if failures else 0


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-m", "--model", required=True, metavar="FILE")
    parser.add_argument("--carat", default=ROOT / "target/release/carat", metavar="PROGRAM")
    parser.add_argument("--backend", choices=["cpu", "cuda"], default="cuda")
    parser.add_argument("--tokens", type=int, default=32768, help="of the first turn (default: %(default)s)")
    parser.add_argument("--new", type=int, default=64, help="of the second (default: %(default)s)")
    parser.add_argument("--others", type=int, default=2, help="conversations between the turns (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=3, help="of each kind (default: %(default)s)")
    parser.add_argument("--prefix-ram", metavar="SIZE", help="(default: 8GiB, without --prefix-disk)")
    parser.add_argument("--prefix-disk", metavar="FOLDER")
    parser.add_argument("--most", type=float, metavar="MILLISECONDS")
    parser.add_argument("serve_args", nargs="*", metavar="-- ARGUMENT", help="more for `carat serve`")
    args = parser.parse_args()
    if not args.prefix_ram and not args.prefix_disk:
        args.prefix_ram = "8GiB"
    with tempfile.TemporaryDirectory() as folder:
        server = Server(args, folder)
        try:
            return measure(server, args)
        finally:
            server.stop()


if __name__ == "__main__":
    sys.exit(main())
