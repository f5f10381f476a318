// The pages in a real browser, against `carat serve` with the demo model.

import assert from "node:assert/strict";
import fs from "node:fs";
import { createRequire } from "node:module";
import { after, before, describe, test } from "node:test";

import { chromium } from "playwright-core";

import { start } from "./server.mjs";

const AXE = fs.readFileSync(createRequire(import.meta.url).resolve("axe-core/axe.min.js"), "utf8");
const SHOTS = process.env.SHOTS;
const PHONE = { viewport: { width: 360, height: 740 }, hasTouch: true, isMobile: true };
/** Far above what it takes, for machines that are busy with other things. */
const PATIENCE = 30_000;

let server, browser;
before(async () => {
  server = await start();
  browser = await chromium.launch({ executablePath: process.env.CHROMIUM || undefined, args: ["--no-sandbox"] });
});
after(async () => {
  await browser?.close();
  await server?.stop();
});

/** Runs `steps` on a page of a fresh profile; anything that the page complains about fails. */
async function visit(options, steps, path = "/", base = server.url) {
  const context = await browser.newContext({ viewport: { width: 1200, height: 800 }, ...options });
  context.setDefaultTimeout(PATIENCE);
  const page = await context.newPage();
  const complaints = [];
  page.on("pageerror", (error) => complaints.push(error.message));
  page.on("console", (message) => message.type() === "error" && complaints.push(message.text()));
  try {
    await page.goto(base + path);
    await steps(page, context);
  } finally {
    await context.close();
  }
  assert.deepEqual(complaints.filter((text) => !options.expects?.test(text)), []);
}

const ready = (page) => page.waitForSelector('#state[data-state="ready"]');
const idle = (page) => page.waitForSelector("#send:not([hidden])");
const answers = (page) => page.locator(".message.assistant");

async function ask(page, text) {
  const count = await answers(page).count();
  await page.fill("#input", text);
  await page.press("#input", "Enter");
  await answers(page).nth(count).waitFor();
  await idle(page);
  return answers(page).last();
}

/** Settings of the conversation, by the labels that a person reads. */
async function set(page, change) {
  await page.click("#gear");
  await change(page.locator("#settings"));
  await page.click("#settings [data-close]");
}

async function accessible(page, name) {
  // The page's rules keep scripts out; the checker goes in past them, as an extension would.
  const session = await page.context().newCDPSession(page);
  await session.send("Page.setBypassCSP", { enabled: true });
  await page.evaluate(AXE);
  const { violations } = await page.evaluate(() => globalThis.axe.run(document, { runOnly: ["wcag2a", "wcag2aa", "wcag21aa", "best-practice"] }));
  const told = violations.map(({ id, help, nodes }) => `${name}: ${id}: ${help}: ${nodes.map((node) => node.target).join(" | ")}`);
  assert.deepEqual(told, []);
}

const shoot = async (page, name) => SHOTS && page.screenshot({ path: `${SHOTS}/${name}.png` });

