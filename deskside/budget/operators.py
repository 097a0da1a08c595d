"""Operators of one optimizer step on a GPU: products, attention and memory traffic, one entry each.

Nothing here depends on a device. The counts are those of this project's training step (fused projections, chunked loss)
on one GPU; `budget/speed.py` computes their time. The FLOPs of products are exact. The bytes of element-wise work were
counted by hand from the reads and writes of the compiled blocks, as elements of the activations' dtype:

    norms, residuals    22 per token, layer and hidden channel      (forward 8, backward 14)
    activation          9 per token, layer and MLP channel, 4 if not gated
    QK-norm, RoPE       8 per token, layer and channel of queries and keys
    loss                6 per token and vocabulary entry (logits and their gradient, read and written)

The fused sublayers and the loss kernel of 2026-11-21 read and write each tensor once. Their numbers are 16; 8, or 5 if
not gated; 5, and 2 more per channel of keys; and 2.

A weight is cast once in the forward pass, and its gradient is cast and accumulated in float32: 24 bytes per weight and
pass. If BF16 weights are cached and the products accumulate gradients themselves, this happens only once per step.
Muon's iteration is Newton-Schulz on the smaller side of each logical matrix (Jordan et al. 2024).

In a mixture of experts, rows are gathered by expert and summed by token. With k experts per token, `dispatch` reads
and writes k rows for the forward, for the gradient of the output and for the weight gradient, and k more if the
sublayer is recomputed; `combine` reads k rows and writes one, and in the backward reads one more: 8 k + 3 per token,
layer and hidden channel, and 2 k for recomputation. The gradients of the experts leave their products in 16 bits and
are converted and added up by each pass: 18 bytes per float32 weight. Their products are grouped, which has a rate below
that of one large product (`GROUPED_RATE`).

A frozen weight has no gradient, which saves a third of its products. A quantized frozen weight is read and written
dequantized for each product. An adapter adds 4 reads or writes of the inputs and outputs of its projection, forward and
backward together. The numbers for adapters were counted by hand and not measured yet.
"""

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

from deskside.budget.adapters import adapter_params, block_bytes, head_trains, projection_sizes, scaled_rows
from deskside.budget.format_costs import (
    CURRENT_SCALING,
    CURRENT_SCALING_BYTES,
    EXPERT_FP8_EMULATED,
    EXPERT_FP8_GRADIENT,
    FP8_TRAFFIC,
    GROUPED_FP8_RATE,
    NVFP4_WORK,
    Format,
    RunsAs,
    expert_native,
    nvfp4_bytes,
    product_formats,
    quantized,
    runs_as,
)
from deskside.budget.host_memory import host_gradient_bytes
from deskside.budget.replicas import exchange, update_shares
from deskside.budget.shape import Shape, attention_span, block_norms
from deskside.budget.shared_rows import exchanged_bytes
from deskside.budget.sizes import Sizes
from deskside.budget.states import (
    ADAMW_STATE_BYTES,
    MUON_STATE_BYTES,
    average_bytes,
    state_bytes,
    trained_weights,
)
from deskside.budget.step_spec import StepSpec

Group = Literal[
    "matmul", "head", "attention", "traffic", "loss_traffic", "weights", "quantize",
    "optimizer_matmul", "optimizer_traffic", "communication", "offload", "layers",
]  # fmt: skip

SECTOR_BYTES = 32  # smallest transfer of a GPU's memory
PRODUCTS: tuple[Group, ...] = ("matmul", "head", "attention", "optimizer_matmul")
TRAFFIC: tuple[Group, ...] = ("traffic", "quantize", "loss_traffic", "weights", "optimizer_traffic")
# The item of a step's time that a group of operators counts as; recomputation is a separate item.
ITEM_OF: dict[Group, str] = {
    "matmul": "matmul", "head": "loss", "attention": "attention", "traffic": "traffic", "loss_traffic": "loss",
    "weights": "traffic", "quantize": "quantize", "optimizer_matmul": "optimizer", "optimizer_traffic": "optimizer",
    "communication": "communication", "offload": "offload", "layers": "launches",
}  # fmt: skip


@dataclass(frozen=True)
class TrafficUnits:
    """Element-wise memory traffic, in elements (see the module docstring), and bytes of optimizers."""

    norm: float
    gated: float
    plain: float
    rope: float  # per channel of queries and keys
    rope_keys: float  # additionally per channel of keys
    loss: float
    adamw: float  # bytes per weight with float32 states
    muon: float  # bytes per weight with float32 states


