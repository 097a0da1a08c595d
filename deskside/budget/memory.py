"""GPU memory of one training step, item by item. Everything here is modelled, not measured.

The peak of allocated bytes is the largest of four instants, each of which is summed up and named:

    loss        all activations are kept, and a chunk of logits, the head's gradient and the stream's ends are there
    backward    the blocks' backward begins: one block's temporary gradients, and what checkpointing computes again
    gradients   the backward ends: all gradients are there and no activations but those of the first block
    update      the optimizer works: gradients, and Muon's stacks of matrices

Gradients of an earlier pass are there from the beginning when a step has several passes, and only grow during the
backward when it has one. What a block keeps for its backward pass, in bfloat16, was read from the tensors that autograd
(eager) and torch.compile's partitioner (compiled) save for this project's own blocks; a test reads them again:

    bytes per token and layer           compiled                 eager
    residual, deltas, norms             8 D + 8                  20 D + 8
    q, k, v, attention output           4 (Hc + Kc) + 4 H        4 (Hc + Kc) + 4 H
    q, k once more, if RoPE or QK-norm  2 (Hc + Kc)              2 (Hc + Kc)
    QK-norm                             4 (H + K)                8 (Hc + Kc) + 4 (H + K)
    MLP, gated                          6 F                      8 F
    MLP, not gated                      4 F                      4 F

Hc is heads x head_dim, Kc is key-value heads x head_dim. Of a mixture of experts F is the chosen experts' together, and
each choice has its own copy of input and output. A recomputed part keeps what enters it and nothing of the
float32-to-bfloat16 copies of its weights; a recomputed block keeps the pair (residual, delta), 4 D.

Converted weights stay from one optimiser step to the next where they are cached (`budget/formats.py` has their bytes).
In FP8 what a projection reads is kept as transposed FP8 for the weight gradient: one byte instead of two for the normed
inputs, 2 D, and the MLP's inside, F, and one more for attention's output, Hc, whose 16 bits attention needs itself. The
hand-written halves (`precision/halves.py`) keep what the table calls compiled, but for QK-norm's statistics. Blocks
that stay in BF16 are as above.

What lies beside the halves was read from the step and not fitted. The stream's end is 4 D: the last norm's residual,
and the hidden states while the loss is computed. A chunk of logits becomes its own gradient in place, so that there are
two when a chunk is followed by the next; an FP8 head has 16-bit logits, their gradients in 8 bits, and those of
two chunks turned, beside the hidden states in FP8 both ways and a second gradient of its weight. A half recomputes
and differentiates itself alone. Its gradients are largest before its first projection, whose W outputs (2 F, or F
without a gate; Hc + 2 Kc) have theirs beside what they are made of: 2 D + 2 F + 2 W in the MLP, and 2 D + 8 Hc + 4 Kc
in attention, whose kernels sum d q in float32. Or within that projection: 6 D + 2 W, and 2 W more in FP8 (the first
step of delayed scales casts what is there already), 4 W more in NVFP4, emulated. Kept blocks are last, and so first.

Sharded weights (FSDP2, each block a group and the rest one, `train/parallel.py`) are gathered in float32: two blocks at
a time, and the root (embedding, head) from the forward to the end of the backward. Gradients are scattered with the
last pass of a step. So every GPU holds whole gradients when there are several passes; when there is one, the gradients
of the blocks on their way and of the root, whose group is the last to leave. A test tracks two processes doing it.
Replicas copy their gradients into a bucket to sum them.

Where adapters train beside frozen weights (`budget/adapters.py`), gradients and optimiser states are theirs alone, no
head's gradient is there, a frozen weight in codes is in the activations' dtype while it is used, and a chunk of logits
becomes its own gradient as above.

What lies beside blocks that torch compiles was found from 63 configurations measured on an H200, with the loss of that
day, whose gradient was beside its logits (docs/planner-accuracy.md): 7 D bytes per token for the stream's two ends,
1.36 times a part's activations while it is recomputed and differentiated.
"""

from collections.abc import Callable
from dataclasses import dataclass