describe("chat", () => {
  test("an answer streams, and says what it took", () =>
    visit({}, async (page) => {
      await ready(page);
      await set(page, (settings) => settings.getByLabel("Temperature").fill("0"));
      await page.evaluate(() => {
        globalThis.lengths = new Set();
        new MutationObserver(() => globalThis.lengths.add(document.querySelector(".message.assistant .prose")?.textContent.length)).observe(document.body, { childList: true, subtree: true, characterData: true });
      });
      const answer = await ask(page, "Tell me a story about a fox.");
      assert.ok((await answer.locator(".prose").innerText()).length > 100);
      assert.ok((await page.evaluate(() => globalThis.lengths.size)) > 2, "the text came in one piece");
      assert.match(await answer.locator(".figures").innerText(), /\d+ tokens · [\d.,]+\/s · first after \d+ ms · \d+\/\d+ cached.* · seed \d+/);
      assert.match(await page.innerText("#used"), /^\d+ \/ 2,048$/);
      const whole = await fetch(server.url + "/v1/chat/completions", {
        method: "POST",
        headers: { "Content-Type": "application/json" },
        body: JSON.stringify({ messages: [{ role: "user", content: "Tell me a story about a fox." }], temperature: 0 }),
      }).then((r) => r.json());
      const words = (text) => text.replace(/\s+/g, " ").trim();
      assert.equal(words(await answer.locator(".prose").innerText()), words(whole.choices[0].message.content));
    }));

  test("a second turn is cached, and a seed gives the same answer again", () =>
    visit({}, async (page) => {
      await ready(page);
      const first = await ask(page, "Tell me a story about a fox.");
      const text = await first.locator(".prose").innerText();
      await first.getByRole("button", { name: /^seed/ }).click();
      await page.waitForSelector("text=2/2");
      await idle(page);
      assert.equal(await answers(page).last().locator(".prose").innerText(), text);
      // More than a page of the cache before the first answer, whatever that is.
      await page.keyboard.press("Control+Shift+O");
      await ask(page, "The fox is small and likes the wood. ".repeat(12));
      const second = await ask(page, "And what did the fox do then?");
      const [, cached] = /(\d+)\/\d+ cached/.exec(await second.locator(".figures").innerText());
      assert.ok(Number(cached) > 0);
    }));

  test("Esc stops, and the answer goes on from there", () =>
    visit({}, async (page) => {
      await ready(page);
      // Nothing ends this but a stop.
      await set(page, async (settings) => {
        await settings.getByLabel("Answer as").selectOption("schema");
        await settings.getByLabel("JSON schema").fill('{"type":"array","items":{"type":"integer"},"minItems":900}');
      });
      await page.fill("#input", "Count.");
      await page.press("#input", "Enter");
      await page.waitForFunction(() => (document.querySelector(".message.assistant .prose")?.textContent.length ?? 0) > 40);
      await page.keyboard.press("Escape");
      await idle(page);
      const answer = answers(page).last();
      assert.match(await answer.locator(".figures").innerText(), /^stopped/);
      const before = (await answer.locator(".prose").innerText()).length;
      await page.waitForFunction((url) => fetch(url + "/metrics").then((r) => r.text()).then((text) => /num_requests_running\{.*\} 0$/m.test(text)), server.url);
      await set(page, (settings) => settings.getByLabel("Answer as").selectOption("text"));
      await set(page, (settings) => settings.getByLabel("Most tokens").fill("8"));
      await answer.getByRole("button", { name: "Continue" }).click();
      await idle(page);
      assert.ok((await answers(page).last().locator(".prose").innerText()).length > before);
    }));

  test("an edit makes a branch, and both are kept", () =>
    visit({}, async (page) => {
      await ready(page);
      await ask(page, "What is 12 + 30?");
      await page.press("#input", "ArrowUp");
      assert.equal(await page.inputValue("#input"), "What is 12 + 30?");
      await page.fill("#input", "What is 347 + 285?");
      await page.press("#input", "Enter");
      await page.waitForSelector(".user .versions >> text=2/2");
      await idle(page);
      assert.match(await page.innerText(".message.user .typed"), /347/);
      await page.click('.user [aria-label="Previous version"]');
      assert.match(await page.innerText(".message.user .typed"), /12 \+ 30/);
      await page.click('.user [aria-label="Next version"]');
      assert.match(await page.innerText(".message.user .typed"), /347/);
      await answers(page).last().getByRole("button", { name: "Another answer" }).click();
      await page.waitForSelector(".assistant .versions >> text=2/2");
      await idle(page);
    }));

  test("a thought is folded, and no part of what is copied", () =>
    visit({ permissions: ["clipboard-read", "clipboard-write"] }, async (page) => {
      await ready(page);
      await set(page, (settings) => settings.getByLabel("Temperature").fill("0"));
      await page.selectOption("#think", "low");
      const answer = await ask(page, "What is 347 + 285?");
      assert.match(await answer.locator(".thinking summary").innerText(), /^Thought for [\d.]+ m?s$/);
      assert.equal(await answer.locator(".thought").isVisible(), false);
      await answer.locator(".thinking summary").click();
      assert.ok((await answer.locator(".thought").innerText()).length > 10);
      const text = await answer.locator(".prose").innerText();
      assert.match(text, /632/);
      await answer.getByRole("button", { name: "Copy", exact: true }).click();
      assert.equal(await page.evaluate(() => navigator.clipboard.readText()), text);
    }));

  test("a tool is called: the page answers its own, the reader the others", () =>
    visit({}, async (page) => {
      await ready(page);
      await set(page, async (settings) => {
        await settings.getByLabel("Temperature").fill("0");
        await settings.getByLabel("Your own").fill(JSON.stringify([
          { name: "get_weather", description: "Get the weather in a city", parameters: { type: "object", properties: { city: { type: "string", description: "The name of the city" } }, required: ["city"] } },
        ]));
        await settings.getByLabel("get_weather").check();
      });
      const asked = await ask(page, "What is the weather in Paris?");
      assert.equal(await asked.locator(".call h3").innerText(), "get_weather");
      assert.match(await asked.locator(".call table").innerText(), /city\s+Paris/);
      await asked.getByLabel("Result of get_weather").fill('{"temperature": 21, "condition": "sunny"}');
      await asked.getByRole("button", { name: "Send result" }).click();
      await page.waitForFunction(() => document.querySelectorAll(".message.assistant").length === 2);
      await idle(page);
      assert.match(await answers(page).last().locator(".prose").innerText(), /21|sunny/);
    }));

  test("a function of the reader's own runs apart from the page", () =>
    visit({}, async (page) => {
      await ready(page);
      const run = (code) => page.evaluate((code) => import("/web/tools.js").then(({ run }) => run({ name: "t", code }, '{"a": 2, "b": 40}')).catch((error) => `failed: ${error.message}`), code);
      assert.equal(await run("return args.a + args.b"), "42");
      assert.match(await run("throw new Error('no')"), /^failed: .*no/);
      assert.match(await run("return document.title"), /^failed: /);
      assert.match(await run("return (await fetch('/health')).status"), /^failed: /);
      assert.match(await run("return localStorage.length"), /^failed: /);
      const sums = ["1 + 2 * 3", "(1 + 2) * 3", "2 ^ 3 ^ 2", "-2 ^ 2", "10 % 4 / 2", "sqrt(16) + 1e3", "1,000 * 3"];
      const values = await page.evaluate((sums) => import("/web/tools.js").then(({ calculate }) => sums.map((sum) => calculate(sum))), sums);
      assert.deepEqual(values, [7, 9, 512, -4, 1, 1004, 3000]);
    }, "/"));

  test("an answer fits its schema, and a schema that is none is told", () =>
    visit({}, async (page) => {
      await ready(page);
      await set(page, async (settings) => {
        await settings.getByLabel("Answer as").selectOption("schema");
        await settings.getByLabel("JSON schema").fill('{"type":');
        assert.match(await settings.locator(".bad").first().innerText(), /no JSON schema yet/);
        await settings.getByLabel("JSON schema").fill('{"type":"object","properties":{"animal":{"enum":["fox","owl"]},"legs":{"type":"integer","minimum":2,"maximum":4}},"required":["animal","legs"]}');
      });
      assert.equal(await page.innerText("#chips"), "Schema");
      const answer = await ask(page, "Name an animal.");
      const value = JSON.parse(await answer.locator(".prose").innerText());
      assert.ok(["fox", "owl"].includes(value.animal) && value.legs >= 2 && value.legs <= 4);
    }));

  test("conversations are listed, searched, renamed, exported, imported and deleted", () =>
    visit({ acceptDownloads: true }, async (page) => {
      await ready(page);
      await ask(page, "Hello!");
      await page.keyboard.press("Control+Shift+O");
      await ask(page, "Tell me a story about an owl.");
      assert.equal(await page.locator("#list .open").count(), 2);
      await page.reload();
      await ready(page);
      assert.equal(await page.locator("#list .open").count(), 2);
      await page.keyboard.press("Control+k");
      await page.keyboard.type("owl");
      await page.waitForFunction(() => document.querySelectorAll("#list .open").length === 1);
      await page.click("#list .open");
      await answers(page).first().waitFor();
      await page.fill("#search", "");
      await page.waitForFunction(() => document.querySelectorAll("#list .open").length === 2);
      await page.hover("#list >> text=Hello!");
      await page.getByRole("button", { name: "Rename Hello!" }).click();
      await page.getByLabel("Title", { exact: true }).fill("Greetings");
      await page.keyboard.press("Enter");
      await page.waitForSelector("#list >> text=Greetings");
      await page.click("#all");
      const [download] = await Promise.all([page.waitForEvent("download"), page.click("#export")]);
      const file = await download.path();
      const exported = JSON.parse(fs.readFileSync(file, "utf8"));
      assert.equal(exported.conversations.length, 2);
      page.once("dialog", (dialog) => dialog.accept());
      await page.click("#clear");
      await page.waitForFunction(() => document.querySelectorAll("#list .open").length === 0);
      await page.setInputFiles("#import-file", { name: "c.json", mimeType: "application/json", buffer: fs.readFileSync(file) });
      await page.waitForFunction(() => document.querySelectorAll("#list .open").length === 2);
      await page.setInputFiles("#import-file", { name: "d.json", mimeType: "application/json", buffer: Buffer.from('{"nodes":{"a":{"id":"b"}}}') });
      await page.waitForSelector("#notice >> text=could not be imported");
    }));

  test("a long paste and a file become attachments, a picture is refused in words", () =>
    visit({}, async (page) => {
      await ready(page);
      await page.evaluate(() => {
        const data = new DataTransfer();
        data.setData("text/plain", "word ".repeat(900));
        document.getElementById("input").dispatchEvent(new ClipboardEvent("paste", { clipboardData: data, cancelable: true }));
      });
      await page.waitForSelector("#files >> text=Pasted text 1");
      await page.click('[aria-label="Remove Pasted text 1"]');
      await page.setInputFiles("#picker", { name: "note.txt", mimeType: "text/plain", buffer: Buffer.from("The fox is red.") });
      await page.waitForSelector("#files >> text=note.txt");
      await page.setInputFiles("#picker", { name: "fox.png", mimeType: "image/png", buffer: Buffer.from("no") });
      await page.waitForSelector("#notice >> text=takes text only");
      await ask(page, "What colour is the fox?");
      assert.match(await page.innerText(".user .file summary"), /note\.txt/);
    }));

  test("what goes wrong is told where it happened, with a way on", () =>
    visit({ expects: /400|status of/ }, async (page) => {
      await ready(page);
      const answer = await ask(page, "word ".repeat(3000));
      assert.match(await answer.locator(".error").innerText(), /maximum context length/);
      await answer.getByRole("button", { name: "Try again" }).waitFor();
    }));
});

