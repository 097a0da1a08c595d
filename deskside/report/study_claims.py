"""Published claims and their measurements: a section of the report, and a separate document."""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

from deskside.report.document import (
    Block,
    Bullets,
    Details,
    ReportDocument,
    Section,
    Table,
    render_markdown,
)
from deskside.report.run_plan import provenance_rows
from deskside.run.record import mapping, number, text
from deskside.study.claims.claim_results import judge, number_text, with_unit
from deskside.study.results import ClaimResult, Results
from deskside.utils.format import plural

# Most important first: verdict -> (its plural form, its definition).
VERDICTS = {
    "contradicted": (
        "contradicted",
        "Measured to go the other way, to be outside of what the claim allows, or to be less than a twentieth of it "
        "(in logarithms); or arithmetic, a data sheet or a published price says otherwise",
    ),
    "holds": (
        "hold",
        "Measured in the claimed direction, and the interval meets the claimed size; or arithmetic, a data sheet or a "
        "published price agrees",
    ),
    "holds in direction": (
        "hold in direction",
        "Measured in the claimed direction, but not in the claimed size; a twentieth of it at least (in logarithms)",
    ),
    "not shown": (
        "not shown",
        "The interval leaves it open, there were too few seeds, or the decision does not stand among all measured "
        "claims. That is no contradiction",
    ),
    "consistent with the model": (
        "consistent with the model",
        "Nothing was measured. The claim lies within the range of the planner's model, which is wide, so this says "
        "little for it",
    ),
    "not consistent with the model": (
        "not consistent with the model",
        "Nothing was measured. The claim lies outside of the range of the planner's model",
    ),
    "needs other hardware": ("need other hardware", "This machine cannot say"),
    "not measured": ("not measured", "No finished trial speaks to it, or nothing here can"),
}
HEAD = ("claim", "source", "claimed", "measured or computed here", "seeds", "scale")


def claims_section(results: Results) -> Section:
    """Return the counts, the table of claims, and an explanation of each contradicted claim."""
    explained = [_explained(claim) for claim in results.claims if claim.verdict == "contradicted"]
    judged = [claim for claim in results.claims if claim.verdict != "not measured"]
    blocks: list[Block] = [verdict_counts(results)]
    if judged:
        blocks.append(_table(judged))
    if explained:
        blocks += ["Why some are contradicted:", Bullets(tuple(explained))]
    others = [_explained(c) for c in judged if c.verdict != "contradicted" and c.explanation]
    open_ = [_explained(c) for c in results.claims if c.verdict == "not measured"]
    if others:
        blocks.append(Details(f"Notes on the others ({len(others)})", (Bullets(tuple(others)),)))
    if open_:
        blocks.append(Details(f"Not measured ({len(open_)})", (Bullets(tuple(open_)),)))
    return Section("Claims", tuple(blocks))


def with_others(results: Results, others: Sequence[Results]) -> Results:
    """Return a study whose claims are judged again by its own trials and those of other studies, which it names."""
    notes = [
        f"Also: study {other.name} of {other.created[:10]} on {_card(other)}: "
        + "; ".join(f"{g.heading} ({g.budget or 'no budget recorded'})" for g in other.groups)
        + "."
        for other in others
    ]
    return replace(judge(results, others=others), notes=[*results.notes, *notes])


def claims_markdown(results: Results) -> str:
    """Return the claims as Markdown: by verdict, with method and machine, without plots."""
    return render_markdown(claims_document(results), Path("."))


def claims_document(results: Results) -> ReportDocument:
    """Return the document of `claims_markdown`."""
    sections = []
    order = [*VERDICTS, *dict.fromkeys(c.verdict for c in results.claims if c.verdict not in VERDICTS)]
    for verdict in order:
        members = [claim for claim in results.claims if claim.verdict == verdict]
        if not members:
            continue
        blocks: list[Block] = [f"{VERDICTS[verdict][1]}."] if verdict in VERDICTS else []
        blocks.append(_table(members, verdicts=False))
        told = [_explained(c) for c in members if c.explanation or verdict == "contradicted"]
        if told:
            blocks.append(Bullets(tuple(told)))
        sections.append(Section(verdict.capitalize(), tuple(blocks)))
    if not results.claims:
        sections.append(Section("Claims", ("This study speaks to no claim.",)))
    family = sum(claim.p is not None for claim in results.claims)
    seeds = sorted({claim.n for claim in results.claims if claim.n})
    span = " to ".join(dict.fromkeys((str(seeds[0]), str(seeds[-1])))) if seeds else ""
    lines = [
        "A measured claim is one comparison of two arms, paired by seed, with its interval of 95 %. What a data sheet "
        "or arithmetic answers has no seeds, and its scale says what it is: published, computed or modelled.",
        f"Decisions about the {family} claims with an interval are adjusted for their number by the rule of Benjamini "
        "and Hochberg at 5 %; intervals are not (docs/statistics.md).",
        '"Shared host" marks a speed or a power draw that was measured while other trials ran on the same host.',
        f"Study: {results.name}. {results.question}".strip(),
        *(
            f"{g.heading}: base {g.base}, every arm had {g.budget or 'a budget that is not recorded'}."
            for g in results.groups
        ),
        *([f"Seeds in a comparison: {span}."] if span else []),
        *results.notes,
    ]
    sections += [
        Section("How this was measured", (Bullets(tuple(lines)),)),
        Section(
            "Machine",
            (Table(("what", "value", "source"), tuple(provenance_rows(results.machine, "measured"))),),
        ),
    ]
    return ReportDocument("Claims, measured", verdict_counts(results), tuple(sections))


def verdict_counts(results: Results) -> str:
    """Return a sentence like "32 claims: 3 contradicted, 10 hold. Measured on NVIDIA H100."."""
    found = {verdict: sum(c.verdict == verdict for c in results.claims) for verdict in VERDICTS}
    told = ", ".join(
        f"{count} {verdict if count == 1 else VERDICTS[verdict][0]}"
        for verdict, count in found.items()
        if count
    )
    card = _card(results)
    where = f" Measured on {card}." if card else ""
    return f"{plural(len(results.claims), 'claim')}: {told or 'none judged'}.{where}"


def _card(results: Results) -> str:
    gpu = results.machine.get("gpu")
    return text(mapping(gpu).get("name")) or text(gpu) or text(results.machine.get("device")) or ""


def measured(claim: ClaimResult) -> str:
    """Return the measured value with its unit and interval: `+4.1 % (+3.2 to +4.9)`, `$5.31`, `not measured`."""
    middle, low, high = number(claim.measured), number(claim.low), number(claim.high)
    if middle is None:
        return "not measured"
    sign = "+" if claim.unit == "%" else ""
    shown = with_unit(middle, claim.unit, sign)
    if low is None or high is None or low == middle == high:
        return shown
    return f"{shown} ({number_text(low, sign)} to {number_text(high, sign)})"


def _explained(claim: ClaimResult) -> str:
    return f"{claim.text}: {claim.explanation or 'no explanation has been written yet.'}"


def _table(claims: Iterable[ClaimResult], verdicts: bool = True) -> Table:
    rows = tuple(
        (
            claim.text,
            claim.source,
            claim.claimed,
            measured(claim),
            str(claim.n) if claim.n else "",
            claim.scale,
            *((claim.verdict,) if verdicts else ()),
        )
        for claim in claims
    )
    return Table((*HEAD, "verdict") if verdicts else HEAD, rows)
