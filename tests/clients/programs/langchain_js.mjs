// LangChain's models of JavaScript for OpenAI's API.

import assert from "node:assert/strict";
import { tool } from "@langchain/core/tools";
import { ChatOpenAI, OpenAI, OpenAIEmbeddings } from "@langchain/openai";
import { z } from "zod";
import { MODEL, URL, check, main } from "./checks.mjs";

const configuration = { baseURL: URL + "/v1" };
const common = { model: MODEL, apiKey: "none", configuration, maxRetries: 0 };
const schema = z.object({ name: z.enum(["red", "green", "blue"]) });
const weather = tool(({ city }) => `sunny in ${city}`, {
  name: "weather",
  description: "The weather in a city.",
  schema: z.object({ city: z.enum(["Rome", "Oslo"]) }),
});

function model(maxTokens = 300, options = {}) {
  return new ChatOpenAI({ ...common, temperature: 0, maxTokens, ...options });
}

async function total(stream) {
  let sum;
  for await (const chunk of stream) sum = sum === undefined ? chunk : sum.concat(chunk);
  return sum;
}

check("invoke", async () => {
  const answer = await model(12).invoke("Hello");
  assert.ok(answer.content);
  assert.equal(answer.usage_metadata.output_tokens, 12);
});

check("stream", async () => {
  const whole = await model(12).invoke("Hello");
  const sum = await total(await model(12).stream("Hello"));
  assert.equal(sum.content, whole.content);
  assert.equal(sum.usage_metadata.output_tokens, 12);
});

check("batch", async () => {
  const answers = await model(12).batch(["Hello", "Hello"]);
  assert.equal(answers[0].content, answers[1].content);
});

check("bind tools", async () => {
  const options = { tool_choice: "required", parallel_tool_calls: false };
  const answer = await model().bindTools([weather], options).invoke("Hello");
  const results = [];
  for (const call of answer.tool_calls) results.push(await weather.invoke(call));
  assert.match(results[0].content, /^sunny in /);
  const history = [{ role: "user", content: "Hello" }, answer, ...results];
  assert.ok((await model(12).bindTools([weather]).invoke(history)).content);
});

check("tool stream", async () => {
  const bound = model().bindTools([weather], { tool_choice: "weather" });
  const sum = await total(await bound.stream("Hello"));
  assert.ok(["Rome", "Oslo"].includes(sum.tool_calls[0].args.city));
});

check("structured output", async () => {
  for (const method of ["jsonSchema", "functionCalling"]) {
    schema.parse(await model().withStructuredOutput(schema, { method }).invoke("Hello"));
  }
});

check("responses", async () => {
  const answer = await model(16, { useResponsesApi: true }).invoke("Hello");
  assert.ok(answer.text);
});

check("completions", async () => {
  const answer = await new OpenAI({ ...common, maxTokens: 5 }).invoke("def a(");
  assert.equal(typeof answer, "string");
});

check("embeddings", async () => {
  const embedder = new OpenAIEmbeddings(common);
  const [first, second] = await embedder.embedDocuments(["a text", "another"]);
  assert.deepEqual(await embedder.embedQuery("a text"), first);
  assert.notDeepEqual(first, second);
});

check("errors", async () => {
  await assert.rejects(model(12, { temperature: 9 }).invoke("Hello"), /temperature/);
});

await main();
