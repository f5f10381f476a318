// Starts the server that the tests speak to: the demo model, on a free port.

import { spawn } from "node:child_process";
import readline from "node:readline";

export const HELLO = "Hello! How can I help you today?";
export const WEATHER = {
  type: "object",
  properties: { city: { type: "string", description: "The name of the city" } },
  required: ["city"],
};
export const WEATHER_TOOL = {
  type: "function",
  function: { name: "get_weather", description: "Get the weather in a city", parameters: WEATHER },
};

export async function start(...flags) {
  const child = spawn(process.env.CARAT, ["serve", "--port", "0", ...flags], {
    stdio: ["ignore", "ignore", "pipe"],
  });
  let url;
  for await (const line of readline.createInterface({ input: child.stderr })) {
    url ??= line.match(/listening on (http:\/\/\S+),/)?.[1];
    if (line.includes("ready after")) break;
  }
  if (!url) throw new Error("the server did not start");
  child.stderr.resume();
  return {
    url,
    async running() {
      const page = await (await fetch(url + "/metrics")).text();
      return Number(page.match(/^carat:num_requests_running\{.*\} (\S+)$/m)[1]);
    },
    stop: () =>
      new Promise((done) => {
        child.once("exit", done);
        child.kill("SIGTERM");
      }),
  };
}
