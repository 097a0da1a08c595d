"""torch's scaled_dot_product_attention: with torch's choice of kernel, restricted to some kernels, or in chunks.

`chunked` implements windows and documents with one SDPA mask per chunk of queries, over the keys that the chunk can
see, so that no dense T x T mask is built. It is the fastest backend for them on a CPU, where FlexAttention has no
backward.
"""

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from deskside.kernels.attention.aten_ops import CUDNN, FLASH, flash_windowed
from deskside.kernels.attention.context import (
    AttentionBackend,
    AttentionContext,
    AttentionFunction,
    document_ids,
    register,
)
from deskside.kernels.attention.reference import QUERY_CHUNK, allowed_keys, visible_keys

# All but cuDNN, which builds a plan for every new shape and never frees it (pytorch/pytorch 190388). A training step
# has one shape, but prompts have many.
ALL_BUT_CUDNN = (SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH)
HALF = frozenset({torch.bfloat16, torch.float16})
FLOAT = HALF | {torch.float32}


def sdpa(q_BTHC: Tensor, k_BTKC: Tensor, v_BTKC: Tensor, context: AttentionContext) -> Tensor:
    """Run SDPA with torch's choice of kernel. (B, T, H, C), (B, T, K, C), (B, T, K, C) -> (B, T, H, C)."""
    o_BHTC = F.scaled_dot_product_attention(
        q_BTHC.transpose(1, 2),
        k_BTKC.transpose(1, 2),
        v_BTKC.transpose(1, 2),
        is_causal=context.causal,
        scale=context.scale,
        enable_gqa=q_BTHC.shape[2] != k_BTKC.shape[2],
    )
    return o_BHTC.transpose(1, 2)


def sdpa_restricted_to(*kernels: SDPBackend) -> AttentionFunction:
    """Return SDPA restricted to these kernels; it raises RuntimeError if none of them supports the inputs."""
    allowed = kernels[0] if len(kernels) == 1 else list(kernels)

    def attention(q_BTHC: Tensor, k_BTKC: Tensor, v_BTKC: Tensor, context: AttentionContext) -> Tensor:
        with sdpa_kernel(allowed):
            return sdpa(q_BTHC, k_BTKC, v_BTKC, context)

    return attention


def chunked(q_BTHC: Tensor, k_BTKC: Tensor, v_BTKC: Tensor, context: AttentionContext) -> Tensor:
    """Run SDPA on chunks of queries, with the masks of `chunk_masks` in `context.prepared`."""
    T = q_BTHC.shape[1]
    q_BHTC, k_BKTC, v_BKTC = q_BTHC.transpose(1, 2), k_BTKC.transpose(1, 2), v_BTKC.transpose(1, 2)
    chunks = []
    for number, start in enumerate(range(0, T, QUERY_CHUNK)):
        stop = min(start + QUERY_CHUNK, T)
        first_key, end_key = visible_keys(start, stop, T, context)
        chunks.append(
            F.scaled_dot_product_attention(
                q_BHTC[:, :, start:stop],
                k_BKTC[:, :, first_key:end_key],
                v_BKTC[:, :, first_key:end_key],
                attn_mask=context.prepared[number],
                scale=context.scale,
                enable_gqa=q_BTHC.shape[2] != k_BTKC.shape[2],
            )
        )
    return torch.cat(chunks, dim=2).transpose(1, 2)


def chunk_masks(
    context: AttentionContext, batch: int, tokens: int, device: torch.device
) -> tuple[Tensor, ...]:
    """Return one mask (1 or B, 1, chunk, visible keys) per chunk of queries."""
    position = torch.arange(tokens, device=device)[None]
    documents = None if context.cu_seqlens is None else document_ids(context.cu_seqlens, batch, tokens)
    masks = []
    for start in range(0, tokens, QUERY_CHUNK):
        stop = min(start + QUERY_CHUNK, tokens)
        first_key, end_key = visible_keys(start, stop, tokens, context)
        allowed = allowed_keys(position[:, start:stop], position[:, first_key:end_key], context)
        assert allowed is not None  # the backend is registered as causal only
        if documents is not None:
            allowed = allowed & (documents[:, start:stop, None] == documents[:, None, first_key:end_key])
        masks.append(allowed[:, None])
    return tuple(masks)


def flash(q_BTHC: Tensor, k_BTKC: Tensor, v_BTKC: Tensor, context: AttentionContext) -> Tensor:
    """Run FlashAttention: through SDPA, or with a window directly."""
    function = flash_without_window if context.window is None else flash_windowed
    return function(q_BTHC, k_BTKC, v_BTKC, context)


flash_without_window = sdpa_restricted_to(SDPBackend.FLASH_ATTENTION)
CUDA = frozenset({"cuda"})


register(
    AttentionBackend(
        "sdpa", sdpa, frozenset({"cpu", "cuda"}), FLOAT | {torch.float64}, supports_noncausal=True
    )
)
register(
    AttentionBackend(
        "unplanned",
        sdpa_restricted_to(*ALL_BUT_CUDNN),
        CUDA,
        FLOAT | {torch.float64},
        supports_noncausal=True,
        on_request=CUDA,
    )
)
register(
    AttentionBackend(
        "chunked",
        chunked,
        frozenset({"cpu", "cuda"}),
        FLOAT | {torch.float64},
        window=True,
        documents=True,
        on_request=frozenset({"cuda"}),
        prepare=chunk_masks,
    )
)
register(AttentionBackend("flash", flash, CUDA, HALF, window=True, supports_noncausal=True, pair=FLASH))
register(
    AttentionBackend(
        "cudnn",
        sdpa_restricted_to(SDPBackend.CUDNN_ATTENTION),
        CUDA,
        HALF,
        supports_noncausal=True,
        pair=CUDNN,
    )
)
register(
    AttentionBackend(
        "efficient",
        sdpa_restricted_to(SDPBackend.EFFICIENT_ATTENTION),
        CUDA,
        FLOAT,
        grouped=False,
        supports_noncausal=True,
    )
)