from deskside.budget.adapters import adapter_params, dense_bytes, frozen_bytes, joined_bytes, kept_more
from deskside.budget.formats import SAVED_BF16, kinds, quantized, saved_bytes, weight_copies
from deskside.budget.shape import Shape, block_matrices, num_params, root_params
from deskside.budget.states import on_gpu
from deskside.budget.step_spec import AdapterSpec, Checkpointing, StepSpec

ENDS = 7  # bytes per token and hidden channel: embedding, its halves, the last norm
END = 4  # the same of the hand-written step, and only until the backward begins
RECOMPUTE = 1.36  # a part that is recomputed and differentiated, in units of what it keeps when it is not
TEMPORARY = RECOMPUTE - 1  # the gradients inside of one block
LIBRARIES = 64 * 2**20  # cuBLAS workspaces
STACK_WEIGHTS = 2**26  # Muon works on so many weights at a time, at least on one matrix
BUCKET_WEIGHTS = 2**25  # replicas sum their gradients when a bucket has so many, whole tensors only
STACK_BYTES = 14  # bfloat16 iterate and two results, float32 weight and update
RESERVED_SHARE, RESERVED_BYTES = 0.05, 256 * 2**20  # what the allocator held beyond its peak, in the middle


@dataclass(frozen=True)
class Memory:
    """Bytes by item at one instant: weights, gradients, optimizer, copies, activations, logits, workspace.

    allocated: their sum; reserved: what torch's allocator is expected to hold for it, fragments included.
    """

    items: dict[str, int]
    instant: str

    @property
    def allocated(self) -> int:
        return sum(self.items.values())

    @property
    def reserved(self) -> int:
        return int(self.allocated * (1 + RESERVED_SHARE)) + RESERVED_BYTES


def training_memory(shape: Shape, spec: StepSpec) -> Memory:
    """The modelled peak of one optimiser step on one GPU."""
    return max(instants(shape, spec).values(), key=lambda memory: memory.allocated)


def largest_micro_tokens(
    memory: Callable[[int], Memory], sequence_length: int, free_bytes: int, margin: float = 1.1
) -> int:
    """The most tokens, a power of two of rows, that are modelled to fit; one row if not even that does.

    memory: micro-batch in tokens -> `training_memory` with the rest filled in; margin: what allocated bytes are
    multiplied with before they must fit, for fragmentation.
    """
    rows = 1
    while memory(2 * rows * sequence_length).allocated * margin <= free_bytes:
        rows *= 2
    return rows * sequence_length


def instants(shape: Shape, spec: StepSpec) -> dict[str, Memory]:
    """What is allocated at each of the four instants."""
    found = _instants(shape, spec)
    return {name: Memory({k: int(v) for k, v in items.items()}, name) for name, items in found.items()}


def _adapted_instants(shape: Shape, spec: StepSpec, adapter: AdapterSpec) -> dict[str, dict[str, float]]:
    """The four instants where only adapters train. Blocks run as they are written."""
    trained = 4.0 * adapter_params(shape, adapter)
    D, V, N = shape.hidden_size, shape.vocab_size, spec.micro_tokens
    wide = spec.precision == "fp32"
    width, rung = 2 if wide else 1, spec.activation_checkpointing
    parts = _Parts(shape, spec.compiled, width)
    always: dict[str, float] = {
        "weights": frozen_bytes(shape, adapter) + trained,
        "optimizer": on_gpu(shape, spec),
    }
    more = width * kept_more(shape, spec)
    share = {"none": 1.0, "block": 0.0}.get(rung, 0.5)
    kept = parts.kept(rung) + shape.num_hidden_layers * more * share
    # Weights in 16 bits are what BF16 activations meet; for others autograd keeps a copy.
    copies = 4.0 * parts.copied_weights(rung) if wide and adapter.base == "bf16" else 0.0
    copies += share * joined_bytes(shape, spec)
    ends, dense = ENDS * N * D * width, dense_bytes(shape, spec)
    earlier = trained if spec.accumulation > 1 else 0.0
    logits = min(spec.loss_chunk_tokens, N) * V * logit_bytes(spec) + hidden_bytes(spec) * N * D
    bucket = 0 if spec.gpus == 1 else min(trained, 4.0 * BUCKET_WEIGHTS)
    return {
        "loss": {
            **always,
            "gradients": earlier,
            "copies": copies + (4 * V * D if wide else 0),
            "activations": N * kept + ends,
            "logits": logits,
            "workspace": LIBRARIES,
        },
        "backward": {
            **always,
            "gradients": earlier,
            "copies": copies,
            "activations": N * kept + ends,
            "logits": 0,
            "workspace": LIBRARIES + N * (parts.backward(rung) + (more if rung == "block" else 0)) + dense,
        },
        "gradients": {
            **always,
            "gradients": trained,
            "copies": 0,
            "activations": N * (parts.block + more) + ends,
            "logits": 0,
            "workspace": LIBRARIES + N * parts.last_gradients + dense,
        },
        "update": {
            **always,
            "gradients": trained,
            "copies": 0,
            "activations": 0,
            "logits": 0,
            "workspace": LIBRARIES + bucket,
        },
    }


