"""Claims page: published claims and what a study measured of them, with filters by verdict and by words."""

from collections import Counter

import pandas as pd
import streamlit as st

from deskside.dashboard import verdict_rows
from deskside.dashboard.components import sentence
from deskside.dashboard.notes import empty_state
from deskside.dashboard.sidebar import Context, StudySelection, literal
from deskside.dashboard.verdict_rows import VerdictRow
from deskside.report.study_claims import CLAIM_KINDS, VERDICTS, claims_sentence, measured_text
from deskside.study.results import ClaimResult

MAX_ROWS = 300
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
        f"{len(shown)} of {len(claims)} claims{others}. Click on a claim for its source, scale and explanation."
    )
    verdict_rows.draw([_row(claim) for claim in shown[:MAX_ROWS]], "claims")
    if len(shown) > MAX_ROWS:
        st.caption(f"The first {MAX_ROWS} are listed; search for the others.")
    if shown:
        name = selection.folder.resolve().name
        st.download_button(
            "These claims as CSV", _table(shown).to_csv(index=False), f"{name}-claims.csv", "text/csv"
        )
    with st.expander("what the verdicts mean"):
        st.markdown("\n".join(f"- **{verdict}**: {about}." for verdict, (_, about) in VERDICTS.items()))


def _draw_filters(selection: StudySelection, claims: list[ClaimResult]) -> list[ClaimResult]:
    """Draw the filters by verdict and by words, and return the claims that pass them, by verdict."""
    counts = Counter(claim.verdict for claim in claims)
    order = [
        *(verdict for verdict in VERDICTS if verdict in counts),
        *(v for v in counts if v not in VERDICTS),
    ]
    chosen = st.pills(
        "verdict",
        order,
        selection_mode="multi",
        format_func=lambda verdict: f"{verdict} ({counts[verdict]})",
        key=f"{selection.name}: claims verdict",
    )
    words = st.text_input(
        "search",
        placeholder="words of the claim, source or explanation",
        key=f"{selection.name}: claims search",
    )
    searched = words.casefold().split()
    # Claims that were not measured are shown only on request, or if there are no others.
    verdicts = chosen or ([v for v in order if v != "not measured"] if not searched else order) or order
    return [
        claim
        for verdict in order
        if verdict in verdicts
        for claim in claims
        if claim.verdict == verdict and all(word in _searched_text(claim) for word in searched)
    ]


def _searched_text(claim: ClaimResult) -> str:
    parts = (claim.text, claim.source, claim.claimed, claim.scale, claim.explanation, claim.verdict)
    return " ".join(parts).casefold()


def _row(claim: ClaimResult) -> VerdictRow:
    measured = "" if claim.measured is None else f"; here: {measured_text(claim)}"
    return VerdictRow(
        CLAIM_KINDS.get(claim.verdict, "open"),
        claim.verdict,
        claim.text,
        f"claimed: {claim.claimed}{measured}",
        (
            ("why", sentence(claim.explanation.rstrip("."))),
            ("source", claim.source),
            ("seeds", str(claim.n) if claim.n else ""),
            ("scale", claim.scale),
            ("basis", claim.basis),
            ("note", "Measured while other trials ran on the same host." if claim.shared else ""),
        ),
    )


def _table(claims: list[ClaimResult]) -> pd.DataFrame:
    return pd.DataFrame([{column: getattr(claim, column) for column in CSV_COLUMNS} for claim in claims])
