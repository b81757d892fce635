// The conversation on the page: messages, streaming, edit, regenerate, stop, tool results.

import { Conversation, makeRequest } from "./conversation.mjs";
import { make } from "./dom.mjs";
import { update } from "./markdown.mjs";
import { Reply, describeMetrics } from "./reply.mjs";

const LATE_S = 1;
const AT_END_PX = 40;
const MAX_ANNOUNCED = 1000;
const TITLES = { user: "You", assistant: "Model", tool: "Tool result" };
const seconds = () => performance.now() / 1000;

export class ChatView {
  #server;
  #elements;
  #options;
  #conversation = new Conversation(localStorage);
  #withoutTemplate = new Set();
  // Of the answer that streams.
  #abort = null;

  // `elements`: messages, composer, prompt, send, stop, announcer, modeNote. `options()` returns
  // {settings, model}.
  constructor(server, elements, options) {
    this.#server = server;
    this.#elements = elements;
    this.#options = options;
    const { composer, prompt, stop } = elements;
    composer.addEventListener("submit", (event) => {
      event.preventDefault();
      this.#send();
    });
    prompt.addEventListener("keydown", (event) => {
      if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
      event.preventDefault();
      this.#send();
    });
    prompt.addEventListener("input", () => fit(prompt));
    stop.addEventListener("click", () => this.#abort?.abort());
    document.addEventListener("keydown", (event) => {
      const isFree = !event.defaultPrevented && document.querySelector("dialog[open]") === null;
      if (event.key === "Escape" && isFree) this.#abort?.abort();
    });
    window.addEventListener("pagehide", () => this.#conversation.save());
    elements.messages.addEventListener("click", copyCode);
    this.refresh();
  }

  clear() {
    this.#abort?.abort();
    this.#conversation.truncate(0);
    this.refresh();
    this.#elements.prompt.focus();
  }

  // Show all messages again.
  refresh() {
    const { messages, modeNote } = this.#elements;
    const shown = this.#conversation.messages.map((message) => this.#build(message));
    if (shown.length === 0) shown.push(make("p", { className: "empty" }, "The conversation is empty."));
    this.#keepAtEnd(() => messages.replaceChildren(...shown));
    modeNote.textContent = this.#isChat() ? "" : "The model continues the whole text.";
  }

  #isChat() {
    const { settings, model } = this.#options();
    return settings.mode === "auto" ? !this.#withoutTemplate.has(model) : settings.mode === "chat";
  }

  #send() {
    const { prompt } = this.#elements;
    if (prompt.value.trim() === "" || this.#abort !== null) return;
    this.#conversation.add({ role: "user", content: prompt.value });
    prompt.value = "";
    fit(prompt);
    this.#answer();
  }

  // Drop a message and everything after it, then go on.
  #replaceFrom(message, newContent = null) {
    if (this.#abort !== null) return;
    this.#conversation.truncate(this.#conversation.messages.indexOf(message));
    if (newContent !== null) this.#conversation.add({ role: "user", content: newContent });
    this.#answer();
  }

  async #answer() {
    const history = [...this.#conversation.messages];
    const message = this.#conversation.add({ role: "assistant", content: "" });
    const abort = new AbortController();
    this.#abort = abort;
    this.#setBusy(true);
    try {
      while (!(await this.#stream(history, message, abort.signal)));
    } catch (error) {
      if (abort.signal.aborted) message.isStopped = true;
      else message.error = error.message;
    }
    this.#abort = null;
    this.#setBusy(false);
    this.#conversation.save();
    this.refresh();
    this.#elements.announcer.textContent = announcement(message);
  }

  // Read one answer; false: the model has no chat template, and its text is to be continued.
  async #stream(history, message, signal) {
    const { settings, model } = this.#options();
    const isChat = this.#isChat();
    const { path, body } = makeRequest(history, settings, model, isChat);
    message.isPlain = !isChat;
    this.refresh();
    this.#elements.messages.scrollTop = this.#elements.messages.scrollHeight;
    const reply = new Reply(seconds());
    const show = onceAFrame(() => this.#showProgress(message, reply));
    const ticking = setInterval(show, 250);
    try {
      for await (const chunk of this.#server.stream(path, body, signal)) {
        reply.add(chunk, seconds());
        Object.assign(message, { content: reply.content, reasoning: reply.reasoning });
        show();
      }
    } catch (error) {
      if (error.code !== "no_chat_template" || settings.mode !== "auto") throw error;
      this.#withoutTemplate.add(model);
      return false;
    } finally {
      clearInterval(ticking);
      message.toolCalls = reply.toolCalls.map((call, index) => (
        { ...call, id: call.id || `call_${index}` }));
      message.metrics = reply.metrics();
    }
    return true;
  }

  #showProgress(message, reply) {
    const element = this.#elements.messages.lastElementChild;
    if (this.#abort === null || element?.troikaMessage !== message) return;
    message.toolCalls = reply.toolCalls;
    this.#keepAtEnd(() => fill(element, message));
    const late = reply.silence(seconds());
    const isLate = late >= LATE_S;
    element.classList.toggle("late", isLate);
    const footer = element.querySelector(".metrics");
    const figures = describeMetrics(reply.metrics());
    footer.textContent = isLate ? `waiting for the engine, ${late.toFixed(1)} s` : figures;
  }

  #keepAtEnd(change) {
    const { messages } = this.#elements;
    const { scrollTop, scrollHeight, clientHeight } = messages;
    change();
    const wasAtEnd = scrollHeight - scrollTop - clientHeight < AT_END_PX;
    messages.scrollTop = wasAtEnd ? messages.scrollHeight : scrollTop;
  }

  #setBusy(isBusy) {
    const { send, stop, messages, prompt } = this.#elements;
    const hadFocus = [send, stop].includes(document.activeElement);
    send.hidden = isBusy;
    stop.hidden = !isBusy;
    messages.setAttribute("aria-busy", String(isBusy));
    if (hadFocus) (isBusy ? stop : prompt).focus();
  }

  #build(message) {
    const isOpen = this.#abort !== null;
    const isLast = message === this.#conversation.messages.at(-1);
    const actions = make("div", { className: "actions" });
    const action = (text, onclick) => {
      actions.append(make("button", { type: "button", onclick, disabled: isOpen }, text));
    };
    if (message.role === "user") action("Edit", () => this.#edit(message, element));
    if (message.role === "assistant" && !(isOpen && isLast)) {
      action("Regenerate", () => this.#replaceFrom(message));
    }
    if (navigator.clipboard) action("Copy", () => navigator.clipboard.writeText(message.content));
    const element = make("article", { className: message.role },
      make("h2", {}, TITLES[message.role]),
      make("div", { className: "body" }),
      make("footer", {}, make("span", { className: "metrics" }, describe(message)), actions));
    element.troikaMessage = message;
    element.classList.toggle("streams", isOpen && isLast);
    fill(element, message);
    if (isLast && !isOpen && message.toolCalls?.length) {
      element.append(this.#toolForm(message.toolCalls));
    }
    return element;
  }

  #edit(message, element) {
    const field = make("textarea", { value: message.content, ariaLabel: "Edit the message" });
    const cancel = make("button", { type: "button", onclick: () => this.refresh() }, "Cancel");
    const form = make("form", { className: "edit" }, field,
      make("div", { className: "actions" }, cancel,
        make("button", { type: "submit", className: "primary" }, "Send again")));
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      if (field.value.trim() !== "") this.#replaceFrom(message, field.value);
    });
    form.addEventListener("keydown", (event) => {
      if (event.key !== "Escape") return;
      event.preventDefault();
      this.refresh();
    });
    element.replaceChildren(element.querySelector("h2"), form);
    fit(field);
    field.focus();
  }

