"""Optimizer steps on a GPU against the CPU's float32: kernels against torch,
small and offloaded states, skipped steps.
"""

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from deskside.config.optim import AdamWConfig, MuonConfig
from deskside.kernels.momentum_8bit import look_ahead_8bit, quantize
from deskside.kernels.newton_schulz import coefficients, orthogonalize
from deskside.optim import adamw, muon, offload
from deskside.optim.build import Optimizer, build
from tests.gpu.card import DEVICE, NEEDS_CARD
from tests.kernels.newton_schulz_cases import exact, matrices
from tests.optim.models import NO_SCALING, backward, make, weights

pytestmark = NEEDS_CARD

STEPS = 5
Config = AdamWConfig | MuonConfig


def train(model: nn.Module, optimizer: Optimizer, source: nn.Module, skip: Tensor | None = None) -> None:
    """Run STEPS steps with gradients that `source` computes on the CPU, so that only the updates can differ."""
    for step in range(STEPS):
        backward(source, step)
        for parameter, other in zip(model.parameters(), source.parameters(), strict=True):
            assert other.grad is not None
            parameter.grad, other.grad = other.grad.to(parameter.device, copy=True), None
        optimizer.set_progress(1 - step / 20, step / 20, step)
        optimizer.clip_and_norm(0.5)
        optimizer.step(skip)
        optimizer.zero_grad()


def moved(config: Config, device: str, fused: bool | None = False) -> dict[str, Tensor]:
    """Return the change of each weight after STEPS steps."""
    model, before = make().to(device), weights(make())
    train(model, build(model, config, NO_SCALING, fused), make())
    return {name: value.cpu() - before[name] for name, value in weights(model).items()}


def check(got: dict[str, Tensor], expected: dict[str, Tensor], within: float) -> None:
    for name, theirs in expected.items():
        assert theirs.norm() > 0
        assert float((got[name] - theirs).norm() / theirs.norm()) < within, name


def test_adamw_equals_the_cpu() -> None:
    check(moved(AdamWConfig(), DEVICE), moved(AdamWConfig(), "cpu"), 1e-4)


@pytest.mark.parametrize("cautious", [False, True])
@pytest.mark.usefixtures("small_states")
def test_our_adamw_equals_torchs_fused_one(cautious: bool) -> None:
    config = AdamWConfig(cautious_weight_decay=cautious)
    check(moved(config, DEVICE, fused=None), moved(config, DEVICE, fused=False), 3e-5)


