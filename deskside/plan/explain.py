"""`--explain ITEM`: the formula of one number of the plan, with this plan's numbers filled in, and its source.

The functions of `budget/` that computed the plan run again with `Term`s (`budget/terms.py`), which carry their
formulas. Every line can be recomputed with a calculator; a test does so. For a run with stages, memory is explained for
the stage that needs most, and speed for the last stage, followed by the mean.
"""

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any

from deskside.budget.adapters import training_flops_per_token
from deskside.budget.host import host_seconds, overlapped_seconds
from deskside.budget.loss import LAW, USEFUL_EPOCHS, bounded, expected_bpb
from deskside.budget.memory import RESERVED_BYTES, RESERVED_SHARE, explain_memory
from deskside.budget.operators.operator import Operator
from deskside.budget.operators.step import step_operators
from deskside.budget.scaling import batch_token_factor
from deskside.budget.separate_gradients import has_side_stream
from deskside.budget.shape import matmul_params
from deskside.budget.speed import (
    Rates,
    exposed_seconds,
    item_seconds,
    operator_seconds,
    replica_overhead,
    step_seconds,
)
from deskside.budget.terms import Line, explained, leaf, traced
from deskside.plan.candidates import ends_early
from deskside.plan.estimate import MEMORY_SOURCE, StepEstimate, peak_stage
from deskside.plan.expected_loss import muon_advantage, optimal_tokens
from deskside.plan.request import TIME_SHARES, PlanRequest
from deskside.plan.result import Plan, PlannedBand
from deskside.plan.run_length import pretrain_seconds, setup_seconds
from deskside.utils.errors import UsageError
from deskside.utils.format import duration, gib, number

# Units of operators by group; the others are in bytes.
UNITS = {
    "matmul": "FLOP", "head": "FLOP", "optimizer_matmul": "FLOP", "attention": "FLOP", "layers": "times",
    "muon": "times",
}  # fmt: skip
# Descriptions of items. An item "part.name" that is not listed has the description of its part.
DESCRIPTIONS = {
    "memory.weights": "weights",
    "memory.optimizer": "optimizer states",
    "memory.average": "average of the weights",
    "memory.gradients": "gradients on the card",
    "memory.copies": "weights converted to the format of the products",
    "memory.activations": "activations saved for the backward pass",
    "memory.logits": "logits of a chunk, and gradients of logits, head and hidden states",
    "memory.workspace": "largest temporary buffers",
    "memory.needed": "everything on the card, fragmentation and context included",
    "memory.capacity": "memory that programs can use",
    "memory": "part of the peak",
    "speed.matmul": "products of the blocks",
    "speed.attention": "products of attention",
    "speed.traffic": "element-wise work and casts of weights",
    "speed.quantize": "conversion to lower formats",
    "speed.loss": "head and loss",
    "speed.optimizer": "optimizer update",
    "speed.recompute": "activation checkpointing",
    "speed.communication": "communication between GPUs",
    "speed.offload": "optimizer states, gradients and activations to the host and back",
    "speed.launches": "tails of small kernels",
    "speed.host": "waiting for the host to launch kernels",
    "speed.tokens_per_second": "speed and its range",
    "speed.mfu": "model FLOPs utilization",
    "speed.flops_per_token": "training FLOPs of a token",
    "speed": "part of a step",
    "tokens": "tokens that the budget allows",
    "loss": "expected bits per byte",
    "cost.kwh": "energy at the wall",
    "cost.electricity": "cost of the energy",
    "cost.rent": "cost of renting instead",
    "cost.own": "hours of use after which buying is cheaper than renting",
}
Explainer = Callable[[], tuple[list[Line], str]]  # returns the lines and their source


@dataclass(frozen=True)
class Explanation:
    """The arithmetic of one item. of: band and card; source: measured, modelled or published, with the basis."""

    item: str
    of: str
    lines: tuple[Line, ...]
    source: str

    def text(self) -> str:
        """Return the explanation as text."""
        output = [f"{self.item} of {self.of}"]
        for line in self.lines:
            output.append(f"  {line.what} = {line.formula}")
            if line.filled != line.formula:
                output.append(f"    = {line.filled}")
            output.append(f"    = {_value(line)}")
        return "\n".join([*output, f"source: {self.source}"])

    def to_json(self) -> dict[str, Any]:
        lines = [asdict(line) for line in self.lines]
        return {"item": self.item, "of": self.of, "lines": lines, "source": self.source}


