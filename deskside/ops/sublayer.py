"""The two halves of a block as operators: attention with its norm and projections, and the MLP with its norm.

Each is (residual, delta) -> (residual, delta). They are modules of parts and nothing more: `deskside.model.block` says
how they compute. `execution` is set by a precision recipe that computes a half in its own way, with the parts' weights;
None means as written in the model.
"""

from collections.abc import Callable
from typing import Any

from torch import nn

from deskside.ops.composite import AddNormLinear, GatedLinear
from deskside.ops.linear import Linear
from deskside.ops.norm import RMSNorm

Execution = Callable[..., Any]


class AttentionSublayer(nn.Module):
    """`input` gives q, k and v; `output` is o_proj. `heads` query heads, `kv_heads` of keys and values."""

    heads: int
    kv_heads: int
    head_dim: int
    input: AddNormLinear
    q_norm: RMSNorm | None
    k_norm: RMSNorm | None
    output: Linear

    def __init__(self) -> None:
        super().__init__()
        self.forward_override: Execution | None = None


class MLPSublayer(nn.Module):
    """`input` gives gate and up (or up alone); `output` activates and projects down."""

    input: AddNormLinear
    output: GatedLinear

    def __init__(self) -> None:
        super().__init__()
        self.forward_override: Execution | None = None
