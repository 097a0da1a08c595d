"""The mixture-of-experts kernels and the fused sublayer on this GPU, against the torch reference in float64."""

from dataclasses import fields, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from deskside.kernels import moe
from deskside.kernels.moe import grouped, reference
from deskside.model.transformer import Transformer
from deskside.precision.convert import convert
from tests.gpu import card
from tests.precision.small import B, T, make, tokens

pytestmark = card.NEEDS_CARD
BF16 = 2.5e-3  # for a tensor rounded once
SHAPES = (
    (4096, 8, 2, 512, 704),
    (1000, 64, 8, 256, 128),
    (333, 5, 1, 64, 48),
    (64, 128, 8, 128, 64),
    (16, 8, 2, 512, 704),
)


def random(*shape: int) -> Tensor:
    return torch.randn(*shape, device=card.DEVICE).bfloat16()


def error(ours: Tensor, truth: Tensor) -> float:
    return float((ours.double() - truth.double()).norm() / truth.double().norm())


@pytest.mark.parametrize(("N", "E", "k", "D", "F"), SHAPES)
def test_kernels_equal_float64(N: int, E: int, k: int, D: int, F: int) -> None:
    torch.manual_seed(0)
    logits = random(N, E) + torch.arange(E, device=card.DEVICE) / (10 * E)  # ties may be broken either way
    exact = reference.route(logits.double(), k, True)
    routing = moe.route(logits, k, True)
    for field in fields(routing):
        ours, truth = getattr(routing, field.name), getattr(exact, field.name)
        if not truth.is_floating_point():
            different = float((ours != truth).double().mean())
            assert different < 0.02 if field.name == "experts_Nk" else True
    assert int(routing.ends_E[-1]) == N * k
    assert torch.equal(
        routing.slots_Nk.flatten().sort().values, torch.arange(N * k, device=card.DEVICE).int()
    )
    experts_S = torch.empty(N * k, dtype=torch.int32, device=card.DEVICE)
    experts_S[routing.slots_Nk.flatten().long()] = routing.experts_Nk.flatten()
    assert torch.equal(experts_S, experts_S.sort().values)

    grad_weights, grad_statistics = (
        torch.randn(N * k, device=card.DEVICE),
        torch.randn(2 * E + 2, device=card.DEVICE),
    )
    arguments = (grad_weights.double(), grad_statistics.double(), logits.double(), routing, True)
    truth = reference.route_backward(*arguments)
    assert error(moe.route_backward(grad_weights, grad_statistics, logits, routing, True), truth) < BF16

    bias = torch.randn(E, device=card.DEVICE)
    biased = moe.route(logits, k, True, sigmoid=True, bias_E=bias)
    exact = reference.route(logits.double(), k, True, sigmoid=True, bias_E=bias.double())
    assert float((biased.experts_Nk != exact.experts_Nk).double().mean()) < 0.02
    # The statistics of the probabilities do not depend on the choice.
    assert error(biased.statistics_R[E:], exact.statistics_R[E:]) < 1e-5
    arguments = (grad_weights.double(), grad_statistics.double(), logits.double(), biased, True, True)
    ours = moe.route_backward(grad_weights, grad_statistics, logits, biased, True, True)
    assert error(ours, reference.route_backward(*arguments)) < BF16

    x, y = random(N, D), random(N * k, D)
    assert torch.equal(moe.dispatch(x, routing.tokens_S), reference.dispatch(x, routing.tokens_S))
    for addend in (None, x):
        wide = None if addend is None else addend.double()
        truth = reference.combine(y.double(), routing.slots_Nk, wide)
        assert error(moe.combine(y, routing.slots_Nk, addend), truth) < BF16

    inner, grad = random(N * k, 2 * F), random(N * k, F)
    wide = (inner.double(), routing.weights_S.double(), "silu", True)
    assert (
        error(moe.weighted_gated(inner, routing.weights_S, "silu", True), reference.weighted_gated(*wide))
        < BF16
    )
    ours = moe.weighted_gated_backward(grad, inner, routing.weights_S, "silu", True)
    for got, truth in zip(ours, reference.weighted_gated_backward(grad.double(), *wide), strict=True):
        assert error(got, truth) < BF16

    weight = random(E, 2 * F, D)
    for operand, transpose in ((y, True), (inner, False)):
        truth = reference.grouped_matmul(operand.double(), weight.double(), routing.ends_E, transpose)
        assert error(moe.grouped_matmul(operand, weight, routing.ends_E, transpose), truth) < BF16
    truth = reference.grouped_weight_gradient(inner.double(), y.double(), routing.ends_E, torch.float64)
    assert error(moe.grouped_weight_gradient(inner, y, routing.ends_E, torch.float32), truth) < BF16


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("backend", ["torch", "triton"])
@pytest.mark.parametrize(
    ("ends", "K", "M"),
    [((0, 700, 700, 2048), 768, 1024), ((1, 2, 2, 3, 5, 5, 5, 8), 2048, 4352), ((40, 77, 78, 130), 72, 136),
     ((130, 1000), 100, 60)],
)  # fmt: skip
def test_grouped_products_equal_float64_and_do_not_wait(
    backend: grouped.Backend, ends: tuple[int, ...], K: int, M: int, dtype: torch.dtype
) -> None:
    if not grouped.supports(backend, torch.device(card.DEVICE), dtype, (K, M)):
        pytest.skip(f"{backend} does not support this here")
    torch.manual_seed(0)
    ends_E = torch.tensor(ends, dtype=torch.int32, device=card.DEVICE)
    x, g, weight = (random(*shape).to(dtype) for shape in ((ends[-1], K), (ends[-1], M), (len(ends), M, K)))
    multiply, weight_gradient = grouped.PRODUCTS[backend]

    def products() -> list[Tensor]:
        gradients = (weight_gradient(g, x, ends_E, kind) for kind in (torch.float32, dtype))
        return [multiply(x, weight, ends_E, True), multiply(g, weight, ends_E, False), *gradients]

    first = products()
    torch.cuda.set_sync_debug_mode("error")
    try:
        again = products()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    wide = (x.double(), g.double(), weight.double())
    gradient = reference.grouped_weight_gradient(wide[1], wide[0], ends_E, torch.float64)
    truth = [
        reference.grouped_matmul(wide[0], wide[2], ends_E, True),
        reference.grouped_matmul(wide[1], wide[2], ends_E, False),
        gradient,
        gradient,
    ]
    for ours, repeated, exact in zip(first, again, truth, strict=True):
        assert torch.equal(ours, repeated)
        assert error(ours, exact) < BF16


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(
    ("N", "E", "k", "D", "F"), [(1, 8, 2, 2048, 2176), (16, 8, 2, 768, 1000), (64, 128, 8, 256, 96)]
)
def test_the_products_of_a_decoding_step_equal_float64(
    N: int, E: int, k: int, D: int, F: int, dtype: torch.dtype
) -> None:
    device = torch.device(card.DEVICE)
    if not grouped.supports("triton", device, dtype, (2 * F, D)):
        pytest.skip("Triton's kernels do not support this here")
    torch.manual_seed(0)
    routing = moe.route(random(N, E), k, True)
    # float16 ends at 65,504.
    x, weight, down = (random(N, D), random(E, 2 * F, D) / D**0.5, random(E, D, F) / F**0.5)
    x, weight, down = x.to(dtype), weight.to(dtype), down.to(dtype)
    assert moe.grouped_backend(device, dtype, weight.shape, N * k) == "triton"
    wide = replace(routing, weights_S=routing.weights_S.double())
    truth = reference.gathered_gated(x.double(), weight.double(), wide, "silu", True)
    allowed = 1e-5 if dtype is torch.float32 else BF16
    hidden = moe.gathered_gated(x, weight, routing, "silu", True)
    assert error(hidden, truth) < allowed
    truth = reference.grouped_matmul(hidden.double(), down.double(), routing.ends_E, True)
    assert error(moe.grouped_matmul(hidden, down, routing.ends_E, True), truth) < allowed


