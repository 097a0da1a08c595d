"""The mixture-of-experts operators: their torch reference compared with autograd,
and Triton's kernels with the reference.
"""

from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from deskside.kernels import moe
from tests.kernels.interpreter import interpreted

N, E, D, FF = 37, 5, 16, 24


def routing_of(
    k: int = 2, normalise: bool = True, sigmoid: bool = False, bias: Tensor | None = None
) -> tuple[Tensor, moe.Routing]:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(N, E, dtype=torch.float64, generator=generator)
    return logits, moe.route(logits, k, normalise, sigmoid=sigmoid, bias_E=bias)


@given(st.integers(1, 70), st.integers(1, 9), st.integers(1, 9), st.integers(0, 2**31))
def test_a_routing_sorts_every_choice_once(tokens: int, experts: int, k: int, seed: int) -> None:
    k = min(k, experts)
    logits = torch.randn(tokens, experts, generator=torch.Generator().manual_seed(seed))
    routing = moe.route(logits, k, True)
    assert sorted(routing.slots_Nk.flatten().tolist()) == list(range(tokens * k))
    assert torch.equal(
        routing.tokens_S[routing.slots_Nk.long()], torch.arange(tokens).int()[:, None].expand(-1, k)
    )
    expert_S = torch.empty(tokens * k, dtype=torch.int32)
    expert_S[routing.slots_Nk.long()] = routing.experts_Nk
    assert torch.equal(expert_S, expert_S.sort().values)
    # No token is dropped.
    assert torch.equal(torch.bincount(expert_S, minlength=experts).cumsum(0).int(), routing.ends_E)
    assert routing.weights_S[routing.slots_Nk.long()].sum(1).allclose(torch.ones(tokens))
    assert float(routing.statistics_R[:-2].sum()) == pytest.approx(tokens * (k + 1), rel=1e-5)


@given(st.integers(1, 70), st.integers(1, 9), st.integers(1, 9), st.integers(0, 2**31))
def test_padding_moves_rows_and_changes_nothing_else(tokens: int, experts: int, k: int, seed: int) -> None:
    k = min(k, experts)
    logits = torch.randn(tokens, experts, generator=torch.Generator().manual_seed(seed))
    plain, padded = moe.route(logits, k, True), moe.route(logits, k, True, align=16)
    starts = torch.cat((torch.zeros(1), padded.ends_E[:-1])).int()
    assert ((padded.ends_E - starts) >= 16).all() and (padded.ends_E % 16 == 0).all()
    assert int(padded.ends_E[-1]) == len(padded.tokens_S) == len(padded.weights_S)
    real = padded.tokens_S >= 0
    assert torch.equal(padded.tokens_S[real], plain.tokens_S)
    assert torch.equal(padded.weights_S[real], plain.weights_S) and not padded.weights_S[~real].any()
    places = real.nonzero().flatten().int()
    assert torch.equal(padded.slots_Nk, places[plain.slots_Nk.long()])
    assert torch.equal(padded.statistics_R, plain.statistics_R)
    x = torch.randn(tokens, D)
    rows = moe.dispatch(x, padded.tokens_S)
    assert torch.equal(rows[real], moe.dispatch(x, plain.tokens_S)) and not rows[~real].any()
    assert torch.equal(moe.combine(rows, padded.slots_Nk), moe.combine(rows[real], plain.slots_Nk))


@pytest.mark.parametrize("sigmoid", [False, True])
@pytest.mark.parametrize("normalise", [True, False])
@pytest.mark.parametrize("k", [1, 2, 5])
def test_the_routers_gradient_is_autograds(k: int, normalise: bool, sigmoid: bool) -> None:
    logits, routing = routing_of(k, normalise, sigmoid, torch.randn(E) if sigmoid else None)
    grad_weights = torch.randn(N * k, dtype=torch.float64)
    grad_statistics = torch.randn(2 * E + 2, dtype=torch.float64)
    leaf = logits.clone().requires_grad_()
    scores = leaf.sigmoid() if sigmoid else leaf.softmax(-1)
    probabilities = scores / scores.sum(-1, keepdim=True)
    weights = scores.gather(1, routing.experts_Nk.long())
    if normalise:
        weights = weights / weights.sum(-1, keepdim=True)
    squared_lse = leaf.logsumexp(-1).square().sum()
    entropy = torch.distributions.Categorical(probs=probabilities.detach()).entropy().sum()
    torch.testing.assert_close(routing.statistics_R[-2:], torch.stack((entropy, squared_lse.detach())))
    outputs = (weights, probabilities.sum(0), squared_lse)
    upstream = (grad_weights[routing.slots_Nk.long()], grad_statistics[E : 2 * E], grad_statistics[-1])
    truth = torch.autograd.grad(outputs, leaf, upstream)[0]
    torch.testing.assert_close(weights.detach(), routing.weights_S[routing.slots_Nk.long()])
    got = moe.route_backward(grad_weights, grad_statistics, logits, routing, normalise, sigmoid)
    torch.testing.assert_close(got, truth, rtol=1e-12, atol=1e-12)
    without = moe.route_backward(grad_weights, None, logits, routing, normalise, sigmoid)
    zero = moe.route_backward(
        grad_weights, torch.zeros_like(grad_statistics), logits, routing, normalise, sigmoid
    )
    assert torch.equal(without, zero)


