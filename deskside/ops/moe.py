"""A mixture-of-experts MLP exactly as Qwen3-MoE computes it: softmax router, top-k, SwiGLU experts, no token dropped.

Tokens are sorted by expert, so that each expert's tokens are contiguous rows; one grouped product then computes
all experts. The load-balancing loss is that of Switch Transformer (Fedus et al. 2021, arXiv 2101.03961,
eq. 4-6), computed over all layers together as in transformers; each layer returns the two sums that it needs.
"""

import torch
from torch import Tensor, nn

from deskside.kernels.functional import activate, at_least_float32
from deskside.ops.composite import Activation, AddNormLinear, Sublayer
from deskside.ops.grouped import grouped_linear
from deskside.ops.linear import Linear, make_slices


class Experts(nn.Module):
    """E MLPs of the same shape. gate_up_weight: (E, 2F, D), or (E, F, D) without a gate; down_weight: (E, D, F)."""

    def __init__(
        self, experts: int, hidden_size: int, intermediate_size: int, activation: Activation, gated: bool
    ):
        super().__init__()
        self.activation = activation
        names = ("gate_proj", "up_proj") if gated else ("up_proj",)
        self.slices = {
            "gate_up_weight": make_slices([(name, intermediate_size) for name in names]),
            "down_weight": make_slices([("down_proj", hidden_size)]),
        }
        self.shapes = {
            "gate_up_weight": (experts, len(names) * intermediate_size, hidden_size),
            "down_weight": (experts, hidden_size, intermediate_size),
        }
        self.gate_up_weight = nn.Parameter(torch.empty(self.shapes["gate_up_weight"]))
        self.down_weight = nn.Parameter(torch.empty(self.shapes["down_weight"]))

    def forward(self, x_ND: Tensor, counts_E: Tensor) -> Tensor:
        """(N, D) -> (N, D). The rows are sorted by expert; counts_E: number of rows per expert, int64."""
        ends_E = counts_E.cumsum(0).to(torch.int32)
        inner = self.product("gate_up_weight", x_ND, ends_E)
        hidden = activate(self.activation, *inner.chunk(len(self.slices["gate_up_weight"]), dim=-1))
        return self.product("down_weight", hidden, ends_E)

    def product(self, name: str, x: Tensor, ends_E: Tensor) -> Tensor:
        """Return the product of the sorted rows with the weight of that name, as `grouped_linear` does."""
        return grouped_linear(x, getattr(self, name).to(x.dtype), ends_E)


class MixtureOfExperts(nn.Module):
    """Router and experts. (B, T, D) -> (B, T, D) and the router statistics (2, E) of the load-balancing loss."""

    transparent = True

    def __init__(self, router: Linear, experts: Experts, experts_per_token: int, normalise: bool):
        super().__init__()
        self.router = router
        self.experts = experts
        self.experts_per_token = experts_per_token
        self.normalise = normalise

    def forward(self, x_BTD: Tensor) -> tuple[Tensor, Tensor]:
        x_ND = x_BTD.flatten(0, 1)
        logits_NE = self.router(x_ND)
        probabilities_NE = torch.softmax(logits_NE.to(at_least_float32(logits_NE)), dim=-1)
        weights_Nk, chosen_Nk = probabilities_NE.topk(self.experts_per_token, dim=-1)
        if self.normalise:
            weights_Nk = weights_Nk / weights_Nk.sum(dim=-1, keepdim=True)

        chosen_S = chosen_Nk.flatten()  # (S,), S = N * k: the chosen experts of all tokens
        counts_E = torch.zeros(probabilities_NE.shape[1], dtype=torch.int64, device=x_ND.device)
        counts_E = counts_E.scatter_add(0, chosen_S, torch.ones_like(chosen_S))
        order_S = chosen_S.argsort(stable=True)
        token_S = order_S // self.experts_per_token
        out_SD = self.experts(x_ND[token_S], counts_E)
        out_SD = out_SD * weights_Nk.flatten()[order_S, None].to(out_SD.dtype)
        out_ND = torch.zeros_like(x_ND).index_add(0, token_S, out_SD)
        return out_ND.view_as(x_BTD), torch.stack(
            (counts_E.to(probabilities_NE.dtype), probabilities_NE.sum(dim=0))
        )


class MoESublayer(Sublayer):
    """The MLP half of a block with experts: (residual, delta) -> (residual, delta, router statistics (2, E)).

    `input` has no projections: router and experts read the norm's output.
    """

    input: AddNormLinear
    mixture: MixtureOfExperts


def load_balancing_loss(statistics_L2E: Tensor, tokens: int) -> Tensor:
    """Return E * sum over experts of (share of tokens that chose it) * (its mean probability).

    A perfectly even router with k experts per token has k. statistics_L2E: the router statistics of the MoE layers.
    tokens: number of tokens per layer.
    """
    layers, _, experts = statistics_L2E.shape
    share_E, mean_E = (statistics_L2E.sum(dim=0) / (layers * tokens)).unbind()
    return experts * (share_E * mean_E).sum()
