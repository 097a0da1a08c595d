"""The fused mixture-of-experts sublayer with a manual backward, as in fused_sublayers.py.

    forward    add + norm -> router, sort by expert -> gather -> product -> activation * gate * router's weight
               -> product -> sum by token
    backward   the same steps in reverse order

The down projection is linear, so the router's weight is applied before it, in the kernel of the gate. The rows of the
experts are gathered again in the backward instead of kept, because they take k times the memory of the norm's output.
Router logits are in BF16 in every recipe. Weight gradients of BF16 products come out in BF16, and are added up in the
parameter's dtype. In FP8 and NVFP4, each expert's rows are padded with zeros to whole blocks.

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
from deskside.precision.expert_linear import ExpertLinear, Forms
from deskside.precision.fused_shared_expert import FusedSharedExpert
from deskside.precision.fused_sublayers import flatten_tokens, rms_norm
from deskside.precision.quantized_linear import ConvertedWeight
from deskside.precision.sorted_casts import gate, gate_backward, gather
from deskside.precision.sorted_operand import SortedRows


@dataclass(frozen=True)
class FusedMoE:
    """A mixture of experts: the router's cached weight, and the plans of the experts' two weights and shared expert.

    With `recompute`, the backward recomputes the norm and the first product.
    """

    sublayer: MoESublayer
    router: ConvertedWeight
    gate_up: ExpertLinear
    down: ExpertLinear
    shared_expert: FusedSharedExpert | None = None
    recompute: bool = False

    @cached_property
    def norm(self) -> RMSNorm:
        return rms_norm(self.sublayer.input.norm)

    @cached_property
    def gated(self) -> bool:
        return len(self.sublayer.mixture.experts.slices["gate_up_weight"]) == 2

    @cached_property
    def align(self) -> int:
        """The number that each expert's rows are padded to a multiple of."""
        return max(self.gate_up.align, self.down.align)

    def weights(self, dtype: torch.dtype) -> tuple[Tensor, Forms, Forms]:
        """Return the router's weight (E, D) in `dtype`, and the forms of the experts' weights."""
        router = self.router.get(self.sublayer.mixture.router.weight, dtype)[0].values
        return router, self.gate_up.weight(dtype), self.down.weight(dtype)

    def inner(self, normed_ND: Tensor, gate_up: Forms, routing: Routing) -> tuple[Tensor, Tensor | None]:
        """Return the output of the experts' first product, (S, 2F), or (S, F) without a gate.

        The second result is the scale of each of its input rows in FP8, (S,), which the weight gradient uses.
        """
        x = gather(normed_ND, routing, self.gate_up.recipe.output.left)
        scale_S = None if x.cast is None else x.cast.scale
        return self.gate_up.output(x, gate_up, normed_ND.dtype), scale_S

    def __call__(self, residual_BTD: Tensor, delta_BTD: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        mixture = self.sublayer.mixture
        experts = mixture.experts
        weights = [self.norm.weight, mixture.router.weight, experts.gate_up_weight, experts.down_weight]
        if self.shared_expert is not None:
            weights += [linear.weight for linear in self.shared_expert.linears]
        residual_BTD, delta_BTD, statistics_R = _MoE.apply(self, residual_BTD, delta_BTD, *weights)
        return residual_BTD, delta_BTD, statistics_R


class _MoE(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, plan: FusedMoE, residual_BTD: Tensor, delta_BTD: Tensor, *weights: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """weights: of norm, router, experts and shared expert, which are also in `plan`; inputs get gradients."""
        shape, mixture = residual_BTD.shape, plan.sublayer.mixture
        residual, normed, rstd = fused.add_norm(
            flatten_tokens(residual_BTD), flatten_tokens(delta_BTD), plan.norm.weight, plan.norm.eps
        )
        assert isinstance(normed, Tensor)
        router, gate_up, down = plan.weights(normed.dtype)
        logits = normed @ router.T
        routing = moe.route(
            logits,
            mixture.experts_per_token,
            mixture.normalise,
            plan.align,
            mixture.sigmoid,
            mixture.e_score_correction_bias,
        )
        if mixture.choices_observer is not None:
            mixture.choices_observer(routing.experts_Nk)
        inner, scale_S = plan.inner(normed, gate_up, routing)
        hidden = gate(inner, routing, mixture.experts.activation, plan.gated, plan.down.recipe.output.left)
        y_SD = plan.down.output(hidden, down, normed.dtype)
        del hidden
        shared, shared_inner, shared_out = plan.shared_expert, None, None
        if shared is not None:
            shared_inner = shared.inner(normed)
            shared_out = shared.output(normed, shared_inner)
        delta = moe.combine(y_SD, routing.slots_Nk, shared_out)
        ctx.plan, ctx.shape, ctx.routing = plan, shape, routing
        ctx.state = None if plan.recompute else (normed, inner, scale_S, shared_inner)
        ctx.save_for_backward(residual, rstd, weights[0], logits)
        ctx.set_materialize_grads(False)
        # Detached, because an output that `ctx` also holds would keep the graph alive forever.
        return residual.view(shape), delta.view(shape), routing.statistics_R.detach()

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
            inner, scale_S = plan.inner(normed, gate_up, routing)
            shared_inner = None if plan.shared_expert is None else plan.shared_expert.inner(normed)
        else:
            normed, inner, scale_S, shared_inner = state
        del state
        assert grad_delta is not None

        dtype = residual.dtype
        read = plan.down.recipe.input_gradient.left
        grad_y = gather(flatten_tokens(grad_delta), routing, read)
        grad_hidden = plan.down.input_gradient(grad_y, down, dtype)
        read = plan.gate_up.recipe.input_gradient.left
        grad_inner, grad_weights_S, hidden = gate_backward(
            grad_hidden, inner, routing, mixture.experts.activation, plan.gated, read
        )
        del grad_hidden, inner
        grad_down = plan.down.weight_gradient(grad_y, hidden)
        del grad_y, hidden
        x = SortedRows(normed, routing, scale_S=scale_S)
        grad_gate_up = plan.gate_up.weight_gradient(grad_inner, x)
        grad_x = plan.gate_up.input_gradient(grad_inner, gate_up, dtype)
        del grad_inner

        grad_logits = moe.route_backward(
            grad_weights_S, grad_statistics, logits, routing, mixture.normalise, mixture.sigmoid
        )
        grad_router = (grad_logits.T @ normed).to(mixture.router.weight.dtype)
        grad_others = grad_logits @ router
        grads_shared: tuple[Tensor, ...] = ()
        if plan.shared_expert is not None:
            assert shared_inner is not None
            grad_shared, grads_shared = plan.shared_expert.backward(
                flatten_tokens(grad_delta), normed, shared_inner
            )
            grad_others = grad_others + grad_shared
        grad_normed = moe.combine(grad_x, routing.slots_Nk, grad_others)
        if grad_residual is not None:
            grad_residual = flatten_tokens(grad_residual)
        grad, grad_norm = fused.add_norm_backward(grad_normed, residual, rstd, norm_weight, grad_residual)
        grad = grad.view(ctx.shape)
        grads_experts = grad_router, grad_gate_up, grad_down, *grads_shared
        return None, grad, grad, grad_norm.to(norm_weight.dtype), *grads_experts