def test_a_bias_decides_the_choice_and_not_the_weight() -> None:
    bias = torch.zeros(E)
    bias[3] = 2.0  # exceeds every sigmoid
    logits, plain = routing_of(2, False, True)
    _, biased = routing_of(2, False, True, bias)
    assert torch.equal(biased.experts_Nk[:, 0], torch.full((N,), 3).int())
    assert (plain.experts_Nk == 3).any(1).sum() < N
    weights = biased.weights_S[biased.slots_Nk.long()]
    torch.testing.assert_close(weights, logits.sigmoid().gather(1, biased.experts_Nk.long()))


def test_scores_that_underflow_have_no_nan() -> None:
    logits = torch.full((4, 3), -1000.0)
    routing = moe.route(logits, 2, True, sigmoid=True)
    assert routing.weights_S.eq(0).all() and routing.statistics_R.isfinite().all()
    grads = moe.route_backward(torch.ones(8), torch.ones(8), logits, routing, True, True)
    assert grads.isfinite().all()


@pytest.mark.parametrize(("activation", "gated"), [("silu", True), ("gelu_new", False)])
def test_the_gates_gradient_is_autograds(activation: str, gated: bool) -> None:
    S = 2 * N
    x = torch.randn(S, 2 * FF if gated else FF, dtype=torch.float64, requires_grad=True)
    weights = torch.rand(S, dtype=torch.float64, requires_grad=True)
    grad = torch.randn(S, FF, dtype=torch.float64)
    act = F.silu if activation == "silu" else lambda t: F.gelu(t, approximate="tanh")
    truth = act(x[:, :FF]) * (x[:, FF:] if gated else 1) * weights[:, None]
    expected = torch.autograd.grad(truth, (x, weights), grad)
    torch.testing.assert_close(
        moe.weighted_gated(x.detach(), weights.detach(), activation, gated), truth.detach()
    )
    *got, hidden = moe.weighted_gated_backward(grad, x.detach(), weights.detach(), activation, gated)
    for ours, theirs in zip(got, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(hidden, truth.detach())


def test_combine_is_the_transpose_of_dispatch() -> None:
    _, routing = routing_of()
    x, y = torch.randn(N, D, dtype=torch.float64), torch.randn(2 * N, D, dtype=torch.float64)
    left = (moe.dispatch(x, routing.tokens_S) * y).sum()
    torch.testing.assert_close(left, (x * moe.combine(y, routing.slots_Nk)).sum())
    torch.testing.assert_close(moe.combine(y, routing.slots_Nk, x), x + moe.combine(y, routing.slots_Nk))


def test_grouped_products_are_those_of_each_expert() -> None:
    ends = torch.tensor([3, 3, 10, N], dtype=torch.int32)  # the second expert has no rows
    x, g = torch.randn(N, D, dtype=torch.float64), torch.randn(N, FF, dtype=torch.float64)
    weight = torch.randn(4, FF, D, dtype=torch.float64)
    rows = torch.repeat_interleave(torch.arange(4), torch.tensor([3, 0, 7, N - 10]))
    torch.testing.assert_close(
        moe.grouped_matmul(x, weight, ends, True), torch.einsum("sk,smk->sm", x, weight[rows])
    )
    torch.testing.assert_close(
        moe.grouped_matmul(g, weight, ends, False), torch.einsum("sm,smk->sk", g, weight[rows])
    )
    one_hot = F.one_hot(rows, 4).double()
    torch.testing.assert_close(
        moe.grouped_weight_gradient(g, x, ends, torch.float64), torch.einsum("se,sm,sk->emk", one_hot, g, x)
    )


@pytest.fixture(scope="module")
def found() -> dict[str, float]:
    pytest.importorskip("triton")
    made: dict[str, float] = interpreted("moe_interpreted", "main")
    return made


def test_kernels_equal_their_reference(found: dict[str, float]) -> None:
    assert len(found) > 30
    assert max(found.values()) < 1e-6, max(found, key=found.__getitem__)


@pytest.mark.parametrize(
    ("function", "count"), [pytest.param("fp8", 36, marks=pytest.mark.full), ("fp8_of_gates", 42)]
)
def test_casts_to_fp8_equal_their_reference(function: str, count: int) -> None:
    """Scales are equal. The interpreter's conversion to FP8 truncates, so a value may be one step off (1 in 8)."""
    pytest.importorskip("triton")
    found: dict[str, float] = interpreted("moe_interpreted", function)
    assert len(found) == count
    assert max(value for name, value in found.items() if "others" in name) < (
        1e-6 if "gates" in function else 1e-30
    )
    assert max(found.values()) < 0.125
    assert any(0 < value < 0.02 for value in found.values())


@given(
    tokens=st.integers(1, 60),
    experts=st.integers(1, 6),
    columns=st.integers(1, 5),
    magnitude=st.integers(-120, 100),
    seed=st.integers(0, 2**31),
)
def test_casts_are_those_of_ml_dtypes(
    tokens: int, experts: int, columns: int, magnitude: int, seed: int
) -> None:
    ml_dtypes = pytest.importorskip("ml_dtypes")
    generator = torch.Generator().manual_seed(seed)
    routing = moe.route(torch.randn(tokens, experts, generator=generator), 1, True, align=16)
    x = torch.randn(tokens, 16 * columns, generator=generator) * 2.0**magnitude
    x[0], x[:, 0] = 0.0, 0.0
    rows, ends = moe.dispatch(x, routing.tokens_S).numpy(), routing.ends_E.tolist()

    def expected(values: Any) -> tuple[Any, Any]:
        """The expected result casts the transpose of `values` (scale per column)."""
        largest = abs(values).max(0)
        with np.errstate(divide="ignore"):
            scale = 2.0 ** np.floor(np.log2(448.0 / largest.astype(np.float64)))
        scale = np.minimum(scale, 2.0**126)
        return (values * scale).astype(ml_dtypes.float8_e4m3fn), scale

    values, inverse = moe.dispatch_fp8(x, routing.slots_Nk, routing.tokens_S)
    truth, scale = expected(rows.T)
    assert np.array_equal(values.float().numpy(), truth.T.astype(np.float32))
    assert np.array_equal(1 / inverse.double().numpy(), scale)
    columns_KS, inverse_E = moe.dispatch_columns(x, routing.tokens_S, inverse, routing.ends_E)
    for expert, (start, end) in enumerate(zip([0, *ends[:-1]], ends, strict=True)):
        truth, scale = expected(rows[start:end].reshape(-1, 1))  # one scale for all values of an expert
        found = columns_KS.float().numpy()[:, start:end].T.reshape(-1, 1)
        assert np.array_equal(found, truth.astype(np.float32))
        assert 1 / inverse_E.double()[expert] == scale.item()
    weight = x[: tokens // 4 * 4].view(1, -1, 16 * columns)
    if weight.numel():
        values, inverse = moe.cast_weight_columns(weight)
        truth, scale = expected(weight[0].numpy())
        assert np.array_equal(values[0].float().numpy(), truth.T.astype(np.float32))
        assert np.array_equal(1 / inverse[0].double().numpy(), scale)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_a_cast_hides_no_infinity(value: float) -> None:
    x = torch.randn(32, 16)
    x[3, 5] = value
    rows, row_inverse = moe.cast_rows(x)
    assert (rows.float() * row_inverse[:, None]).isnan().any(dim=1).nonzero().flatten().tolist() == [3]
    ends_E = torch.tensor([16, 32], dtype=torch.int32)
    wide_KS = moe.transpose_rows(rows, row_inverse, ends_E)[0].float()
    direct_KS = moe.dispatch_columns(x, torch.arange(32, dtype=torch.int32), row_inverse, ends_E)[0].float()
    for columns_KS in (wide_KS, direct_KS):
        assert columns_KS[5, 3].isnan() and not columns_KS[:, 16:].isnan().any()
    columns, inverse = moe.cast_weight_columns(x.view(2, 16, 16))
    wide_EKM = columns.float() * inverse[..., None]
    assert wide_EKM.isnan().any(dim=2).nonzero().tolist() == [[0, 5]]
