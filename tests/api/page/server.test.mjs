// The API key is asked for once; a broken stream is read on from its last event.
import assert from "node:assert/strict";
import test, { beforeEach } from "node:test";
import { Server } from "../../../api_proc/page/static/server.mjs";

let requests;
let answers;
beforeEach(() => {
  requests = [];
  answers = [];
  globalThis.fetch = async (url, { headers, method = "GET", body }) => {
    requests.push({ path: url.pathname.split("/page/").pop(), headers, method, body });
    const answer = answers.shift();
    if (answer instanceof Error) throw answer;
    return answer;
  };
});

const json = (body, status = 200) => new Response(JSON.stringify(body), { status });
const refused = () => json({ error: { message: "a key is needed", code: "invalid_api_key" } }, 401);
const lost = new TypeError("network error");
const never = new AbortController().signal;

// A stream that ends with [DONE], or breaks.
const stream = (text, isBroken = false) => {
  const body = new ReadableStream({
    start(controller) {
      controller.enqueue(new TextEncoder().encode(text));
      if (!isBroken) controller.close();
    },
    pull(controller) {
      if (isBroken) controller.error(lost);
    },
  });
  return new Response(body, { headers: { "x-request-id": "r" } });
};
const event = (value, id) => `data: ${JSON.stringify(value)}\n${id ? `id: r.${id}\n` : ""}\n`;
const read = async (chunks) => {
  const found = [];
  for await (const chunk of chunks) found.push(chunk);
  return found;
};

test("two requests without a key ask for it once, and send its UTF-8", async () => {
  let numAsked = 0;
  const server = new Server(async () => {
    numAsked += 1;
    return "ü";
  });
  answers = [refused(), refused(), json(1), json(2)];
  assert.deepEqual(await Promise.all([server.get("a"), server.get("b")]), [1, 2]);
  assert.equal(numAsked, 1);
  assert.equal(requests[2].headers.authorization, "Bearer \u00c3\u00bc");
});

test("a key that is refused is asked for again; no key is an error", async () => {
  const keys = ["wrong", null];
  const asked = [];
  const server = new Server(async (wasRefused) => {
    asked.push(wasRefused);
    return keys.shift();
  });
  answers = [refused(), refused()];
  await assert.rejects(server.get("a"), { status: 401, message: "a key is needed" });
  assert.deepEqual(asked, [false, true]);
});

test("a background request never asks", async () => {
  const server = new Server(() => assert.fail("asked"));
  answers = [refused()];
  await assert.rejects(server.get("a", true), { status: 401 });
});

test("a broken stream is read on, with the same body", async () => {
  answers = [stream(event(1, 1) + event(2, 2), true), lost, json({}, 503),
    stream(`${event(3, 3)}data: [DONE]\n\n`)];
  assert.deepEqual(await read(new Server().stream("v1/completions", { a: 1 }, never)), [1, 2, 3]);
  assert.deepEqual(new Set(requests.map((request) => request.body)), new Set(['{"a":1}']));
  assert.equal(requests[0].headers["last-event-id"], undefined);
  for (const request of requests.slice(1)) {
    assert.equal(request.headers["x-request-id"], "r");
    assert.equal(request.headers["last-event-id"], "r.2");
  }
});

test("a stream without ids, or that the server has forgotten, ends with its error", async () => {
  answers = [stream(event(1), true)];
  await assert.rejects(read(new Server().stream("x", {}, never)), /was lost/);
  answers = [stream(event(1))];
  await assert.rejects(read(new Server().stream("x", {}, never)), /was lost/);
  answers = [stream(event(1, 1), true), json({ error: { message: "it is over" } }, 404)];
  await assert.rejects(read(new Server().stream("x", {}, never)), /it is over/);
  answers = [stream(event({ error: { message: "failed", code: "internal" } }))];
  await assert.rejects(read(new Server().stream("x", {}, never)), /failed/);
  answers = [stream("data: {\nid: r.1\n\n")];
  await assert.rejects(read(new Server().stream("x", {}, never)), SyntaxError);
  assert.equal(requests.length, 6);
});

test("a stop ends the wait for a lost server", async () => {
  const abort = new AbortController();
  answers = [stream(event(1, 1), true), ...Array(20).fill(lost)];
  setTimeout(() => abort.abort(), 20);
  await assert.rejects(read(new Server().stream("x", {}, abort.signal)), { name: "AbortError" });
});
