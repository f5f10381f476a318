#!/usr/bin/env python3
"""Carat's server beside llama.cpp's, on the same file, in turns, under the same load.

    target/release/carat synth e2b q4_0 e2b-q4_0.gguf
    python3 -m venv target/peer-serve && target/peer-serve/bin/pip install xllamacpp==2026.10.11549
    target/peer-serve/bin/python bench/serve/peer.py --model e2b-q4_0.gguf --tokens 32

Each pair starts both servers afresh, one after the other, and measures: seconds from start to ready; tokens per second, gaps
between tokens and the time to the first one at 1, 8 and 32 streams; the time to the first token of a second turn whose first
turn was answered before. Printed are the medians of the pairs' ratios with the least and the most. Give the machine nothing
else to do meanwhile.
"""

import argparse
import asyncio
import json
import os
import re
import signal
import statistics
import subprocess
import sys
import time

from ports import free_port

WORDS = "the fox and the river went over a hill to see what was there before night came".split()


def prompt(seed, words):
    return " ".join(WORDS[(seed * 7 + n * (seed + 3)) % len(WORDS)] for n in range(words))


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
                if asyncio.run(get(self.port, "/health")).startswith("HTTP/1.1 200"):
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


async def get(port, path):
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(f"GET {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n".encode())
    answer = await reader.read(200)
    writer.close()
    return answer.decode(errors="replace")


async def stream(port, messages, tokens):
    """When each piece of a streamed answer came, and when it was asked for."""
    body = json.dumps({
        "messages": messages, "max_tokens": tokens, "stream": True, "temperature": 0, "ignore_eos": True,
        "cache_prompt": True,
    }).encode()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    started = time.monotonic()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    writer.write(head.encode() + body)
    times, text, buffered = [], [], b""
    while b"[DONE]" not in buffered:
        piece = await reader.read(1 << 16)
        if not piece:
            raise RuntimeError("the stream broke off: " + buffered[-300:].decode(errors="replace"))
        now = time.monotonic()
        buffered += piece
        *lines, buffered = buffered.split(b"\n")
        if any(b"[DONE]" in line for line in lines):
            buffered = b"[DONE]"
        for line in lines:
            if line.startswith(b"data: {"):
                choices = json.loads(line[6:]).get("choices")
                delta = choices[0]["delta"] if choices else {}
                part = delta.get("content") or delta.get("reasoning_content")
                if part:
                    times.append(now)
                    text.append(part)
    writer.close()
    # An answer without text has come when it ended.
    return started, times or [time.monotonic()], "".join(text)


async def load(port, streams, tokens, words, rounds=1):
    """So many streams at once, some rounds of it: an answer's worst gap is not yet a p99."""
    took, answers = 0, []
    for n in range(rounds):
        seeds = range(streams * (100 + n), streams * (101 + n))
        asked = [stream(port, [{"role": "user", "content": prompt(seed, words)}], tokens) for seed in seeds]
        started = time.monotonic()
        answered = await asyncio.gather(*asked)
        took += max(times[-1] for _, times, _ in answered) - started
        answers += answered
    gaps = sorted(b - a for _, times, _ in answers for a, b in zip(times, times[1:]))
    return {
        "tokens/s": sum(len(times) for _, times, _ in answers) / took,
        "p99 gap ms": 1e3 * gaps[int(len(gaps) * 0.99)] if gaps else float("nan"),
        "ttft ms": 1e3 * statistics.median(times[0] - asked_at for asked_at, times, _ in answers),
    }


async def second_turn(port, words):
    first = [{"role": "user", "content": prompt(7, words)}]
    _, _, text = await stream(port, first, 8)
    second = first + [{"role": "assistant", "content": text}, {"role": "user", "content": "And then?"}]
    asked, times, _ = await stream(port, second, 16)
    return 1e3 * (times[0] - asked)


def measure(name, args):
    server = Server(name, args)
    try:
        figures = {"ready s": server.seconds}
        asyncio.run(load(server.port, 1, 4, 4))
        for streams in args.streams:
            before = server.cpu()
            rounds = -(-args.answers // streams)
            found = asyncio.run(load(server.port, streams, args.tokens, args.words, rounds))
            found["cpu ms/token"] = 1e3 * (server.cpu() - before) / (rounds * streams * args.tokens)
            figures.update({f"{streams}: {key}": value for key, value in found.items()})
        figures["second turn ttft ms"] = asyncio.run(second_turn(server.port, args.turn_words))
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
