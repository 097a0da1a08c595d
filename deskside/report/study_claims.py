"""Published claims and their verdicts, as a section of a study's report and as a separate document."""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

from deskside.report.document import (
    Block,
    Bullets,
    Chip,
    Chips,
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
# Verdict -> kind of its chip; all others leave it open.
CLAIM_KINDS = {
    "contradicted": "worse",
    "holds": "better",
    "holds in direction": "partly",
    "consistent with the model": "partly",
    "not consistent with the model": "doubtful",
}
HEADER = ("claim", "source", "claimed", "measured or computed here", "seeds", "scale")


def claims_section(results: Results) -> Section:
    """Return the section with a folded table of claims and explanations for each verdict."""
    blocks: list[Block] = ["What others have published, against what was measured or computed here."]
    for verdict, claims in _by_verdict(results.claims):
        explanations = [_explanation(c) for c in claims if c.explanation or verdict == "contradicted"]
        notes = [Details("Notes", (Bullets(tuple(explanations)),))] if explanations else []
        definition = [f"{VERDICTS[verdict][1]}."] if verdict in VERDICTS else []
        summary = Chip(verdict, CLAIM_KINDS.get(verdict, "open"), plural(len(claims), "claim"))
        blocks.append(Details(summary, (*definition, _table(claims), *notes), printed=True))
    return Section("Claims", tuple(blocks))


def claims_sentence(results: Results) -> str:
    """Return a sentence like "29 of 80 published claims are contradicted on NVIDIA H200, and 22 hold."."""
    contradicted, hold = (
        sum(c.verdict == verdict for c in results.claims) for verdict in ("contradicted", "holds")
    )
    device = _device_name(results)
    verb, other = "is" if contradicted == 1 else "are", "holds" if hold == 1 else "hold"
    return (
        f"{contradicted} of {plural(len(results.claims), 'published claim')} {verb} contradicted"
        f"{f' on {device}' if device else ''}, and {hold} {other}."
    )


def claim_chips(results: Results) -> Chips:
    """Return a chip for each verdict with the number of its claims."""
    return Chips(
        [
            Chip(f"{len(claims)} {_verdict_text(verdict, len(claims))}", CLAIM_KINDS.get(verdict, "open"))
            for verdict, claims in _by_verdict(results.claims)
        ]
    )


def _by_verdict(claims: Sequence[ClaimResult]) -> list[tuple[str, list[ClaimResult]]]:
    """Return (verdict, its claims), the most important verdict first; verdicts without a claim are left out."""
    verdicts = [*VERDICTS, *dict.fromkeys(claim.verdict for claim in claims if claim.verdict not in VERDICTS)]
    found = [(verdict, [claim for claim in claims if claim.verdict == verdict]) for verdict in verdicts]
    return [(verdict, members) for verdict, members in found if members]


def _verdict_text(verdict: str, count: int) -> str:
    return verdict if count == 1 or verdict not in VERDICTS else VERDICTS[verdict][0]


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
    for verdict, claims in _by_verdict(results.claims):
        blocks: list[Block] = [f"{VERDICTS[verdict][1]}."] if verdict in VERDICTS else []
        blocks.append(_table(claims))
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
    counts_text = ", ".join(
        f"{len(claims)} {_verdict_text(verdict, len(claims))}"
        for verdict, claims in _by_verdict(results.claims)
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


def _table(claims: Iterable[ClaimResult]) -> Table:
    rows = tuple(
        (
            claim.text,
            claim.source,
            claim.claimed,
            measured_text(claim),
            str(claim.n) if claim.n else "",
            claim.scale,
        )
        for claim in claims
    )
    return Table(HEADER, rows, stacked=True)
