"""Claims page: a table of published claims and a study's measurements of them, with filters and sorting."""

from collections import Counter
from typing import Any

import pandas as pd
import streamlit as st

from deskside.dashboard import theme
from deskside.dashboard.components import sentence
from deskside.dashboard.notes import empty_state
from deskside.dashboard.sidebar import Context, StudySelection, literal
from deskside.report.colors import CHIP_COLORS
from deskside.report.study_claims import CLAIM_KINDS, VERDICTS, claims_sentence, measured_text
from deskside.study.results import ClaimResult

COLUMNS = {
    "verdict": "verdict",
    "claim": "claim",
    "claimed": "claimed",
    "measured": "measured or computed",
    "source": "source",
}
CSV_COLUMNS = (
    "id", "text", "source", "claimed", "measured", "low", "high", "unit", "n", "scale", "verdict", "explanation",
)  # fmt: skip


def show(context: Context) -> None:
    """Draw the page."""
    selection = context.selection
    if selection is None:
        empty_state(context)
        return
    st.title("Claims")
    claims = selection.unfiltered.claims
    if not claims:
        st.info(
            f"{literal(selection.unfiltered.name)} speaks to no published claim. `deskside study claims` measures "
            "those of facts/claims.toml."
        )
        return
    st.write(literal(claims_sentence(selection.unfiltered)))
    shown = _draw_filters(selection, claims)
    missing = sum(claim.verdict == "not measured" for claim in claims)
    hidden = missing and len(shown) + missing == len(claims)
    others = "; select those that were not measured above" if hidden else ""
    st.caption(
        f"{len(shown)} of {len(claims)} claims{others}. Click on a claim for its scale and explanation."
    )
    if shown:
        colors = {kind: pair[theme.is_dark()] for kind, pair in CHIP_COLORS.items()}
        columns = [{"key": key, "title": title} for key, title in COLUMNS.items()]
        rows = [_row(claim) for claim in shown]
        _claims_table()(key="claims-table", data={"columns": columns, "colors": colors, "rows": rows})
        name = selection.folder.resolve().name
        st.download_button(
            "These claims as CSV", _table(shown).to_csv(index=False), f"{name}-claims.csv", "text/csv"
        )
    with st.expander("what the verdicts mean"):
        st.markdown("\n".join(f"- **{verdict}**: {about}." for verdict, (_, about) in VERDICTS.items()))


def _draw_filters(selection: StudySelection, claims: list[ClaimResult]) -> list[ClaimResult]:
    """Draw the filters by verdict, source and words, and return the claims that pass them."""
    counts = Counter(claim.verdict for claim in claims)
    order = sorted(counts, key=_place)
    chosen = st.pills(
        "verdict",
        order,
        selection_mode="multi",
        format_func=lambda verdict: f"{verdict} ({counts[verdict]})",
        key=f"{selection.name}: claims verdict",
    )
    first, second = st.columns(2)
    sources = Counter(_document(claim) for claim in claims)
    chosen_sources = first.multiselect(
        "source",
        sorted(sources),
        placeholder="all",
        format_func=lambda source: f"{source} ({sources[source]})",
        key=f"{selection.name}: claims source",
    )
    words = second.text_input(
        "search",
        placeholder="words of the claim, source or explanation",
        key=f"{selection.name}: claims search",
    )
    searched = words.casefold().split()
    # Claims that were not measured are shown only on request, or if there are no others.
    verdicts = chosen or ([v for v in order if v != "not measured"] if not searched else order) or order
    return [
        claim
        for claim in sorted(claims, key=lambda claim: _place(claim.verdict))
        if claim.verdict in verdicts
        and (not chosen_sources or _document(claim) in chosen_sources)
        and all(word in _searched_text(claim) for word in searched)
    ]


def _place(verdict: str) -> int:
    """Return the place of a verdict in order of importance."""
    return list(VERDICTS).index(verdict) if verdict in VERDICTS else len(VERDICTS)


def _document(claim: ClaimResult) -> str:
    """Return the document of a claim; its source also names the section, after a comma."""
    return claim.source.partition(", ")[0] or "not named"


def _searched_text(claim: ClaimResult) -> str:
    parts = (claim.text, claim.source, claim.claimed, claim.scale, claim.explanation, claim.verdict)
    return " ".join(parts).casefold()


def _row(claim: ClaimResult) -> dict[str, Any]:
    """Return a row for the table: values to sort by and texts to show, by column, and what a click unfolds."""
    measured = "" if claim.measured is None else measured_text(claim)
    details = {
        "why": sentence(claim.explanation.rstrip(".")),
        "source": claim.source,
        "seeds": str(claim.n) if claim.n else "",
        "scale": claim.scale,
        "basis": claim.basis,
        "note": "Measured while other trials ran on the same host." if claim.shared else "",
    }
    return {
        "id": claim.id,
        "kind": CLAIM_KINDS.get(claim.verdict, "open"),
        "texts": {
            "verdict": claim.verdict,
            "claim": claim.text,
            "claimed": claim.claimed,
            "measured": measured,
            "source": _document(claim),
        },
        "values": {
            "verdict": [_place(claim.verdict), claim.verdict],
            "claim": [claim.text],
            "claimed": [claim.claimed],
            "measured": None if claim.measured is None else [claim.unit, claim.measured],
            "source": [claim.source],
        },
        "details": [[name, text] for name, text in details.items() if text],
    }


@st.cache_resource(show_spinner=False)
def _claims_table() -> Any:
    """Return the component that draws the table. The cells of `st.dataframe` do not wrap and cannot unfold."""
    return st.components.v2.component(
        "deskside_claims",
        html='<div class="claims"></div>',
        css=theme.read_asset("claims_table.css"),
        js=theme.read_asset("claims_table.js"),
    )


def _table(claims: list[ClaimResult]) -> pd.DataFrame:
    return pd.DataFrame([{column: getattr(claim, column) for column in CSV_COLUMNS} for claim in claims])
