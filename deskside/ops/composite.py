"""The operators of a transformer block: norms, attention, AddNormLinear, GatedLinear, and the sublayers.

AddNormLinear and GatedLinear each combine element-wise work with the GEMM next to it, so that one kernel can do all of
the element-wise work. AddNormLinear returns logical projections (q, k, v; gate, up) even if their weights are fused, so
the code around it does not depend on fusing. Modules with `transparent` do not appear in logical names (logical.py).

`AttentionSublayer` and `MLPSublayer` are the halves of a block, (residual, delta) -> (residual, delta). They only
declare their parts; `deskside.model.block` implements them. A `forward_override`, set from outside, replaces the add
and norm of an AddNormLinear, or a whole sublayer.
"""

from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from deskside.kernels.attention import AttentionContext, backend_named
from deskside.kernels.functional import activate, at_least_float32
from deskside.ops.linear import Linear

Activation = Literal["silu", "gelu", "gelu_new", "relu2", "clamped_swiglu"]


class RMSNorm(nn.Module):
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension, in float32. (..., size) -> (..., size), dtype of x.

    Zhang and Sennrich 2019 (arXiv 1910.07467). `forward_override`, set from outside, is another implementation.
    """

    def __init__(self, size: int, eps: float):
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.empty(size))
        self.forward_override: Callable[[Tensor], Tensor] | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.forward_override is not None:
            return self.forward_override(x)
        dtype = at_least_float32(x)
        return F.rms_norm(x.to(dtype), self.weight.shape, self.weight.to(dtype), self.eps).to(x.dtype)

    def extra_repr(self) -> str:
        return f"{self.weight.numel()}, eps={self.eps}"


class LayerNorm(nn.Module):
    """(x - mean) / sqrt(var + eps) * weight + bias over the last dimension, in float32. Shape and dtype of x.

    Ba et al. 2016 (arXiv 1607.06450).
    """

    def __init__(self, size: int, eps: float, bias: bool):
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.empty(size))
        self.bias = nn.Parameter(torch.empty(size)) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        dtype = at_least_float32(x)
        bias = None if self.bias is None else self.bias.to(dtype)
        return F.layer_norm(x.to(dtype), self.weight.shape, self.weight.to(dtype), bias, self.eps).to(x.dtype)

    def extra_repr(self) -> str:
        return f"{self.weight.numel()}, eps={self.eps}, bias={self.bias is not None}"


Norm = RMSNorm | LayerNorm


def attention(q_BTHC: Tensor, k_BTKC: Tensor, v_BTKC: Tensor, context: AttentionContext) -> Tensor:
    """(B, T, H, C), (B, T, K, C), (B, T, K, C) -> (B, T, H, C), with the backend of a prepared `context`."""
    return backend_named(context.backend).function(q_BTHC, k_BTKC, v_BTKC, context)


def make_projections(
    in_features: int, outputs: Sequence[tuple[str, int]], bias: bool, fused: bool
) -> nn.ModuleList:
    """Return one Linear with a slice per output if `fused`, otherwise one Linear per output."""
    groups = [list(outputs)] if fused else [[output] for output in outputs]
    return nn.ModuleList(Linear(in_features, group, bias) for group in groups)


class AddNormLinear(nn.Module):
    """(residual, delta) -> (residual + delta, projections of its norm, or of itself if `norm` is None).

    `position` "pre": only the projections read the norm, and the residual stream is not normalised. "post": the
    residual itself is normalised, residual = norm(residual + delta), and the projections read it. The first operator of
    a "post" model therefore normalises the embeddings, as in BERT.

    Every block begins with this operator, so all blocks have the same code and torch.compile can share one graph.
    """

    transparent = True

    def __init__(self, norm: Norm | None, projections: nn.ModuleList, position: Literal["pre", "post"]):
        super().__init__()
        self.norm = norm
        self.projections = projections
        self.position = position
        self.forward_override: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]] | None = None

    def forward(self, residual_BTD: Tensor, delta_BTD: Tensor | None) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Return the new residual and one tensor (B, T, rows) per logical projection, in order.

        delta_BTD: None if there is nothing to add to the residual.
        """
        residual_BTD, normed_BTD = self.add_norm(residual_BTD, delta_BTD)
        outputs: list[Tensor] = []
        for projection in self.projections:
            assert isinstance(projection, Linear)
            output = projection(normed_BTD)
            sizes = [s.stop - s.start for s in projection.slices]
            outputs.extend(output.split(sizes, dim=-1) if len(sizes) > 1 else (output,))
        return residual_BTD, tuple(outputs)

    def add_norm(self, residual_BTD: Tensor, delta_BTD: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return the new residual and the input of the projections."""
        if self.forward_override is not None:
            assert delta_BTD is not None
            return self.forward_override(residual_BTD, delta_BTD)
        residual_BTD = residual_BTD if delta_BTD is None else residual_BTD + delta_BTD
        if self.norm is None:
            return residual_BTD, residual_BTD
        normed_BTD = self.norm(residual_BTD)
        return (normed_BTD if self.position == "post" else residual_BTD), normed_BTD


class GatedLinear(nn.Module):
    """activation(gate) * up, or activation(up) without a gate, and then the down projection. (B, T, F) -> (B, T, D)."""

    transparent = True

    def __init__(self, activation: Activation, projection: Linear):
        super().__init__()
        self.activation = activation
        self.projection = projection

    def forward(self, *inputs_BTF: Tensor) -> Tensor:
        """inputs_BTF: (gate, up) or (up,), the outputs of AddNormLinear."""
        return self.projection(activate(self.activation, *inputs_BTF))


class Sublayer(nn.Module):
    """One half of a block: (residual, delta) -> (residual, delta), where the new delta is its output.

    `forward_override`, set from outside, replaces its forward up to the norm of its output; None does not. `dropout`,
    also from outside, is the last function of its output. output_norm: norm of its output; None if there is none.
    multiplier: factor of its output.
    """

    def __init__(self, output_norm: Norm | None = None, multiplier: float = 1.0) -> None:
        super().__init__()
        self.output_norm = output_norm
        self.multiplier = multiplier
        self.forward_override: Callable[..., Any] | None = None
        self.dropout: Callable[[Tensor], Tensor] | None = None

    def normed(self, output_BTD: Tensor) -> Tensor:
        """Return the sublayer's output after its norm, if it has one, times its factor, after its dropout."""
        output_BTD = output_BTD if self.output_norm is None else self.output_norm(output_BTD)
        output_BTD = output_BTD if self.multiplier == 1.0 else output_BTD * self.multiplier
        return output_BTD if self.dropout is None else self.dropout(output_BTD)


class AttentionSublayer(Sublayer):
    """The attention half of a block: `input` computes q, k and v, and `output` is o_proj.

    heads: number of query heads; kv_heads: number of key and of value heads. qk_norm_over: what `q_norm` and `k_norm`
    normalise, one head or all heads together. partial_rotary: RoPE rotates only some channels of a head.
    delta_optional: True if the override takes None as the first block's delta, so that the embedding need not be split
    into residual and delta. sinks: see `AttentionContext`; (heads,), or None.
    """

    heads: int
    kv_heads: int
    head_dim: int
    qk_norm_over: Literal["head", "projection"]
    partial_rotary: bool
    input: AddNormLinear
    q_norm: RMSNorm | None
    k_norm: RMSNorm | None
    sinks: nn.Parameter | None
    output: Linear

    def __init__(self, output_norm: Norm | None = None, multiplier: float = 1.0) -> None:
        super().__init__(output_norm, multiplier)
        self.delta_optional = False


class MLPSublayer(Sublayer):
    """The MLP half of a block: `input` computes gate and up, or only up; `output` activates and projects down.

    parallel: it reads the residual without the delta, as attention did, and adds its output to the delta.
    """

    parallel: bool
    input: AddNormLinear
    output: GatedLinear
