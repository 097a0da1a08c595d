"""Copies of weights in the formats of products, kept in a cache between steps, or by autograd until the backward.

`format_costs.py` has their bytes per weight.
"""

from deskside.budget.format_costs import expert_native, quantized, weight_copies
from deskside.budget.sizes import Sizes
from deskside.budget.step_spec import Checkpointing, StepSpec
from deskside.budget.terms import named


def has_weight_cache(spec: StepSpec) -> bool:
    """Return True if converted weights are kept between optimizer steps."""
    if quantized(spec.precision):
        return spec.copies != "use"
    return spec.copies == "step" and spec.precision == "bf16" and spec.weights == "float32"


def cached_weights(sizes: Sizes) -> float:
    """Return the bytes of converted weights that are kept between optimizer steps: quantized weights in the recipe's
    formats, other weights of the blocks in BF16, and W and W^T of an FP8 head."""
    spec = sizes.spec
    low, high = weight_copies(spec.precision, spec.native), weight_copies("bf16", spec.native)
    if spec.weights != "float32":
        high = 0.0
    share = spec.quantized_share(sizes.shape.num_hidden_layers)
    per_weight: float = low
    if sizes.shape.num_experts and quantized(spec.precision):
        # Nearly all weights of a block are those of experts.
        per_weight = low = weight_copies(spec.precision, expert_native(spec.native))
    if share != 1:
        part = sizes.leaf(f"share of the weights in {spec.precision}", share)
        per_weight = named("bytes of a weight's copies", part * low + (1 - part) * high)
    head = 0.0
    if spec.fp8_head:
        head = weight_copies("fp8", spec.native) * sizes.vocabulary * sizes.hidden
    return per_weight * sizes.block_weights + head


def copied_weights(s: Sizes, checkpointing: Checkpointing) -> float:
    """Return the number of block weights whose bfloat16 copies autograd keeps from forward to backward."""
    attention = s.layers * s.attention_weights
    return {
        "none": s.block_weights,
        "attention": s.block_weights - attention,
        "mlp": attention,
        "block": 0.0,
    }[checkpointing]
