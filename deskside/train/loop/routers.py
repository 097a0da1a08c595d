"""The routers of a mixture of experts in a training step: their losses, the updates of their biases, their metrics.

The statistics that each layer returns are added up over passes and processes together with the loss, on the device. The
bias updates are computed from these sums, so that replicas stay identical, and the metrics are read with the loss, so
that the host waits for nothing else. Counts are exact in float32 up to 2^24 choices of an expert in a step.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from deskside.model.transformer import Transformer
from deskside.ops.moe import MixtureOfExperts, RouterStatistics, update_biases

LAYER_METRICS_EVERY = 10  # steps; the rows of metrics.jsonl would be long otherwise


class Routers:
    """The routers of a model. Does nothing for a model without experts."""

    def __init__(self, model: Transformer):
        self.config = model.config
        mixtures = [module for module in model.modules() if isinstance(module, MixtureOfExperts)]
        self.layers, self.row = len(mixtures), 2 * self.config.num_experts + 2
        biases = [mixture.e_score_correction_bias for mixture in mixtures]
        self.biases = [bias for bias in biases if bias is not None and bias.requires_grad]

    @property
    def num_sums(self) -> int:
        """The number of sums of a step: load-balancing loss, z-loss, tokens, and the statistics of all layers."""
        return 3 + self.layers * self.row if self.layers else 0

    def loss(self, statistics: RouterStatistics, share: float, sums: Tensor) -> Tensor:
        """Return the weighted losses of the routers in a pass with this share of the step, and add to the sums."""
        balance, z_loss = statistics.load_balancing_loss(), statistics.z_loss()
        sums[:2] += share * torch.stack((balance, z_loss)).detach()
        sums[2] += statistics.tokens
        sums[3:] += statistics.values_LR.detach().flatten()
        config = self.config
        return share * (config.router_aux_loss_coef * balance + config.router_z_loss_coef * z_loss)

    def update_biases(self, sums: Tensor, skip: Tensor) -> None:
        """Update the biases after a step, from its sums over all processes. skip: 1.0 leaves them unchanged."""
        if self.biases and self.config.router_bias_update_rate:
            counts_LE = sums[3:].view(self.layers, self.row)[:, : self.config.num_experts]
            update_biases(self.biases, counts_LE, self.config.router_bias_update_rate * (1 - skip))

    def metrics(self, sums: Sequence[float], by_layer: bool) -> dict[str, Any]:
        """Return the entries of metrics.jsonl for the sums of a step.

        load_imbalance: the largest load of an expert over the mean load, averaged over the layers; 1 is even.
        router_entropy: averaged over the layers, in nats. by_layer: add "experts", which has lists by layer. A load is
        the share of a layer's choices. dropped_tokens: choices of a layer that no expert computed, which has to be 0.
        """
        if not self.layers:
            return {}
        values_LR = torch.tensor(sums[3:], dtype=torch.float64).view(self.layers, self.row)
        statistics = RouterStatistics(values_LR, round(sums[2]))
        computed_L = statistics.counts_LE.sum(dim=1)
        load_LE, entropy_L = statistics.counts_LE / computed_L[:, None], statistics.entropy_L
        largest_L, smallest_L = load_LE.amax(dim=1), load_LE.amin(dim=1)
        metrics: dict[str, Any] = {
            "router_balance_loss": sums[0],
            "router_z_loss": sums[1],
            "router_entropy": float(entropy_L.mean()),
            "load_imbalance": float(largest_L.mean()) * self.config.num_experts,
        }
        if by_layer:
            dropped_L = round(sums[2]) * self.config.num_experts_per_tok - computed_L
            metrics["experts"] = {
                "load": [[_rounded(load) for load in layer] for layer in load_LE.tolist()],
                "entropy": [_rounded(entropy) for entropy in entropy_L.tolist()],
                "largest_load": [_rounded(load) for load in largest_L.tolist()],
                "smallest_load": [_rounded(load) for load in smallest_L.tolist()],
                "dropped_tokens": [round(dropped) for dropped in dropped_L.tolist()],
            }
        return metrics


def _rounded(number: float) -> float | None:
    """Return a number with six decimals; None for NaN and infinity, which JSON does not have."""
    return round(number, 6) if math.isfinite(number) else None
