"""Renders random conversations with jinja2, as transformers does, into renders.json.xz.

Usage: python3 render_templates.py            (writes beside itself; jinja2 3.1 is needed, nothing else)

The same seed gives the same file. Conversations use all that the templates read: rules, tools with nested schemas and
declared results, content in parts, thoughts, calls with arguments of every kind, results as messages and on the message that
asked, integers of any length in calls, results and schemas, text that looks like control tokens. Three things are left out because the program means to differ from the templates
there: arguments as JSON text, which are parsed first; lists of types in schemas, which templates cannot write; and results as
messages in a template that does not know them, which are moved to the message that asked.
"""

import json
import lzma
import pathlib
import random

import jinja2
from jinja2.sandbox import ImmutableSandboxedEnvironment

HERE = pathlib.Path(__file__).parent
TEMPLATES = {
    "31b": HERE / "gemma4-31b.jinja",
    "31b-interleaved": HERE / "gemma4-31b-interleaved.jinja",
}
CONVERSATIONS = 240
EMPTY_THOUGHT = "<|channel>thought\n<channel|>"
pick = random.Random(20261116)
widen = random.Random(20261117)
bound = random.Random(20261118)

LARGE = [2**64, -(2**63) - 1, 12345678901234567890123, 2**128 - 1, -(2**127), 2**128, -(10**60) - 7, 10**400 + 1]

WORDS = [
    "fox", "Home", " snow", "é", "Straße", "Жук", "я", "漢字", "🦊", "a<b", "c>d", "<|turn>", "<turn|>", "<|\"|>", "<eos>",
    "<|tool_call>", "\n", "\t", "  ", "\x1c", "\x1f", "\u00a0", "\u2028", "\u3000", "{", "}", "{{ x }}", "\"", "'", "\\", ":",
    ",", "0", "None", "true", "<|channel>thought", "<channel|>", "&amp;", "\u200b", "\x85",
]
KEYS = ["city", "City", "a<b", "a0", "aZ", "É", "ß", "z", "Я", "ж", "x_1", "type", "name", "B", "b", "İ", "ς", "Σ", "unit"]


def text(most=6):
    return "".join(pick.choice(WORDS) + pick.choice(["", " "]) for _ in range(pick.randint(0, most)))


def word():
    return pick.choice(["weather", "Find", "send_mail", "f2", "größe"])


def value(depth=0):
    kind = pick.randint(0, 9 if depth < 3 else 6)
    if kind <= 1:
        return text(3)
    if kind == 2:
        return pick.choice([0, 1, -7, 2**53 + 1, -(2**63), 2**64 - 1, pick.randint(-(10**18), 10**18)])
    if kind in (3, 4):
        return pick.choice([
            2.9393722140683574, 0.1, 1e22, 1.5e-7, 1e16, 123456789.125, -0.0, 5e-324, 1.7976931348623157e308, 1e-5, 0.0001,
            pick.random() * 10 ** pick.randint(-20, 20), float(pick.randint(-1000, 1000)),
        ])
    if kind == 5:
        return pick.choice([True, False])
    if kind == 6:
        return None
    if kind == 7:
        return [value(depth + 1) for _ in range(pick.randint(0, 3))]
    return {key: value(depth + 1) for key in pick.sample(KEYS, pick.randint(0, 4))}


def arguments():
    return {key: value() for key in pick.sample(KEYS, pick.randint(0, 5))}


def widened(value):
    """The same with integers beyond 64 bits here and there."""
    if isinstance(value, dict):
        return {key: widened(one) for key, one in value.items()}
    if isinstance(value, list):
        return [widened(one) for one in value]
    if isinstance(value, int) and not isinstance(value, bool) and widen.random() < 0.4:
        return widen.choice(LARGE)
    return value


def schema(depth=0):
    kind = pick.choice(["string", "number", "integer", "boolean", "array", "object"] if depth < 2 else ["string", "Number"])
    made = {"type": kind}
    if pick.random() < 0.6:
        made["description"] = text(3)
    if pick.random() < 0.2:
        made["nullable"] = True
    if kind == "string" and pick.random() < 0.4:
        made["enum"] = [text(1) for _ in range(pick.randint(1, 3))]
    if kind == "array":
        made["items"] = schema(depth + 1)
    if kind == "object":
        made["properties"] = {key: schema(depth + 1) for key in pick.sample(KEYS, pick.randint(0, 4))}
        if pick.random() < 0.5:
            made["required"] = pick.sample(KEYS, pick.randint(1, 2))
    return made


