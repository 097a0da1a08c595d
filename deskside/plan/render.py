"""The plan as text for the terminal, with the sources of its numbers."""

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

PHASE_LABELS = {"sft": "left for deskside sft, which go does not run,"}
BAR_WIDTH = 24  # characters of a full bar
SHOWN_SHARE = 1e-4  # of a step's time, below which an item is not shown
MAX_WIDTH = 100


def show(plan: Plan) -> None:
    """Print the plan on standard output."""
    console = _console()
    request = plan.request
    console.print(Text(_title(plan), style="bold"))
    style = {"yes": "bold green", "yes-if": "bold yellow", "no": "bold red"}[plan.verdict]
    console.print(Text.assemble("\nverdict: ", (plan.verdict, style)))
    for reason in plan.reasons:
        _print_wrapped(f"- {reason}", 2)
    if plan.bands:
        console.print()
        console.print(_bands_table(plan))
    shown = plan.shown
    if shown is not None:
        name = plan.best.name if plan.best else "the requested run"
        console.print()
        console.print(_memory_table(plan, shown, name))
        console.print()
        console.print(_speed_table(plan, shown, name))
    if plan.hours and plan.best is not None:
        split = ", ".join(
            f"{PHASE_LABELS.get(phase, phase)} {duration(hours * 3600)}"
            for phase, hours in plan.hours.items()
        )
        print()
        _print_wrapped(f"the budget: {split}", 0)
    if plan.best is not None:
        _print_cost(console, plan.best.cost)
    if plan.remedies:
        console.print()
        console.print(_remedies_table(plan))
    if plan.findings:
        console.print()
        _print_claims(console, plan.findings)
    console.print(Text("\nsources of the numbers", style="bold"))
    for line in _sources(plan):
        _print_wrapped(f"- {line}", 2)
    if plan.best is not None:
        console.print(Text(f"\nto carry out {plan.best.name}:", style="bold"))
        print(f"  {plan.best.command}")
        for word in shlex.split(plan.best.command):
            if word in PLACEHOLDERS:
                print(f"  ({word}: {PLACEHOLDERS[word]})")
    if request.budget.kind is None and request.given is not None:
        assumed = "compute-optimal for this size"
        if not request.pretrains:
            assumed = "those of pretraining this size; give --tokens"
        _print_wrapped(f"no budget was given: the tokens are {assumed}", 0)


def show_claims(findings: Sequence[ClaimFinding]) -> None:
    """Print only the findings on claims."""
    _print_claims(_console(), findings)


def _print_wrapped(text: str, indent: int) -> None:
    """Print a wrapped paragraph with a hanging indent."""
    console = _console()
    hanging = " " * (indent + (2 if text.startswith("- ") else 0))
    print(textwrap.fill(text, console.width, initial_indent=" " * indent, subsequent_indent=hanging))


def _console() -> Console:
    """Return a console as wide as the terminal, at most MAX_WIDTH."""
    console = Console(highlight=False)
    return Console(highlight=False, width=min(console.width, MAX_WIDTH))


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


def _bands_table(plan: Plan) -> Table:
    several = len(plan.bands) > 1
    headings = (f"{b.name} *" if b.name == plan.recommended and several else b.name for b in plan.bands)
    table = Table("modelled", *headings, box=None, pad_edge=False)
    loss: tuple[tuple[str, Callable[[PlannedBand], str]], ...] = (
        ("bits per byte", lambda b: f"{b.loss[1]:.3f}"),
        ("  range", lambda b: f"{b.loss[0]:.2f} to {b.loss[2]:.2f}"),
    )
    for label, cell in (
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
        ("electricity", _electricity),
    ):
        table.add_row(label, *(cell(band) for band in plan.bands))
    return table


def _emulated(estimate: StepEstimate) -> str:
    return ", emulated" if estimate.setting.emulated else ""


def _electricity(band: PlannedBand) -> str:
    money = band.cost.electricity
    if money is None:
        return "-"
    return dollars(money.amount[1]) + ("" if money.source == "given" else " (published)")


def _gib_range(interval: Range) -> str:
    """Return a range of bytes in GiB, or in MiB if it is below 1 GiB."""
    if interval[2] < 2**30:
        return f"{interval[0] / 2**20:.0f} to {interval[2] / 2**20:.0f}"
    return f"{interval[0] / 2**30:.1f} to {interval[2] / 2**30:.1f}"


