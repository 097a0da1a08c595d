"""Blocks -> one HTML file that needs nothing else: images inside, no scripts, no links to the outside.

It reads on a phone (wide tables and logs scroll inside their own box) and in a text browser of 80 columns.
"""

import base64
from html import escape
from itertools import groupby

from deskside.report.document import (
    Block,
    Bullets,
    Code,
    Details,
    Document,
    Figure,
    Paragraph,
    Sample,
    Table,
    clean,
)

WIDE = 3  # columns
STYLE = """
:root { color-scheme: light; }
body { margin: 0 auto; padding: 1rem; max-width: 72rem; background: #fff; color: #1a1a1a;
  font: 1rem/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "DejaVu Sans", sans-serif; overflow-wrap: anywhere; }
p, ul, pre, .sample { max-width: 60rem; box-sizing: border-box; }
h1 { font-size: 1.5rem; line-height: 1.2; margin: 0.5rem 0; }
h2 { font-size: 1.15rem; margin: 2rem 0 0.5rem; padding-bottom: 0.2rem; border-bottom: 1px solid #999; }
.verdict { font-size: 1.1rem; font-weight: 600; padding: 0.7rem 0.9rem; background: #f0f0f0;
  border-left: 5px solid #1a1a1a; }
.figures { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 25rem), 1fr)); gap: 1rem; }
figure { margin: 0; }
figure img { width: 100%; height: auto; display: block; }
figcaption { color: #444; font-size: 0.85rem; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; margin: 0.3rem 0; font-size: 0.92rem; overflow-wrap: normal; }
th, td { text-align: left; vertical-align: top; padding: 0.25rem 0.9rem 0.25rem 0; border-bottom: 1px solid #ddd; }
th { border-bottom-color: #777; }
.wide th:first-child, .wide td:first-child { position: sticky; left: 0; background: #fff; min-width: 7rem; }
.wide td { min-width: 5rem; }
td { font-variant-numeric: tabular-nums; }
pre { margin: 0.4rem 0; padding: 0.6rem; background: #f5f5f5; border: 1px solid #ddd; font-size: 0.85rem;
  white-space: pre-wrap; overflow-wrap: anywhere; }
.sample { margin: 0.8rem 0; padding: 0.6rem 0.8rem; border-left: 3px solid #777; white-space: pre-wrap; }
summary { cursor: pointer; }
details { margin: 0.6rem 0; }
@media (max-width: 30rem) { table { font-size: 0.85rem; } th, td { padding-right: 0.6rem; } }
"""


def render(document: Document) -> str:
    """The report as one HTML page. Raises OSError when a figure cannot be read."""
    parts = [f"<h1>{_text(document.title)}</h1>", f'<p class="verdict">{_text(document.verdict)}</p>']
    for section in document.sections:
        parts.append(f"<h2>{_text(section.title)}</h2>")
        for is_figure, run in groupby(section.blocks, key=lambda block: isinstance(block, Figure)):
            inner = [_block(block) for block in run]
            parts += ['<div class="figures">', *inner, "</div>"] if is_figure else inner
    body = "\n".join(parts)
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{_text(document.title)}</title>\n<style>{STYLE}</style>\n</head>\n<body>\n{body}\n</body>\n</html>\n"
    )


def _block(block: Block) -> str:
    match block:
        case Paragraph():
            return f"<p>{_text(block.text)}</p>"
        case Bullets():
            return "<ul>" + "".join(f"<li>{_text(item)}</li>" for item in block.items) + "</ul>"
        case Code():
            return f"<pre>{_text(block.text)}</pre>"
        case Sample():
            return f'<div class="sample"><strong>{_text(block.prompt)}</strong>{_text(block.text)}</div>'
        case Table():
            head = "".join(f"<th>{_text(cell)}</th>" for cell in block.head)
            rows = "".join(
                "<tr>" + "".join(f"<td>{_text(cell)}</td>" for cell in row) + "</tr>" for row in block.rows
            )
            # A wide table scrolls under its first column; squeezed onto a phone it would be one word to the line.
            wide = ' class="wide"' if len(block.head) > WIDE else ""
            return f'<div class="scroll"><table{wide}><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table></div>'
        case Figure():
            data = base64.b64encode(block.path.read_bytes()).decode("ascii")
            image = f'<img alt="{_text(block.title)}" src="data:image/png;base64,{data}">'
            return f"<figure>{image}<figcaption>{_text(block.caption)}</figcaption></figure>"
        case Details():
            inner = "\n".join(_block(part) for part in block.blocks)
            return f"<details><summary>{_text(block.summary)}</summary>{inner}</details>"


def _text(text: str) -> str:
    return escape(clean(text))
