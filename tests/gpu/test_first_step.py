"""The start of a run on a GPU: kernels compiled in threads, cached trials and self-checks, and unchanged training."""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from deskside.train.prepare import batch_size_finder, check_step
from tests.gpu.card import ADAMW, DEVICE, NEEDS_CARD, config, losses
from tests.train import tiny_run

pytestmark = NEEDS_CARD

RECIPES = ("bf16", "fp8-delayed")


@contextlib.contextmanager
def _nothing(device: torch.device) -> Iterator[None]:
    yield


def train(root: Path, prepared: Path, name: str, caches: str, ahead: bool) -> None:
    """Run in a child process: train with both recipes, with the caches in a folder."""
    os.environ["TRITON_CACHE_DIR"] = str(root / caches / "triton")
    os.environ["DESKSIDE_CACHE"] = str(root / caches / "deskside")
    if not ahead:
        batch_size_finder.compile_ahead = check_step.compile_ahead = _nothing  # type: ignore[attr-defined]
    for recipe in RECIPES:
        given = config(
            prepared,
            model={"vocab_size": 304},
            precision={"name": recipe, "keep_first": 0.0, "keep_last": 0.0},
            optim=ADAMW,
            schedule={"length": "6 steps"},
            compute={"device": DEVICE, "attention": "auto"},
        )
        tiny_run.train(root, given, f"{name}-{recipe}")


def startup(run: Path) -> dict[str, Any]:
    started: dict[str, Any] = tiny_run.plan(run)["startup"]
    return started


def test_kernels_compiled_in_threads_train_as_those_compiled_one_by_one(data: Path, tmp_path: Path) -> None:
    for name, caches, ahead in (("one-by-one", "a", False), ("cold", "b", True), ("warm", "b", True)):
        child = tiny_run.call(train, tmp_path, data, name, caches, ahead, log=tmp_path / f"log-{name}")
        assert child.wait() == 0, child.text()
        # autograd's thread has a context also if the checks come from the cache
        assert "cuBLAS" not in child.text()
    for recipe in RECIPES:
        slow, cold, warm = (tmp_path / f"{name}-{recipe}" for name in ("one-by-one", "cold", "warm"))
        assert losses(cold)[0] == losses(warm)[0] == losses(slow)[0]
        assert losses(cold) == pytest.approx(losses(slow), rel=1e-2)
        assert losses(warm) == pytest.approx(losses(slow), rel=1e-2)
        assert startup(cold)["kernels_compiled"] > 0
        assert startup(warm)["kernels_compiled"] == 0 and startup(warm)["kernels_loaded"] > 0
        plans = [tiny_run.plan(run)["attention"]["full"] for run in (cold, warm)]
        assert plans[1]["trial"] == "cached" and plans[0]["name"] == plans[1]["name"]
    assert (
        startup(tmp_path / "cold-bf16")["kernels_compiled"]
        == (startup(tmp_path / "one-by-one-bf16")["kernels_compiled"])
    )
