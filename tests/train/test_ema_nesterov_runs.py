"""A run with EMA-Nesterov converts the weights again after they have moved."""

from pathlib import Path
from typing import Any

from tests.train import tiny_run
from tests.train.tiny_run import curve

MOVING = {
    "ema_nesterov": 0.6,
    "ema_nesterov_decay": 0.9,
    "ema_nesterov_start": 0.3,
    "ema_nesterov_until": 0.9,
}
RUN: dict[str, Any] = {
    "schedule": {"length": "8 steps"},
    "batch": {"micro_tokens": 128},  # two passes: converted weights are cached from the first to the second
    "compute": {"compile": "fused"},
    "precision": {"name": "bf16"},
}


def test_kept_copies_are_those_of_the_moved_weights(data: Path, tmp_path: Path) -> None:
    curves = {}
    for name, optim, cache in (("kept", MOVING, True), ("not-kept", MOVING, False), ("off", {}, True)):
        changes = {**RUN, "precision": {"name": "bf16", "weight_cache": cache}, "optim": optim}
        curves[name] = curve(tiny_run.train(tmp_path, tiny_run.config(data, **changes), name).run.path)
    assert curves["kept"] == curves["not-kept"]
    assert curves["kept"][:3] == curves["off"][:3] and curves["kept"][3:] != curves["off"][3:]
