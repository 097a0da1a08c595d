"""Operators of one optimizer step on a GPU: products, attention and memory traffic, one entry each.

Nothing here depends on a device. Counts are of this project's own step (fused projections, compiled blocks, chunked
loss) on one GPU; `budget/speed.py` prices them. The floating-point work of a product is exact. The bytes of
element-wise work are counted by hand from what the compiled blocks read and write, in units of the activations' width:

    norms, residuals    22 per token, layer and hidden channel      (forward 8, backward 14)
    activation          9 per channel of the MLP's inside, 4 if not gated
    QK-norm, RoPE       8 per channel of queries, keys and values
    loss                6 per token and vocabulary entry (logits and their gradient, read and written)

The hand-written halves and the kernels of 2026-11-21 read and write each tensor once, which makes 16, 8 or 5, 5 (and 2
for each channel of keys), and 2.

A weight is cast once in the forward pass, and its gradient is cast and added up in float32: 24 bytes per weight and
pass; once per step where BF16 weights are cached and the products add gradients up themselves. Muon's iteration is
Newton-Schulz on the smaller side of each logical matrix (Jordan et al. 2024).

A frozen weight has no gradient, which saves a third of its products; in codes it is read, and written dense, for each
of them. An adapter beside it reads and writes what enters and leaves it 4 times more in both passes. That is counted by
hand and not measured yet.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

from deskside.budget.adapters import adapter_params, matrix_bytes, projection_sizes
from deskside.budget.format_costs import (
    FP8_TRAFFIC,
    NVFP4_WORK,
    OWN_SCALE,
    OWN_SCALE_BYTES,
    Kind,
    RunsAs,
    kinds,
    nvfp4_bytes,
    quantized,
    runs_as,
)
from deskside.budget.shape import Shape, attention_span
from deskside.budget.sizes import Sizes
from deskside.budget.states import ADAMW_STATE, MUON_STATE, state_bytes
from deskside.budget.step_spec import StepSpec

Group = Literal[
    "matmul", "head", "attention", "traffic", "loss_traffic", "weights", "quantize",
    "optimizer_matmul", "optimizer_traffic", "communication", "offload", "layers",
]  # fmt: skip

PRODUCTS: tuple[Group, ...] = ("matmul", "head", "attention", "optimizer_matmul")
TRAFFIC: tuple[Group, ...] = ("traffic", "quantize", "loss_traffic", "weights", "optimizer_traffic")
# The item of a step's time that a group of operators belongs to; recomputation is a separate item.
ITEM_OF: dict[Group, str] = {
    "matmul": "matmul", "head": "loss", "attention": "attention", "traffic": "traffic", "loss_traffic": "loss",
    "weights": "traffic", "quantize": "quantize", "optimizer_matmul": "optimizer", "optimizer_traffic": "optimizer",
    "communication": "communication", "offload": "offload", "layers": "launches",
}  # fmt: skip


@dataclass(frozen=True)
class Units:
    """Element-wise traffic in units of the activations' width (the docstring has them), and bytes of the optimizers per
    weight with float32 states: rope per channel of q and k, rope_keys more per channel of k."""

    norm: float
    gated: float
    plain: float
    rope: float
    rope_keys: float
    loss: float
    adamw: float
    muon: float


# AdamW: reads weight, gradient (clipped before: twice) and two moments, writes weight and moments. Muon: its fit.
COMPILED = Units(22, 9, 4, 8, 0, 6, 32, 60)
# Gradients are read for their norm (4) and scaled (8). Then AdamW moves 28 bytes, Muon 26 and 6 to scale its stack.
FUSED = Units(16, 8, 5, 5, 2, 2, 40, 44)
FP8_HEAD_LOSS = 2.5  # in place of 2: logits are read in 16 bits, their gradient is written in 8 and turned
RECOMPUTED = 0.35  # of the element-wise traffic of a part, when its forward is done again
WEIGHT_BYTES = 24
NEWTON_SCHULZ_STEPS = 5


@dataclass(frozen=True)
class Operator:
    """StepSpec of one kind in one optimizer step on one GPU.

    flops, or bytes moved, or a count of layers, each with its fixed delay; recompute: it exists because of activation
    checkpointing; width: head_dim for attention, the hidden size for Newton-Schulz; windowed: attention whose kernel
    masks a sliding window; runs_as: the format whose rate a product runs at; share: the part of all FLOPs under this
    name that do.
    """

    name: str
    group: Group
    amount: float
    recompute: bool = False
    width: int = 0
    runs_as: RunsAs = "bf16"
    share: float = 1.0
    windowed: bool = False

    @property
    def item(self) -> str:
        """The item of a step's time that this operator belongs to."""
        return "recompute" if self.recompute else ITEM_OF[self.group]


