"""Operators compared with their written-out formulas, and the names of logical tensors."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from deskside.kernels.functional import ACTIVATIONS, rotate
from deskside.ops.composite import AddNormLinear, GatedLinear, RMSNorm, make_projections
from deskside.ops.linear import Linear
from deskside.ops.logical import logical_tensors
from deskside.ops.moe import Experts, MixtureOfExperts, RouterStatistics, update_biases
from deskside.ops.rope import rope_table


def randomised(module: nn.Module, seed: int = 0) -> nn.Module:
    g = torch.Generator().manual_seed(seed)
    module.double()
    for parameter in module.parameters():
        nn.init.normal_(parameter, generator=g)
    return module


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activations(name: str) -> None:
    x = torch.linspace(-4, 4, 33, dtype=torch.float64)
    formulas = {
        "silu": lambda v: v / (1 + math.exp(-v)),
        "gelu": lambda v: v * 0.5 * (1 + math.erf(v / math.sqrt(2))),
        "gelu_new": lambda v: 0.5 * v * (1 + math.tanh(math.sqrt(2 / math.pi) * (v + 0.044715 * v**3))),
        "relu2": lambda v: max(v, 0.0) ** 2,
    }
    expected = torch.tensor([formulas[name](float(v)) for v in x], dtype=torch.float64)
    torch.testing.assert_close(ACTIVATIONS[name](x), expected)


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("position", ["pre", "post"])
@pytest.mark.parametrize("bias", [True, False])
def test_add_norm_linear(fused: bool, position: str, bias: bool) -> None:
    outputs = [("q_proj", 6), ("k_proj", 2)]
    operator = AddNormLinear(RMSNorm(4, 0.1), make_projections(4, outputs, bias, fused), position)  # type: ignore[arg-type]
    randomised(operator)
    residual, delta = torch.randn(2, 2, 3, 4, dtype=torch.float64)
    got_residual, (q, k) = operator(residual, delta)
    total = residual + delta
    normed = total / (total.square().mean(-1, keepdim=True) + 0.1).sqrt() * operator.norm.weight
    torch.testing.assert_close(got_residual, normed if position == "post" else total)
    values = {t.name: t.view for t in logical_tensors(operator)}
    for name, output in (("q_proj", q), ("k_proj", k)):
        expected = normed @ values[f"{name}.weight"].T + (values[f"{name}.bias"] if bias else 0)
        torch.testing.assert_close(output, expected)


def test_gated_linear() -> None:
    operator = GatedLinear("silu", Linear(5, [("down_proj", 3)]))
    randomised(operator)
    gate, up = torch.randn(2, 2, 4, 5, dtype=torch.float64)
    weight = operator.projection.weight
    torch.testing.assert_close(operator(gate, up), (gate * torch.sigmoid(gate) * up) @ weight.T)
    torch.testing.assert_close(operator(up), (up * torch.sigmoid(up)) @ weight.T)


@settings(max_examples=25, deadline=None)
@given(st.integers(1, 6), st.floats(10, 1e6), st.integers(0, 100), st.integers(0, 100))
def test_rope_turns_pairs_and_keeps_relative_positions(pairs: int, theta: float, p: int, shift: int) -> None:
    cos, sin = (t.double() for t in rope_table(301, 2 * pairs, theta, torch.device("cpu")))
    q, k = torch.randn(2, 1, 1, 1, 2 * pairs, dtype=torch.float64)

    def at(x: torch.Tensor, position: int) -> torch.Tensor:
        return rotate(x, cos[position], sin[position])

    complex_q = torch.complex(q[..., :pairs], q[..., pairs:]).flatten()
    angle = torch.tensor([p / theta ** (c / pairs) for c in range(pairs)], dtype=torch.float64)
    turned = complex_q * torch.polar(torch.ones_like(angle), angle)
    torch.testing.assert_close(
        at(q, p).flatten(), torch.cat((turned.real, turned.imag)), atol=1e-4, rtol=1e-4
    )
    one, other = (at(q, p + s) @ at(k, 2 * s if s == 0 else s).transpose(-1, -2) for s in (0, shift))
    torch.testing.assert_close(one, other, atol=2e-3, rtol=2e-3)


@pytest.mark.parametrize("normalise", [True, False])
@pytest.mark.parametrize("gated", [True, False])
def test_mixture_token_by_token(normalise: bool, gated: bool) -> None:
    experts, k, D, F = 5, 2, 4, 3
    router = Linear(D, [("router", experts)])
    mixture = MixtureOfExperts(router, Experts(experts, D, F, "silu", gated), k, normalise)
    randomised(mixture)
    x = torch.randn(2, 3, D, dtype=torch.float64)
    out, statistics = mixture(x)
    counts = torch.zeros(experts)
    for b in range(2):
        for t in range(3):
            p = torch.softmax(router.weight @ x[b, t], 0)
            top = p.topk(k)
            weights = top.values / top.values.sum() if normalise else top.values
            expected = torch.zeros(D, dtype=torch.float64)
            for weight, e in zip(weights, top.indices, strict=True):
                hidden = mixture.experts.gate_up_weight[e] @ x[b, t]
                hidden = nn.functional.silu(hidden[:F]) * hidden[F:] if gated else nn.functional.silu(hidden)
                expected = expected + weight * (mixture.experts.down_weight[e] @ hidden)
                counts[e] += 1
            torch.testing.assert_close(out[b, t], expected, atol=1e-5, rtol=1e-5)
    assert statistics[:experts].tolist() == counts.tolist()


def test_load_balancing_loss_of_an_even_router_is_k() -> None:
    even = torch.tensor([6.0] * 4 + [3.0] * 4 + [0.0, 0.0])  # 12 tokens, k = 2, E = 4
    assert RouterStatistics(torch.stack((even, even)), 12).load_balancing_loss() == 2.0
    skewed = torch.tensor([12.0, 12, 0, 0, 6.0, 6, 0, 0, 0, 0])
    assert RouterStatistics(skewed[None], 12).load_balancing_loss() == 4.0
    other = torch.tensor([0.0, 0, 12, 12, 0, 0, 6.0, 6, 0, 0])  # every expert of the model has the same load
    assert RouterStatistics(torch.stack((skewed, other)), 12).load_balancing_loss() == 4.0


def test_biases_move_by_the_rate_against_the_load() -> None:
    biases = [torch.tensor([0.5, 0.0, -0.5, 0.0]), torch.zeros(4)]
    update_biases(biases, torch.tensor([[9.0, 3, 2, 2], [4, 4, 4, 4]]), 0.25)
    assert biases[0].tolist() == [0.25, 0.25, -0.25, 0.25]
    assert biases[1].tolist() == [0, 0, 0, 0]


def test_logical_tensors_cover_each_parameter_once_and_share_memory() -> None:
    outputs = [("q_proj", 6), ("k_proj", 2)]
    fused = AddNormLinear(RMSNorm(4, 0.1), make_projections(4, outputs, True, True), "pre")
    separate = AddNormLinear(RMSNorm(4, 0.1), make_projections(4, outputs, True, False), "pre")
    randomised(fused)
    separate.double()
    values = {t.name: t.view for t in logical_tensors(fused)}
    for t in logical_tensors(separate):
        t.view.copy_(values[t.name])
    names = [t.name for t in logical_tensors(fused)]
    assert names == [t.name for t in logical_tensors(separate)]
    assert sum(t.view.numel() for t in logical_tensors(fused)) == sum(p.numel() for p in fused.parameters())
    for one, other in zip(logical_tensors(fused), logical_tensors(separate), strict=True):
        assert torch.equal(one.view, other.view)
        one.view.zero_()
    assert all(not p.any() for p in fused.parameters())


def test_unknown_parameters_are_an_error() -> None:
    with pytest.raises(TypeError, match=r"1\.weight"):
        logical_tensors(nn.Sequential(RMSNorm(4, 0.1), nn.Linear(4, 4)))
