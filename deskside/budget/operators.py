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
from deskside.budget.work import Work

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
BY_HAND = Units(16, 8, 5, 5, 2, 2, 40, 44)
FP8_HEAD_LOSS = 2.5  # in place of 2: logits are read in 16 bits, their gradient is written in 8 and turned
RECOMPUTED = 0.35  # of the element-wise traffic of a part, when its forward is done again
WEIGHT_BYTES = 24
NEWTON_SCHULZ_STEPS = 5


@dataclass(frozen=True)
class Operator:
    """Work of one kind in one optimiser step on one GPU.

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


def step_operators(shape: Shape, work: Work) -> list[Operator]:
    """Everything that one GPU does in one optimiser step. Embedding look-ups are left out."""
    tokens = float(work.tokens // work.gpus)
    layers, D = shape.num_hidden_layers, shape.hidden_size
    q, kv = shape.num_attention_heads * shape.head_dim, shape.num_key_value_heads * shape.head_dim
    attention_weights, mlp_weights = attention_matrix(shape), mlp_matrix(shape, shape.num_experts_per_tok)
    again_attention = work.activation_checkpointing in ("attention", "block")
    again_mlp = work.activation_checkpointing in ("mlp", "block")
    scores = 4.0 * q * tokens  # of the forward pass, for each token seen
    unit = 4 if work.precision == "fp32" else 2

    inside = shape.intermediate_size
    if shape.num_experts:
        inside = shape.num_experts_per_tok * shape.moe_intermediate_size
    elements = tokens * layers * unit
    units = units_of(work)
    norm = elements * D * units.norm
    rope = elements * ((q + kv) * units.rope + kv * units.rope_keys)
    activation = elements * inside * (units.gated if shape.gated_mlp else units.plain)

    each = float(product_flops(work))
    found = [
        *_products("attention projections", each * tokens * layers * attention_weights, shape, work),
        *_products("MLP", each * tokens * layers * mlp_weights, shape, work),
        Operator(
            "head",
            "head",
            each * tokens * D * shape.vocab_size,
            runs_as=runs_as("fp8", work.native) if work.fp8_head else _plain(work),
        ),
        *_attention(3 * scores, shape, work),
        Operator("norms and residuals", "traffic", norm),
        Operator("QK-norm and RoPE", "traffic", rope),
        Operator("activation", "traffic", activation),
        Operator("loss", "loss_traffic", tokens * shape.vocab_size * unit * loss_units(work)),
        *_weights(shape, work),
        *_adapters(shape, work),
        Operator("layers", "layers", float(layers * work.accumulation)),
        *_quantizing(norm + rope + activation, values_quantized(shape, tokens), work, layers),
    ]
    if again_attention:
        found += [
            *_products("attention projections", 2.0 * tokens * layers * attention_weights, shape, work, True),
            *_attention(scores, shape, work, recompute=True),
            Operator("QK-norm and RoPE", "traffic", RECOMPUTED * (rope + norm / 2), True),
            *_quantizing(
                RECOMPUTED * (rope + norm / 2), (tokens * layers * (D + q), 0.0), work, layers, True
            ),
        ]
    if again_mlp:
        found += [
            *_products("MLP", 2.0 * tokens * layers * mlp_weights, shape, work, True),
            Operator("activation", "traffic", RECOMPUTED * (activation + norm / 2), True),
            *_quantizing(
                RECOMPUTED * (activation + norm / 2),
                (tokens * layers * (D + inside), 0.0),
                work,
                layers,
                True,
            ),
        ]
    return found + _optimizer(shape, work) + _between_gpus(shape, work)


def units_of(work: Work) -> Units:
    """Of the step that does this work."""
    return BY_HAND if work.by_hand else COMPILED


def attention_spans(shape: Shape, work: Work) -> dict[bool, float]:
    """Return the tokens that a token sees, summed over the layers, of those without and with a window (False, True)."""
    layers = range(shape.num_hidden_layers)
    spans = {False: 0.0, True: 0.0}
    for window, count in Counter(shape.layer_window(layer) for layer in layers).items():
        # A window as long as the rows masks nothing.
        masked = window is not None and window < work.sequence_length
        spans[masked] += count * attention_span(work.sequence_length, window)
    return spans


def _attention(scores: float, shape: Shape, work: Work, recompute: bool = False) -> Iterator[Operator]:
    """scores: FLOPs for each token seen."""
    for windowed, span in attention_spans(shape, work).items():
        if span:
            name = "attention, windowed" if windowed else "attention"
            yield Operator(name, "attention", scores * span, recompute, shape.head_dim, windowed=windowed)


def loss_units(work: Work) -> float:
    """Of the loss, which an FP8 head changes."""
    return FP8_HEAD_LOSS if work.by_hand and work.fp8_head else units_of(work).loss


def weight_passes(work: Work) -> int:
    """Passes of a step in which weights are cast and gradients added up outside of products."""
    return 1 if work.copies == "step" and work.precision == "bf16" else work.accumulation


def product_flops(work: Work) -> int:
    """Of a weight and token: output, gradient of the input and, where it trains, its own."""
    return 6 if work.adapter is None else 4


def _weights(shape: Shape, work: Work) -> list[Operator]:
    """Casts of weights, and their gradients added up; dense forms of codes, for every product again."""
    if work.adapter is None:
        return [Operator("weights", "weights", float(WEIGHT_BYTES * num_params(shape) * weight_passes(work)))]
    trained = float(WEIGHT_BYTES * adapter_params(shape, work.adapter) * work.accumulation)
    found = [Operator("weights", "weights", trained)]
    if work.adapter.base != "bf16":
        uses = 2 if work.activation_checkpointing == "none" else 3
        once = matrix_bytes(shape, work.adapter) + 2.0 * block_matrices(shape)
        found.append(Operator("dense forms of codes", "weights", uses * once * work.accumulation))
    return found


def _adapters(shape: Shape, work: Work) -> list[Operator]:
    if work.adapter is None:
        return []
    tokens = float(work.tokens // work.gpus)
    sizes = projection_sizes(shape)
    channels = sum(sum(sizes[name]) for name in work.adapter.targets)
    traffic = 4.0 * tokens * shape.num_hidden_layers * channels * (4 if work.precision == "fp32" else 2)
    flops = 6.0 * tokens * adapter_params(shape, work.adapter)
    return [
        Operator("adapters", "matmul", flops, runs_as=_plain(work)),
        Operator("adapters' inputs and outputs", "traffic", traffic),
    ]


def _plain(work: Work) -> RunsAs:
    return "fp32" if work.precision == "fp32" else "bf16"


def _products(
    name: str, flops: float, shape: Shape, work: Work, recompute: bool = False
) -> Iterator[Operator]:
    """The projections of all blocks, by the rate they run at. A third of a step's FLOPs are the forward's, and all of
    what is recomputed."""
    blocks = work.quantized_share(shape.num_hidden_layers) if quantized(work.precision) else 0.0
    forward, backward = kinds(work.precision)
    shares: dict[RunsAs, float] = {_plain(work): 1 - blocks}
    of_step: tuple[tuple[Kind, float], ...] = ((forward, 1 / 3), (backward, 2 / 3))
    for kind, share in ((forward, 1.0),) if recompute else of_step:
        rate = runs_as(kind, work.native)
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
    traffic: float, values: tuple[float, float], work: Work, layers: int, recompute: bool = False
) -> Iterator[Operator]:
    """Bytes that converting moves beyond the element-wise `traffic` of BF16. values: as `values_quantized` has them.

    In NVFP4 what enters is converted for the output and for the weight gradient, a gradient for the input gradient and
    for the weight gradient; recomputed, only the output is. In FP8 the producers convert, for all products at once.
    """
    if not quantized(work.precision):
        return
    blocks = work.quantized_share(layers)
    forward, backward = kinds(work.precision)
    if work.precision in OWN_SCALE:
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
            amount = blocks * nvfp4_bytes(work.native) * NVFP4_WORK[work.precision] * both
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


def _optimizer(shape: Shape, work: Work) -> list[Operator]:
    """The update, once per step. Sharded AdamW updates its shard; every GPU does all of Muon's iteration."""
    parameters, matrices = trained_params(shape, work), block_matrices(shape)
    shards = work.gpus if work.sharded else 1
    adamw, muon = adamw_bytes(work), muon_bytes(work)
    if work.optimizer == "adamw":
        return [Operator("AdamW", "optimizer_traffic", adamw * parameters / shards)]
    return [
        Operator(
            "Muon, Newton-Schulz", "optimizer_matmul", newton_schulz_flops(shape), width=shape.hidden_size
        ),
        Operator("Muon", "optimizer_traffic", muon * matrices),
        Operator("AdamW", "optimizer_traffic", adamw * (parameters - matrices) / shards),
    ]