# AdamW: reads weight, gradient (twice because of clipping) and two moments, writes weight and moments. Muon: fitted.
COMPILED_TRAFFIC = TrafficUnits(22, 9, 4, 8, 0, 6, 32, 60)
# Gradients are read for their norm (4) and scaled (8). Then AdamW moves 28 bytes; Muon moves 26, and 6 to scale.
FUSED_TRAFFIC = TrafficUnits(16, 8, 5, 5, 2, 2, 40, 44)
# With an FP8 head, instead of 2: logits are read in 16 bits; their gradient is written in 8 bits, read and transposed.
FP8_HEAD_LOSS = 2.5
RECOMPUTED = 0.35  # share of a sublayer's element-wise traffic that belongs to its forward
WEIGHT_BYTES = 24  # per weight and pass: cast, gradient cast and accumulation (see the module docstring)
BFLOAT16_SUM_BYTES = 6  # per bfloat16 weight and pass but the first, whose gradient is not added to a sum
# Bytes per weight that an optimizer step moves less if weight and gradient are in bfloat16: half of what it reads of
# the gradient, for the norm and the update, and of the weight, which it reads and writes.
BFLOAT16_ADAMW_SAVING, BFLOAT16_MUON_SAVING = 12, 11
ROW_SUM_BYTES = 6  # per weight: the weight in float32 and its update in 16 bits; not measured
# Finding the 8-bit codes of two states takes as long as this many bytes of traffic per weight. Measured on an H200:
# 23 ms for 1.29 billion float32 weights, 38 to 42 for 3.03 billion in bfloat16, clipping included.
QUANTIZED_ADAMW_WORK = 28
MAGNITUDE_PASSES = 7  # over the outputs that DoRA scales: two in the forward, five in the backward
EXPERT_GRADIENT_BYTES = 18  # per float32 expert weight and pass (see the module docstring)
NEWTON_SCHULZ_STEPS = 5
# (FLOPs of the first product of one expert, rate relative to one dense product): means over the products of a layer on
# an H200 with torch's grouped product (`benchmarks/experts.py`, docs/data/2026-11-23-experts). Smaller products were
# not slower down to 1.6e9 FLOPs; below that, and on other GPUs, the rate was not measured.
GROUPED_RATE = ((3.2e9, 0.77), (1.3e10, 0.865), (7.3e10, 0.95))


@dataclass(frozen=True)
class Operator:
    """All work of one type in an optimizer step on one GPU.

    Attributes:
        amount: FLOPs of products, bytes of other operators, or layers x passes in the group "layers".
        recompute: True if the operator repeats a forward because of activation checkpointing.
        width: head_dim for attention, the hidden size for Newton-Schulz.
        runs_as: The format whose rate a product runs at.
        rowwise: True for FP8 products with a scale per row.
        share: Share of all FLOPs or bytes with this name that this operator is.
        windowed: True for attention with a sliding window.
        grouped_rate: Rate of a product relative to one large dense product. Below 1 for grouped products of experts.
    """

    name: str
    group: Group
    amount: float
    recompute: bool = False
    width: int = 0
    runs_as: RunsAs = "bf16"
    rowwise: bool = False
    share: float = 1.0
    windowed: bool = False
    grouped_rate: float = 1.0

    @property
    def item(self) -> str:
        """The item of a step's time that this operator counts as."""
        return "recompute" if self.recompute else ITEM_OF[self.group]


