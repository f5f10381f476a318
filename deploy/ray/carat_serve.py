"""`carat serve` on a Ray cluster: replicas that scale with load, requests that follow their prefix, retries before the first byte.

    pip install "ray[serve]==2.60.0" aiohttp
    serve run deploy.ray.carat_serve:app                                   # from the repository's folder
    serve run deploy.ray.carat_serve:app carat=/usr/local/bin/carat gpus=1 least=1 most=8 flags="-m model.gguf"

`Engine` is one program on a free port, and dies with it: an actor whose engine is gone would answer quickly, look idle and attract all
traffic. `Gateway` speaks HTTP with clients, passes bytes through, and asks another engine as long as no byte has come; Carat sends
nothing before the first token, so that covers everything but answers under way, whose clients see the stream break.

Keep the cluster's ports on a private network and its dashboard off: both can run programs for whoever reaches them.
"""

import asyncio
import hashlib
import json
import os
import shlex
import socket
import subprocess
import threading
import time
import urllib.error
import urllib.request
from types import SimpleNamespace

import aiohttp
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse
from ray import serve
from ray.exceptions import RayError
from ray.serve.config import AutoscalingConfig, RequestRouterConfig
from ray.serve.request_router import RequestRouter

START_SECONDS = 600
ATTEMPTS = 4
# An engine that does not answer so many times in a row, each for so long, hangs.
PING_SECONDS = 3
MOST_SILENT = 3
# What a proxy must not pass on.
HOP_BY_HOP = {"connection", "keep-alive", "transfer-encoding", "upgrade", "te", "trailer", "host", "content-length"}


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


class PrefixRouter(RequestRouter):
    """Sends what begins alike to the same engine, as long as that has room; whoever comes or goes moves only its own share."""

    async def choose_replicas(self, candidate_replicas, pending_request=None):
        key = getattr(pending_request.args[0], "key", b"") if pending_request and pending_request.args else b""

        def weight(replica):
            return hashlib.blake2b(replica.replica_id.unique_id.encode() + b"/" + key, digest_size=8).digest()

        return [[replica] for replica in sorted(candidate_replicas, key=weight)]


@serve.deployment
class Engine:
    """One `carat serve`."""

    def __init__(self, carat, flags):
        self.url = f"http://127.0.0.1:{free_port()}"
        port = self.url.rsplit(":", 1)[1]
        self.process = subprocess.Popen([carat, "serve", "--port", port, *shlex.split(flags)])
        self.session = None
        self.wait_until_ready()
        threading.Thread(target=self.watch, daemon=True).start()

    def wait_until_ready(self):
        end = time.monotonic() + START_SECONDS
        while time.monotonic() < end:
            if self.process.poll() is not None:
                raise RuntimeError(f"carat ended with code {self.process.returncode}; its log says why")
            try:
                urllib.request.urlopen(f"{self.url}/ready", timeout=1)
                return
            except OSError:
                time.sleep(0.1)
        raise RuntimeError(f"carat was not ready within {START_SECONDS} s")

    def watch(self):
        """Waits for the engine's end, and brings it about where the engine hangs."""
        silent = 0
        while silent < MOST_SILENT:
            try:
                self.process.wait(PING_SECONDS)
                break
            except subprocess.TimeoutExpired:
                silent = 0 if self.is_alive() else silent + 1
        self.process.kill()
        # Not an exception: the actor itself must go, so that nobody asks it again.
        os._exit(1)

    def is_alive(self):
        """Whether anything answers: an engine that drains says 503, and is left to end."""
        try:
            urllib.request.urlopen(f"{self.url}/health", timeout=PING_SECONDS)
        except urllib.error.HTTPError:
            return True
        except OSError:
            return False
        return True

    async def check_health(self):
        if self.process.poll() is not None:
            raise RuntimeError("carat has ended")
        async with self.client().get(f"{self.url}/health", timeout=aiohttp.ClientTimeout(total=5)) as response:
            if response.status != 200:
                raise RuntimeError(f"carat answers {response.status} to /health")

    def client(self):
        if self.session is None:
            unlimited = aiohttp.ClientTimeout(total=None, sock_connect=2)
            self.session = aiohttp.ClientSession(timeout=unlimited, connector=aiohttp.TCPConnector(limit=0), auto_decompress=False)
        return self.session

    async def ask(self, request):
        """The status and headers, then the bytes as they come."""
        async with self.client().request(
            request.method, self.url + request.path, data=request.body, headers=request.headers
        ) as response:
            headers = {k: v for k, v in response.headers.items() if k.lower() not in HOP_BY_HOP}
            yield {"status": response.status, "headers": headers}
            async for piece in response.content.iter_any():
                yield piece

    def __del__(self):
        if getattr(self, "process", None) and self.process.poll() is None:
            self.process.terminate()


