"""Common parts of the tests in this folder: the GPU, settings for it, and a
compiler without leftovers of other tests.
"""

import os
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.train import tiny_run

DEVICE = "cuda"
NEEDS_CARD = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
ALONE = pytest.mark.skipif(
    "PYTEST_XDIST_WORKER" in os.environ,
    reason="measures speed, which tests beside it would change: run without -n",
)
# With this intermediate size, Muon has only two shapes of matrices to compile for.
SHAPE: dict[str, Any] = {
    "hidden_size": 128,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 64,
    "intermediate_size": 128,
}
ADAMW = {"name": "adamw", "lr": 3e-3}
QUICK = {"device": DEVICE, "attention": "sdpa", "compile": "off"}  # nothing to choose and nothing to compile


def parts(changes: dict[str, Any]) -> dict[str, Any]:
    """Return changes to `tiny_run.settings` for a run on the GPU, with those of a test merged in, key by key."""
    mine: dict[str, Any] = {
        "model": SHAPE,
        "batch": {"sequence_length": 128, "tokens": 2048},
        "schedule": {"length": "20 steps"},
        "compute": {"device": DEVICE, "attention": "sdpa"},
        "checkpoint": {"every": "1000 steps"},
    }
    for name, value in changes.items():
        mine[name] = {**mine.get(name, {}), **value} if isinstance(value, dict) else value
    return mine


def config(prepared: Path, /, **changes: Any) -> tiny_run.RunConfig:
    return tiny_run.config(prepared, **parts(changes))


def losses(run: Path) -> list[float]:
    return [row["loss"] for row in tiny_run.rows(run)]


def spin(milliseconds: float) -> None:
    """Keep the current stream busy for about this long (at 2 GHz, otherwise longer)."""
    torch.cuda._sleep(int(milliseconds * 2e6))