def step_operators(shape: Shape, spec: StepSpec, traced: bool = False) -> list[Operator]:
    """Return all operators of one optimizer step on one GPU. Embedding look-ups are left out.

    traced: amounts are `Term`s, which carry their formulas.
    """
    s = Sizes(shape, spec, traced)
    activation_bytes = s.leaf("bytes of an activation", 4 if spec.precision == "fp32" else 2)
    units = traffic_units(spec)
    per_channel = s.tokens * s.layers * activation_bytes
    # A norm of a sublayer's output reads and writes one tensor, and in the backward two and one.
    output_norms = 5 * (block_norms(shape) - 2)
    norm = per_channel * s.hidden * (units.norm + output_norms)
    rope = per_channel * ((s.queries + s.keys) * units.rope + s.keys * units.rope_keys)
    activation = per_channel * s.mlp_width * (units.gated if shape.gated_mlp else units.plain)
    # FLOPs per weight and token: output, gradient of the input and, if it is trained, gradient of the weight.
    weight_flops = 6.0 if spec.adapter is None else 4.0
    inputs, output_gradients = quantized_values(s)
    has_experts = shape.num_experts > 0
    dense_traffic = norm / 2 + rope if has_experts else norm + rope + activation
    operators = [
        *_products("attention projections", weight_flops * s.tokens * s.layers * s.attention_weights, s),
        *_products("MLP", weight_flops * s.tokens * s.layers * s.mlp_weights, s, experts=has_experts),
        Operator(
            "head",
            "head",
            weight_flops * s.tokens * s.hidden * s.vocabulary,
            runs_as=runs_as("fp8", spec.native) if spec.fp8_head else _unquantized_format(spec),
        ),
        *_attention(12.0 * s.queries * s.tokens, s),
        Operator("norms and residuals", "traffic", norm),
        Operator("QK-norm and RoPE", "traffic", rope),
        Operator("activation", "traffic", activation),
        Operator("loss", "loss_traffic", s.tokens * s.vocabulary * activation_bytes * _loss_units(spec)),
        *_expert_rows(s, activation_bytes),
        *_later_targets(s),
        *_dropout(s, activation_bytes),
        *_weight_casts(s),
        *_adapters(s, activation_bytes),
        Operator("layers", "layers", s.layers * s.passes),
        *_quantizing(dense_traffic, inputs, output_gradients, s),
        *_quantizing_experts(s),
    ]
    if spec.activation_checkpointing in ("attention", "block"):
        recomputed = RECOMPUTED * (rope + norm / 2)
        operators += [
            *_products(
                "attention projections", 2.0 * s.tokens * s.layers * s.attention_weights, s, recompute=True
            ),
            *_attention(4.0 * s.queries * s.tokens, s, recompute=True),
            Operator("QK-norm and RoPE", "traffic", recomputed, recompute=True),
            *_quantizing(recomputed, s.tokens * s.layers * (s.hidden + s.queries), 0.0, s, recompute=True),
        ]
    if spec.activation_checkpointing in ("mlp", "block"):
        recomputed = RECOMPUTED * (activation + norm / 2)
        operators += [
            *_products(
                "MLP", 2.0 * s.tokens * s.layers * s.mlp_weights, s, recompute=True, experts=has_experts
            ),
            *_chunk_sums(s),
            Operator("activation", "traffic", recomputed, recompute=True),
        ]
        if has_experts:
            operators += _quantizing_experts(s, recompute=True)
        else:
            values = s.tokens * s.layers * (s.hidden + s.mlp_width)
            operators += _quantizing(recomputed, values, 0.0, s, recompute=True)
    return operators + _optimizer(s) + _averaging(s) + _transfers(s)


