// Markdown, as far as models write it, into DOM nodes.
//
// The text is hostile: whatever it says, only the elements made here come into being, links lead to http, https and
// mailto alone, nothing is loaded, and depth and time are bounded. HTML stays text.

import { copyButton, element } from "./dom.js";

/** How deep lists and quotes may be within each other; deeper marks are text. */
const MAX_DEPTH = 12;
/** The same of emphasis. */
const MAX_EMPHASIS = 12;
/** Columns of a table; browsers take long to lay out many. Lines with more are text. */
const MAX_COLUMNS = 100;
/** Characters of a paragraph whose marks are read; a longer one is plain text. */
const MAX_INLINE = 50_000;

const FENCE = /^( {0,3})(`{3,}|~{3,})(.*)$/;
const HEADING = /^ {0,3}(#{1,6})(?=\s|$)/;
const RULE = /^ {0,3}([-*_])(?: *\1){2,} *$/;
const QUOTE = /^ {0,3}> ?/;
const ITEM = /^( *)([-*+]|\d{1,9}[.)])([ \t]+|$)/;

/** The rendering of a text that grows: only what changed is made anew. */
export class MarkdownView {
  #root;
  #sources = [];

  constructor(root) {
    this.#root = root;
  }

  update(text) {
    const blocks = parseBlocks(text.replaceAll("\r\n", "\n").split("\n"), 0);
    let same = 0;
    while (same < blocks.length && this.#sources[same] === blocks[same].source) same += 1;
    while (this.#root.childNodes.length > same) this.#root.lastChild.remove();
    for (const block of blocks.slice(same)) this.#root.append(renderBlock(block));
    this.#sources = blocks.map((block) => block.source);
  }
}

// Blocks

/** The blocks of some lines. Each has its `source`, on which alone its rendering depends. */
function parseBlocks(lines, depth) {
  const blocks = [];
  let at = 0;
  while (at < lines.length) {
    if (isBlank(lines[at])) {
      at += 1;
      continue;
    }
    const [block, end] = parseBlock(lines, at, depth);
    block.source = lines.slice(at, end).join("\n");
    blocks.push(block);
    at = end;
  }
  return blocks;
}

/** The block that begins at a line, and the line after it. */
function parseBlock(lines, start, depth) {
  const line = expandTabs(lines[start]);
  if (fence(line)) return parseCode(lines, start);
  const heading = HEADING.exec(line);
  if (heading) {
    const text = line.slice(heading[0].length).trim().replace(/(^|\s)#+$/, "");
    return [{ kind: "heading", level: heading[1].length, text: text.trim() }, start + 1];
  }
  if (RULE.test(line)) return [{ kind: "rule" }, start + 1];
  if (depth < MAX_DEPTH) {
    if (QUOTE.test(line)) return parseQuote(lines, start, depth);
    if (ITEM.test(line)) return parseList(lines, start, depth);
  }
  if (isTable(lines, start)) return parseTable(lines, start);
  let end = start + 1;
  while (end < lines.length && !isBlank(lines[end]) && !interrupts(lines, end, depth)) end += 1;
  const text = lines.slice(start, end).map((line) => line.trimStart()).join("\n");
  return [{ kind: "paragraph", text }, end];
}

/** Whether a line begins a block that ends a paragraph before it. */
function interrupts(lines, at, depth) {
  const line = expandTabs(lines[at]);
  if (fence(line) || HEADING.test(line) || RULE.test(line) || isTable(lines, at)) return true;
  if (depth >= MAX_DEPTH) return false;
  const item = ITEM.exec(line);
  // A number that happens to begin a line is no list.
  return QUOTE.test(line) || (item !== null && (item[2].length === 1 || /^1[.)]/.test(item[2])));
}

function fence(line) {
  const found = FENCE.exec(line);
  // ```so``` is a code span.
  return found && !(found[2][0] === "`" && found[3].includes("`")) ? found : null;
}

function parseCode(lines, start) {
  const [, indent, marks, info] = fence(expandTabs(lines[start]));
  const code = [];
  let at = start + 1;
  while (at < lines.length) {
    const closing = fence(expandTabs(lines[at]));
    if (closing && closing[2].startsWith(marks) && closing[3].trim() === "") break;
    code.push(unindent(lines[at], indent.length));
    at += 1;
  }
  const language = info.trim().split(/\s/, 1)[0].slice(0, 40);
  return [{ kind: "code", language, text: code.join("\n") }, Math.min(at + 1, lines.length)];
}

function parseQuote(lines, start, depth) {
  let end = start;
  while (end < lines.length && QUOTE.test(lines[end])) end += 1;
  const own = lines.slice(start, end).map((line) => line.replace(QUOTE, ""));
  return [{ kind: "quote", blocks: parseBlocks(own, depth + 1) }, end];
}

function parseList(lines, start, depth) {
  const marker = (line) => {
    const item = RULE.test(line) ? null : ITEM.exec(line);
    return item && { indent: item[1].length, mark: item[2], text: line.slice(item[0].length), item };
  };
  const first = marker(expandTabs(lines[start]));
  const items = [];
  let at = start;
  for (;;) {
    const own = at < lines.length ? marker(expandTabs(lines[at])) : null;
    // Another mark is another list.
    if (own?.mark.at(-1) !== first.mark.at(-1)) break;
    const end = itemEnd(lines, at, own, depth);
    items.push(parseBlocks(itemLines(lines, at, end, own), depth + 1));
    at = end;
    const next = skipBlank(lines, at);
    if (next < lines.length && marker(expandTabs(lines[next]))) at = next;
  }
  const number = Number.parseInt(first.mark, 10);
  return [{ kind: "list", number: Number.isNaN(number) ? null : number, items }, at];
}

/** Where the text of an item begins. */
function itemOffset(own) {
  const after = own.item[3].length;
  return own.indent + own.mark.length + (after >= 1 && after <= 4 ? after : 1);
}

/** How far its children are indented at least: two spaces are enough for people and models. */
function childIndent(own) {
  return Math.min(itemOffset(own), own.indent + 2);
}

function itemEnd(lines, start, own, depth) {
  const least = childIndent(own);
  let at = start + 1;
  while (at < lines.length) {
    const next = skipBlank(lines, at);
    if (next === lines.length) return at;
    if (indentOf(lines[next]) < least) {
      const continues = next === at && !ITEM.test(expandTabs(lines[at])) && !interrupts(lines, at, depth);
      if (!continues) return at;
    }
    at = next + 1;
  }
  return at;
}

function itemLines(lines, start, end, own) {
  let width = null;
  const rest = lines.slice(start + 1, end).map((line) => {
    const indent = indentOf(line);
    if (!isBlank(line) && indent >= childIndent(own)) width ??= Math.min(indent, itemOffset(own));
    return unindent(line, width ?? 0);
  });
  return [own.text, ...rest];
}

function isTable(lines, at) {
  if (!lines[at].includes("|") || !lines[at + 1]?.includes("-")) return false;
  const rules = cells(lines[at + 1]);
  if (rules.length > MAX_COLUMNS) return false;
  return rules.length === cells(lines[at]).length && rules.every((cell) => /^:?-+:?$/.test(cell));
}

function parseTable(lines, start) {
  const aligns = cells(lines[start + 1]).map((cell) => {
    if (!cell.endsWith(":")) return "";
    return cell.startsWith(":") ? "center" : "end";
  });
  let end = start + 2;
  while (end < lines.length && lines[end].includes("|") && !isBlank(lines[end])) end += 1;
  const rows = lines.slice(start + 2, end).map((line) => cells(line).slice(0, aligns.length));
  return [{ kind: "table", aligns, head: cells(lines[start]), rows }, end];
}

function cells(line) {
  // A bar after a backslash belongs to its cell.
  const parts = line.trim().replace(/^\|/, "").split(/(?<!\\)\|/);
  if (parts.length > 1 && isBlank(parts.at(-1))) parts.pop();
  return parts.map((cell) => cell.trim().replaceAll("\\|", "|"));
}

const isBlank = (line) => line.trim() === "";

function skipBlank(lines, at) {
  while (at < lines.length && isBlank(lines[at])) at += 1;
  return at;
}

function expandTabs(line) {
  return line.replace(/^[ \t]+/, (space) => space.replaceAll("\t", "    "));
}

function indentOf(line) {
  return /^ */.exec(expandTabs(line))[0].length;
}

/** A line without up to `width` columns of the space it begins with; tabs of what remains are kept. */
function unindent(line, width) {
  let at = 0;
  for (let columns = 0; columns < width && (line[at] === " " || line[at] === "\t"); at += 1) {
    columns += line[at] === "\t" ? 4 : 1;
  }
  return line.slice(at);
}

function renderBlock(block) {
  switch (block.kind) {
    case "code":
      return renderCode(block.language, block.text);
    case "heading": {
      // The page and the speaker have the first levels.
      const level = Math.min(block.level + 2, 6);
      return element(`h${level}`, {}, ...renderInline(block.text));
    }
    case "rule":
      return element("hr");
    case "quote":
      return element("blockquote", {}, ...block.blocks.map(renderBlock));
    case "list": {
      const list = element(block.number === null ? "ul" : "ol");
      if (block.number !== null && block.number !== 1) list.start = block.number;
      list.append(...block.items.map(renderItem));
      return list;
    }
    case "table":
      return renderTable(block);
    default:
      return element("p", {}, ...renderInline(block.text));
  }
}

function renderItem(blocks) {
  const item = element("li");
  const [first] = blocks;
  const task = first?.kind === "paragraph" && /^\[([ xX])\] /.exec(first.text);
  if (task) {
    item.className = "task";
    first.text = (task[1] === " " ? "☐ " : "☑ ") + first.text.slice(task[0].length);
  }
  item.append(...blocks.map(renderBlock));
  return item;
}

/** A block of code with its language and a button that copies it. */
export function renderCode(language, text) {
  const code = element("code", {}, text);
  const label = language ? `Code, ${language}` : "Code";
  // What scrolls must be reachable by keyboard.
  const scroller = element("pre", { tabIndex: 0, role: "group", "aria-label": label }, code);
  const head = element("div", { className: "code-head" }, element("span", {}, language));
  head.append(copyButton("Copy the code", () => code.textContent));
  return element("div", { className: "code", dir: "ltr" }, head, scroller);
}

function renderTable({ aligns, head, rows }) {
  const row = (tag, texts) => {
    const made = texts.map((text, column) => {
      const cell = element(tag, {}, ...renderInline(text));
      if (aligns[column]) cell.classList.add(aligns[column]);
      return cell;
    });
    return element("tr", {}, ...made);
  };
  const body = element("tbody", {}, ...rows.map((texts) => row("td", texts)));
  const table = element("table", {}, element("thead", {}, row("th", head)), body);
  return element("div", { className: "table", tabIndex: 0, role: "group", "aria-label": "Table" }, table);
}

// Inline text: CommonMark's algorithm for emphasis, with bounds.

const PLAIN = /[^\\`*_~[\]!<&\nhH]+/y;
const ESCAPE = /\\([!-/:-@[-`{-~])/y;
const LINE_BREAK = /<br ?\/?>/iy;
const AUTOLINK = /<((?:https?:\/\/|mailto:)[^\s<>]{1,2000})>/iy;
const URL_TEXT = /https?:\/\/[^\s<>"`[\]{}|\\^]{1,2000}/iy;
const ENTITY = /&(amp|lt|gt|quot|apos|nbsp|#\d{1,7}|#x[\da-f]{1,6});/iy;
const TARGET = new RegExp(
  // In angle brackets, or with balanced parentheses; then a title, which is dropped.
  /\(\s{0,9}(?:<([^<>\n]{0,2000})>|([^\s()<>]{0,2000}(?:\([^\s()]{0,500}\)[^\s()<>]{0,2000}){0,8}))/.source +
    /(?:\s{1,9}(?:"[^"]{0,500}"|'[^']{0,500}'|\([^()]{0,500}\)))?\s{0,9}\)/.source,
  "y",
);
const ENTITIES = { amp: "&", lt: "<", gt: ">", quot: '"', apos: "'", nbsp: "\u00a0" };

function matchAt(pattern, text, at) {
  pattern.lastIndex = at;
  return pattern.exec(text);
}

function renderInline(text) {
  const nodes = text.length > MAX_INLINE ? [text] : parseInline(text);
  return nodes.map((node) => renderNode(node, false));
}

function renderNode(node, inLink) {
  if (typeof node === "string") return node;
  if (node.mark) return node.mark.repeat(node.count);
  const children = (inside) => node.children.map((child) => renderNode(child, inside));
  if (node.tag !== "a") return element(node.tag, {}, ...children(inLink));
  // Links do not nest.
  if (inLink) return element("span", {}, ...children(true));
  const properties = { href: node.href, target: "_blank", rel: "noopener noreferrer", title: node.href };
  return element("a", properties, ...children(true));
}

/** Texts, elements (`tag`, `children`) and marks that turned out to be text (`mark`, `count`). */
function parseInline(text) {
  const nodes = [];
  const brackets = [];
  // Where the last run of so many backticks is: code spans without an end are not searched for again and again.
  const lastRun = new Map();
  for (const run of text.matchAll(/`+/g)) lastRun.set(run[0].length, run.index);
  let at = 0;
  let found;
  while (at < text.length) {
    const character = text[at];
    let length = 1;
    let node = character;
    if ((found = matchAt(PLAIN, text, at))) {
      node = found[0];
      length = node.length;
    } else if ((found = matchAt(ESCAPE, text, at))) {
      node = found[1];
      length = 2;
    } else if (character === "\n" || (found = matchAt(LINE_BREAK, text, at))) {
      node = { tag: "br", children: [] };
      length = found?.[0].length ?? 1;
    } else if ((found = matchAt(ENTITY, text, at))) {
      node = entity(found[1]);
      length = found[0].length;
    } else if (character === "`") {
      [node, length] = codeSpan(text, at, lastRun);
    } else if ((found = matchAt(AUTOLINK, text, at))) {
      node = link(found[1], [found[1]]) ?? found[0];
      length = found[0].length;
    } else if ((character === "h" || character === "H") && !/\w/.test(text[at - 1] ?? "")) {
      const url = matchAt(URL_TEXT, text, at);
      if (url) {
        const target = withoutPunctuation(url[0]);
        node = link(target, [target]) ?? target;
        length = target.length;
      }
    } else if (character === "*" || character === "_" || character === "~") {
      node = delimiter(text, at);
      length = node.count;
    } else if (character === "[") {
      brackets.push({ index: nodes.length, isImage: false });
    } else if (character === "!" && text[at + 1] === "[") {
      // An image is a link to it: nothing is loaded.
      brackets.push({ index: nodes.length, isImage: true });
      node = "![";
      length = 2;
    } else if (character === "]") {
      const opener = brackets.pop();
      const target = opener && matchAt(TARGET, text, at + 1);
      const href = target && (target[1] ?? target[2]);
      const inside = href && safeUrl(href) ? nodes.splice(opener.index).slice(1) : null;
      if (inside) {
        emphasize(inside);
        node = link(href, inside);
        length += target[0].length;
        if (!opener.isImage) brackets.length = 0;
      }
    }
    nodes.push(node);
    at += length;
  }
  emphasize(nodes);
  return nodes;
}

function entity(name) {
  const lower = name.toLowerCase();
  if (!lower.startsWith("#")) return ENTITIES[lower];
  const code = lower[1] === "x" ? Number.parseInt(lower.slice(2), 16) : Number.parseInt(lower.slice(1), 10);
  const isCharacter = code > 0 && code <= 0x10ffff && !(code >= 0xd800 && code <= 0xdfff);
  return isCharacter ? String.fromCodePoint(code) : "\ufffd";
}

function codeSpan(text, at, lastRun) {
  const marks = matchAt(/`+/y, text, at)[0];
  if (lastRun.get(marks.length) > at) {
    const runs = /`+/g;
    runs.lastIndex = at + marks.length;
    for (let run = runs.exec(text); run; run = runs.exec(text)) {
      if (run[0].length !== marks.length) continue;
      let code = text.slice(at + marks.length, run.index).replaceAll("\n", " ");
      if (code.startsWith(" ") && code.endsWith(" ") && code.trim() !== "") code = code.slice(1, -1);
      return [{ tag: "code", children: [code] }, run.index + marks.length - at];
    }
  }
  return [marks, marks.length];
}

/** A link, if it leads somewhere harmless. */
function link(url, children) {
  const href = safeUrl(url);
  return href && { tag: "a", href, children };
}

function safeUrl(url) {
  try {
    const { protocol, href } = new URL(url);
    return ["http:", "https:", "mailto:"].includes(protocol) ? href : null;
  } catch {
    return null;
  }
}

/** A bare URL without what belongs to the sentence around it. */
function withoutPunctuation(url) {
  let end = url.length;
  let unbalanced = (url.match(/\)/g)?.length ?? 0) - (url.match(/\(/g)?.length ?? 0);
  for (;;) {
    if (/[.,;:!?*_~'"]/.test(url[end - 1])) end -= 1;
    else if (url[end - 1] === ")" && unbalanced > 0) {
      end -= 1;
      unbalanced -= 1;
    } else return url.slice(0, end);
  }
}

function delimiter(text, at) {
  const mark = text[at];
  let count = 1;
  while (text[at + count] === mark) count += 1;
  const before = text[at - 1] ?? " ";
  const after = text[at + count] ?? " ";
  const isSpace = (character) => /\s/.test(character);
  const isPunctuation = (character) => /[\p{P}\p{S}]/u.test(character);
  const left = !isSpace(after) && (!isPunctuation(after) || isSpace(before) || isPunctuation(before));
  const right = !isSpace(before) && (!isPunctuation(before) || isSpace(after) || isPunctuation(after));
  const opens = left && (mark !== "_" || !right || isPunctuation(before));
  const closes = right && (mark !== "_" || !left || isPunctuation(after));
  return { mark, count, length: count, opens, closes };
}

function pairs(opener, closer) {
  if (opener.mark !== closer.mark || !opener.opens || opener.count === 0) return false;
  if (closer.mark === "~") return opener.count === 2 && closer.count === 2;
  const isBoth = opener.closes || closer.opens;
  const isThird = (opener.length + closer.length) % 3 === 0 && (opener.length % 3 || closer.length % 3);
  return !(isBoth && isThird);
}

/** Turns pairs of marks into elements, in place. */
function emphasize(nodes) {
  // For each kind of closing mark: below which index there is no opening one.
  const floors = new Map();
  let at = 0;
  while (at < nodes.length) {
    const closer = nodes[at];
    if (!closer.mark || !closer.closes || closer.count === 0) {
      at += 1;
      continue;
    }
    const kind = `${closer.mark}${closer.opens}${closer.length % 3}${closer.count === 2}`;
    const floor = floors.get(kind) ?? 0;
    let index = at - 1;
    while (index >= floor && !(nodes[index].mark && pairs(nodes[index], closer))) index -= 1;
    if (index < floor) {
      floors.set(kind, at);
      at += 1;
      continue;
    }
    const opener = nodes[index];
    const depth = 1 + nodes.slice(index + 1, at).reduce((most, node) => Math.max(most, node.depth ?? 0), 0);
    if (depth > MAX_EMPHASIS) {
      floors.set(kind, at);
      at += 1;
      continue;
    }
    const used = opener.count >= 2 && closer.count >= 2 ? 2 : 1;
    const tag = closer.mark === "~" ? "del" : used === 2 ? "strong" : "em";
    const children = nodes.slice(index + 1, at);
    nodes.splice(index + 1, children.length, { tag, children, depth });
    opener.count -= used;
    closer.count -= used;
    at = index + 2;
    for (const [other, place] of floors) if (place > index + 1) floors.set(other, index + 1);
  }
}
