"""The one call that a model makes for attention; the context names the kernel."""

from torch import Tensor

from deskside.kernels.attention import AttentionContext, backend_named


def attention(q_BTHC: Tensor, k_BTKC: Tensor, v_BTKC: Tensor, context: AttentionContext) -> Tensor:
    """(B, T, H, C), (B, T, K, C), (B, T, K, C) -> (B, T, H, C). `context` has been through `prepare`."""
    return backend_named(context.backend).function(q_BTHC, k_BTKC, v_BTKC, context)
