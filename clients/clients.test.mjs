// openai, Anthropic's SDK, the AI SDK and ollama from npm against the server.

import assert from "node:assert/strict";
import { after, before, describe, test } from "node:test";
import { setTimeout as sleep } from "node:timers/promises";

import Anthropic from "@anthropic-ai/sdk";
import { createAnthropic } from "@ai-sdk/anthropic";
import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateText, jsonSchema, Output, stepCountIs, streamText, tool } from "ai";
import { Ollama } from "ollama";
import OpenAI from "openai";
import { zodResponseFormat } from "openai/helpers/zod";
import { z } from "zod";

import { HELLO, start, WEATHER, WEATHER_TOOL } from "./server.mjs";

// Bounded, because the demo model hardly ever ends a text it has no idea of.
const Person = z.object({ name: z.string().max(16), age: z.number().int().min(0).max(150) });
const hello = [{ role: "user", content: "Hello!" }];
const paris = [{ role: "user", content: "What is the weather in Paris?" }];
const sum = [{ role: "user", content: "What is 347 + 285?" }];

let server;
before(async () => {
  server = await start();
});
after(() => server.stop());

describe("openai", () => {
  let client;
  before(() => {
    client = new OpenAI({ baseURL: server.url + "/v1", apiKey: "none", maxRetries: 0 });
  });

  test("whole and streamed are the same", async () => {
    const whole = await client.chat.completions.create({ model: "demo", messages: hello, temperature: 0 });
    assert.equal(whole.choices[0].message.content, HELLO);
    const stream = client.chat.completions.stream({ model: "demo", messages: hello, temperature: 0 });
    const final = await stream.finalChatCompletion();
    assert.equal(final.choices[0].message.content, HELLO);
    assert.equal(final.choices[0].finish_reason, "stop");
  });

  test("thinking", async () => {
    const answer = await client.chat.completions.create({ model: "demo", messages: sum, temperature: 0, reasoning_effort: "low" });
    assert.match(answer.choices[0].message.content, /632/);
    assert.ok(answer.choices[0].message.reasoning_content);
  });

  test("a tool is run by the helper", async () => {
    let asked;
    const runner = client.chat.completions.runTools({
      model: "demo",
      temperature: 0,
      messages: paris,
      tools: [
        {
          type: "function",
          function: {
            ...WEATHER_TOOL.function,
            parse: JSON.parse,
            function: (args) => {
              asked = args;
              return JSON.stringify({ temperature: 21 });
            },
          },
        },
      ],
    });
    assert.match(await runner.finalContent(), /21/);
    assert.deepEqual(asked, { city: "Paris" });
  });

  test("a streamed call", async () => {
    const stream = client.chat.completions.stream({ model: "demo", messages: paris, tools: [WEATHER_TOOL], temperature: 0 });
    const call = (await stream.finalChatCompletion()).choices[0].message.tool_calls[0];
    assert.deepEqual(JSON.parse(call.function.arguments), { city: "Paris" });
  });

  test("parse", async () => {
    const parsed = await client.chat.completions.parse({
      model: "demo",
      temperature: 0,
      max_tokens: 600,
      messages: [{ role: "user", content: "Make up a person." }],
      response_format: zodResponseFormat(Person, "person"),
    });
    Person.parse(parsed.choices[0].message.parsed);
  });

  test("responses", async () => {
    const tools = [{ ...WEATHER_TOOL.function, type: "function", strict: true }];
    const stream = client.responses.stream({ model: "demo", input: "What is the weather in Paris?", tools, temperature: 0 });
    const final = await stream.finalResponse();
    const call = final.output.at(-1);
    assert.equal(call.name, "get_weather");
    assert.deepEqual(JSON.parse(call.arguments), { city: "Paris" });
    const whole = await client.responses.create({ model: "demo", input: "Hello!", temperature: 0 });
    assert.equal(whole.output_text, HELLO);
  });

  test("errors have their classes", async () => {
    const long = [{ role: "user", content: "word ".repeat(5000) }];
    await assert.rejects(client.chat.completions.create({ model: "demo", messages: long }), (e) => e instanceof OpenAI.BadRequestError && e.code === "context_length_exceeded");
  });

  test("a client that leaves is forgotten", async () => {
    const stream = await client.chat.completions.create({ model: "demo", messages: [{ role: "user", content: "Tell me a story." }], stream: true, ignore_eos: true });
    let count = 0;
    for await (const _ of stream) if (++count === 3) break;
    for (let n = 0; n < 50 && (await server.running()) > 0; n++) await sleep(10);
    assert.equal(await server.running(), 0);
  });
});