def _instants(shape: Shape, spec: StepSpec) -> dict[str, dict[str, float]]:
    if spec.adapter is not None:
        return _adapted_instants(shape, spec, spec.adapter)
    parameters, matrices = num_params(shape), block_matrices(shape)
    D, V, N = shape.hidden_size, shape.vocab_size, spec.micro_tokens
    width = 2 if spec.precision == "fp32" else 1  # the tables' bytes are bfloat16's
    shards = spec.gpus if spec.sharded else 1
    always: dict[str, float] = {
        "weights": 4 * parameters / shards,
        "optimizer": on_gpu(shape, spec),
    }
    whole, head = 4.0 * parameters, 4.0 * V * D
    several = spec.accumulation > 1
    earlier = whole if several else 0.0
    one_layer, root = 4 * matrices / shape.num_hidden_layers, 4.0 * root_params(shape)
    rung = spec.activation_checkpointing
    if spec.fused:
        parts: _Parts = _Halves(shape, spec, width)
        ends, later_ends = float(END), 0.0
    else:
        parts = _Parts(shape, spec.compiled, width, saved_per_value(shape, spec))
        ends = later_ends = float(ENDS)
    activations = N * parts.kept(rung)
    temporary = N * parts.backward(rung)
    copies = 0.0
    if width == 1 and spec.copies == "pass":
        copies = 2.0 * parts.copied_weights(rung)
    head_copy: float = 2 * V * D if width == 1 else 0
    lasting = 0.0  # copies that are there at the update too
    if has_cache(spec):
        copies = lasting = cached_weights(shape, spec)
        if spec.fp8_head:  # W and W^T, and among the lasting ones already
            head_copy = 0
    # FSDP gathers one block in float32 while it computes, and the next one meanwhile, if there is a next one.
    fixed = LIBRARIES + (2 * one_layer + root if spec.sharded else 0.0)
    fixed_at_end = LIBRARIES + (one_layer + root if spec.sharded else 0.0)
    # A block's gradients on their way are there a second time, in one flat tensor.
    sent = one_layer * (1 if several else 2) if spec.sharded else 0.0

    logits = min(spec.loss_chunk_tokens, N) * V * logit_bytes(spec)
    hidden = hidden_bytes(spec) * N * D
    heads = head_gradients(spec)
    stack = max(STACK_WEIGHTS, D * max(shape.intermediate_size, shape.moe_intermediate_size))
    update = STACK_BYTES * min(matrices, stack) if spec.optimizer == "muon" else 0
    return {
        "loss": {
            **always,
            "gradients": earlier,
            "copies": copies + head_copy,
            "activations": activations + ends * N * D * width,
            "logits": logits + heads * head + hidden,
            "workspace": fixed,
        },
        "backward": {
            **always,
            "gradients": max(earlier, head),
            "copies": copies,
            "activations": activations + later_ends * N * D * width,
            # A tied head's gradient waits for the embedding's.
            "logits": head if shape.tie_word_embeddings and several else 0,
            "workspace": fixed + sent + temporary,
        },
        "gradients": {
            **always,
            "gradients": whole if several else (whole - root) / shards + root,
            "copies": lasting,
            "activations": N * (parts.block + later_ends * D * width),
            "logits": 0,
            # Of several passes the one before the last, which scatters nothing yet.
            "workspace": fixed_at_end + (head if several else sent) + N * parts.last_gradients,
        },
        "update": {
            **always,
            "gradients": whole / shards,
            "copies": lasting,
            "activations": 0,
            "logits": 0,
            # One after the other: gradients are summed before they are used.
            "workspace": LIBRARIES + max(update, bucket_bytes(shape, spec)),
        },
    }


