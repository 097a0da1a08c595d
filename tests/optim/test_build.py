"""The complete optimizer: compared with torch.optim.AdamW; groups and scaling, skipping, clipping, exact state."""

import json
import math
from typing import Any

import pytest
import torch
from torch import nn

from deskside.budget.scaling import Scaling
from deskside.config.model import ModelConfig
from deskside.config.optim import AdamWConfig, MuonConfig
from deskside.model.init import initialize
from deskside.model.transformer import Transformer
from deskside.optim.build import Optimizer, build
from deskside.utils.errors import RunError, UsageError
from tests.model.tiny import TINY
from tests.optim.models import NO_SCALING, backward, check_skipped_step, make, weights

CONFIGS = [
    AdamWConfig(),
    MuonConfig(),
    MuonConfig(normalize="none", nesterov=False, cautious_weight_decay=False),
]
IDS = ["adamw", "muon", "plain muon"]


def train(model: nn.Module, optimizer: Optimizer, steps: range, skip: bool = False) -> None:
    for step in steps:
        backward(model, step)
        optimizer.set_progress(1 - step / 20, step / 20, step)
        optimizer.clip_and_norm(0.5)
        optimizer.step(torch.tensor(0.0) if skip else None)
        optimizer.zero_grad()


def test_adamw_equals_torch_in_float64() -> None:
    config = AdamWConfig(lr=0.01, embedding_lr=None, head_lr=None, weight_decay=0.3, betas=(0.7, 0.9))
    model, oracle_model = make(dtype=torch.float64), make(dtype=torch.float64)
    optimizer = build(model, config, NO_SCALING)
    matrices = [p for p in oracle_model.parameters() if p.ndim >= 2]
    vectors = [p for p in oracle_model.parameters() if p.ndim < 2]
    groups: list[dict[str, Any]] = [
        {"params": matrices, "weight_decay": 0.3},
        {"params": vectors, "weight_decay": 0.0},
    ]
    oracle = torch.optim.AdamW(groups, lr=0.01, betas=(0.7, 0.9), eps=1e-8, fused=False, foreach=False)
    for step in range(6):
        backward(model, step)
        backward(oracle_model, step)
        optimizer.set_progress(1.0, 0.0, step)
        optimizer.step()
        oracle.step()
        optimizer.zero_grad()
        oracle.zero_grad()
    for name, value in weights(model).items():
        torch.testing.assert_close(value, weights(oracle_model)[name], atol=1e-12, rtol=1e-12)


def test_fifty_clipped_scaled_and_skipped_steps_of_a_transformer_equal_torch() -> None:
    """Covers all that a training step does to AdamW, with the schedule's rates: the trajectory equals torch's."""
    config = AdamWConfig(lr=0.01, embedding_lr=0.05, head_lr=0.02, weight_decay=0.3, grad_clip=1.8)
    scaling = Scaling(lr=7.0, embedding_lr=0.3, weight_decay=2.0)
    model, oracle_model = Transformer(ModelConfig(**TINY)), Transformer(ModelConfig(**TINY))
    initialize(model, 0)
    initialize(oracle_model, 0)
    optimizer = build(model, config, scaling)
    roles = {info.name: info.role for info in optimizer.parameters}
    rates = {"embedding": 0.05 * 0.3, "vector": 0.01 * 0.3, "matrix": 0.01 * 0.3, "head": 0.02 * 0.3}
    shrinks = 0.01 * 0.3 * 0.3 * 2.0  # of all weights except vectors, in a step at the peak
    groups: list[dict[str, Any]] = [
        {
            "params": [p for name, p in oracle_model.named_parameters() if roles[name] == role],
            "weight_decay": 0.0 if role == "vector" else shrinks / rate,
            "role": role,
        }
        for role, rate in rates.items()
    ]
    oracle = torch.optim.AdamW(groups, betas=(0.9, 0.95), eps=1e-8, fused=False, foreach=False)
    generator = torch.Generator().manual_seed(0)
    clipped = 0
    for step in range(50):
        rows = torch.randint(0, TINY["vocab_size"], (2, 9), generator=generator)
        factor, skip = (step + 1) / 50, step % 7 == 3
        for one in (model, oracle_model):
            (one.loss(rows[:, :-1], rows[:, 1:]) / 16).backward()
        optimizer.set_progress(factor, step / 50, step)
        norm = optimizer.clip_and_norm(config.grad_clip)
        optimizer.step(torch.tensor(float(skip)))
        optimizer.zero_grad()
        expected = torch.nn.utils.clip_grad_norm_(oracle_model.parameters(), config.grad_clip)
        torch.testing.assert_close(norm, expected, rtol=1e-3, atol=0.0)
        clipped += int(norm > config.grad_clip)
        for group in oracle.param_groups:
            group["lr"] = rates[group["role"]] * factor
        if not skip:
            oracle.step()
        oracle.zero_grad()
    assert 10 < clipped < 50
    for (name, ours), theirs in zip(model.named_parameters(), oracle_model.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, atol=2e-5, rtol=1e-4, msg=name)


