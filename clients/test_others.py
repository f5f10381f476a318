"""Python clients that build on others' protocols: Anthropic's, LangChain, pydantic-ai, instructor, Ollama's."""

import unittest
from typing import Literal

import anthropic
import httpx
import instructor
import ollama
import openai
from langchain_openai import ChatOpenAI
from pydantic import BaseModel
from pydantic_ai import Agent
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.output import NativeOutput
from pydantic_ai.providers.openai import OpenAIProvider

from server import HELLO, WEATHER, WEATHER_TOOL, Server


class Weather(BaseModel):
    """Bounded, because the demo model hardly ever ends a text it has no idea of."""

    sky: Literal["clear", "rain", "snow"]
    warm: bool


def setUpModule():
    global server
    server = Server()


def tearDownModule():
    server.stop()


class Anthropic(unittest.TestCase):
    TOOL = {"name": "get_weather", "description": "Get the weather in a city", "input_schema": WEATHER}

    def setUp(self):
        self.client = anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0)
        self.addCleanup(self.client.close)

    def ask(self, text, **more):
        greedy = {"temperature": 0}
        return dict(model="demo", max_tokens=400, extra_body=greedy, messages=[{"role": "user", "content": text}], **more)

    def test_whole_streamed_and_counted(self):
        whole = self.client.messages.create(**self.ask("Hello!"))
        self.assertEqual(whole.content[0].text, HELLO)
        self.assertEqual(whole.stop_reason, "end_turn")
        with self.client.messages.stream(**self.ask("Hello!")) as stream:
            self.assertEqual("".join(stream.text_stream), HELLO)
            final = stream.get_final_message()
        count = self.client.messages.count_tokens(model="demo", messages=[{"role": "user", "content": "Hello!"}])
        usage = final.usage
        self.assertEqual(count.input_tokens, usage.input_tokens + (usage.cache_read_input_tokens or 0))

    def test_thinking(self):
        answer = self.client.messages.create(
            **{**self.ask("What is 347 + 285?"), "thinking": {"type": "enabled", "budget_tokens": 1024}, "max_tokens": 1500}
        )
        kinds = [block.type for block in answer.content]
        self.assertEqual(kinds, ["thinking", "text"])
        self.assertIn("632", answer.content[1].text)
        self.assertTrue(answer.content[0].thinking)

    def test_tool_round_trip(self):
        question = {"role": "user", "content": "What is the weather in Paris?"}
        with self.client.messages.stream(**self.ask("What is the weather in Paris?", tools=[self.TOOL])) as stream:
            first = stream.get_final_message()
        self.assertEqual(first.stop_reason, "tool_use")
        call = first.content[-1]
        self.assertEqual((call.name, call.input), ("get_weather", {"city": "Paris"}))
        result = {"role": "user", "content": [{"type": "tool_result", "tool_use_id": call.id, "content": '{"temperature": 21}'}]}
        second = self.client.messages.create(
            model="demo", max_tokens=200, extra_body={"temperature": 0}, tools=[self.TOOL],
            messages=[question, {"role": "assistant", "content": first.content}, result],
        )
        self.assertIn("21", second.content[0].text)

    def test_stop_sequence(self):
        answer = self.client.messages.create(**self.ask("Hello!", stop_sequences=["help yo"]))
        self.assertEqual((answer.stop_reason, answer.stop_sequence), ("stop_sequence", "help yo"))
        self.assertEqual(answer.content[0].text, "Hello! How can I ")

    def test_parse(self):
        parsed = self.client.messages.parse(**self.ask("What is the weather in Paris?"), output_format=Weather)
        self.assertIsInstance(parsed.parsed_output, Weather)

    def test_errors(self):
        with self.assertRaises(anthropic.BadRequestError) as raised:
            self.client.messages.create(**self.ask("word " * 5000))
        self.assertIn("prompt is too long", str(raised.exception))
        self.assertEqual([m.id for m in self.client.models.list()], ["demo"])


