// Markdown as models write it, turned into elements: headings, paragraphs, lists, quotes, tables, rules, code, emphasis,
// links. The text comes from a model and is never trusted: it only ever becomes text nodes, and links lead to http, https
// or mailto. Every scan moves forward, so the time is linear in the text; nesting is bounded.
//
// While an answer grows it is rendered again and again; `render` keeps the elements of blocks whose source is the same. If
// a block has only begun at the end, its kind is guessed: a row of cells begins a table, and half a fence is not shown.

import { element, iconButton } from "./dom.js";
import { highlighted } from "./syntax.js";

const MAX_DEPTH = 6;
const LONGEST_LABEL = 500;
const FENCE = /^ {0,3}(`{3,}|~{3,})([^`~]*)$/;
const HEADING = /^ {0,3}(#{1,6})\s+(.*)$/;
const RULE = /^ {0,3}([-*_])(?: *\1){2,} *$/;
const ITEM = /^( *)([-*+]|\d{1,9}[.)])\s+(.*)$/;
const QUOTE = /^ {0,3}> ?(.*)$/;
const TABLE_RULE = /^\|? *:?-+:? *(\| *:?-+:? *)*\|?$/;
const TABLE_RULE_BEGUN = /^[|:\- ]*$/;
const MARK_BEGUN = /^\s*(?:[-*+]|#{1,6}|`{1,2}|~{1,2})\s*$/;

/** Make `host` show `text`. Blocks that have not changed keep their elements, and so selection and focus. */
export function render(host, text, { growing = false } = {}) {
  const blocks = split(text.split(/\r\n|\r|\n/), growing);
  const kept = host.markdownSources ?? [];
  let same = 0;
  while (same < kept.length && same < blocks.length && kept[same] === blocks[same].source) same += 1;
  while (host.childNodes.length > same) host.lastChild.remove();
  for (const block of blocks.slice(same)) host.append(build(block, 0));
  host.markdownSources = blocks.map((block) => block.source);
}

// ---- blocks

/** The blocks of `lines`. The last one's source says whether it still grows, because it may then look different. */
function split(lines, growing) {
  const blocks = [];
  let at = 0;
  while (at < lines.length) {
    const last = at === lines.length - 1;
    if (!lines[at].trim() || (growing && last && MARK_BEGUN.test(lines[at]))) {
      at += 1;
      continue;
    }
    const [block, next] = read(lines, at, growing);
    block.growing = growing && next >= lines.length;
    block.source = `${block.kind}${block.growing ? "…" : ""}\n${lines.slice(at, next).join("\n")}`;
    blocks.push(block);
    at = next;
  }
  return blocks;
}

function read(lines, at, growing) {
  const line = lines[at];
  const fence = FENCE.exec(line);
  if (fence) return readFence(lines, at, fence, growing);
  const heading = HEADING.exec(line);
  if (heading) return [{ kind: "heading", level: heading[1].length, text: heading[2].trim() }, at + 1];
  if (RULE.test(line)) return [{ kind: "rule" }, at + 1];
  if (QUOTE.test(line)) return readQuote(lines, at);
  if (ITEM.test(line)) return readList(lines, at);
  if (line.includes("|") && TABLE_RULE.test((lines[at + 1] ?? "").trim())) return readTable(lines, at);
  if (growing && line.startsWith("|") && beginsTable(lines, at)) return readTable(lines, at);
  return readParagraph(lines, at);
}

function readFence(lines, at, [, mark, information], growing) {
  const [language] = information.trim().split(/\s/);
  const code = [];
  let next = at + 1;
  while (next < lines.length && !closesFence(lines[next], mark)) {
    code.push(lines[next]);
    next += 1;
  }
  const open = next === lines.length;
  if (open && growing && code.length && isRun(code.at(-1).trim(), mark[0])) code.pop(); // a closing fence, half written
  return [{ kind: "code", language, text: code.join("\n") }, Math.min(next + 1, lines.length)];
}

function isRun(text, sign) {
  return text !== "" && text === sign.repeat(text.length);
}

function closesFence(line, mark) {
  const bare = line.trim();
  return bare.length >= mark.length && isRun(bare, mark[0]);
}

function readQuote(lines, at) {
  const inner = [];
  let next = at;
  for (let found; next < lines.length && (found = QUOTE.exec(lines[next])); next += 1) inner.push(found[1]);
  return [{ kind: "quote", lines: inner }, next];
}

/** A list: items at one indentation; deeper lines belong to the item above. */
function readList(lines, at) {
  const [, margin, first] = ITEM.exec(lines[at]);
  const ordered = /\d/.test(first);
  const items = [];
  let next = at;
  while (next < lines.length) {
    const line = lines[next];
    const found = ITEM.exec(line);
    if (found && found[1].length <= margin.length + 1) {
      if (/\d/.test(found[2]) !== ordered || RULE.test(line)) break;
      items.push([found[3]]);
    } else if (!line.trim()) {
      const after = lines[next + 1] ?? "";
      if (!ITEM.test(after) && !/^ {2,}\S/.test(after)) break;
      items.at(-1).push("");
    } else if (found || /^ {2,}/.test(line)) {
      items.at(-1).push(unindent(line, margin.length + 2));
    } else if (startsBlock(line) || !lines[next - 1].trim()) {
      break;
    } else {
      items.at(-1).push(line);
    }
    next += 1;
  }
  return [{ kind: "list", ordered, start: ordered ? Number.parseInt(first, 10) : 1, items }, next];
}

function unindent(line, width) {
  const found = /^ */.exec(line)[0].length;
  return line.slice(Math.min(found, width));
}

function readTable(lines, at) {
  let next = at + 2;
  while (next < lines.length && lines[next].includes("|")) next += 1;
  next = Math.min(next, lines.length);
  const rows = [lines[at], ...lines.slice(at + 2, next)].map(cells);
  return [{ kind: "table", rows, sides: cells(lines[at + 1] ?? "").map(side) }, next];
}

/** Whether a row of cells at the very end may be a table's first: no following line rules that out. */
function beginsTable(lines, at) {
  return at === lines.length - 1 || (at === lines.length - 2 && TABLE_RULE_BEGUN.test(lines[at + 1]));
}

/** The cells of a row; a `|` after a backslash belongs to a cell. */
function cells(line) {
  const row = line.trim().replace(/^\|/, "").replace(/(?<!\\)\|$/, "");
  return row.split(/(?<!\\)\|/).map((cell) => cell.trim().replaceAll("\\|", "|"));
}

function side(rule) {
  if (!rule.endsWith(":")) return null;
  return rule.startsWith(":") ? "to-middle" : "to-right";
}

function readParagraph(lines, at) {
  let next = at + 1;
  while (next < lines.length && lines[next].trim() && !startsBlock(lines[next])) next += 1;
  return [{ kind: "paragraph", text: lines.slice(at, next).join("\n") }, next];
}

function startsBlock(line) {
  return FENCE.test(line) || HEADING.test(line) || RULE.test(line) || QUOTE.test(line) || ITEM.test(line);
}

// ---- elements

function build(block, depth) {
  switch (block.kind) {
    case "code":
      return codeBlock(block);
    case "heading":
      // An answer's headings begin at a level below the page's own.
      return element(`h${Math.min(6, block.level + 2)}`, {}, inline(block.text, 0));
    case "rule":
      return element("hr");
    case "quote":
      return element("blockquote", {}, nested(block.lines, depth, block.growing));
    case "list":
      return list(block, depth);
    case "table":
      return table(block);
    default:
      return element("p", {}, inline(block.text, 0));
  }
}

function nested(lines, depth, growing) {
  if (depth >= MAX_DEPTH) return [element("p", {}, lines.join("\n"))];
  return split(lines, growing).map((block) => build(block, depth + 1));
}

function list({ ordered, start, items, growing }, depth) {
  const host = element(ordered ? "ol" : "ul", { start: ordered && start !== 1 ? start : null });
  for (const [at, lines] of items.entries()) {
    const children = nested(lines, depth, growing && at === items.length - 1);
    const tight = children[0]?.tagName === "P" ? [...children[0].childNodes, ...children.slice(1)] : children;
    host.append(element("li", {}, tight));
  }
  return host;
}

function table({ rows: [head, ...body], sides }) {
  const row = (values, tag) => element("tr", {}, values.map((value, at) => element(tag, { class: sides[at], scope: tag === "th" ? "col" : null }, cell(value))));
  const grid = element(
    "table",
    {},
    element("thead", {}, row(head, "th")),
    element("tbody", {}, body.map((values) => row(values, "td"))),
  );
  return element("div", { class: "scrolls", tabindex: "0", role: "region", "aria-label": "Table" }, grid);
}

/** A cell's text. `<br>` is the only markup that is read: a cell has no other way to break its line. */
function cell(text) {
  return text.split(/<br ?\/?>/i).flatMap((line, at) => (at ? [element("br"), ...inline(line, 0)] : inline(line, 0)));
}

function codeBlock({ language, text }) {
  const code = element("pre", { tabindex: "0" }, element("code", {}, highlighted(text, language)));
  const copy = iconButton("copy", "Copy code", () => copy.dispatchEvent(new CustomEvent("copy-text", { bubbles: true, detail: text })));
  return element("div", { class: "code" }, element("div", { class: "code-head" }, element("span", {}, language || "code"), copy), code);
}

// ---- text within a line

const MARKS = ["**", "__", "~~", "*", "_"];
const TAGS = { "**": "strong", __: "strong", "~~": "s", "*": "em", _: "em" };
const ESCAPABLE = /[\\`*_{}[\]()#+\-.!|~<>]/;

/** The nodes of one line of prose. */
function inline(text, depth) {
  const nodes = [];
  // Marks that have no closing mark, and where the next link would be: nothing is searched twice, so the scan is linear.
  const seen = { unclosed: new Set(), middle: -1, end: -1 };
  let plain = "";
  let at = 0;
  const add = (node) => {
    if (plain) nodes.push(document.createTextNode(plain));
    plain = "";
    nodes.push(node);
  };
  while (at < text.length) {
    const found = span(text, at, depth, seen);
    if (found) {
      add(found.node);
      at = found.end;
    } else if (text[at] === "\\" && ESCAPABLE.test(text[at + 1] ?? "")) {
      plain += text[at + 1];
      at += 2;
    } else if (text[at] === "\n") {
      plain = plain.trimEnd();
      add(element("br"));
      at += 1;
    } else {
      plain += text[at];
      at += 1;
    }
  }
  if (plain) nodes.push(document.createTextNode(plain));
  return nodes;
}

function span(text, at, depth, seen) {
  const character = text[at];
  if (character === "`") return codeSpan(text, at, seen.unclosed);
  if (character === "[") return link(text, at, depth, seen);
  if (character === "h") return bareLink(text, at);
  if ("*_~".includes(character) && depth < MAX_DEPTH) return emphasis(text, at, depth, seen.unclosed);
  return null;
}

function codeSpan(text, at, unclosed) {
  let end = at;
  while (text[end] === "`") end += 1;
  const mark = text.slice(at, end);
  if (unclosed.has(mark)) return null;
  const close = text.indexOf(mark, end);
  if (close < 0) {
    unclosed.add(mark);
    return null;
  }
  return { node: element("code", {}, text.slice(end, close)), end: close + mark.length };
}

function emphasis(text, at, depth, unclosed) {
  const mark = MARKS.find((each) => text.startsWith(each, at));
  if (!mark || unclosed.has(mark)) return null;
  const begin = at + mark.length;
  const opens = /\S/.test(text[begin] ?? "") && !(mark[0] === "_" && /\w/.test(text[at - 1] ?? ""));
  if (!opens) return null;
  const close = closing(text, begin, mark);
  if (close < 0) {
    unclosed.add(mark);
    return null;
  }
  return { node: element(TAGS[mark], {}, inline(text.slice(begin, close), depth + 1)), end: close + mark.length };
}

/** Where `mark` closes: after a character that is no space, and not as part of a longer run of the same sign. */
function closing(text, begin, mark) {
  for (let close = text.indexOf(mark, begin); close >= 0; close = text.indexOf(mark, close + 1)) {
    const single = mark.length === 1 && (text[close + 1] === mark || text[close - 1] === mark);
    const inWord = mark[0] === "_" && /\w/.test(text[close + mark.length] ?? "");
    if (close > begin && /\S/.test(text[close - 1]) && !single && !inWord) return close;
  }
  return -1;
}

function link(text, at, depth, seen) {
  if (seen.unclosed.has("](") || depth >= MAX_DEPTH) return null;
  if (seen.middle < at) {
    seen.middle = text.indexOf("](", at);
    seen.end = seen.middle < 0 ? -1 : text.indexOf(")", seen.middle);
  }
  if (seen.end < 0) {
    seen.unclosed.add("](");
    return null;
  }
  if (seen.middle - at > LONGEST_LABEL) return null;
  const label = text.slice(at + 1, seen.middle);
  const address = safeAddress(text.slice(seen.middle + 2, seen.end).trim().split(/\s/)[0]);
  if (!address || label.includes("[") || label.includes("\n")) return null;
  return { node: anchor(address, inline(label, MAX_DEPTH)), end: seen.end + 1 };
}

function bareLink(text, at) {
  if (!text.startsWith("https://", at) && !text.startsWith("http://", at)) return null;
  const [found] = /^[^\s<>"'`)\]]+/.exec(text.slice(at, at + 2048));
  const bare = found.replace(/[.,;:!?*_~]+$/, "");
  const address = safeAddress(bare);
  return address ? { node: anchor(address, [bare]), end: at + bare.length } : null;
}

function anchor(address, children) {
  return element("a", { href: address, target: "_blank", rel: "noopener noreferrer nofollow" }, children);
}

/** The address if it is absolute and leads to web or mail, otherwise null: no script, data or path of this server. */
function safeAddress(text) {
  if (!URL.canParse(text)) return null;
  const { protocol, href } = new URL(text);
  return ["http:", "https:", "mailto:"].includes(protocol) ? href : null;
}
