// However a stream is cut into pieces, its events are the same.
import assert from "node:assert/strict";
import test from "node:test";
import { SseParser, readEvents } from "../../../api_proc/page/static/sse.mjs";

const parse = (pieces) => {
  const parser = new SseParser();
  return pieces.flatMap((piece) => parser.push(piece));
};
const TEXT = [
  ": keep-alive\n\n",
  'data: {"a": "ü🙂"}\nid: r.7\n\n',
  "data:no space\r\ndata:  two\r\n\r\n",
  "event: x\rdata\r\r",
  "unknown: y\nid\n\n",
  "id: with\0null\ndata: [DONE]\n\n",
].join("");
const EVENTS = [
  { type: "message", data: '{"a": "ü🙂"}', id: "r.7" },
  { type: "message", data: "no space\n two", id: "r.7" },
  { type: "x", data: "", id: "r.7" },
  { type: "message", data: "[DONE]", id: "" },
];

test("events of a whole text", () => assert.deepEqual(parse([TEXT]), EVENTS));

test("events of every cut into two pieces, and of single characters", () => {
  for (let at = 0; at <= TEXT.length; at++) {
    assert.deepEqual(parse([TEXT.slice(0, at), TEXT.slice(at)]), EVENTS, `cut at ${at}`);
  }
  assert.deepEqual(parse([...TEXT]), EVENTS);
});

test("an unfinished event is not reported", () => {
  assert.deepEqual(parse(["data: a\n\ndata: b\n"]), [{ type: "message", data: "a", id: "" }]);
});

test("an event without an end is an error, not a growing buffer", () => {
  const parser = new SseParser();
  assert.throws(() => {
    for (let i = 0; i < 200; i++) parser.push("x".repeat(2 ** 16));
  }, /too long/);
});

test("a long event in small pieces takes linear time", () => {
  const parser = new SseParser();
  const startedAt = performance.now();
  for (let i = 0; i < 2 ** 17; i++) parser.push("data: x".repeat(8));
  const [event] = parser.push("\n\n");
  assert.equal(event.data.length, 2 ** 17 * 56 - 6);
  assert.ok(performance.now() - startedAt < 3000);
});

test("characters that are cut between two chunks of bytes", async () => {
  const bytes = new TextEncoder().encode(TEXT);
  const body = new ReadableStream({
    start(controller) {
      for (const byte of bytes) controller.enqueue(new Uint8Array([byte]));
      controller.close();
    },
  });
  const events = [];
  for await (const event of readEvents(body)) events.push(event);
  assert.deepEqual(events, EVENTS);
});
