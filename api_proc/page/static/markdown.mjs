// Markdown to DOM nodes. The text of a model is hostile: it only ever becomes text nodes, the set
// of elements is fixed, links lead to http, https and mailto only, and the time is linear.

const MAX_DEPTH = 8;
const MAX_COLUMNS = 64;
// No expression below may match one text in two ways: it would take quadratic time.
const FENCE = /^ {0,3}(`{3,}|~{3,})/;
const HEADING = /^ {0,3}(#{1,6})(?=\s|$)/;
const RULE = /^ {0,3}([-*_])(?: *\1){2,} *$/;
const ITEM = /^( {0,3})([-*+]|\d{1,9}[.)])( +|$)/;
const QUOTE = /^ {0,3}> ?/;
const TABLE_LINE = /^[ |:-]+$/;
const LINK = /\[([^[\]\n]{1,500})\]\(([^()\s]{1,2000})\)/y;
const URL_TEXT = /https?:\/\/[^\s<>"'`()[\]]{1,2000}/y;
const SPECIAL = /[\\`*_~[h]/g;
const ESCAPABLE = /[!-/:-@[-`{-~]/;
const WORD = /[\p{L}\p{N}_]/u;

// Return the blocks of a text; each has a `source`, equal only for equal blocks.
export function parse(text) {
  const lines = text.replaceAll("\0", "\uFFFD").split(/\r\n|\r|\n/);
  return parseBlocks(lines, 0);
}

function parseBlocks(lines, depth) {
  const blocks = [];
  let at = 0;
  while (at < lines.length) {
    if (lines[at].trim() === "") {
      at += 1;
      continue;
    }
    const start = at;
    const [block, end] = parseBlock(lines, at, depth);
    at = end;
    block.source = lines.slice(start, end).join("\n");
    blocks.push(block);
  }
  return blocks;
}

function parseBlock(lines, at, depth) {
  const line = lines[at];
  if (isFence(line)) return parseCode(lines, at);
  const heading = HEADING.exec(line);
  if (heading) {
    const title = line.slice(heading[0].length).trim().replace(/(^|\s)#+$/, "");
    const content = parseInline(title.trimEnd());
    return [{ type: "heading", level: heading[1].length, content }, at + 1];
  }
  if (RULE.test(line)) return [{ type: "rule" }, at + 1];
  if (depth < MAX_DEPTH) {
    if (QUOTE.test(line)) return parseQuote(lines, at, depth);
    const item = ITEM.exec(line);
    if (item) return parseList(lines, at, item, depth);
  }
  if (isTable(lines, at)) return parseTable(lines, at);
  let end = at + 1;
  while (end < lines.length && !endsParagraph(lines, end, depth)) end += 1;
  const content = parseInline(lines.slice(at, end).map((text) => text.trim()).join("\n"));
  return [{ type: "paragraph", content }, end];
}

function endsParagraph(lines, at, depth) {
  const line = lines[at];
  if (line.trim() === "" || isFence(line) || HEADING.test(line) || RULE.test(line)) return true;
  return (depth < MAX_DEPTH && (QUOTE.test(line) || ITEM.test(line))) || isTable(lines, at);
}

function isFence(line) {
  const found = FENCE.exec(line);
  return found !== null && !(found[1][0] === "`" && line.includes("`", found[0].length));
}

// A fence without an end reaches to the end of the text: the model is still writing it.
function parseCode(lines, at) {
  const [opening, fence] = FENCE.exec(lines[at]);
  const [language] = lines[at].slice(opening.length).trim().split(/\s/, 1);
  let end = at + 1;
  while (end < lines.length) {
    const line = lines[end].trim();
    if (line.length >= fence.length && line === fence[0].repeat(line.length)) break;
    end += 1;
  }
  const text = lines.slice(at + 1, end).join("\n");
  return [{ type: "code", language, text }, Math.min(end + 1, lines.length)];
}

function parseQuote(lines, at, depth) {
  let end = at;
  const inner = [];
  while (end < lines.length && QUOTE.test(lines[end])) {
    inner.push(lines[end].replace(QUOTE, ""));
    end += 1;
  }
  return [{ type: "quote", blocks: parseBlocks(inner, depth + 1) }, end];
}

function parseList(lines, at, first, depth) {
  const isOrdered = first[2].length > 1;
  const items = [];
  let end = at;
  while (end < lines.length) {
    const item = ITEM.exec(lines[end]);
    if (!item || item[2].length > 1 !== isOrdered || RULE.test(lines[end])) break;
    const indent = item[1].length + item[2].length + 1;
    const inner = [lines[end].slice(item[0].length)];
    end += 1;
    while (end < lines.length) {
      const line = lines[end];
      const isBlank = line.trim() === "";
      const isInner = line.startsWith(" ".repeat(Math.min(indent, 2)));
      if (isBlank ? !(lines[end + 1] ?? "").startsWith("  ") : !isInner) break;
      inner.push(isInner ? line.slice(Math.min(indent, line.search(/\S|$/))) : line);
      end += 1;
    }
    items.push(parseBlocks(inner, depth + 1));
    while (end + 1 < lines.length && lines[end].trim() === "" && ITEM.test(lines[end + 1])) end += 1;
  }
  const start = isOrdered ? Number.parseInt(first[2], 10) : null;
  return [{ type: "list", start, items }, end];
}

function isTable(lines, at) {
  const next = lines[at + 1];
  if (next === undefined || !lines[at].includes("|") || !next.includes("-")) return false;
  return TABLE_LINE.test(next) && cells(next).length === cells(lines[at]).length;
}

function parseTable(lines, at) {
  let end = at + 2;
  while (end < lines.length && lines[end].includes("|")) end += 1;
  const rows = [lines[at], ...lines.slice(at + 2, end)];
  const content = rows.map((line) => cells(line).map((cell) => parseInline(cell)));
  return [{ type: "table", rows: content }, end];
}

function cells(line) {
  const inner = line.trim().replace(/^\|/, "").replace(/\|$/, "");
  return inner.split("|", MAX_COLUMNS).map((cell) => cell.trim());
}

// Return the nodes of a piece of running text: strings, and {type, ...}.
export function parseInline(text) {
  return new Inline(text).parse();
}

class Inline {
  #text;
  #at = 0;
  // Open emphasis, outermost first. At most one frame has a given mark.
  #frames = [{ mark: "", nodes: [] }];
  // Positions of runs of backticks by length, each list in order.
  #runs = null;

  constructor(text) {
    this.#text = text;
  }

  parse() {
    const text = this.#text;
    while (this.#at < text.length) {
      SPECIAL.lastIndex = this.#at;
      const found = SPECIAL.exec(text);
      const next = found ? found.index : text.length;
      this.#add(text.slice(this.#at, next));
      this.#at = next;
      if (found) this.#take(found[0]);
    }
    while (this.#frames.length > 1) this.#unwind();
    return this.#frames[0].nodes;
  }

  #take(char) {
    const text = this.#text;
    if (char === "\\" && ESCAPABLE.test(text[this.#at + 1] ?? "")) {
      this.#add(text[this.#at + 1]);
      this.#at += 2;
    } else if (char === "`") {
      this.#takeCode();
    } else if (char === "[") {
      this.#takeLink();
    } else if (char === "h") {
      this.#takeUrl();
    } else if (char === "*" || char === "_" || char === "~") {
      this.#takeEmphasis(char);
    } else {
      this.#addChars(1);
    }
  }

  #takeCode() {
    const length = this.#lengthOfRun("`");
    const closing = this.#nextRun(length);
    if (closing === undefined) {
      this.#addChars(length);
      return;
    }
    let code = this.#text.slice(this.#at + length, closing).replaceAll("\n", " ");
    const isPadded = code.startsWith(" ") && code.endsWith(" ");
    if (isPadded && code.trim() !== "") code = code.slice(1, -1);
    this.#push({ type: "codespan", text: code });
    this.#at = closing + length;
  }

  // Return the place of the next run of exactly `length` backticks.
  #nextRun(length) {
    if (this.#runs === null) {
      this.#runs = new Map();
      for (const run of this.#text.matchAll(/`+/g)) {
        const places = this.#runs.get(run[0].length) ?? { list: [], next: 0 };
        places.list.push(run.index);
        this.#runs.set(run[0].length, places);
      }
    }
    const places = this.#runs.get(length);
    if (places === undefined) return undefined;
    while (places.list[places.next] <= this.#at) places.next += 1;
    return places.list[places.next];
  }

  #takeLink() {
    LINK.lastIndex = this.#at;
    const found = LINK.exec(this.#text);
    const url = found && safeUrl(found[2]);
    if (!url) {
      this.#addChars(1);
      return;
    }
    this.#push({ type: "link", url, nodes: [found[1]] });
    this.#at += found[0].length;
  }

  #takeUrl() {
    URL_TEXT.lastIndex = this.#at;
    const found = URL_TEXT.exec(this.#text);
    let shown = found ? found[0] : "";
    while (shown !== "" && ".,;:!?*_~".includes(shown.at(-1))) shown = shown.slice(0, -1);
    const url = shown === "" ? null : safeUrl(shown);
    if (!url || WORD.test(this.#text[this.#at - 1] ?? "")) {
      this.#addChars(1);
      return;
    }
    this.#push({ type: "link", url, nodes: [shown] });
    this.#at += shown.length;
  }

  #takeEmphasis(char) {
    const run = this.#lengthOfRun(char);
    const before = this.#text[this.#at - 1] ?? " ";
    const after = this.#text[this.#at + run] ?? " ";
    const canClose = /\S/.test(before) && !(char === "_" && WORD.test(after));
    const canOpen = /\S/.test(after) && !(char === "_" && WORD.test(before));
    let left = char === "~" && run !== 2 ? 0 : run <= 3 ? run : 0;
    if (left === 0) this.#addChars(run);
    while (left > 0) {
      const top = this.#frames[this.#frames.length - 1].mark;
      const both = char + char;
      let mark = left >= 2 ? both : char;
      if (canClose && left === 3 && top === char) mark = char;
      if (canClose && this.#close(mark)) {
        this.#at += mark.length;
      } else if (canOpen && this.#frames.every((frame) => frame.mark !== mark)) {
        this.#frames.push({ mark, nodes: [] });
        this.#at += mark.length;
      } else {
        this.#addChars(mark.length);
      }
      left -= mark.length;
    }
  }

  // Close the frame with this mark; frames inside it become text. False: it is not open.
  #close(mark) {
    const index = this.#frames.findLastIndex((frame) => frame.mark === mark);
    if (index < 0 || this.#frames[index].nodes.length + (this.#frames.length - 1 - index) === 0) {
      return false;
    }
    while (this.#frames.length > index + 1) this.#unwind();
    const type = mark[0] === "~" ? "deleted" : mark.length === 2 ? "strong" : "emphasis";
    const { nodes } = this.#frames.pop();
    this.#push({ type, nodes });
    return true;
  }

  #unwind() {
    const { mark, nodes } = this.#frames.pop();
    this.#add(mark);
    for (const node of nodes) typeof node === "string" ? this.#add(node) : this.#push(node);
  }

  #lengthOfRun(char) {
    let end = this.#at;
    while (this.#text[end] === char) end += 1;
    return end - this.#at;
  }

  #addChars(count) {
    this.#add(this.#text.slice(this.#at, this.#at + count));
    this.#at += count;
  }

  #add(text) {
    if (text === "") return;
    const { nodes } = this.#frames[this.#frames.length - 1];
    if (typeof nodes[nodes.length - 1] === "string") nodes[nodes.length - 1] += text;
    else nodes.push(text);
  }

  #push(node) {
    this.#frames[this.#frames.length - 1].nodes.push(node);
  }
}