describe("hostile answers", () => {
  // The model is made to write it by a schema with a single value, so that it goes the way of every answer.
  const HOSTILE = [
    '<img src=x onerror="globalThis.ran = 1"><script>globalThis.ran = 2</script><svg/onload=globalThis.ran=3>',
    "[click](javascript:globalThis.ran=4) ![i](javascript:globalThis.ran=5) [d](data:text/html,<script>globalThis.ran=6</script>) <javascript:globalThis.ran=7>",
    "[a](https://example.com/\" onmouseover=\"globalThis.ran=8) <a href=\"javascript:globalThis.ran=9\">x</a> <iframe srcdoc=\"<script>parent.ran=10</script>\">",
    "\u202egpj.exe\u202c & <b>bold</b> &lt;img src=x onerror=globalThis.ran=11&gt;",
  ];

  test("nothing that an answer spells runs", () =>
    visit({}, async (page) => {
      await ready(page);
      for (const text of HOSTILE) {
        await page.evaluate(() => document.getElementById("new").click());
        await set(page, async (settings) => {
          await settings.getByLabel("Answer as").selectOption("schema");
          await settings.getByLabel("JSON schema").fill(JSON.stringify({ const: text, type: "string" }));
        });
        const answer = await ask(page, "Hello!");
        assert.ok((await answer.locator(".prose").innerText()).length > 20);
        await checkHarmless(page);
        await answer.getByRole("button", { name: "Show as written" }).click();
        await checkHarmless(page);
      }
    }));

  test("nor whatever else a file of answers holds, in any pieces", () =>
    visit({}, async (page) => {
      await ready(page);
      const samples = fs.readFileSync(new URL("./hostile.md", import.meta.url), "utf8").split("\n=====\n");
      const trees = await page.evaluate(async (samples) => {
        const { Markdown } = await import("/web/markdown.js");
        const html = (text, pieces) => {
          const root = document.createElement("div");
          document.getElementById("messages").append(root);
          const markdown = new Markdown(root);
          for (const piece of pieces(text)) markdown.push(piece);
          markdown.end();
          return new XMLSerializer().serializeToString(root);
        };
        let seed = 1;
        const random = () => (seed = (seed * 48271) % 2147483647) / 2147483647;
        const cut = (text) => {
          const parts = [];
          while (text) {
            const at = 1 + Math.floor(random() * random() * 40);
            parts.push(text.slice(0, at));
            text = text.slice(at);
          }
          return parts;
        };
        return samples.map((text) => [html(text, (t) => [t]), html(text, (t) => [...t]), html(text, cut), html(text, cut)]);
      }, samples);
      for (const [n, [whole, ...others]] of trees.entries()) {
        for (const other of others) assert.equal(other, whole, `sample ${n} depends on its pieces`);
      }
      await checkHarmless(page);
    }));

  test("a huge answer keeps the page alive", () =>
    visit({}, async (page) => {
      await ready(page);
      const took = await page.evaluate(async () => {
        const { Markdown } = await import("/web/markdown.js");
        const texts = ["| a | b |\n|---|---|\n" + "| x | y |\n".repeat(3000), "*_[`(".repeat(2000), "> ".repeat(5000) + "deep", "- ".repeat(3000) + "deep", "word ".repeat(10000), "```\n" + "code\n".repeat(8000)];
        const began = performance.now();
        for (const text of texts) {
          const markdown = new Markdown(document.createElement("div"));
          for (let at = 0; at < text.length; at += 64) markdown.push(text.slice(at, at + 64));
          markdown.end();
        }
        return performance.now() - began;
      });
      assert.ok(took < 30_000, `${took} ms`);
    }));

  async function checkHarmless(page) {
    await page.waitForTimeout(50);
    const found = await page.evaluate(() => ({
      ran: globalThis.ran,
      scripts: document.querySelectorAll("#messages script, #messages iframe, #messages svg[onload], #messages img[src='x'], #messages object, #messages style, #messages form").length,
      handlers: [...document.querySelectorAll("#messages *")].flatMap((e) => [...e.attributes]).filter((a) => /^on/.test(a.name)).length,
      links: [...document.querySelectorAll("#messages a")].map((a) => a.protocol).filter((p) => !["http:", "https:", "mailto:"].includes(p)),
    }));
    assert.deepEqual(found, { ran: undefined, scripts: 0, handlers: 0, links: [] });
  }
});

