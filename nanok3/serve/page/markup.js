// Text of a model to elements: the part of markdown that answers use.
//
//   blocks(text)        -> [{kind, source, ...}]      fences, headings, rules, quotes, lists, tables, paragraphs
//   show(node, text)    -> builds anew only the blocks that have changed, so a stream costs its last one
//
// Text becomes text nodes and nothing else: an answer cannot bring an element, an attribute or a script of its own. The
// one attribute taken from it is a link, whose scheme has to be http or https. All scans move forward and nesting is
// bounded, so no text makes them slow.

const FENCE = /^ {0,3}(`{3,20}|~{3,20})([^`]*)$/;
const HEADING = /^ {0,3}(#{1,6})\s+(\S.*)$/;
const RULE = /^ {0,3}([-*_])(?:\s*\1){2,}\s*$/;
const QUOTE = /^ {0,3}> ?/;
const ITEM = /^(\s*)([-*+]|\d{1,9}[.)])(?:\s+|$)/;
const LINK = /\[([^[\]\n]{1,500})\]\((https?:\/\/[^\s()<>]{1,2000}(?:\([^\s()<>]{0,200}\)[^\s()<>]{0,200})?)\)/iy;
const ADDRESS = /https?:\/\/[^\s<>"'`]{1,2000}/iy;
const DEEPEST = 6;

export function element(name, properties = {}, ...children) {
  const made = Object.assign(document.createElement(name), properties);
  made.append(...children.filter((child) => child != null));
  return made;
}

// ---------------------------------------------------------------------- blocks

export function blocks(text, depth = 0) {
  const lines = text.split("\n");
  const found = [];
  for (let at = 0; at < lines.length; ) {
    if (!lines[at].trim()) {
      at += 1;
      continue;
    }
    const block = blockAt(lines, at, depth);
    found.push({ ...block, depth, source: `${block.kind} ${lines.slice(at, block.end).join("\n")}` });
    at = block.end;
  }
  return found;
}

function blockAt(lines, at, depth) {
  const line = lines[at];
  const fence = FENCE.exec(line);
  if (fence) return fenceAt(lines, at, fence);
  const heading = HEADING.exec(line);
  if (heading) return { kind: "heading", level: heading[1].length, text: heading[2].replace(/\s#+$/, ""), end: at + 1 };
  if (RULE.test(line)) return { kind: "rule", end: at + 1 };
  if (depth < DEEPEST && QUOTE.test(line)) {
    const end = endOf(lines, at, (next) => QUOTE.test(next));
    return { kind: "quote", text: lines.slice(at, end).map((one) => one.replace(QUOTE, "")).join("\n"), end };
  }
  if (depth < DEEPEST && ITEM.test(line)) return listAt(lines, at);
  if (line.includes("|") && isDivider(lines[at + 1] ?? "")) return tableAt(lines, at);
  const end = endOf(lines, at, (next) => next.trim() && !FENCE.test(next) && !HEADING.test(next) && !ITEM.test(next));
  return { kind: "paragraph", text: lines.slice(at, end).join("\n"), end };
}

function endOf(lines, at, goesOn) {
  let end = at + 1;
  while (end < lines.length && goesOn(lines[end])) end += 1;
  return end;
}

function fenceAt(lines, at, [, marks, language]) {
  const isClose = (line) => line.trim().startsWith(marks) && !line.trim().replaceAll(marks[0], "");
  const end = endOf(lines, at, (line) => !isClose(line));
  return { kind: "code", language: language.trim(), text: lines.slice(at + 1, end).join("\n"), end: Math.min(end + 1, lines.length) };
}

// An item goes on with lines that are indented, and after a blank line too.
function listAt(lines, at) {
  const [, indent, mark] = ITEM.exec(lines[at]);
  const ordered = /\d/.test(mark);
  const items = [];
  let end = at;
  for (; end < lines.length; end += 1) {
    const item = ITEM.exec(lines[end]);
    if (item && item[1].length <= indent.length + 1 && /\d/.test(item[2]) === ordered) {
      items.push({ width: item[0].length, lines: [lines[end].slice(item[0].length)] });
    } else if (!lines[end].trim() ? belongs(lines, end + 1, indent) : lines[end].search(/\S/) > indent.length) {
      const last = items.at(-1);
      last.lines.push(lines[end].slice(Math.min(last.width, Math.max(lines[end].search(/\S/), 0))));
    } else break;
  }
  return { kind: "list", ordered, first: parseInt(mark) || 1, items: items.map((item) => item.lines.join("\n")), end };
}

function belongs(lines, at, indent) {
  const next = lines[at];
  return next !== undefined && next.trim() && (next.search(/\S/) > indent.length || ITEM.test(next));
}

// A table is a row of heads, a row of dashes, and rows up to the first line without a bar.
function tableAt(lines, at) {
  const end = endOf(lines, at, (next) => next.includes("|"));
  const heads = cellsOf(lines[at]);
  return { kind: "table", heads, rows: lines.slice(at + 2, end).map((row) => cellsOf(row).slice(0, heads.length)), end };
}

const isDivider = (line) => line.includes("|") && cellsOf(line).every((cell) => /^:?-+:?$/.test(cell));

function cellsOf(line) {
  return line.trim().replace(/^\|/, "").replace(/\|$/, "").split("|").map((cell) => cell.trim());
}

// ---------------------------------------------------------------------- elements

const BUILD = {
  code: ({ language, text }) => codeBlock(text, language),
  heading: ({ level, text }) => element(`h${Math.min(level + 2, 6)}`, {}, inline(text)),
  rule: () => element("hr"),
  quote: ({ text, depth }) => element("blockquote", {}, ...blocks(text, depth + 1).map(build)),
  list: ({ ordered, first, items, depth }) => {
    const list = element(ordered ? "ol" : "ul", {}, ...items.map((text) => listItem(text, depth)));
    if (ordered) list.start = first;
    return list;
  },
  table: ({ heads, rows }) => {
    const row = (kind, cells) => element("tr", {}, ...cells.map((text) => element(kind, {}, inline(text))));
    const table = element("table", {}, element("thead", {}, row("th", heads)), element("tbody", {}, ...rows.map((cells) => row("td", cells))));
    const framed = element("div", { className: "table", tabIndex: 0, ariaLabel: "Table" }, table);
    framed.setAttribute("role", "region");
    return framed;
  },
  paragraph: ({ text }) => element("p", {}, inline(text)),
};

const build = (block) => BUILD[block.kind](block);

function listItem(text, depth) {
  const parts = blocks(text, depth + 1);
  const children = parts.map((part, k) => (part.kind === "paragraph" && k === 0 ? inline(part.text) : build(part)));
  return element("li", {}, ...children);
}

export function codeBlock(text, language = "") {
  const copy = element("button", { type: "button", textContent: "Copy" });
  copy.addEventListener("click", () => copyText(text, copy));
  const label = element("span", { textContent: language });
  const code = element("pre", { tabIndex: 0, ariaLabel: language ? `Code, ${language}` : "Code" }, element("code", { textContent: text }));
  code.setAttribute("role", "region");
  return element("div", { className: "block" }, element("div", { className: "bar" }, label, copy), code);
}

export async function copyText(text, button) {
  const said = button.textContent;
  // Only pages over https, or of this computer, have a clipboard.
  button.textContent = await navigator.clipboard.writeText(text).then(() => "Copied", () => "Not allowed");
  setTimeout(() => (button.textContent = said), 1500);
}

// `code`, **bold**, *italic*, [links](https://...) and plain addresses
export function inline(text) {
  const made = document.createDocumentFragment();
  const absent = new Set(); // marks of which no further one comes
  let told = 0;
  const say = (node, from, to) => {
    if (told < from) made.append(text.slice(told, from));
    made.append(node);
    told = to;
  };
  const starts = /`+|\*\*|\*|__|_|\[|https?:\/\//gi;
  for (let start = starts.exec(text); start; start = starts.exec(text)) {
    const found = spanAt(text, start.index, start[0], absent);
    if (found) {
      say(found.node, start.index, found.end);
      starts.lastIndex = found.end;
    }
  }
  made.append(text.slice(told));
  return made;
}

function spanAt(text, at, mark, absent) {
  if (mark === "[") return linkAt(text, at);
  if (/^h/i.test(mark)) return addressAt(text, at);
  const inside = at + mark.length;
  const close = absent.has(mark) ? -1 : text.indexOf(mark, inside);
  if (close < 0) {
    absent.add(mark);
    return null;
  }
  const body = text.slice(inside, close);
  const end = close + mark.length;
  if (mark[0] === "`") return { node: element("code", { textContent: body.trim() || body }), end };
  const touching = body && !/^\s|\s$/.test(body);
  const insideWord = mark[0] === "_" && (/\w/.test(text[at - 1] ?? "") || /\w/.test(text[end] ?? ""));
  return touching && !insideWord ? { node: element(mark.length === 2 ? "strong" : "em", {}, inline(body)), end } : null;
}

function linkAt(text, at) {
  LINK.lastIndex = at;
  const found = LINK.exec(text);
  return found && link(found[2], found[1], LINK.lastIndex);
}

function addressAt(text, at) {
  ADDRESS.lastIndex = at;
  const found = ADDRESS.exec(text)?.[0].replace(/[.,;:!?)\]}*_]{1,20}$/, "");
  return found ? link(found, found, at + found.length) : null;
}

function link(address, said, end) {
  if (!URL.canParse(address)) return null;
  const parsed = new URL(address);
  if (!["http:", "https:"].includes(parsed.protocol)) return null;
  return { node: element("a", { href: parsed.href, title: parsed.href, target: "_blank", rel: "noopener noreferrer", textContent: said }), end };
}

// ---------------------------------------------------------------------- showing

// Returns the texts of blocks that are complete, which is what a screen reader should hear while more comes.
export function show(node, text) {
  const wanted = blocks(text);
  let same = 0;
  while (same < wanted.length && node.children[same]?.source === wanted[same].source) same += 1;
  while (node.children.length > same) node.lastElementChild.remove();
  for (const block of wanted.slice(same)) node.append(Object.assign(build(block), { source: block.source }));
  return Array.from(node.children, (child) => child.textContent);
}