def step_operators(shape: Shape, spec: StepSpec, traced: bool = False) -> list[Operator]:
    """Return everything that one GPU does in one optimizer step. Embedding look-ups are left out.

    traced: amounts are `Term`s, which carry their formulas.
    """
    s = Sizes(shape, spec, traced)
    unit = s.leaf("bytes of an activation", 4 if spec.precision == "fp32" else 2)
    units = units_of(spec)
    elements = s.tokens * s.layers * unit
    norm = elements * s.hidden * units.norm
    rope = elements * ((s.queries + s.keys) * units.rope + s.keys * units.rope_keys)
    activation = elements * s.mlp_width * (units.gated if shape.gated_mlp else units.plain)
    # FLOPs per weight and token: output, gradient of the input and, where it is trained, gradient of the weight.
    product = 6.0 if spec.adapter is None else 4.0
    entering, leaving = values_quantized(s)
    found = [
        *_products("attention projections", product * s.tokens * s.layers * s.attention_weights, s),
        *_products("MLP", product * s.tokens * s.layers * s.mlp_weights, s),
        Operator(
            "head",
            "head",
            product * s.tokens * s.hidden * s.vocabulary,
            runs_as=runs_as("fp8", spec.native) if spec.fp8_head else _unquantized(spec),
        ),
        *_attention(12.0 * s.queries * s.tokens, s),
        Operator("norms and residuals", "traffic", norm),
        Operator("QK-norm and RoPE", "traffic", rope),
        Operator("activation", "traffic", activation),
        Operator("loss", "loss_traffic", s.tokens * s.vocabulary * unit * _loss_units(spec)),
        *_weights(s),
        *_adapters(s, unit),
        Operator("layers", "layers", s.layers * s.passes),
        *_quantizing(norm + rope + activation, entering, leaving, s),
    ]
    if spec.activation_checkpointing in ("attention", "block"):
        again = RECOMPUTED * (rope + norm / 2)
        found += [
            *_products("attention projections", 2.0 * s.tokens * s.layers * s.attention_weights, s, True),
            *_attention(4.0 * s.queries * s.tokens, s, True),
            Operator("QK-norm and RoPE", "traffic", again, True),
            *_quantizing(again, s.tokens * s.layers * (s.hidden + s.queries), 0.0, s, True),
        ]
    if spec.activation_checkpointing in ("mlp", "block"):
        again = RECOMPUTED * (activation + norm / 2)
        found += [
            *_products("MLP", 2.0 * s.tokens * s.layers * s.mlp_weights, s, True),
            Operator("activation", "traffic", again, True),
            *_quantizing(again, s.tokens * s.layers * (s.hidden + s.mlp_width), 0.0, s, True),
        ]
    return found + _optimizer(s) + _between_gpus(s)


def units_of(spec: StepSpec) -> Units:
    return FUSED if spec.fused else COMPILED


def _loss_units(spec: StepSpec) -> float:
    return FP8_HEAD_LOSS if spec.fused and spec.fp8_head else units_of(spec).loss


def _unquantized(spec: StepSpec) -> RunsAs:
    return "fp32" if spec.precision == "fp32" else "bf16"


def _attention(scores: float, s: Sizes, recompute: bool = False) -> Iterator[Operator]:
    """Yield attention without and with a sliding window. scores: FLOPs for each token seen."""
    for windowed, span in _spans(s.shape, s.spec.sequence_length):
        if span:
            name = "attention, windowed" if windowed else "attention"
            seen = s.leaf("tokens that a token sees, summed over the layers", span)
            yield Operator(name, "attention", scores * seen, recompute, s.shape.head_dim, windowed=windowed)


