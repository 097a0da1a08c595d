"""The shared expert of the fused mixture-of-experts sublayer, with a manual backward.

It is computed like an expert that every token chooses, with its gate as the weight, or with the weight 1. Its products
are in BF16 in every recipe.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from deskside.kernels import moe
from deskside.kernels.functional import at_least_float32
from deskside.ops.linear import Linear
from deskside.ops.shared_expert import SharedExpert
from deskside.precision.quantized_linear import ConvertedWeight


@dataclass(frozen=True)
class FusedSharedExpert:
    """A shared expert and its cached weights: of the input projection, the output projection and the token gate."""

    expert: SharedExpert
    caches: tuple[ConvertedWeight, ...]

    @property
    def linears(self) -> tuple[Linear, ...]:
        """The projections: input, output and, if there is one, token gate."""
        linears = (self.expert.input, self.expert.output, self.expert.token_gate)
        return tuple(linear for linear in linears if linear is not None)

    @property
    def gated(self) -> bool:
        """True if the activation is multiplied by an up projection."""
        return len(self.expert.input.slices) == 2

    def weights(self, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return the weights of `linears` in `dtype`; None for a missing token gate."""
        pairs = zip(self.caches, self.linears, strict=True)
        first, second, *gate = (cache.get(linear.weight, dtype)[0].values for cache, linear in pairs)
        return first, second, gate[0] if gate else None

    def inner(self, normed_ND: Tensor) -> Tensor:
        """Return the output of the input projection."""
        return normed_ND @ self.weights(normed_ND.dtype)[0].T

    def output(self, normed_ND: Tensor, inner: Tensor) -> Tensor:
        """Return the output of the expert (N, D)."""
        _, down, gate = self.weights(normed_ND.dtype)
        weights_N = _token_weights(normed_ND, gate)
        return moe.weighted_gated(inner, weights_N, self.expert.activation, self.gated) @ down.T

    def backward(
        self, grad_ND: Tensor, normed_ND: Tensor, inner: Tensor
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Return the gradient of the input (N, D) and those of the weights of `linears`, in their dtypes."""
        up, down, gate = self.weights(normed_ND.dtype)
        weights_N = _token_weights(normed_ND, gate)
        grad_inner, grad_weights_N, hidden = moe.weighted_gated_backward(
            grad_ND @ down, inner, weights_N, self.expert.activation, self.gated
        )
        grads = [grad_inner.T @ normed_ND, grad_ND.T @ hidden]
        grad_normed = grad_inner @ up
        if gate is not None:
            grad_logits_N1 = (grad_weights_N * weights_N * (1 - weights_N)).to(normed_ND.dtype)[:, None]
            grads.append(grad_logits_N1.T @ normed_ND)
            grad_normed = grad_normed + grad_logits_N1 * gate
        dtypes = [linear.weight.dtype for linear in self.linears]
        return grad_normed, tuple(grad.to(dtype) for grad, dtype in zip(grads, dtypes, strict=True))


def _token_weights(normed_ND: Tensor, gate: Tensor | None) -> Tensor:
    """Return the weight of each token (N,), float32 (float64 for float64 inputs)."""
    dtype = at_least_float32(normed_ND)
    if gate is None:
        return torch.ones(len(normed_ND), dtype=dtype, device=normed_ND.device)
    return torch.sigmoid((normed_ND @ gate.T).flatten().to(dtype))