describe("anthropic", () => {
  let client;
  const tools = [{ name: "get_weather", description: "Get the weather in a city", input_schema: WEATHER }];
  const ask = (messages, more) => ({ model: "demo", max_tokens: 600, temperature: 0, messages, ...more });
  before(() => {
    client = new Anthropic({ baseURL: server.url, apiKey: "none", maxRetries: 0 });
  });

  test("whole, streamed, counted", async () => {
    const whole = await client.messages.create(ask(hello));
    assert.equal(whole.content[0].text, HELLO);
    const final = await client.messages.stream(ask(hello)).finalMessage();
    assert.equal(final.content[0].text, HELLO);
    assert.equal(final.stop_reason, "end_turn");
    const count = await client.messages.countTokens({ model: "demo", messages: hello });
    assert.equal(count.input_tokens, final.usage.input_tokens + (final.usage.cache_read_input_tokens ?? 0));
  });

  test("thinking and tools", async () => {
    const thought = await client.messages.stream(ask(sum, { thinking: { type: "enabled", budget_tokens: 1024 }, max_tokens: 1500 })).finalMessage();
    assert.deepEqual(thought.content.map((block) => block.type), ["thinking", "text"]);
    const call = (await client.messages.stream(ask(paris, { tools })).finalMessage()).content.at(-1);
    assert.deepEqual([call.name, call.input], ["get_weather", { city: "Paris" }]);
  });
});

describe("AI SDK", () => {
  const weather = tool({
    description: "Get the weather in a city",
    inputSchema: jsonSchema(WEATHER),
    execute: async () => ({ temperature: 21 }),
  });

  for (const [name, model] of [
    ["openai-compatible", () => createOpenAICompatible({ name: "carat", baseURL: server.url + "/v1", supportsStructuredOutputs: true })("demo")],
    ["openai responses", () => createOpenAI({ baseURL: server.url + "/v1", apiKey: "none" }).responses("demo")],
    ["anthropic", () => createAnthropic({ baseURL: server.url + "/v1", apiKey: "none" })("demo")],
  ]) {
    test(name + ": text, stream, tools", async () => {
      const common = { model: model(), temperature: 0, maxRetries: 0 };
      assert.equal((await generateText({ ...common, prompt: "Hello!" })).text, HELLO);
      let text = "";
      for await (const piece of streamText({ ...common, prompt: "Hello!", onError: ({ error }) => assert.fail(error) }).textStream) text += piece;
      assert.equal(text, HELLO);
      const result = await generateText({
        ...common,
        prompt: "What is the weather in Paris?",
        tools: { get_weather: weather },
        stopWhen: stepCountIs(2),
      });
      assert.deepEqual(result.steps[0].toolCalls[0].input, { city: "Paris" });
      assert.match(result.text, /21/);
    });
  }

  test("openai-compatible: object and reasoning", async () => {
    const carat = createOpenAICompatible({ name: "carat", baseURL: server.url + "/v1", supportsStructuredOutputs: true });
    const common = { model: carat("demo"), temperature: 0, maxRetries: 0, maxOutputTokens: 600 };
    const made = await generateText({ ...common, prompt: "Make up a person.", output: Output.object({ schema: Person }) });
    Person.parse(made.output);
    const thought = await generateText({ ...common, prompt: "What is 347 + 285?", providerOptions: { carat: { reasoningEffort: "low" } } });
    assert.match(thought.text, /632/);
    assert.ok(thought.reasoningText);
  });
});

describe("ollama", () => {
  test("chat", async () => {
    const client = new Ollama({ host: server.url });
    const options = { temperature: 0 };
    assert.equal((await client.chat({ model: "demo", messages: hello, options })).message.content, HELLO);
    let text = "";
    for await (const piece of await client.chat({ model: "demo", messages: hello, options, stream: true })) text += piece.message.content;
    assert.equal(text, HELLO);
    const called = await client.chat({ model: "demo", messages: paris, tools: [WEATHER_TOOL], options });
    assert.deepEqual(called.message.tool_calls[0].function.arguments, { city: "Paris" });
  });
});
