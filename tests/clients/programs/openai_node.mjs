// OpenAI's client for JavaScript, version 6.

import assert from "node:assert/strict";
import OpenAI from "openai";
import { zodFunction, zodResponseFormat } from "openai/helpers/zod";
import { z } from "zod";
import { MODEL, URL, check, main, requireRoute } from "./checks.mjs";

const client = new OpenAI({ baseURL: URL + "/v1", maxRetries: 0, timeout: 60_000 });
const messages = [{ role: "user", content: "Hello" }];
const short = { model: MODEL, messages, max_tokens: 12, temperature: 0 };
const long = { ...short, max_tokens: 300 };
const oneCall = { tool_choice: "required", parallel_tool_calls: false };
const Colour = z.object({ name: z.enum(["red", "green", "blue"]), shade: z.enum(["1", "2", "3"]) });
const Weather = z.object({ city: z.enum(["Rome", "Oslo"]) });

check("models", async () => {
  const ids = [];
  for await (const model of client.models.list()) ids.push(model.id);
  assert.ok(ids.includes(MODEL));
});

check("chat", async () => {
  const answer = await client.chat.completions.create(short);
  assert.equal(answer.choices[0].message.role, "assistant");
  assert.equal(answer.usage.completion_tokens, 12);
});

check("stream helper", async () => {
  const whole = await client.chat.completions.create(short);
  const stream = client.chat.completions.stream({ ...short, stream_options: { include_usage: true } });
  let text = "";
  for await (const chunk of stream) text += chunk.choices[0]?.delta?.content ?? "";
  assert.equal(text, whole.choices[0].message.content);
  assert.equal((await stream.totalUsage()).completion_tokens, 12);
});

check("parse", async () => {
  const answer = await client.chat.completions.parse({
    ...long,
    response_format: zodResponseFormat(Colour, "colour"),
  });
  Colour.parse(answer.choices[0].message.parsed);
});

check("parsed tools", async () => {
  const answer = await client.chat.completions.parse({
    ...long,
    tools: [zodFunction({ name: "weather", parameters: Weather })],
    ...oneCall,
  });
  Weather.parse(answer.choices[0].message.tool_calls[0].function.parsed_arguments);
});

function weatherTool(cities) {
  return {
    type: "function",
    function: {
      name: "weather",
      description: "The weather in a city.",
      parameters: {
        type: "object",
        properties: { city: { enum: ["Rome", "Oslo"] } },
        required: ["city"],
      },
      parse: JSON.parse,
      function: ({ city }) => {
        cities.push(city);
        return `sunny in ${city}`;
      },
    },
  };
}

check("runTools", async () => {
  const cities = [];
  const runner = client.chat.completions.runTools(
    { ...long, tools: [weatherTool(cities)], ...oneCall },
    { maxChatCompletions: 2 },
  );
  await runner.done();
  assert.ok(cities.length >= 2);
  const roles = runner.messages.map((message) => message.role);
  assert.deepEqual(roles.slice(0, 3), ["user", "assistant", "tool"]);
});

check("runTools with a stream", async () => {
  const cities = [];
  const runner = client.chat.completions.runTools(
    { ...long, stream: true, tools: [weatherTool(cities)], ...oneCall },
    { maxChatCompletions: 2 },
  );
  await runner.done();
  assert.ok(cities.length >= 2);
});

check("embeddings", async () => {
  const { data } = await client.embeddings.create({ model: MODEL, input: ["a", "b"] });
  assert.equal(data.length, 2);
  assert.ok(data[0].embedding.length > 1);
});

check("errors", async () => {
  await assert.rejects(client.chat.completions.create({ ...short, temperature: 9 }), (error) => {
    assert.ok(error instanceof OpenAI.BadRequestError);
    assert.equal(error.param, "temperature");
    return true;
  });
});

check("responses", async () => {
  await requireRoute("/v1/responses");
  const options = { model: MODEL, input: "Hello", max_output_tokens: 12, temperature: 0 };
  const whole = await client.responses.create(options);
  const stream = client.responses.stream(options);
  let text = "";
  for await (const event of stream) if (event.type === "response.output_text.delta") text += event.delta;
  assert.equal(text, whole.output_text);
});

await main();
