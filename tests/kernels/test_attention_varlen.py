"""The ragged backend around torch's function, whose kernel needs a GPU: its
calls of that function, also when compiled.
"""

import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.attention.varlen
from torch import Tensor

from deskside.kernels.attention import BACKENDS, AttentionContext, varlen
from deskside.ops.composite import attention
from tests.kernels.test_attention import cut, tensors

BOUNDARIES = cut(11, [[4, 7], [11]])


def older(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_q: Tensor,
    cu_k: Tensor,
    max_q: int,
    max_k: int,
    *,
    scale: float | None = None,
    window_size: tuple[int, int] = (-1, -1),
) -> Tensor:
    """An older varlen_attn: computes no attention, but every argument affects the result."""
    return q * cu_q.sum() + max_k + window_size[0]


def newer(q: Tensor, k: Tensor, *rest: Any, enable_gqa: bool = False, **options: Any) -> Tensor:
    """A newer varlen_attn, which requires that grouped heads are declared."""
    assert q.shape[1] == k.shape[1] or enable_gqa
    return older(q, k, *rest, **options)


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("function", [newer, older])
def test_it_asks_of_torch_what_this_torch_takes_and_compiles_without_a_warning(
    function: Callable[..., Any], compiled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.nn.attention.varlen, "varlen_attn", function)
    context = AttentionContext(backend="varlen", window=5, cu_seqlens=BOUNDARIES, max_seqlen=11)
    context = replace(context, prepared=BACKENDS["varlen"].prepare(context, 2, 11, torch.device("cpu")))
    q, k, v = tensors(2, 11, 4, 2, 8)
    torch.compiler.reset()
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        run = torch.compile(attention, backend="eager", fullgraph=True) if compiled else attention
        got = run(q, k, v, context)
    assert not [str(one.message) for one in said if issubclass(one.category, UserWarning)]
    torch.testing.assert_close(got, q * BOUNDARIES.sum() + 11 + 4)


def test_rows_without_documents_are_one_each() -> None:
    boundaries, _ = varlen.varlen_arguments(AttentionContext(), 3, 5, torch.device("cpu"))
    assert boundaries.tolist() == [0, 5, 10, 15] and boundaries.dtype == torch.int32
