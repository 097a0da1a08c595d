"""The fused mixture-of-experts sublayer with a manual backward, as in fused_sublayers.py.

    forward    add + norm -> router, sort by expert -> gather -> product -> activation * gate * router's weight
               -> product -> sum by token
    backward   the same steps in reverse order

The down projection is linear, so the router's weight is applied before it, in the kernel of the gate. The rows of the
experts are gathered again in the backward instead of kept, because they take k times the memory of the norm's output.
The products are in BF16 in every recipe; weight gradients come out of them in BF16 and are added up in the parameter's
dtype.

Suffixes: see kernels/moe/reference.py.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from deskside.kernels import fused, moe
from deskside.kernels.moe import Routing
from deskside.ops.composite import RMSNorm
from deskside.ops.moe import MoESublayer
from deskside.precision.fused_sublayers import flatten_tokens, rms_norm
from deskside.precision.quantized_linear import ConvertedWeight


@dataclass(frozen=True)
class FusedMoE:
    """A mixture of experts and its cached weights in the activations' dtype: of the router and of the experts.

    With `recompute`, the backward recomputes the norm and the first product.
    """

    sublayer: MoESublayer
    router: ConvertedWeight
    gate_up: ConvertedWeight
    down: ConvertedWeight
    recompute: bool = False

    @cached_property
    def norm(self) -> RMSNorm:
        return rms_norm(self.sublayer.input.norm)

    @cached_property
    def gated(self) -> bool:
        return len(self.sublayer.mixture.experts.slices["gate_up_weight"]) == 2

    def weights(self, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
        """Return the weights of the router (E, D) and of the experts, (E, 2F, D) and (E, D, F), in `dtype`."""
        mixture = self.sublayer.mixture
        experts = mixture.experts
        pairs = (
            (self.router, mixture.router.weight),
            (self.gate_up, experts.gate_up_weight),
            (self.down, experts.down_weight),
        )
        router, gate_up, down = (cache.get(weight, dtype)[0].values for cache, weight in pairs)
        return router, gate_up, down

    @staticmethod
    def inner(normed_ND: Tensor, gate_up: Tensor, routing: Routing) -> Tensor:
        """Return the output of the experts' first product, (S, 2F), or (S, F) without a gate."""
        x_SD = moe.dispatch(normed_ND, routing.tokens_S)
        return moe.grouped_matmul(x_SD, gate_up, routing.ends_E, transpose=True)

    def __call__(self, residual_BTD: Tensor, delta_BTD: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        mixture = self.sublayer.mixture
        experts = mixture.experts
        weights = (self.norm.weight, mixture.router.weight, experts.gate_up_weight, experts.down_weight)
        residual_BTD, delta_BTD, statistics_2E = _MoE.apply(self, residual_BTD, delta_BTD, *weights)
        return residual_BTD, delta_BTD, statistics_2E


class _MoE(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, plan: FusedMoE, residual_BTD: Tensor, delta_BTD: Tensor, *weights: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """weights: of norm, router and experts. They are also in `plan`; as inputs, they get gradients."""
        shape, mixture = residual_BTD.shape, plan.sublayer.mixture
        residual, normed, rstd = fused.add_norm(
            flatten_tokens(residual_BTD), flatten_tokens(delta_BTD), plan.norm.weight, plan.norm.eps
        )
        assert isinstance(normed, Tensor)
        router, gate_up, down = plan.weights(normed.dtype)
        logits = normed @ router.T
        routing = moe.route(logits, mixture.experts_per_token, mixture.normalise)
        inner = plan.inner(normed, gate_up, routing)
        hidden = moe.weighted_gated(inner, routing.weights_S, mixture.experts.activation, plan.gated)
        y_SD = moe.grouped_matmul(hidden, down, routing.ends_E, transpose=True)
        del hidden
        delta = moe.combine(y_SD, routing.slots_Nk)
        ctx.plan, ctx.shape, ctx.routing = plan, shape, routing
        ctx.state = None if plan.recompute else (normed, inner)
        ctx.save_for_backward(residual, rstd, weights[0], logits)
        ctx.set_materialize_grads(False)
        # An alias: an output that `ctx` held as well would keep the graph alive for ever.
        return residual.view(shape), delta.view(shape), routing.statistics_2E.detach()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        plan: FusedMoE = ctx.plan
        routing: Routing = ctx.routing
        mixture = plan.sublayer.mixture
        grad_residual, grad_delta, grad_statistics = grads
        residual, rstd, norm_weight, logits = ctx.saved_tensors
        router, gate_up, down = plan.weights(residual.dtype)
        state, ctx.state = ctx.state, None
        if state is None:
            normed = fused.add_norm(residual, None, norm_weight, plan.norm.eps)[1]
            assert isinstance(normed, Tensor)
            inner = plan.inner(normed, gate_up, routing)
        else:
            normed, inner = state
        del state
        assert grad_delta is not None

        grad_y = moe.dispatch(flatten_tokens(grad_delta), routing.tokens_S)
        grad_hidden = moe.grouped_matmul(grad_y, down, routing.ends_E, transpose=False)
        grad_inner, grad_weights_S, hidden = moe.weighted_gated_backward(
            grad_hidden, inner, routing.weights_S, mixture.experts.activation, plan.gated
        )
        del grad_hidden, inner
        experts = mixture.experts
        grad_down = moe.grouped_weight_gradient(grad_y, hidden, routing.ends_E, experts.down_weight.dtype)
        del grad_y, hidden
        x_SD = moe.dispatch(normed, routing.tokens_S)
        grad_gate_up = moe.grouped_weight_gradient(
            grad_inner, x_SD, routing.ends_E, experts.gate_up_weight.dtype
        )
        del x_SD
        grad_x = moe.grouped_matmul(grad_inner, gate_up, routing.ends_E, transpose=False)
        del grad_inner

        grad_logits = moe.route_backward(grad_weights_S, grad_statistics, logits, routing, mixture.normalise)
        grad_router = (grad_logits.T @ normed).to(mixture.router.weight.dtype)
        grad_normed = moe.combine(grad_x, routing.slots_Nk, grad_logits @ router)
        if grad_residual is not None:
            grad_residual = flatten_tokens(grad_residual)
        grad, grad_norm = fused.add_norm_backward(grad_normed, residual, rstd, norm_weight, grad_residual)
        grad = grad.view(ctx.shape)
        return None, grad, grad, grad_norm.to(norm_weight.dtype), grad_router, grad_gate_up, grad_down
