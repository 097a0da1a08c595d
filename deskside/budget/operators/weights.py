"""Memory traffic of the weights in forward and backward passes: casts, and the accumulation of gradients.

A weight is cast once in the forward pass, and its gradient is cast and accumulated in float32: 24 bytes per weight and
pass. If BF16 weights are cached and the products accumulate gradients themselves, this happens only once per step. The
gradients of experts leave their products in 16 bits and are converted and added up by each pass: 18 bytes per float32
weight. A quantized frozen weight is read and written dequantized for each product.
"""

from deskside.budget.adapters import block_bytes
from deskside.budget.operators.operator import Operator
from deskside.budget.sizes import Sizes
from deskside.budget.states import trained_weights

WEIGHT_BYTES = 24  # per weight and pass: cast, gradient cast and accumulation
BFLOAT16_SUM_BYTES = 6  # per bfloat16 weight and pass but the first, whose gradient is not added to a sum
EXPERT_GRADIENT_BYTES = 18  # per float32 expert weight and pass


def weight_casts(s: Sizes) -> list[Operator]:
    """Return the casts of weights and the accumulation of their gradients. Quantized frozen weights are dequantized
    for each product."""
    spec, adapter = s.spec, s.spec.adapter
    if adapter is None:
        if spec.weights != "float32":
            return [Operator("weights", "weights", float(BFLOAT16_SUM_BYTES) * s.parameters * (s.passes - 1))]
        # With cached weights there is one cast per step, and the products accumulate gradients themselves.
        in_place = spec.copies == "step" and spec.precision == "bf16"
        casts = [
            Operator("weights", "weights", float(WEIGHT_BYTES) * s.parameters * (1 if in_place else s.passes))
        ]
        if s.shape.num_experts and spec.fused and in_place:
            experts = s.block_weights - s.layers * s.attention_weights  # and the small router
            amount = float(EXPERT_GRADIENT_BYTES) * experts * s.passes
            casts.append(Operator("gradients of experts", "weights", amount))
        return casts
    operators = [Operator("weights", "weights", float(WEIGHT_BYTES) * trained_weights(s) * s.passes)]
    if adapter.base != "bf16":
        uses = 2 if spec.activation_checkpointing == "none" else 3  # forward, backward, recomputed forward
        quantized_bytes = s.leaf(f"bytes of the blocks in {adapter.base}", block_bytes(s.shape, adapter))
        per_use = quantized_bytes + 2.0 * s.block_weights
        operators.append(Operator("dequantized weights", "weights", uses * per_use * s.passes))
    return operators


def chunk_sums(s: Sizes) -> list[Operator]:
    """Return the traffic of an MLP's float32 weight gradients, which each chunk but the first reads and writes."""
    chunk = s.spec.mlp_chunk_tokens
    chunks = 1 if chunk is None else -(-s.spec.micro_tokens // chunk)
    if chunks == 1:
        return []
    more = s.leaf("further chunks of a pass", chunks - 1)
    amount = 8.0 * s.mlp_weights * s.layers * s.passes * more
    return [Operator("sums over MLP chunks", "weights", amount, recompute=True)]
