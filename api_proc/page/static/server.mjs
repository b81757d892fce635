// Requests to this server: the API key, errors, streams that are resumed.

import { readEvents } from "./sse.mjs";

const KEY = "troika.key";
const MAX_TRIES = 12;
const LONGEST_WAIT_MS = 2000;
const ROOT = new URL("../", import.meta.url);

export class ApiError extends Error {
  constructor(status, { message, code, param } = {}) {
    super(message || `The server answered with status ${status}.`);
    this.status = status;
    this.code = code ?? null;
    this.param = param ?? null;
  }
}

class Interrupted extends Error {
  constructor() {
    super("The connection to the server was lost before the answer was complete.");
  }
}

export class Server {
  #askForKey;
  #asking = null;
  #key = readKey();

  // `askForKey(wasRefused)` returns a promise of the key, or of null.
  constructor(askForKey) {
    this.#askForKey = askForKey;
  }

  // Return the response if it is good; throws an ApiError otherwise. A background request does not
  // ask for a key.
  async request(path, options = {}, isBackground = false) {
    for (;;) {
      const key = this.#key;
      const headers = { ...options.headers };
      if (key) headers.authorization = `Bearer ${asBytes(key)}`;
      const response = await fetch(new URL(path, ROOT), { ...options, headers });
      if (response.ok) return response;
      const error = await readError(response);
      if (response.status !== 401 || isBackground) throw error;
      if (this.#key === key && !(await this.#renewKey(key !== null))) throw error;
    }
  }

  // Ask once for any number of requests; false: there is no key.
  #renewKey(wasRefused) {
    this.#asking ??= this.#askForKey(wasRefused)
      .then((key) => {
        if (key) {
          this.#key = key;
          keepKey(key);
        }
        return Boolean(key);
      })
      .finally(() => {
        this.#asking = null;
      });
    return this.#asking;
  }

  async get(path, isBackground = false) {
    const signal = AbortSignal.timeout(isBackground ? 2000 : 10_000);
    const response = await this.request(path, { signal, cache: "no-store" }, isBackground);
    return response.json();
  }

  // Yield the chunks of a streamed answer. After a lost connection it is read on from where it
  // stopped, where the server's events have ids: see docs/resumption.md.
  async *stream(path, body, signal) {
    const text = JSON.stringify(body);
    const place = { requestId: null, eventId: "" };
    for (let numTries = 1; ; numTries++) {
      try {
        for await (const chunk of this.#read(path, text, place, signal)) {
          numTries = 0;
          yield chunk;
        }
        return;
      } catch (error) {
        // Browsers report a broken connection as a TypeError.
        const isLost = error instanceof TypeError || error instanceof Interrupted;
        const mayRetry = (isLost || error.status === 503) && place.eventId && numTries < MAX_TRIES;
        if (signal.aborted || !mayRetry) throw isLost && !signal.aborted ? new Interrupted() : error;
      }
      await pause(Math.min(100 * 2 ** numTries, LONGEST_WAIT_MS), signal);
    }
  }

  async *#read(path, text, place, signal) {
    const headers = { "content-type": "application/json" };
    if (place.eventId) {
      headers["x-request-id"] = place.requestId;
      headers["last-event-id"] = place.eventId;
    }
    const response = await this.request(path, { method: "POST", body: text, headers, signal });
    place.requestId = response.headers.get("x-request-id");
    for await (const event of readEvents(response.body)) {
      if (event.data === "[DONE]") return;
      const chunk = JSON.parse(event.data);
      if (chunk.error) throw new ApiError(500, chunk.error);
      yield chunk;
      place.eventId = event.id;
    }
    throw new Interrupted();
  }
}

function readKey() {
  try {
    return sessionStorage.getItem(KEY);
  } catch {
    return null;
  }
}

function keepKey(key) {
  try {
    sessionStorage.setItem(KEY, key);
  } catch {
    // It is asked for again after a reload.
  }
}

// A header's characters are bytes; the server compares the key's UTF-8.
function asBytes(key) {
  return String.fromCharCode(...new TextEncoder().encode(key));
}

async function readError(response) {
  try {
    return new ApiError(response.status, (await response.json()).error);
  } catch {
    return new ApiError(response.status);
  }
}

function pause(ms, signal) {
  return new Promise((resolve, reject) => {
    const onAbort = () => {
      clearTimeout(timer);
      reject(signal.reason);
    };
    const timer = setTimeout(() => {
      signal.removeEventListener("abort", onAbort);
      resolve();
    }, ms);
    signal.addEventListener("abort", onAbort, { once: true });
  });
}