def explain(plan: Plan, item: str) -> Explanation:
    """Explain one item of the recommended band, or of the requested run if there is no band.

    "weights" is accepted for "memory.weights" if no other item ends so. Raises UsageError for an unknown item or value.
    """
    items = _items(plan)
    name = item.strip().lower()
    if name not in items:
        matches = [other for other in items if other.split(".")[-1] == name]
        if len(matches) != 1:
            raise UsageError(
                f"--explain: {item} is not an item of this plan; use one of {', '.join(items)}; --explain list "
                f"describes them"
            )
        name = matches[0]
    lines, source = items[name]()
    of = plan.best.name if plan.best else "the requested run"
    return Explanation(name, f"{of}, {plan.request.card.name}", tuple(lines), source)


def descriptions(plan: Plan) -> dict[str, str]:
    """Return a description of every item of this plan that can be explained."""
    return {name: DESCRIPTIONS.get(name) or DESCRIPTIONS[name.split(".")[0]] for name in _items(plan)}


def _items(plan: Plan) -> dict[str, Explainer]:
    """Return a function for every item of this plan that can be explained."""
    shown, best, calibration = plan.shown, plan.best, plan.request.calibration
    items: dict[str, Explainer] = {}
    modelled = f"modelled, with rates {calibration.source}: {calibration.basis}"

    def add(item: str, source: str, lines: Callable[..., list[Line]], *arguments: Any) -> None:
        items[item] = lambda: (lines(*arguments), source)

    if shown is not None:
        for name in shown.memory.items:
            add(f"memory.{name}", MEMORY_SOURCE, _memory, shown, name)
        add("memory.needed", MEMORY_SOURCE, _needed, plan, shown)
        capacity = leaf("memory that programs can use", shown.capacity)
        add("memory.capacity", plan.request.card.memory_source, explained, "capacity", capacity, "bytes")
        for name in shown.step:
            add(f"speed.{name}", modelled, _speed, plan, shown, name)
        add("speed.tokens_per_second", modelled, _tokens_per_second, shown)
        add("speed.mfu", f"{modelled}; peak: data sheet", _mfu, plan, shown)
        convention = "arithmetic on the shape, by the convention of budget/shape.py"
        add("speed.flops_per_token", convention, _flops_per_token, shown)
    if best is None:
        return items
    add("tokens", modelled, _tokens, plan, best)
    if plan.request.pretrains:
        add("loss", LAW.source, _loss, plan, best)
    cost, gpu = best.cost, plan.request.card.gpu
    hours, gpus = leaf("hours", cost.hours[1]), leaf("GPUs", plan.request.gpus)
    if cost.wall is not None:
        kwh = leaf("watts at the wall", cost.wall.expected) * hours / 1000
        add("cost.kwh", f"{cost.wall.source}: {cost.wall.basis}", explained, "kWh", kwh, "kWh")
    if cost.electricity is not None and cost.kwh is not None:
        price = leaf("kWh", cost.kwh[1]) * leaf("price", cost.electricity.price)
        source = f"price {cost.electricity.source}"
        add("cost.electricity", source, explained, "electricity", price, "USD")
    if cost.rent is not None:
        rent = hours * gpus * leaf("price", cost.rent.price)
        add("cost.rent", f"price {cost.rent.source}", explained, "renting", rent, "USD")
    own = cost.own
    if own is not None and own.break_even_hours is not None and gpu is not None:
        bought = leaf("price of a card", gpu.msrp_usd or 0.0) * gpus
        electricity = leaf("electricity per hour", own.electricity_per_hour)
        saved = leaf("rent per hour", own.rent_per_hour) - electricity
        add("cost.own", cost.own_basis, explained, "hours to break even", bought / saved, "h")
    return items


def _memory(shown: StepEstimate, item: str) -> list[Line]:
    shape, spec = peak_stage(shown.executed)
    return explain_memory(shape, spec, shown.memory.instant, item)


def _needed(plan: Plan, shown: StepEstimate) -> list[Line]:
    """Return the lines from the allocated bytes to the bytes that the card must have."""
    calibration, peak = plan.request.calibration, shown.memory
    allocated = sum(leaf(name, size) for name, size in peak.items.items() if size)
    reserved = leaf("reserved", peak.reserved)
    context = leaf("CUDA context", calibration.overhead_bytes)
    spread = leaf("spread", calibration.memory_spread)
    fragmented = leaf("allocated", peak.allocated) * (1 + RESERVED_SHARE) + RESERVED_BYTES
    return [
        *explained("peak allocated", allocated, "bytes"),
        replace(explained("reserved", fragmented, "bytes")[-1], value=peak.reserved),
        *explained("needed", reserved + context, "bytes"),
        *explained("low", reserved * (1 - spread) + context, "bytes"),
        *explained("high", reserved * (1 + spread) + context, "bytes"),
        *explained("capacity", leaf(gib(shown.capacity), shown.capacity), "bytes"),
    ]


