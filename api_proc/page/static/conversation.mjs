// The conversation and the settings: what is kept in the browser, and what a request contains.

export const MAX_STORED_CHARS = 2 ** 20;
const MAX_MESSAGES = 1000;
const CONVERSATION_KEY = "troika.conversation";
const SETTINGS_KEY = "troika.settings";
const COMPLETION_TOKENS = 256;
const ROLES = ["user", "assistant", "tool"];

export const DEFAULT_SETTINGS = {
  mode: "auto",
  system: "",
  temperature: "",
  top_p: "",
  max_tokens: "",
  seed: "",
  tools: "",
};

// Messages: {role, content}, an assistant's with reasoning, toolCalls, metrics and error, a tool's
// with toolCallId.
export class Conversation {
  #storage;

  constructor(storage) {
    this.#storage = storage;
    const stored = read(storage, CONVERSATION_KEY);
    this.messages = Array.isArray(stored) ? stored.filter(isMessage).slice(-MAX_MESSAGES) : [];
  }

  add(message) {
    this.messages.push(message);
    this.save();
    return message;
  }

  // Drop everything from a message on.
  truncate(index) {
    this.messages.length = Math.min(index, this.messages.length);
    this.save();
  }

  // Store the latest messages that fit; a browser without room stores none.
  save() {
    let num_chars = 0;
    let first = this.messages.length;
    while (first > 0 && this.messages.length - first < MAX_MESSAGES) {
      num_chars += JSON.stringify(this.messages[first - 1]).length + 1;
      if (num_chars > MAX_STORED_CHARS) break;
      first -= 1;
    }
    write(this.#storage, CONVERSATION_KEY, this.messages.slice(first));
  }
}

function isMessage(value) {
  return value !== null && typeof value === "object" && ROLES.includes(value.role)
    && typeof value.content === "string"
    && (value.toolCalls === undefined || Array.isArray(value.toolCalls));
}

export function loadSettings(storage) {
  const stored = read(storage, SETTINGS_KEY);
  const settings = { ...DEFAULT_SETTINGS };
  for (const name of Object.keys(settings)) {
    if (typeof stored?.[name] === "string") settings[name] = stored[name];
  }
  return settings;
}

export function saveSettings(storage, settings) {
  write(storage, SETTINGS_KEY, settings);
}

// Return the path and the body of a request; throws for settings that are not JSON or numbers.
export function makeRequest(messages, settings, model, isChat) {
  const body = {
    model,
    stream: true,
    stream_options: { include_usage: true, continuous_usage_stats: true },
  };
  for (const name of ["temperature", "top_p", "max_tokens", "seed"]) {
    const text = settings[name].trim();
    if (text === "") continue;
    body[name] = Number(text);
    if (!Number.isFinite(body[name])) throw new Error(`${name} must be a number`);
  }
  const sent = messages.filter(hasContent);
  if (!isChat) {
    body.max_tokens ??= COMPLETION_TOKENS;
    body.prompt = sent.map((message) => message.content).join("");
    return { path: "v1/completions", body };
  }
  body.messages = sent.map(asChatMessage);
  if (settings.system !== "") body.messages.unshift({ role: "system", content: settings.system });
  if (settings.tools.trim() !== "") body.tools = parseTools(settings.tools);
  return { path: "v1/chat/completions", body };
}

// An answer that failed before its first token is not part of the conversation.
function hasContent({ role, content, toolCalls }) {
  return role !== "assistant" || content !== "" || Boolean(toolCalls?.length);
}

function asChatMessage({ role, content, toolCalls, toolCallId }) {
  if (role === "tool") return { role, content, tool_call_id: toolCallId };
  if (!toolCalls?.length) return { role, content };
  const calls = toolCalls.map((call) => ({
    id: call.id,
    type: "function",
    function: { name: call.name, arguments: call.arguments },
  }));
  return { role, content: content || null, tool_calls: calls };
}

function parseTools(text) {
  let tools;
  try {
    tools = JSON.parse(text);
  } catch (error) {
    throw new Error(`The tools are not valid JSON: ${error.message}`);
  }
  if (!Array.isArray(tools)) throw new Error("The tools must be a JSON list");
  return tools;
}

function read(storage, key) {
  try {
    return JSON.parse(storage.getItem(key));
  } catch {
    return null;
  }
}

function write(storage, key, value) {
  try {
    storage.setItem(key, JSON.stringify(value));
  } catch {
    try {
      storage.removeItem(key);
    } catch {
      // The browser keeps nothing; the page works without.
    }
  }
}