class LangChain(unittest.TestCase):
    def setUp(self):
        self.model = ChatOpenAI(base_url=server.url + "/v1", api_key="none", model="demo", temperature=0, max_retries=0)

    def test_chat_and_stream(self):
        self.assertEqual(self.model.invoke("Hello!").content, HELLO)
        self.assertEqual("".join(piece.content for piece in self.model.stream("Hello!")), HELLO)

    def test_tools(self):
        bound = self.model.bind_tools([WEATHER_TOOL])
        call = bound.invoke("What is the weather in Paris?").tool_calls[0]
        self.assertEqual((call["name"], call["args"]), ("get_weather", {"city": "Paris"}))
        streamed = None
        for piece in bound.stream("What is the weather in Paris?"):
            streamed = piece if streamed is None else streamed + piece
        self.assertEqual(streamed.tool_calls[0]["args"], {"city": "Paris"})

    def test_structured(self):
        person = self.model.with_structured_output(Weather).invoke("What is the weather in Paris?")
        self.assertIsInstance(person, Weather)


class PydanticAi(unittest.TestCase):
    def agent(self, **more):
        client = httpx.AsyncClient()
        provider = OpenAIProvider(base_url=server.url + "/v1", api_key="none", http_client=client)
        return Agent(OpenAIChatModel("demo", provider=provider), model_settings={"temperature": 0, "max_tokens": 600}, **more)

    def test_text(self):
        self.assertEqual(self.agent().run_sync("Hello!").output, HELLO)

    def test_native_output(self):
        self.assertIsInstance(self.agent(output_type=NativeOutput(Weather)).run_sync("What is the weather in Paris?").output, Weather)

    def test_output_by_a_required_call(self):
        self.assertIsInstance(self.agent(output_type=Weather).run_sync("What is the weather in Paris?").output, Weather)


class Instructor(unittest.TestCase):
    def test_modes(self):
        with openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0) as plain:
            for mode in [instructor.Mode.TOOLS, instructor.Mode.JSON_SCHEMA]:
                client = instructor.from_openai(plain, mode=mode)
                person = client.chat.completions.create(
                    model="demo", response_model=Weather, max_retries=1, temperature=0, max_tokens=600,
                    messages=[{"role": "user", "content": "What is the weather in Paris?"}],
                )
                self.assertIsInstance(person, Weather, mode)


class Ollama(unittest.TestCase):
    def setUp(self):
        self.client = ollama.Client(host=server.url)

    def test_chat(self):
        messages = [{"role": "user", "content": "Hello!"}]
        options = {"temperature": 0}
        self.assertEqual(self.client.chat("demo", messages, options=options).message.content, HELLO)
        pieces = list(self.client.chat("demo", messages, options=options, stream=True))
        self.assertEqual("".join(p.message.content or "" for p in pieces), HELLO)
        self.assertTrue(pieces[-1].done)
        self.assertEqual(pieces[-1].done_reason, "stop")

    def test_tools_thinking_format(self):
        messages = [{"role": "user", "content": "What is the weather in Paris?"}]
        call = self.client.chat("demo", messages, tools=[WEATHER_TOOL], options={"temperature": 0}).message.tool_calls[0]
        self.assertEqual((call.function.name, dict(call.function.arguments)), ("get_weather", {"city": "Paris"}))
        messages = [{"role": "user", "content": "What is 347 + 285?"}]
        answer = self.client.chat("demo", messages, think=True, options={"temperature": 0}).message
        self.assertIn("632", answer.content)
        self.assertTrue(answer.thinking)
        messages = [{"role": "user", "content": "What is the weather in Paris?"}]
        answer = self.client.chat("demo", messages, format=Weather.model_json_schema(), options={"temperature": 0})
        self.assertIsInstance(Weather.model_validate_json(answer.message.content), Weather)

    def test_generate_and_lists(self):
        done = self.client.generate("demo", "Hello!", options={"temperature": 0})
        self.assertEqual(done.response, HELLO)
        self.assertEqual(self.client.list().models[0].model, "demo:latest")
        self.assertIn("completion", self.client.show("demo").capabilities)
        self.assertEqual(len(self.client.ps().models), 1)
        with self.assertRaises(ollama.ResponseError):
            self.client.pull("other")


if __name__ == "__main__":
    unittest.main()