  // Ask for the results of tool calls, and go on with them.
  #toolForm(calls) {
    const fields = calls.map(() => make("textarea", { rows: 2, spellcheck: false }));
    const form = make("form", { className: "edit" },
      ...calls.map((call, index) => make("label", {}, `Result of ${call.name}`, fields[index])),
      make("div", { className: "actions" },
        make("button", { type: "submit", className: "primary" }, "Send results")));
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      if (this.#abort !== null) return;
      calls.forEach((call, index) => {
        this.#conversation.add({ role: "tool", content: fields[index].value, toolCallId: call.id });
      });
      this.#answer();
    });
    return form;
  }
}

// Make a message's element show its text, reasoning, tool calls and error.
function fill(element, message) {
  const body = element.querySelector(".body");
  if (message.reasoning) {
    const details = part(body, "reasoning", () => (
      make("details", { open: message.content === "" },
        make("summary", {}, "Reasoning"), make("div", {}))));
    if (body.firstElementChild !== details) body.prepend(details);
    update(details.lastElementChild, message.reasoning, document);
  }
  if (message.role === "assistant" && !message.isPlain) {
    update(part(body, "text", () => make("div", {})), message.content, document);
  } else {
    part(body, "text", () => make("pre", {})).textContent = message.content;
  }
  message.toolCalls?.forEach((call, index) => {
    const shown = part(body, `call-${index}`, () => (
      make("section", { className: "call" }, make("h3", {}), make("pre", {}))));
    shown.firstElementChild.textContent = `Calls ${call.name}`;
    shown.lastElementChild.textContent = indented(call.arguments);
  });
  if (message.error) {
    part(body, "error", () => make("p", { role: "alert" })).textContent = message.error;
  }
}

// Return the part of a message's body with this name, made when it is first needed.
function part(body, name, create) {
  for (const child of body.children) if (child.dataset.part === name) return child;
  const element = create();
  element.dataset.part = name;
  body.append(element);
  return element;
}

// What a screen reader says at the end of an answer.
function announcement({ content, error, isStopped, reasoning }) {
  if (error) return `The answer has failed: ${error}`;
  const text = (content || reasoning || "").slice(0, MAX_ANNOUNCED);
  return `Answer ${isStopped ? "stopped" : "complete"}: ${text}`;
}

function describe(message) {
  const figures = message.metrics ? describeMetrics(message.metrics) : "";
  return message.isStopped ? `stopped · ${figures}` : figures;
}

function indented(text) {
  try {
    return JSON.stringify(JSON.parse(text), null, 2);
  } catch {
    return text; // incomplete
  }
}

function fit(field) {
  field.style.height = "auto";
  field.style.height = `${field.scrollHeight + 2}px`;
}

function onceAFrame(work) {
  let isPlanned = false;
  return () => {
    if (isPlanned) return;
    isPlanned = true;
    requestAnimationFrame(() => {
      isPlanned = false;
      work();
    });
  };
}

async function copyCode(event) {
  if (!event.target.classList.contains("copy-code") || !navigator.clipboard) return;
  await navigator.clipboard.writeText(event.target.closest(".code").querySelector("code").textContent);
  event.target.textContent = "Copied";
}
