"""Work of the optimizer after the backward: the update, EMA-Nesterov, and the average of the weights.

Muon's iteration is Newton-Schulz on the smaller side of each logical matrix (Jordan et al. 2024).
"""

from functools import lru_cache

from deskside.budget.operators.operator import Operator
from deskside.budget.replicas import update_shares
from deskside.budget.shape import Shape
from deskside.budget.sizes import Sizes
from deskside.budget.states import ADAMW_STATE_BYTES, MUON_STATE_BYTES, average_bytes, trained_weights
from deskside.budget.step_spec import QUANTIZED_STATES

# Bytes per weight with float32 states, by (AdamW, Muon). AdamW reads weight, gradient (twice because of clipping) and
# two moments, and writes weight and moments. Muon's number was fitted.
COMPILED_UPDATE_BYTES = (32.0, 60.0)
# Gradients are read for their norm (4) and scaled (8). Then AdamW moves 28 bytes; Muon moves 26, and 6 to scale.
FUSED_UPDATE_BYTES = (40.0, 44.0)
# Bytes per weight that an update saves if weight and gradient are in bfloat16: half of what it reads of the
# gradient, for the norm and the update, and of the weight, which it reads and writes.
BFLOAT16_ADAMW_SAVING, BFLOAT16_MUON_SAVING = 12, 11
RESIDUAL_TRAFFIC = 2  # more per weight in 24 bits, whose residual is read and written; not measured
ROW_SUM_BYTES = 6  # per weight: the weight in float32 and its update in 16 bits; not measured
# Finding the 8-bit codes of two states takes as long as this many bytes of traffic per weight. Measured on an H200:
# 23 ms for 1.29 billion float32 weights, 38 to 42 for 3.03 billion in bfloat16, clipping included.
QUANTIZED_ADAMW_WORK = 28
# More traffic per weight of Muon with momentum in 8 bits: at most half of that work, and the direction, which replaces
# a float32 gradient and is copied to the stack. Not measured.
QUANTIZED_MUON_WORK = QUANTIZED_ADAMW_WORK / 2 + 8
NEWTON_SCHULZ_STEPS = 5


@lru_cache(maxsize=512)
def newton_schulz_flops(shape: Shape) -> float:
    """Return the FLOPs of Muon's Newton-Schulz iterations in one optimizer step, over all matrices of the blocks."""
    D = shape.hidden_size
    q, kv = shape.num_attention_heads * shape.head_dim, shape.num_key_value_heads * shape.head_dim
    matrices = [(q, D), (kv, D), (kv, D), (D, q)]
    mlps, width = 1, shape.intermediate_size
    if shape.num_experts:
        mlps, width = shape.num_experts, shape.moe_intermediate_size
        matrices.append((shape.num_experts, D))
    if shape.num_experts and (shared := shape.shared_expert_intermediate_size):
        matrices += [(shared, D)] * (2 if shape.gated_mlp else 1) + [(D, shared)]
    matrices += [(width, D)] * (mlps * (2 if shape.gated_mlp else 1)) + [(D, width)] * mlps
    flops = 0.0
    for rows, columns in matrices:
        long, short = max(rows, columns), min(rows, columns)
        flops += NEWTON_SCHULZ_STEPS * (4.0 * long * short**2 + 2.0 * short**3)
    return flops * shape.num_hidden_layers


def optimizer_update(s: Sizes) -> list[Operator]:
    """Return the optimizer update. Sharded AdamW updates its shard. Replicas share Muon's iteration; with a sharded
    model, every GPU computes all of it."""
    spec = s.spec
    adamw, muon = FUSED_UPDATE_BYTES if spec.fused else COMPILED_UPDATE_BYTES
    # States below 32 bits are smaller to read and to write.
    adamw -= 2 * (ADAMW_STATE_BYTES["float32"] - ADAMW_STATE_BYTES[spec.states])
    muon -= 2 * (MUON_STATE_BYTES["float32"] - MUON_STATE_BYTES[spec.states])
    if spec.states in QUANTIZED_STATES:  # 4 bits: not measured
        adamw, muon = adamw + QUANTIZED_ADAMW_WORK, muon + QUANTIZED_MUON_WORK
    if spec.weights != "float32":
        adamw, muon = adamw - BFLOAT16_ADAMW_SAVING, muon - BFLOAT16_MUON_SAVING
    if spec.weights == "24bit":
        adamw, muon = adamw + RESIDUAL_TRAFFIC, muon + RESIDUAL_TRAFFIC
    if spec.row_sums:
        muon += ROW_SUM_BYTES
    ema = _ema_nesterov(s)
    if spec.optimizer == "adamw":
        return [Operator("AdamW", "optimizer_traffic", adamw * trained_weights(s) / s.shards), *ema]
    iteration = s.leaf(
        f"{NEWTON_SCHULZ_STEPS} x (4 x long x short^2 + 2 x short^3), summed over all matrices",
        newton_schulz_flops(s.shape),
    )
    others, shares = trained_weights(s) - s.block_weights, update_shares(spec)
    return [
        Operator("Muon, Newton-Schulz", "optimizer_matmul", iteration / shares),
        Operator("Muon, short kernels", "muon", 1.0),
        Operator("Muon", "optimizer_traffic", muon * s.block_weights / shares),
        Operator("AdamW", "optimizer_traffic", adamw * others / s.shards),
        *ema,
    ]


def _ema_nesterov(s: Sizes) -> list[Operator]:
    """Return the interpolations of EMA-Nesterov: weights and their average are read and one of them is written."""
    if not s.spec.ema_updates:
        return []
    traffic = 12.0 * trained_weights(s) / s.shards * s.spec.ema_updates
    return [Operator("EMA-Nesterov", "optimizer_traffic", traffic)]


def weight_average(s: Sizes) -> list[Operator]:
    """Return the update of the average: weights and average are read and the average is written, or streamed."""
    spec, size = s.spec, average_bytes(s)
    if spec.average == "none":
        return []
    if spec.average == "host":
        return [Operator("average, up and down at once", "offload", size * spec.averages_per_step)]
    traffic = (spec.weight_bytes * trained_weights(s) / s.shards + 2 * size) * spec.averages_per_step
    return [Operator("average", "optimizer_traffic", traffic)]
