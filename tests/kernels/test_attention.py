"""Attention backends compared with brute force in float64: one softmax over an explicit mask."""

import importlib
import math
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, get_args

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from deskside.config.model import ModelConfig
from deskside.config.sections import AttentionBackendName
from deskside.kernels import decode
from deskside.kernels.attention import (
    BACKENDS,
    AttentionBackend,
    AttentionContext,
    Requirements,
    choose,
    decode_attention,
    document_ids,
    document_positions,
    prepare,
)
from deskside.kernels.attention.context import register
from deskside.model import transformer
from deskside.ops.composite import attention
from deskside.utils.errors import RunError, UsageError


def brute_force(q: Tensor, k: Tensor, v: Tensor, context: AttentionContext) -> Tensor:
    B, T, H, C = q.shape
    group = H // k.shape[2]
    boundaries = [] if context.cu_seqlens is None else context.cu_seqlens.tolist()
    out = torch.zeros(B, T, H, C, dtype=torch.float64)
    for b in range(B):
        for t in range(T):
            low = max([x - b * T for x in boundaries if x <= b * T + t] + [0])
            high = min([x - b * T for x in boundaries if x > b * T + t] + [T])
            if context.window is not None:
                low = max(low, t - context.window + 1)
            if context.causal:
                high = t + 1
            for h in range(H):
                keys, values = k[b, low:high, h // group].double(), v[b, low:high, h // group].double()
                scale = context.scale or 1 / math.sqrt(C)
                scores = keys @ q[b, t, h].double() * scale
                if context.softcap is not None:
                    scores = context.softcap * torch.tanh(scores / context.softcap)
                if context.sinks_H is not None:
                    scores = torch.cat((scores, context.sinks_H[h : h + 1].double()))
                    values = torch.cat((values, torch.zeros_like(values[:1])))
                out[b, t, h] = torch.softmax(scores, 0) @ values
    return out


def tensors(
    B: int, T: int, H: int, K: int, C: int, seed: int = 0, dtype: torch.dtype = torch.float64
) -> list[Tensor]:
    g = torch.Generator().manual_seed(seed)
    return [torch.randn(B, T, heads, C, generator=g, dtype=dtype) for heads in (H, K, K)]


def cut(T: int, rows: list[list[int]], pad: int = 2) -> Tensor:
    """Return cu_seqlens of rows given as document lengths."""
    ends = [0]
    for lengths in rows:
        assert sum(lengths) == T
        for length in lengths:
            ends.append(ends[-1] + length)
    return torch.tensor(ends + [ends[-1]] * pad, dtype=torch.int32)


CASES = {
    "plain": {},
    "window": {"window": 3},
    "documents": {"cu_seqlens": cut(11, [[4, 7], [11]])},
    "both": {"window": 4, "cu_seqlens": cut(11, [[1, 10], [5, 6]])},
    "scaled": {"scale": 0.3},
    "capped": {"softcap": 0.9},
    "capped, all": {"softcap": 0.9, "scale": 0.7, "window": 4, "cu_seqlens": cut(11, [[1, 10], [5, 6]])},
    "sinks": {"sinks_H": torch.tensor([-0.7, 0.2, 1.5, -0.1])},
    "sinks, all": {
        "sinks_H": torch.tensor([0.3, 1.2, -0.5, 0.9]),
        "softcap": 0.9,
        "window": 4,
        "cu_seqlens": cut(11, [[1, 10], [5, 6]]),
    },
    "bidirectional": {"causal": False},
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("name", ["reference", "sdpa", "chunked"])
@pytest.mark.parametrize("heads", [(4, 4), (4, 2), (4, 1)])
def test_cpu_backends_equal_brute_force(
    name: str, case: str, heads: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in ("reference", "sdpa"):  # three chunks in eleven tokens
        monkeypatch.setattr(f"deskside.kernels.attention.{module}.QUERY_CHUNK", 4)
    q, k, v = tensors(2, 11, *heads, 8)
    context = AttentionContext(backend=name, **CASES[case])
    need = Requirements.from_tensors(q, k, context)
    if BACKENDS[name].unsupported_reason(need):
        with pytest.raises(UsageError, match=name):
            prepare(context, need)
        return
    truth_leaves, leaves = ([t.clone().requires_grad_() for t in (q, k, v)] for _ in range(2))
    got = attention(*leaves, prepare(context, need))  # type: ignore[call-arg]
    truth = brute_force(*truth_leaves, context)  # type: ignore[call-arg]
    torch.testing.assert_close(got, truth)
    grad = torch.randn_like(got)
    for ours, exact in zip(
        torch.autograd.grad(got, leaves, grad), torch.autograd.grad(truth, truth_leaves, grad), strict=True
    ):
        torch.testing.assert_close(ours, exact)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_flex_equals_brute_force(monkeypatch: pytest.MonkeyPatch) -> None:
    """Eager FlexAttention follows the same mask. Its block mask is built from window and documents."""
    from torch.nn.attention.flex_attention import flex_attention

    from deskside.kernels.attention import flex

    monkeypatch.setattr(flex, "_compiled", lambda: flex_attention)
    q, k, v = tensors(2, 11, 4, 2, 16, dtype=torch.float32)
    for case in (
        "plain",
        "window",
        "documents",
        "both",
        "scaled",
        "capped",
        "capped, all",
        "sinks",
        "sinks, all",
    ):
        context = AttentionContext(**CASES[case])
        got = flex.flex(q, k, v, replace(context, prepared=flex.block_mask(context, 2, 11, q.device)))
        torch.testing.assert_close(got.double(), brute_force(q, k, v, context), atol=1e-5, rtol=1e-4)


def test_on_a_gpu_block_masks_come_from_the_compiled_function(monkeypatch: pytest.MonkeyPatch) -> None:
    from deskside.kernels.attention import flex

    asked: list[tuple[object, ...]] = []

    def compiled(rule: object, *shape: object, device: str) -> flex.BlockMask:
        asked.append((*shape, device))
        return flex.create_block_mask(rule, *shape, device="cpu")  # type: ignore[arg-type]

    monkeypatch.setattr(flex, "compiled_create_block_mask", lambda: compiled)
    for case in ("window", "documents"):
        flex.block_mask(AttentionContext(**CASES[case]), 2, 11, torch.device("cuda"))
        flex.block_mask(AttentionContext(**CASES[case]), 2, 11, torch.device("cpu"))
    flex._plain_block_mask.cache_clear()  # holds a mask for cuda that is on the CPU
    assert asked == [(None, None, 11, 11, "cuda"), (2, None, 11, 11, "cuda")]


@pytest.mark.full
def test_a_compiled_block_mask_is_the_same_and_serves_other_documents() -> None:
    from torch._dynamo.utils import counters

    from deskside.kernels.attention import flex

    torch.compiler.reset()
    counters.clear()
    for cu in (cut(300, [[40, 260], [300]]), cut(300, [[299, 1], [120, 180]], pad=1)):
        ids = document_ids(cu, 2, 300)
        mask, exact = (
            make(flex.document_mask_mod(ids, True, 64), 2, None, 300, 300, device="cpu")
            for make in (flex.compiled_create_block_mask(), flex.create_block_mask)
        )
        assert torch.equal(mask.to_dense(), exact.to_dense())
        assert torch.equal(mask.full_kv_num_blocks, exact.full_kv_num_blocks)
        assert counters["stats"]["unique_graphs"] == 1


@settings(max_examples=30, deadline=None)
@given(st.lists(st.lists(st.integers(1, 5), min_size=1, max_size=4), min_size=1, max_size=3))
def test_document_ids_and_positions(lengths: list[list[int]]) -> None:
    T = max(sum(row) for row in lengths)
    rows = [row if sum(row) == T else [*row, T - sum(row)] for row in lengths]
    cu = cut(T, rows, pad=3)
    assert document_positions(cu, len(rows), T).tolist() == [
        [p for n in row for p in range(n)] for row in rows
    ]
    for ids, row in zip(document_ids(cu, len(rows), T).tolist(), rows, strict=True):
        labels = [d for d, n in enumerate(row) for _ in range(n)]
        assert [x - ids[0] for x in ids] == labels


@pytest.mark.parametrize("softcap", [None, 0.9])
@pytest.mark.parametrize("window", [None, 3])
def test_decode_equals_training_attention(window: int | None, softcap: float | None) -> None:
    """Rows have different lengths, and the cache contains noise beyond a row's length."""
    q, k, v = tensors(2, 9, 4, 2, 8)
    noise = torch.full_like(k[:, :4], 1e9)
    cache_k, cache_v = torch.cat((k, noise), 1), torch.cat((v, noise), 1)
    options = AttentionContext(window=window, softcap=softcap, sinks_H=torch.tensor([0.3, 1.2, -0.5, 0.9]))
    truth = brute_force(q, k, v, options)
    positions = torch.tensor([[8], [4]])
    got = decode_attention(torch.stack((q[0, 8:], q[1, 4:5])), cache_k, cache_v, positions, options)
    torch.testing.assert_close(got, torch.stack((truth[0, 8:], truth[1, 4:5])))
    several = decode_attention(q, cache_k, cache_v, torch.arange(9).expand(2, 9), options)
    torch.testing.assert_close(several, truth)


def test_prompts_on_a_gpu_leave_out_the_kernel_that_plans_for_every_shape(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plain, allowed = F.scaled_dot_product_attention, []

    def watched(*given: Any, **named: Any) -> Tensor:
        allowed.append((torch.backends.cuda.cudnn_sdp_enabled(), torch.backends.cuda.flash_sdp_enabled()))
        return plain(*given, **named)

    monkeypatch.setattr(F, "scaled_dot_product_attention", watched)
    q, k, v = tensors(2, 11, 4, 2, 8)
    prompt: Any = SimpleNamespace(is_cuda=True, dtype=torch.bfloat16)
    name = transformer._prefill_context(prompt, ModelConfig()).backend
    got = BACKENDS[name].function(q, k, v, AttentionContext())
    torch.testing.assert_close(got, brute_force(q, k, v, AttentionContext()))
    decode_attention(
        q, k, v, torch.arange(11).expand(2, -1), AttentionContext(scale=0.3), decode.attend_with_sdpa
    )
    assert allowed == [(False, True)] * 2 and torch.backends.cuda.cudnn_sdp_enabled()


def need(**changes: object) -> Requirements:
    base = Requirements(2, 16, 4, 2, 8, torch.float32, torch.device("cpu"))
    return replace(base, **changes)  # type: ignore[arg-type]


def test_choose_records_times_errors_and_reasons() -> None:
    choice = choose(need(window=4, documents=True))
    assert choice.name == "chunked" and choice.seconds["chunked"] > 0 and choice.errors["chunked"] < 1e-5
    assert "window" in choice.rejected["sdpa"] and "not on cpu" in choice.rejected["cudnn"]
    assert set(choice.seconds) | set(choice.rejected) == set(BACKENDS)
    assert choose(need()).name in {"sdpa", "chunked"}


@pytest.mark.parametrize("name", ["chunked", "leaks"])
def test_choose_compares_a_part_of_a_large_problem(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fewer rows, heads and tokens are compared, and a fault within them is found."""
    choosing = importlib.import_module("deskside.kernels.attention.choose")
    monkeypatch.setattr(choosing, "CHECK_SCORES", 2 * 4 * 512**2)
    large = need(batch=3, heads=12, kv_heads=6, tokens=1024, window=100, documents=True)
    part = choosing._checked_part(large)
    assert (part.batch, part.heads, part.kv_heads, part.tokens) == (2, 4, 2, 512)

    def leaks(q: Tensor, k: Tensor, v: Tensor, context: AttentionContext) -> Tensor:
        return BACKENDS["reference"].function(q, k, v, replace(context, cu_seqlens=None))

    reference = BACKENDS["reference"]
    register(replace(reference, name="leaks", function=leaks))
    try:
        choice = choose(large, [name, "reference"])
    finally:
        del BACKENDS["leaks"]
    if name == "chunked":
        assert choice.name == name and choice.errors[name] < 1e-5
    else:
        assert choice.rejected[name].startswith("wrong")


@pytest.mark.parametrize("fault", ["zero gradient", "no mask", "nan", "raises"])
def test_choose_rejects_a_broken_backend(fault: str) -> None:
    class ZeroGradient(torch.autograd.Function):
        @staticmethod
        def forward(ctx, q, k, v, o):  # type: ignore[no-untyped-def]
            return o.clone()

        @staticmethod
        def backward(ctx, grad):  # type: ignore[no-untyped-def]
            return torch.zeros_like(grad), *(torch.zeros_like(grad[:, :, :2]) for _ in range(2)), None

    def broken(q: Tensor, k: Tensor, v: Tensor, context: AttentionContext) -> Tensor:
        if fault == "raises":
            raise RuntimeError("no kernel for this card\nand more lines")
        if fault == "no mask":
            return BACKENDS["reference"].function(q, k, v, replace(context, causal=False))
        right = BACKENDS["reference"].function(q, k, v, context)
        if fault == "nan":
            return right * torch.nan
        return ZeroGradient.apply(q, k, v, right.detach())

    register(AttentionBackend("broken", broken, frozenset({"cpu"}), frozenset({torch.float32})))
    try:
        choice = choose(need(), ["broken", "sdpa"])
        assert choice.name == "sdpa" and "broken" not in choice.seconds
        assert choice.rejected["broken"].startswith(
            "failed: no kernel for this card" if fault == "raises" else "wrong"
        )
        with pytest.raises(RunError, match="broken"):
            choose(need(), ["broken"])
    finally:
        del BACKENDS["broken"]


@pytest.mark.parametrize(
    ("changes", "name"), [({"tokens": 1}, "sdpa"), ({"window": 1}, "chunked"), ({"window": 1}, "reference")]
)
def test_choose_accepts_gradients_that_are_zero(changes: dict[str, int], name: str) -> None:
    """A query that sees one key has the weight 1 for it, whatever q and k are."""
    choice = choose(need(**changes), [name])
    assert choice.name == name and choice.errors[name] < 1e-6


def test_the_configuration_has_the_names_of_all_backends() -> None:
    assert {*get_args(AttentionBackendName)} == {"auto", *BACKENDS}


def test_unknown_backend_is_named() -> None:
    with pytest.raises(UsageError, match=r"'flush'.*flash"):
        choose(need(), ["flush"])


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize(("window", "documents"), [(None, False), (128, False), (None, True), (128, True)])
def test_a_fast_backend_works_on_this_card(window: int | None, documents: bool) -> None:
    cuda = {"dtype": torch.bfloat16, "device": torch.device("cuda"), "tokens": 1024, "head_dim": 64}
    choice = choose(need(window=window, documents=documents, **cuda))
    assert choice.name not in {"reference", "chunked"}, choice.rejected
