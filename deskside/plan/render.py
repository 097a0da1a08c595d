"""The plan as text, in 80 columns. Every table is labelled measured, modelled or published."""

import shlex
import textwrap
from collections.abc import Callable, Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from deskside.budget.loss import LAW
from deskside.budget.shape import num_params
from deskside.plan.claim_check import ClaimFinding
from deskside.plan.costs import Cost
from deskside.plan.estimate import Range, StepEstimate
from deskside.plan.result import PLACEHOLDERS, Plan, PlannedBand
from deskside.utils.format import count, dollars, duration, gib, number

HOURS = {"sft": "left for deskside sft, which go does not run,"}
BAR = 24  # characters of the longest bar
WIDEST = 100


def show(plan: Plan) -> None:
    """Print the plan on standard output."""
    console = _console()
    request = plan.request
    console.print(Text(_title(plan), style="bold"))
    style = {"yes": "bold green", "yes-if": "bold yellow", "no": "bold red"}[plan.verdict]
    console.print(Text.assemble("\nverdict: ", (plan.verdict, style)))
    for reason in plan.reasons:
        _told(f"- {reason}", 2)
    if plan.bands:
        console.print()
        console.print(_bands(plan))
    shown = plan.shown
    if shown is not None:
        name = plan.best.name if plan.best else "the run as asked for"
        console.print()
        console.print(_memory(plan, shown, name))
        console.print()
        console.print(_speed(plan, shown, name))
    if plan.hours and plan.best is not None:
        split = ", ".join(
            f"{HOURS.get(what, what)} {duration(hours * 3600)}" for what, hours in plan.hours.items()
        )
        print()
        _told(f"the budget: {split}", 0)
    if plan.best is not None:
        _cost(console, plan.best.cost)
    if plan.remedies:
        console.print()
        console.print(_remedies(plan))
    if plan.findings:
        console.print()
        _claims(console, plan.findings)
    console.print(Text("\nwhere the numbers come from", style="bold"))
    for line in _sources(plan):
        _told(f"- {line}", 2)
    if plan.best is not None:
        console.print(Text(f"\nto carry out {plan.best.name}:", style="bold"))
        print(f"  {plan.best.command}")
        for word in shlex.split(plan.best.command):
            if word in PLACEHOLDERS:
                print(f"  ({word}: {PLACEHOLDERS[word]})")
    if request.budget.kind is None and request.given is not None:
        told = "those for which this size is the best use of compute"
        if not request.pretrains:
            told = "what pretraining this size would take; give --tokens"
        _told(f"no budget was given: the tokens are {told}", 0)


def show_claims(findings: Sequence[ClaimFinding]) -> None:
    """Only the findings on claims."""
    _claims(_console(), findings)


def _told(text: str, indent: int) -> None:
    """Print a wrapped paragraph with a hanging indent."""
    console = _console()
    inside = " " * (indent + (2 if text.startswith("- ") else 0))
    print(textwrap.fill(text, console.width, initial_indent=" " * indent, subsequent_indent=inside))


def _console() -> Console:
    console = Console(highlight=False)
    return Console(highlight=False, width=min(console.width, WIDEST))


def _title(plan: Plan) -> str:
    request = plan.request
    parts = [f"{request.gpus} x {request.card.name}" if request.gpus > 1 else request.card.name]
    if request.given is not None:
        parts.append(f"{request.given.label} ({count(num_params(request.given.config.model))} parameters)")
    if request.budget.kind is not None:
        value = request.budget.value
        parts.append(
            {
                "hours": f"{number(value)} h",
                "tokens": f"{count(value)} tokens",
                "flops": f"{value:.3g} FLOP",
                "loss": f"{value:g} bits per byte",
            }[request.budget.kind]
        )
    return "plan: " + ", ".join(parts)


def _bands(plan: Plan) -> Table:
    several = len(plan.bands) > 1
    heads = (f"{b.name} *" if b.name == plan.recommended and several else b.name for b in plan.bands)
    table = Table("modelled", *heads, box=None, pad_edge=False)
    loss: tuple[tuple[str, Callable[[PlannedBand], str]], ...] = (
        ("bits per byte", lambda b: f"{b.loss[1]:.3f}"),
        ("  range", lambda b: f"{b.loss[0]:.2f} to {b.loss[2]:.2f}"),
    )
    for what, of in (
        ("model", lambda b: f"{b.preset} ({count(b.candidate.params)})"),
        ("tokens", lambda b: count(b.candidate.tokens[1])),
        ("  per parameter", lambda b: f"{b.candidate.tokens[1] / b.candidate.params:.1f}"),
        *(loss if plan.request.pretrains else ()),
        ("batch, tokens", lambda b: f"{b.candidate.setting.stages[-1].tokens:,}"),
        ("  per pass", lambda b: f"{b.candidate.setting.micro_tokens:,}"),
        ("rows", lambda b: "/".join(str(s.sequence_length) for s in b.candidate.setting.stages)),
        ("optimizer", lambda b: b.candidate.setting.optimizer),
        ("precision", lambda b: b.candidate.setting.precision + _emulated(b.estimate)),
        ("recomputed", lambda b: b.candidate.setting.activation_checkpointing),
        ("memory", lambda b: gib(b.estimate.memory_bytes[1])),
        ("  range", lambda b: _gib_range(b.estimate.memory_bytes)),
        ("tokens/s", lambda b: f"{b.estimate.tokens_per_second[1]:,.0f}"),
        ("  range", lambda b: "{0:,.0f} to {2:,.0f}".format(*b.estimate.tokens_per_second)),
        ("pretraining", lambda b: duration(b.candidate.seconds[1])),
        ("energy", lambda b: "-" if b.cost.kwh is None else f"{number(b.cost.kwh[1])} kWh"),
        ("electricity", _money),
    ):
        table.add_row(what, *(of(band) for band in plan.bands))
    return table