def _chunk_sums(s: Sizes) -> list[Operator]:
    """Return the traffic of an MLP's float32 weight gradients, which each chunk but the first reads and writes."""
    chunk = s.spec.mlp_chunk_tokens
    chunks = 1 if chunk is None else -(-s.spec.micro_tokens // chunk)
    if chunks == 1:
        return []
    more = s.leaf("further chunks of a pass", chunks - 1)
    amount = 8.0 * s.mlp_weights * s.layers * s.passes * more
    return [Operator("sums over MLP chunks", "weights", amount, recompute=True)]


def traffic_units(spec: StepSpec) -> TrafficUnits:
    """Return the element-wise memory traffic of fused sublayers or of compiled blocks."""
    return FUSED_TRAFFIC if spec.fused else COMPILED_TRAFFIC


def _loss_units(spec: StepSpec) -> float:
    return FP8_HEAD_LOSS if spec.fused and spec.fp8_head else traffic_units(spec).loss


def _unquantized_format(spec: StepSpec) -> RunsAs:
    return "fp32" if spec.precision == "fp32" else "bf16"


def _attention(flops_per_position: float, s: Sizes, recompute: bool = False) -> Iterator[Operator]:
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


def _expert_rows(s: Sizes, activation_bytes: float) -> Iterator[Operator]:
    """Yield the gathering of rows by expert and their sums by token, in a mixture of experts."""
    if not s.shape.num_experts:
        return
    k = s.leaf("experts per token", s.shape.num_experts_per_tok)
    row = s.tokens * s.layers * activation_bytes * s.hidden
    yield Operator("rows of experts", "traffic", (8 * k + 3) * row)
    if s.spec.activation_checkpointing in ("mlp", "block"):
        yield Operator("rows of experts", "traffic", 2 * k * row, recompute=True)


def _later_targets(s: Sizes) -> Iterator[Operator]:
    """Yield the traffic of multi-token prediction: of each later target its number (8 bytes), its logit, and its part
    of the gradient, which is read and written. The logits and their sums are those of the next token."""
    if s.spec.future_targets:
        later = s.leaf("later targets of a token", s.spec.future_targets)
        yield Operator("later targets", "loss_traffic", (8 + 3 * SECTOR_BYTES) * s.tokens * later)


def _dropout(s: Sizes, activation_bytes: float) -> Iterator[Operator]:
    """Yield the traffic of dropout, which reads and writes its tensor in the forward and in the backward."""
    if not s.spec.dropout:
        return
    tensor = s.tokens * activation_bytes * s.hidden
    yield Operator("dropout", "traffic", 4 * tensor * (2 * s.layers + 1))
    # A fused sublayer is recomputed up to its output only.
    recomputed = {"none": 0, "block": 2}.get(s.spec.activation_checkpointing, 1)
    if recomputed and not s.spec.fused:
        yield Operator("dropout", "traffic", 2 * recomputed * tensor * s.layers, recompute=True)


def _weight_casts(s: Sizes) -> list[Operator]:
    """Return the casts of weights and the accumulation of their gradients. Quantized frozen weights are dequantized
    for each product."""
    spec, adapter = s.spec, s.spec.adapter
    if adapter is None:
        if spec.weights == "bfloat16":
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


def _adapters(s: Sizes, activation_bytes: float) -> list[Operator]:
    if s.spec.adapter is None:
        return []
    sizes = [projection_sizes(s.shape)[name] for name in s.spec.adapter.targets]
    channels = sum((size.rows + size.columns) * size.per_token for size in sizes)
    active = s.leaf("adapter parameters per token", adapter_params(s.shape, s.spec.adapter, active=True))
    traffic = (
        4.0
        * s.tokens
        * s.layers
        * s.leaf("channels into and out of the adapters", channels)
        * activation_bytes
    )
    operators = [
        Operator("adapters", "matmul", 6.0 * s.tokens * active, runs_as=_unquantized_format(s.spec)),
        Operator("adapters' inputs and outputs", "traffic", traffic),
    ]
    if s.spec.adapter.dora:
        # The norm multiplies A with the weight as if its rows were tokens, so its time is that of reading the weight.
        rows = s.leaf("rows with a magnitude", scaled_rows(s.shape, s.spec.adapter))
        scaling = MAGNITUDE_PASSES * s.tokens * s.layers * rows * activation_bytes
        operators += [
            Operator("magnitudes", "traffic", scaling),
            Operator("norms of DoRA", "weights", 2.0 * s.block_weights * s.passes),
        ]
    if head_trains(s.shape, s.spec.adapter):
        flops = 2.0 * s.tokens * s.hidden * s.vocabulary
        operators.append(Operator("gradient of the head", "head", flops, runs_as=_unquantized_format(s.spec)))
    return operators


def _products(
    name: str, flops: float, s: Sizes, recompute: bool = False, experts: bool = False
) -> Iterator[Operator]:
    """Yield `flops` of block projections, one operator per format that they run as. The forward is a third of these
    FLOPs, or all of them if it is recomputed. experts: they are grouped products."""
    spec = s.spec
    native = expert_native(spec.native) if experts else spec.native
    quantized_share = spec.quantized_share(s.shape.num_hidden_layers) if quantized(spec.precision) else 0.0
    forward, backward = product_formats(spec.precision)
    shares: dict[RunsAs, float] = {_unquantized_format(spec): 1 - quantized_share}
    weight_gradient: Format = "bf16" if experts and backward == "fp8" else backward
    by_format: list[tuple[Format, float]] = [(forward, 1 / 3), (backward, 1 / 3), (weight_gradient, 1 / 3)]
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


def _quantizing_experts(s: Sizes, recompute: bool = False) -> Iterator[Operator]:
    """Yield the memory traffic of casts of the experts' rows. A recomputation needs the first product only."""
    spec = s.spec
    if not s.shape.num_experts or not quantized(spec.precision):
        return
    share = spec.quantized_share(s.shape.num_hidden_layers)
    blocks = s.leaf("quantized share of the weights", share)
    first, second, gradients = expert_values(s)
    forward, backward = product_formats(spec.precision)
    # Values that the products read in the forward and of the gradients, in the form that sums over columns.
    in_forward, in_backward = (first, 0.0) if recompute else (first + second, gradients)
    emulated = 0.0 if "fp8-grouped" in spec.native else EXPERT_FP8_EMULATED
    fp8 = nvfp4 = 0.0
    if forward == "fp8":
        fp8 += emulated * in_forward
    else:
        nvfp4 += in_forward
    if backward == "fp8":
        fp8 += (EXPERT_FP8_GRADIENT + emulated) * in_backward
    elif not recompute:
        nvfp4 += in_backward + first + second + gradients
    if fp8:
        yield Operator("quantizing experts to FP8", "quantize", blocks * fp8, recompute, share=share)
    if nvfp4:
        amount = blocks * nvfp4_bytes(frozenset()) * NVFP4_WORK[spec.precision] * nvfp4
        yield Operator("quantizing experts to NVFP4", "quantize", amount, recompute, share=share)


def _quantizing(
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


def _optimizer(s: Sizes) -> list[Operator]:
    """Return the optimizer update. Sharded AdamW updates its shard. Replicas share Muon's iteration; with a sharded
    model, every GPU computes all of it."""
    spec, units = s.spec, traffic_units(s.spec)
    # Bytes per weight: states below 32 bits are smaller to read and to write.
    adamw = units.adamw - 2 * (ADAMW_STATE_BYTES["float32"] - ADAMW_STATE_BYTES[spec.states])
    muon = units.muon - 2 * (MUON_STATE_BYTES["float32"] - MUON_STATE_BYTES[spec.states])
    if spec.states in ("8bit", "4bit"):  # 4 bits: not measured
        adamw += QUANTIZED_ADAMW_WORK
    if spec.weights == "bfloat16":
        adamw, muon = adamw - BFLOAT16_ADAMW_SAVING, muon - BFLOAT16_MUON_SAVING
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
        Operator("Muon, Newton-Schulz", "optimizer_matmul", iteration / shares, width=s.shape.hidden_size),
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


def _averaging(s: Sizes) -> list[Operator]:
    """Return the update of the average: weights and average are read and the average is written, or streamed."""
    spec, size = s.spec, average_bytes(s)
    if spec.average == "none":
        return []
    if spec.average == "host":
        return [Operator("average, up and down at once", "offload", size * spec.averages_per_step)]
    traffic = (spec.weight_bytes * trained_weights(s) / s.shards + 2 * size) * spec.averages_per_step
    return [Operator("average", "optimizer_traffic", traffic)]


def _transfers(s: Sizes) -> list[Operator]:
    """Return the communication between GPUs that nothing hides, and the traffic to the host if the optimizer is
    offloaded."""
    operators, spec = [], s.spec
    weights = 4.0 * trained_weights(s)
    share = (s.gpus - 1) / s.gpus
    if spec.gpus > 1 and spec.sharded:
        # Every pass gathers the blocks twice (forward and backward) and the root (embedding, head) once. Gradients are
        # scattered in the last pass only.
        gathers = s.passes * (2 * weights - 4.0 * s.root_weights)
        operators.append(Operator("FSDP", "communication", (gathers + weights) * share))
        if spec.optimizer == "muon":
            operators.append(Operator("Muon, gathered", "communication", 2.0 * s.block_weights * share))
    elif spec.gpus > 1:
        exposed = exchange(s, trained_weights(s)).exposed
        operators.append(Operator("replicas, after the backward", "communication", exposed))
    if spec.context > 1:
        operators.append(Operator("keys and values of shared rows", "communication", exchanged_bytes(s)))
    if spec.gradients == "host":
        operators.append(Operator("gradients, up for the update", "offload", host_gradient_bytes(s)))
    # Beside the backward if each weight is updated there (`speed.exposed_seconds`).
    if spec.offload_optimizer and spec.gradients != "released":
        operators.append(
            Operator("optimizer states, up and down at once", "offload", state_bytes(s).streamed)
        )
    return operators
