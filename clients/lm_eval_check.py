"""lm-eval against `carat serve` with the demo model: every log-likelihood is that of `carat eval logits`.

    pip install 'lm-eval[api]==0.4.13'
    CARAT=target/release/carat python3 clients/lm_eval_check.py

Too heavy for every change (lm-eval installs 700 MB), so `clients/run` leaves it out. Needs no network: the tasks are made here.
"""

import array
import json
import math
import os
import pathlib
import subprocess
import sys
import tempfile
import urllib.request

from server import Server

from lm_eval import simple_evaluate
from lm_eval.tasks import TaskManager

SENTENCES = [
    "The sun is a star .", "Hello! How can I help you today?", "123 + 456 = 579.", "The capital of France is Paris.", "Once upon a time there was a fox",
    "Water is made of hydrogen and oxygen.", "A dog is an animal that barks", "Two and two is four", "The sky is blue because of scattered light",
    "She opened the door and saw a garden", "I like to read books in the evening", "The train leaves at seven in the morning", "He paid with a coin",
    "Birds can fly and fish can swim", "It was a dark and stormy night", "Please close the window before you leave", "The weather in Paris is sunny",
    "One, two, three, four, five", "Music is the food of love", "All that glitters is not gold",
]
CLOZE = """task: carat_cloze
dataset_path: json
dataset_kwargs: {{data_files: {{test: {folder}/cloze.json}}}}
output_type: loglikelihood
test_split: test
doc_to_text: "<bos>{{{{text.split(' ')[:-1]|join(' ')}}}}"
doc_to_target: "{{{{' '+text.split(' ')[-1]}}}}"
metric_list: [{{metric: perplexity}}, {{metric: acc}}]
"""
ROLLING = """task: carat_rolling
dataset_path: json
dataset_kwargs: {{data_files: {{test: {folder}/cloze.json}}}}
output_type: loglikelihood_rolling
test_split: test
doc_to_text: ""
doc_to_target: "{{{{text}}}}"
metric_list: [{{metric: byte_perplexity}}]
"""
WRITTEN = """task: carat_written
dataset_path: json
dataset_kwargs: {{data_files: {{test: {folder}/cloze.json}}}}
output_type: generate_until
test_split: test
doc_to_text: "<bos>{{{{text}}}}"
doc_to_target: ""
generation_kwargs: {{until: ["."], max_gen_toks: 8}}
metric_list: [{{metric: bypass}}]
"""


KNOWN = {}


def tokens_of(server, text):
    """As lm-eval asks for them."""
    body = json.dumps({"prompt": text, "add_special_tokens": False}).encode()
    request = urllib.request.Request(server.url + "/tokenize", body, {"Content-Type": "application/json"})
    return json.load(urllib.request.urlopen(request))["tokens"]


def log_likelihood(folder, before, tokens):
    """Of tokens after others, from the logits of all positions."""
    key = (tuple(before), tuple(tokens))
    if key not in KNOWN:
        KNOWN[key] = summed(folder, before, tokens)
    return KNOWN[key]


def summed(folder, before, tokens):
    (folder / "ids.json").write_text(json.dumps(before + tokens))
    out = folder / "logits.f32"
    command = [os.environ["CARAT"], "eval", "logits", "--tokens", folder / "ids.json", "--out", out]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    logits = array.array("f", out.read_bytes())
    vocab = len(logits) // len(before + tokens)
    total = 0.0
    for place, token in enumerate(tokens, start=len(before) - 1):
        row = logits[place * vocab : (place + 1) * vocab]
        most = max(row)
        total += row[token] - most - math.log(sum(math.exp(value - most) for value in row))
    return total


def evaluate(server, folder, batch_size=1, **settings):
    arguments = {"model": "pip", "base_url": server.url + "/v1/completions", "tokenizer_backend": "remote", "max_length": 1024, **settings}
    return simple_evaluate(
        model="local-completions",
        model_args=arguments,
        batch_size=batch_size,
        tasks=["carat_cloze", "carat_rolling", "carat_written"],
        task_manager=TaskManager(include_path=str(folder)),
        log_samples=True,
        bootstrap_iters=0,
    )


def main():
    folder = pathlib.Path(tempfile.mkdtemp())
    (folder / "cloze.json").write_text("\n".join(json.dumps({"text": text}) for text in SENTENCES))
    for name, task in [("cloze", CLOZE), ("rolling", ROLLING), ("written", WRITTEN)]:
        (folder / f"{name}.yaml").write_text(task.format(folder=folder))
    server = Server("--parallel", "4")
    worst, wrong = 0.0, 0
    try:
        runs = [evaluate(server, folder), evaluate(server, folder, num_concurrent=4), evaluate(server, folder, batch_size=4)]
        [bos] = tokens_of(server, "<bos>")
        for results in runs:
            for sample in results["samples"]["carat_cloze"]:
                context, continuation = sample["arguments"][0]
                whole, before = tokens_of(server, context + continuation), tokens_of(server, context)
                expected = log_likelihood(folder, before, whole[len(before) :])
                worst = max(worst, abs(float(sample["resps"][0][0][0]) - expected))
            for sample in results["samples"]["carat_rolling"]:
                expected = log_likelihood(folder, [bos], tokens_of(server, sample["doc"]["text"]))
                got = sample["resps"][0][0]
                worst = max(worst, abs(float(got[0] if isinstance(got, (list, tuple)) else got) - expected))
        first, *others = [[s["resps"] for s in run["samples"]["carat_written"]] for run in runs]
        wrong = sum(other != first for other in others)
        print({name: values for name, values in runs[0]["results"].items()})
    finally:
        server.stop()
    print(f"{len(SENTENCES)} texts, 3 ways: the largest difference from `carat eval logits` is {worst:.2e}; texts written otherwise: {wrong}")
    sys.exit(worst > 1e-3 or wrong > 0)


if __name__ == "__main__":
    main()
