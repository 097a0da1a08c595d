"""Weights in 24 bits in the complete optimizer: near those in float32, exact resume, skips, offloading, bytes."""

import json
import math
from typing import Any

import pytest
import torch
from torch import nn

from deskside.config import merge
from deskside.config.optim import AdamWConfig, MuonConfig
from deskside.kernels.weights_24bit import joined
from deskside.optim.build import Optimizer, build
from deskside.utils.errors import UsageError
from tests.optim.models import NO_SCALING, check_skipped_step, lower_limits, make, weights

Config = AdamWConfig | MuonConfig
STEPS = 200
ROWS = {"row_floor": 0.35, "radial_brake": 0.5}


def config(name: str, states: str = "float32", offload: bool = False, **more: Any) -> Config:
    kind = AdamWConfig if name == "adamw" else MuonConfig
    given = {"name": name, "states": states, "offload": offload, "weights": "24bit", **more}
    return kind.model_validate(given)


CONFIGS = [
    *(
        config(name, states)
        for name in ("adamw", "muon")
        for states in ("float32", "bfloat16", "8bit", "4bit")
    ),
    *(config(name, "8bit", True) for name in ("adamw", "muon")),
    config("muon", cautious_weight_decay=False, normalize="none"),
    config("muon", **ROWS),
    config("adamw", "4bit", True, cautious_weight_decay=True),
]
IDS = [f"{number} {c.name} {c.states}{' offload' if c.offload else ''}" for number, c in enumerate(CONFIGS)]


@pytest.fixture(autouse=True)
def tiny_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    lower_limits(monkeypatch)


def made(seed: int = 0, dtype: torch.dtype = torch.bfloat16) -> nn.Module:
    """Return a model whose matrices have values of bfloat16, in this type."""
    model = make(seed, moe=True)
    for parameter in model.parameters():
        if parameter.ndim > 1:
            parameter.data = parameter.data.bfloat16().to(dtype)
    return model


def train(model: nn.Module, optimizer: Optimizer, steps: range, total: int = STEPS) -> None:
    """Train with random gradients, so that those of weights in several formats are the same."""
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        for parameter in model.parameters():
            gradient = torch.randn(parameter.shape, generator=generator).bfloat16()
            parameter.grad = gradient.to(parameter.dtype)
        optimizer.set_progress(1 - step / total, step / total, step)
        optimizer.clip_and_norm(0.5)
        optimizer.step(torch.tensor(0.0))
        optimizer.zero_grad()


def stored(model: nn.Module, optimizer: Optimizer) -> dict[str, torch.Tensor]:
    """Return the weights in float64, with their residuals."""
    state = optimizer.state_dict_flat()[0]
    return {
        name: joined(p, state.get(f"residual/{name}"), torch.float64) for name, p in weights(model).items()
    }


@pytest.mark.parametrize(
    "name, more",
    [
        ("adamw", {}),
        pytest.param("adamw", {"cautious_weight_decay": True}, marks=pytest.mark.full),
        ("muon", {}),
        pytest.param("muon", {**ROWS, "weight_decay": 0.0}, marks=pytest.mark.full),
    ],
)
def test_weights_stay_near_those_in_float32(name: str, more: dict[str, Any]) -> None:
    """The same gradients in 200 steps. bfloat16 alone is 50 times as far away."""
    rates = {"lr": 1e-3, "embedding_lr": 1e-3, "head_lr": 1e-3}
    exact_model = made(dtype=torch.float32)
    exact = build(exact_model, config(name, weights="float32", **rates, **more), NO_SCALING)
    train(exact_model, exact, range(STEPS))
    expected = stored(exact_model, exact)
    away = {}
    for format in ("bfloat16", "24bit"):
        model = made()
        optimizer = build(model, config(name, weights=format, **rates, **more), NO_SCALING)
        train(model, optimizer, range(STEPS))
        found = stored(model, optimizer)
        away[format] = {
            key: float((found[key] - value).norm() / value.norm())
            for key, value in expected.items()
            if value.ndim > 1
        }
    for key, error in away["24bit"].items():
        assert error < 0.5 * math.sqrt(STEPS) * 2.0**-15, (key, away)
        assert away["bfloat16"][key] > 50 * error, (key, away)