def test_a_modern_card_needs_no_loop() -> None:
    device = torch.device(card.DEVICE)
    if torch.version.hip is not None or grouped.capability(device) < (8, 0):
        pytest.skip("has no kernel")
    for rows in (8, 4096):
        assert grouped.grouped_backend(device, torch.bfloat16, (8, 64, 64), rows) != "loop"


def gradients(model: Transformer) -> dict[str, Tensor]:
    model.zero_grad()
    loss, router = model.loss_and_router(tokens().to(card.DEVICE), tokens(1).to(card.DEVICE))
    assert router is not None
    (loss / (B * T) + 0.01 * (router.load_balancing_loss() + router.z_loss())).backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("backend", ["torch", "triton"])
@pytest.mark.parametrize("experts", [6, 64])
@pytest.mark.parametrize(
    "router",
    [
        {},
        {"scoring_func": "sigmoid", "shared_expert_intermediate_size": 64},
        {"shared_expert_intermediate_size": 48, "qk_norm": False},
    ],
    ids=["qwen3", "dots1", "qwen2"],
)
def test_the_fused_sublayer_is_near_float64_and_repeats(
    router: dict[str, Any], experts: int, backend: grouped.Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    supports = grouped.supports
    if not supports(backend, torch.device(card.DEVICE), torch.bfloat16, (64, 64)):
        pytest.skip(f"{backend} does not support this here")
    monkeypatch.setattr(grouped, "supports", lambda name, *rest: name == backend and supports(name, *rest))
    sizes = {"num_experts": experts, "num_experts_per_tok": 2, "moe_intermediate_size": 64, **router}
    truth = gradients(make(torch.float64, **sizes).to(card.DEVICE))
    model = make(**sizes).to(card.DEVICE)
    found = {}
    for name, fused in (("plain", False), ("fused", True), ("again", True)):
        applied = convert(model, "bf16", fused=fused)
        found[name] = gradients(model)
    applied.set_checkpointing("block")
    found["recomputed"] = gradients(model)
    for other in ("again", "recomputed"):
        assert all(torch.equal(found["fused"][n], found[other][n]) for n in truth)

    def distance(name: str) -> float:
        pairs = [(found[name][n].double().flatten(), truth[n].flatten()) for n in truth]
        a, b = (torch.cat(side) for side in zip(*pairs, strict=True))
        return float((a - b).norm() / b.norm())

    assert distance("fused") < 1.5 * distance("plain") + 0.01
