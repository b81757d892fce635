// Vercel's AI SDK 5 with its provider for OpenAI-compatible servers, which checks every chunk.

import assert from "node:assert/strict";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import {
  embed,
  embedMany,
  generateObject,
  generateText,
  stepCountIs,
  streamObject,
  streamText,
  tool,
} from "ai";
import { z } from "zod";
import { MODEL, URL, check, main } from "./checks.mjs";

const provider = createOpenAICompatible({
  name: "troika",
  baseURL: URL + "/v1",
  apiKey: "none",
  includeUsage: true,
  supportsStructuredOutputs: true,
});
const model = provider.chatModel(MODEL);
const short = { model, prompt: "Hello", maxOutputTokens: 12, temperature: 0, maxRetries: 0 };
const long = { ...short, maxOutputTokens: 300 };
const schema = z.object({ name: z.enum(["red", "green", "blue"]), shade: z.enum(["1", "2", "3"]) });

function tools(cities) {
  return {
    weather: tool({
      description: "The weather in a city.",
      inputSchema: z.object({ city: z.enum(["Rome", "Oslo"]) }),
      execute: async ({ city }) => {
        cities.push(city);
        return { weather: "sunny" };
      },
    }),
  };
}

async function streamed(options) {
  const result = streamText({ ...options, onError: () => {} });
  let text = "";
  for await (const part of result.fullStream) {
    if (part.type === "error") throw part.error;
    if (part.type === "text-delta") text += part.text;
  }
  return { text, result };
}

check("generateText", async () => {
  const { text, usage, finishReason } = await generateText(short);
  assert.ok(text);
  assert.equal(usage.outputTokens, 12);
  assert.equal(finishReason, "length");
});

check("streamText", async () => {
  const whole = await generateText(short);
  const { text, result } = await streamed(short);
  assert.equal(text, whole.text);
  assert.equal((await result.usage).outputTokens, 12);
});

check("generateObject", async () => {
  schema.parse((await generateObject({ ...long, schema })).object);
});

check("streamObject", async () => {
  const result = streamObject({ ...long, schema, onError: () => {} });
  for await (const part of result.fullStream) if (part.type === "error") throw part.error;
  schema.parse(await result.object);
});

check("tools", async () => {
  const cities = [];
  const { steps } = await generateText({
    ...long,
    tools: tools(cities),
    toolChoice: { type: "tool", toolName: "weather" },
    stopWhen: stepCountIs(2),
  });
  assert.equal(steps.length, 2);
  assert.ok(cities.length >= 2);
  assert.ok(steps.every((step) => step.finishReason === "tool-calls"));
});

check("streamed tools", async () => {
  const cities = [];
  const { result } = await streamed({
    ...long,
    tools: tools(cities),
    toolChoice: { type: "tool", toolName: "weather" },
    stopWhen: stepCountIs(2),
  });
  assert.equal((await result.steps).length, 2);
  assert.equal(cities.length, 2);
});

check("completion model", async () => {
  const { text } = await generateText({ ...short, model: provider.completionModel(MODEL) });
  assert.ok(text);
});

check("embed", async () => {
  const embedder = provider.textEmbeddingModel(MODEL);
  const { embedding } = await embed({ model: embedder, value: "a text", maxRetries: 0 });
  const { embeddings } = await embedMany({ model: embedder, values: ["a text", "b"], maxRetries: 0 });
  assert.deepEqual(embeddings[0], embedding);
});

await main();