def _speed(plan: Plan, shown: StepEstimate, item: str) -> list[Line]:
    """Return the operators of an item with their amounts and rates, then the mean over the stages."""
    rates = plan.request.calibration.rates
    if item == "host":
        return _host(rates, shown)
    stages = list(shown.executed.step_specs())
    _, shape, spec = stages[-1]
    named_rates = _traced_rates(rates)
    lines: list[Line] = []
    times: list[float] = []
    for operator in step_operators(shape, spec, traced=True):
        if operator.item != item or not operator.amount:
            continue
        unit = UNITS.get(operator.group, "bytes")
        lines += explained(_label(operator), operator.amount, unit)
        in_units = replace(operator, amount=leaf(unit, operator.amount))
        lines += explained("  takes", operator_seconds(in_units, named_rates, spec), "s")
        times.append(leaf(operator.name, lines[-1].value))
    if item == "offload" and (spec.activation_offloading or has_side_stream(spec)):
        device = sum(operator_seconds(operator, rates, spec) for operator in step_operators(shape, spec))
        exposed = exposed_seconds(shape, spec, rates, device)
        nothing = "none: they take less time than the computation"
        lines += explained("transfers beside the computation, beyond its time", exposed, "s", nothing)
        times.append(leaf("transfers beyond it", exposed))
    if item == "communication" and spec.gpus > 1 and not spec.sharded:
        added = replica_overhead(shape, spec, rates, item_seconds(shape, spec, rates))
        lines += explained(
            "gradients and weights beside passes, and waiting for the slowest card", added, "s"
        )
        times.append(leaf("exchange beside the passes", added))
    if not times:
        return explained(item, 0.0, "s", nothing="none in this run")
    if len(stages) == 1:
        return [*lines, *explained(item, sum(times), "s")]
    lines += explained(f"{item}, last stage", sum(times), "s")
    mean = sum(
        leaf("share", stage.share) * leaf("seconds of the stage", step_seconds(shape, spec, rates)[item])
        for stage, shape, spec in stages
    )
    return [*lines, *explained(item, mean, "s")]


def _host(rates: Rates, shown: StepEstimate) -> list[Line]:
    """Return the lines for the time that the device waits for the host (`budget/host.py`), by stage."""
    lines: list[Line] = []
    mean: float = 0.0
    for stage, shape, spec in shown.executed.step_specs():
        host = host_seconds(shape, spec, traced(rates.host, factor="this host relative to the reference"))
        if not host:
            continue
        lines += explained(f"host, rows of {stage.sequence_length}", host, "s")
        busy = sum(s for name, s in step_seconds(shape, spec, rates).items() if name != "host")
        device, overlap = leaf("device", busy), leaf("p", rates.host.overlap)
        lines += explained(
            "  waited for", overlapped_seconds(device, leaf("host", host), overlap) - device, "s"
        )
        mean = mean + leaf("share", stage.share) * leaf("waited for", lines[-1].value)
    if not lines:
        return explained("host", 0.0, "s", nothing="none is modelled for this kind of step")
    return [*lines, *explained("host", mean, "s")]


def _traced_rates(rates: Rates) -> Rates:
    """Return the rates as named `Term`s."""
    named_rates: Rates = traced(
        rates,
        matmul_flops="large matmul rate",
        low_precision_flops="large FP8 rate",
        fp4_flops="large NVFP4 rate",
        single_flops="FP32 rate",
        link_bandwidth="bandwidth between GPUs",
        host_bandwidth="bandwidth to the host, each way",
        compute="correction",
        memory="correction",
        delay="correction",
    )
    names = dict.fromkeys(vars(rates.efficiency), "efficiency")
    names |= {
        "layer_seconds": "delay of a layer",
        "low_precision": "low-precision share",
        "rowwise": "row-wise share",
        "windowed": "window share",
        "muon_seconds": "short kernels of Muon",
        "flash_chunks_64": "FlashAttention share",
        "flash_chunks_128": "FlashAttention share",
        "cudnn_chunks": "cuDNN share of shared rows",
    }
    return replace(
        named_rates, efficiency=traced(rates.efficiency, **names), fused=traced(rates.fused, **names)
    )


def _label(operator: Operator) -> str:
    """Return an operator's name, with its format if the run has products in several formats."""
    low = operator.runs_as not in ("fp32", "bf16") or operator.share < 1
    return f"{operator.name}, {operator.runs_as}" if low and operator.group != "quantize" else operator.name


def _tokens_per_second(shown: StepEstimate) -> list[Line]:
    low, expected, high = shown.tokens_per_second
    step = sum(leaf(name, seconds) for name, seconds in shown.step.items() if seconds > 0)
    rate, spread = leaf("tokens/s", expected), leaf("spread", shown.speed_spread)
    per_step = leaf("tokens per step", shown.setting.tokens_per_step) / leaf("step", shown.step_seconds)
    return [
        *explained("step", step, "s"),
        replace(explained("tokens/s", per_step, "tokens/s")[0], value=expected),
        replace(explained("low", rate * (1 - spread), "tokens/s")[0], value=low),
        replace(explained("high", rate * (1 + spread), "tokens/s")[0], value=high),
    ]