// Return a link's address if a click on it cannot run a script; null otherwise.
function safeUrl(text) {
  let url;
  try {
    url = new URL(text);
  } catch {
    return null;
  }
  return ["http:", "https:", "mailto:"].includes(url.protocol) ? url.href : null;
}

const SOURCES = new WeakMap();

// Make an element show a text. Blocks that have not changed keep their elements.
export function update(container, text, document) {
  const blocks = parse(text);
  blocks.forEach((block, index) => {
    const present = container.children[index];
    if (present !== undefined && SOURCES.get(present) === block.source) return;
    const element = buildBlock(block, document);
    SOURCES.set(element, block.source);
    if (present === undefined) container.append(element);
    else present.replaceWith(element);
  });
  while (container.children.length > blocks.length) container.lastElementChild.remove();
}

export function buildBlock(block, document) {
  const make = (tag, children) => {
    const element = document.createElement(tag);
    element.append(...children);
    return element;
  };
  const inline = (nodes) => nodes.map((node) => buildInline(node, document, make));
  switch (block.type) {
    case "heading":
      return make(`h${Math.min(block.level + 2, 6)}`, inline(block.content));
    case "rule":
      return make("hr", []);
    case "code":
      return buildCode(block, make);
    case "quote":
      return make("blockquote", block.blocks.map((inner) => buildBlock(inner, document)));
    case "list": {
      const items = block.items.map((inner) => {
        const isTight = inner.length === 1 && inner[0].type === "paragraph";
        if (isTight) return make("li", inline(inner[0].content));
        return make("li", inner.map((part) => buildBlock(part, document)));
      });
      const list = make(block.start === null ? "ul" : "ol", items);
      if (block.start !== null) list.start = block.start;
      return list;
    }
    case "table": {
      const [head, ...rows] = block.rows;
      const row = (tag) => (line) => make("tr", line.map((cell) => make(tag, inline(cell))));
      const table = make("table", [
        make("thead", [row("th")(head)]),
        make("tbody", rows.map(row("td"))),
      ]);
      const frame = make("div", [table]);
      frame.className = "table";
      return frame;
    }
    default:
      return make("p", inline(block.content));
  }
}

function buildCode(block, make) {
  const copy = make("button", ["Copy"]);
  copy.type = "button";
  copy.className = "copy-code";
  const bar = make("div", [make("span", [block.language || "text"]), copy]);
  bar.className = "code-bar";
  const frame = make("div", [bar, make("pre", [make("code", [block.text])])]);
  frame.className = "code";
  return frame;
}

function buildInline(node, document, make) {
  if (typeof node === "string") return document.createTextNode(node);
  if (node.type === "codespan") return make("code", [node.text]);
  const children = node.nodes.map((inner) => buildInline(inner, document, make));
  if (node.type !== "link") {
    return make({ strong: "strong", emphasis: "em", deleted: "del" }[node.type], children);
  }
  const link = make("a", children);
  link.href = node.url;
  link.target = "_blank";
  link.rel = "noopener noreferrer nofollow";
  return link;
}
