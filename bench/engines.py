"""Programs that take turns, each in a process of its own that stays loaded while a cell is measured.

All have the same calls: `prepare` fills a cell to its depth and warms it up, `turn` times it once, `end` closes it; those that are compared
with each other also have `first_token`, which starts a fresh process. While one of them works the others wait for input and use no
processor time.
"""

import json
import os
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

PROMPT = "Why is the sky blue? Say it in a few words, as one would to a child."
START_CONTEXT = 4096

# Which of Carat's instruction levels does as much as one of llama.cpp's CPU builds.
ISA_OF_VARIANT = {
    "haswell": "avx2",
    "alderlake": "avxvnni",
    "icelake": "avx512",
    "cascadelake": "avx512",
    "zen4": "avx512",
    "sapphirerapids": "amx",
}


class EngineError(Exception):
    """The text is a sentence for the user."""


@dataclass(frozen=True)
class Setup:
    model: Path
    threads: int
    carat: Path
    peer: Path
    variant: str | None = None


@dataclass(frozen=True)
class Start:
    """A fresh process up to its first token, its file being in memory already."""

    seconds: float
    peak_bytes: int


@dataclass(frozen=True)
class Turn:
    seconds: float
    # Of the memory, just before; only Carat measures it.
    read_bytes_per_second: float | None = None


def first_line(text):
    return next(iter(text.strip().splitlines()), "")


class Process:
    """A child that talks in JSON lines."""

    def __init__(self, name, command):
        self.name = name
        try:
            # A session of its own: Ctrl-C is for this program, which then ends its children in order.
            self.child = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                start_new_session=True,
            )
        except OSError as error:
            raise EngineError(f"{name} does not start: {error}") from None
        self.peak_bytes = 0

    def send(self, line):
        try:
            self.child.stdin.write(line + "\n")
            self.child.stdin.flush()
        except OSError:
            self.fail()

    def receive(self):
        line = self.child.stdout.readline()
        if not line:
            self.fail()
        try:
            value = json.loads(line)
        except ValueError:
            raise EngineError(f"{self.name} says what is no JSON: {line.strip()}") from None
        if "error" in value:
            raise EngineError(value["error"])
        return value

    def fail(self):
        """The child has ended too early; the first line of its complaint says why."""
        complaint = self.child.stderr.read().strip()
        self.close()
        raise EngineError(f"{self.name} ended: {first_line(complaint) or f'status {self.child.returncode}'}")

    def close(self):
        """Ends the input, waits for the rest of the output and gives it back."""
        if self.child.returncode is not None:
            return ""
        try:
            self.child.stdin.close()
        except OSError:
            pass
        rest = self.child.stdout.read()
        _, status, usage = os.wait4(self.child.pid, 0)
        self.child.returncode = os.waitstatus_to_exitcode(status)
        self.peak_bytes = usage.ru_maxrss * 1024
        self._drop_pipes()
        return rest

    def kill(self):
        if self.child.returncode is None:
            self.child.kill()
            self.child.wait()
        self._drop_pipes()

    def _drop_pipes(self):
        for pipe in (self.child.stdin, self.child.stdout, self.child.stderr):
            try:
                pipe.close()
            except OSError:
                pass


class Build:
    """A build of Carat, with the options of `carat bench` that say what computes which model."""

    name = "carat"

    def __init__(self, program, options):
        self.program = program.absolute()  # a bare name would be looked for where commands are
        self.options = options
        self.process = None
        if not program.exists():
            raise EngineError(f"{program} does not exist: build it with `cargo build --release`, or name another")
        self.version = self._output(["--version"])

    def _output(self, arguments):
        try:
            done = subprocess.run([self.program, *arguments], capture_output=True, text=True)
        except OSError as error:
            raise EngineError(f"carat does not start: {error}") from None
        if done.returncode != 0:
            raise EngineError(f"carat {arguments[0]} fails: {first_line(done.stderr) or done.returncode}")
        return done.stdout.strip()

    def prepare(self, cell):
        arguments = ["-p", str(cell.prompt), "-n", str(cell.generate), "-d", str(cell.depth)]
        if cell.sequences > 1:
            arguments += ["--sequences", str(cell.sequences)]
        # Repetitions end with the input, so their number is only a limit.
        arguments += ["-r", "1000", "-o", "json", "--paced", "--quiet"]
        self.process = Process("carat", [self.program, "bench", *self.options, *arguments])
        self._wait()

    def _wait(self):
        if "waiting" not in self.process.receive():
            raise EngineError("this carat does not take turns: build one that knows `carat bench --paced`")

    def turn(self):
        self.process.send("")
        told = self.process.receive()
        self._wait()
        return Turn(told["seconds"], told["measured_read_bytes_per_second"])

    def end(self):
        """Bytes that the test must read at the least, from Carat's report; None where it has none."""
        process, self.process = self.process, None
        reports = [json.loads(line) for line in process.close().splitlines() if line.startswith("{")]
        bound = reports[-1].get("bound") if reports else None
        return bound and {"bytes": bound["bytes"], "limited_by": bound["limited_by"]}

    def stop(self):
        if self.process:
            self.process.kill()


class Carat(Build):
    def __init__(self, setup):
        self.setup = setup
        options = ["-m", str(setup.model), "--backend", "cpu", "-t", str(setup.threads)]
        if setup.variant:
            options += ["--isa", ISA_OF_VARIANT[setup.variant]]
        super().__init__(setup.carat, options)

    def prompt_tokens(self):
        ids = self._output(["tokenize", "-m", str(self.setup.model), "--ids", PROMPT])
        return len(ids.replace(",", " ").split())

    def first_token(self, _prompt_tokens):
        command = [self.program, "run", *self.options, "-c", str(START_CONTEXT), "-n", "1", "--quiet", "--raw", PROMPT]
        start = time.perf_counter()
        process = Process("carat", command)
        process.child.stdin.close()
        # One token is asked for: its text, or the end where it has none.
        process.child.stdout.read(1)
        seconds = time.perf_counter() - start
        complaint = process.child.stderr.read()
        process.close()
        if process.child.returncode != 0:
            raise EngineError(f"carat run fails: {first_line(complaint)}")
        return Start(seconds, process.peak_bytes)


class Llama:
    name = "llama.cpp"

    def __init__(self, setup):
        self.setup = setup
        self.process = self._start()
        self.variant = self.process.receive()["variant"]

    def _start(self):
        settings = {
            "folder": str(self.setup.peer),
            "variant": self.setup.variant,
            "model": str(self.setup.model),
            "threads": self.setup.threads,
        }
        return Process("llama.cpp", [sys.executable, str(Path(__file__).with_name("worker.py")), json.dumps(settings)])

    def _ask(self, request):
        self.process.send(json.dumps(request))
        return self.process.receive()

    def prepare(self, cell):
        self._ask({"prepare": asdict(cell)})

    def turn(self):
        return Turn(self._ask({"turn": True})["seconds"])

    def end(self):
        self._ask({"end": True})

    def first_token(self, prompt_tokens):
        process = self._start()
        try:
            process.receive()
            process.send(json.dumps({"first_token": {"prompt": prompt_tokens, "context": START_CONTEXT}}))
            # Counted by the process itself, so that the start of Python is not.
            seconds = process.receive()["seconds"]
            process.close()
        finally:
            process.kill()
        return Start(seconds, process.peak_bytes)

    def stop(self):
        self.process.kill()
