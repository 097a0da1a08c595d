"""Attention without autograd compared with autograd in float64, and torch's GPU kernels by shape and stride only."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from deskside.kernels.attention import (
    BACKENDS,
    AttentionBackend,
    AttentionContext,
    FwdBwd,
    Requirements,
    attention_backward,
    attention_forward,
    choose,
    prepare,
)
from deskside.kernels.attention.context import register
from deskside.ops.composite import attention
from deskside.utils.errors import RunError
from tests.kernels.test_attention import CASES, cut

HEADS, KV, DIM = 4, 2, 8


def fused_views(rows: int, tokens: int, **options: Any) -> list[Tensor]:
    """Return q, k and v as views of one projection, as a block passes them."""
    fused_BTX = torch.empty(rows, tokens, (HEADS + 2 * KV) * DIM, **options)
    if not fused_BTX.is_meta:
        fused_BTX.normal_(generator=torch.Generator().manual_seed(1))
    parts = fused_BTX.split((HEADS * DIM, KV * DIM, KV * DIM), dim=-1)
    return [part.unflatten(-1, (-1, DIM)) for part in parts]


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("name", ["reference", "sdpa", "chunked"])
def test_equals_autograd(name: str, case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("reference", "sdpa"):  # three chunks in eleven tokens
        monkeypatch.setattr(f"deskside.kernels.attention.{module}.QUERY_CHUNK", 4)
    inputs = fused_views(2, 11, dtype=torch.float64)
    context = AttentionContext(backend=name, **CASES[case])
    need = Requirements.from_tensors(inputs[0], inputs[1], context)
    if BACKENDS[name].unsupported_reason(need):
        pytest.skip("not declared")
    context = prepare(context, need)
    leaves = [tensor.clone().requires_grad_() for tensor in inputs]
    exact = attention(*leaves, context)  # type: ignore[call-arg]
    grad = torch.randn_like(exact)

    class Half(torch.autograd.Function):
        """Written like half of a block: grad mode is off in both of its methods."""

        @staticmethod
        def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            assert not torch.is_grad_enabled()
            o, ctx.saved = attention_forward(q, k, v, context)
            assert not o.requires_grad
            return o

        @staticmethod
        def backward(ctx: Any, grad_o: Tensor) -> tuple[Tensor, ...]:  # type: ignore[override]
            return attention_backward(ctx.saved, grad_o)

    views = [tensor.detach().requires_grad_() for tensor in inputs]
    got = Half.apply(*views)
    torch.testing.assert_close(got, exact)
    for ours, theirs in zip(
        torch.autograd.grad(got, views, grad), torch.autograd.grad(exact, leaves, grad), strict=True
    ):
        torch.testing.assert_close(ours, theirs)


def test_a_second_backward_is_refused() -> None:
    inputs = fused_views(1, 5, dtype=torch.float64)
    o, saved = attention_forward(*inputs, AttentionContext())  # type: ignore[call-arg]
    attention_backward(saved, o)
    with pytest.raises(RunError, match="already run"):
        attention_backward(saved, o)


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("cudnn", {}),
        ("flash", {}),
        ("flash", {"window": 16, "scale": 0.5}),
        ("flash", {"causal": False}),
        ("varlen", {"cu_seqlens": cut(128, [[28, 100], [128]])}),
        ("varlen", {"cu_seqlens": cut(128, [[28, 100], [128]]), "window": 16, "max_seqlen": 100}),
    ],
)
def test_cuda_pairs_fit_torchs_signatures_and_copy_nothing(name: str, changes: dict[str, Any]) -> None:
    """On the meta device: this torch accepts the arguments, and the strided inputs reach the kernel without a copy."""
    q, k, v = fused_views(2, 128, dtype=torch.bfloat16, device="meta")
    if "cu_seqlens" in changes:
        changes = {**changes, "cu_seqlens": changes["cu_seqlens"].to("meta")}
    context = AttentionContext(backend=name, **changes)
    context = replace(context, prepared=BACKENDS[name].prepare(context, 2, 128, q.device))
    o, state = attention_forward(q, k, v, context)
    assert o.shape == (2, 128, HEADS, DIM) and o.is_contiguous() and o.dtype == torch.bfloat16
    assert state.saved is not None
    for saved, given in zip(state.saved[:3], (q, k, v), strict=True):
        assert saved.untyped_storage()._cdata == given.untyped_storage()._cdata
    grad_o = torch.empty(2, 128, HEADS * DIM, dtype=torch.bfloat16, device="meta").unflatten(-1, (HEADS, DIM))
    for gradient, given in zip(attention_backward(state, grad_o), (q, k, v), strict=True):
        assert gradient.shape == given.shape and gradient.dtype == given.dtype
        assert gradient.is_contiguous()  # (B, T, heads, C): ready to be flattened for the projection's GEMM


def test_the_windowed_flash_kernel_is_differentiable() -> None:
    leaves = [t.requires_grad_() for t in fused_views(2, 128, dtype=torch.bfloat16, device="meta")]
    o = BACKENDS["flash"].function(*leaves, AttentionContext(backend="flash", window=16))  # type: ignore[call-arg]
    shapes = [gradient.shape for gradient in torch.autograd.grad(o, leaves, torch.empty_like(o))]
    assert shapes == [leaf.shape for leaf in leaves]


@pytest.fixture
def zero_gradient() -> Iterator[str]:
    """A backend that is correct under autograd, but whose explicit backward returns a query gradient of zeros."""
    exact = BACKENDS["reference"]

    def backward(kept: Any, grad: Tensor, context: AttentionContext) -> tuple[Tensor, Tensor, Tensor]:
        o, *leaves = kept
        dq, dk, dv = torch.autograd.grad(o, leaves, grad)
        return torch.zeros_like(dq), dk, dv

    def forward(q: Tensor, k: Tensor, v: Tensor, context: AttentionContext) -> tuple[Tensor, Any]:
        leaves = [t.detach().requires_grad_() for t in (q, k, v)]
        o = exact.function(*leaves, context)  # type: ignore[call-arg]
        return o.detach(), (o, *leaves)

    cpu, floats = frozenset({"cpu"}), frozenset({torch.float32})
    register(AttentionBackend("half right", exact.function, cpu, floats, pair=FwdBwd(forward, backward)))
    yield "half right"
    del BACKENDS["half right"]


def test_choose_checks_the_pair_too(zero_gradient: str) -> None:
    need = Requirements(2, 16, HEADS, KV, DIM, torch.float32, torch.device("cpu"))
    choice = choose(need, [zero_gradient, "sdpa"])
    assert choice.name == "sdpa" and choice.rejected[zero_gradient].startswith("wrong")
