// Markdown becomes few kinds of elements, loses no text and takes linear time.
import assert from "node:assert/strict";
import test from "node:test";
import { buildBlock, parse, parseInline, update } from "../../../api_proc/page/static/markdown.mjs";

// As much of a DOM as the builder may use: anything else fails.
class FakeNode {
  constructor(tag) {
    this.tag = tag;
    this.children = [];
  }
  append(...nodes) {
    for (const node of nodes) {
      if (node instanceof FakeNode) node.parent = this;
      this.children.push(node);
    }
  }
  replaceWith(node) {
    this.parent.children[this.parent.children.indexOf(this)] = node;
    node.parent = this.parent;
  }
  remove() {
    this.parent.children.splice(this.parent.children.indexOf(this), 1);
  }
  get lastElementChild() {
    return this.children.at(-1);
  }
  get text() {
    return this.children.map((child) => (typeof child === "string" ? child : child.text)).join("");
  }
}
const document = {
  createElement: (tag) => new FakeNode(tag),
  createTextNode: (text) => text,
};
const TAGS = new Set(
  ("h3 h4 h5 h6 p hr ul ol li blockquote table thead tbody tr th td div span button pre code strong "
    + "em del a").split(" "),
);
const PROPERTIES = new Set(["tag", "children", "parent", "className", "type", "start", "href", "rel",
  "target"]);

const render = (text) => {
  const root = new FakeNode("root");
  update(root, text, document);
  return root;
};
const show = (node) => {
  if (typeof node === "string") return node;
  return `<${node.tag}>${node.children.map(show).join("")}</${node.tag}>`;
};
const html = (text) => render(text).children.map(show).join("");
const check = (node) => {
  for (const child of node.children) {
    if (typeof child === "string") continue;
    assert.ok(TAGS.has(child.tag), child.tag);
    for (const name of Object.keys(child)) assert.ok(PROPERTIES.has(name), name);
    if (child.href !== undefined) assert.match(child.href, /^(https?:\/\/|mailto:)/);
    check(child);
  }
};

const CASES = [
  ["plain text", "<p>plain text</p>"],
  ["a\nb\n\nc", "<p>a\nb</p><p>c</p>"],
  ["# One\n### Three ###", "<h3>One</h3><h5>Three</h5>"],
  ["#tag", "<p>#tag</p>"],
  ["**b** *i* ***bi*** __b__ _i_ ~~d~~", "<p><strong>b</strong> <em>i</em> <strong><em>bi</em></strong> "
    + "<strong>b</strong> <em>i</em> <del>d</del></p>"],
  ["**b *i* b**", "<p><strong>b <em>i</em> b</strong></p>"],
  ["snake_case_name, 2 * 3 * 4, **open", "<p>snake_case_name, 2 * 3 * 4, **open</p>"],
  ["**a *b** c*", "<p><strong>a *b</strong> c*</p>"],
  ["\\*not\\*", "<p>*not*</p>"],
  ["`a*b*` ``c`d`` `open", "<p><code>a*b*</code> <code>c`d</code> `open</p>"],
  ["---\n***", "<hr></hr><hr></hr>"],
  ["> a\n> > b", "<blockquote><p>a</p><blockquote><p>b</p></blockquote></blockquote>"],
  ["- a\n- b\n  - c\n\n- d", "<ul><li>a</li><li><p>b</p><ul><li>c</li></ul></li><li>d</li></ul>"],
  ["3. a\n4. b", "<ol><li>a</li><li>b</li></ol>"],
  ["- a\n\n  b", "<ul><li><p>a</p><p>b</p></li></ul>"],
  ["a\n- b", "<p>a</p><ul><li>b</li></ul>"],
  ["| a | b |\n|---|:-:|\n| *1* | 2 |", "<div><table><thead><tr><th>a</th><th>b</th></tr></thead>"
    + "<tbody><tr><td><em>1</em></td><td>2</td></tr></tbody></table></div>"],
  ["a | b", "<p>a | b</p>"],
  ["https://a.b/c_d_e.", "<p><a>https://a.b/c_d_e</a>.</p>"],
  ["[x](https://a.b) [y](nowhere)", "<p><a>x</a> [y](nowhere)</p>"],
  ["<b>&amp;</b>", "<p><b>&amp;</b></p>"],
];
for (const [text, expected] of CASES) {
  test(JSON.stringify(text), () => {
    assert.equal(html(text), expected);
    check(render(text));
  });
}

