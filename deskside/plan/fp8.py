"""What FP8 brings on a card, seen in pairs of runs that differ in nothing else: this card's own, and published ones.

A plan shows the modelled gain (`budget/formats.py`) beside it. Between the sizes that somebody measured the published
gain is interpolated, and nearest outside of them. It grows with the model, since products grow faster than the traffic
around them.
"""

import json
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np

from deskside.facts.gpus import Gpu
from deskside.facts.measurements import Measurement, published


@dataclass(frozen=True)
class Gain:
    """speed: FP8 tokens per second against BF16; source: measured or published, and whose pairs."""

    speed: float
    source: str


def measured_gain(rows: Sequence[Mapping[str, Any]]) -> Gain | None:
    """The median gain over pairs of probe points of this card. rows: of the probe store, of one machine."""
    seconds: dict[str, dict[str, float]] = {}
    for row in rows:
        if row["kind"] == "point" and row["status"] == "ok":
            spec, result = row["key"]["spec"], row["result"]
            same = {key: value for key, value in spec.items() if key != "precision"}
            kind = "fp8" if str(result.get("precision")).startswith("fp8-") else str(result.get("precision"))
            by_kind = seconds.setdefault(json.dumps([same, result["micro_tokens"]], sort_keys=True), {})
            by_kind[kind] = float(result["step_seconds"]["median"])
    gains = [found["bf16"] / found["fp8"] for found in seconds.values() if {"bf16", "fp8"} <= set(found)]
    if not gains:
        return None
    count = f"{len(gains)} pairs of points" if len(gains) != 1 else "one pair of points"
    return Gain(statistics.median(gains), f"measured: {count} on this card with deskside probe")


def gain(gpu: Gpu, params: float) -> Gain | None:
    """The published gain at this size: on this card, else on cards of its architecture, else None."""
    if gpu.fp8_flops is None:
        return None
    pairs = _pairs()
    own = [pair for pair in pairs if pair[0].card == gpu.name]
    sheets = [(pair, pair[0].data_sheet()) for pair in pairs]
    near = [pair for pair, sheet in sheets if sheet is not None and sheet.architecture == gpu.architecture]
    found = own or near
    if not found:
        return None
    by_size: dict[float, list[float]] = {}
    for fp8, bf16 in found:
        assert fp8.params and fp8.tokens_per_second and bf16.tokens_per_second
        by_size.setdefault(fp8.params, []).append(fp8.tokens_per_second / bf16.tokens_per_second)
    sizes = sorted(by_size)
    speeds = [float(np.median(by_size[size])) for size in sizes]
    speed = float(np.interp(math.log(params), [math.log(size) for size in sizes], speeds))
    cards = ", ".join(dict.fromkeys(pair[0].card for pair in found))
    trainers = ", ".join(dict.fromkeys(pair[0].framework for pair in found))
    span = (
        f"{sizes[0] / 1e6:,.0f}M to {sizes[-1] / 1e6:,.0f}M" if len(sizes) > 1 else f"{sizes[0] / 1e6:,.0f}M"
    )
    return Gain(speed, f"published: {trainers} on {cards}, {span} parameters")


@cache
def _pairs() -> tuple[tuple[Measurement, Measurement], ...]:
    """(FP8, BF16) runs on one GPU that differ in nothing else."""

    def what(row: Measurement) -> tuple[object, ...]:
        return (row.card, row.framework, row.model, row.sequence_length, row.rows, row.workload, row.saving)

    whole = [
        row
        for row in published()
        if row.card and row.gpus == 1 and row.params and row.tokens_per_second and not row.rejected
    ]
    bf16 = {what(row): row for row in whole if row.precision == "bf16"}
    return tuple((row, bf16[what(row)]) for row in whole if row.precision == "fp8" and what(row) in bf16)
