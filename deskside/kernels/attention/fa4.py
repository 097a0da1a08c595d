"""FlashAttention-4, the optional package flash-attn-4: CuTe kernels for compute capability 9.0 and newer.

Supports whole rows, or documents as one variable-length sequence, each with or without a left window (Zadouri et al.
2026, arXiv 2603.05451). The package is imported at the first call. Its public functions are autograd functions that
torch.compile cannot trace, so its forward and backward kernels are wrapped as two custom operators with fake
implementations and a derivative. Code that writes its gradients by hand calls the kernels directly.

The package declares its forward for compute capability 8.x to 12.x and its backward for 9.x to 12.x. This is not
checked here, because `choose` runs both and records their errors. The kernels are compiled at first use, which takes
seconds, and cached in the user's cache directory (or in FLASH_ATTENTION_CUTE_DSL_CACHE_DIR).
"""

import warnings
from collections.abc import Callable, Sequence
from functools import lru_cache
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from deskside.kernels.attention.context import AttentionBackend, AttentionContext, FwdBwd, Saved, register
from deskside.kernels.attention.sdpa import HALF
from deskside.kernels.cute_dsl import keep_compiled_kernels
from deskside.utils.errors import first_line

Kernel = Callable[..., Any]


@lru_cache(maxsize=1)
def _library() -> tuple[Kernel, Kernel, tuple[type[Exception], ...]]:
    """Return the forward kernel, the backward kernel, and the exceptions of unsupported inputs. Raises RuntimeError."""
    keep_compiled_kernels()
    try:
        kernels = import_module("flash_attn.cute.interface")
        refusal = import_module("cutlass.base_dsl.common").DSLBaseError
        # The package's own code triggers this warning of its compiler at every compilation.
        warnings.filterwarnings("ignore", message="Argument aux_data", category=UserWarning)
    except (ImportError, OSError) as error:
        raise RuntimeError(f"flash-attn-4 does not import: {error}") from error
    return kernels._flash_attn_fwd, kernels._flash_attn_bwd, (AssertionError, refusal)


def _forward(
    q_BTHC: Tensor,
    k_BTKC: Tensor,
    v_BTKC: Tensor,
    cu_seqlens: Tensor | None,
    max_seqlen: int,
    scale: float | None,
    causal: bool,
    window: int | None,
) -> tuple[Tensor, Tensor]:
    """Return o_BTHC and the logsumexp of the scores. Raises RuntimeError if the package does not support the inputs."""
    forward, _, refusals = _library()
    q, k, v = _flatten_documents(q_BTHC, k_BTKC, v_BTKC, cu_seqlens=cu_seqlens)
    options = _options(cu_seqlens, max_seqlen, scale, causal, window)
    try:
        o, lse = forward(q, k, v, return_lse=True, **options)[:2]
    except refusals as error:
        raise RuntimeError(f"forward: {first_line(error)}") from error
    return o.view(q_BTHC.shape), lse


