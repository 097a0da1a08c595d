"""A mixture-of-experts MLP as in Qwen3-MoE or dots.llm1: router, top-k, SwiGLU experts, no token dropped.

Qwen3-MoE's router is a softmax. That of dots.llm1 is DeepSeek-V3's: sigmoids, and a bias for choosing.

Tokens are sorted by expert, so that each expert's tokens are contiguous rows; one grouped product then computes
all experts. The load-balancing loss is that of Switch Transformer (Fedus et al. 2021, arXiv 2101.03961,
eq. 4-6), the mean over the layers; each layer returns the sums that it needs.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from deskside.kernels.functional import activate, at_least_float32
from deskside.kernels.moe.reference import TINY, router_scores, router_statistics
from deskside.ops.composite import Activation, AddNormLinear, Sublayer
from deskside.ops.grouped import grouped_linear
from deskside.ops.linear import Linear, make_slices
from deskside.ops.shared_expert import SharedExpert


class Experts(nn.Module):
    """E MLPs of the same shape. gate_up_weight: (E, 2F, D), or (E, F, D) without a gate; down_weight: (E, D, F).

    gate_up_bias, down_bias: (E * 2F,) and (E * D,), those of all experts one after another, or None.
    """

    def __init__(
        self,
        experts: int,
        hidden_size: int,
        intermediate_size: int,
        activation: Activation,
        gated: bool,
        bias: bool = False,
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
        self.gate_up_bias: nn.Parameter | None = None
        self.down_bias: nn.Parameter | None = None
        if bias:
            gate_up_rows, down_rows = (shape[1] for shape in self.shapes.values())
            self.gate_up_bias = nn.Parameter(torch.empty(experts * gate_up_rows))
            self.down_bias = nn.Parameter(torch.empty(experts * down_rows))

    def forward(self, x_ND: Tensor, counts_E: Tensor) -> Tensor:
        """(N, D) -> (N, D). The rows are sorted by expert; counts_E: number of rows per expert, int64."""
        ends_E = counts_E.cumsum(0).to(torch.int32)
        inner = _add_bias(self.product("gate_up_weight", x_ND, ends_E), self.gate_up_bias, ends_E)
        hidden = activate(self.activation, *inner.chunk(len(self.slices["gate_up_weight"]), dim=-1))
        return _add_bias(self.product("down_weight", hidden, ends_E), self.down_bias, ends_E)

    def product(self, name: str, x: Tensor, ends_E: Tensor) -> Tensor:
        """Return the product of the sorted rows with the weight of that name, as `grouped_linear` does."""
        return grouped_linear(x, getattr(self, name).to(x.dtype), ends_E)


def _add_bias(y_NR: Tensor, bias: Tensor | None, ends_E: Tensor) -> Tensor:
    """Add to each row the bias of its expert. The rows are sorted; ends_E: where those of each expert end."""
    if bias is None:
        return y_NR
    expert_N = torch.searchsorted(ends_E, torch.arange(len(y_NR), device=y_NR.device), right=True)
    # Rows after the last expert's, if any, are padding.
    return y_NR + bias.view(len(ends_E), -1)[expert_N.clamp(max=len(ends_E) - 1)].to(y_NR.dtype)


ROUTER_BIAS = "e_score_correction_bias"  # attribute of `MixtureOfExperts`; transformers' name
# Small projections that weigh experts. They stay in 16 or 32 bits, because rounding would change the choices.
ROUTING_PROJECTIONS = ("router", "token_gate")


class MixtureOfExperts(nn.Module):
    """Router and experts. (B, T, D) -> (B, T, D) and the statistics of the router (R,), see `router_statistics`.

    shared_expert: its output is added to that of the chosen experts; None if there is none.
    sigmoid: the router's scores are sigmoids, to which a bias is added for choosing (DeepSeek-V3, arXiv 2412.19437).
    The bias has no gradient: `update_biases` balances the experts with it after each step. `choices_observer`, set from
    outside, is called with the chosen experts (N, k) of every forward pass.
    """

    transparent = True
    without_gradient = (ROUTER_BIAS,)

    def __init__(
        self,
        router: Linear,
        experts: Experts,
        experts_per_token: int,
        normalise: bool,
        sigmoid: bool = False,
        shared_expert: SharedExpert | None = None,
    ):
        super().__init__()
        self.router = router
        self.experts = experts
        self.shared_expert = shared_expert
        self.experts_per_token = experts_per_token
        self.normalise = normalise
        self.sigmoid = sigmoid
        self.choices_observer: Callable[[Tensor], None] | None = None
        self.e_score_correction_bias: nn.Parameter | None = None
        if sigmoid:
            bias_E = torch.empty(len(experts.down_weight), dtype=torch.float32)
            self.e_score_correction_bias = nn.Parameter(bias_E)

    def forward(self, x_BTD: Tensor) -> tuple[Tensor, Tensor]:
        x_ND = x_BTD.flatten(0, 1)
        logits_NE = self.router(x_ND)
        logits_NE = logits_NE.to(at_least_float32(logits_NE))
        scores_NE, probabilities_NE = router_scores(logits_NE, self.sigmoid)
        biased_NE = scores_NE.detach()
        if self.e_score_correction_bias is not None:
            biased_NE = biased_NE + self.e_score_correction_bias.detach()
        chosen_Nk = biased_NE.topk(self.experts_per_token, dim=-1).indices
        if self.choices_observer is not None:
            self.choices_observer(chosen_Nk)
        weights_Nk = scores_NE.gather(1, chosen_Nk)
        if self.normalise:
            weights_Nk = weights_Nk / (weights_Nk.sum(dim=-1, keepdim=True) + (TINY if self.sigmoid else 0.0))

        chosen_S = chosen_Nk.flatten()  # (S,), S = N * k: the chosen experts of all tokens
        counts_E = torch.zeros(scores_NE.shape[1], dtype=torch.int64, device=x_ND.device)
        counts_E = counts_E.scatter_add(0, chosen_S, torch.ones_like(chosen_S))
        order_S = chosen_S.argsort(stable=True)
        token_S = order_S // self.experts_per_token
        out_SD = self.experts(x_ND[token_S], counts_E)
        out_SD = out_SD * weights_Nk.flatten()[order_S, None].to(out_SD.dtype)
        out_ND = torch.zeros_like(x_ND).index_add(0, token_S, out_SD)
        if self.shared_expert is not None:
            out_ND = out_ND + self.shared_expert(x_ND)
        return out_ND.view_as(x_BTD), router_statistics(logits_NE, probabilities_NE, counts_E)


class MoESublayer(Sublayer):
    """The MLP half of a block with experts: (residual, delta) -> (residual, delta, router statistics (R,)).

    `input` has no projections: router and experts read the norm's output.
    """

    input: AddNormLinear
    mixture: MixtureOfExperts


class RouterStatistics(NamedTuple):
    """The statistics of a pass's routers (see `router_statistics`), or their sum over passes.

    values_LR: (L, R) for L layers with E experts each. tokens: tokens per layer.
    """

    values_LR: Tensor
    tokens: int

    @property
    def experts(self) -> int:
        """The number of experts E of a layer."""
        return self.values_LR.shape[1] // 2 - 1

    @property
    def counts_LE(self) -> Tensor:
        """The number of choices of each expert."""
        return self.values_LR[:, : self.experts]

    @property
    def entropy_L(self) -> Tensor:
        """The mean entropy of a token's probabilities, in nats; log(E) if they are even."""
        return self.values_LR[:, -2] / self.tokens

    def load_balancing_loss(self) -> Tensor:
        """Return E * sum over experts of (share of tokens that chose it) * (its mean probability), mean over layers.

        A perfectly even router with k experts per token has k. transformers adds up shares and probabilities of all
        layers before it multiplies them. That loss is also k if every layer uses its own k experts and leaves the
        others idle, and routers do collapse so.
        """
        experts, mean_LR = self.experts, self.values_LR / self.tokens
        return experts * (mean_LR[:, :experts] * mean_LR[:, experts : 2 * experts]).sum(dim=1).mean()

    def z_loss(self) -> Tensor:
        """Return the router z-loss: the square of log(sum(exp(logits))), mean over tokens and layers."""
        return self.values_LR[:, -1].mean() / self.tokens


@torch.no_grad()
def update_biases(biases: Sequence[Tensor], counts_LE: Tensor, rate: float | Tensor) -> None:
    """Raise the biases of experts with fewer choices than the mean of their layer by `rate`, and lower those with more.

    Auxiliary-loss-free balancing (arXiv 2408.15664, algorithm 1). biases: one (E,) per layer. rate: a number, or a
    tensor with one element.
    """
    updates_LE = torch.sign(counts_LE.mean(dim=1, keepdim=True) - counts_LE) * rate
    torch._foreach_add_(list(biases), list(updates_LE.unbind()))