test("a code block keeps its text, and its end may be missing", () => {
  const code = (text) => {
    const [block] = parse(text);
    assert.equal(block.type, "code");
    return [block.language, block.text];
  };
  assert.deepEqual(code("```python\n*a*\n\n<b>\n```"), ["python", "*a*\n\n<b>"]);
  assert.deepEqual(code("~~~\n```\nx\n~~~"), ["", "```\nx"]);
  assert.deepEqual(code("````\n```\n````"), ["", "```"]);
  assert.deepEqual(code("```js\nlet a"), ["js", "let a"]);
  assert.equal(parse("```js\na\n```\nafter").length, 2);
});

const HOSTILE = [
  "<img src=x onerror=alert(1)>",
  "<script>alert(1)</script>",
  "[x](javascript:alert(1))",
  "[x](javascript:document.title=1)",
  "[x](data:text/html,x)",
  "[x](//a.b)",
  "[x](JaVaScRiPt:alert(1))",
  "[x](java\tscript:alert(1))",
  "[x](data:text/html,<script>alert(1)</script>)",
  "[x](vbscript:x)",
  "![x](https://a.b/c.png)",
  '[x](https://a.b/" onclick="alert(1))',
  "```\"><img/onerror=alert(1)>\n<script>\n```",
  "| <img onerror=x> |\n|---|\n| <svg/onload=x> |",
  "[a]: javascript:alert(1)\n[a]",
  "<https://a.b>",
  "\0<b>",
];
for (const text of HOSTILE) {
  test(`stays text: ${JSON.stringify(text)}`, () => {
    const root = render(text);
    check(root);
    for (const sign of ["javascript:", "onerror", "<script>"]) {
      if (text.includes(sign)) assert.ok(root.text.includes(sign), "the text is kept");
    }
  });
}

test("random text: no exception, the allowed elements, and no word is lost", () => {
  let state = 12345;
  const random = (limit) => {
    state = (Math.imul(state, 1103515245) + 12345) >>> 0;
    return (state >>> 8) % limit;
  };
  const pieces = ["*", "**", "_", "~~", "`", "``", "```", "[", "](", ")", "\n", "\n\n", " ", "  ", "-",
    "- ", "1. ", "> ", "#", "# ", "|", "|-|", "\\", "https://a.b", "<img onerror=x>", "\r", "\u2028",
    "w", "ord", "🙂", "\ud800"];
  for (let round = 0; round < 1500; round++) {
    const text = Array.from({ length: random(40) }, () => pieces[random(pieces.length)]).join("");
    const root = render(text);
    check(root);
    const count = (value) => value.match(/w|ord|🙂/g)?.length ?? 0;
    const fences = parse(text).some((block) => JSON.stringify(block).includes('"code"'));
    if (!fences && !text.includes("|")) assert.ok(count(root.text) >= count(text), text);
  }
});

test("every hostile repetition takes linear time", () => {
  const units = ["*", "**a ", "_", "`", "``a`", "[", "[a](", "[a](b", "> ", "- ", "1. ", "#", "# ", "|",
    "|-", "\\", "~~", "h", "http://", "https://a.b....", " ", "\t", "\n- ", "\n> ", "\n|a|\n|-|", "\n```",
    "``` ", "***a", "a_", "\u2028", "-  "];
  for (const unit of units) {
    for (const [head, tail] of [["", ""], ["```", "x`"], ["# ", " x"], ["` ", "x`"], ["|", "x"]]) {
      const text = head + unit.repeat(25_000 / unit.length) + tail;
      const startedAt = performance.now();
      parse(text);
      const ms = performance.now() - startedAt;
      assert.ok(ms < 400, `${JSON.stringify(head + unit)}: ${Math.round(ms)} ms`);
    }
  }
});

test("nesting has a limit", () => {
  const depth = (node) => 1 + Math.max(0, ...node.children.filter((c) => c.children).map(depth));
  assert.ok(depth(render("> ".repeat(5000) + "a")) < 20);
  assert.ok(depth(render(Array.from({ length: 99 }, (_, i) => `${"  ".repeat(i)}- a`).join("\n"))) < 40);
});

test("an answer that grows keeps the elements of its finished blocks", () => {
  const root = new FakeNode("root");
  const text = "# A\n\nfirst **bold**\n\n```\ncode\n```\n\n- a\n- b\n\nlast";
  let first = null;
  for (let end = 1; end <= text.length; end++) {
    update(root, text.slice(0, end), document);
    if (text.slice(0, end).includes("first")) first ??= root.children[0];
  }
  assert.equal(root.children[0], first);
  assert.equal(root.children.map(show).join(""), html(text));
  update(root, "short", document);
  assert.equal(root.children.map(show).join(""), "<p>short</p>");
});

test("parts are exported for other views", () => {
  assert.deepEqual(parseInline("a"), ["a"]);
  assert.equal(show(buildBlock(parse("a")[0], document)), "<p>a</p>");
});