def logit_bytes(spec: StepSpec) -> int:
    """Bytes per logit of a chunk, in the activations' dtype.

    The kernel writes the gradient over the logits; the loss that compiled blocks were measured with made another
    tensor. The last chunk's gradient is still there at the next.
    """
    several = spec.loss_chunk_tokens < spec.micro_tokens
    if spec.fused and spec.fp8_head:
        return 5 if several else 3
    copies = (1 if spec.fused or spec.adapter is not None else 2) + several
    return copies * (4 if spec.precision == "fp32" else 2)


def hidden_bytes(spec: StepSpec) -> int:
    """Bytes per hidden state beside itself in the loss: its gradient, and FP8 both ways for an FP8 head."""
    return (4 if spec.precision == "fp32" else 2) + (2 if spec.fused and spec.fp8_head else 0)


def head_gradients(spec: StepSpec) -> int:
    """Gradients of the head's weight in the loss: FP8 products cannot add to one that is there."""
    return 2 if spec.fused and spec.fp8_head and spec.loss_chunk_tokens < spec.micro_tokens else 1


def half_gradients(shape: Shape, spec: StepSpec) -> tuple[int, int]:
    """(attention's, the MLP's) temporary gradients in a hand-written half, bytes per token."""
    D, F, W = shape.hidden_size, shape.intermediate_size, 2 if shape.gated_mlp else 1
    q, kv = shape.num_attention_heads * shape.head_dim, shape.num_key_value_heads * shape.head_dim
    each = per_output(spec)
    return (
        max(2 * D + 8 * q + 4 * kv, 6 * D + each * (q + 2 * kv)),
        max(2 * D + 2 * F + 2 * W * F, 6 * D + each * W * F),
    )


def per_output(spec: StepSpec) -> int:
    """Bytes per output of a projection that its gradient takes while it is used, in every form that it has."""
    return 2 if spec.kept_blocks else {"fp32": 2, "bf16": 2, "fp8": 4, "nvfp4": 6}[kinds(spec.precision)[1]]


def has_cache(spec: StepSpec) -> bool:
    """Whether converted weights outlast a pass."""
    return quantized(spec.precision) or (spec.copies == "step" and spec.precision == "bf16")


def cached_weights(shape: Shape, spec: StepSpec) -> float:
    """Bytes of the converted weights that stay from step to step: blocks in the recipe's formats, kept blocks in BF16,
    and the head's W and W^T where it is in FP8."""
    share = spec.quantized_share(shape.num_hidden_layers)
    each = share * weight_copies(spec.precision, spec.native)
    each += (1 - share) * weight_copies("bf16", spec.native)
    head = weight_copies("fp8", spec.native) * shape.vocab_size * shape.hidden_size if spec.fp8_head else 0.0
    return each * block_matrices(shape) + head


def saved_per_value(shape: Shape, spec: StepSpec) -> float:
    """Bytes per value of what projections read, kept for their weight gradients: the mean over the blocks."""
    share = spec.quantized_share(shape.num_hidden_layers)
    return (1 - share) * SAVED_BF16 + share * saved_bytes(spec.precision)


def bucket_bytes(shape: Shape, spec: StepSpec) -> int:
    """The largest bucket of gradients that replicas sum: it may end with the largest tensor, which is a table's."""
    if spec.gpus == 1 or spec.sharded:
        return 0
    return 4 * min(num_params(shape), BUCKET_WEIGHTS + shape.vocab_size * shape.hidden_size)