describe("markdown", () => {
  const CASES = [
    ["a **b** *c* ~~d~~ `e`", "<p>a <strong>b</strong> <em>c</em> <del>d</del> <code>e</code></p>"],
    ["***a*** **b*c*** 2*3*4 snake_case_name", "<p><em><strong>a</strong></em> <strong>b<em>c</em></strong> 2<em>3</em>4 snake_case_name</p>"],
    ["# One\n### Three\ntext", "<h2>One</h2><h4>Three</h4><p>text</p>"],
    ["- a\n- b\n  - c\n- d\n\nend", "<ul><li><p>a</p></li><li><p>b</p><ul><li><p>c</p></li></ul></li><li><p>d</p></li></ul><p>end</p>"],
    ["3. a\n4. b", '<ol start="3"><li><p>a</p></li><li><p>b</p></li></ol>'],
    ["> a\n> b\n\nc", "<blockquote><p>a<br>b</p></blockquote><p>c</p>"],
    ["x\n---\ny", "<p>x</p><hr><p>y</p>"],
    ["[a](https://b.example/c?d=1) <https://e.example> https://f.example/g.", '<p><a>a</a> <a>https://e.example</a> <a>https://f.example/g</a>.</p>'],
    ["2 < 3 & 4 > 1 \\*no\\*", "<p>2 &lt; 3 &amp; 4 &gt; 1 *no*</p>"],
    ["costs $5 and $6, but $a_b$ and \\(x*y*z\\)", '<p>costs $5 and $6, but <span>$a_b$</span> and <span>\\(x*y*z\\)</span></p>'],
    ["**open", "<p>**open</p>"],
  ];

  test("reads as it should", () =>
    visit({}, async (page) => {
      const made = await page.evaluate(async (texts) => {
        const { Markdown } = await import("/web/markdown.js");
        return texts.map((text) => {
          const root = document.createElement("div");
          const markdown = new Markdown(root);
          markdown.push(text);
          markdown.end();
          for (const e of root.querySelectorAll("*")) for (const a of [...e.attributes]) if (a.name !== "start") e.removeAttribute(a.name);
          root.normalize();
          return new XMLSerializer().serializeToString(root).replace(/^<div[^>]*>|<\/div>$/g, "").replaceAll(' xmlns="http://www.w3.org/1999/xhtml"', "").replace(/<(br|hr) \/>/g, "<$1>");
        });
      }, CASES.map(([text]) => text));
      assert.deepEqual(made, CASES.map(([, html]) => html));
    }));

  test("code is coloured, tables are tables", () =>
    visit({}, async (page) => {
      const found = await page.evaluate(async () => {
        const { Markdown } = await import("/web/markdown.js");
        const root = document.createElement("div");
        const markdown = new Markdown(root);
        markdown.push("| a | b |\n|:-:|--:|\n| 1 \\| 2 | `x|y` |\n\n```python\n# note\ndef f(x):\n    return 'a' + \"\"\"b\nc\"\"\" # 42\n```\n");
        markdown.end();
        const texts = (selector) => [...root.querySelectorAll(selector)].map((e) => e.textContent);
        return { cells: texts("td"), comments: texts("code .c"), words: texts("code .k"), calls: texts("code .f"), code: root.querySelector("pre code").textContent };
      });
      assert.deepEqual(found.cells, ["1 | 2", "x|y"]);
      assert.deepEqual(found.comments, ["# note", "# 42"]);
      assert.deepEqual(found.words, ["def", "return"]);
      assert.deepEqual(found.calls, ["f"]);
      assert.equal(found.code, "# note\ndef f(x):\n    return 'a' + \"\"\"b\nc\"\"\" # 42");
    }));
});

