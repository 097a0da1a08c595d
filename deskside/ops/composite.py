"""The operators that a block is written in: AddNormLinear, GatedLinear, and the sublayers that they form.

AddNormLinear and GatedLinear each cover element-wise work that ends in a GEMM, so that one kernel can do all of the
element-wise work. Both return logical projections (q, k, v; gate, up) whether their weights are fused or not, so the
code around them does not depend on fusing. `transparent` marks modules that are no part of a logical name (logical.py).

`AttentionSublayer` and `MLPSublayer` are one half of a block each, (residual, delta) -> (residual, delta). They only
hold parts; `deskside.model.block` computes with them. A `forward_override`, set from outside, replaces the computation
of an operator or of a whole sublayer.
"""

from collections.abc import Callable, Sequence
from typing import Any, Literal

from torch import Tensor, nn

from deskside.kernels.functional import ACTIVATIONS
from deskside.ops.linear import Linear
from deskside.ops.norm import Norm, RMSNorm

Activation = Literal["silu", "gelu", "gelu_new", "relu2"]


def make_projections(
    in_features: int, outputs: Sequence[tuple[str, int]], bias: bool, fused: bool
) -> nn.ModuleList:
    """One Linear with a slice per output, or one Linear per output."""
    groups = [list(outputs)] if fused else [[output] for output in outputs]
    return nn.ModuleList(Linear(in_features, group, bias) for group in groups)


class AddNormLinear(nn.Module):
    """(residual, delta) -> (residual + delta, projections of its norm).

    `position` "pre": the norm is read by the projections alone and the residual stream stays un-normalised.
    "post": the residual itself is normalised, residual = norm(residual + delta), and the projections read it. With
    "post" the first operator of a model therefore normalises the embeddings, as BERT does.

    Every block begins with this operator, so all blocks are one piece of code for torch.compile.
    """

    transparent = True

    def __init__(self, norm: Norm, projections: nn.ModuleList, position: Literal["pre", "post"]):
        super().__init__()
        self.norm = norm
        self.projections = projections
        self.position = position
        self.forward_override: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]] | None = None

    def forward(self, residual_BTD: Tensor, delta_BTD: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Returns the new residual and one tensor (B, T, rows) per logical projection, in order."""
        residual_BTD, normed_BTD = self.add_norm(residual_BTD, delta_BTD)
        outputs: list[Tensor] = []
        for projection in self.projections:
            outputs.extend(split_slices(projection, projection(normed_BTD)))
        return residual_BTD, tuple(outputs)

    def add_norm(self, residual_BTD: Tensor, delta_BTD: Tensor) -> tuple[Tensor, Tensor]:
        """Return the new residual and the input of the projections."""
        if self.forward_override is not None:
            return self.forward_override(residual_BTD, delta_BTD)
        residual_BTD = residual_BTD + delta_BTD
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
        """`inputs_BTF` is (gate, up) or (up,), as AddNormLinear gives them."""
        return self.projection(activate(self.activation, *inputs_BTF))


def activate(activation: Activation, *inputs: Tensor) -> Tensor:
    """activation(gate) * up for two inputs, activation(up) for one."""
    hidden = ACTIVATIONS[activation](inputs[0])
    return hidden * inputs[1] if len(inputs) == 2 else hidden


def split_slices(projection: nn.Module, output: Tensor) -> tuple[Tensor, ...]:
    """The output of a fused Linear, (..., rows), as one view per logical slice."""
    assert isinstance(projection, Linear)
    if len(projection.slices) == 1:
        return (output,)
    return output.split([s.stop - s.start for s in projection.slices], dim=-1)


class AttentionSublayer(nn.Module):
    """`input` makes q, k and v; `output` is o_proj. `heads` query heads, `kv_heads` of keys and values.

    `accepts_no_delta`: the override takes None for the first block's delta, so the embedding need not be split.
    """

    heads: int
    kv_heads: int
    head_dim: int
    input: AddNormLinear
    q_norm: RMSNorm | None
    k_norm: RMSNorm | None
    output: Linear

    def __init__(self) -> None:
        super().__init__()
        self.forward_override: Callable[..., Any] | None = None
        self.accepts_no_delta = False


class MLPSublayer(nn.Module):
    """`input` makes gate and up (or up alone); `output` activates and projects down."""

    input: AddNormLinear
    output: GatedLinear

    def __init__(self) -> None:
        super().__init__()
        self.forward_override: Callable[..., Any] | None = None
