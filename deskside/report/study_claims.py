"""Published claims and their verdicts, as a section of a study's report and as a separate document."""

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

# Verdict -> (its plural form, its definition), the most important first.
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
HEADER = ("claim", "source", "claimed", "measured or computed here", "seeds", "scale")


def claims_section(results: Results) -> Section:
    """Return the section with the number of claims per verdict, the table of claims, and the explanations."""
    contradicted = [_explanation(claim) for claim in results.claims if claim.verdict == "contradicted"]
    judged = [claim for claim in results.claims if claim.verdict != "not measured"]
    blocks: list[Block] = [verdict_counts(results)]
    if judged:
        blocks.append(_table(judged))
    if contradicted:
        blocks += ["Why some are contradicted:", Bullets(tuple(contradicted))]
    others = [_explanation(c) for c in judged if c.verdict != "contradicted" and c.explanation]
    not_measured = [_explanation(c) for c in results.claims if c.verdict == "not measured"]
    if others:
        blocks.append(Details(f"Notes on the others ({len(others)})", (Bullets(tuple(others)),)))
    if not_measured:
        blocks.append(Details(f"Not measured ({len(not_measured)})", (Bullets(tuple(not_measured)),)))
    return Section("Claims", tuple(blocks))


def judge_with_others(results: Results, others: Sequence[Results]) -> Results:
    """Return `results` with all claims judged by its own trials and those of `others`, which its notes then list."""
    notes = [
        f"Also: study {other.name} of {other.created[:10]} on {_device_name(other)}: "
        + "; ".join(f"{g.heading} ({g.budget or 'no budget recorded'})" for g in other.groups)
        + "."
        for other in others
    ]
    return replace(judge(results, others=others), notes=[*results.notes, *notes])


def claims_markdown(results: Results) -> str:
    """Return the document of all claims as Markdown."""
    return render_markdown(claims_document(results), Path("."))


def claims_document(results: Results) -> ReportDocument:
    """Return a document with the claims by verdict, how they were measured, and the machine."""
    sections = []
    verdicts = [*VERDICTS, *dict.fromkeys(c.verdict for c in results.claims if c.verdict not in VERDICTS)]
    for verdict in verdicts:
        claims = [claim for claim in results.claims if claim.verdict == verdict]
        if not claims:
            continue
        blocks: list[Block] = [f"{VERDICTS[verdict][1]}."] if verdict in VERDICTS else []
        blocks.append(_table(claims, show_verdict=False))
        explanations = [_explanation(c) for c in claims if c.explanation or verdict == "contradicted"]
        if explanations:
            blocks.append(Bullets(tuple(explanations)))
        sections.append(Section(verdict.capitalize(), tuple(blocks)))
    if not results.claims:
        sections.append(Section("Claims", ("This study speaks to no claim.",)))
    with_interval = sum(claim.p is not None for claim in results.claims)
    seeds = sorted({claim.n for claim in results.claims if claim.n})
    span = ""
    if seeds:
        span = str(seeds[0]) if len(seeds) == 1 else f"{seeds[0]} to {seeds[-1]}"
    method = [
        "A measured claim is one comparison of two arms, paired by seed, with its interval of 95 %. What a data sheet "
        "or arithmetic answers has no seeds, and its scale says what it is.",
        f"Decisions about the {with_interval} claims with an interval are adjusted for their number by the rule of "
        "Benjamini and Hochberg at 5 %; intervals are not (docs/statistics.md).",
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
        Section("How this was measured", (Bullets(tuple(method)),)),
        Section(
            "Machine",
            (Table(("what", "value", "source"), tuple(provenance_rows(results.machine, "measured"))),),
        ),
    ]
    return ReportDocument("Claims, measured", verdict_counts(results), tuple(sections))


def verdict_counts(results: Results) -> str:
    """Return a sentence like "13 claims: 3 contradicted, 10 hold. Measured on NVIDIA H100."."""
    counts = {verdict: sum(c.verdict == verdict for c in results.claims) for verdict in VERDICTS}
    counts_text = ", ".join(
        f"{count} {verdict if count == 1 else VERDICTS[verdict][0]}"
        for verdict, count in counts.items()
        if count
    )
    device = _device_name(results)
    where = f" Measured on {device}." if device else ""
    return f"{plural(len(results.claims), 'claim')}: {counts_text or 'none judged'}.{where}"


def _device_name(results: Results) -> str:
    gpu = results.machine.get("gpu")
    return text(mapping(gpu).get("name")) or text(gpu) or text(results.machine.get("device")) or ""


def measured_text(claim: ClaimResult) -> str:
    """Return the measured value with its unit and interval: `+4.1 % (+3.2 to +4.9)`, `$5.31`, `not measured`."""
    value, low, high = number(claim.measured), number(claim.low), number(claim.high)
    if value is None:
        return "not measured"
    sign = "+" if claim.unit == "%" else ""
    value_with_unit = with_unit(value, claim.unit, sign)
    if low is None or high is None or low == value == high:
        return value_with_unit
    return f"{value_with_unit} ({number_text(low, sign)} to {number_text(high, sign)})"


def _explanation(claim: ClaimResult) -> str:
    return f"{claim.text}: {claim.explanation or 'no explanation has been written yet.'}"


def _table(claims: Iterable[ClaimResult], show_verdict: bool = True) -> Table:
    rows = tuple(
        (
            claim.text,
            claim.source,
            claim.claimed,
            measured_text(claim),
            str(claim.n) if claim.n else "",
            claim.scale,
            *((claim.verdict,) if show_verdict else ()),
        )
        for claim in claims
    )
    return Table((*HEADER, "verdict") if show_verdict else HEADER, rows)
