"""Sparse upcycling: a mixture of experts that begins as a trained dense model (Komatsuzaki et al., arXiv 2212.05055).

Every expert is a copy of the dense MLP. The weights of the chosen experts sum to one, so a mixture of equal experts
computes what the MLP computed, and the first loss is that of the dense model, up to the rounding of these weights and
of the sum over experts. The router starts at random, so that the copies get different tokens; only this makes them
diverge.

Experts may be narrower than the MLP by an integer factor G (granular upcycling, arXiv 2410.07524). The MLP is a sum
over its hidden channels, so it splits exactly into G parts. Experts `G i` to `G i + G - 1` are the parts of copy i and
share one row of router weights: their probabilities are equal, and with k a multiple of G, whole copies are chosen.
Each part then has only 1 / G of its copy's weight, so its down projection is multiplied by G.
"""

import re
from collections.abc import Mapping

import torch
from torch import Tensor

from deskside.config.model import ModelConfig
from deskside.model.transformer import Transformer
from deskside.ops.logical import logical_tensors
from deskside.ops.moe import ROUTER_BIAS
from deskside.utils.errors import UsageError

_EXPERT = re.compile(r"experts\.(\d+)\.")  # in the name of a tensor
# Options that may differ: those of the experts, those of the dense MLP that experts do not have, and those that change
# how weights are stored or trained, but not what the model computes.
_MAY_DIFFER = {
    "model_type",
    "num_experts",
    "num_experts_per_tok",
    "moe_intermediate_size",
    "norm_topk_prob",
    "router_aux_loss_coef",
    "router_z_loss_coef",
    "router_bias_update_rate",
    "scoring_func",
    "intermediate_size",
    "fused_qkv",
    "fused_gate_up",
    "initializer_range",
    "q_norm_init",
}


def check_upcycling(dense: ModelConfig, mixture: ModelConfig, source: str) -> None:
    """Raise UsageError unless `mixture` can begin as exactly the model `dense`, which was read from `source`."""
    if dense.num_experts:
        raise UsageError(
            f"--upcycle: {source} has {dense.num_experts} experts already; leave --upcycle out to train it further"
        )
    if not mixture.num_experts:
        raise UsageError(
            "--upcycle: a mixture of how many experts? add, for example, --model.num_experts 8 "
            "--model.num_experts_per_tok 2"
        )
    may_differ = _MAY_DIFFER | ({"max_position_embeddings"} if dense.position_embedding == "rope" else set())
    for key in ModelConfig.model_fields:
        if key not in may_differ and getattr(mixture, key) != getattr(dense, key):
            raise UsageError(
                f"model.{key}: {source} has {getattr(dense, key)}, the mixture {getattr(mixture, key)}; they must be "
                f"equal, or experts cannot be copies of the dense MLP"
            )
    if not mixture.norm_topk_prob:
        raise UsageError(
            "model.norm_topk_prob: the mixture starts as the dense model only if its experts' weights sum to one; "
            "use true"
        )
    if dense.intermediate_size % mixture.moe_intermediate_size:
        raise UsageError(
            f"model.moe_intermediate_size: the MLP of {source} has {dense.intermediate_size} channels, which experts "
            f"of {mixture.moe_intermediate_size} do not divide; use {dense.intermediate_size}, or a divisor"
        )
    parts = dense.intermediate_size // mixture.moe_intermediate_size
    for key in ("num_experts", "num_experts_per_tok"):
        if getattr(mixture, key) % parts:
            raise UsageError(
                f"model.{key}: an MLP of {source} becomes {parts} experts of {mixture.moe_intermediate_size} channels, "
                f"so this must be a multiple of {parts}, not {getattr(mixture, key)}"
            )


@torch.no_grad()
def upcycle(mixture: Transformer, dense: Mapping[str, Tensor]) -> None:
    """Set all weights of an initialized mixture of experts, in place. Its router keeps its initial weights.

    dense: the weights of the dense model by logical name (ops/logical.py). Its configuration and that of the mixture
    have passed `check_upcycling`.
    """
    width = mixture.config.moe_intermediate_size
    for tensor in logical_tensors(mixture):
        expert, dense_name = _EXPERT.search(tensor.name), _EXPERT.sub("", tensor.name)
        if tensor.name.endswith(".router.weight"):
            parts = dense[tensor.name.replace("router", "up_proj")].shape[0] // width
            tensor.view.copy_(tensor.view[::parts].repeat_interleave(parts, dim=0))
        elif tensor.name.endswith((ROUTER_BIAS, ".router.bias")):
            continue  # zero, as initialized
        elif expert is None or tensor.name.endswith("down_proj.bias"):
            # Every part adds the whole bias of the down projection, with its 1 / G of the copy's weight.
            tensor.view.copy_(dense[dense_name])
        else:
            whole = dense[dense_name]
            channels = 1 if tensor.name.endswith("down_proj.weight") else 0
            parts = whole.shape[channels] // width
            part = whole.narrow(channels, int(expert[1]) % parts * width, width)
            tensor.view.copy_(part * parts if channels else part)
