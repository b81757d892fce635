// The answer of one request: what its chunks add up to, and its times in seconds.

const MAX_TOOL_CALLS = 128;

export class Reply {
  content = "";
  reasoning = "";
  toolCalls = [];
  finishReason = null;
  usage = null;
  longestPause = 0;
  #startedAt;
  #firstAt = null;
  #lastAt = null;
  #tokensAtFirst = 1;

  constructor(now) {
    this.#startedAt = now;
  }

  // Add a chunk of /v1/chat/completions or /v1/completions.
  add(chunk, now) {
    if (chunk.usage) this.usage = chunk.usage;
    const choice = chunk.choices?.[0];
    if (!choice) return;
    if (choice.finish_reason) this.finishReason = choice.finish_reason;
    const delta = choice.delta ?? { content: choice.text };
    const content = delta.content ?? "";
    const reasoning = delta.reasoning_content ?? delta.reasoning ?? "";
    const calls = delta.tool_calls ?? [];
    if (content === "" && reasoning === "" && calls.length === 0) return;
    this.content += content;
    this.reasoning += reasoning;
    for (const call of calls) this.#addCall(call);
    this.#clock(now);
  }

  #addCall({ index = 0, id, function: { name, arguments: text } = {} }) {
    if (!Number.isInteger(index) || index < 0 || index >= MAX_TOOL_CALLS) return;
    while (this.toolCalls.length <= index) this.toolCalls.push({ id: "", name: "", arguments: "" });
    const call = this.toolCalls[index];
    if (id) call.id = id;
    if (name) call.name += name;
    if (text) call.arguments += text;
  }

  #clock(now) {
    if (this.#firstAt === null) {
      this.#firstAt = now;
      this.#tokensAtFirst = this.usage?.completion_tokens || 1;
    } else {
      this.longestPause = Math.max(this.longestPause, now - this.#lastAt);
    }
    this.#lastAt = now;
  }

  // Seconds since something arrived; from the start of the request until something has.
  silence(now) {
    return now - (this.#lastAt ?? this.#startedAt);
  }

  // Figures for a person; null: not known.
  metrics() {
    const tokens = this.usage?.completion_tokens ?? null;
    const seconds = this.#firstAt === null ? 0 : this.#lastAt - this.#firstAt;
    const later = tokens === null ? 0 : tokens - this.#tokensAtFirst;
    return {
      tokens,
      tokensPerSecond: seconds > 0 && later > 0 ? later / seconds : null,
      firstToken: this.#firstAt === null ? null : this.#firstAt - this.#startedAt,
      longestPause: this.longestPause,
      promptTokens: this.usage?.prompt_tokens ?? null,
      cachedTokens: this.usage?.prompt_tokens_details?.cached_tokens ?? null,
      finishReason: this.finishReason,
    };
  }
}

// Return the figures in one line.
export function describeMetrics(metrics) {
  const parts = [];
  const number = (value) => (value < 10 ? value.toFixed(1) : Math.round(value).toString());
  const time = (s) => (s < 1 ? `${Math.round(s * 1000)} ms` : `${number(s)} s`);
  if (metrics.tokens !== null) parts.push(`${metrics.tokens} tokens`);
  if (metrics.tokensPerSecond !== null) parts.push(`${number(metrics.tokensPerSecond)} tokens/s`);
  if (metrics.firstToken !== null) parts.push(`first token ${time(metrics.firstToken)}`);
  if (metrics.promptTokens !== null) {
    parts.push(`${metrics.cachedTokens ?? 0} of ${metrics.promptTokens} prompt tokens cached`);
  }
  if (metrics.longestPause >= 0.2) parts.push(`longest pause ${time(metrics.longestPause)}`);
  if (metrics.finishReason && metrics.finishReason !== "stop") parts.push(metrics.finishReason);
  return parts.join(" · ");
}
