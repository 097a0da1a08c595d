"""Matrix products and attention of the blocks, in FLOPs.

The FLOPs are exact. The products of experts are grouped, which has a rate below that of one large product
(`GROUPED_RATE`).
"""

import math
from collections import Counter
from collections.abc import Iterator
from functools import lru_cache

from deskside.budget.format_costs import (
    GROUPED_FP8_RATE,
    Format,
    RunsAs,
    expert_native,
    product_formats,
    quantized,
    runs_as,
)
from deskside.budget.operators.operator import Operator
from deskside.budget.shape import Shape, attention_span
from deskside.budget.sizes import Sizes
from deskside.budget.step_spec import StepSpec

# (FLOPs of the first product of one expert, rate relative to one dense product): means over the products of a layer on
# an H200 with torch's grouped product (`benchmarks/experts.py`, docs/data/2026-11-23-experts). Down to 1.6e9 FLOPs,
# smaller products were not slower; below that, and on other GPUs, the rate was not measured.
GROUPED_RATE = ((3.2e9, 0.77), (1.3e10, 0.865), (7.3e10, 0.95))


def unquantized_format(spec: StepSpec) -> RunsAs:
    """Return the format of products that the recipe does not quantize."""
    return "fp32" if spec.precision == "fp32" else "bf16"


def products(
    name: str, flops: float, s: Sizes, recompute: bool = False, experts: bool = False
) -> Iterator[Operator]:
    """Yield `flops` of block projections, one operator per format that they run as. The forward is a third of these
    FLOPs, or all of them if it is recomputed. experts: they are grouped products."""
    spec = s.spec
    native = expert_native(spec.native) if experts else spec.native
    quantized_share = spec.quantized_share(s.shape.num_hidden_layers) if quantized(spec.precision) else 0.0
    forward, backward = product_formats(spec.precision)
    shares: dict[RunsAs, float] = {unquantized_format(spec): 1 - quantized_share}
    by_format: list[tuple[Format, float]] = [(forward, 1 / 3), (backward, 2 / 3)]
    if recompute:
        by_format = [(forward, 1.0)]
    for format, share in by_format:
        format_rate = runs_as(format, native)
        shares[format_rate] = shares.get(format_rate, 0.0) + quantized_share * share
    rate = grouped_rate(s) if experts else 1.0
    for format_rate, share in shares.items():
        if share > 0:
            part = flops if share == 1 else flops * s.leaf(f"share that runs as {format_rate}", share)
            fp8 = format_rate == "fp8"
            yield Operator(
                name,
                "matmul",
                part,
                recompute,
                runs_as=format_rate,
                rowwise=fp8 and not experts and spec.precision == "fp8-rowwise",
                share=share,
                grouped_rate=rate * GROUPED_FP8_RATE if experts and fp8 else rate,
            )


def grouped_rate(s: Sizes) -> float:
    """Return the rate of the experts' products relative to one large dense product; 1 without experts."""
    shape = s.shape
    if not shape.num_experts:
        return 1.0
    rows = s.spec.micro_tokens * shape.num_experts_per_tok / shape.num_experts
    outputs = (2 if shape.gated_mlp else 1) * shape.moe_intermediate_size
    flops = 2.0 * rows * shape.hidden_size * outputs
    (low, rate), *rest = GROUPED_RATE
    for high, next_rate in rest:
        if flops < high:
            share = max(0.0, math.log(flops / low) / math.log(high / low))
            return rate + share * (next_rate - rate)
        low, rate = high, next_rate
    return rate


def attention(flops_per_position: float, s: Sizes, recompute: bool = False) -> Iterator[Operator]:
    """Yield attention without and with a sliding window.

    flops_per_position: FLOPs of all tokens for each position that they attend to.
    """
    for windowed, span in _spans(s.shape, s.spec.sequence_length):
        if span:
            name = "attention, windowed" if windowed else "attention"
            seen = s.leaf("tokens that a token sees, summed over the layers", span)
            yield Operator(
                name, "attention", flops_per_position * seen, recompute, s.shape.head_dim, windowed=windowed
            )


@lru_cache(maxsize=512)
def _spans(shape: Shape, length: int) -> tuple[tuple[bool, float], ...]:
    """Return (windowed, attention span summed over the layers) for the layers without and with a window."""
    spans = {False: 0.0, True: 0.0}
    for window, count in Counter(
        shape.layer_window(layer) for layer in range(shape.num_hidden_layers)
    ).items():
        # A window as long as the sequence masks nothing.
        spans[window is not None and window < length] += count * attention_span(length, window)
    return tuple(spans.items())