def test_cautious_decay_of_tables_and_of_adamw_in_float64() -> None:
    """Each weight that decays is written out. A skipped step changes no bit."""
    adamw = AdamWConfig(
        lr=0.01,
        embedding_lr=None,
        head_lr=None,
        weight_decay=2.0,
        betas=(0.7, 0.9),
        cautious_weight_decay=True,
    )
    tables = MuonConfig(
        embedding_lr=0.01, head_lr=0.01, table_weight_decay=2.0, betas=(0.7, 0.9), eps=1e-8,
        weight_decay_schedule="constant",
    )  # fmt: skip
    for config, decaying in ((adamw, ("embed", "down", "head")), (tables, ("embed", "head"))):
        model = make(dtype=torch.float64)
        optimizer, expected = build(model, config, NO_SCALING), weights(model)
        m, v = ({name: torch.zeros_like(p) for name, p in expected.items()} for _ in range(2))
        for step in range(1, 5):
            backward(model, step)
            gradients = {name: p.grad.clone() for name, p in model.named_parameters()}
            optimizer.set_progress(1.0, 0.5, step)
            before = weights(model)
            optimizer.step(torch.tensor(1.0))
            assert all(torch.equal(value, before[name]) for name, value in weights(model).items())
            for name, p in model.named_parameters():
                p.grad = gradients[name].clone()
            optimizer.step()
            optimizer.zero_grad()
            for name in (f"{module}.weight" for module in decaying):
                g = gradients[name]
                m[name], v[name] = 0.7 * m[name] + 0.3 * g, 0.9 * v[name] + 0.1 * g.square()
                update = m[name] / (1 - 0.7**step) / ((v[name] / (1 - 0.9**step)).sqrt() + 1e-8)
                p = expected[name]
                expected[name] = p - 0.01 * update - 0.02 * p * (update * p >= 0)
                torch.testing.assert_close(weights(model)[name], expected[name], atol=1e-12, rtol=0)


def test_groups_scaling_and_schedules() -> None:
    scaling = Scaling(lr=0.5, embedding_lr=0.25, weight_decay=2.0)
    config = MuonConfig(lr=0.02, embedding_lr=0.4, head_lr=0.008, scalar_lr=0.01, weight_decay=0.1)
    optimizer = build(make(), config, scaling)
    optimizer.set_progress(0.5, 0.75, 150)
    rates = {"matrix": 0.005, "embedding": 0.05, "head": 0.001, "scalar": 0.0025}
    assert optimizer.lr_groups() == pytest.approx(rates)
    assert next(iter(optimizer.lr_groups())) == "matrix"
    assert optimizer.muon is not None
    assert optimizer.muon.weight_decay == pytest.approx(0.1 * 2 * 0.25)
    assert optimizer.muon.momentum == pytest.approx(0.9)
    assert [g.weight_decay for g in optimizer.adamw.groups] == [0.0] * 3
    decayed = build(make(), config.model_copy(update={"table_weight_decay": 0.1}), scaling)
    decayed.set_progress(0.5, 0.75, 150)
    assert [g.weight_decay for g in decayed.adamw.groups] == pytest.approx([0.05, 0.05, 0.0])
    cooled = build(make(), config.model_copy(update={"momentum_end": 0.8, "momentum_cooldown": 0.2}), scaling)
    assert cooled.muon is not None
    for progress, momentum in ((0.8, 0.95), (0.9, 0.875), (1.0, 0.8), (1.1, 0.8)):
        cooled.set_progress(0.5, progress, 1000)
        assert cooled.muon.momentum == pytest.approx(momentum)
    unscaled = build(make(), config.model_copy(update={"scale": False}), scaling)
    unscaled.set_progress(1.0, 0.0, 10_000)
    assert unscaled.lr_groups()["matrix"] == 0.02
    assert unscaled.muon is not None
    assert (unscaled.muon.momentum, unscaled.muon.weight_decay) == (0.95, 0.1)


