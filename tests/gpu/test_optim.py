"""Optimiser steps on the card against the CPU's float32, compiled against eager, and steps that are skipped."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from deskside.config.optim import AdamWConfig, MuonConfig
from deskside.optim import muon
from deskside.optim.build import Optimizer, build
from tests.gpu.card import DEVICE, NEEDS_CARD
from tests.optim.models import NO_SCALING, backward, make, weights

pytestmark = NEEDS_CARD

STEPS = 5
Config = AdamWConfig | MuonConfig


def train(model: nn.Module, optimizer: Optimizer, source: nn.Module, skip: Tensor | None = None) -> None:
    """STEPS steps with gradients that `source` computes on the CPU, so that only the updates can differ."""
    for step in range(STEPS):
        backward(source, step)
        for parameter, other in zip(model.parameters(), source.parameters(), strict=True):
            assert other.grad is not None
            parameter.grad, other.grad = other.grad.to(parameter.device, copy=True), None
        optimizer.set_progress(1 - step / 20, step / 20, step)
        optimizer.clip_and_norm(0.5)
        optimizer.step(skip)
        optimizer.zero_grad()


def moved(config: Config, device: str, compiled: bool | None = False) -> dict[str, Tensor]:
    """How far each weight has gone after STEPS steps."""
    model, before = make().to(device), weights(make())
    train(model, build(model, config, NO_SCALING, compiled), make())
    return {name: value.cpu() - before[name] for name, value in weights(model).items()}


def check(got: dict[str, Tensor], expected: dict[str, Tensor], within: float) -> None:
    for name, theirs in expected.items():
        assert theirs.norm() > 0
        assert float((got[name] - theirs).norm() / theirs.norm()) < within, name


def test_adamw_equals_the_cpu() -> None:
    check(moved(AdamWConfig(), DEVICE), moved(AdamWConfig(), "cpu"), 1e-4)


@pytest.mark.parametrize("compiled", [True, False])
def test_muon_in_float32_equals_the_cpu(compiled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(muon, "_iteration_dtype", lambda weight: torch.float32)
    check(moved(MuonConfig(), DEVICE, compiled), moved(MuonConfig(), "cpu"), 1e-3)


def test_muon_in_bfloat16_is_near_the_cpu_compiled_or_not() -> None:
    """Rounding to bfloat16 turns the directions of small singular values, which orthogonalising makes as long as all
    others: 0.16 on a CPU. A wrong update is wrong by its own size."""
    compiled = moved(MuonConfig(), DEVICE, compiled=None)
    check(compiled, moved(MuonConfig(), DEVICE), 0.3)
    check(compiled, moved(MuonConfig(), "cpu"), 0.3)


@pytest.mark.parametrize("config", [AdamWConfig(), MuonConfig()], ids=["adamw", "muon"])
def test_a_skipped_step_changes_no_bit(config: Config) -> None:
    model: Any = make().to(DEVICE)
    optimizer = build(model, config, NO_SCALING)
    train(model, optimizer, make(), torch.zeros((), device=DEVICE))
    before, state = weights(model), {k: v.clone() for k, v in optimizer.state_dict_flat()[0].items()}
    for number, parameter in enumerate(model.parameters()):
        parameter.grad = torch.full_like(parameter, (math.nan, math.inf)[number % 2])
    optimizer.step(torch.ones((), device=DEVICE))
    assert state
    for name, value in weights(model).items():
        assert torch.equal(value, before[name]), name
    for name, value in optimizer.state_dict_flat()[0].items():
        assert torch.equal(value, state[name]), name