class _Parts:
    """Bytes per token that one layer keeps, by part. saved: bytes per value of what projections read."""

    def __init__(self, shape: Shape, compiled: bool, width: int, saved: float = SAVED_BF16):
        D = shape.hidden_size
        heads = shape.num_attention_heads + shape.num_key_value_heads
        channels = heads * shape.head_dim
        attention = 4 * channels + 4 * shape.num_attention_heads
        if shape.qk_norm or shape.position_embedding == "rope":
            attention += 2 * channels
        if shape.qk_norm:
            attention += 4 * heads + (0 if compiled else 8 * channels)
        per_ffn = (6 if compiled else 8) if shape.gated_mlp else 4
        inside: float = shape.intermediate_size
        if shape.num_experts:
            inside = shape.num_experts_per_tok * shape.moe_intermediate_size
            mlp: float = per_ffn * inside + shape.num_experts_per_tok * 4 * D
        else:
            mlp = per_ffn * inside
        less = SAVED_BF16 - saved
        self.width, self.layers = width, shape.num_hidden_layers
        self.stream = width * ((8 if compiled else 20) * D + 8) - 2 * D * less
        # Attention's backward needs its output in 16 bits whatever the projection after it keeps: FP8 is beside it.
        output = shape.num_attention_heads * shape.head_dim * less
        self.attention, self.mlp = width * attention + output, width * mlp - inside * less
        self.hidden, self.normed = width * D, width * D - D * less / 2
        self.matrices = block_matrices(shape)
        self.attention_matrices = self.layers * D * 2 * channels

    @property
    def block(self) -> float:
        return self.stream + self.attention + self.mlp

    @property
    def last_gradients(self) -> float:
        """Temporary gradients of the first block, where the backward ends."""
        return self.block * TEMPORARY

    def backward(self, checkpointing: Checkpointing) -> float:
        """What the last block's backward makes: temporary gradients, and what is computed again."""
        if checkpointing == "none":
            return self.block * TEMPORARY
        return self.recomputed(checkpointing) * RECOMPUTE

    def kept(self, checkpointing: Checkpointing) -> float:
        """By all layers."""
        # A recomputed half does not keep its normed input: 2 D, or D in FP8.
        half = self.stream - 2 * self.normed
        return (
            self.layers
            * {
                "none": self.block,
                "attention": half + self.mlp,
                "mlp": half + self.attention,
                "block": 4 * self.hidden,
            }[checkpointing]
        )

    def recomputed(self, checkpointing: Checkpointing) -> float:
        """Of the layer that is being recomputed."""
        return {
            "none": 0,
            "attention": self.attention + self.stream // 2,
            "mlp": self.mlp + self.stream // 2,
            "block": self.block,
        }[checkpointing]

    def copied_weights(self, checkpointing: Checkpointing) -> int:
        """Weights of the blocks whose bfloat16 copies are kept from the forward to the backward."""
        return {
            "none": self.matrices,
            "attention": self.matrices - self.attention_matrices,
            "mlp": self.attention_matrices,
            "block": 0,
        }[checkpointing]


class _Halves(_Parts):
    """The same of the hand-written halves: each recomputes and differentiates itself, before the next one does."""

    def __init__(self, shape: Shape, spec: StepSpec, width: int):
        super().__init__(shape, True, width, saved_per_value(shape, spec))
        if shape.qk_norm:  # statistics are found again
            self.attention -= width * 4 * (shape.num_attention_heads + shape.num_key_value_heads)
        self.attention_gradients, self.mlp_gradients = (width * b for b in half_gradients(shape, spec))

    @property
    def last_gradients(self) -> float:
        return self.attention_gradients

    def backward(self, checkpointing: Checkpointing) -> float:
        """The MLP half goes first; when attention's turn comes, what the MLP had kept is gone."""
        attention = self.normed + self.attention + self.attention_gradients
        if checkpointing == "none":
            return self.mlp_gradients
        if checkpointing == "attention":
            return max(self.mlp_gradients, attention - self.normed - self.mlp)
        again = self.normed + self.mlp + self.mlp_gradients
        return again if checkpointing == "mlp" else max(again, attention)
