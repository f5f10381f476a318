"""Two models that take turns in a budget of memory for one: every request is answered, and the process never takes more than the budget.

    target/release/carat synth e2b q4_0 a.gguf && target/release/carat synth e2b q4_k_m b.gguf --seed 2
    python3 bench/serve/models.py a=a.gguf b=b.gguf --memory 4GiB [--carat CARAT] [--seconds N] [--clients N] [-c TOKENS]

Clients ask all models in turn, half of them by streams, while memory is sampled: on the CPU what the process has resident, anonymous and
mapped files alike; with --backend cuda what the first card has in use beyond what it had when no model was loaded. Then nobody asks, and the
models must leave. Exit code 1 where a request failed, the budget was exceeded, no model was swapped, or one stayed.
"""

import argparse
import collections
import http.client
import json
import pathlib
import re
import subprocess
import sys
import threading
import time

from ports import free_port

ROOT = pathlib.Path(__file__).resolve().parents[2]
UNITS = {"GiB": 1 << 30, "MiB": 1 << 20, "GB": 10**9, "MB": 10**6}
IDLE = 5
PATIENCE = 600.0


def ask(port, method, path, body=None):
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE)
    try:
        connection.request(method, path, json.dumps(body) if body else None, {"Content-Type": "application/json"})
        response = connection.getresponse()
        return response.status, response.read().decode()
    finally:
        connection.close()


def size(text):
    number, unit = re.fullmatch(r"([\d.]+)\s*(\w+)", text).groups()
    return int(float(number) * UNITS[unit])


def resident(pid):
    """Bytes of the process in memory."""
    for line in open(f"/proc/{pid}/status"):
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) * 1024
    return 0


def in_use():
    """Bytes of the first card in use, by whomever."""
    query = ["nvidia-smi", "--id=0", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    return int(subprocess.check_output(query)) << 20


def states(port):
    return {one["id"]: one["status"]["value"] for one in json.loads(ask(port, "GET", "/v1/models")[1])["data"]}


class Client(threading.Thread):
    """Asks the models in turn until the time is up."""

    def __init__(self, number, args, port, names, until):
        super().__init__()
        self.number, self.args, self.port, self.names, self.until = number, args, port, names, until
        self.times, self.failures = [], []

    def run(self):
        turn = self.number
        while time.monotonic() < self.until:
            model = self.names[turn % len(self.names)]
            stream = turn % 2 == 0
            body = {
                "model": model, "stream": stream, "max_tokens": self.args.tokens, "ignore_eos": True,
                "messages": [{"role": "user", "content": f"Request {turn} of client {self.number}."}],
            }
            began = time.monotonic()
            status, text = ask(self.port, "POST", "/v1/chat/completions", body)
            ended = text.rstrip().endswith("[DONE]") if stream else '"finish_reason"' in text
            if status != 200 or not ended or f'"model":"{model}"' not in text:
                self.failures.append(f"{model}: {status} {text[:300]}")
            self.times.append(time.monotonic() - began)
            turn += 1


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="+", metavar="NAME=FILE")
    parser.add_argument("--memory", required=True, metavar="SIZE")
    parser.add_argument("--carat", default=ROOT / "target/release/carat")
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--clients", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=8)
    parser.add_argument("-c", "--context", default="2048")
    parser.add_argument("--backend", choices=["cpu", "cuda"], default="cpu")
    args = parser.parse_args()
    budget, port = size(args.memory), free_port()
    command = [args.carat, "serve", "--port", str(port), "--backend", args.backend, "-c", args.context, "--parallel", "4"]
    command += ["--models-memory", args.memory, "--idle-unload", str(IDLE), "--queue-timeout", "600", "--metrics-public"]
    for model in args.models:
        command += ["-m", model]
    server = subprocess.Popen(command)
    try:
        return run(args, server, port, budget)
    finally:
        server.terminate()
        server.wait()


def leave(port):
    """Waits for all models to be unloaded."""
    began = time.monotonic()
    while any(state != "unloaded" for state in states(port).values()) and time.monotonic() - began < 10 * IDLE:
        time.sleep(0.1)


def run(args, server, port, budget):
    while True:
        try:
            if ask(port, "GET", "/ready")[0] == 200:
                break
        except OSError:
            pass
        if server.poll() is not None:
            sys.exit("the server ended")
        time.sleep(0.1)
    if args.backend == "cpu":
        taken = lambda: resident(server.pid)
    else:
        # The driver's own share stays as long as the process: it is there once a model has been.
        ask(port, "POST", "/api/generate", {"model": next(iter(states(port)))})
        leave(port)
        base = in_use()
        taken = lambda: in_use() - base
    empty = taken()
    names = list(states(port))
    until = time.monotonic() + args.seconds
    clients = [Client(n, args, port, names, until) for n in range(args.clients)]
    for client in clients:
        client.start()
    most, by_state = empty, collections.Counter()
    while any(client.is_alive() for client in clients):
        now = taken()
        most = max(most, now)
        here = ", ".join(sorted(f"{name} {state}" for name, state in states(port).items() if state != "unloaded")) or "none"
        by_state[here] = max(by_state[here], now)
        time.sleep(0.05)
    leave(port)
    after = taken()
    metrics = ask(port, "GET", "/metrics")[1]
    loads = {n: int(v) for n, v in re.findall(r'carat:model_loads_total\{model_name="([^"]*)"\} (\d+)', metrics)}
    told = {n: int(v) for n, v in re.findall(r'carat:model_memory_bytes\{model_name="([^"]*)"\} (\d+)', metrics)}
    seconds = {n: float(v) for n, v in re.findall(r'carat:model_load_seconds_total\{model_name="([^"]*)"\} ([\d.]+)', metrics)}
    times = sorted(t for client in clients for t in client.times)
    failures = [f for client in clients for f in client.failures]
    mib = lambda n: f"{n / (1 << 20):.0f} MiB"
    print(f"{len(times)} requests, {len(failures)} failed; median {times[len(times) // 2]:.1f} s, longest {times[-1]:.1f} s")
    for name in names:
        print(f"{name}: accounted {mib(told[name])}, {loads[name]} loads, {seconds[name] / max(1, loads[name]):.2f} s each")
    print(f"memory: {mib(empty)} empty, {mib(most)} at most of {mib(budget)}, {mib(after)} when all had left")
    for here, peak in sorted(by_state.items()):
        print(f"  {here}: {mib(peak)}")
    for failure in failures[:5]:
        print(failure)
    left = all(state == "unloaded" for state in states(port).values())
    swapped = all(count > 1 for count in loads.values()) or sum(told.values()) <= budget
    return 0 if not failures and most <= budget and swapped and left else 1


if __name__ == "__main__":
    sys.exit(main())
