"""Rows of a list of verdicts: a colored chip, a title and a short text, and details that a click unfolds.

They are HTML, because Streamlit's expanders hold one line of Markdown as their label and take a second for a hundred.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

import streamlit as st

from deskside.dashboard import theme
from deskside.report.colors import CHIP_COLORS
from deskside.utils.format import printable

STYLE = """
.verdicts details {border-bottom: 1px solid color-mix(in srgb, currentColor 16%, transparent)}
.verdicts details:first-child {border-top: 1px solid color-mix(in srgb, currentColor 16%, transparent)}
.verdicts summary {display: grid; grid-template-columns: 9.5rem minmax(0, 5fr) minmax(0, 6fr) 1rem; gap: 0.25rem 1rem;
  padding: 0.55rem 0.25rem; cursor: pointer; align-items: baseline; list-style: none}
.verdicts summary::-webkit-details-marker {display: none}
.verdicts summary::after {content: "\\203A"; justify-self: end; opacity: 0.7}
.verdicts details[open] summary::after {transform: rotate(90deg)}
.verdicts summary:hover {background: color-mix(in srgb, currentColor 5%, transparent)}
.verdicts summary:focus-visible {outline: 2px solid; outline-offset: -2px}
.verdicts .chip {border-radius: 1rem; padding: 0.1rem 0.6rem; font-size: 0.8125rem; font-weight: 600;
  justify-self: start; line-height: 1.45}
.verdicts.legend {display: flex; flex-wrap: wrap; gap: 0.4rem}
.verdicts .title {font-weight: 600; overflow-wrap: anywhere}
.verdicts .text {overflow-wrap: anywhere}
.verdicts dl {display: grid; grid-template-columns: 8.5rem minmax(0, 1fr); gap: 0.25rem 1rem; margin: 0;
  padding: 0.1rem 0.25rem 0.8rem 0.25rem; font-size: 0.9375rem}
.verdicts dt {opacity: 0.75; font-weight: 400}
.verdicts dd {margin: 0; overflow-wrap: anywhere}
.verdicts {container-type: inline-size}
@container (max-width: 700px) {
  .verdicts summary {grid-template-columns: minmax(0, 1fr) 1rem}
  .verdicts .title, .verdicts .text {grid-column: 1}
  .verdicts summary::after {grid-column: 2; grid-row: 1}
  .verdicts dl {grid-template-columns: minmax(0, 1fr); gap: 0}
  .verdicts dd {margin-bottom: 0.4rem}
}
"""


@dataclass(frozen=True)
class VerdictRow:
    """One row.

    Attributes:
        kind: Key of `CHIP_COLORS`.
        verdict: Text of the chip.
        details: (label, text); those without a text are left out.
    """

    kind: str
    verdict: str
    title: str
    text: str
    details: tuple[tuple[str, str], ...] = ()


def draw_legend(chips: Sequence[tuple[str, str]]) -> None:
    """Draw chips, given as (kind, text), in a line that explains the marks of charts."""
    _draw_style()
    marks = " ".join(f'<span class="chip {kind}">{_text(text)}</span>' for kind, text in chips)
    st.html(f'<div class="verdicts legend">{marks}</div>')


def draw(rows: Sequence[VerdictRow], label: str) -> None:
    """Draw the rows. Screen readers read `label` as the name of the list."""
    _draw_style()
    st.html(
        f'<div class="verdicts" role="group" aria-label="{_text(label)}">{"".join(map(markup, rows))}</div>'
    )


def _draw_style() -> None:
    colors = {kind: pair[theme.is_dark()] for kind, pair in CHIP_COLORS.items()}
    chips = "".join(
        f".verdicts .{kind} {{color: {text}; background: {background}}}\n"
        for kind, (text, background) in colors.items()
    )
    st.html(f"<style>{STYLE}{chips}</style>")


def markup(row: VerdictRow) -> str:
    """Return the HTML of one row; its texts, which may come from another person, are escaped."""
    details = "".join(f"<dt>{_text(name)}</dt><dd>{_text(text)}</dd>" for name, text in row.details if text)
    return (
        f'<details><summary><span class="chip {row.kind}">{_text(row.verdict)}</span>'
        f'<span class="title">{_text(row.title)}</span><span class="text">{_text(row.text)}</span></summary>'
        f"<dl>{details}</dl></details>"
    )


def _text(text: str) -> str:
    return escape(" ".join(printable(text).split()))
