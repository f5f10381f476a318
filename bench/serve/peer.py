#!/usr/bin/env python3
"""Carat's server beside llama.cpp's, on the same file, in turns, under the same load.

    target/release/carat synth e2b q4_0 e2b-q4_0.gguf
    python3 -m venv target/peer-serve && target/peer-serve/bin/pip install xllamacpp==2026.10.11549
    target/peer-serve/bin/python bench/serve/peer.py --model e2b-q4_0.gguf --tokens 32

Each pair starts both servers afresh, one after the other, and measures: seconds from start to ready; tokens per second, gaps
between tokens and the time to the first one at 1, 8 and 32 streams, without drafts; the time to the first token of a second turn whose first
turn was answered before. Printed are the medians of the pairs' ratios with the least and the most. Give the machine nothing
else to do meanwhile.
"""

import argparse
import json
import os
import re
import selectors
import signal
import socket
import statistics
import subprocess
import sys
import time

from ports import free_port

NOUNS = "fox river hill night dog boat girl king cat tree house bird ball boy horse garden".split()


def prompt(seed, words):
    """A request for a story: the demo model's are a hundred tokens long, so that no answer is asked to go on behind its end, where it
    has marks that no client sees."""
    count = max(2, (words - 6) // 2)
    nouns = [NOUNS[(seed * 7 + n * (2 * seed + 3)) % len(NOUNS)] for n in range(count)]
    return "Tell me a story about a " + ", a ".join(nouns[:-1]) + " and a " + nouns[-1] + "."


class Server:
    """One of the two programs, started; `seconds` from there until it answers."""

    def __init__(self, name, args):
        self.name = name
        self.port = free_port()
        slots = max(args.streams)
        if name == "carat":
            command = [args.carat, "-q", "serve", "-m", args.model, "--port", str(self.port), "-t", str(args.threads)]
            command += ["--parallel", str(slots), "--queue", "64", "-c", str(args.context)]
        else:
            command = [sys.executable, __file__, "--serve-peer", str(self.port), "--model", args.model]
            command += ["--threads", str(args.threads), "--context", str(args.context), "--slots", str(slots)]
        started = time.monotonic()
        self.process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        while True:
            try:
                if get(self.port, "/health").startswith("HTTP/1.1 200"):
                    break
            except OSError:
                pass
            if self.process.poll() is not None:
                raise SystemExit(f"{name} ended with {self.process.returncode}")
            if time.monotonic() - started > 300:
                raise SystemExit(f"{name} is not ready after five minutes")
            time.sleep(0.005)
        self.seconds = time.monotonic() - started

    def resident(self):
        with open(f"/proc/{self.process.pid}/status") as status:
            return int(re.search(r"VmHWM:\s+(\d+)", status.read()).group(1)) / 1024

    def cpu(self):
        with open(f"/proc/{self.process.pid}/stat") as stat:
            fields = stat.read().rsplit(")", 1)[1].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def stop(self):
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()


def get(port, path):
    with socket.create_connection(("127.0.0.1", port), timeout=5) as connection:
        connection.sendall(f"GET {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n".encode())
        return connection.recv(200).decode(errors="replace")


class Stream:
    """A streamed answer. What arrives is kept with its time and read when all of it is there: a client that reads meanwhile takes
    the cores that the servers are measured on."""

    def __init__(self, port, messages, tokens):
        body = json.dumps({
            "messages": messages, "max_tokens": tokens, "stream": True, "temperature": 0, "ignore_eos": True,
            "cache_prompt": True, "draft": False, "stream_options": {"include_usage": True},
        }).encode()
        head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        self.connection = socket.create_connection(("127.0.0.1", port))
        self.arrived = []
        self.end = b""
        self.asked = time.monotonic()
        self.connection.sendall(head.encode() + body)
        self.connection.setblocking(False)

    def read(self):
        """Takes what is there. False when it was the last."""
        piece = self.connection.recv(1 << 16)
        self.arrived.append((time.monotonic(), piece))
        self.end = (self.end + piece)[-64:]
        if not piece:
            raise RuntimeError("the stream broke off: " + self.end.decode(errors="replace"))
        return b"[DONE]" not in self.end

    def parts(self):
        """Each piece of text, and when it came; and the number of tokens."""
        buffered, found, tokens = b"", [], 0
        for when, piece in self.arrived:
            *lines, buffered = (buffered + piece).split(b"\n")
            for line in lines:
                if line.startswith(b"data: {"):
                    event = json.loads(line[6:])
                    tokens = (event.get("usage") or {}).get("completion_tokens", tokens)
                    choices = event.get("choices")
                    delta = choices[0]["delta"] if choices else {}
                    text = delta.get("content") or delta.get("reasoning_content")
                    if text:
                        found.append((when, text))
        # An answer without text has come when it ended.
        return found or [(self.arrived[-1][0], "")], tokens


def ask(port, conversations, tokens):
    """All of them at once, read to their ends."""
    selector = selectors.DefaultSelector()
    streams = [Stream(port, messages, tokens) for messages in conversations]
    for stream in streams:
        selector.register(stream.connection, selectors.EVENT_READ, stream)
    open_streams = len(streams)
    while open_streams:
        for key, _ in selector.select():
            if not key.data.read():
                selector.unregister(key.fileobj)
                key.fileobj.close()
                open_streams -= 1
    return streams


def load(port, streams, tokens, words, rounds=1):
    """So many streams at once, some rounds of it: an answer's worst gap is not yet a p99."""
    took, count, gaps, firsts = 0, 0, [], []
    for n in range(rounds):
        seeds = range(streams * (100 + n), streams * (101 + n))
        answers = ask(port, [[{"role": "user", "content": prompt(seed, words)}] for seed in seeds], tokens)
        ends = []
        for answer in answers:
            parts, tokens_of_answer = answer.parts()
            times = [when for when, _ in parts]
            count += tokens_of_answer
            ends.append(times[-1])
            firsts.append(times[0] - answer.asked)
            gaps += [b - a for a, b in zip(times, times[1:])]
        took += max(ends) - answers[0].asked
    gaps.sort()
    return {
        "tokens/s": count / took,
        "p50 gap ms": 1e3 * gaps[len(gaps) // 2] if gaps else float("nan"),
        "p99 gap ms": 1e3 * gaps[int(len(gaps) * 0.99)] if gaps else float("nan"),
        "ttft ms": 1e3 * statistics.median(firsts),
    }


def second_turn(port, words):
    first = [{"role": "user", "content": prompt(7, words)}]
    text = "".join(text for _, text in ask(port, [first], 8)[0].parts()[0])
    second = first + [{"role": "assistant", "content": text}, {"role": "user", "content": "And then?"}]
    answer = ask(port, [second], 16)[0]
    return 1e3 * (answer.parts()[0][0][0] - answer.asked)


def measure(name, args):
    server = Server(name, args)
    try:
        figures = {"ready s": server.seconds}
        load(server.port, 1, 4, 4)
        for streams in args.streams:
            before = server.cpu()
            rounds = -(-args.answers // streams)
            found = load(server.port, streams, args.tokens, args.words, rounds)
            found["cpu ms/token"] = 1e3 * (server.cpu() - before) / (rounds * streams * args.tokens)
            figures.update({f"{streams}: {key}": value for key, value in found.items()})
        figures["second turn ttft ms"] = second_turn(server.port, args.turn_words)
        figures["resident MiB"] = server.resident()
        return figures
    finally:
        server.stop()


def serve_peer(args):
    """llama.cpp's own server, from a package that carries it."""
    import xllamacpp

    params = xllamacpp.CommonParams()
    params.model.path = args.model
    params.port = args.serve_peer
    params.hostnames = ["127.0.0.1"]
    params.n_parallel = args.slots
    params.n_ctx = args.context * args.slots
    params.cpuparams.n_threads = args.threads
    params.cpuparams_batch.n_threads = args.threads
    server = xllamacpp.Server(params)
    while server:
        time.sleep(3600)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--carat", default="target/release/carat")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--context", type=int, default=2048, help="tokens of each request")
    parser.add_argument("--streams", type=lambda text: [int(n) for n in text.split(",")], default=[1, 8, 32])
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--answers", type=int, default=1, help="at least, of each number of streams")
    parser.add_argument("--words", type=int, default=20, help="of each prompt")
    parser.add_argument("--turn-words", type=int, default=400, help="of the first turn's prompt")
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--json")
    parser.add_argument("--serve-peer", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--slots", type=int, default=1, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve_peer:
        return serve_peer(args)
    pairs = []
    for n in range(args.pairs):
        order = ["carat", "llama.cpp"] if n % 2 == 0 else ["llama.cpp", "carat"]
        pairs.append({name: measure(name, args) for name in order})
        print(f"pair {n + 1} of {args.pairs} done", file=sys.stderr)
    if args.json:
        with open(args.json, "w") as out:
            json.dump(pairs, out, indent=1)
    print(f"{'':24} {'carat':>10} {'llama.cpp':>10}   carat / llama.cpp (least to most)")
    for key in pairs[0]["carat"]:
        ours, theirs = ([pair[name][key] for pair in pairs] for name in ("carat", "llama.cpp"))
        ratios = sorted(a / b for a, b in zip(ours, theirs))
        middle = statistics.median
        print(f"{key:24} {middle(ours):10.2f} {middle(theirs):10.2f}   {middle(ratios):.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f})")


if __name__ == "__main__":
    main()
