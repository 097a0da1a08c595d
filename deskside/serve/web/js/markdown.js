/**
 * A model's text, shown as Markdown while it is written.
 *
 * markdown-it parses the text, highlight.js colours its code, DOMPurify removes everything that is not in the
 * lists below, and only then KaTeX typesets its mathematics, from elements that it builds itself. HTML in the text
 * is shown as text. Nothing is loaded from other hosts: images become links.
 */

import { copyText, iconButton, make } from "./dom.js";
import { mathPlugin } from "./math.js";

const { markdownit, hljs, katex, DOMPurify } = window;  // vendor/, loaded by index.html

const TAGS = [
  "p", "br", "hr", "h1", "h2", "h3", "h4", "h5", "h6", "strong", "em", "s", "code", "pre", "blockquote",
  "ul", "ol", "li", "a", "table", "thead", "tbody", "tr", "th", "td", "span",
];
const ATTRIBUTES = ["href", "class", "start", "title", "data-tex"];
const MAX_HIGHLIGHTED = 50_000;  // characters of a code block; longer ones would make the page slow
const MAX_TEX = 5_000;

const markdown = markdownit({ html: false, linkify: true, highlight });
markdown.linkify.set({ fuzzyLink: false, fuzzyEmail: false });
markdown.validateLink = (address) => /^(https?:|mailto:)/i.test(address.trim());
markdown.use(mathPlugin);
markdown.inline.ruler.before("html_inline", "break", lineBreak);
markdown.renderer.rules.image = (tokens, index) => {
  const token = tokens[index];
  const name = markdown.utils.escapeHtml(token.content || "image");
  return `<a href="${markdown.utils.escapeHtml(token.attrGet("src"))}">${name}</a>`;
};
for (const cell of ["th_open", "td_open"]) {
  markdown.renderer.rules[cell] = (tokens, index, options, env, self) => {
    const align = /text-align:(\w+)/.exec(tokens[index].attrGet("style") ?? "");
    if (align) tokens[index].attrs = [["class", `align-${align[1]}`]];  // the policy forbids style attributes
    return self.renderToken(tokens, index, options);
  };
}

/** Models write `<br>` in the cells of tables, which Markdown cannot break otherwise. */
function lineBreak(state, silent) {
  const found = /^<br\s*\/?>/i.exec(state.src.slice(state.pos, state.pos + 8));
  if (!found) return false;
  if (!silent) state.push("hardbreak", "br", 0);
  state.pos += found[0].length;
  return true;
}

function highlight(code, language) {
  if (!hljs.getLanguage(language) || code.length > MAX_HIGHLIGHTED) return "";  // markdown-it escapes it
  return hljs.highlight(code, { language, ignoreIllegals: true }).value;
}

/**
 * Return the blocks at the top level (a paragraph, a list, a table) as [{source, html}].
 * earlier: the blocks of the beginning of the text; those that are unchanged are not rendered again.
 */
function renderBlocks(text, earlier) {
  const env = {};
  const tokens = markdown.parse(text, env);
  const lines = text.split("\n");
  const definitions = JSON.stringify(env.references ?? {});  // [name]: address, which any block may use
  const blocks = [];
  let group = [], depth = 0;
  for (const token of tokens) {
    group.push(token);
    depth += token.nesting;
    if (depth > 0) continue;
    const source = `${definitions}\n\n${lines.slice(...group[0].map).join("\n")}`;
    const before = earlier[blocks.length];
    const isSame = before?.source === source;
    blocks.push(isSame ? before : { source, html: markdown.renderer.render(group, markdown.options, env) });
    group = [];
  }
  return blocks;
}

function sanitised(html) {
  const options = { ALLOWED_TAGS: TAGS, ALLOWED_ATTR: ATTRIBUTES, ALLOW_DATA_ATTR: false, RETURN_DOM_FRAGMENT: true };
  return DOMPurify.sanitize(html, options);
}

function blockElement(html) {
  const block = make("div", { class: "block" });
  block.append(sanitised(html));
  for (const link of block.querySelectorAll("a[href]")) {
    link.target = "_blank";
    link.rel = "noopener noreferrer nofollow";
  }
  for (const table of block.querySelectorAll("table")) {
    const scroller = make("div", { class: "table", tabindex: "0", role: "region", "aria-label": "Table" });
    table.replaceWith(scroller);
    scroller.append(table);
  }
  for (const pre of block.querySelectorAll("pre")) addCodeHeader(pre);
  for (const math of block.querySelectorAll(".math[data-tex]")) typeset(math);
  return block;
}

function addCodeHeader(pre) {
  const code = pre.firstElementChild;
  const language = /language-([\w+#.-]+)/.exec(code.className)?.[1] ?? "";
  const copy = iconButton("copy", "Copy code", () => copyText(code.textContent.replace(/\n$/, ""), copy));
  const head = make("div", { class: "code-head" }, make("span", { text: language || "text" }), copy);
  const box = make("div", { class: "code" }, head);
  pre.replaceWith(box);
  box.append(pre);
  pre.tabIndex = 0;
  pre.setAttribute("role", "region");
  pre.setAttribute("aria-label", language ? `Code in ${language}` : "Code");
}

function typeset(span) {
  const tex = span.dataset.tex;
  if (tex.length > MAX_TEX) return;  // it stays as it was written
  const display = span.classList.contains("display");
  try {
    // trust: false refuses links and other commands with effects; the two limits end expansions without end.
    katex.render(tex, span, { displayMode: display, trust: false, strict: "ignore", maxSize: 20, maxExpand: 500 });
  } catch (error) {
    // RangeError: nested too deeply.
    if (!(error instanceof katex.ParseError || error instanceof RangeError)) throw error;
    span.textContent = tex;
    span.classList.add("unread");
    span.title = error.message;
    return;
  }
  if (display) {
    span.tabIndex = 0;  // it may be wider than the page
    span.setAttribute("role", "region");
    span.setAttribute("aria-label", "Formula");
  }
}

/**
 * Shows a text that grows. Only blocks whose HTML has changed are replaced, so that what is complete neither flickers
 * nor loses a selection or its place when scrolled sideways.
 */
export class MarkdownView {
  constructor(element) {
    element.replaceChildren();
    this.element = element;
    this._blocks = [];
  }

  /** Show the text. */
  show(text) {
    const blocks = renderBlocks(text, this._blocks);
    blocks.forEach(({ html }, index) => {
      if (html === this._blocks[index]?.html) return;
      const fresh = blockElement(html);
      const old = this.element.children[index];
      if (!old) this.element.append(fresh);
      else if (!replaceCode(old, fresh)) old.replaceWith(fresh);
    });
    while (this.element.children.length > blocks.length) this.element.lastElementChild.remove();
    this._blocks = blocks;
  }
}

/** Replace only the code of a block that was and remains one code block. Return false if it is something else. */
function replaceCode(old, fresh) {
  const [before, after] = [old, fresh].map((block) => block.querySelector(":scope > .code > pre > code"));
  if (!before || !after || before.className !== after.className) return false;
  before.replaceChildren(...after.childNodes);
  return true;
}
