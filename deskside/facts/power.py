"""Power draw of cards in training and the effect of lower limits: `power.toml` as typed values."""

from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any

from deskside.facts.gpus import Gpu
from deskside.utils.parsing import toml_table


@dataclass(frozen=True)
class Share:
    """A share of something, or watts, with its range and its source."""

    low: float
    expected: float
    high: float
    source: str


@dataclass(frozen=True)
class CapSeries:
    """Speed at several power limits, one card, one workload.

    points: (limit in watts, speed as a share of the speed at default_watts, draw in watts or None where only the limit
    was published), by rising limit. training: False for inference, which loses less.
    """

    card: str
    workload: str
    training: bool
    default_watts: float
    points: tuple[tuple[float, float, float | None], ...]
    date: str
    source: str


def load(gpu: Gpu) -> Share:
    """Return the average draw of this card in training, as a share of its limit."""
    entries = {entry["kind"]: entry for entry in _data()["load"]}
    entry = entries["geforce" if gpu.geforce else "other"]
    return _share(entry["share"], entry["source"])


def host() -> Share:
    """Return the watts that the computer draws without its cards."""
    return _share(_data()["host"]["watts"], _data()["host"]["source"])


def supply_efficiency() -> Share:
    """Return the share of the power at the wall that reaches the components. low: the best supply."""
    return _share(_data()["supply"]["efficiency"], _data()["supply"]["source"])


def cap_series(gpu: Gpu) -> tuple[CapSeries, ...]:
    """Return the published measurements of this card at lower power limits, training first."""
    found = [
        CapSeries(
            card=entry["card"],
            workload=entry["workload"],
            training=entry["training"],
            default_watts=entry["default_watts"],
            points=tuple((limit, speed, draw or None) for limit, speed, draw in entry["points"]),
            date=entry["date"],
            source=entry["source"],
        )
        for entry in _data()["cap"]
        if entry["card"] == gpu.name
    ]
    return tuple(sorted(found, key=lambda series: not series.training))


def _share(values: list[float], source: str) -> Share:
    low, expected, high = values
    return Share(low, expected, high, source)


@cache
def _data() -> dict[str, Any]:
    return toml_table(resources.files("deskside.facts").joinpath("power.toml").read_text("utf-8"))