def trained_params(shape: Shape, work: Work) -> int:
    """Numbers that the optimizer updates."""
    return num_params(shape) if work.adapter is None else adapter_params(shape, work.adapter)


def adamw_bytes(work: Work) -> float:
    """GPU memory traffic of AdamW's update, per weight."""
    return units_of(work).adamw - 2 * (ADAMW_STATE["float32"] - ADAMW_STATE[work.states])


def muon_bytes(work: Work) -> float:
    """The same of Muon's, its iteration aside."""
    return units_of(work).muon - 2 * (MUON_STATE["float32"] - MUON_STATE[work.states])


def _between_gpus(shape: Shape, work: Work) -> list[Operator]:
    """Bytes that each GPU sends and receives, and what travels to the host where the optimizer lives there."""
    found = []
    weights = 4.0 * trained_params(shape, work)
    share = (work.gpus - 1) / work.gpus
    if work.gpus > 1 and work.sharded:
        # Blocks are gathered in the forward and in the backward of every pass, the rest once for both; gradients are
        # scattered with the last pass.
        gathers = work.accumulation * (2 * weights - 4.0 * root_params(shape))
        found.append(Operator("FSDP", "communication", (gathers + weights) * share))
        if work.optimizer == "muon":
            found.append(Operator("Muon, gathered", "communication", 2.0 * block_matrices(shape) * share))
    elif work.gpus > 1:
        found.append(Operator("all-reduce", "communication", 2 * weights * share))
    if work.offload_optimizer:
        found.append(Operator("states up, and down meanwhile", "offload", state_bytes(shape, work).streamed))
    return found