async def joined(first, rest):
    yield first
    async for piece in rest:
        yield piece


def opening(body):
    """How a conversation begins, which all its turns have in common; what the client calls it, if it says so."""
    try:
        asked = json.loads(body)
    except ValueError:
        return b""
    if not isinstance(asked, dict):
        return b""
    messages = asked.get("messages")
    if isinstance(messages, list) and messages:
        # A system prompt alone would send everybody to one engine, so the first question counts too.
        leads = isinstance(messages[0], dict) and messages[0].get("role") in ("system", "developer")
        messages = messages[: 2 if leads else 1]
    key = asked.get("prompt_cache_key") or messages or asked.get("prompt") or asked.get("input")
    return json.dumps(key).encode() if key else b""


# Above the class: `serve.ingress` packs it up with what it can see at that moment.
web = FastAPI()


@serve.deployment
@serve.ingress(web)
class Gateway:
    """What clients speak with."""

    def __init__(self, engine):
        self.engine = engine.options(stream=True)
        self.retries = 0

    @web.api_route("/{path:path}", methods=["GET", "POST", "DELETE", "OPTIONS"])
    async def pass_on(self, request: Request, path: str):
        body = await request.body()
        query = f"?{request.url.query}" if request.url.query else ""
        headers = {k: v for k, v in request.headers.items() if k.lower() not in HOP_BY_HOP | {"origin"}}
        key = request.headers.get("x-session", "").encode() or opening(body) or os.urandom(8)
        asked = SimpleNamespace(method=request.method, path=f"/{path}{query}", body=body, headers=headers, key=key)
        last = "no engine answered"
        for attempt in range(ATTEMPTS):
            try:
                pieces = self.engine.ask.remote(asked).__aiter__()
                head = await pieces.__anext__()
                first = await anext(pieces, b"")
            except (RayError, aiohttp.ClientError, OSError, asyncio.TimeoutError) as error:
                last, self.retries = f"{type(error).__name__}: {error}", self.retries + 1
                await asyncio.sleep(0.05 * 2**attempt)
                continue
            if head["status"] == 503 and attempt + 1 < ATTEMPTS:
                last, self.retries = "503 from an engine", self.retries + 1
                await asyncio.sleep(0.05 * 2**attempt)
                continue
            if head["headers"].get("Content-Type", "").startswith("text/event-stream"):
                return StreamingResponse(joined(first, pieces), head["status"], head["headers"])
            rest = b"".join([piece async for piece in pieces])
            return Response(first + rest, head["status"], head["headers"])
        message = f"all engines failed: {last[:300]}"
        return JSONResponse({"error": {"message": message, "type": "unavailable_error", "param": None, "code": None}}, 503, {"Retry-After": "2"})


def app(args):
    """What `serve run` builds; see the head of this file for the settings."""
    least, most = int(args.get("least", 1)), int(args.get("most", 4))
    side_by_side = int(args.get("parallel", 8))
    engine = Engine.options(
        ray_actor_options={"num_cpus": float(args.get("cpus", 1)), "num_gpus": float(args.get("gpus", 0))},
        # Also the bound on affinity: an engine with this many has no room, and the next in line is asked.
        max_ongoing_requests=2 * side_by_side,
        autoscaling_config=AutoscalingConfig(
            min_replicas=least, max_replicas=most, target_ongoing_requests=side_by_side, upscale_delay_s=5, downscale_delay_s=300
        ),
        request_router_config=RequestRouterConfig(request_router_class=PrefixRouter),
        health_check_period_s=2,
        health_check_timeout_s=5,
        graceful_shutdown_timeout_s=30,
    ).bind(args.get("carat", "carat"), args.get("flags", ""))
    return Gateway.options(num_replicas=1, max_ongoing_requests=1000, ray_actor_options={"num_cpus": 0.1}).bind(engine)
