// Reads server-sent events from text that arrives in pieces of any size.

// Longest unfinished event.
const MAX_CHARS = 2 ** 23;

export class SseParser {
  #line = "";
  #skipsNewline = false;
  #data = [];
  #type = "";
  #id = "";
  #numChars = 0;

  // Return the events that this piece completes: {type, data, id}.
  push(text) {
    if (text === "") return [];
    if (this.#skipsNewline && text[0] === "\n") text = text.slice(1);
    this.#skipsNewline = text === "" ? false : text.endsWith("\r");
    this.#numChars += text.length;
    if (this.#numChars > MAX_CHARS) throw new Error("the server sent an event that is too long");
    const lines = text.split(/\r\n|\r|\n/);
    lines[0] = this.#line + lines[0];
    this.#line = lines.pop();
    const events = [];
    for (const line of lines) {
      if (line !== "") {
        this.#readField(line);
        continue;
      }
      if (this.#data.length > 0) {
        events.push({ type: this.#type || "message", data: this.#data.join("\n"), id: this.#id });
      }
      this.#data = [];
      this.#type = "";
      this.#numChars = 0;
    }
    return events;
  }

  #readField(line) {
    const colon = line.indexOf(":");
    const name = colon < 0 ? line : line.slice(0, colon);
    let value = colon < 0 ? "" : line.slice(colon + 1);
    if (value.startsWith(" ")) value = value.slice(1);
    if (name === "data") this.#data.push(value);
    else if (name === "event") this.#type = value;
    else if (name === "id" && !value.includes("\0")) this.#id = value;
  }
}

// Yield the events of a response's body.
export async function* readEvents(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  const parser = new SseParser();
  try {
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return;
      yield* parser.push(value);
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}