def _emulated(found: StepEstimate) -> str:
    return ", emulated" if found.setting.emulated else ""


def _money(band: PlannedBand) -> str:
    money = band.cost.electricity
    if money is None:
        return "-"
    return dollars(money.amount[1]) + ("" if money.source == "given" else " (published)")


def _gib_range(interval: Range) -> str:
    if interval[2] < 2**30:
        return f"{interval[0] / 2**20:.0f} to {interval[2] / 2**20:.0f}"
    return f"{interval[0] / 2**30:.1f} to {interval[2] / 2**30:.1f}"


def _memory(plan: Plan, found: StepEstimate, name: str) -> Table:
    table = Table(f"memory of {name} (modelled)", "", "", box=None, pad_edge=False)
    largest = max(found.memory.items.values())
    for item, size in found.memory.items.items():
        if size:
            table.add_row(f"  {item}", gib(size), "#" * max(1, round(BAR * size / largest)))
    _, expected, high = found.memory_bytes
    table.add_row("  peak allocated", gib(found.memory.allocated), found.memory.instant)
    table.add_row("needed on the card", gib(expected), f"with fragmentation and context; at most {gib(high)}")
    table.add_row(
        "there is", gib(found.capacity), {"fits": "it fits", "tight": "tight", "no": "too little"}[found.fits]
    )
    return table


def _speed(plan: Plan, found: StepEstimate, name: str) -> Table:
    table = Table(f"a step of {name} (modelled{_emulated(found)})", "", "", box=None, pad_edge=False)
    total = found.step_seconds
    for item, seconds in found.step.items():
        if seconds > 0:
            table.add_row(f"  {item}", duration(seconds), "#" * max(1, round(BAR * seconds / total)))
    tokens, passes = found.setting.tokens_per_step, found.accumulation
    table.add_row(
        "step", duration(total), f"{tokens:,.0f} tokens in {passes:,} pass{'' if passes == 1 else 'es'}"
    )
    gpu = plan.request.card.gpu
    if gpu is not None:
        share = (
            found.setting.flops_per_token * found.tokens_per_second[1] / plan.request.gpus / gpu.bf16_flops
        )
        table.add_row("utilization", f"{share:.0%}", f"of {gpu.bf16_flops / 1e12:.0f} TFLOP/s (sheet, BF16)")
    return table


def _cost(console: Console, cost: Cost) -> None:
    if cost.kwh is None and cost.rent is None:
        return
    console.print(Text(f"\ncost of {cost.of} ({duration(cost.hours[1] * 3600)})", style="bold"))
    if cost.kwh is not None and cost.wall is not None:
        low, expected, high = map(number, cost.kwh)
        _told(
            f"{expected} kWh ({low} to {high}), {cost.wall.expected:.0f} W at the wall ({cost.wall.source})",
            2,
        )
    for what, money in (("electricity", cost.electricity), ("renting", cost.rent)):
        if money is not None:
            _told(f"{what}: {dollars(money.amount[1])} at ${money.price:g} ({money.source})", 2)
    if cost.own is not None:
        _told(f"owning: {dollars(cost.own.own_per_hour)} per hour; {cost.own.summary} ({cost.own_basis})", 2)
    for cap in cost.caps:
        kind = f"at a limit of {cap['watts']:.0f} W: {cap['speed']:.0%} of the speed, "
        text = f"{kind}{cap['card_energy_per_token']:.0%} of the card's energy per token ({cap['of']}; {cap['source']})"
        _told(text, 2)


def _remedies(plan: Plan) -> Table:
    table = Table("what would help", "saves", "speed", "fits", "costs", box=None, pad_edge=False)
    for remedy in plan.remedies:
        can = "(not in deskside) " if remedy.kind == "elsewhere" else ""
        table.add_row(
            remedy.what,
            gib(remedy.saves_bytes) if remedy.saves_bytes else "",
            "" if remedy.speed is None else f"{remedy.speed:.0%}",
            {"fits": "yes", "tight": "barely", "no": "no", None: ""}[remedy.fits],
            f"{can}{remedy.costs}",
        )
    return table


def _claims(console: Console, findings: Sequence[ClaimFinding]) -> None:
    console.print(Text("claims", style="bold"))
    for finding in findings:
        style = "green" if finding.verdict == "holds" else "red"
        console.print(Text.assemble("  ", (finding.verdict, style), f": {finding.claim}"))
        _told(f"{finding.why} ({finding.source})", 6)


def _sources(plan: Plan) -> list[str]:
    request, calibration = plan.request, plan.request.calibration
    spread = calibration.speed_spread if plan.shown is None else plan.shown.speed_spread
    lines = [
        f"speed: modelled, rates {calibration.source}: {calibration.basis}; +-{spread:.0%}",
        f"memory: modelled, +-{calibration.memory_spread:.0%}; what the card has: {request.card.memory_source}",
    ]
    if request.pretrains:
        lines.append(f"loss: {LAW.source}")
    if plan.best is not None:
        lines += plan.best.cost.notes
    return [*lines, *plan.notes]
