"""The FlashAttention-4 backend with kernels of plain torch, which replace the package's on a machine without a GPU."""

from collections.abc import Iterator
from dataclasses import replace
from importlib import metadata
from typing import Any

import pytest
import torch
from torch import Tensor

from deskside.kernels.attention import (
    BACKENDS,
    AttentionContext,
    Requirements,
    attention_backward,
    attention_forward,
    backend_named,
    document_ids,
)
from deskside.kernels.attention import fa4 as fa4_module
from tests.kernels.test_attention import CASES, brute_force, cut, tensors


class Refusal(Exception):
    """Replaces the errors of the package's compiler."""


def scores(
    q: Tensor,
    k: Tensor,
    scale: float | None,
    causal: bool,
    left: int | None,
    right: int | None,
    cu: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Return scores (B, H, T, L) of one batch, and the mask, by the package's own rules for its arguments."""
    B, T, H, C = q.shape
    keys = k.repeat_interleave(H // k.shape[2], dim=2)
    s = torch.einsum("bthc,blhc->bhtl", q, keys) * (C**-0.5 if scale is None else scale)
    distance = torch.arange(T)[:, None] - torch.arange(T)[None, :]
    hidden = torch.zeros(B, 1, T, T, dtype=torch.bool)
    if causal:
        hidden |= distance < 0
    if left is not None:
        hidden |= distance > left
    if right is not None:
        hidden |= -distance > right
    if cu is not None:
        ids = document_ids(cu, B, T)
        hidden |= (ids[:, None, :, None]) != ids[:, None, None, :]
    return s, hidden


def kernel_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size_left: int | None = None,
    window_size_right: int | None = None,
    return_lse: bool = False,
) -> tuple[Tensor, Tensor, None, None, None]:
    """The package's signature, with the arguments that matter. One ragged row is (N, H, C)."""
    assert return_lse and (cu_seqlens_q is None) == (q.ndim == 4) and cu_seqlens_q is cu_seqlens_k
    if cu_seqlens_q is not None:
        lengths = cu_seqlens_q.diff()
        assert max_seqlen_q == max_seqlen_k and int(lengths.max()) <= max_seqlen_q  # type: ignore[operator]
        q, k, v = (x[None] for x in (q, k, v))
    s, hidden = scores(q, k, softmax_scale, causal, window_size_left, window_size_right, cu_seqlens_q)
    s = s.masked_fill(hidden, -torch.inf)
    values = v.repeat_interleave(q.shape[2] // v.shape[2], dim=2)
    o = torch.einsum("bhtl,blhc->bthc", torch.softmax(s, -1), values)
    lse = torch.logsumexp(s, -1).float()
    if cu_seqlens_q is not None:
        o, lse = o[0], lse[0]
    return o.contiguous(), lse.contiguous(), None, None, None


def kernel_backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    dout: Tensor,
    lse: Tensor,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size_left: int | None = None,
    window_size_right: int | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    deterministic: bool = False,
    dq: Tensor | None = None,
    dk: Tensor | None = None,
    dv: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Writes into dq, dk and dv. It uses the forward's softmax sums, so that wrong ones are noticed."""
    assert dq is not None and dk is not None and dv is not None
    rows = [x if cu_seqlens_q is None else x[None] for x in (q, k, v, out, dout)]
    q4, k4, v4, out4, dout4 = rows
    group = q4.shape[2] // k4.shape[2]
    s, hidden = scores(q4, k4, softmax_scale, causal, window_size_left, window_size_right, cu_seqlens_q)
    sums = (lse if cu_seqlens_q is None else lse[None]).to(s.dtype)
    p = torch.exp(s - sums[..., None]).masked_fill(hidden, 0)
    dp = torch.einsum("bthc,blhc->bhtl", dout4, v4.repeat_interleave(group, dim=2))
    ds = p * (dp - (dout4 * out4).sum(-1).transpose(1, 2)[..., None])
    ds = ds * (q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale)
    full = {
        "k": torch.einsum("bhtl,bthc->blhc", ds, q4),
        "v": torch.einsum("bhtl,bthc->blhc", p, dout4),
    }
    dq.copy_(torch.einsum("bhtl,blhc->bthc", ds, k4.repeat_interleave(group, dim=2)).view(dq.shape))
    for gradient, name in ((dk, "k"), (dv, "v")):
        gradient.copy_(full[name].unflatten(2, (-1, group)).sum(3).view(gradient.shape))
    return dq, dk, dv


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    refusals = (AssertionError, Refusal)
    monkeypatch.setattr(fa4_module, "_library", lambda: (kernel_forward, kernel_backward, refusals))
    yield
    torch.compiler.reset()


PLAIN_CASES = [name for name in CASES if not name.startswith(("capped", "sinks"))]


@pytest.mark.parametrize("case", [*PLAIN_CASES, "short documents"])
@pytest.mark.parametrize("way", ["eager", "compiled", "pair"])
def test_equals_brute_force(kernels: None, case: str, way: str) -> None:
    """Output and three gradients, also compiled as one graph. The softmax sums are in float32, hence the tolerance."""
    cases = {**CASES, "short documents": {"cu_seqlens": cut(11, [[4, 7], [5, 6]]), "max_seqlen": 7}}
    context = AttentionContext(backend="fa4", **cases[case])
    inputs = tensors(2, 11, 4, 2, 8)
    exact_leaves = [t.clone().requires_grad_() for t in inputs]
    exact = brute_force(*exact_leaves, context)  # type: ignore[call-arg]
    grad = torch.randn_like(exact)
    expected = [exact, *torch.autograd.grad(exact, exact_leaves, grad)]
    leaves = [t.clone().requires_grad_() for t in inputs]
    if way == "pair":
        o, saved = attention_forward(*leaves, context)  # type: ignore[call-arg]
        assert not o.requires_grad
        got = [o, *attention_backward(saved, grad)]
    else:
        function = fa4_module.fa4
        if way == "compiled":
            function = torch.compile(function, fullgraph=True, backend="aot_eager")
        o = function(*leaves, context)  # type: ignore[call-arg]
        got = [o, *torch.autograd.grad(o, leaves, grad)]
    for ours, truth in zip(got, expected, strict=True):
        torch.testing.assert_close(ours, truth, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("case", ["window", "both"])
def test_torch_finds_the_operators_sound(kernels: None, case: str) -> None:
    """torch checks the schema, fake shapes and derivative itself, with inputs that are views of one projection."""
    fused = torch.randn(2, 11, 64, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    leaves = [part.unflatten(-1, (-1, 8)).requires_grad_() for part in fused.split((32, 16, 16), dim=-1)]
    options = {"cu_seqlens": None, "window": None, **CASES[case]}
    arguments = (*leaves, options["cu_seqlens"], 11, None, True, options["window"])
    torch.library.opcheck(fa4_module.forward_op, arguments)


@pytest.mark.parametrize("error", [AssertionError("Unsupported compute capability\nand more"), Refusal("no")])
def test_a_refusal_of_the_package_is_one_line(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    def refuse(*args: Any, **options: Any) -> None:
        raise error

    q, k, v = tensors(1, 4, 2, 1, 8)
    refusals = (AssertionError, Refusal)
    monkeypatch.setattr(fa4_module, "_library", lambda: (refuse, refuse, refusals))
    with pytest.raises(RuntimeError, match=rf"^forward: {str(error).splitlines()[0]}$"):
        attention_forward(q, k, v, AttentionContext(backend="fa4"))


def test_the_missing_package_is_named_with_its_remedy() -> None:
    problem = Requirements(2, 16, 4, 2, 64, torch.bfloat16, torch.device("cuda"), window=8, documents=True)
    absent = replace(backend_named("fa4"), package="no-such-distribution")
    assert absent.unsupported_reason(problem) == (
        "needs the package no-such-distribution: pip install 'deskside[no-such-distribution]'"
    )
    try:
        metadata.version("flash-attn-4")
    except metadata.PackageNotFoundError:
        assert "pip install 'deskside[flash-attn-4]'" in str(BACKENDS["fa4"].unsupported_reason(problem))
    else:
        assert BACKENDS["fa4"].unsupported_reason(problem) is None