@pytest.mark.parametrize("given", CONFIGS, ids=IDS)
def test_saved_and_loaded_midway_gives_the_same_bits(given: Config) -> None:
    straight = made()
    optimizer = build(straight, given, NO_SCALING)
    train(straight, optimizer, range(8))
    first = made()
    saving = build(first, given, NO_SCALING)
    train(first, saving, range(3))
    tensors, data = saving.state_dict_flat()
    saved = {name: t.clone() for name, t in tensors.items()}, json.loads(json.dumps(data))
    resumed = made(seed=9)
    resumed.load_state_dict(first.state_dict())
    fresh = build(resumed, given, NO_SCALING)
    fresh.load_state_dict_flat(*saved)
    train(resumed, fresh, range(3, 8))
    for name, value in weights(straight).items():
        assert torch.equal(value, weights(resumed)[name]), name
    for name, value in optimizer.state_dict_flat()[0].items():
        assert torch.equal(value, fresh.state_dict_flat()[0][name]), name


@pytest.mark.parametrize("given", CONFIGS, ids=IDS)
def test_a_skipped_step_changes_nothing(given: Config) -> None:
    model = made()
    optimizer = build(model, given, NO_SCALING)
    train(model, optimizer, range(3))
    check_skipped_step(model, optimizer)


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_offloading_and_separate_updates_change_no_bit(name: str) -> None:
    results = []
    for place in (False, True):
        for one_by_one in (False, True):
            more = {"gradients": "host"} if one_by_one else {}
            model = made()
            optimizer = build(model, config(name, "bfloat16", place, grad_clip=0.0, **more), NO_SCALING)
            for step in range(5):
                generator = torch.Generator().manual_seed(step)
                for parameter in model.parameters():
                    parameter.grad = torch.randn(parameter.shape, generator=generator).to(parameter.dtype)
                optimizer.set_progress(1.0, 0.0, step)
                optimizer.clip_and_norm()
                for info in optimizer.separate_parameters:
                    optimizer.step_one(info, torch.tensor(0.0))
                optimizer.step(torch.tensor(0.0))
            results.append(stored(model, optimizer))
    for other in results[1:]:
        for key, value in results[0].items():
            if name == "adamw":
                assert torch.equal(value, other[key]), key
            else:  # Newton-Schulz of one matrix alone adds up in another order
                torch.testing.assert_close(value, other[key], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_every_matrix_has_a_byte_more(name: str) -> None:
    model = made()
    optimizer = build(model, config(name), NO_SCALING)
    optimizer.create_state()
    residuals = {k: t for k, t in optimizer.state_dict_flat()[0].items() if k.startswith("residual/")}
    assert {k.removeprefix("residual/"): t.shape for k, t in residuals.items()} == {
        key: p.shape for key, p in model.named_parameters() if p.ndim > 1
    }
    assert {t.dtype for t in residuals.values()} == {torch.int8}


@pytest.mark.parametrize(
    "options, message",
    [
        ({"optim": {"name": "adamw", "weights": "24bit", "ema_nesterov": 0.6}}, "ema_nesterov: its moves"),
        (
            {"optim": {"name": "adamw", "weights": "24bit", "master_weights": True, "offload": True}},
            "master_weights: are float32 copies of bfloat16",
        ),
        (
            {"optim": {"weights": "24bit"}, "precision": {"name": "fp32"}},
            "24bit does not suit precision fp32",
        ),
        ({"optim": {"weights": "24bit"}, "parallel": {"mode": "shard"}}, "24bit weights cannot be sharded"),
        ({"optim": {"weights": "24bit"}, "schedule": {"tied_until": 0.5}}, "with --optim.weights 24bit"),
        ({"optim": {"weights": "24bit"}, "precision": {"accumulate": "fused"}}, "gradients in bfloat16"),
    ],
)
def test_what_bfloat16_weights_do_not_have_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message) as error:
        merge.build([options])
    assert "\n" not in str(error.value)
