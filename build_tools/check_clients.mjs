// Checks a live server with npm's client libraries: node check_clients.mjs URL FOLDER QUESTION.
//
// FOLDER has node_modules; libraries that are not there are skipped. QUESTION is JSON: model, text,
// and a function with its schema. Prints a line of JSON for each check, as check_clients.py does.

import assert from "node:assert";
import { readFileSync } from "node:fs";
import { createRequire } from "node:module";
import { join } from "node:path";
import { pathToFileURL } from "node:url";

const [url, folder, question] = process.argv.slice(2);
const { model, text, fn } = JSON.parse(question);
const require = createRequire(join(folder, "package.json"));
const messages = [{ role: "user", content: text }];
const max = 60;

const load = (name) => import(pathToFileURL(require.resolve(name)));

function isWeather(call) {
  assert(["Bern", "Oslo"].includes(call.city) && call.days >= 1 && call.days <= 3, JSON.stringify(call));
}

async function joined(parts, textOf) {
  let whole = "";
  for await (const part of parts) whole += textOf(part) ?? "";
  assert(whole);
}

async function openai() {
  const { default: OpenAI } = await load("openai");
  const client = new OpenAI({ baseURL: `${url}/v1`, apiKey: "none", maxRetries: 0 });
  const ask = { model, messages, max_tokens: max };
  const { completions } = client.chat;
  return {
    stream: async () =>
      joined(await completions.create({ ...ask, stream: true }), (x) => x.choices[0].delta.content),
    tools: async () => {
      const tools = [{ type: "function", function: { ...fn, strict: true } }];
      const answer = await completions.create({ ...ask, tools, tool_choice: "required" });
      isWeather(JSON.parse(answer.choices[0].message.tool_calls[0].function.arguments));
    },
    schema: async () => {
      const schema = { type: "json_schema", json_schema: { name: "weather", schema: fn.parameters } };
      const answer = await completions.create({ ...ask, response_format: schema });
      isWeather(JSON.parse(answer.choices[0].message.content));
    },
    responses: async () => {
      const first = await client.responses.create({ model, input: text, max_output_tokens: 8 });
      const next = { model, input: "And now?", previous_response_id: first.id, max_output_tokens: 8 };
      const stream = await client.responses.create({ ...next, stream: true });
      await joined(stream, (event) => event.delta);
    },
  };
}

async function anthropic() {
  const { default: Anthropic } = await load("@anthropic-ai/sdk");
  const client = new Anthropic({ baseURL: url, apiKey: "none", maxRetries: 0 });
  const ask = { model, messages, max_tokens: max };
  return {
    stream: async () => {
      const answer = await client.messages.stream(ask).finalMessage();
      assert(answer.content[0].text && answer.usage.output_tokens);
    },
    tools: async () => {
      const tools = [{ name: fn.name, description: fn.description, input_schema: fn.parameters }];
      const answer = await client.messages.create({ ...ask, tools, tool_choice: { type: "any" } });
      isWeather(answer.content.find((block) => block.type === "tool_use").input);
      assert((await client.messages.countTokens({ model, messages })).input_tokens);
    },
  };
}

async function ollama() {
  const { Ollama } = await load("ollama");
  const client = new Ollama({ host: url });
  const ask = { model, messages, options: { num_predict: max } };
  return {
    stream: async () => joined(await client.chat({ ...ask, stream: true }), (x) => x.message.content),
    schema: async () => {
      const answer = await client.chat({ ...ask, format: fn.parameters });
      isWeather(JSON.parse(answer.message.content));
    },
    models: async () => assert((await client.list()).models.length && (await client.ps()).models.length),
  };
}

// The AI SDK, with one of its providers.
const sdk = (provider, make) => async () => {
  const { generateText, jsonSchema, streamText, tool } = await load("ai");
  const ask = { model: make(await load(provider)), prompt: text, maxOutputTokens: max, maxRetries: 0 };
  return {
    stream: async () => {
      const answer = streamText(ask);
      await joined(answer.textStream, (x) => x);
      const past = (await answer.response).messages;
      const question = { role: "user", content: text };
      const next = { ...ask, prompt: undefined, messages: [question, ...past, question] };
      assert((await generateText(next)).text);
    },
    tools: async () => {
      const weather = tool({ description: fn.description, inputSchema: jsonSchema(fn.parameters) });
      const answer = await generateText({ ...ask, tools: { weather }, toolChoice: "required" });
      isWeather(answer.toolCalls[0].input);
    },
  };
};

const compatible = sdk("@ai-sdk/openai-compatible", (x) =>
  x.createOpenAICompatible({ name: "jax", baseURL: `${url}/v1` })(model));
const sdkOpenai = sdk("@ai-sdk/openai", (x) =>
  x.createOpenAI({ baseURL: `${url}/v1`, apiKey: "none" })(model));
const sdkAnthropic = sdk("@ai-sdk/anthropic", (x) =>
  x.createAnthropic({ baseURL: `${url}/v1`, apiKey: "none" })(model));

const clients = {
  openai,
  "@anthropic-ai/sdk": anthropic,
  ollama,
  "@ai-sdk/openai-compatible": compatible,
  "@ai-sdk/openai": sdkOpenai,
  "@ai-sdk/anthropic": sdkAnthropic,
};

for (const [name, make] of Object.entries(clients)) {
  let version;
  try {
    version = JSON.parse(readFileSync(join(folder, "node_modules", name, "package.json"))).version;
  } catch {
    continue;
  }
  const tell = (check, error) =>
    console.log(JSON.stringify([`${name} (npm)`, version, check, error && String(error).slice(0, 500)]));
  let checks;
  try {
    checks = await make();
  } catch (error) {
    tell("import", error);
    continue;
  }
  for (const [check, run] of Object.entries(checks)) {
    try {
      await run();
      tell(check, null);
    } catch (error) {
      tell(check, error);
    }
  }
}
process.exit(0);
