"""The itemized part of the plan for the terminal: memory, time and cost by item, and the sources of the numbers."""

from deskside.budget.loss import LAW
from deskside.plan.costs import Cost
from deskside.plan.estimate import StepEstimate
from deskside.plan.result import Plan, PlannedBand
from deskside.utils.format import dollars, duration, gib, number
from deskside.utils.printer import Printer

PHASE_LABELS = {"sft": "left for deskside sft, which go does not run,"}
BAR_WIDTH = 24  # characters of a full bar
SHOWN_SHARE = 1e-4  # items below this share of a step's time are not shown


def show_details(printer: Printer, plan: Plan) -> None:
    """Print memory and time of the recommended band, or of the run as requested, then the cost and the sources."""
    shown, best = plan.shown, plan.best
    if shown is not None:
        name = best.name if best else "the requested run"
        if best is not None:
            _show_setting(printer, best)
        _show_memory(printer, plan, shown, name)
        _show_step(printer, plan, shown, name)
    if plan.hours and best is not None:
        split = ", ".join(
            f"{PHASE_LABELS.get(phase, phase)} {duration(hours * 3600)}"
            for phase, hours in plan.hours.items()
        )
        printer.text(f"\nthe budget: {split}")
    if best is not None:
        _show_cost(printer, best.cost)
    printer.heading("sources of the numbers")
    for line in _sources(plan):
        printer.text(f"- {line}", indent=2, hanging=2)


def emulated(estimate: StepEstimate) -> str:
    """Return a remark on number formats that are computed in another one."""
    return ", emulated" if estimate.setting.emulated else ""


def _show_setting(printer: Printer, band: PlannedBand) -> None:
    setting = band.candidate.setting
    printer.heading(f"settings of {band.name}")
    rows = [
        ["optimizer", setting.optimizer],
        ["tokens per pass", f"{setting.micro_tokens:,}"],
        ["recomputed", setting.activation_checkpointing],
    ]
    if band.cost.kwh is not None:
        rows.append(["energy", f"{number(band.cost.kwh[1])} kWh"])
    printer.table(["", ""], rows, "ll", indent=2)


def _show_memory(printer: Printer, plan: Plan, estimate: StepEstimate, name: str) -> None:
    largest = max(estimate.memory.items.values())
    rows = [
        [f"  {item}", gib(size), printer.bar(size / largest, BAR_WIDTH)]
        for item, size in estimate.memory.items.items()
        if size
    ]
    _, expected, high = estimate.memory_bytes
    fits = {"fits": "it fits", "tight": "tight", "no": "too little"}[estimate.fits]
    rows += [
        ["  peak allocated", gib(estimate.memory.allocated), estimate.memory.instant],
        ["needed on the card", gib(expected), f"with fragmentation and context; at most {gib(high)}"],
        ["available", gib(estimate.capacity), fits],
    ]
    if on_host := estimate.setting.host_items(plan.request.card.host_bytes):
        items = ", ".join(f"{item} {gib(size)}" for item, size in on_host.items())
        rows.append(["on the host", gib(sum(on_host.values())), f"page-locked: {items}"])
    printer.heading(f"memory of {name} (modelled)")
    printer.table(["", "", ""], rows, "lrl")


def _show_step(printer: Printer, plan: Plan, estimate: StepEstimate, name: str) -> None:
    total = estimate.step_seconds
    rows = [
        [f"  {item}", duration(seconds), printer.bar(seconds / total, BAR_WIDTH)]
        for item, seconds in estimate.step.items()
        if seconds > SHOWN_SHARE * total
    ]
    tokens, passes = estimate.setting.tokens_per_step, estimate.accumulation
    rows.append(
        ["step", duration(total), f"{tokens:,.0f} tokens in {passes:,} pass{'' if passes == 1 else 'es'}"]
    )
    gpu = plan.request.card.gpu
    if gpu is not None:
        per_gpu = estimate.setting.flops_per_token * estimate.tokens_per_second[1] / plan.request.gpus
        sheet = f"of {gpu.bf16_flops / 1e12:.0f} TFLOP/s (sheet, BF16)"
        rows.append(["utilization", f"{per_gpu / gpu.bf16_flops:.0%}", sheet])
    printer.heading(f"a step of {name} (modelled{emulated(estimate)})")
    printer.table(["", "", ""], rows, "lrl")


def _show_cost(printer: Printer, cost: Cost) -> None:
    if cost.kwh is None and cost.rent is None:
        return
    printer.heading(f"cost of {cost.of} ({duration(cost.hours[1] * 3600)})")
    if cost.kwh is not None and cost.wall is not None:
        low, expected, high = map(number, cost.kwh)
        printer.text(
            f"{expected} kWh ({low} to {high}), {cost.wall.expected:.0f} W at the wall ({cost.wall.source})",
            indent=2,
        )
    for what, money in (("electricity", cost.electricity), ("renting", cost.rent)):
        if money is not None:
            printer.text(f"{what}: {dollars(money.amount[1])} at ${money.price:g} ({money.source})", indent=2)
    if cost.own is not None:
        printer.text(
            f"owning: {dollars(cost.own.own_per_hour)} per hour; {cost.own.summary} ({cost.own_basis})",
            indent=2,
        )
    for cap in cost.caps:
        effect = f"{cap['speed']:.0%} of the speed, {cap['card_energy_per_token']:.0%} of the card's energy per token"
        source = f"({cap['of']}; {cap['source']})"
        printer.text(f"at a limit of {cap['watts']:.0f} W: {effect} {source}", indent=2)


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
    return lines