def bounded(schema):
    """The same with large bounds on items of lists, of which templates write every keyword."""
    if isinstance(schema, dict):
        for key, one in schema.items():
            bounded(one)
            if key == "items" and isinstance(one, dict) and "type" in one and bound.random() < 0.5:
                one.update(bound.choice([{"minimum": bound.choice(LARGE)}, {"enum": [bound.choice(LARGE), 7]}]))
    return schema


def tool():
    function = {"name": word(), "description": text(4)}
    parameters = schema()
    parameters["type"] = "object"
    parameters.setdefault("properties", {key: schema(1) for key in pick.sample(KEYS, pick.randint(1, 4))})
    for key in ("items", "enum", "nullable"):
        parameters.pop(key, None)
    function["parameters"] = parameters
    if pick.random() < 0.25:
        function["response"] = {"type": "object", "description": text(2)}
    return {"type": "function", "function": function}


def content():
    if pick.random() < 0.3:
        return [{"type": "text", "text": text(3)} for _ in range(pick.randint(2, 3))]
    return text()


def answer(messages, number):
    message = {"role": "assistant", "content": content()}
    if pick.random() < 0.3:
        message[pick.choice(["reasoning", "reasoning_content"])] = text() or "hm"
    messages.append(message)
    if pick.random() < 0.5:
        return
    calls = [
        {"id": f"c{number}_{n}", "type": "function", "function": {"name": word(), "arguments": widened(arguments())}}
        for n in range(pick.randint(1, 3))
    ]
    message["tool_calls"] = calls
    if pick.random() < 0.5:
        message["content"] = pick.choice(["", None])
    how = pick.random()
    if how < 0.25:
        message["tool_responses"] = [
            {"name": call["function"]["name"], "response": widened(pick.choice([arguments(), text(2) or "ok"]))} for call in calls
        ]
    elif how < 0.85:
        for call in calls:
            messages.append({
                "role": "tool", "tool_call_id": call["id"], "name": call["function"]["name"],
                "content": text() if pick.random() < 0.7 else [{"type": "text", "text": text(2)} for _ in range(2)],
            })
        if pick.random() < 0.7:
            answer(messages, number + 100)


def conversation():
    messages = []
    if pick.random() < 0.5:
        messages.append({"role": pick.choice(["system", "developer"]), "content": text()})
    for turn in range(pick.randint(1, 4)):
        messages.append({"role": "user", "content": content()})
        answer(messages, turn)
    if pick.random() < 0.6:
        messages.append({"role": "user", "content": content()})
    return {
        "messages": messages,
        "tools": [bounded(tool()) for _ in range(pick.choice([0, 0, 1, 2, 3]))],
        "thinking": pick.random() < 0.4,
        "generation_prompt": pick.random() < 0.8,
    }


def environment():
    made = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"])
    made.filters["tojson"] = lambda x, indent=None: json.dumps(x, ensure_ascii=False, indent=indent)
    return made


def rendered(template, source, case):
    if "tool_call_id" not in source and any(message["role"] == "tool" for message in case["messages"]):
        return None
    made = template.render(
        messages=case["messages"], tools=case["tools"] or None, bos_token="<bos>", eos_token="<eos>",
        enable_thinking=case["thinking"], add_generation_prompt=case["generation_prompt"],
    )
    # A prompt that ends in a closed turn is given the model's, as the template begins it elsewhere.
    if case["generation_prompt"] and made.endswith("<turn|>\n"):
        made += "<|turn>model\n"
        if not case["thinking"] and "'<|channel>thought\\n<channel|>'" in source:
            made += EMPTY_THOUGHT
    return made


def main():
    sources = {name: path.read_text() for name, path in TEMPLATES.items()}
    templates = {name: environment().from_string(source) for name, source in sources.items()}
    cases = []
    while len(cases) < CONVERSATIONS:
        case = conversation()
        try:
            case["renders"] = {name: rendered(templates[name], sources[name], case) for name in templates}
        except (TypeError, jinja2.TemplateError):
            continue  # what the templates themselves cannot render
        cases.append(case)
    packed = lzma.compress(json.dumps(cases, ensure_ascii=False).encode(), format=lzma.FORMAT_XZ, check=lzma.CHECK_CRC32, preset=9)
    (HERE / "renders.json.xz").write_bytes(packed)
    print(f"{len(cases)} conversations, {len(packed)} bytes")


main()
