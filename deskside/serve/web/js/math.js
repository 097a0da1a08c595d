/**
 * A markdown-it plugin: mathematics becomes `<span class="math" data-tex="...">`, which markdown.js typesets after the
 * page's markup has been sanitised.
 *
 * Delimiters: `\( \)` and `$ $` within a line, `\[ \]` and `$$ $$` for displays. A single dollar opens only before, and
 * closes only after, something that is no space, and does not close before a digit, as in Pandoc, so that "$5 and $6"
 * stays text.
 */

const PAIRS = [
  { open: "$$", close: "$$", display: true },
  { open: "\\[", close: "\\]", display: true },
  { open: "\\(", close: "\\)", display: false },
  { open: "$", close: "$", display: false },
];

function findEnd(source, from, pair) {
  for (let end = source.indexOf(pair.close, from); end >= 0; end = source.indexOf(pair.close, end + 1)) {
    if (pair.close[0] === "$" && source[end - 1] === "\\") continue;  // \$ is a dollar within the formula
    if (pair.open !== "$") return end;
    const text = source.slice(from, end);
    if (!text || /^\s|\s$/.test(text) || text.includes("\n\n")) return -1;
    return /\d/.test(source[end + 1] ?? "") ? -1 : end;
  }
  return -1;
}

function inline(state, silent) {
  const pair = PAIRS.find(({ open }) => state.src.startsWith(open, state.pos));
  if (!pair) return false;
  const start = state.pos + pair.open.length;
  const end = findEnd(state.src, start, pair);
  if (end < 0 || !state.src.slice(start, end).trim()) return false;
  if (!silent) {
    const token = state.push("math", "span", 0);
    token.content = state.src.slice(start, end);
    token.meta = { display: pair.display };
  }
  state.pos = end + pair.close.length;
  return true;
}

/** A display that begins a block may contain empty lines, and what would be Markdown elsewhere. */
function block(state, startLine, endLine, silent) {
  const start = state.bMarks[startLine] + state.tShift[startLine];
  if (state.sCount[startLine] - state.blkIndent >= 4) return false;  // indented code
  const pair = PAIRS.find(({ open, display }) => display && state.src.startsWith(open, start));
  if (!pair) return false;
  const lines = [];
  for (let line = startLine; line < endLine; line++) {
    if (line > startLine && state.sCount[line] < state.blkIndent && !state.isEmpty(line)) return false;
    const from = state.bMarks[line] + state.tShift[line];
    const text = state.src.slice(line === startLine ? from + pair.open.length : from, state.eMarks[line]);
    const end = text.indexOf(pair.close);
    if (end < 0) {
      lines.push(text);
      continue;
    }
    if (text.slice(end + pair.close.length).trim()) return false;  // the paragraph goes on: `inline` takes it
    if (!silent) {
      const token = state.push("math", "span", 0);
      token.block = true;
      token.content = [...lines, text.slice(0, end)].join("\n");
      token.meta = { display: true };
      token.map = [startLine, line + 1];
      state.line = line + 1;
    }
    return true;
  }
  return false;
}

export function mathPlugin(markdown) {
  markdown.inline.ruler.before("escape", "math", inline);
  markdown.block.ruler.before("fence", "math", block, { alt: ["paragraph", "reference", "blockquote", "list"] });
  markdown.renderer.rules.math = ([...tokens], index) => {
    const { content, meta, block: isBlock } = tokens[index];
    const tex = markdown.utils.escapeHtml(content);
    const span = `<span class="math${meta.display ? " display" : ""}" data-tex="${tex}">${tex}</span>`;
    return isBlock ? `<p>${span}</p>\n` : span;
  };
}
