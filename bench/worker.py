"""The process that peer.py starts for llama.cpp: loads a model once, reads one JSON request a line, answers each with one.

A process of its own keeps the library's memory apart, so that its peak can be told.
"""

import json
import sys
import time

import llama

# One pass over this many tokens touches every weight and buffer; a longer warm-up would only take longer.
WARM_UP_PROMPT = 512
WARM_UP_TOKENS = 8


class Test:
    """A cell, filled to its depth and warmed up; `turn` times it once."""

    def __init__(self, model, cell):
        self.prompt, self.generate, self.depth = cell["prompt"], cell["generate"], cell["depth"]
        length = self.depth + self.prompt + self.generate
        if length > model.longest:
            raise llama.PeerError(f"{length} tokens are more than the model's context of {model.longest}")
        self.context = llama.Context(model, length, cell["sequences"])
        for sequence in range(cell["sequences"] if self.depth else 0):
            self.context.feed(self.depth, sequence, last_output=False)
        self._run(min(self.prompt, WARM_UP_PROMPT), min(self.generate, WARM_UP_TOKENS))

    def turn(self):
        """Seconds."""
        return self._run(self.prompt, self.generate)

    def _run(self, prompt, generate):
        self.context.rewind(self.depth)
        self.context.finish()
        start = time.perf_counter()
        if prompt:
            self.context.feed(prompt)
            self.context.finish()
        for _ in range(generate):
            self.context.generate()
            self.context.finish()
        return time.perf_counter() - start


def first_token(model, prompt, context_tokens):
    """Feeds a prompt and chooses the likeliest token."""
    context = llama.Context(model, context_tokens, 1)
    context.feed(prompt)
    context.finish()
    logits = context.last_logits()
    return logits.index(max(logits))


def serve(settings, requests, answer):
    start = time.perf_counter()
    library = llama.Library(settings["folder"], settings["variant"])
    model = llama.Model(library, settings["model"], settings["threads"])
    test = None
    answer({"loaded": True, "variant": library.variant})
    for line in requests:
        request = json.loads(line)
        if "prepare" in request:
            test = Test(model, request["prepare"])
            answer({"ready": True})
        elif "turn" in request:
            answer({"seconds": test.turn()})
        elif "end" in request:
            test.context.free()
            test = None
            answer({"ended": True})
        elif "first_token" in request:
            wanted = request["first_token"]
            first_token(model, wanted["prompt"], wanted["context"])
            answer({"seconds": time.perf_counter() - start})


def main():
    def answer(value):
        print(json.dumps(value), flush=True)

    try:
        serve(json.loads(sys.argv[1]), sys.stdin, answer)
    except llama.PeerError as error:
        answer({"error": str(error)})
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
