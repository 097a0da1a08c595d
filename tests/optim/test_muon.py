"""Muon compared with torch.optim.Muon, with a plain float64 version of the rule, and with its own unfused form."""

import pytest
import torch
from torch import Tensor, nn

from deskside.config.optim import MuonConfig
from deskside.ops.linear import Linear
from deskside.optim import muon_stacks
from deskside.optim.groups import classify_parameters
from deskside.optim.muon import Muon
from tests.optim.models import backward, make, weights

PLAIN = {"normalize": "none", "cautious_weight_decay": False}


def matrices(model: nn.Module, config: MuonConfig, lr: float = 0.05, decay: float = 0.1) -> Muon:
    optimizer = Muon([info for info in classify_parameters(model) if info.role == "matrix"], config)
    optimizer.lr, optimizer.weight_decay = lr, decay
    return optimizer


def linear(rows: int, columns: int, seed: int, dtype: torch.dtype = torch.float32) -> Linear:
    layer = Linear(columns, [("w", rows)]).to(dtype)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        layer.weight.copy_(0.1 * torch.randn(rows, columns, generator=generator))
    return layer


def gradient(shape: torch.Size, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@torch.no_grad()
def run(optimizer: Muon, parameter: nn.Parameter, steps: int) -> None:
    for step in range(steps):
        parameter.grad = gradient(parameter.shape, step).to(parameter.dtype)
        optimizer.step(None)


@pytest.mark.parametrize("shape", [(48, 32), (32, 48), (32, 32)])
@pytest.mark.parametrize("nesterov", [True, False])
def test_equals_torch_muon(shape: tuple[int, int], nesterov: bool) -> None:
    ours, theirs = linear(*shape, seed=1), linear(*shape, seed=1)
    config = MuonConfig(coefficients="quintic", momentum=0.9, nesterov=nesterov, **PLAIN)
    run(matrices(ours, config), ours.weight, 4)
    oracle = torch.optim.Muon([theirs.weight], lr=0.05, weight_decay=0.1, momentum=0.9, nesterov=nesterov)
    for step in range(4):
        theirs.weight.grad = gradient(theirs.weight.shape, step).float()
        oracle.step()
    # torch orthogonalizes in bfloat16 (about 1 % of an update); everything else agrees.
    moved = (theirs.weight - linear(*shape, seed=1).weight).norm()
    assert (ours.weight - theirs.weight).norm() < 0.02 * moved


@pytest.mark.parametrize("shape", [(48, 32), (32, 48)])
def test_equals_the_rule_in_float64(shape: tuple[int, int]) -> None:
    """NorMuon with cautious decay, written out with an SVD. There are enough iterations for the exact polar factor."""
    layer = linear(*shape, seed=2, dtype=torch.float64)
    expected = layer.weight.detach().clone()
    config = MuonConfig(ns_steps=12, momentum=0.9, normalize_beta=0.8)
    optimizer = matrices(layer, config, lr=0.05, decay=0.3)
    momentum, size = torch.zeros_like(expected), torch.zeros(max(shape), 1, dtype=torch.float64)
    for step in range(5):
        layer.weight.grad = gradient(expected.shape, step)
        optimizer.step(None)

        g = gradient(expected.shape, step)
        momentum = 0.9 * momentum + 0.1 * g
        u, _, v = torch.linalg.svd(0.1 * g + 0.9 * momentum, full_matrices=False)
        update = u @ v
        long = update if shape[0] >= shape[1] else update.T
        size = 0.8 * size + 0.2 * long.square().mean(dim=1, keepdim=True)
        scaled = long / size.sqrt()
        scaled = scaled * long.norm() / scaled.norm()
        update = scaled if shape[0] >= shape[1] else scaled.T
        shrinks = torch.sign(update) == torch.sign(expected)
        factor = max(1, shape[0] / shape[1]) ** 0.5
        expected = expected - 0.05 * 0.3 * expected * shrinks - 0.05 * factor * update
        torch.testing.assert_close(layer.weight.detach(), expected, atol=1e-6, rtol=0)


@pytest.mark.parametrize("shape", [(48, 32), (32, 48)])
@pytest.mark.parametrize(("floor", "brake"), [(0.8, None), (0.0, 0.5), (0.8, 0.25), (0.0, 0.0)])
def test_row_floor_and_radial_brake_in_float64(
    shape: tuple[int, int], floor: float, brake: float | None
) -> None:
    """Compared with the rules written out, for two matrices in one weight, each with its own norm."""
    layer = Linear(shape[1], [("a", shape[0]), ("b", shape[0])]).double()
    with torch.no_grad():
        layer.weight.copy_(
            torch.linspace(0.5, 3, 2 * shape[0]).double()[:, None] * gradient(layer.weight.shape, 9)
        )
    expected = layer.weight.detach().clone()
    config = MuonConfig(
        ns_steps=12, momentum=0.0, nesterov=False, row_floor=floor, radial_brake=brake, **PLAIN
    )
    optimizer = matrices(layer, config, lr=0.05, decay=0.02)
    optimizer.momentum = 0.0
    outward = lifted = 0
    for step in range(4):
        g = gradient(expected.shape, step)
        if step == 1:
            g[: shape[0]] -= 40 * expected[: shape[0]]  # descent increases the first matrix's norm
        layer.weight.grad = g.clone()
        optimizer.step(None)
        for rows in (slice(0, shape[0]), slice(shape[0], None)):
            p = expected[rows]
            left, _, right = torch.linalg.svd(g[rows], full_matrices=False)
            v = max(1, shape[0] / shape[1]) ** 0.5 * left @ right
            along = (v * p).sum() / p.square().sum()
            if brake is not None and along < 0:
                v, outward = v - (1 - brake) * along * p, outward + 1
            short = v.norm(dim=1) < floor * p.norm(dim=1)
            lifted += int(short.sum())
            v = torch.where(short[:, None], v * (floor * p.norm(dim=1) / v.norm(dim=1))[:, None], v)
            new = p - 0.05 * v
            if brake is not None:
                new = new * (p.norm() - 0.05 * (v * p).sum() / p.norm()) / new.norm()
            expected[rows] = new - 0.05 * 0.02 * p
        torch.testing.assert_close(layer.weight.detach(), expected, atol=1e-5, rtol=0)
    assert (outward > 0) == (brake is not None) and (lifted > 0) == (floor > 0)


def test_a_braked_matrix_that_begins_as_zero_grows() -> None:
    layer = linear(32, 16, seed=1)
    layer.weight.data.zero_()
    optimizer = matrices(layer, MuonConfig(radial_brake=0.5, row_floor=0.35), decay=0.0)
    run(optimizer, layer.weight, 1)
    first = float(layer.weight.detach().norm())
    for _ in range(5):
        run(optimizer, layer.weight, 1)  # the same gradient
    assert float(layer.weight.detach().norm()) > 1.5 * first > 0


@pytest.mark.parametrize("normalize", ["none", "neuron"])
def test_fused_slices_move_like_separate_weights(normalize: str) -> None:
    fused, separate = make(fused=True), make(fused=False)
    with torch.no_grad():
        for layer, s in zip(separate.qkv, fused.qkv[0].slices, strict=True):
            layer.weight.copy_(fused.qkv[0].weight[s.start : s.stop])
        for name in ("embed", "down", "head"):
            getattr(separate, name).load_state_dict(getattr(fused, name).state_dict())
    config = MuonConfig(normalize=normalize)
    one, other = matrices(fused, config), matrices(separate, config)
    for step in range(3):
        backward(fused, step)
        gradients = fused.qkv[0].weight.grad.clone()
        for layer, s in zip(separate.qkv, fused.qkv[0].slices, strict=True):
            layer.weight.grad = gradients[s.start : s.stop].clone()
        separate.down.weight.grad = fused.down.weight.grad.clone()
        one.step(None)
        other.step(None)
        assert torch.equal(fused.qkv[0].weight, torch.cat([layer.weight for layer in separate.qkv]))
        assert torch.equal(fused.down.weight, separate.down.weight)
        fused.zero_grad()


def test_experts_move_like_matrices_of_their_own() -> None:
    model = make(moe=True)
    single = {}
    for name, parameter in (("gate_up", model.experts.gate_up_weight), ("down", model.experts.down_weight)):
        for expert, weight in enumerate(parameter.detach()):
            for start, stop in [(0, 8), (8, 16)] if name == "gate_up" else [(0, 16)]:
                layer = Linear(weight.shape[1], [("w", stop - start)])
                layer.weight.data.copy_(weight[start:stop])
                single[name, expert, start] = (layer, matrices(layer, MuonConfig()))
    optimizer = matrices(model, MuonConfig())
    for step in range(2):
        backward(model, step)
        for (name, expert, start), (layer, own) in single.items():
            whole = getattr(model.experts, f"{name}_weight").grad[expert]
            layer.weight.grad = whole[start : start + layer.weight.shape[0]].clone()
            own.step(None)
        optimizer.step(None)
        model.zero_grad()
    for (name, expert, start), (layer, _) in single.items():
        moved = getattr(model.experts, f"{name}_weight")[expert][start : start + layer.weight.shape[0]]
        torch.testing.assert_close(moved, layer.weight, atol=1e-5, rtol=0)


def test_stacks_of_limited_size_give_the_same_update(monkeypatch: pytest.MonkeyPatch) -> None:
    results = []
    for limit in (2**26, 16 * 16):
        monkeypatch.setattr(muon_stacks, "STACK_ELEMENTS", limit)
        model = make(moe=True)
        optimizer = matrices(model, MuonConfig())
        for step in range(2):
            backward(model, step)
            optimizer.step(None)
            model.zero_grad()
        results.append((len(optimizer._stacks), weights(model)))
    assert results[0][0] < results[1][0]
    for name, value in results[0][1].items():
        torch.testing.assert_close(value, results[1][1][name], atol=1e-6, rtol=0)


def test_bfloat16_weights_keep_float32_momentum() -> None:
    layer = linear(32, 16, seed=3, dtype=torch.bfloat16)
    optimizer = matrices(layer, MuonConfig())
    run(optimizer, layer.weight, 2)
    assert layer.weight.dtype == torch.bfloat16
    assert optimizer.momentum_buffers["weight"].dtype == torch.float32


@pytest.mark.parametrize(
    ("states", "dtype"), [("bfloat16", torch.bfloat16), ("8bit", torch.int8), ("4bit", torch.int8)]
)
def test_momentum_in_fewer_bits_moves_alike(states: str, dtype: torch.dtype) -> None:
    results, start = [], weights(make(moe=True))
    for config in (MuonConfig(), MuonConfig.model_validate({"name": "muon", "states": states})):
        model = make(moe=True)
        optimizer = matrices(model, config)
        for step in range(5):
            backward(model, step)
            optimizer.step(None)
            model.zero_grad()
        results.append((weights(model), optimizer.momentum_buffers))
    assert {t.dtype for t in results[1][1].values()} == {dtype}
    for name in results[0][1]:
        moved = results[0][0][name] - start[name]
        # Rounding rotates directions of small singular values, which orthogonalization makes as long as all others. In
        # 8 bits, several of these tiny matrices share a scale.
        share = float((results[1][0][name] - results[0][0][name]).norm() / moved.norm())
        assert 0 < share < (0.1 if dtype == torch.bfloat16 else 0.4), name
