"""What a row of the probe store must hold before anybody calculates with it. Imports no torch.

The file is text that people copy, merge and edit, and a disk damages it; a time of zero or a bandwidth below zero in it
would come out of the planner as a number like any other. So every field that is read anywhere has its type and its
bounds here, the bounds far outside of any machine. A field that nobody reads may hold anything.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, get_args

from deskside.budget.step_spec import Checkpointing, OptimizerName, Precision

_NOT_THERE = object()
_SHOWN = 40  # characters of a wrong value


@dataclass(frozen=True)
class _Number:
    """A finite number within bounds. null: it may be null; lacking: it may be left out."""

    low: float
    high: float
    whole: bool = False
    null: bool = False
    lacking: bool = False

    def accepts(self, value: Any) -> bool:
        if isinstance(value, bool) or not isinstance(value, int if self.whole else int | float):
            return False
        return self.low <= value <= self.high  # NaN is neither

    def __str__(self) -> str:
        kind = "a whole number" if self.whole else "a number"
        return f"{kind} from {self.low:g} to {self.high:g}" + (" or null" if self.null else "")


@dataclass(frozen=True)
class _Word:
    """A string; one of `among` where there are any."""

    among: tuple[str, ...] = ()
    lacking: bool = False
    null: bool = False

    def accepts(self, value: Any) -> bool:
        return isinstance(value, str) and (not self.among or value in self.among)

    def __str__(self) -> str:
        return f"one of {', '.join(self.among)}" if self.among else "a string"


@dataclass(frozen=True)
class _Flag:
    lacking: bool = True
    null: bool = False

    def accepts(self, value: Any) -> bool:
        return isinstance(value, bool)

    def __str__(self) -> str:
        return "true or false"


_Fields = Mapping[str, _Number | _Word | _Flag]

_SECONDS = _Number(1e-9, 1e7)
_BYTES = _Number(0, 2**60, whole=True, null=True)
_DEVICE = _Word(("cuda", "cpu"), lacking=True)

EVERY: _Fields = {
    "error": _Word(),
    "seconds": _Number(0, 1e9),
    "when": _Word(),
    "key.machine.card": _Word(),
    "key.machine.memory_gib": _Number(0, 2**20, whole=True),
}
CARD: _Fields = {
    "result.matmul_peak": _Number(1e3, 1e20),
    "result.copy_bandwidth": _Number(1e3, 1e18),
    "result.device": _DEVICE,
}
POINT: _Fields = {
    "key.spec.sequence_length": _Number(1, 2**27, whole=True),
    "key.spec.tokens": _Number(1, 2**50, whole=True),
    "key.spec.optimizer": _Word(get_args(OptimizerName), lacking=True),
    "key.spec.activation_checkpointing": _Word(get_args(Checkpointing), lacking=True),
    "result.tokens_per_second": _Number(1e-6, 1e12),
    "result.step_seconds.median": _SECONDS,
    "result.step_seconds.p10": _SECONDS,
    "result.step_seconds.p90": _SECONDS,
    "result.mfu": _Number(0, 1e3),
    "result.matmul_peak_tflops": _Number(1e-6, 1e8),
    "result.peak_allocated_bytes": _Number(1, 2**60, whole=True),
    "result.peak_reserved_bytes": _BYTES,
    "result.device_used_bytes": _BYTES,
    "result.micro_tokens": _Number(1, 2**50, whole=True),
    "result.accumulation": _Number(1, 2**50, whole=True),
    "result.watts": _Number(0, 1e5, null=True),
    "result.finite": _Flag(),
    "result.setup_seconds": _Number(0, 1e7, lacking=True),
    "result.precision": _Word(get_args(Precision)),
    "result.compile": _Word(lacking=True),
    "result.device": _DEVICE,
}


def damage(row: Mapping[str, Any]) -> str:
    """What is wrong with a row that has all its outer parts, in one line; empty when nothing is."""
    key = row["key"]
    wrong = _not_plain("key.machine", key["machine"]) or _out_of_bounds(row, EVERY)
    if wrong or row["status"] != "ok":
        return wrong
    if row["kind"] == "card":
        if key["spec"]:
            return f"field key.spec: a card's is empty, not {shown(key['spec'])}"
        return _out_of_bounds(row, CARD)
    return _out_of_bounds(row, POINT) or _together(row) or _model(key["spec"].get("model"))


def finite(text: str) -> float:
    """A JSON number. Raises ValueError for one that is larger than any float, which Python would read as infinity."""
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"{text} is too large")
    return number


def refused(constant: str) -> float:
    """Raises ValueError: Python reads NaN and Infinity, which are no JSON."""
    raise ValueError(f"{constant} is no JSON")


def shown(value: Any) -> str:
    """A value as JSON, cut short."""
    text = json.dumps(value)
    return text if len(text) <= _SHOWN else text[:_SHOWN] + "..."


def _out_of_bounds(row: Mapping[str, Any], fields: _Fields) -> str:
    for name, field in fields.items():
        value: Any = row
        for part in name.split("."):
            value = value.get(part, _NOT_THERE) if isinstance(value, dict) else _NOT_THERE
        if value is _NOT_THERE:
            if not field.lacking:
                return f"field {name} is missing"
        elif not (field.accepts(value) or (value is None and field.null)):
            return f"field {name}: must be {field}, not {shown(value)}"
    return ""


def _not_plain(name: str, value: Any) -> str:
    """Of a dict that may hold numbers, strings, true, false and null alone."""
    if not isinstance(value, dict):
        return f"field {name}: must hold fields, not {shown(value)}"
    for part, item in value.items():
        if isinstance(item, dict | list):
            return f"field {name}.{part}: must be one value, not {shown(item)}"
    return ""


def _together(row: Mapping[str, Any]) -> str:
    """What each field alone does not tell."""
    spec, result = row["key"]["spec"], row["result"]
    length, tokens, micro = spec["sequence_length"], spec["tokens"], result["micro_tokens"]
    if micro % length or tokens % micro:
        return (
            f"field result.micro_tokens: must be a multiple of the sequence length {length} that divides the step's "
            f"{tokens} tokens, not {micro}"
        )
    steps = result["step_seconds"]
    if steps["p10"] > steps["p90"]:
        return f"field result.step_seconds.p10: {steps['p10']:g} is above p90, {steps['p90']:g}"
    return ""


def _model(fields: Any) -> str:
    # Here and not at the top: the configuration is slow to import, and only rows of points need it.
    from pydantic import ValidationError

    from deskside.config.model import ModelConfig

    if wrong := _not_plain("key.spec.model", fields):
        return wrong
    try:
        ModelConfig(**fields)
    except ValidationError as error:
        first = error.errors()[0]
        name = ".".join(["key.spec.model", *map(str, first["loc"])])
        return f"field {name}: {first['msg'].removeprefix('Value error, ')}"
    return ""