@lru_cache(maxsize=512)
def _spans(shape: Shape, length: int) -> tuple[tuple[bool, float], ...]:
    """Return the tokens that a token sees, summed over the layers without and the layers with a sliding window."""
    spans = {False: 0.0, True: 0.0}
    for window, count in Counter(
        shape.layer_window(layer) for layer in range(shape.num_hidden_layers)
    ).items():
        # A window as long as the rows masks nothing.
        spans[window is not None and window < length] += count * attention_span(length, window)
    return tuple(spans.items())


def _weights(s: Sizes) -> list[Operator]:
    """Return casts of weights and the accumulation of their gradients. Codes are dequantized again for every
    product."""
    spec, adapter = s.spec, s.spec.adapter
    if adapter is None:
        # The cache casts once per step, and its products accumulate gradients themselves.
        passes = 1 if spec.copies == "step" and spec.precision == "bf16" else s.passes
        return [Operator("weights", "weights", float(WEIGHT_BYTES) * s.parameters * passes)]
    found = [Operator("weights", "weights", float(WEIGHT_BYTES) * trained_params(s) * s.passes)]
    if adapter.base != "bf16":
        uses = 2 if spec.activation_checkpointing == "none" else 3
        codes = s.leaf(f"bytes of the blocks in {adapter.base}", matrix_bytes(s.shape, adapter))
        once = codes + 2.0 * s.block_weights
        found.append(Operator("dequantized weights", "weights", uses * once * s.passes))
    return found


def _adapters(s: Sizes, unit: float) -> list[Operator]:
    if s.spec.adapter is None:
        return []
    projections = projection_sizes(s.shape)
    channels = sum(sum(projections[name]) for name in s.spec.adapter.targets)
    traffic = 4.0 * s.tokens * s.layers * s.leaf("channels into and out of the adapters", channels) * unit
    return [
        Operator("adapters", "matmul", 6.0 * s.tokens * trained_params(s), runs_as=_unquantized(s.spec)),
        Operator("adapters' inputs and outputs", "traffic", traffic),
    ]


def _products(name: str, flops: float, s: Sizes, recompute: bool = False) -> Iterator[Operator]:
    """Yield the projections of all blocks by the rate they run at. A third of a step's FLOPs are the forward's, and
    all of what is recomputed."""
    spec = s.spec
    blocks = spec.quantized_share(s.shape.num_hidden_layers) if quantized(spec.precision) else 0.0
    forward, backward = kinds(spec.precision)
    shares: dict[RunsAs, float] = {_unquantized(spec): 1 - blocks}
    of_step: tuple[tuple[Kind, float], ...] = ((forward, 1 / 3), (backward, 2 / 3))
    for kind, share in ((forward, 1.0),) if recompute else of_step:
        rate = runs_as(kind, spec.native)
        shares[rate] = shares.get(rate, 0.0) + blocks * share
    for rate, share in shares.items():
        if share > 0:
            part = flops if share == 1 else flops * s.leaf(f"share that runs as {rate}", share)
            yield Operator(name, "matmul", part, recompute, runs_as=rate, share=share)


def values_quantized(s: Sizes) -> tuple[float, float]:
    """Return (values that enter the projections of all blocks, values of the gradients that leave them)."""
    entering = s.hidden + s.queries + s.hidden + s.mlp_width
    outputs = 2 if s.shape.gated_mlp else 1
    gradients = (s.queries + 2 * s.keys) + s.hidden + outputs * s.mlp_width + s.hidden
    return s.tokens * s.layers * entering, s.tokens * s.layers * gradients


