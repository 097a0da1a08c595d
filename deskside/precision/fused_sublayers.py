"""Fused attention and MLP sublayers with a manual backward and with products in their recipe's formats.

Autograd passes gradients between nodes in the dtype of the activation. A gradient that a kernel writes in FP8, once as
it is and once transposed, cannot be passed this way. So one autograd node computes a whole sublayer, from (residual,
delta) to (residual, delta), and every tensor inside has the form that the next product reads:

    forward    add + norm (+ cast) -> product -> QK-norm + RoPE, attention -> product
               add + norm (+ cast) -> product -> activation * gate (+ cast) -> product
    backward   the same steps in reverse order

BF16 runs the same code without the casts. Activation checkpointing is part of the node: with `recompute`, it saves no
activations but the residual and 1 / RMS, and the backward recomputes the rest. The first backward frees the saved
state, so a second one through the same graph (`retain_graph=True`) recomputes it.

This module has what the sublayers share; each kind has a file: fused_attention.py, fused_mlp.py and fused_moe.py.

Suffixes: N tokens (B sequences of T), D hidden size, H heads, K key-value heads, C channels of a head.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import Any

from torch import Tensor

from deskside.kernels import fused
from deskside.kernels.fused import Fp8
from deskside.ops.composite import RMSNorm
from deskside.precision.quantized_linear import QuantizedLinear


@dataclass(frozen=True)
class FusedSublayer:
    """A sublayer and the plans of its two Linears. `recompute`: the backward starts from the residual again."""

    sublayer: Any
    first: QuantizedLinear
    second: QuantizedLinear
    recompute: bool = False

    @cached_property
    def norm(self) -> RMSNorm:
        return rms_norm(self.sublayer.input.norm)

    def add_norm(self, residual: Tensor, delta: Tensor | None) -> tuple[Tensor, Tensor | Fp8, Tensor]:
        """Return residual + delta, its norm as the first layer reads it, and the norm's 1 / RMS."""
        return fused.add_norm(residual, delta, self.norm.weight, self.norm.eps, self.first.x.cast)

    def second_backward(
        self, grad_delta_BTD: Tensor, saved_input: tuple[Tensor, ...]
    ) -> tuple[Tensor, Tensor | None]:
        """Backward of the second layer. Returns the gradients of its input and of its weight.

        saved_input: the tensors that `Quantizer.quantize_rows` saved of the layer's input.
        """
        plan = self.second
        rows, saved_grad = plan.g.quantize_rows(flatten_tokens(grad_delta_BTD))
        grad = plan.input_gradient(rows, grad_delta_BTD.dtype)
        grad_weight = plan.weight_gradient(
            plan.g.quantize_columns(saved_grad), plan.x.quantize_columns(saved_input)
        )
        return grad, grad_weight

    def first_backward(
        self,
        grad_output: Tensor | Fp8,
        saved_input: tuple[Tensor, ...],
        saved_norm: tuple[Tensor, Tensor, Tensor],
        grad_residual_BTD: Tensor | None,
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Backward of the first layer and the norm.

        Returns the gradient of residual and delta (which is the same), and those of the norm's and the layer's weight.
        saved_norm: the residual, the norm's 1 / RMS and its weight.
        """
        plan, (residual, rstd, norm_weight) = self.first, saved_norm
        rows, saved_grad = plan.g.quantize_rows(grad_output)
        grad_normed = plan.input_gradient(rows, residual.dtype)
        grad_weight = plan.weight_gradient(
            plan.g.quantize_columns(saved_grad), plan.x.quantize_columns(saved_input)
        )
        grad_residual = None if grad_residual_BTD is None else flatten_tokens(grad_residual_BTD)
        grad, grad_norm = fused.add_norm_backward(grad_normed, residual, rstd, norm_weight, grad_residual)
        return grad, grad_norm.to(norm_weight.dtype), grad_weight


def rms_norm(norm: object) -> RMSNorm:
    """Narrow the type of a norm that is known to be an RMSNorm."""
    assert isinstance(norm, RMSNorm)
    return norm


def flatten_tokens(x_BTD: Tensor) -> Tensor:
    return x_BTD.flatten(0, 1).contiguous()