@pytest.mark.parametrize("options", [{}, {"row_floor": 0.8}, {"radial_brake": 0.5}], ids=str)
@pytest.mark.parametrize("fused", [True, False])
def test_muon_in_float32_equals_the_cpu(
    fused: bool, options: dict[str, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(muon, "_stack_dtype", lambda weight: torch.float32)
    config = MuonConfig(**options)
    check(moved(config, DEVICE, fused), moved(config, "cpu"), 1e-3)


def test_muon_in_bfloat16_is_near_the_cpu_fused_or_not() -> None:
    """Rounding to bfloat16 rotates the directions of small singular values, which orthogonalization makes as long as
    all others: 0.16 on a CPU. The error of a wrong update would be as large as the update.
    """
    fused = moved(MuonConfig(), DEVICE, fused=None)
    check(fused, moved(MuonConfig(), DEVICE), 0.3)
    check(fused, moved(MuonConfig(), "cpu"), 0.3)


@pytest.mark.parametrize("symmetric", [False, True])
@pytest.mark.parametrize("shape", [(1024, 768), (600, 336)])  # whole tiles and partial ones
def test_orthogonal_as_in_float64_and_the_same_in_every_run(symmetric: bool, shape: tuple[int, int]) -> None:
    polynomials = coefficients("polar_express", 5)
    names, x = matrices(*shape)
    first, second = (orthogonalize(x.to(DEVICE, copy=True), polynomials, symmetric) for _ in range(2))
    assert torch.equal(first, second)
    values = torch.linalg.svdvals(exact(x, polynomials))
    for name, a, b in zip(names, torch.linalg.svdvals(first.double().cpu()), values, strict=True):
        assert float((a - b).abs().max()) < (0.01 if symmetric else 0.03), name


def small(name: str, states: str, offload: bool = False) -> Config:
    """Return a configuration. The models here are so small that the fixture `small_states` is needed too."""
    kind = AdamWConfig if name == "adamw" else MuonConfig
    return kind.model_validate({"name": name, "states": states, "offload": offload})


@pytest.fixture
def small_states(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adamw, "SMALL", 64)
    monkeypatch.setattr(adamw, "OWN_LAUNCH", 64)
    monkeypatch.setattr(offload, "PIECE", 256)


@pytest.mark.usefixtures("small_states")
@pytest.mark.parametrize(("states", "within"), [("float32", 1e-4), ("bfloat16", 1e-2), ("8bit", 2e-2)])
@pytest.mark.parametrize("offloaded", [False, True])
def test_adamw_states_equal_the_cpu(states: str, within: float, offloaded: bool) -> None:
    config = small("adamw", states, offloaded)
    check(moved(config, DEVICE, fused=None), moved(config, "cpu"), within)


@pytest.mark.usefixtures("small_states")
@pytest.mark.parametrize("name", ["adamw", "muon"])
@pytest.mark.parametrize("states", ["bfloat16", "8bit"])
def test_offloaded_state_is_the_same_to_the_last_bit(name: str, states: str) -> None:
    """Both run the same kernels on the same numbers, which pass through host memory. Muon's streamed momentum in
    bfloat16 uses torch instead of Triton, which may round a direction to another bfloat16.
    """
    here, there = (moved(small(name, states, place), DEVICE, fused=None) for place in (False, True))
    for key, value in here.items():
        if name == "adamw" or states == "8bit":
            assert torch.equal(value, there[key]), key
    check(there, here, 0.3 if name == "muon" else 1e-9)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_momentum_in_8_bits_equals_the_reference(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    state = quantize(torch.randn(5 * 256 * 8 + 7, generator=generator))
    g = torch.randn(5 * 256 * 8 + 7, generator=generator).to(dtype)
    places = [[t.clone().to(device) for t in (g, *state)] for device in ("cpu", DEVICE)]
    for direction, codes, scales in places:
        skip = torch.zeros((), device=codes.device)
        look_ahead_8bit(direction, codes, scales, 0.95, True, skip, skip + 0.5, fused=codes.is_cuda)
    (plain, plain_codes, plain_scales), (fused, codes, scales) = places
    torch.testing.assert_close(fused.cpu(), plain, rtol=1e-2 if dtype == torch.bfloat16 else 1e-5, atol=1e-5)
    torch.testing.assert_close(scales.cpu(), plain_scales, rtol=1e-5, atol=0)
    assert float((codes.cpu() != plain_codes).float().mean()) < 1e-3


@pytest.mark.usefixtures("small_states")
def test_offloaded_state_leaves_the_device() -> None:
    model = make().to(DEVICE)
    optimizer = build(model, small("adamw", "float32", True), NO_SCALING)
    train(model, optimizer, make())
    tensors, _ = optimizer.state_dict_flat()
    assert {
        t.device.type for key, t in tensors.items() if key.startswith("exp_avg/") and t.numel() >= 64
    } == {"cpu"}
    assert optimizer.streamer is not None
    assert 0 < sum(buffer.nbytes for buffer in optimizer.streamer._buffers) <= 3 * 2 * 4 * 256
    saved = {key: t.clone() for key, t in tensors.items()}
    again = build(make().to(DEVICE), small("adamw", "float32", True), NO_SCALING)
    again.load_state_dict_flat(saved, optimizer.state_dict_flat()[1])
    for key, t in again.state_dict_flat()[0].items():
        assert torch.equal(t, saved[key]), key


@pytest.mark.usefixtures("small_states")
@pytest.mark.parametrize(
    "config",
    [
        AdamWConfig(),
        MuonConfig(),
        *(
            small(name, states, place)
            for name in ("adamw", "muon")
            for states in ("bfloat16", "8bit")
            for place in (False, True)
        ),
    ],
    ids=lambda config: f"{config.name}-{config.states}-{config.offload}",
)
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
