// Markdown as elements. Text becomes text nodes and addresses are http or mailto alone, so that a model's markup stays
// text. Patterns have bounds, and so has nesting: no answer takes long to draw.
import { h } from "./dom.js";

const DEPTH = 8, LONGEST = 8000; // a longer paragraph is plain
const FENCE = /^( {0,3})(`{3,}|~{3,}) *([^`\s]{0,30})[^`]*$/;
const ITEM = /^( {0,3})([-*+]|\d{1,9}[.)])( +|$)(.*)$/;
const RULE = /^ {0,3}([-*_])(?: *\1){2,} *$/;
const HEADING = /^(#{1,6}) +(.*)$/;
const DIVIDER = /^ {0,3}\|?(?: {0,3}:?-+:? {0,3}\|)+(?: {0,3}:?-+:? {0,3})?$/;
const INLINE = new RegExp([/(?<!`)(?<ticks>`{1,3})(?!`)(?<code>.{1,400}?)(?<!`)\k<ticks>(?!`)/, /\*\*(?=\S)(?<bold>.{1,400}?)(?<=\S)\*\*(?!\*)/,
  /\*(?=[^\s*])(?<italic>.{1,400}?)(?<=[^\s*])\*(?!\*)/, /\[(?<label>[^\]]{1,300})\]\((?<to>(?:https?:\/\/|mailto:)[^\s)]{1,2000})\)/,
  /\\(?<plain>[*_`#])/].map(each => each.source).join("|"), "s");

export const markdown = text => blocks(text.replaceAll("\r\n", "\n").split("\n"), 0);

/** A button that copies what `text` returns; pages without TLS have no clipboard but the old command. */
export function copyButton(text) {
  const button = h("button", { type: "button", class: "copy" }, "Copy");
  button.addEventListener("click", async () => {
    if (navigator.clipboard) await navigator.clipboard.writeText(text());
    else {
      const area = h("textarea", { class: "visually-hidden" });
      area.value = text();
      button.after(area);
      area.select();
      document.execCommand("copy");
      area.remove();
    }
    button.textContent = "Copied";
    setTimeout(() => { button.textContent = "Copy"; }, 1500);
  });
  return button;
}

function inline(text, depth = 0) {
  const out = [];
  for (let found; depth < DEPTH && text.length < LONGEST && (found = INLINE.exec(text)); text = text.slice(found.index + found[0].length)) {
    const { code, bold, italic, label, to, plain } = found.groups;
    out.push(text.slice(0, found.index), code !== undefined ? h("code", {}, code.replace(/^ (.*\S.*) $/s, "$1"))
      : bold ? h("strong", {}, inline(bold, depth + 1)) : italic ? h("em", {}, inline(italic, depth + 1))
      : label ? h("a", { href: to, target: "_blank", rel: "noopener noreferrer" }, inline(label, depth + 1)) : plain);
  }
  return [...out, text];
}

const indent = line => line.search(/\S|$/);
const begins = line => FENCE.test(line) || ITEM.test(line) || RULE.test(line) || HEADING.test(line) || line.startsWith(">");

function blocks(lines, depth) {
  const out = [], take = (from, goesOn) => {
    let to = from;
    while (to < lines.length && goesOn(lines[to], to)) to++;
    return to;
  };
  for (let at = 0, to, found; at < lines.length; at = to) {
    const line = lines[at];
    if (!line.trim()) to = at + 1;
    else if ((found = FENCE.exec(line))) {
      const [, margin, mark, language] = found, end = new RegExp(`^ {0,3}${mark[0]}{${mark.length},} *$`);
      to = take(at + 1, each => !end.test(each));
      out.push(codeBlock(language, lines.slice(at + 1, to++).map(each => each.slice(Math.min(margin.length, indent(each))))));
    } else if ((found = HEADING.exec(line))) {
      to = at + 1;
      out.push(h(`h${Math.min(6, found[1].length + 2)}`, {}, inline(found[2])));
    } else if (RULE.test(line)) {
      to = at + 1;
      out.push(h("hr"));
    } else if (depth < DEPTH && line.startsWith(">")) {
      to = take(at, each => each.startsWith(">"));
      out.push(h("blockquote", {}, blocks(lines.slice(at, to).map(each => each.replace(/^> ?/, "")), depth + 1)));
    } else if (depth < DEPTH && (found = ITEM.exec(line))) {
      let list;
      [list, to] = listFrom(lines, at, depth);
      out.push(list);
    } else if (line.includes("|") && DIVIDER.test(lines[at + 1] ?? "")) {
      to = take(at + 2, each => each.includes("|"));
      out.push(table(lines[at], lines.slice(at + 2, to)));
    } else {
      to = take(at + 1, (each, index) => each.trim() && !begins(each) && !DIVIDER.test(lines[index + 1] ?? ""));
      out.push(h("p", {}, inline(lines.slice(at, to).join("\n").trim())));
    }
  }
  return out;
}

function codeBlock(language, lines) {
  const code = h("code", {}, lines.join("\n"));
  return h("div", { class: "code" }, h("div", { class: "bar" }, language, copyButton(() => code.textContent)), h("pre", {}, code));
}

/** The list that begins at a line, and the line after it. What is indented under an item belongs to it. */
function listFrom(lines, at, depth) {
  const [, margin, first] = ITEM.exec(lines[at]), ordered = first.length > 1;
  const list = h(ordered ? "ol" : "ul", { start: ordered && parseInt(first, 10) !== 1 ? parseInt(first, 10) : null });
  for (let found; at < lines.length && (found = ITEM.exec(lines[at])) && found[2].at(-1) === first.at(-1)
    && found[1].length <= margin.length + 1 && !RULE.test(lines[at]);) {
    const own = [found[4]], width = found[1].length + found[2].length + 1;
    const next = from => { while (from < lines.length && !lines[from].trim()) from++; return from; };
    for (at++; at < lines.length; at++) {
      const far = next(at);
      if (far >= lines.length || indent(lines[far]) <= found[1].length) break;
      own.push(lines[at].slice(Math.min(width, indent(lines[at]))));
    }
    list.append(h("li", {}, blocks(own, depth + 1)));
    if (ITEM.test(lines[next(at)] ?? "")) at = next(at);
  }
  return [list, at];
}

function table(head, rows) {
  const cells = line => line.trim().replace(/^\||(?<!\\)\|$/g, "").split(/(?<!\\)\|/).map(each => inline(each.trim()));
  const row = (kind, line) => h("tr", {}, cells(line).map(each => h(kind, {}, each)));
  return h("div", { class: "wide" }, h("table", {}, h("thead", {}, row("th", head)), h("tbody", {}, rows.map(each => row("td", each)))));
}
