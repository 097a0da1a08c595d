"""The output head in FP8: logits from E4M3, the gradient of the logits in E5M2, all three products on tensor cores.

Hidden states and weight have one scale each, from their own largest value. The gradient of a logit lies between -1 and
1 whatever the data, so its scale is a constant; softmax of a vocabulary of 32,768 entries is 3e-5 on average, and E5M2
holds 1e-9 under this scale. (A z-loss multiplies the softmax by 1 + 2 z_loss logsumexp; a gradient beyond 3.5
saturates.) The cross-entropy kernel writes it in FP8 at once; a second one turns it.

FP8 products cannot add to what is there already, and adding the weight's gradients of two chunks is a pass over three
float32 tables. So the turned gradients of two chunks are kept, a byte for each logit, and multiplied at once.
"""

from typing import Any

import torch
from torch import Tensor

from deskside.config.recipes import Operand
from deskside.kernels import cross_entropy, fused
from deskside.kernels.cross_entropy import linear_cross_entropy, loss_kernels
from deskside.kernels.functional import multiply_by_scalar
from deskside.precision.products import product
from deskside.precision.quantized_linear import ConvertedWeight, Quantizer, Shared
from deskside.precision.quantized_operand import QuantizedOperand, cast_with_own_scale

GRADIENT_SCALE = 2.0**14
CHUNKS = 2  # whose gradients are kept for one product; more would raise the peak of memory


class QuantizedHead:
    """The head's weight in FP8, converted once per optimiser step. native: its products run on tensor cores, whatever
    those of the layers do."""

    def __init__(self, shared: Shared, native: bool):
        self.native = native
        operand = Operand("e4m3", "tensor")
        self.converted = ConvertedWeight(Quantizer(operand, operand, shared, (-1, -2)), shared)
        self._inverse: Tensor | None = None

    def inverse(self, device: torch.device) -> Tensor:
        """Return the inverse scale of the FP8 gradients, a float32 scalar on the device."""
        if self._inverse is None or self._inverse.device != device:
            self._inverse = torch.tensor(1 / GRADIENT_SCALE, device=device)
        return self._inverse

    def __call__(
        self,
        hidden_ND: Tensor,
        weight_VD: Tensor,
        targets_N: Tensor,
        *,
        softcap: float | None = None,
        z_loss: float = 0.0,
        chunk_tokens: int,
    ) -> Tensor:
        """Compute `linear_cross_entropy` in FP8. Without gradients it runs in hidden's dtype."""
        if not torch.is_grad_enabled():
            return linear_cross_entropy(
                hidden_ND, weight_VD, targets_N, softcap=softcap, z_loss=z_loss, chunk_tokens=chunk_tokens
            )
        loss = _Loss.apply(self, hidden_ND, weight_VD, targets_N, softcap, z_loss, chunk_tokens)
        assert isinstance(loss, Tensor)
        return loss


class _Loss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        plan: QuantizedHead,
        hidden_ND: Tensor,
        weight_VD: Tensor,
        targets_N: Tensor,
        softcap: float | None,
        z_loss: float,
        chunk_tokens: int,
    ) -> Tensor:
        native, device = plan.native, hidden_ND.device
        weight_rows, weight_columns = plan.converted.of(weight_VD)
        hidden, inverse = cast_with_own_scale(hidden_ND.contiguous(), torch.float8_e4m3fn)
        d_hidden = torch.empty_like(hidden_ND)
        d_weight: Tensor | None = None
        losses: list[Tensor] = []
        kernel = (
            loss_kernels(hidden_ND) if fused.writes_fp8(device) else cross_entropy
        ).chunk_loss_and_fp8_grad
        tokens, grad_scale = len(hidden_ND), plan.inverse(device)
        for first in range(0, tokens, CHUNKS * chunk_tokens):
            last = min(first + CHUNKS * chunk_tokens, tokens)
            turned: Tensor | None = None  # (V, last - first)
            for start in range(first, last, chunk_tokens):
                part = slice(start, min(start + chunk_tokens, last))
                rows = QuantizedOperand(hidden.rows[part], inverse)
                logits = product("output", rows, weight_rows, hidden_ND.dtype, native)
                of_chunk, grads = kernel(logits, targets_N[part], softcap, z_loss, GRADIENT_SCALE)
                losses.append(of_chunk)
                del logits
                rows = QuantizedOperand(grads, grad_scale)
                d_hidden[part] = product("input_gradient", rows, weight_columns, hidden_ND.dtype, native)
                if turned is None:
                    turned = grads.new_empty(grads.shape[1], last - first)
                fused.transpose(grads, turned[:, part.start - first : part.stop - first])
                del grads, rows
            assert turned is not None
            columns = QuantizedOperand(turned, grad_scale, transposed=True)
            inputs = QuantizedOperand(hidden.columns[:, first:last], inverse, transposed=True)
            share = product("weight_gradient", columns, inputs, torch.float32, native)
            d_weight = share if d_weight is None else d_weight.add_(share)
            del columns, turned
        ctx.save_for_backward(d_hidden, d_weight)
        ctx.weight_dtype = weight_VD.dtype
        return torch.cat(losses).sum()

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        d_hidden, d_weight = ctx.saved_tensors
        (grad,) = grad_outputs
        d_weight = multiply_by_scalar(d_weight, grad).to(ctx.weight_dtype)
        return None, multiply_by_scalar(d_hidden, grad), d_weight, None, None, None, None
