"""Published claims beside what was measured here: a section of the report, and a document of its own."""

from collections.abc import Iterable
from pathlib import Path

from deskside.report import markdown, words
from deskside.report.document import Block, Bullets, Document, Paragraph, Section, Table
from deskside.report.rundir import mapping, number, text
from deskside.report.study_words import group_title, several
from deskside.study.results import ClaimResult, Results

# In the order in which a person wants to know them.
VERDICTS = {
    "contradicted": "the interval excludes what was claimed",
    "holds": "direction and size are as claimed",
    "holds in direction": "the direction is as claimed, the size is not",
    "not shown": "the interval leaves it open, or there were too few seeds",
    "needs other hardware": "this machine cannot say",
}


def claims_section(results: Results) -> Section:
    """Counts, the table of all claims, and an explanation of each that is contradicted."""
    explained = [
        f"{claim.text}: {claim.explanation or 'no explanation has been written yet.'}"
        for claim in results.claims
        if claim.verdict == "contradicted"
    ]
    blocks: list[Block] = [Paragraph(counts(results)), _table(results.claims)]
    if explained:
        blocks += [Paragraph("Why some are contradicted:"), Bullets(tuple(explained))]
    others = [
        f"{c.text}: {c.explanation}" for c in results.claims if c.verdict != "contradicted" and c.explanation
    ]
    if others:
        blocks += [Paragraph("Notes on the others:"), Bullets(tuple(others))]
    return Section("Claims", tuple(blocks))


def claims_markdown(results: Results) -> str:
    """The claims as a Markdown document for docs/: by verdict, with method and machine, and without plots."""
    return markdown.render(claims_document(results), Path("."))


def claims_document(results: Results) -> Document:
    """The same as blocks."""
    sections = []
    order = [*VERDICTS, *dict.fromkeys(c.verdict for c in results.claims if c.verdict not in VERDICTS)]
    for verdict in order:
        members = [claim for claim in results.claims if claim.verdict == verdict]
        if not members:
            continue
        about = f"{VERDICTS[verdict].capitalize()}." if verdict in VERDICTS else ""
        explained = tuple(
            f"{claim.text} ({claim.source}): {claim.explanation or 'no explanation has been written yet.'}"
            for claim in members
            if claim.explanation or verdict == "contradicted"
        )
        blocks: list[Block] = [Paragraph(about)] if about else []
        blocks.append(_table(members, verdicts=False))
        if explained:
            blocks.append(Bullets(explained))
        sections.append(Section(verdict.capitalize(), tuple(blocks)))
    if not results.claims:
        sections.append(Section("Claims", (Paragraph("This study speaks to no claim."),)))
    seeds = sorted({claim.n for claim in results.claims if claim.measured is not None})
    told = [
        "Each claim is one comparison of an arm with its baseline, paired by seed, with an interval.",
        f"Study: {results.name}. {results.question}".strip(),
        *(
            f"{group_title(g)}: base {g.base}, every arm had {g.budget or 'a budget that is not recorded'}."
            for g in results.groups
        ),
        f"Seeds for each comparison: {' to '.join(dict.fromkeys((str(seeds[0]), str(seeds[-1]))))}."
        if seeds
        else "",
        *results.notes,
    ]
    sections += [
        Section("How this was measured", (Bullets(tuple(line for line in told if line)),)),
        Section(
            "Machine", (Table(("what", "value", "source"), tuple(words.facts(results.machine, "measured"))),)
        ),
    ]
    return Document("Claims, measured", counts(results), tuple(sections))


def counts(results: Results) -> str:
    """Of 32 claims: 3 contradicted, 10 hold, ... on which card."""
    found = {verdict: sum(c.verdict == verdict for c in results.claims) for verdict in VERDICTS}
    told = ", ".join(f"{count} {verdict}" for verdict, count in found.items() if count)
    gpu = results.machine.get("gpu")
    card = text(mapping(gpu).get("name")) or text(gpu) or text(results.machine.get("device"))
    where = f" Measured on {card}." if card else ""
    return f"{several(len(results.claims), 'claim')}: {told or 'none judged'}.{where}"


def measured(claim: ClaimResult) -> str:
    """-4.1 % (-4.9 to -3.2), or that it was not measured."""
    middle, low, high = number(claim.measured), number(claim.low), number(claim.high)
    if middle is None:
        return "not measured"
    unit = f" {claim.unit}" if claim.unit else ""
    if low is None or high is None:
        return f"{_short(middle)}{unit}"
    return f"{_short(middle)}{unit} ({_short(low)} to {_short(high)})"


def _table(claims: Iterable[ClaimResult], verdicts: bool = True) -> Table:
    head = ("claim", "source", "claimed", "measured here", "seeds", "scale")
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
    return Table((*head, "verdict") if verdicts else head, rows)


def _short(value: float) -> str:
    """Three figures that say something: 0.0123, 1.23, 12.3, 1,234."""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
