// What the chunks of an answer add up to, and what the next request contains.
import assert from "node:assert/strict";
import test from "node:test";
import {
  Conversation, DEFAULT_SETTINGS, MAX_STORED_CHARS, loadSettings, makeRequest, saveSettings,
} from "../../../api_proc/page/static/conversation.mjs";
import { Reply, describeMetrics } from "../../../api_proc/page/static/reply.mjs";

const chunk = (delta, usage = null, finish_reason = null) => ({
  choices: [{ index: 0, delta, finish_reason }], usage,
});

test("content, reasoning and tool calls of a chat", () => {
  const reply = new Reply(10);
  reply.add(chunk({ role: "assistant", content: "" }), 10.1);
  reply.add(chunk({ reasoning_content: "hm" }), 10.5);
  reply.add(chunk({ content: "a" }), 10.6);
  reply.add(chunk({ tool_calls: [{ index: 1, id: "y", type: "function", function: { name: "g" } }] }), 11);
  reply.add(chunk({ tool_calls: [{ index: 0, id: "x", function: { name: "f", arguments: "{" } }] }), 11);
  reply.add(chunk({ tool_calls: [{ index: 0, function: { arguments: "}" } }] }), 11);
  reply.add(chunk({ tool_calls: [{ index: 1e9, function: { name: "z" } }] }), 11);
  reply.add(chunk({}, null, "tool_calls"), 11);
  assert.equal(reply.reasoning, "hm");
  assert.equal(reply.content, "a");
  assert.deepEqual(reply.toolCalls, [
    { id: "x", name: "f", arguments: "{}" }, { id: "y", name: "g", arguments: "" }]);
  assert.equal(reply.metrics().finishReason, "tool_calls");
});

test("times and tokens of a completion, as a person reads them", () => {
  const reply = new Reply(100);
  const usage = (completion_tokens) => ({
    prompt_tokens: 48, completion_tokens, prompt_tokens_details: { cached_tokens: 32 },
  });
  reply.add({ choices: [{ text: "a" }], usage: usage(2) }, 100.05);
  reply.add({ choices: [{ text: "b" }], usage: usage(6) }, 100.35);
  reply.add({ choices: [{ text: "c", finish_reason: "length" }], usage: usage(12) }, 101.05);
  reply.add({ choices: [], usage: usage(12) }, 101.06);
  const { tokensPerSecond, firstToken, longestPause, ...rest } = reply.metrics();
  assert.ok(Math.abs(tokensPerSecond - 10) < 1e-6);
  assert.ok(Math.abs(firstToken - 0.05) < 1e-6);
  assert.ok(Math.abs(longestPause - 0.7) < 1e-6);
  assert.deepEqual(rest, { tokens: 12, promptTokens: 48, cachedTokens: 32, finishReason: "length" });
  assert.equal(describeMetrics(reply.metrics()), "12 tokens · 10 tokens/s · first token 50 ms · "
    + "32 of 48 prompt tokens cached · longest pause 700 ms · length");
  assert.equal(describeMetrics(new Reply(0).metrics()), "");
});

const USER = { role: "user", content: "hi" };

test("a chat's request has the system prompt, the history and the settings that are set", () => {
  const settings = { ...DEFAULT_SETTINGS, system: "be brief", temperature: "0", seed: " 7 ",
    tools: '[{"type": "function"}]' };
  const calls = [{ id: "x", name: "f", arguments: "{}" }];
  const history = [USER, { role: "assistant", content: "", error: "failed", toolCalls: [] },
    { role: "assistant", content: "", reasoning: "r", toolCalls: calls },
    { role: "tool", content: "4", toolCallId: "x" }];
  const { path, body } = makeRequest(history, settings, "m", true);
  assert.equal(path, "v1/chat/completions");
  assert.deepEqual(body, {
    model: "m",
    stream: true,
    stream_options: { include_usage: true, continuous_usage_stats: true },
    temperature: 0,
    seed: 7,
    messages: [
      { role: "system", content: "be brief" },
      USER,
      { role: "assistant", content: null,
        tool_calls: [{ id: "x", type: "function", function: { name: "f", arguments: "{}" } }] },
      { role: "tool", content: "4", tool_call_id: "x" },
    ],
    tools: [{ type: "function" }],
  });
});

test("a completion's prompt is the whole text", () => {
  const history = [USER, { role: "assistant", content: " there" }, { role: "user", content: "!" }];
  const { path, body } = makeRequest(history, DEFAULT_SETTINGS, "m", false);
  assert.equal(path, "v1/completions");
  assert.equal(body.prompt, "hi there!");
  assert.equal(body.max_tokens, 256);
});

test("settings that cannot be sent are named", () => {
  for (const [wrong, text] of [[{ seed: "x" }, /seed/], [{ tools: "{" }, /JSON/], [{ tools: "{}" }, /list/]]) {
    assert.throws(() => makeRequest([USER], { ...DEFAULT_SETTINGS, ...wrong }, "m", true), text);
  }
});

class Storage {
  values = new Map();
  getItem(key) {
    return this.values.get(key) ?? null;
  }
  setItem(key, value) {
    this.values.set(key, value);
  }
  removeItem(key) {
    this.values.delete(key);
  }
}

test("a conversation comes back; the oldest messages go once it is too long", () => {
  const storage = new Storage();
  const conversation = new Conversation(storage);
  conversation.add(USER);
  assert.deepEqual(new Conversation(storage).messages, [USER]);
  for (let i = 0; i < 30; i++) conversation.add({ role: "user", content: `${i}`.padEnd(100_000, "x") });
  const [text] = storage.values.values();
  assert.ok(text.length <= MAX_STORED_CHARS + 2);
  const { messages } = new Conversation(storage);
  assert.ok(messages.length === 10 && messages.at(-1).content.startsWith("29"));
  assert.equal(conversation.messages.length, 31);
  conversation.truncate(0);
  assert.deepEqual(new Conversation(storage).messages, []);
});

test("a store that is damaged, full or forbidden is as an empty one", () => {
  for (const text of ["{", "null", "7", '[{"role": "admin", "content": "x"}, 3, {"role": "user"}]']) {
    const storage = new Storage();
    storage.getItem = () => text;
    assert.deepEqual(new Conversation(storage).messages, []);
    assert.deepEqual(loadSettings(storage), DEFAULT_SETTINGS);
  }
  const closed = new Proxy({}, { get() {
    throw new Error("forbidden");
  } });
  const conversation = new Conversation(closed);
  conversation.add(USER);
  assert.deepEqual(conversation.messages, [USER]);
});

test("settings come back, and only known ones", () => {
  const storage = new Storage();
  saveSettings(storage, { ...DEFAULT_SETTINGS, seed: "4", other: "x" });
  assert.deepEqual(loadSettings(storage), { ...DEFAULT_SETTINGS, seed: "4" });
});
