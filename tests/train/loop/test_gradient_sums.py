"""Gradients of weights in bfloat16: their sums over passes, and runs with weights in bfloat16."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from deskside.train.loop.gradient_sums import GradientSums
from tests.train import tiny_run


def passes(
    sums: GradientSums, model: nn.Module, inputs: list[torch.Tensor], step: int = 1
) -> list[torch.Tensor]:
    sums.begin_step(step)
    sums.begin_passes(len(inputs))
    for x in inputs:
        model(x).square().mean().backward()
        sums.end_pass()
    grads = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    model.zero_grad()
    return grads


@pytest.mark.parametrize("count", [1, 2, 16])
def test_sums_are_near_float32_and_repeat(count: int) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 16)).bfloat16()
    sums = GradientSums(model)
    inputs = [torch.randn(8, 32).bfloat16() for _ in range(count)]
    found = passes(sums, model, inputs)
    assert all(torch.equal(a, b) for a, b in zip(passes(sums, model, inputs), found, strict=True))
    singles = [passes(sums, model, [x]) for x in inputs]
    for number, grad in enumerate(found):
        assert grad.dtype == torch.bfloat16
        each = torch.stack([single[number].double() for single in singles])
        largest = each.cumsum(0).abs().amax(0)
        assert bool(((grad.double() - each.sum(0)).abs() <= (count - 1) * largest * 2.0**-7).all())
    if count > 1:
        assert not all(
            torch.equal(a, b) for a, b in zip(passes(sums, model, inputs, step=2), found, strict=True)
        )


def test_a_step_that_failed_leaves_nothing() -> None:
    model = nn.Linear(4, 4).bfloat16()
    x = torch.randn(2, 4).bfloat16()
    sums = GradientSums(model)
    sums.begin_passes(3)
    model(x).sum().backward()
    sums.begin_passes(1)
    model(x).sum().backward()
    sums.end_pass()
    expected = torch.autograd.grad(model(x).sum(), list(model.parameters()))
    for parameter, grad in zip(model.parameters(), expected, strict=True):
        assert parameter.grad is not None and torch.equal(parameter.grad, grad)


@pytest.mark.full
@pytest.mark.parametrize(
    "optimizer", [{"name": "muon"}, pytest.param({"name": "adamw", "lr": 0.01}, marks=pytest.mark.full)]
)
def test_a_run_with_bfloat16_weights_learns_as_well(
    optimizer: dict[str, Any], data: Path, tmp_path: Path
) -> None:
    losses = {}
    for weights in ("float32", "bfloat16"):
        changes = {"optim": {**optimizer, "weights": weights}, "batch": {"micro_tokens": 128}}
        run = tiny_run.train(tmp_path, tiny_run.config(data, **changes), weights).run.path
        losses[weights] = [row["loss"] for row in tiny_run.rows(run)]
        newest = tiny_run.checkpoints(run)[-1]
        stored = load_file(run / "checkpoints" / newest / "model.safetensors")
    first, last = losses["float32"][0], sum(losses["float32"][-10:]) / 10
    assert last < 0.9 * first
    assert abs(sum(losses["bfloat16"][-10:]) / 10 - last) < 0.1 * (first - last)
    assert {t.dtype for t in stored.values() if t.ndim > 1} == {torch.bfloat16}
