"""The load of deploy/failover_test.py against Ray Serve, with one engine killed, drained or stopped in the middle. Not part of CI: Ray
takes half a minute to start and a gigabyte of memory.

    python -m venv target/ray && target/ray/bin/pip install "ray[serve]==2.60.0" aiohttp
    target/ray/bin/python deploy/ray/failover_ray_test.py [CARAT]
"""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

import failover_test as load_test  # noqa: E402
import ray  # noqa: E402
from ray import serve  # noqa: E402

from carat_serve import app  # noqa: E402


# What happens to one of three engines.
PHASES = [("calm", None), ("kill", signal.SIGKILL), ("drain", signal.SIGTERM), ("hang", signal.SIGSTOP)]


def engines(carat):
    """Processes of the program that serve."""
    found = subprocess.run(["pgrep", "-f", f"^{carat} serve --port"], capture_output=True, text=True).stdout
    return [int(line) for line in found.split()]


def run(name, sent, port, alive):
    """A load, and one engine that gets a signal in the middle of it; then as many engines as before."""
    load = load_test.Load(port, name)
    load.start()
    load_test.wait_for("some answers", 120, lambda: len(load.outcomes) >= load_test.CONVERSATIONS)
    victim = min(alive())
    if sent:
        os.kill(victim, sent)
    began = time.monotonic()
    load.finish()
    outcomes = [outcome for _, _, outcome in load.outcomes]
    lost = [o for o in outcomes if o.error and not o.begun]
    broken = [o for o in outcomes if o.error and o.begun]
    later = [o for _, turn, o in load.outcomes if turn and not o.error]
    cached = sum(o.cached > 0 for o in later)
    print(f"{name}: {len(outcomes)} requests, {len(lost)} lost before a first byte, {len(broken)} broke off, {cached} of {len(later)} later turns cached", flush=True)
    assert not lost, [(o.id, o.error) for o in lost]
    # Only what was under way in an engine that is killed breaks off.
    assert len(broken) <= (load_test.CLIENTS if sent in (signal.SIGKILL, signal.SIGSTOP) else 0)
    assert cached >= 0.7 * len(later)
    if sent:
        load_test.wait_for("a third engine", 120, lambda: len(alive() - {victim}) == 3 and victim not in alive())
        load_test.wait_for("the gateway", 120, lambda: load_test.answers(port, "/ready"))
        print(f"  three engines again {time.monotonic() - began:.0f} s after the signal", flush=True)


def main():
    carat = str(Path(sys.argv[1] if len(sys.argv) > 1 else "target/release/carat").resolve())
    before = set(engines(carat))
    port = load_test.free_port()
    runtime = {"env_vars": {"PYTHONPATH": f"{HERE}:{HERE.parent}"}}
    ray.init(include_dashboard=False, num_cpus=8, log_to_driver=False, runtime_env=runtime)
    try:
        serve.start(http_options={"host": "127.0.0.1", "port": port})
        serve.run(app({"carat": carat, "flags": "-t 1", "least": "3", "most": "3"}), name="carat")
        load_test.wait_for("the gateway", 120, lambda: load_test.answers(port, "/ready"))
        for name, sent in PHASES:
            run(name, sent, port, lambda: set(engines(carat)) - before)
        print("failover holds")
    finally:
        serve.shutdown()
        ray.shutdown()


if __name__ == "__main__":
    main()