def _backward(
    grad_o_BTHC: Tensor,
    saved: Sequence[Tensor],
    cu_seqlens: Tensor | None,
    max_seqlen: int,
    scale: float | None,
    causal: bool,
    window: int | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return contiguous (dq_BTHC, dk_BTKC, dv_BTKC). saved: q, k, v, and the two outputs of the forward."""
    _, backward, refusals = _library()
    *qkvo, lse = saved
    q, k, v, o, grad_o = _flatten_documents(*qkvo, grad_o_BTHC, cu_seqlens=cu_seqlens)
    gradients = [torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in qkvo[:3]]
    dq, dk, dv = _flatten_documents(*gradients, cu_seqlens=cu_seqlens)
    options = _options(cu_seqlens, max_seqlen, scale, causal, window)
    deterministic = torch.are_deterministic_algorithms_enabled()
    try:
        backward(q, k, v, o, grad_o, lse, dq=dq, dk=dk, dv=dv, deterministic=deterministic, **options)
    except refusals as error:
        raise RuntimeError(f"backward: {first_line(error)}") from error
    return gradients[0], gradients[1], gradients[2]


def _flatten_documents(*tensors_BTHC: Tensor, cu_seqlens: Tensor | None) -> list[Tensor]:
    """Return the tensors unchanged or, with documents, as (B * T, H, C); slices of a fused projection stay views."""
    return [x if cu_seqlens is None else x.flatten(0, 1) for x in tensors_BTHC]


def _options(
    cu_seqlens: Tensor | None, max_seqlen: int, scale: float | None, causal: bool, window: int | None
) -> dict[str, Any]:
    """Return the package's keyword arguments. Its window counts the keys before a query, ours includes the query."""
    options: dict[str, Any] = {"softmax_scale": scale, "causal": causal}
    if window is not None:
        options |= {"window_size_left": window - 1, "window_size_right": 0 if causal else None}
    if cu_seqlens is not None:
        options |= {"cu_seqlens_q": cu_seqlens, "cu_seqlens_k": cu_seqlens}
        options |= {"max_seqlen_q": max_seqlen, "max_seqlen_k": max_seqlen}
    return options


forward_op = torch.library.custom_op("deskside::fa4_forward", _forward, mutates_args=())
backward_op = torch.library.custom_op("deskside::fa4_backward", _backward, mutates_args=())


@forward_op.register_fake
def _forward_shapes(
    q_BTHC: Tensor, k_BTKC: Tensor, v_BTKC: Tensor, cu_seqlens: Tensor | None, *rest: Any
) -> tuple[Tensor, Tensor]:
    B, T, H, _ = q_BTHC.shape
    shape = (B, H, T) if cu_seqlens is None else (H, B * T)
    return q_BTHC.new_empty(q_BTHC.shape), q_BTHC.new_empty(shape, dtype=torch.float32)


@backward_op.register_fake
def _backward_shapes(
    grad_o_BTHC: Tensor, saved: Sequence[Tensor], *rest: Any
) -> tuple[Tensor, Tensor, Tensor]:
    dq, dk, dv = (x.new_empty(x.shape) for x in saved[:3])
    return dq, dk, dv


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, cu_seqlens, *ctx.options = inputs
    ctx.save_for_backward(q, k, v, *output, cu_seqlens)


def _derivative(ctx: Any, grad_o_BTHC: Tensor, grad_lse: Tensor) -> tuple[Tensor | None, ...]:
    """Return the gradients of the forward operator's inputs. `fa4` drops the logsumexp, so grad_lse is unused."""
    *saved, cu_seqlens = ctx.saved_tensors
    return *backward_op(grad_o_BTHC, saved, cu_seqlens, *ctx.options), None, None, None, None, None


forward_op.register_autograd(_derivative, setup_context=_setup_context)


def _mask_arguments(q_BTHC: Tensor, context: AttentionContext) -> tuple[Any, ...]:
    """Return the last arguments of both operators: the mask and the scale."""
    max_seqlen = q_BTHC.shape[1] if context.max_seqlen is None else context.max_seqlen
    return context.cu_seqlens, max_seqlen, context.scale, context.causal, context.window


def fa4(q_BTHC: Tensor, k_BTKC: Tensor, v_BTKC: Tensor, context: AttentionContext) -> Tensor:
    """(B, T, H, C), (B, T, K, C), (B, T, K, C) -> (B, T, H, C)."""
    o_BTHC, _ = forward_op(q_BTHC, k_BTKC, v_BTKC, *_mask_arguments(q_BTHC, context))
    assert isinstance(o_BTHC, Tensor)
    return o_BTHC


def _explicit_forward(
    q_BTHC: Tensor, k_BTKC: Tensor, v_BTKC: Tensor, context: AttentionContext
) -> tuple[Tensor, Saved]:
    q, k, v = (tensor.detach() for tensor in (q_BTHC, k_BTKC, v_BTKC))
    o, lse = _forward(q, k, v, *_mask_arguments(q, context))
    return o, (q, k, v, o, lse)


def _explicit_backward(
    saved: Saved, grad_o_BTHC: Tensor, context: AttentionContext
) -> tuple[Tensor, Tensor, Tensor]:
    return _backward(grad_o_BTHC, saved, *_mask_arguments(grad_o_BTHC, context))


register(
    AttentionBackend(
        "fa4",
        fa4,
        frozenset({"cuda"}),
        HALF,
        window=True,
        documents=True,
        supports_noncausal=True,
        package="flash-attn-4",
        start_seconds=10.0,  # on an H200, the trial took 12.6 s with it on a cold machine, 1 to 2 s without it
        pair=FwdBwd(_explicit_forward, _explicit_backward),
    )
)
