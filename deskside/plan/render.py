"""The plan as text for the terminal: one sentence, the bands, and the command; the rest is in `render_details`."""

import shlex
from collections.abc import Callable, Sequence

from deskside.budget.loss import LAW
from deskside.plan.calibrate import OTHERS_MEMORY_ERROR
from deskside.plan.candidates import ends_early
from deskside.plan.claim_check import ClaimFinding
from deskside.plan.expected_loss import optimal_tokens
from deskside.plan.headline import headline
from deskside.plan.reasons import ReasonKind
from deskside.plan.render_details import emulated, show_details
from deskside.plan.result import PLACEHOLDERS, Plan, PlannedBand
from deskside.utils.format import count, dollars, duration, gib, gib_digits
from deskside.utils.printer import Printer


def show(plan: Plan, details: bool) -> None:
    """Print the plan on standard output. details: with itemized memory, time and cost, and the sources."""
    printer = Printer()
    style = {"yes": "strong", "yes-if": "attention", "no": "bad"}[plan.verdict]
    printer.text(f"{headline(plan)}.", style)
    # The reasons of an open search are about the choice between the bands.
    chosen = plan.request.given is None and plan.verdict == "yes"
    if not chosen:
        _show_reasons(printer, plan)
    if plan.bands:
        printer.text()
        _show_bands(printer, plan)
    if chosen and details:
        _show_reasons(printer, plan)
    elif chosen and plan.reason_texts("text"):
        printer.text()
        _show_reasons(printer, plan, "text")
    if plan.findings:
        printer.text()
        _show_claims(printer, plan.findings)
    if plan.remedies and (details or plan.verdict == "no"):
        _show_remedies(printer, plan)
    for note in (*plan.notes, *_assumed(plan)):
        printer.text(f"note: {note}", hanging=6)
    if plan.best is not None:
        printer.heading(f"to carry out {plan.best.name}:")
        printer.command(plan.best.command)
        for word in shlex.split(plan.best.command):
            if word in PLACEHOLDERS:
                printer.text(f"{word}: {PLACEHOLDERS[word]}", indent=2)
    if details:
        show_details(printer, plan)
    else:
        printer.text()
        printer.text("--details: memory, time and cost by item, and the source of each number", "quiet")


def _show_reasons(printer: Printer, plan: Plan, kind: ReasonKind | None = None) -> None:
    for reason in plan.reason_texts(kind):
        printer.text(f"- {reason}", hanging=2)


def show_claims(findings: Sequence[ClaimFinding]) -> None:
    """Print only the findings on claims."""
    _show_claims(Printer(), findings)


def _assumed(plan: Plan) -> list[str]:
    """Return what the plan assumes because no budget was given."""
    request = plan.request
    if request.budget.kind is not None or request.given is None:
        return []
    if not request.pretrains:
        return ["no budget was given: the tokens are those of pretraining this size; give --tokens"]
    if plan.best is not None and ends_early(request, plan.best.candidate):
        optimal = count(optimal_tokens(LAW, plan.best.candidate.weights))
        return [
            f"no budget was given: the text limits the tokens; {optimal} are compute-optimal for this size"
        ]
    return ["no budget was given: the tokens are compute-optimal for this size"]


def _show_bands(printer: Printer, plan: Plan) -> None:
    several = len(plan.bands) > 1
    names = [f"{b.name} *" if b.name == plan.recommended and several else b.name for b in plan.bands]
    loss: tuple[tuple[str, Callable[[PlannedBand], str]], ...] = (
        ("bits per byte", lambda b: f"{b.loss[1]:.3f}"),
        ("  range", lambda b: f"{b.loss[0]:.2f} to {b.loss[2]:.2f}"),
    )
    rows = [
        [label, *(cell(band) for band in plan.bands)]
        for label, cell in (
            ("model", lambda b: f"{b.preset} ({count(b.candidate.params)})"),
            ("tokens", lambda b: count(b.candidate.tokens[1])),
            ("  per parameter", lambda b: f"{b.candidate.tokens[1] / b.candidate.params:.1f}"),
            *(loss if plan.request.pretrains else ()),
            ("batch, tokens", lambda b: f"{b.candidate.setting.stages[-1].tokens:,}"),
            ("rows", lambda b: "/".join(str(s.sequence_length) for s in b.candidate.setting.stages)),
            ("precision", lambda b: b.candidate.setting.precision + emulated(b.estimate)),
            ("memory, GiB", lambda b: gib_digits(b.estimate.memory_bytes[1])),
            ("  range", lambda b: "{0} to {2}".format(*map(gib_digits, b.estimate.memory_bytes))),
            ("tokens/s", lambda b: f"{b.estimate.tokens_per_second[1]:,.0f}"),
            ("  range", lambda b: "{0:,.0f} to {2:,.0f}".format(*b.estimate.tokens_per_second)),
            ("training takes", lambda b: duration(b.candidate.seconds[1])),
            ("electricity", _electricity),
        )
    ]
    printer.table(["modelled", *names], rows, "l" + "l" * len(names))
    calibration = plan.request.calibration
    spread = calibration.speed_spread if plan.shown is None else plan.shown.speed_spread
    star = "* recommended; " if several else ""
    within = f"speed +-{spread:.0%}, memory +-{calibration.memory_spread:.0%}"
    if calibration.source == "published":
        within += f" (published runs of other trainers: up to {OTHERS_MEMORY_ERROR:.0%} off)"
    printer.text(f"{star}rates {calibration.source}: {within}", "quiet", hanging=2)


def _electricity(band: PlannedBand) -> str:
    money = band.cost.electricity
    if money is None:
        return "-"
    return dollars(money.amount[1]) + ("" if money.source == "given" else " (published)")


def _show_remedies(printer: Printer, plan: Plan) -> None:
    rows = []
    for remedy in plan.remedies:
        prefix = "not in deskside: " if remedy.kind == "elsewhere" else ""
        rows.append(
            [
                remedy.what,
                gib(remedy.saves_bytes) if remedy.saves_bytes else "",
                "" if remedy.speed is None else f"{remedy.speed:.0%}",
                {"fits": "yes", "tight": "barely", "no": "no", None: ""}[remedy.fits],
                f"{prefix}{remedy.costs}",
            ]
        )
    printer.text()
    printer.table(["what would help", "saves", "speed", "fits", "costs"], rows, "lrrll")


def _show_claims(printer: Printer, findings: Sequence[ClaimFinding]) -> None:
    printer.text("claims", "strong")
    for finding in findings:
        style = "good" if finding.verdict == "holds" else "bad"
        printer.text(f"{finding.verdict}: {finding.claim}", style, indent=2, hanging=2)
        printer.text(f"{finding.why} ({finding.source})", indent=6)
