"""Synthetic requests: a GPU of any size and speed, so that no test depends on the data of real ones."""

from typing import Any

from deskside.budget.loss import TYPICAL_TEXT
from deskside.budget.speed import Rates
from deskside.config import merge, presets
from deskside.facts import gpus
from deskside.plan.calibrate import Calibration
from deskside.plan.card import PlanCard
from deskside.plan.given_model import GivenModel
from deskside.plan.question import PlanQuestion
from deskside.plan.request import PlanBudget, PlanRequest, make_request

GIB = 2**30


def card(memory_gib: float = 24.0, name: str = "rtx4090") -> PlanCard:
    return PlanCard("a card", int(memory_gib * GIB), "made up", gpus.find(name))


def calibration(tflops: float = 160.0, bandwidth: float = 1.0e12, spread: float = 0.2) -> Calibration:
    return Calibration(
        rates=Rates(tflops * 1e12, bandwidth, 2 * tflops * 1e12),
        speed_spread=spread,
        memory_spread=0.1,
        source="measured",
        basis="made up",
        overhead_bytes=900 * 2**20,
    )


def request(
    kind: Any = "hours",
    value: float = 24.0,
    memory_gib: float = 24.0,
    tflops: float = 160.0,
    **options: Any,
) -> PlanRequest:
    """Return an open search, or with `given` a question about a model."""
    return PlanRequest(
        card=card(memory_gib),
        calibration=options.pop("calibration", calibration(tflops)),
        budget=PlanBudget(kind, value),
        given=options.pop("given", None),
        **options,
    )


def given(preset: str, **overrides: Any) -> GivenModel:
    """Return a preset with options set by hand, as `make_request` does."""
    layers = [*presets.layers(preset), overrides]
    own = frozenset(".".join(path) for path in merge.merge(layers)[1])
    return GivenModel(preset, tuple(layers), merge.build(layers), preset, own)


def ask(
    overrides: dict[str, Any] | None = None, pretrain_seconds: float | None = None, **options: Any
) -> PlanRequest:
    """Return the request for these options of `deskside plan`. text: baselines of the text."""
    text = options.pop("text", TYPICAL_TEXT)
    return make_request(PlanQuestion(**options), overrides, pretrain_seconds, text=text)
