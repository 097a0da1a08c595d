"""The answer of a formula to a claim, and what it rests on."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from deskside.plan.estimate import Range

Source = Literal["arithmetic", "data sheet", "modelled", "published prices"]


@dataclass(frozen=True)
class Answer:
    """value with its range, in the claim's unit; of a claimed change: relative, -0.3 for 30 % less. on: of what."""

    low: float
    value: float
    high: float
    source: Source
    on: str


Formula = Callable[[], Answer]


def exact(value: float, source: Source = "arithmetic", on: str = "any card") -> Answer:
    """Return an answer without a range."""
    return Answer(value, value, value, source, on)


def ranged(values: Range, scale: float, on: str) -> Answer:
    """Return a modelled answer from a plan's range, times `scale`."""
    low, value, high = (scale * v for v in values)
    return Answer(low, value, high, "modelled", on)
