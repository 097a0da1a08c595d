"""Memory traffic of casts to formats below 16 bits. `format_costs.py` has their bytes per value."""

from collections.abc import Iterator

from deskside.budget.format_costs import (
    CURRENT_SCALING,
    CURRENT_SCALING_BYTES,
    EXPERT_FP8_EMULATED,
    EXPERT_FP8_TRANSPOSED,
    FP8_TRAFFIC,
    NVFP4_WORK,
    nvfp4_bytes,
    product_formats,
    quantized,
)
from deskside.budget.operators.operator import Operator
from deskside.budget.sizes import Sizes


def quantized_values(s: Sizes) -> tuple[float, float]:
    """Return the number of values in (inputs, output gradients) of the projections of all blocks, per step.

    Those of experts are left out: see `expert_values`.
    """
    inputs, gradients = s.hidden + s.queries, (s.queries + 2 * s.keys) + s.hidden
    if not s.shape.num_experts:
        inputs += s.hidden + s.mlp_width
        gradients += _mlp_outputs(s) * s.mlp_width + s.hidden
    return s.tokens * s.layers * inputs, s.tokens * s.layers * gradients


def expert_values(s: Sizes) -> tuple[float, float, float]:
    """Return the number of values in the rows of all experts, per step: of the inputs of the first product, the inputs
    of the second one, and the output gradients of both. A shared expert is left out, because it stays in BF16."""
    rows = s.tokens * s.layers * s.leaf("experts per token", s.shape.num_experts_per_tok)
    inner = rows * s.leaf("width of an expert", s.shape.moe_intermediate_size)
    return rows * s.hidden, inner, _mlp_outputs(s) * inner + rows * s.hidden


def _mlp_outputs(s: Sizes) -> int:
    return 2 if s.shape.gated_mlp else 1


def quantizing_experts(s: Sizes, recompute: bool = False) -> Iterator[Operator]:
    """Yield the memory traffic of casts of the experts' rows. A recomputation needs the first product only."""
    spec = s.spec
    if not s.shape.num_experts or not quantized(spec.precision):
        return
    share = spec.quantized_share(s.shape.num_hidden_layers)
    blocks = s.leaf("quantized share of the weights", share)
    first, second, gradients = expert_values(s)
    forward, backward = product_formats(spec.precision)
    # Values that are read by the products of the forward, by input gradients and by weight gradients.
    in_forward = first if recompute else first + second
    in_input_gradients, in_weight_gradients = (
        (0.0, 0.0) if recompute else (gradients, first + second + gradients)
    )
    emulated = 0.0 if "fp8-grouped" in spec.native else EXPERT_FP8_EMULATED
    fp8 = nvfp4 = 0.0
    if forward == "fp8":
        fp8 += emulated * in_forward
    else:
        nvfp4 += in_forward
    if backward == "fp8":
        fp8 += emulated * in_input_gradients + (EXPERT_FP8_TRANSPOSED + emulated) * in_weight_gradients
    else:
        nvfp4 += in_input_gradients + in_weight_gradients
    if fp8:
        yield Operator("quantizing experts to FP8", "quantize", blocks * fp8, recompute, share=share)
    if nvfp4:
        amount = blocks * nvfp4_bytes(frozenset()) * NVFP4_WORK[spec.precision] * nvfp4
        yield Operator("quantizing experts to NVFP4", "quantize", amount, recompute, share=share)


def quantizing(
    traffic: float, inputs: float, output_gradients: float, s: Sizes, recompute: bool = False
) -> Iterator[Operator]:
    """Yield the memory traffic of quantization that comes on top of the element-wise `traffic` in BF16.

    inputs, output_gradients: numbers of values, as in `quantized_values`. In NVFP4, an input is converted for the
    output and for the weight gradient, and an output gradient for the input gradient and for the weight gradient; a
    recomputed forward needs only the output. In FP8, a tensor is converted once for all products.
    """
    spec = s.spec
    if not quantized(spec.precision):
        return
    share = spec.quantized_share(s.shape.num_hidden_layers)
    blocks = s.leaf("quantized share of the weights", share)
    forward, backward = product_formats(spec.precision)
    if spec.precision in CURRENT_SCALING:
        values = inputs if recompute else inputs + output_gradients
        amount = blocks * CURRENT_SCALING_BYTES * values
        yield Operator("quantizing with own scales", "quantize", amount, recompute, share=share)
    elif forward == "fp8":
        passes = 1.0 if backward == "fp8" or recompute else 0.5  # forward and backward, or the forward alone
        amount = blocks * passes * (FP8_TRAFFIC - 1) * traffic
        yield Operator("quantizing to FP8", "quantize", amount, recompute, share=share)
    if backward == "nvfp4":
        for_output, for_weight_gradient = forward == "nvfp4", not recompute
        conversions = inputs * (for_output + for_weight_gradient) + 2 * output_gradients
        if conversions:
            amount = blocks * nvfp4_bytes(spec.native) * NVFP4_WORK[spec.precision] * conversions
            yield Operator("quantizing to NVFP4", "quantize", amount, recompute, share=share)
