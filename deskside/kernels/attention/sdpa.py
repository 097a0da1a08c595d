"""torch's scaled_dot_product_attention: left to choose by itself, held to one kernel, or in chunks of queries.

`chunked` gives windows and document boundaries to SDPA by a mask per chunk of queries over the keys that the chunk can
see, so that no dense T x T mask is built. It is the fast way on a CPU, which has no FlexAttention worth its compile.
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

# All but cuDNN, which plans anew for every shape that it meets and keeps each plan for good (pytorch/pytorch 190388). A
# training step has one shape; prompts have ever new ones.
UNPLANNED = (SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH)
HALF = frozenset({torch.bfloat16, torch.float16})
FLOAT = HALF | {torch.float32}


def sdpa(q_BTHC: Tensor, k_BTKC: Tensor, v_BTKC: Tensor, context: AttentionContext) -> Tensor:
    """SDPA with torch's own choice of kernel."""
    o_BHTC = F.scaled_dot_product_attention(
        q_BTHC.transpose(1, 2),
        k_BTKC.transpose(1, 2),
        v_BTKC.transpose(1, 2),
        is_causal=context.causal,
        scale=context.scale,
        enable_gqa=q_BTHC.shape[2] != k_BTKC.shape[2],
    )
    return o_BHTC.transpose(1, 2)


def held_to(*kernels: SDPBackend) -> AttentionFunction:
    """SDPA that may use these kernels alone; torch raises RuntimeError where it cannot."""
    allowed = kernels[0] if len(kernels) == 1 else list(kernels)

    def attention(q_BTHC: Tensor, k_BTKC: Tensor, v_BTKC: Tensor, context: AttentionContext) -> Tensor:
        with sdpa_kernel(allowed):
            return sdpa(q_BTHC, k_BTKC, v_BTKC, context)

    return attention


def chunked(q_BTHC: Tensor, k_BTKC: Tensor, v_BTKC: Tensor, context: AttentionContext) -> Tensor:
    """SDPA over chunks of queries, each with the mask of the keys that it can see. `prepared` holds the masks."""
    T = q_BTHC.shape[1]
    q_BHTC, k_BKTC, v_BKTC = q_BTHC.transpose(1, 2), k_BTKC.transpose(1, 2), v_BTKC.transpose(1, 2)
    chunks = []
    for number, start in enumerate(range(0, T, QUERY_CHUNK)):
        stop = min(start + QUERY_CHUNK, T)
        first, last = visible_keys(start, stop, T, context)
        chunks.append(
            F.scaled_dot_product_attention(
                q_BHTC[:, :, start:stop],
                k_BKTC[:, :, first:last],
                v_BKTC[:, :, first:last],
                attn_mask=context.prepared[number],
                scale=context.scale,
                enable_gqa=q_BTHC.shape[2] != k_BTKC.shape[2],
            )
        )
    return torch.cat(chunks, dim=2).transpose(1, 2)


def chunk_masks(
    context: AttentionContext, batch: int, tokens: int, device: torch.device
) -> tuple[Tensor, ...]:
    """One mask (1 or B, 1, chunk, visible keys) per chunk of queries; the same for all layers of one window."""
    position = torch.arange(tokens, device=device)[None]
    documents = None if context.cu_seqlens is None else document_ids(context.cu_seqlens, batch, tokens)
    masks = []
    for start in range(0, tokens, QUERY_CHUNK):
        stop = min(start + QUERY_CHUNK, tokens)
        first, last = visible_keys(start, stop, tokens, context)
        allowed = allowed_keys(position[:, start:stop], position[:, first:last], context)
        assert allowed is not None  # the backend is registered as causal only
        if documents is not None:
            allowed = allowed & (documents[:, start:stop, None] == documents[:, None, first:last])
        masks.append(allowed[:, None])
    return tuple(masks)


def flash(q_BTHC: Tensor, k_BTKC: Tensor, v_BTKC: Tensor, context: AttentionContext) -> Tensor:
    """FlashAttention: through SDPA, or directly where there is a window."""
    function = flash_full if context.window is None else flash_windowed
    return function(q_BTHC, k_BTKC, v_BTKC, context)


flash_full = held_to(SDPBackend.FLASH_ATTENTION)
CUDA = frozenset({"cuda"})


register(AttentionBackend("sdpa", sdpa, frozenset({"cpu", "cuda"}), FLOAT | {torch.float64}, not_causal=True))
register(
    AttentionBackend(
        "unplanned",
        held_to(*UNPLANNED),
        CUDA,
        FLOAT | {torch.float64},
        not_causal=True,
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
register(AttentionBackend("flash", flash, CUDA, HALF, window=True, not_causal=True, pair=FLASH))
register(
    AttentionBackend("cudnn", held_to(SDPBackend.CUDNN_ATTENTION), CUDA, HALF, not_causal=True, pair=CUDNN)
)
register(
    AttentionBackend(
        "efficient", held_to(SDPBackend.EFFICIENT_ATTENTION), CUDA, FLOAT, grouped=False, not_causal=True
    )
)