def _mfu(plan: Plan, shown: StepEstimate) -> list[Line]:
    gpu = plan.request.card.gpu
    if gpu is None:
        raise UsageError(
            f"--explain: {plan.request.card.name} is not in the table of GPUs, so its utilization is unknown"
        )
    flops = leaf("FLOPs per token", shown.setting.flops_per_token)
    per_gpu = flops * leaf("tokens/s", shown.tokens_per_second[1]) / leaf("GPUs", plan.request.gpus)
    return explained("utilization", per_gpu / leaf("peak", gpu.bf16_flops), "")


def _flops_per_token(shown: StepEstimate) -> list[Line]:
    *_, (stage, shape, spec) = shown.setting.step_specs()
    value = training_flops_per_token(shape, spec.sequence_length, spec.adapter, traced=True)
    if stage.share == 1:
        return explained("FLOPs per token", value, "FLOP")
    mean = leaf("mean over the stages", shown.setting.flops_per_token)
    return [*explained("last stage", value, "FLOP"), *explained("FLOPs per token", mean, "FLOP")]


def _tokens(plan: Plan, best: PlannedBand) -> list[Line]:
    request, tokens = plan.request, best.candidate.tokens[1]
    budget, seconds = request.budget, pretrain_seconds(request)
    if ends_early(request, best.candidate):
        return _most_tokens(request, best)
    if seconds is not None:
        lines = []
        if request.pretrain_seconds is None:
            share = leaf("share of pretraining", TIME_SHARES["pretraining"])
            lines = explained("pretraining", leaf("hours", budget.value) * 3600 * share, "s")
        training = leaf("pretraining", seconds) - leaf("set-up", setup_seconds(request))
        rate = leaf("tokens/s", best.estimate.tokens_per_second[1])
        return [*lines, *explained("tokens", training * rate, "tokens")]
    if budget.kind == "flops":
        per_token = leaf("FLOPs per token", best.estimate.setting.flops_per_token)
        return explained("tokens", leaf("FLOPs", budget.value) / per_token, "tokens")
    if budget.kind is not None:
        origin = "as given" if budget.kind == "tokens" else "where the loss below is reached"
        return explained("tokens", leaf(origin, tokens), "tokens")
    return explained("tokens", optimal_tokens(traced(LAW), leaf("N", best.candidate.weights)), "tokens")


def _most_tokens(request: PlanRequest, best: PlannedBand) -> list[Line]:
    """Return the lines of a run that ends when more epochs no longer help."""
    epochs = leaf("epochs beyond which more are worth nothing (arXiv 2305.16264)", USEFUL_EPOCHS)
    tokens = epochs * leaf("unique tokens", request.unique_tokens or 0)
    if tokens < best.candidate.tokens[1]:
        tokens = leaf("a step", best.candidate.setting.tokens_per_step)
    return explained("tokens", tokens, "tokens")


def _loss(plan: Plan, best: PlannedBand) -> list[Line]:
    setting, weights = best.candidate.setting, matmul_params(best.candidate.setting.model)
    tokens: float = leaf("tokens", best.candidate.tokens[1])
    more = batch_token_factor(setting.tokens_per_step, best.candidate.tokens[1])
    if more > 1:
        tokens = tokens / leaf("tokens needed, relative to the best batch (arXiv 2505.13738)", more)
    if setting.optimizer == "adamw":
        tokens = tokens / leaf("Muon's advantage (arXiv 2509.02046)", muon_advantage(weights))
    law = traced(LAW, offset="offset", low="low factor", high="high factor")
    unique = plan.request.unique_tokens
    text = None if unique is None else leaf("unique tokens", unique)
    law_ends = expected_bpb(law, leaf("N", weights), tokens, text)
    # A loss to reach is one of the law (`plan.candidates.make_candidate`).
    shown = law_ends if plan.request.budget.kind == "loss" else bounded(law_ends, plan.request.text)
    ends = zip(("low", "expected", "high"), shown, strict=True)
    lines = [line for end, value in ends for line in explained(end, value, "bits per byte")]
    return list(dict.fromkeys(lines))


def _value(line: Line) -> str:
    if line.unit == "bytes":
        return f"{line.value:,.0f} bytes" + (f" = {gib(line.value)}" if line.value >= 2**20 else "")
    if line.unit == "s":
        return f"{line.value:.6g} s" + (f" = {duration(line.value)}" if line.value >= 120 else "")
    if line.unit == "":
        return f"{line.value:.4g}"
    return f"{number(line.value) if abs(line.value) >= 100 else f'{line.value:.4g}'} {line.unit}"