def _memory_table(plan: Plan, estimate: StepEstimate, name: str) -> Table:
    table = Table(f"memory of {name} (modelled)", "", "", box=None, pad_edge=False)
    largest = max(estimate.memory.items.values())
    for item, size in estimate.memory.items.items():
        if size:
            table.add_row(f"  {item}", gib(size), "#" * max(1, round(BAR_WIDTH * size / largest)))
    _, expected, high = estimate.memory_bytes
    table.add_row("  peak allocated", gib(estimate.memory.allocated), estimate.memory.instant)
    table.add_row("needed on the card", gib(expected), f"with fragmentation and context; at most {gib(high)}")
    table.add_row(
        "available",
        gib(estimate.capacity),
        {"fits": "it fits", "tight": "tight", "no": "too little"}[estimate.fits],
    )
    if on_host := estimate.setting.host_items(plan.request.card.host_bytes):
        items = ", ".join(f"{item} {gib(size)}" for item, size in on_host.items())
        table.add_row("on the host", gib(sum(on_host.values())), f"page-locked: {items}")
    return table


def _speed_table(plan: Plan, estimate: StepEstimate, name: str) -> Table:
    table = Table(f"a step of {name} (modelled{_emulated(estimate)})", "", "", box=None, pad_edge=False)
    total = estimate.step_seconds
    for item, seconds in estimate.step.items():
        if seconds > SHOWN_SHARE * total:
            table.add_row(f"  {item}", duration(seconds), "#" * max(1, round(BAR_WIDTH * seconds / total)))
    tokens, passes = estimate.setting.tokens_per_step, estimate.accumulation
    table.add_row(
        "step", duration(total), f"{tokens:,.0f} tokens in {passes:,} pass{'' if passes == 1 else 'es'}"
    )
    gpu = plan.request.card.gpu
    if gpu is not None:
        share = (
            estimate.setting.flops_per_token
            * estimate.tokens_per_second[1]
            / plan.request.gpus
            / gpu.bf16_flops
        )
        table.add_row("utilization", f"{share:.0%}", f"of {gpu.bf16_flops / 1e12:.0f} TFLOP/s (sheet, BF16)")
    return table


def _print_cost(console: Console, cost: Cost) -> None:
    if cost.kwh is None and cost.rent is None:
        return
    console.print(Text(f"\ncost of {cost.of} ({duration(cost.hours[1] * 3600)})", style="bold"))
    if cost.kwh is not None and cost.wall is not None:
        low, expected, high = map(number, cost.kwh)
        _print_wrapped(
            f"{expected} kWh ({low} to {high}), {cost.wall.expected:.0f} W at the wall ({cost.wall.source})",
            2,
        )
    for what, money in (("electricity", cost.electricity), ("renting", cost.rent)):
        if money is not None:
            _print_wrapped(f"{what}: {dollars(money.amount[1])} at ${money.price:g} ({money.source})", 2)
    if cost.own is not None:
        _print_wrapped(
            f"owning: {dollars(cost.own.own_per_hour)} per hour; {cost.own.summary} ({cost.own_basis})", 2
        )
    for cap in cost.caps:
        effect = f"{cap['speed']:.0%} of the speed, {cap['card_energy_per_token']:.0%} of the card's energy per token"
        source = f"({cap['of']}; {cap['source']})"
        _print_wrapped(f"at a limit of {cap['watts']:.0f} W: {effect} {source}", 2)


def _remedies_table(plan: Plan) -> Table:
    table = Table("what would help", "saves", "speed", "fits", "costs", box=None, pad_edge=False)
    for remedy in plan.remedies:
        prefix = "(not in deskside) " if remedy.kind == "elsewhere" else ""
        table.add_row(
            remedy.what,
            gib(remedy.saves_bytes) if remedy.saves_bytes else "",
            "" if remedy.speed is None else f"{remedy.speed:.0%}",
            {"fits": "yes", "tight": "barely", "no": "no", None: ""}[remedy.fits],
            f"{prefix}{remedy.costs}",
        )
    return table


def _print_claims(console: Console, findings: Sequence[ClaimFinding]) -> None:
    console.print(Text("claims", style="bold"))
    for finding in findings:
        style = "green" if finding.verdict == "holds" else "red"
        console.print(Text.assemble("  ", (finding.verdict, style), f": {finding.claim}"))
        _print_wrapped(f"{finding.why} ({finding.source})", 6)


def _sources(plan: Plan) -> list[str]:
    request, calibration = plan.request, plan.request.calibration
    spread = calibration.speed_spread if plan.shown is None else plan.shown.speed_spread
    lines = [
        f"speed: modelled, rates {calibration.source}: {calibration.basis}; +-{spread:.0%}",
        f"memory: modelled, +-{calibration.memory_spread:.0%}; available memory: {request.card.memory_source}",
    ]
    if request.pretrains:
        lines.append(f"loss: {LAW.source}")
    if plan.best is not None:
        lines += plan.best.cost.notes
    return [*lines, *plan.notes]
