"""Kills `carat serve` under load, again and again, and starts it anew: ready each time, with the answer it gave before.

    python3 bench/serve/kill.py [CARAT] [--times N] [--most SECONDS]

CARAT is the program (default: target/release/carat). It serves the demo model on a free port of loopback; the port stays the same, so
that a lock or a socket left behind would show. Exit code 1 where a start took longer than the bar.
"""

import argparse
import http.client
import json
import pathlib
import random
import subprocess
import sys
import threading
import time

from ports import free_port

ROOT = pathlib.Path(__file__).resolve().parents[2]
CLIENTS = 4
PATIENCE = 30.0


def ask(port, method, path, body=None, timeout=PATIENCE):
    """Status and body."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=timeout)
    try:
        headers = {"Content-Type": "application/json"}
        connection.request(method, path, json.dumps(body) if body else None, headers)
        response = connection.getresponse()
        return response.status, response.read()
    finally:
        connection.close()


def story(max_tokens, stream):
    return {
        "messages": [{"role": "user", "content": "Tell me a story about a fox."}],
        "max_tokens": max_tokens,
        "temperature": 0,
        "stream": stream,
    }


def text(port):
    status, body = ask(port, "POST", "/v1/chat/completions", story(24, False))
    if status != 200:
        sys.exit(f"status {status}: {body!r}")
    return json.loads(body)["choices"][0]["message"]["content"]


def start(carat, port):
    """The process, and the seconds until it was ready."""
    begun = time.monotonic()
    process = subprocess.Popen(
        [carat, "serve", "--port", str(port)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        cwd=ROOT,
    )
    while time.monotonic() - begun < PATIENCE:
        if process.poll() is not None:
            sys.exit(f"{carat} ended with code {process.returncode}")
        try:
            if ask(port, "GET", "/ready", timeout=1)[0] == 200:
                return process, time.monotonic() - begun
        except OSError:
            pass
        time.sleep(0.01)
    process.kill()
    sys.exit(f"not ready after {PATIENCE} s")


def load(port, over):
    """Asks until it is over, whatever comes of it."""
    while not over.is_set():
        try:
            ask(port, "POST", "/v1/chat/completions", story(200, True))
        except (OSError, http.client.HTTPException):
            over.wait(0.02)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("carat", nargs="?", default=str(ROOT / "target/release/carat"))
    parser.add_argument("--times", type=int, default=20)
    parser.add_argument("--most", type=float, default=2.0, help="seconds until ready")
    args = parser.parse_args()
    port = free_port()
    process, first = start(args.carat, port)
    over = threading.Event()
    clients = [threading.Thread(target=load, args=(port, over)) for _ in range(CLIENTS)]
    times = []
    try:
        expected = text(port)
        for client in clients:
            client.start()
        for _ in range(args.times):
            time.sleep(random.uniform(0.1, 0.5))
            process.kill()
            process.wait()
            process, took = start(args.carat, port)
            times.append(took)
        over.set()
        for client in clients:
            client.join()
        same = text(port) == expected
    finally:
        over.set()
        process.kill()
        process.wait()
    slowest = max(times)
    print(f"first start {first:.2f} s; after {len(times)} kills p50 {sorted(times)[len(times) // 2]:.2f} s, max {slowest:.2f} s")
    print(f"the answer after them is {'the same' if same else 'ANOTHER'}")
    return 0 if same and slowest <= args.most else 1


if __name__ == "__main__":
    sys.exit(main())
