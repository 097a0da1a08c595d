"""`--explain ITEM`: the formula of one number of the plan, with this plan's numbers filled in, and its source.

Every line is arithmetic that can be typed into a calculator: a test reads the filled-in text, computes it, and
compares it with the number that the plan shows. Of a run with stages the last stage is shown, where rows are longest.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from deskside.budget.loss import EXCESS, REPEATS, effective_tokens
from deskside.budget.shape import matmul_params
from deskside.plan import explain_memory, explain_speed
from deskside.plan.candidates import muon_advantage, pretrain_seconds, setup_seconds
from deskside.plan.costs import Cost
from deskside.plan.estimate import MEMORY_SOURCE, Estimate
from deskside.plan.formula import Line, plain
from deskside.plan.result import Plan, PlannedBand
from deskside.utils.errors import UsageError
from deskside.utils.format import duration, gib, number


@dataclass(frozen=True)
class Explanation:
    """lines: formula, numbers, value; source: measured, modelled or published, and from what."""

    item: str
    of: str
    lines: tuple[Line, ...]
    source: str

    def text(self) -> str:
        """For a person."""
        shown = [f"{self.item} of {self.of}"]
        for line in self.lines:
            shown.append(f"  {line.what} = {line.formula}")
            shown += [f"    = {line.filled}"] if line.filled != line.formula else []
            shown.append(f"    = {_value(line)}")
        return "\n".join([*shown, f"source: {self.source}"])

    def to_json(self) -> dict[str, Any]:
        return {
            "item": self.item,
            "of": self.of,
            "lines": [
                {
                    "what": line.what,
                    "formula": line.formula,
                    "filled": line.filled,
                    "value": line.value,
                    "unit": line.unit,
                }
                for line in self.lines
            ],
            "source": self.source,
        }


def explain(plan: Plan, item: str) -> Explanation:
    """One item of the recommended band (or of the run as it was asked for). Raises UsageError for one that is none."""
    known = _items(plan)
    wanted = item.strip().lower()
    if wanted not in known:
        by_last = [name for name in known if name.split(".")[-1] == wanted]
        if len(by_last) != 1:
            raise UsageError(f"--explain: {item} is none of {', '.join(known)}; --explain list lists them")
        wanted = by_last[0]
    lines, source = known[wanted]()
    of = plan.best.name if plan.best else "the run as it was asked for"
    return Explanation(wanted, f"{of}, {plan.request.card.name}", tuple(lines), source)


# What an item is, by its name or, for "part.name", its part.
DESCRIPTIONS = {
    "memory.weights": "float32 weights",
    "memory.optimizer": "optimizer states",
    "memory.gradients": "float32 gradients",
    "memory.copies": "weights in the format of the products",
    "memory.activations": "what the forward pass keeps for the backward",
    "memory.logits": "logits and their gradient, one chunk",
    "memory.workspace": "largest buffers that live for a moment",
    "memory.needed": "everything on the card, fragmentation and context included",
    "memory.capacity": "memory that programs can use",
    "memory": "part of the peak",
    "speed.matmul": "products of the blocks",
    "speed.attention": "attention scores",
    "speed.traffic": "element-wise work and casts of weights",
    "speed.quantize": "conversion to lower formats",
    "speed.loss": "head and loss",
    "speed.optimizer": "optimizer update",
    "speed.recompute": "activation checkpointing",
    "speed.communication": "exchange between GPUs",
    "speed.offload": "optimizer states to the host and back",
    "speed.launches": "tails of small kernels",
    "speed.host": "waiting for the host to launch kernels",
    "speed.tokens_per_second": "speed and its range",
    "speed.mfu": "model FLOPs utilisation",
    "speed.flops_per_token": "training FLOPs of a token",
    "speed": "part of a step",
    "tokens": "tokens that the budget comes to",
    "loss": "expected bits per byte",
    "cost.kwh": "energy at the wall",
    "cost.electricity": "price of that energy",
    "cost.rent": "price of renting instead",
    "cost.own": "hours until buying is cheaper than renting",
}


def descriptions(plan: Plan) -> dict[str, str]:
    """Return what each item that can be explained of this plan is."""
    return {name: DESCRIPTIONS.get(name) or DESCRIPTIONS[name.split(".")[0]] for name in _items(plan)}


def items(plan: Plan) -> list[str]:
    """What can be explained of this plan."""
    return list(_items(plan))


Explainer = Callable[[], tuple[list[Line], str]]


def _items(plan: Plan) -> dict[str, Explainer]:
    found: dict[str, Explainer] = {}
    shown, best = plan.shown, plan.best
    calibration = plan.request.calibration
    speed_source = f"modelled, with rates {calibration.source}: {calibration.basis}"
    if shown is not None:
        for name in shown.memory.items:
            found[f"memory.{name}"] = lambda name=name: (  # type: ignore[misc]
                explain_memory.lines(plan.request, shown, name),
                MEMORY_SOURCE,
            )
        found["memory.needed"] = lambda: (explain_memory.needed(plan.request, shown), MEMORY_SOURCE)
        found["memory.capacity"] = lambda: (_capacity(plan, shown), plan.request.card.memory_source)
        for name in shown.step:
            found[f"speed.{name}"] = lambda name=name: (  # type: ignore[misc]
                explain_speed.lines(plan.request, shown, name),
                speed_source,
            )
        found["speed.tokens_per_second"] = lambda: (_rate(plan, shown), speed_source)
        found["speed.mfu"] = lambda: (_mfu(plan, shown), f"{speed_source}; peak: data sheet")
        found["speed.flops_per_token"] = lambda: (
            explain_speed.flops_per_token_lines(shown),
            "arithmetic on the shape, by the convention of budget/shape.py",
        )
    if best is not None:
        found["tokens"] = lambda: (_tokens(plan, best), speed_source)
        if plan.request.pretrains:
            found["loss"] = lambda: (_loss(plan, best), plan.request.law.source)
        found |= _cost_items(plan, best.cost)
    return found


def _capacity(plan: Plan, shown: Estimate) -> list[Line]:
    return [Line("capacity", "memory that programs can use", plain(shown.capacity), shown.capacity, "bytes")]


def _rate(plan: Plan, shown: Estimate) -> list[Line]:
    seconds = [value for value in shown.step.values() if value > 0]
    spread = shown.speed_spread
    _, expected, _ = shown.tokens_per_second
    return [
        Line(
            "step",
            " + ".join(k for k, v in shown.step.items() if v > 0),
            seconds,
            shown.step_seconds,
            "s",
            " + ",
        ),
        Line(
            "tokens/s",
            "tokens per step / step",
            [shown.setting.tokens_per_step, shown.step_seconds],
            expected,
            "tokens/s",
            " / ",
        ),
        Line(
            "low",
            "tokens/s x (1 - spread)",
            f"{plain(expected)} x (1 - {plain(spread)})",
            shown.tokens_per_second[0],
            "tokens/s",
        ),
        Line(
            "high",
            "tokens/s x (1 + spread)",
            f"{plain(expected)} x (1 + {plain(spread)})",
            shown.tokens_per_second[2],
            "tokens/s",
        ),
    ]


def _mfu(plan: Plan, shown: Estimate) -> list[Line]:
    gpu = plan.request.card.gpu
    if gpu is None:
        raise UsageError(f"--explain: {plan.request.card.name} has no data sheet here to compare with")
    values = [shown.setting.flops_per_token, shown.tokens_per_second[1]]
    value = values[0] * values[1] / plan.request.gpus / gpu.bf16_flops
    filled = f"{plain(values[0])} x {plain(values[1])} / {plan.request.gpus} / {plain(gpu.bf16_flops)}"
    return [Line("utilisation", "FLOPs per token x tokens/s / GPUs / peak", filled, value, "")]


def _tokens(plan: Plan, best: PlannedBand) -> list[Line]:
    seconds, rate = pretrain_seconds(plan.request), best.estimate.tokens_per_second[1]
    tokens = best.candidate.tokens[1]
    request = plan.request
    if seconds is not None:
        setup, lines = setup_seconds(request), []
        if request.pretrain_seconds is None and request.budget is not None:
            filled = f"{plain(request.budget.value)} x 3600 x {plain(request.split.pretraining)}"
            lines = [Line("pretraining", "hours x 3600 x share", filled, seconds, "s")]
        filled = f"({plain(seconds)} - {plain(setup)}) x {plain(rate)}"
        return [*lines, Line("tokens", "(pretraining - set-up) x tokens/s", filled, tokens, "tokens")]
    budget = request.budget
    if budget is not None and budget.kind == "flops":
        per_token = best.estimate.setting.flops_per_token
        return [Line("tokens", "FLOPs / FLOPs per token", [budget.value, per_token], tokens, "tokens", " / ")]
    if budget is not None and budget.kind == "tokens":
        return [Line("tokens", "as given", plain(tokens), tokens, "tokens")]
    law, weights = request.law, best.candidate.weights
    if budget is not None:
        return [Line("tokens", "where the loss below is reached", plain(tokens), tokens, "tokens")]
    alpha, beta, A, B = (plain(value) for value in (law.alpha, law.beta, law.A, law.B))
    filled = f"({beta} x {B} x {plain(weights)} ^ {alpha} / ({alpha} x {A})) ^ (1 / {beta})"
    return [Line("tokens", "(beta B N^alpha / (alpha A))^(1 / beta)", filled, tokens, "tokens")]


def _loss(plan: Plan, best: PlannedBand) -> list[Line]:
    request, law, setting = plan.request, plan.request.law, best.candidate.setting
    tokens, weights = best.candidate.tokens[1], matmul_params(setting.model)
    lines, worth = [], tokens
    if setting.optimizer == "adamw":
        worth = tokens / muon_advantage(weights)
        filled = [tokens, muon_advantage(weights)]
        lines.append(
            Line("tokens'", "tokens / Muon's advantage (arXiv 2509.02046)", filled, worth, "tokens", " / ")
        )
    unique = worth if request.unique_tokens is None else min(worth, request.unique_tokens)
    once = effective_tokens(worth, request.unique_tokens)
    if once != worth:
        what = "what repeated tokens are worth (form of Muennighoff et al. 2023, rate of our own runs)"
        lines.append(Line("tokens'", what, _diminishing(worth, unique, REPEATS), once, "tokens"))
    counted = law.effective_params(weights, worth, request.unique_tokens)
    if counted < weights:
        enough = min(weights, law.best_params(unique))
        what = f"N, less what is in excess of the {plain(enough)} that are optimal for this much text"
        lines.append(Line("N'", what, _diminishing(weights, enough, EXCESS), counted, "weights"))
    E, offset, A, B, alpha, beta = (
        plain(value) for value in (law.E, law.offset, law.A, law.B, law.alpha, law.beta)
    )
    filled_law = f"{E} + {offset} + {A} / {plain(counted)} ^ {alpha} + {B} / {plain(once)} ^ {beta}"
    low, expected, high = best.loss
    return [
        *lines,
        Line(
            "bits per byte",
            "E + offset + A / N'^alpha + B / tokens'^beta",
            filled_law,
            expected,
            "bits per byte",
        ),
        Line(
            "low",
            "expected x low factor",
            f"{plain(expected)} x {plain(low / expected)}",
            low,
            "bits per byte",
        ),
        Line(
            "high",
            "expected x high factor",
            f"{plain(expected)} x {plain(high / expected)}",
            high,
            "bits per byte",
        ),
    ]


def _diminishing(value: float, enough: float, most: float) -> str:
    """enough x (1 + most x (1 - exp(-(value / enough - 1) / most))), with numbers."""
    inside = f"-({plain(value)} / {plain(enough)} - 1) / {plain(most)}"
    return f"{plain(enough)} x (1 + {plain(most)} x (1 - {math.e:.9f} ^ ({inside})))"


def _cost_items(plan: Plan, cost: Cost) -> dict[str, Explainer]:
    found: dict[str, Explainer] = {}
    hours = cost.hours[1]
    if cost.energy is not None and cost.wall is not None:
        energy, wall = cost.energy, cost.wall
        filled = f"{plain(wall.expected)} x {plain(hours)} / 1000"
        found["cost.kwh"] = lambda: (
            [Line("kWh", "watts at the wall x hours / 1000", filled, energy.expected, "kWh")],
            f"{wall.source}: {wall.basis}",
        )
    if cost.electricity is not None and cost.energy is not None:
        money, kwh = cost.electricity, cost.energy.expected
        found["cost.electricity"] = lambda: (
            [Line("electricity", "kWh x price", [kwh, money.price], money.amount[1], "USD", " x ")],
            f"price {money.source}",
        )
    if cost.rent is not None:
        rent = cost.rent
        found["cost.rent"] = lambda: (
            [
                Line(
                    "renting",
                    "hours x GPUs x price",
                    [hours, plan.request.gpus, rent.price],
                    rent.amount[1],
                    "USD",
                    " x ",
                )
            ],
            f"price {rent.source}",
        )
    if cost.own is not None and cost.own.break_even_hours is not None:
        own, gpu = cost.own, plan.request.card.gpu
        price = (gpu.msrp_usd or 0.0) * plan.request.gpus if gpu else 0.0
        filled_own = f"{plain(price)} / ({plain(own.rent_per_hour)} - {plain(own.electricity_per_hour)})"
        found["cost.own"] = lambda: (
            [
                Line(
                    "hours to break even",
                    "price of the cards / (rent per hour - electricity per hour)",
                    filled_own,
                    own.break_even_hours or 0.0,
                    "h",
                )
            ],
            cost.own_basis,
        )
    return found


def _value(line: Line) -> str:
    if line.unit == "bytes":
        return f"{line.value:,.0f} bytes" + (f" = {gib(line.value)}" if line.value >= 2**20 else "")
    if line.unit == "s":
        return f"{line.value:.6g} s" + (f" = {duration(line.value)}" if line.value >= 120 else "")
    if line.unit == "":
        return f"{line.value:.4g}"
    return f"{number(line.value) if abs(line.value) >= 100 else f'{line.value:.4g}'} {line.unit}"