def _quantizing(
    traffic: float, entering: float, leaving: float, s: Sizes, recompute: bool = False
) -> Iterator[Operator]:
    """Yield the bytes that converting moves beyond the element-wise `traffic` of BF16.

    entering, leaving: values, as in `values_quantized`. In NVFP4 what enters is converted for the output and for the
    weight gradient, a gradient for the input gradient and for the weight gradient; a recomputed forward needs only the
    output. In FP8 the kernels that produce a tensor convert it, for all products at once.
    """
    spec = s.spec
    if not quantized(spec.precision):
        return
    share = spec.quantized_share(s.shape.num_hidden_layers)
    blocks = s.leaf("quantized share of the weights", share)
    forward, backward = kinds(spec.precision)
    if spec.precision in OWN_SCALE:
        values = entering if recompute else entering + leaving
        amount = blocks * OWN_SCALE_BYTES * values
        yield Operator("quantizing with own scales", "quantize", amount, recompute, share=share)
    elif forward == "fp8":
        passes = 1.0 if backward == "fp8" or recompute else 0.5  # of both passes, or of the forward alone
        amount = blocks * passes * (FP8_TRAFFIC - 1) * traffic
        yield Operator("quantizing to FP8", "quantize", amount, recompute, share=share)
    if backward == "nvfp4":
        both = entering * ((forward == "nvfp4") + (not recompute)) + 2 * leaving
        if both:
            amount = blocks * nvfp4_bytes(spec.native) * NVFP4_WORK[spec.precision] * both
            yield Operator("quantizing to NVFP4", "quantize", amount, recompute, share=share)


@lru_cache(maxsize=512)
def newton_schulz_flops(shape: Shape) -> float:
    """Return the FLOPs of Muon's iteration over all matrices of the blocks, once."""
    D = shape.hidden_size
    q, kv = shape.num_attention_heads * shape.head_dim, shape.num_key_value_heads * shape.head_dim
    matrices = [(q, D), (kv, D), (kv, D), (D, q)]
    copies, inside = 1, shape.intermediate_size
    if shape.num_experts:
        copies, inside = shape.num_experts, shape.moe_intermediate_size
        matrices.append((shape.num_experts, D))
    matrices += [(inside, D)] * (copies * (2 if shape.gated_mlp else 1)) + [(D, inside)] * copies
    flops = 0.0
    for rows, columns in matrices:
        long, short = max(rows, columns), min(rows, columns)
        flops += NEWTON_SCHULZ_STEPS * (4.0 * long * short**2 + 2.0 * short**3)
    return flops * shape.num_hidden_layers


def trained_params(s: Sizes) -> float:
    """Return the number of parameters that the optimizer updates."""
    if s.spec.adapter is None:
        return s.parameters
    return s.leaf("parameters of the adapters", adapter_params(s.shape, s.spec.adapter))


def _optimizer(s: Sizes) -> list[Operator]:
    """Return the update, once per step. Sharded AdamW updates its shard; every GPU computes all of Muon's iteration."""
    spec, units = s.spec, units_of(s.spec)
    # Bytes per weight: smaller states are read and written.
    adamw = units.adamw - 2 * (ADAMW_STATE["float32"] - ADAMW_STATE[spec.states])
    muon = units.muon - 2 * (MUON_STATE["float32"] - MUON_STATE[spec.states])
    if spec.optimizer == "adamw":
        return [Operator("AdamW", "optimizer_traffic", adamw * trained_params(s) / s.shards)]
    iteration = s.leaf(
        f"{NEWTON_SCHULZ_STEPS} x (4 x long x short^2 + 2 x short^3), summed over all matrices",
        newton_schulz_flops(s.shape),
    )
    others = trained_params(s) - s.block_weights
    return [
        Operator("Muon, Newton-Schulz", "optimizer_matmul", iteration, width=s.shape.hidden_size),
        Operator("Muon", "optimizer_traffic", muon * s.block_weights),
        Operator("AdamW", "optimizer_traffic", adamw * others / s.shards),
    ]


def _between_gpus(s: Sizes) -> list[Operator]:
    """Return bytes that each GPU sends and receives, and bytes that travel to the host where the optimizer is
    offloaded."""
    found, spec = [], s.spec
    weights = 4.0 * trained_params(s)
    share = (s.gpus - 1) / s.gpus
    if spec.gpus > 1 and spec.sharded:
        # Blocks are gathered in the forward and in the backward of every pass, the rest once for both; gradients are
        # scattered with the last pass.
        gathers = s.passes * (2 * weights - 4.0 * s.root_weights)
        found.append(Operator("FSDP", "communication", (gathers + weights) * share))
        if spec.optimizer == "muon":
            found.append(Operator("Muon, gathered", "communication", 2.0 * s.block_weights * share))
    elif spec.gpus > 1:
        found.append(Operator("all-reduce", "communication", 2 * weights * share))
    if spec.offload_optimizer:
        found.append(Operator("states up, and down meanwhile", "offload", state_bytes(s).streamed))
    return found
