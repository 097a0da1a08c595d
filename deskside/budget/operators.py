"""What one optimiser step makes a GPU do: its products, its attention, its memory traffic, one entry each.

Nothing here knows a device. Counts are of this project's own step (fused projections, compiled blocks, chunked loss) on
one GPU; `budget/speed.py` prices them. The floating-point work of a product is exact. The bytes of element-wise work
are counted by hand from what the compiled blocks read and write, in units of the activations' width:

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
from typing import Literal

from deskside.budget.adapters import adapter_params, matrix_bytes, projection_sizes
from deskside.budget.formats import (
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
from deskside.budget.shape import (
    Shape,
    attention_matrix,
    attention_span,
    block_matrices,
    mlp_matrix,
    num_params,
    root_params,
)
from deskside.budget.states import ADAMW_STATE, MUON_STATE, state_bytes
from deskside.budget.step_spec import StepSpec

Group = Literal[
    "matmul", "head", "attention", "traffic", "loss_traffic", "weights", "quantize",
    "optimizer_matmul", "optimizer_traffic", "communication", "offload", "layers",
]  # fmt: skip


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
    """StepSpec of one kind in one optimiser step on one GPU.

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


def step_operators(shape: Shape, spec: StepSpec) -> list[Operator]:
    """Everything that one GPU does in one optimiser step. Embedding look-ups are left out."""
    tokens = float(spec.tokens // spec.gpus)
    layers, D = shape.num_hidden_layers, shape.hidden_size
    q, kv = shape.num_attention_heads * shape.head_dim, shape.num_key_value_heads * shape.head_dim
    attention_weights, mlp_weights = attention_matrix(shape), mlp_matrix(shape, shape.num_experts_per_tok)
    again_attention = spec.activation_checkpointing in ("attention", "block")
    again_mlp = spec.activation_checkpointing in ("mlp", "block")
    scores = 4.0 * q * tokens  # of the forward pass, for each token seen
    unit = 4 if spec.precision == "fp32" else 2

    inside = shape.intermediate_size
    if shape.num_experts:
        inside = shape.num_experts_per_tok * shape.moe_intermediate_size
    elements = tokens * layers * unit
    units = units_of(spec)
    norm = elements * D * units.norm
    rope = elements * ((q + kv) * units.rope + kv * units.rope_keys)
    activation = elements * inside * (units.gated if shape.gated_mlp else units.plain)

    each = float(product_flops(spec))
    found = [
        *_products("attention projections", each * tokens * layers * attention_weights, shape, spec),
        *_products("MLP", each * tokens * layers * mlp_weights, shape, spec),
        Operator(
            "head",
            "head",
            each * tokens * D * shape.vocab_size,
            runs_as=runs_as("fp8", spec.native) if spec.fp8_head else _plain(spec),
        ),
        *_attention(3 * scores, shape, spec),
        Operator("norms and residuals", "traffic", norm),
        Operator("QK-norm and RoPE", "traffic", rope),
        Operator("activation", "traffic", activation),
        Operator("loss", "loss_traffic", tokens * shape.vocab_size * unit * loss_units(spec)),
        *_weights(shape, spec),
        *_adapters(shape, spec),
        Operator("layers", "layers", float(layers * spec.accumulation)),
        *_quantizing(norm + rope + activation, values_quantized(shape, tokens), spec, layers),
    ]
    if again_attention:
        found += [
            *_products("attention projections", 2.0 * tokens * layers * attention_weights, shape, spec, True),
            *_attention(scores, shape, spec, recompute=True),
            Operator("QK-norm and RoPE", "traffic", RECOMPUTED * (rope + norm / 2), True),
            *_quantizing(
                RECOMPUTED * (rope + norm / 2), (tokens * layers * (D + q), 0.0), spec, layers, True
            ),
        ]
    if again_mlp:
        found += [
            *_products("MLP", 2.0 * tokens * layers * mlp_weights, shape, spec, True),
            Operator("activation", "traffic", RECOMPUTED * (activation + norm / 2), True),
            *_quantizing(
                RECOMPUTED * (activation + norm / 2),
                (tokens * layers * (D + inside), 0.0),
                spec,
                layers,
                True,
            ),
        ]
    return found + _optimizer(shape, spec) + _between_gpus(shape, spec)


def units_of(spec: StepSpec) -> Units:
    """Of the step that does this spec."""
    return FUSED if spec.fused else COMPILED


def attention_spans(shape: Shape, spec: StepSpec) -> dict[bool, float]:
    """Return the tokens that a token sees, summed over the layers, of those without and with a window (False, True)."""
    layers = range(shape.num_hidden_layers)
    spans = {False: 0.0, True: 0.0}
    for window, count in Counter(shape.layer_window(layer) for layer in layers).items():
        # A window as long as the rows masks nothing.
        masked = window is not None and window < spec.sequence_length
        spans[masked] += count * attention_span(spec.sequence_length, window)
    return spans


def _attention(scores: float, shape: Shape, spec: StepSpec, recompute: bool = False) -> Iterator[Operator]:
    """scores: FLOPs for each token seen."""
    for windowed, span in attention_spans(shape, spec).items():
        if span:
            name = "attention, windowed" if windowed else "attention"
            yield Operator(name, "attention", scores * span, recompute, shape.head_dim, windowed=windowed)


def loss_units(spec: StepSpec) -> float:
    """Of the loss, which an FP8 head changes."""
    return FP8_HEAD_LOSS if spec.fused and spec.fp8_head else units_of(spec).loss


def weight_passes(spec: StepSpec) -> int:
    """Passes of a step in which weights are cast and gradients added up outside of products."""
    return 1 if spec.copies == "step" and spec.precision == "bf16" else spec.accumulation


def product_flops(spec: StepSpec) -> int:
    """Of a weight and token: output, gradient of the input and, where it trains, its own."""
    return 6 if spec.adapter is None else 4


def _weights(shape: Shape, spec: StepSpec) -> list[Operator]:
    """Casts of weights, and their gradients added up; dense forms of codes, for every product again."""
    if spec.adapter is None:
        return [Operator("weights", "weights", float(WEIGHT_BYTES * num_params(shape) * weight_passes(spec)))]
    trained = float(WEIGHT_BYTES * adapter_params(shape, spec.adapter) * spec.accumulation)
    found = [Operator("weights", "weights", trained)]
    if spec.adapter.base != "bf16":
        uses = 2 if spec.activation_checkpointing == "none" else 3
        once = matrix_bytes(shape, spec.adapter) + 2.0 * block_matrices(shape)
        found.append(Operator("dense forms of codes", "weights", uses * once * spec.accumulation))
    return found


def _adapters(shape: Shape, spec: StepSpec) -> list[Operator]:
    if spec.adapter is None:
        return []
    tokens = float(spec.tokens // spec.gpus)
    sizes = projection_sizes(shape)
    channels = sum(sum(sizes[name]) for name in spec.adapter.targets)
    traffic = 4.0 * tokens * shape.num_hidden_layers * channels * (4 if spec.precision == "fp32" else 2)
    flops = 6.0 * tokens * adapter_params(shape, spec.adapter)
    return [
        Operator("adapters", "matmul", flops, runs_as=_plain(spec)),
        Operator("adapters' inputs and outputs", "traffic", traffic),
    ]


def _plain(spec: StepSpec) -> RunsAs:
    return "fp32" if spec.precision == "fp32" else "bf16"


def _products(
    name: str, flops: float, shape: Shape, spec: StepSpec, recompute: bool = False
) -> Iterator[Operator]:
    """The projections of all blocks, by the rate they run at. A third of a step's FLOPs are the forward's, and all of
    what is recomputed."""
    blocks = spec.quantized_share(shape.num_hidden_layers) if quantized(spec.precision) else 0.0
    forward, backward = kinds(spec.precision)
    shares: dict[RunsAs, float] = {_plain(spec): 1 - blocks}
    of_step: tuple[tuple[Kind, float], ...] = ((forward, 1 / 3), (backward, 2 / 3))
    for kind, share in ((forward, 1.0),) if recompute else of_step:
        rate = runs_as(kind, spec.native)
        shares[rate] = shares.get(rate, 0.0) + blocks * share
    for rate, share in shares.items():
        if share > 0:
            yield Operator(name, "matmul", flops * share, recompute, runs_as=rate, share=share)


def values_quantized(shape: Shape, tokens: float) -> tuple[float, float]:
    """(values that enter the projections of all blocks, values of the gradients that leave them), of `tokens`."""
    D = shape.hidden_size
    q, kv = shape.num_attention_heads * shape.head_dim, shape.num_key_value_heads * shape.head_dim
    inside, leaving = shape.intermediate_size, 2 if shape.gated_mlp else 1
    if shape.num_experts:
        inside = shape.num_experts_per_tok * shape.moe_intermediate_size
    entering = D + q + D + inside
    gradients = (q + 2 * kv) + D + leaving * inside + D
    return tokens * shape.num_hidden_layers * entering, tokens * shape.num_hidden_layers * gradients


def _quantizing(
    traffic: float, values: tuple[float, float], spec: StepSpec, layers: int, recompute: bool = False
) -> Iterator[Operator]:
    """Bytes that converting moves beyond the element-wise `traffic` of BF16. values: as `values_quantized` has them.

    In NVFP4 what enters is converted for the output and for the weight gradient, a gradient for the input gradient and
    for the weight gradient; recomputed, only the output is. In FP8 the producers convert, for all products at once.
    """
    if not quantized(spec.precision):
        return
    blocks = spec.quantized_share(layers)
    forward, backward = kinds(spec.precision)
    if spec.precision in OWN_SCALE:
        entering, gradients = values
        amount = blocks * OWN_SCALE_BYTES * (entering if recompute else entering + gradients)
        yield Operator("quantising with own scales", "quantize", amount, recompute, share=blocks)
    elif forward == "fp8":
        share = 1.0 if backward == "fp8" or recompute else 0.5  # of both passes, or of the forward alone
        yield Operator(
            "quantising to FP8",
            "quantize",
            blocks * share * (FP8_TRAFFIC - 1) * traffic,
            recompute,
            share=blocks,
        )
    if backward == "nvfp4":
        entering, gradients = values
        both = entering * ((forward == "nvfp4") + (not recompute)) + 2 * gradients
        if both:
            amount = blocks * nvfp4_bytes(spec.native) * NVFP4_WORK[spec.precision] * both
            yield Operator("quantising to NVFP4", "quantize", amount, recompute, share=blocks)


def newton_schulz_flops(shape: Shape) -> float:
    """FLOPs of Muon's iteration over all matrices of the blocks, once."""
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


def _optimizer(shape: Shape, spec: StepSpec) -> list[Operator]:
    """The update, once per step. Sharded AdamW updates its shard; every GPU does all of Muon's iteration."""
    parameters, matrices = trained_params(shape, spec), block_matrices(shape)
    shards = spec.gpus if spec.sharded else 1
    adamw, muon = adamw_bytes(spec), muon_bytes(spec)
    if spec.optimizer == "adamw":
        return [Operator("AdamW", "optimizer_traffic", adamw * parameters / shards)]
    return [
        Operator(
            "Muon, Newton-Schulz", "optimizer_matmul", newton_schulz_flops(shape), width=shape.hidden_size
        ),
        Operator("Muon", "optimizer_traffic", muon * matrices),
        Operator("AdamW", "optimizer_traffic", adamw * (parameters - matrices) / shards),
    ]


def trained_params(shape: Shape, spec: StepSpec) -> int:
    """Numbers that the optimizer updates."""
    return num_params(shape) if spec.adapter is None else adapter_params(shape, spec.adapter)


def adamw_bytes(spec: StepSpec) -> float:
    """GPU memory traffic of AdamW's update, per weight."""
    return units_of(spec).adamw - 2 * (ADAMW_STATE["float32"] - ADAMW_STATE[spec.states])


def muon_bytes(spec: StepSpec) -> float:
    """The same of Muon's, its iteration aside."""
    return units_of(spec).muon - 2 * (MUON_STATE["float32"] - MUON_STATE[spec.states])


def _between_gpus(shape: Shape, spec: StepSpec) -> list[Operator]:
    """Bytes that each GPU sends and receives, and what travels to the host where the optimizer lives there."""
    found = []
    weights = 4.0 * trained_params(shape, spec)
    share = (spec.gpus - 1) / spec.gpus
    if spec.gpus > 1 and spec.sharded:
        # Blocks are gathered in the forward and in the backward of every pass, the rest once for both; gradients are
        # scattered with the last pass.
        gathers = spec.accumulation * (2 * weights - 4.0 * root_params(shape))
        found.append(Operator("FSDP", "communication", (gathers + weights) * share))
        if spec.optimizer == "muon":
            found.append(Operator("Muon, gathered", "communication", 2.0 * block_matrices(shape) * share))
    elif spec.gpus > 1:
        found.append(Operator("all-reduce", "communication", 2 * weights * share))
    if spec.offload_optimizer:
        found.append(Operator("states up, and down meanwhile", "offload", state_bytes(shape, spec).streamed))
    return found
