"""Which sublayers the fused kernels cover.

The planner decides this from a configuration, `precision/apply.py` and `engine/fused.py` from the modules of a model.
All three ask the same function, so a kernel that learns a new case changes one place.
"""

from deskside.config.model import ModelConfig


def uncovered_reason(
    *,
    rmsnorm_first: bool,
    num_projections: int,
    bias: bool = False,
    adapters: bool = False,
    head_dim: int = 1,
) -> str | None:
    """Return why the fused kernels do not cover a sublayer, or None if they do.

    Args:
        rmsnorm_first: The sublayer starts with an RMSNorm whose output only its projections read.
        num_projections: Separate weights that read the norm's output. Fused QKV and fused gate/up are one each.
        bias: A projection has a bias.
        adapters: The weights are frozen and adapters train beside them.
        head_dim: Channels per head of an attention sublayer. The kernel of QK-norm and RoPE holds one head in a
            block whose size must be a power of two.
    """
    if not rmsnorm_first:
        return "its norm is not RMSNorm before the projections"
    if num_projections != 1:
        return "its projections are not fused"
    if bias:
        return "its projections have a bias"
    if adapters:
        return "its weights are frozen, with adapters beside them"
    if head_dim & (head_dim - 1):
        return f"its head_dim {head_dim} is not a power of two"
    return None


def covers_model(model: ModelConfig, adapters: bool = False) -> bool:
    """Return whether the fused kernels cover every sublayer of a model for training. They have no experts."""
    rmsnorm_first = model.norm == "rmsnorm" and model.norm_position == "pre"
    attention = uncovered_reason(
        rmsnorm_first=rmsnorm_first,
        num_projections=1 if model.fused_qkv else 3,
        bias=model.attention_bias,
        adapters=adapters,
        head_dim=model.head_dim,
    )
    mlp = uncovered_reason(
        rmsnorm_first=rmsnorm_first,
        num_projections=1 if model.fused_gate_up or not model.gated_mlp else 2,
        bias=model.mlp_bias,
        adapters=adapters,
    )
    return attention is None and mlp is None and not model.num_experts