def test_rates_and_decay_of_adamw() -> None:
    scaling = Scaling(lr=0.5, embedding_lr=0.25, weight_decay=2.0)
    config = AdamWConfig(lr=0.01, embedding_lr=None, head_lr=None, weight_decay=0.1)
    common = {"matrix": 0.0025, "embedding": 0.0025, "head": 0.0025, "vectors": 0.0025}
    for options, rates, decay in (
        ({}, {}, [0.2, 0.2, 0.2, 0.0]),
        ({"embedding_lr": 0.4}, {"embedding": 0.1}, [0.2, 0.2 / 40, 0.2, 0.0]),
        ({"head_lr": 0.08}, {"head": 0.02}, [0.2, 0.2, 0.2 / 8, 0.0]),
    ):
        adamw = build(make(), config.model_copy(update=options), scaling)
        adamw.set_progress(1.0, 0.0, 0)
        assert adamw.lr_groups() == pytest.approx(common | rates)
        assert [g.weight_decay for g in adamw.adamw.groups] == pytest.approx(decay)
    tied = build(make(tied=True), config.model_copy(update={"embedding_lr": 0.4, "head_lr": 0.08}), scaling)
    tied.set_progress(1.0, 0.0, 0)
    assert tied.lr_groups() == pytest.approx({"matrix": 0.0025, "head": 0.02, "vectors": 0.0025})
    for name, default in (("embedding_lr", 0.1), ("head_lr", 0.008)):
        assert getattr(AdamWConfig(), name) == default and getattr(AdamWConfig(scale=False), name) is None
        assert getattr(AdamWConfig.model_validate({"scale": False, name: 0.2}), name) == 0.2


@pytest.mark.parametrize("config", CONFIGS, ids=IDS)
def test_every_weight_learns(config: AdamWConfig | MuonConfig) -> None:
    model = make(moe=True)
    before = weights(model)
    optimizer = build(model, config, NO_SCALING)
    train(model, optimizer, range(1))
    for name, value in weights(model).items():
        assert not torch.equal(value, before[name]), name


@pytest.mark.parametrize("config", CONFIGS, ids=IDS)
def test_a_skipped_step_changes_nothing(config: AdamWConfig | MuonConfig) -> None:
    """The gradients contain NaN and infinity, and the step is skipped: neither
    this step nor later ones change a bit.
    """
    model, untouched = make(moe=True), make(moe=True)
    optimizer, other = build(model, config, NO_SCALING), build(untouched, config, NO_SCALING)
    train(model, optimizer, range(3), skip=True)
    train(untouched, other, range(3), skip=True)
    optimizer.set_progress(1.0, 0.2, 3)
    check_skipped_step(model, optimizer)
    optimizer.zero_grad()
    train(model, optimizer, range(3, 6), skip=True)
    train(untouched, other, range(3, 6), skip=True)
    for name, value in weights(model).items():
        assert torch.equal(value, weights(untouched)[name]), name


@pytest.mark.parametrize("config", CONFIGS, ids=IDS)
def test_skip_of_zero_is_no_skip(config: AdamWConfig | MuonConfig) -> None:
    results = []
    for skip in (False, True):
        model = make()
        train(model, build(model, config, NO_SCALING), range(3), skip)
        results.append(weights(model))
    assert all(torch.equal(results[0][name], results[1][name]) for name in results[0])


@pytest.mark.parametrize("config", CONFIGS, ids=IDS)
@pytest.mark.parametrize("fused", [True, False])
def test_saved_and_loaded_midway_gives_the_same_bits(config: AdamWConfig | MuonConfig, fused: bool) -> None:
    straight = make(moe=True, fused=fused)
    train(straight, build(straight, config, NO_SCALING), range(8))

    first = make(moe=True, fused=fused)
    optimizer = build(first, config, NO_SCALING)
    train(first, optimizer, range(3))
    tensors, data = optimizer.state_dict_flat()
    saved = {name: t.clone() for name, t in tensors.items()}, json.loads(json.dumps(data)), weights(first)

    resumed = make(seed=9, moe=True, fused=fused)
    with torch.no_grad():
        for name, parameter in resumed.named_parameters():
            parameter.copy_(saved[2][name])
    fresh = build(resumed, config, NO_SCALING)
    fresh.load_state_dict_flat(saved[0], saved[1])
    again = fresh.state_dict_flat()[0]
    assert again.keys() == saved[0].keys()
    assert all(torch.equal(again[name], saved[0][name]) for name in again)
    train(resumed, fresh, range(3, 8))
    for name, value in weights(straight).items():
        assert torch.equal(value, weights(resumed)[name]), name


