"""openai-python against the server."""

import json
import unittest
from typing import Literal

import openai
from pydantic import BaseModel

from server import HELLO, WEATHER_TOOL, Server


class Weather(BaseModel):
    """Bounded, because the demo model hardly ever ends a text it has no idea of."""

    sky: Literal["clear", "rain", "snow"]
    warm: bool


class OpenAi(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.server = Server()
        cls.client = openai.OpenAI(base_url=cls.server.url + "/v1", api_key="none", max_retries=0)

    @classmethod
    def tearDownClass(cls):
        cls.client.close()
        cls.server.stop()

    def chat(self, text, **more):
        more.setdefault("temperature", 0)
        messages = [{"role": "user", "content": text}]
        return self.client.chat.completions.create(model="demo", messages=messages, **more)

    def test_whole_and_streamed_are_the_same(self):
        whole = self.chat("Hello!")
        self.assertEqual(whole.choices[0].message.content, HELLO)
        self.assertEqual(whole.choices[0].finish_reason, "stop")
        usage = whole.usage
        self.assertEqual(usage.total_tokens, usage.prompt_tokens + usage.completion_tokens)
        text, last = "", None
        for chunk in self.chat("Hello!", stream=True, stream_options={"include_usage": True}):
            if chunk.choices:
                text += chunk.choices[0].delta.content or ""
            last = chunk
        self.assertEqual(text, HELLO)
        self.assertEqual(last.usage.completion_tokens, usage.completion_tokens)

    def test_stream_helper(self):
        messages = [{"role": "user", "content": "What is the weather in Paris?"}]
        with self.client.chat.completions.stream(
            model="demo", messages=messages, tools=[WEATHER_TOOL], temperature=0
        ) as stream:
            for _ in stream:
                pass
            final = stream.get_final_completion()
        self.assertEqual(final.choices[0].message.role, "assistant")
        call = final.choices[0].message.tool_calls[0]
        self.assertEqual(call.function.name, "get_weather")
        self.assertEqual(json.loads(call.function.arguments), {"city": "Paris"})

    def test_thinking(self):
        answer = self.chat("What is 347 + 285?", reasoning_effort="low").choices[0].message
        self.assertIn("632", answer.content)
        self.assertTrue(answer.reasoning_content)
        self.assertNotIn("<", answer.reasoning_content + answer.content)

    def test_tool_round_trip(self):
        question = {"role": "user", "content": "What is the weather in Paris?"}
        first = self.client.chat.completions.create(
            model="demo", messages=[question], tools=[WEATHER_TOOL], temperature=0
        )
        message = first.choices[0].message
        self.assertEqual(first.choices[0].finish_reason, "tool_calls")
        call = message.tool_calls[0]
        result = {"role": "tool", "tool_call_id": call.id, "content": json.dumps({"temperature": 21})}
        second = self.client.chat.completions.create(
            model="demo", messages=[question, message, result], tools=[WEATHER_TOOL], temperature=0
        )
        self.assertIn("21", second.choices[0].message.content)

    def test_required_named_none(self):
        call = self.chat("Hello!", tools=[WEATHER_TOOL], tool_choice="required", max_tokens=80)
        self.assertEqual(call.choices[0].message.tool_calls[0].function.name, "get_weather")
        named = {"type": "function", "function": {"name": "get_weather"}}
        call = self.chat("Hello!", tools=[WEATHER_TOOL], tool_choice=named, max_tokens=80)
        self.assertEqual(len(call.choices[0].message.tool_calls), 1)
        none = self.chat("What is the weather in Paris?", tools=[WEATHER_TOOL], tool_choice="none")
        self.assertIsNone(none.choices[0].message.tool_calls)

    def test_parse(self):
        messages = [{"role": "user", "content": "What is the weather in Paris?"}]
        parsed = self.client.chat.completions.parse(
            model="demo", messages=messages, response_format=Weather, temperature=1, seed=1, max_tokens=400
        )
        self.assertIsInstance(parsed.choices[0].message.parsed, Weather)

    def test_stop_n_seed_logprobs_bias(self):
        self.assertEqual(self.chat("Hello!", stop="help yo").choices[0].message.content, "Hello! How can I ")
        three = self.chat("Tell me a story.", n=3, seed=5, temperature=1, max_tokens=8)
        again = self.chat("Tell me a story.", n=3, seed=5, temperature=1, max_tokens=8)
        texts = [c.message.content for c in three.choices]
        self.assertEqual(texts, [c.message.content for c in again.choices])
        self.assertEqual([c.index for c in three.choices], [0, 1, 2])
        answer = self.chat("Hello!", logprobs=True, top_logprobs=2).choices[0]
        self.assertEqual("".join(t.token for t in answer.logprobs.content), HELLO)
        self.assertTrue(all(len(t.top_logprobs) == 2 for t in answer.logprobs.content))
        first = self.client.post("/../tokenize", body={"content": "Hello"}, cast_to=object)["tokens"][0]
        self.assertFalse(self.chat("Hello!", logit_bias={str(first): -100}).choices[0].message.content.startswith("Hello"))

    def test_stream_helper_with_choices(self):
        messages = [{"role": "user", "content": "Hello!"}]
        with self.client.chat.completions.stream(model="demo", messages=messages, n=3, temperature=0) as stream:
            for _ in stream:
                pass
            self.assertEqual([c.message.content for c in stream.get_final_completion().choices], [HELLO] * 3)

    def test_completions(self):
        done = self.client.completions.create(model="demo", prompt="Once upon a time", max_tokens=6, temperature=0)
        self.assertTrue(done.choices[0].text)
        self.assertEqual(done.choices[0].finish_reason, "length")

    def test_models(self):
        self.assertEqual([m.id for m in self.client.models.list()], ["demo"])
        self.assertEqual(self.client.models.retrieve("demo").id, "demo")

    def test_errors_have_their_classes(self):
        with self.assertRaises(openai.BadRequestError) as raised:
            self.chat("word " * 5000)
        self.assertEqual(raised.exception.code, "context_length_exceeded")
        with self.assertRaises(openai.NotFoundError):
            self.client.get("/nothing", cast_to=object)
        with self.assertRaises(openai.InternalServerError) as raised:
            self.client.embeddings.create(model="demo", input="x")
        self.assertEqual(raised.exception.status_code, 501)

    def test_a_client_that_leaves_is_forgotten(self):
        stream = self.chat("Tell me a story.", stream=True, extra_body={"ignore_eos": True})
        for n, _ in enumerate(stream):
            if n == 3:
                break
        left = self.server.gauge("client_disconnects_total")
        stream.close()
        self.assertTrue(self.server.wait_idle())
        self.assertEqual(self.server.gauge("client_disconnects_total"), left + 1)

    def test_responses(self):
        tools = [{"type": "function", "strict": True, **WEATHER_TOOL["function"]}]
        with self.client.responses.stream(
            model="demo", input="What is the weather in Paris?", tools=tools, temperature=0
        ) as stream:
            kinds = [event.type for event in stream]
            final = stream.get_final_response()
        self.assertEqual(kinds[0], "response.created")
        self.assertEqual(kinds[-1], "response.completed")
        call = final.output[-1]
        self.assertEqual((call.type, call.name), ("function_call", "get_weather"))
        self.assertEqual(json.loads(call.arguments), {"city": "Paris"})
        whole = self.client.responses.create(model="demo", input="Hello!", temperature=0)
        self.assertEqual(whole.output_text, HELLO)
        self.assertEqual(whole.usage.total_tokens, whole.usage.input_tokens + whole.usage.output_tokens)


class Keys(unittest.TestCase):
    def test_a_wrong_key_is_an_authentication_error(self):
        server = Server("--api-key", "right-key")
        try:
            for key, right in [("right-key", True), ("wrong-key", False)]:
                with openai.OpenAI(base_url=server.url + "/v1", api_key=key, max_retries=0) as client:
                    if right:
                        self.assertEqual(len(client.models.list().data), 1)
                    else:
                        with self.assertRaises(openai.AuthenticationError):
                            client.models.list()
        finally:
            server.stop()


class Busy(unittest.TestCase):
    def test_retries_get_every_answer_of_a_small_queue(self):
        import concurrent.futures

        server = Server("--parallel", "1", "--queue", "1")
        try:
            with openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0) as client:
                def ask(retries):
                    messages = [{"role": "user", "content": "Tell me a story."}]
                    return client.with_options(max_retries=retries).chat.completions.create(
                        model="demo", messages=messages, max_tokens=60, temperature=0
                    )

                with concurrent.futures.ThreadPoolExecutor(8) as pool:
                    refused = [f.exception() for f in [pool.submit(ask, 0) for _ in range(8)]]
                    kinds = {type(e) for e in refused if e}
                    self.assertEqual(kinds, {openai.RateLimitError})
                    answers = [f.result() for f in [pool.submit(ask, 10) for _ in range(8)]]
                self.assertEqual(len({a.choices[0].message.content for a in answers}), 1)
        finally:
            server.stop()

    def test_a_killed_server_is_an_error_not_an_end(self):
        server = Server()
        with openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0) as client:
            messages = [{"role": "user", "content": "Tell me a story."}]
            stream = client.chat.completions.create(
                model="demo", messages=messages, stream=True, extra_body={"ignore_eos": True}
            )
            with self.assertRaises(Exception):
                for n, _ in enumerate(stream):
                    if n == 3:
                        server.kill()


if __name__ == "__main__":
    unittest.main()
