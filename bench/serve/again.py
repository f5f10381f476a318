#!/usr/bin/env python3
"""Drafts of what the text repeats, on the demo model: a question is asked a second time, and the answer is the first one with changes.

    python3 bench/serve/again.py target/release/carat [--rounds 5] [--backend cpu]

Each answer is asked for with drafts and without, in turns; the gain is of the tokens per second of both, by the server's own timings.
Stories that are told once follow, where nothing is to be gained.
"""

import argparse
import json
import statistics
import subprocess
import sys
import time
import urllib.request

from ports import free_port

STORIES = [
    "Tell me a story about a fox.",
    "Tell me a story about a girl and her boat.",
    "Tell me a story about an old man and a dog.",
    "Tell me a story about a cat in the garden.",
]
OTHERS = ["Spell the word garden backwards.", "Explain what a river is."]


def user(text):
    return {"role": "user", "content": text}


class Server:
    def __init__(self, binary, backend):
        port = free_port()
        self.url = f"http://127.0.0.1:{port}"
        command = [binary, "serve", "--port", str(port), "--draft", "ngram", "--backend", backend, "-q"]
        self.process = subprocess.Popen(command)
        for _ in range(600):
            try:
                urllib.request.urlopen(self.url + "/ready", timeout=5).close()
                return
            except OSError:
                time.sleep(0.1)
        sys.exit("the server did not become ready within a minute")

    def ask(self, messages, drafts):
        body = {"model": "", "messages": messages, "max_tokens": 300, "temperature": 0, "draft": drafts}
        head = {"content-type": "application/json"}
        request = urllib.request.Request(self.url + "/v1/chat/completions", json.dumps(body).encode(), head)
        with urllib.request.urlopen(request, timeout=120) as response:
            answer = json.load(response)
        return answer["choices"][0]["message"]["content"], answer["timings"]


def gain(server, conversations, rounds):
    """Tokens per second with drafts over those without, for each round; and tokens per pass."""
    gains, passes = [], []
    for number in range(rounds):
        spent = {True: 0.0, False: 0.0}
        for messages in conversations:
            texts = set()
            for drafts in (number % 2 == 1, number % 2 == 0):
                text, timings = server.ask(messages, drafts)
                texts.add(text)
                spent[drafts] += timings["predicted_ms"]
                if drafts:
                    passes.append(timings.get("predicted_per_pass", 1.0))
            if len(texts) != 1:
                sys.exit(f"another answer with drafts: {texts}")
        gains.append(spent[False] / spent[True])
    return gains, statistics.mean(passes)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("binary")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--backend", default="cpu")
    options = parser.parse_args()
    server = Server(options.binary, options.backend)
    try:
        once = [[user(text)] for text in STORIES]
        again = []
        for text in STORIES + OTHERS:
            answer, _ = server.ask([user(text)], False)
            again.append([user(text), {"role": "assistant", "content": answer}, user(text)])
        for what, conversations in [("asked again", again), ("asked once", once)]:
            gain(server, conversations, 1)  # caches fill up
            gains, passes = gain(server, conversations, options.rounds)
            gains.sort()
            middle = statistics.median(gains)
            print(f"{what}: {middle:.2f}x ({gains[0]:.2f} to {gains[-1]:.2f}), {passes:.2f} tokens per pass")
    finally:
        server.process.terminate()
        server.process.wait()


if __name__ == "__main__":
    main()
