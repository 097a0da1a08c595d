"""The load of a run's experts, read from metrics.jsonl and summary.json and checked."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from deskside.run.record import RunRecord, mapping, number
from deskside.utils.format import plural


@dataclass(frozen=True)
class ExpertLoad:
    """Each expert's share of the choices of a step.

    load_LE: by layer and expert; each layer sums to 1. entropy_L: mean entropy of a token's probabilities, in nats.
    dropped_L: choices that no expert computed.
    """

    step: int
    load_LE: list[list[float]]
    entropy_L: list[float]
    dropped_L: list[float]

    @property
    def relative_LE(self) -> list[list[float]]:
        """The loads divided by the even share: 1 is even."""
        return relative(self.load_LE)

    @property
    def imbalance(self) -> float:
        """The largest relative load of a layer, averaged over the layers; 1 is even."""
        return sum(map(max, self.relative_LE)) / len(self.load_LE)

    @property
    def dropped_text(self) -> str:
        """The number of dropped tokens of the step, as a clause."""
        dropped = round(sum(self.dropped_L))
        return f"{plural(dropped, 'token')} dropped" if dropped else "no token is dropped"


def relative(load_LE: Sequence[Sequence[float]]) -> list[list[float]]:
    """Return loads divided by the even share, which is 1 / number of experts."""
    return [[load * len(layer) for load in layer] for layer in load_LE]


def newest_load(rows: Sequence[Mapping[str, Any]]) -> ExpertLoad | None:
    """Return the newest load by layer in rows of metrics.jsonl; None if there is none, or if it is damaged."""
    row: Mapping[str, Any] = next((row for row in reversed(rows) if "experts" in row), {})
    experts, step = mapping(row.get("experts")), number(row.get("step"))
    load_LE, entropy_L = numbers_by_layer(experts.get("load")), _numbers(experts.get("entropy"))
    dropped_L = _numbers(experts.get("dropped_tokens"))
    if step is None or load_LE is None or entropy_L is None or dropped_L is None:
        return None
    if not len(load_LE) == len(entropy_L) == len(dropped_L):
        return None
    return ExpertLoad(int(step), load_LE, entropy_L, dropped_L)


def load_by_language(record: RunRecord) -> dict[str, list[list[float]]]:
    """Return the loads (layers, experts) of each language of the validation text, from summary.json."""
    stored = mapping(record.summary.get("val_expert_load"))
    loads = {language: numbers_by_layer(values) for language, values in stored.items()}
    checked = {language: load for language, load in loads.items() if load is not None}
    return checked if len({(len(load), len(load[0])) for load in checked.values()}) == 1 else {}


def layer_with_differences(by_language: Mapping[str, Sequence[Sequence[float]]]) -> int:
    """Return the layer in which the loads of the languages differ most: the largest mean distance from their mean."""
    loads = np.array(list(by_language.values()))  # (languages, layers, experts)
    return int(np.abs(loads - loads.mean(axis=0)).sum(axis=2).mean(axis=0).argmax())


def numbers_by_layer(value: object) -> list[list[float]] | None:
    """Return a list of lists of numbers, all of one length; None for anything else, or if it is empty."""
    layers = [_numbers(layer) for layer in value] if isinstance(value, list) else []
    checked = [layer for layer in layers if layer]
    if not checked or len(checked) < len(layers) or len({len(layer) for layer in checked}) > 1:
        return None
    return checked


def _numbers(value: object) -> list[float] | None:
    numbers = [number(item) for item in value] if isinstance(value, list) else []
    finite = [item for item in numbers if item is not None]
    return finite if finite and len(finite) == len(numbers) else None