def test_state_is_keyed_by_parameter_name() -> None:
    model = make()
    optimizer = build(model, MuonConfig(), NO_SCALING)
    assert optimizer.state_dict_flat()[0] == {}
    optimizer.create_state()
    tensors, data = optimizer.state_dict_flat()
    assert tensors["momentum/qkv.0.weight"].shape == (24, 16)
    assert tensors["row_sizes/qkv.0.weight"].shape == (16 + 16 + 16,)
    assert tensors["exp_avg/embed.weight"].shape == (11, 16)
    assert "exp_avg/down.weight" not in tensors
    assert data["roles"]["gain"] == "vector"


def test_state_of_another_model_or_optimiser_is_refused() -> None:
    optimizer = build(make(), MuonConfig(), NO_SCALING)
    optimizer.create_state()
    tensors, data = optimizer.state_dict_flat()
    with pytest.raises(RunError, match="state of 'muon', and this run uses 'adamw'"):
        build(make(), AdamWConfig(), NO_SCALING).load_state_dict_flat(tensors, data)
    with pytest.raises(RunError, match="lacks 'momentum/experts"):
        build(make(moe=True), MuonConfig(), NO_SCALING).load_state_dict_flat(tensors, data)
    wrong = dict(tensors) | {"momentum/down.weight": torch.zeros(2, 2)}
    with pytest.raises(RunError, match=r"momentum/down\.weight"):
        build(make(), MuonConfig(), NO_SCALING).load_state_dict_flat(wrong, data)


def test_norm_and_clipping_equal_torch() -> None:
    model, oracle = make(moe=True), make(moe=True)
    backward(model, 0)
    backward(oracle, 0)
    optimizer = build(model, MuonConfig(), NO_SCALING)
    expected = torch.nn.utils.clip_grad_norm_(oracle.parameters(), 0.1)
    assert optimizer.clip_and_norm(0.0) == pytest.approx(expected.item(), rel=1e-6)
    assert optimizer.clip_and_norm(0.1) == pytest.approx(expected.item(), rel=1e-6)
    optimizer.set_progress(1.0, 0.0, 0)
    gradients = {name: p.grad for name, p in model.named_parameters()}
    optimizer.step(None)
    assert optimizer.muon is not None
    for name, theirs in oracle.named_parameters():
        if (momentum := optimizer.muon.momentum_buffers.get(name)) is not None:
            # A matrix's gradient is clipped when the update reads it, and momentum starts at zero.
            torch.testing.assert_close(momentum / (1 - optimizer.muon.momentum), theirs.grad)
        else:
            torch.testing.assert_close(gradients[name], theirs.grad)
    model.gain.grad[0] = math.nan
    assert math.isnan(optimizer.clip_and_norm(0.1))


def test_bfloat16_gradients_are_measured_in_float32() -> None:
    model = make(dtype=torch.bfloat16)
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, 0.01)
    expected = math.sqrt(sum(p.numel() for p in model.parameters())) * float(torch.tensor(0.01).bfloat16())
    assert build(model, AdamWConfig(), NO_SCALING).clip_and_norm() == pytest.approx(expected, rel=1e-5)


def test_a_missing_gradient_and_a_missing_schedule_are_errors() -> None:
    model = make()
    optimizer = build(model, AdamWConfig(), NO_SCALING)
    with pytest.raises(RuntimeError, match="set_progress"):
        optimizer.step()
    optimizer.set_progress(1.0, 0.0, 0)
    with pytest.raises(RunError, match=r"'\w[\w.]*' has no gradient"):
        optimizer.step()
    with pytest.raises(UsageError, match="'meta'"):
        build(make().to("meta"), AdamWConfig(), NO_SCALING)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"momentum": 1.0}, "less than 1"),
        ({"lr": 0}, "greater than 0"),
        ({"betas": (0.9, 1.0)}, "less than 1"),
        ({"coefficients": "cubic"}, "polar_express"),
        ({"learning_rate": 1}, "learning_rate"),
    ],
)
def test_settings_that_cannot_be_are_refused(given: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        MuonConfig.model_validate(given)