describe("dashboard", () => {
  test("shows what runs, and ends it", () =>
    visit({}, async (page, context) => {
      await ready(page);
      const long = fetch(server.url + "/v1/chat/completions", {
        method: "POST",
        headers: { "Content-Type": "application/json", "x-request-id": "long-one" },
        body: JSON.stringify({ messages: [{ role: "user", content: "Go on." }], ignore_eos: true, max_tokens: 1900, logit_bias: {} }),
      }).then((r) => r.json());
      await page.waitForSelector("#requests >> text=long-one");
      await page.getByRole("button", { name: "Cancel long-one" }).click();
      const answer = await long;
      assert.ok(answer.usage.completion_tokens < 1900, "it was cancelled too late to tell");
      await page.waitForSelector("#requests >> text=No requests under way.");
      assert.match(await page.innerText("#pages"), /\d+ in use/);
      assert.match(await page.innerText("#ends"), /abort\s+\d+/);
      assert.match(await page.innerText("#latest"), /long-one\s+(too short|nothing begins like it|it differs after that)/);
      await shoot(page, "dashboard");
      await accessible(page, "dashboard");
    }, "/dashboard"));
});

describe("everywhere", () => {
  for (const colorScheme of ["light", "dark"]) {
    test(`accessible, ${colorScheme}`, () =>
      visit({ colorScheme }, async (page) => {
        await ready(page);
        await accessible(page, "welcome");
        await page.selectOption("#think", "low");
        await ask(page, "What is 347 + 285?");
        await ask(page, "Tell me a story about a fox.");
        await page.waitForTimeout(300);
        await accessible(page, "chat");
        await shoot(page, `chat-${colorScheme}`);
        await page.click("#gear");
        await accessible(page, "settings");
      }));
  }

  test("fits a phone", () =>
    visit(PHONE, async (page) => {
      await ready(page);
      await ask(page, "Tell me a story about a fox.");
      const wide = await page.evaluate(() => document.documentElement.scrollWidth > innerWidth || document.getElementById("messages").scrollWidth > innerWidth);
      assert.equal(wide, false, "the page scrolls sideways");
      assert.equal(await page.locator("#side").isVisible(), false);
      await shoot(page, "phone");
      await page.tap("#menu");
      await page.locator("#list .open").first().waitFor();
      await page.waitForTimeout(250);
      await accessible(page, "phone");
      const small = await page.evaluate(() => [...document.querySelectorAll("button, select")].filter((e) => e.checkVisibility() && e.getBoundingClientRect().height < 24).map((e) => e.outerHTML.slice(0, 80)));
      assert.deepEqual(small.filter((html) => !html.includes("link")), []);
    }));

  test("at twice the size nothing is lost", () =>
    visit({ viewport: { width: 600, height: 400 } }, async (page) => {
      await ready(page);
      await ask(page, "Hello!");
      assert.equal(await page.evaluate(() => document.documentElement.scrollWidth > innerWidth), false);
      await page.locator("#send").scrollIntoViewIfNeeded();
      assert.ok(await page.locator("#send").isVisible());
    }));

  test("light to load, soon there, and nothing from elsewhere", async () => {
    const hosts = new Set();
    const bodies = [];
    const context = await browser.newContext();
    const page = await context.newPage();
    page.on("response", (response) => {
      hosts.add(new URL(response.url()).origin);
      if (/\/$|\/web\//.test(response.url())) bodies.push(response.body());
    });
    await page.goto(server.url + "/");
    await ready(page);
    const bytes = (await Promise.all(bodies)).reduce((sum, body) => sum + body.length, 0);
    const usable = Number(await page.evaluate(() => document.documentElement.dataset.ready));
    await context.close();
    console.log(`${bytes} bytes, usable after ${usable} ms`);
    assert.ok(bytes > 60_000 && bytes < 120_000, `${bytes} bytes`);
    assert.ok(usable < 2000, `${usable} ms`);
    assert.deepEqual([...hosts], [server.url]);
    const head = await fetch(server.url + "/");
    const tag = head.headers.get("etag");
    assert.equal((await fetch(server.url + "/", { headers: { "if-none-match": tag } })).status, 304);
  });

  test("a model is chosen by name, and loaded when it is asked", async () => {
    const file = "../../assets/pip-q8_0.gguf";
    const two = await start("-m", `small=${file}`, "-m", `large=${file}`, "--models-memory", "1GiB");
    const says = (page, text) => page.waitForFunction((text) => document.getElementById("state-text").textContent === text, text);
    const states = async () => (await (await fetch(two.url + "/v1/models")).json()).data.map((model) => model.status.value);
    try {
      await visit({}, async (page) => {
        await ready(page);
        assert.deepEqual(await page.locator("#model option").allTextContents(), ["small", "large"]);
        await says(page, "unloaded");
        await page.selectOption("#model", "large");
        await ask(page, "Hello!");
        await says(page, "loaded");
        assert.deepEqual(await states(), ["unloaded", "loaded"]);
        // The choice belongs to the conversation, and the next one begins with it.
        await page.click("#new");
        assert.equal(await page.inputValue("#model"), "large");
        await accessible(page, "models");
        await page.goto(two.url + "/dashboard");
        await page.waitForSelector("#models td");
        const cells = await page.locator("#models td").allTextContents();
        assert.deepEqual([cells[0], cells[1], cells[6], cells[7]], ["small", "unloaded", "large", "loaded"]);
        await accessible(page, "models-dashboard");
      }, "/", two.url);
    } finally {
      await two.stop();
    }
  });

  test("a key is asked for once", async () => {
    const keyed = await start("--api-key", "ann=secret-of-ann");
    try {
      await visit({ expects: /401/ }, async (page) => {
        await page.waitForSelector("#key[open]");
        await page.fill("#key-input", "secret-of-ann");
        await page.press("#key-input", "Enter");
        await ready(page);
        await ask(page, "Hello!");
        await page.reload();
        await ready(page);
        await page.goto(keyed.url + "/dashboard");
        await ready(page);
      }, "/", keyed.url);
    } finally {
      await keyed.stop();
    }
  });
});
