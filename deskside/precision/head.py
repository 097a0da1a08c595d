"""The output head and its cross-entropy loss in FP8: hidden states and weight in E4M3, gradients of logits in E5M2.

Hidden states and weight have one scale each, computed from their largest magnitude. The gradient of a logit is always
between -1 and 1, so its scale is constant. With a vocabulary of 32,768 entries, a softmax probability is 3e-5 on
average, and E5M2 with this scale represents values down to 1e-9. (A z-loss multiplies the softmax by 1 + 2 z_loss
logsumexp; gradients beyond 3.5 saturate.) The cross-entropy kernel writes the gradients in FP8, and a second kernel
transposes them.

FP8 products cannot accumulate into their output, and adding the weight gradients of two chunks of tokens would read or
write three float32 tables. So the transposed gradients of two chunks are stored, one byte per logit, and multiplied in
one product.

Suffixes: N tokens, D hidden size, V vocabulary.
"""

from typing import Any

import torch
from torch import Tensor

from deskside.config.recipes import Operand
from deskside.kernels import cross_entropy, fused
from deskside.kernels.cross_entropy import (
    FutureTargets,
    LossOptions,
    linear_cross_entropy,
    loss_kernels,
    part_of,
    summed,
)
from deskside.kernels.functional import multiply_by_scalar
from deskside.precision.products import product
from deskside.precision.quantized_linear import ConvertedWeight, Quantizer, Shared
from deskside.precision.quantized_operand import QuantizedOperand, cast_with_current_scale

GRADIENT_SCALE = 2.0**14  # of the logits' gradients; E5M2's largest value, 57,344, then represents 3.5
CHUNKS = 2  # chunks of tokens per product for the weight gradient; more would increase the peak memory


class QuantizedHead:
    """The output head in FP8, a `forward_override` of `HeadLoss`.

    native: its products run on tensor cores. The products of the layers may differ in this.
    """

    def __init__(self, shared: Shared, native: bool):
        self.native = native
        operand = Operand("e4m3", "tensor")
        self.converted = ConvertedWeight(Quantizer(operand, operand, shared, (-1, -2)), shared)
        self._inverse: Tensor | None = None

    def inverse(self, device: torch.device) -> Tensor:
        """Return 1 / GRADIENT_SCALE, a float32 scalar on the device."""
        if self._inverse is None or self._inverse.device != device:
            self._inverse = torch.tensor(1 / GRADIENT_SCALE, device=device)
        return self._inverse

    def __call__(
        self,
        hidden_ND: Tensor,
        weight_VD: Tensor,
        targets_N: Tensor,
        options: LossOptions,
    ) -> Tensor:
        """Compute `linear_cross_entropy` in FP8, or in the dtype of `hidden_ND` if gradients are disabled."""
        if not torch.is_grad_enabled():
            return linear_cross_entropy(hidden_ND, weight_VD, targets_N, options)
        return self.multi_token(hidden_ND, weight_VD, targets_N, None, options)[0]

    def multi_token(
        self,
        hidden_ND: Tensor,
        weight_VD: Tensor,
        targets_N: Tensor,
        future: FutureTargets | None,
        options: LossOptions,
    ) -> tuple[Tensor, Tensor]:
        """Compute `multi_token_cross_entropy` in FP8."""
        total, next_token = _Loss.apply(self, hidden_ND, weight_VD, targets_N, options, future)
        return total, next_token


class _Loss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        plan: QuantizedHead,
        hidden_ND: Tensor,
        weight_VD: Tensor,
        targets_N: Tensor,
        options: LossOptions,
        future: FutureTargets | None,
    ) -> tuple[Tensor, Tensor]:
        native, device = plan.native, hidden_ND.device
        weight_rows, weight_columns = plan.converted.get(weight_VD)
        hidden, inverse = cast_with_current_scale(hidden_ND.contiguous(), torch.float8_e4m3fn)
        d_hidden = torch.empty_like(hidden_ND)
        d_weight: Tensor | None = None
        losses: list[Tensor] = []
        kernels = loss_kernels(hidden_ND) if fused.writes_fp8(device) else cross_entropy
        tokens, chunk_tokens, grad_scale = len(hidden_ND), options.chunk_tokens, plan.inverse(device)
        for first in range(0, tokens, CHUNKS * chunk_tokens):
            last = min(first + CHUNKS * chunk_tokens, tokens)
            grads_VN: Tensor | None = None  # of all chunks, N = last - first
            for start in range(first, last, chunk_tokens):
                part = slice(start, min(start + chunk_tokens, last))
                rows = QuantizedOperand(hidden.rows[part], inverse)
                logits = product("output", rows, weight_rows, hidden_ND.dtype, native)
                chunk_losses, grads_NV = kernels.chunk_loss_and_fp8_grad(
                    logits, targets_N[part], options, GRADIENT_SCALE, part_of(future, part)
                )
                losses.append(chunk_losses)
                del logits
                rows = QuantizedOperand(grads_NV, grad_scale)
                d_hidden[part] = product("input_gradient", rows, weight_columns, hidden_ND.dtype, native)
                if grads_VN is None:
                    grads_VN = grads_NV.new_empty(grads_NV.shape[1], last - first)
                fused.transpose(grads_NV, grads_VN[:, part.start - first : part.stop - first])
                del grads_NV, rows
            assert grads_VN is not None
            columns = QuantizedOperand(grads_VN, grad_scale, transposed=True)
            inputs = QuantizedOperand(hidden.columns[:, first:last], inverse, transposed=True)
            partial = product("weight_gradient", columns, inputs, torch.float32, native)
            d_weight = partial if d_weight is None else d_weight.add_(partial)
            del columns, grads_VN
        ctx.save_for_backward(d_hidden, d_weight)
        ctx.weight_dtype = weight_VD.dtype
        total, next_token = summed(losses)
        ctx.mark_non_differentiable(next_token)
        return total, next_token

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        d_hidden, d_weight = ctx.saved_tensors
        grad, _ = grad_outputs
        d_weight = multiply_by_scalar(d_weight, grad).to(ctx.weight_dtype)
        return None, multiply_by_scalar(d_hidden, grad), d_weight, None, None, None
