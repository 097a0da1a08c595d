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

Converted weights stay from one optimizer step to the next where they are cached (`budget/formats.py` has their bytes).
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

Where adapters train beside frozen weights (`budget/adapters.py`), gradients and optimizer states are theirs alone, no
head's gradient is there, a frozen weight in codes is in the activations' dtype while it is used, and a chunk of logits
becomes its own gradient as above.

What lies beside blocks that torch compiles was found from 63 configurations measured on an H200, with the loss of that
day, whose gradient was beside its logits (docs/planner-accuracy.md): 7 D bytes per token for the stream's two ends,
1.36 times a part's activations while it is recomputed and differentiated.
"""

from dataclasses import dataclass, replace
from functools import cached_property

from deskside.budget.adapters import adapter_params, dense_bytes, frozen_bytes, joined_bytes, kept_more
from deskside.budget.format_costs import SAVED_BF16, kinds, quantized, saved_bytes, weight_copies
from deskside.budget.shape import Shape
from deskside.budget.sizes import Sizes
from deskside.budget.states import on_gpu
from deskside.budget.step_spec import AdapterSpec, Checkpointing, StepSpec
from deskside.budget.terms import Line, explained, named

# Bytes per token and hidden channel at the stream's two ends: embedding, its casts, the last norm. In the fused step
# only until the backward begins.
STREAM_ENDS, FUSED_STREAM_END = 7, 4
RECOMPUTE = (
    1.36  # a part that is recomputed and differentiated, relative to what it keeps without recomputation
)
TEMPORARY = RECOMPUTE - 1  # the gradients inside one block
LIBRARIES = 64 * 2**20  # cuBLAS workspaces
STACK_WEIGHTS = 2**26  # Muon works on so many weights at a time, but at least on one matrix
BUCKET_WEIGHTS = 2**25  # replicas sum their gradients when a bucket has so many, in whole tensors
STACK_BYTES = 14  # bfloat16 iterate and two results, float32 weight and update
RESERVED_SHARE, RESERVED_BYTES = 0.05, 256 * 2**20  # median of what the allocator held beyond its peak
Items = dict[str, float]


@dataclass(frozen=True)
class Memory:
    """Bytes by item at one instant: weights, gradients, optimizer, copies, activations, logits, workspace.

    allocated: their sum; reserved: what torch's allocator is expected to hold for it, fragments included.
    """

    items: dict[str, int]
    instant: str

    @cached_property
    def allocated(self) -> int:
        return sum(self.items.values())

    @cached_property
    def reserved(self) -> int:
        return int(self.allocated * (1 + RESERVED_SHARE)) + RESERVED_BYTES


def training_memory(shape: Shape, spec: StepSpec) -> Memory:
    """Return the modelled peak of one optimizer step on one GPU."""
    found = _instants(Sizes(shape, spec))
    peak = max(found, key=lambda name: sum(map(int, found[name].values())))
    return Memory({item: int(size) for item, size in found[peak].items()}, peak)


def instants(shape: Shape, spec: StepSpec) -> dict[str, Memory]:
    """Return what is allocated at each of the four instants."""
    found = _instants(Sizes(shape, spec))
    return {name: Memory({k: int(v) for k, v in items.items()}, name) for name, items in found.items()}


def explain_memory(shape: Shape, spec: StepSpec, instant: str, item: str) -> list[Line]:
    """Return the arithmetic behind one item at one instant."""
    value = _instants(Sizes(shape, spec, traced=True))[instant][item]
    *steps, last = explained(
        f"{item}, at the instant '{instant}'", value, "bytes", nothing="none at this instant"
    )
    return [*steps, replace(last, value=int(value))]


def _instants(sizes: Sizes) -> dict[str, Items]:
    adapter = sizes.spec.adapter
    return _full_training(sizes) if adapter is None else _adapter_training(sizes, adapter)


def _full_training(sizes: Sizes) -> dict[str, Items]:
    spec, s = sizes.spec, sizes
    fp32 = spec.precision == "fp32"
    width = 2 if fp32 else 1  # the byte counts of this module are bfloat16's
    several = spec.accumulation > 1
    rung = spec.activation_checkpointing

    layer = _LayerBytes(s, width, saved_per_value(s.shape, spec))
    stream_end = s.pass_tokens * (s.hidden * width)
    ends = FUSED_STREAM_END * stream_end if spec.fused else STREAM_ENDS * stream_end
    later_ends = 0.0 if spec.fused else ends

    head: float = 4.0 * s.vocabulary * s.hidden
    root: float = 4.0 * s.root_weights
    all_gradients: float = 4.0 * s.parameters
    one_layer = 4 * s.block_weights / s.layers
    earlier = all_gradients if several else 0.0

    # Converted weights: kept from forward to backward by autograd, or from step to step by the cache.
    copies = lasting_copies = 0.0
    head_copy = 0.0 if fp32 else 2 * s.vocabulary * s.hidden
    if has_cache(spec):
        copies = lasting_copies = cached_weights(s)
        if spec.fp8_head:  # W and W^T are among the cached ones already
            head_copy = 0.0
    elif spec.copies == "pass" and not fp32:
        copies = 2.0 * layer.copied_weights(rung)

    # FSDP gathers one block in float32 while it computes, and the next one at the same time, if there is one.
    libraries = s.leaf("cuBLAS workspaces", LIBRARIES)
    gathered = libraries + (2 * one_layer + root if spec.sharded else 0.0)
    gathered_at_end = libraries + (one_layer + root if spec.sharded else 0.0)
    # Gradients of a block that is being reduced exist a second time, in one flat tensor.
    reduced = (one_layer if several else 2 * one_layer) if spec.sharded else 0.0

    logits = s.chunk_tokens * s.vocabulary * logit_bytes(spec)
    hidden = hidden_bytes(spec) * s.pass_tokens * s.hidden
    always: Items = {"weights": 4 * s.parameters / s.shards, "optimizer": on_gpu(s)}
    return {
        "loss": {
            **always,
            "gradients": earlier,
            "copies": copies + head_copy,
            "activations": s.pass_tokens * layer.kept(rung) + ends,
            "logits": logits + head_gradients(spec) * head + hidden,
            "workspace": gathered,
        },
        "backward": {
            **always,
            "gradients": max(earlier, head),
            "copies": copies,
            "activations": s.pass_tokens * layer.kept(rung) + later_ends,
            # The gradient of a tied head waits for the embedding's.
            "logits": head if s.shape.tie_word_embeddings and several else 0.0,
            "workspace": gathered + reduced + s.pass_tokens * layer.backward(rung),
        },
        "gradients": {
            **always,
            "gradients": all_gradients if several else (all_gradients - root) / s.shards + root,
            "copies": lasting_copies,
            "activations": s.pass_tokens * layer.block + later_ends,
            "logits": 0.0,
            # With several passes this is the pass before the last, which reduces nothing yet.
            "workspace": gathered_at_end
            + (head if several else reduced)
            + s.pass_tokens * layer.last_gradients,
        },
        "update": {
            **always,
            "gradients": all_gradients / s.shards,
            "copies": lasting_copies,
            "activations": 0.0,
            "logits": 0.0,
            # One after the other: gradients are summed before they are used.
            "workspace": libraries + max(_muon_stack(s), _bucket_bytes(s)),
        },
    }


def _adapter_training(sizes: Sizes, adapter: AdapterSpec) -> dict[str, Items]:
    """Return the four instants of a step that trains only adapters. Its blocks are not fused."""
    spec, s = sizes.spec, sizes
    fp32 = spec.precision == "fp32"
    width, rung = 2 if fp32 else 1, spec.activation_checkpointing
    gradients = 4.0 * s.leaf("parameters of the adapters", adapter_params(s.shape, adapter))
    layer = _LayerBytes(s, width, SAVED_BF16)
    more = s.leaf("kept more for the adapters, per token and layer", width * kept_more(s.shape, spec))
    kept_share = {"none": 1.0, "block": 0.0}.get(rung, 0.5)
    kept = layer.kept(rung) + s.layers * more * kept_share
    ends, dense = STREAM_ENDS * s.pass_tokens * s.hidden * width, dense_bytes(s.shape, spec)
    earlier = gradients if spec.accumulation > 1 else 0.0
    # BF16 activations meet 16-bit weights as they are; for other dtypes autograd keeps a copy.
    copies = 4.0 * layer.copied_weights(rung) if fp32 and adapter.base == "bf16" else 0.0
    copies += kept_share * s.leaf("joined A and B", joined_bytes(s.shape, spec))
    libraries = s.leaf("cuBLAS workspaces", LIBRARIES)
    dequantized = s.leaf("largest dequantized weight", dense) if dense else 0.0
    always: Items = {"weights": frozen_bytes(s, adapter) + gradients, "optimizer": on_gpu(s)}
    return {
        "loss": {
            **always,
            "gradients": earlier,
            "copies": copies + (4 * s.vocabulary * s.hidden if fp32 else 0.0),
            "activations": s.pass_tokens * kept + ends,
            "logits": s.chunk_tokens * s.vocabulary * logit_bytes(spec)
            + hidden_bytes(spec) * s.pass_tokens * s.hidden,
            "workspace": libraries,
        },
        "backward": {
            **always,
            "gradients": earlier,
            "copies": copies,
            "activations": s.pass_tokens * kept + ends,
            "logits": 0.0,
            "workspace": libraries
            + s.pass_tokens * (layer.backward(rung) + (more if rung == "block" else 0.0))
            + dequantized,
        },
        "gradients": {
            **always,
            "gradients": gradients,
            "copies": 0.0,
            "activations": s.pass_tokens * (layer.block + more) + ends,
            "logits": 0.0,
            "workspace": libraries + s.pass_tokens * layer.last_gradients + dequantized,
        },
        "update": {
            **always,
            "gradients": gradients,
            "copies": 0.0,
            "activations": 0.0,
            "logits": 0.0,
            "workspace": libraries + (0.0 if spec.gpus == 1 else min(gradients, 4.0 * BUCKET_WEIGHTS)),
        },
    }


def logit_bytes(spec: StepSpec) -> int:
    """Return the bytes per logit of a chunk, in the activations' dtype.

    The fused kernel writes the gradient over the logits; the loss that compiled blocks were measured with made another
    tensor. The gradient of the last chunk is still there when the next one begins.
    """
    several = spec.loss_chunk_tokens < spec.micro_tokens
    if spec.fused and spec.fp8_head:
        return 5 if several else 3
    copies = (1 if spec.fused or spec.adapter is not None else 2) + several
    return copies * (4 if spec.precision == "fp32" else 2)


def hidden_bytes(spec: StepSpec) -> int:
    """Return the bytes beside each hidden state in the loss: its gradient, and two FP8 layouts for an FP8 head."""
    return (4 if spec.precision == "fp32" else 2) + (2 if spec.fused and spec.fp8_head else 0)


def head_gradients(spec: StepSpec) -> int:
    """Return how many gradients of the head's weight exist in the loss. FP8 products cannot accumulate in place."""
    return 2 if spec.fused and spec.fp8_head and spec.loss_chunk_tokens < spec.micro_tokens else 1


def sublayer_gradients(sizes: Sizes) -> tuple[float, float]:
    """Return the temporary gradients of a fused attention and of a fused MLP, in bytes per token."""
    D, q, kv = sizes.hidden, sizes.queries, sizes.keys
    F, outputs = sizes.leaf("MLP width", sizes.shape.intermediate_size), 2 if sizes.shape.gated_mlp else 1
    # The gradient of a projection's output exists in every format that a product reads it in.
    backward_kind = kinds(sizes.spec.precision)[1]
    each = 2 if sizes.spec.kept_blocks else {"fp32": 2, "bf16": 2, "fp8": 4, "nvfp4": 6}[backward_kind]
    return (
        max(2 * D + 8 * q + 4 * kv, 6 * D + each * (q + 2 * kv)),
        max(2 * D + 2 * F + 2 * outputs * F, 6 * D + each * outputs * F),
    )


def has_cache(spec: StepSpec) -> bool:
    """Return whether converted weights are kept from step to step."""
    return quantized(spec.precision) or (spec.copies == "step" and spec.precision == "bf16")


def cached_weights(sizes: Sizes) -> float:
    """Return the bytes of converted weights that are kept from step to step: blocks in the recipe's formats, kept
    blocks in BF16, and W and W^T of an FP8 head."""
    spec = sizes.spec
    low, high = weight_copies(spec.precision, spec.native), weight_copies("bf16", spec.native)
    share = spec.quantized_share(sizes.shape.num_hidden_layers)
    each: float = low
    if share != 1:
        part = sizes.leaf(f"share of the weights in {spec.precision}", share)
        each = named("bytes of a weight's copies", part * low + (1 - part) * high)
    head = 0.0
    if spec.fp8_head:
        head = weight_copies("fp8", spec.native) * sizes.vocabulary * sizes.hidden
    return each * sizes.block_weights + head


def saved_per_value(shape: Shape, spec: StepSpec) -> float:
    """Return the bytes per value of the projections' inputs that are kept for weight gradients, averaged over the
    blocks."""
    share = spec.quantized_share(shape.num_hidden_layers)
    return (1 - share) * SAVED_BF16 + share * saved_bytes(spec.precision)


def _muon_stack(sizes: Sizes) -> float:
    if sizes.spec.optimizer != "muon":
        return 0.0
    widest = max(sizes.shape.intermediate_size, sizes.shape.moe_intermediate_size)
    stack = max(STACK_WEIGHTS, sizes.shape.hidden_size * widest)
    return STACK_BYTES * sizes.leaf("weights of Muon's stack", min(sizes.block_weights, stack))


def _bucket_bytes(sizes: Sizes) -> float:
    """Return the bytes of the largest bucket of gradients that replicas sum. It may end with the largest tensor, a
    table."""
    if sizes.spec.gpus == 1 or sizes.spec.sharded:
        return 0.0
    table = sizes.shape.vocab_size * sizes.shape.hidden_size
    return 4 * sizes.leaf("weights of a gradient bucket", min(sizes.parameters, BUCKET_WEIGHTS + table))


class _LayerBytes:
    """Bytes per token that one layer keeps for its backward, by part: residual stream and norms, attention, MLP.

    saved: bytes per value that a projection's input takes when it is kept for the weight gradient.
    """

    def __init__(self, sizes: Sizes, width: int, saved: float):
        s, shape, compiled = sizes, sizes.shape, sizes.spec.compiled or sizes.spec.fused
        self.sizes = s
        channels = s.queries + s.keys
        attention = 4 * channels + 4 * s.heads
        if shape.qk_norm or shape.position_embedding == "rope":
            attention += 2 * channels
        if shape.qk_norm and not s.spec.fused:  # the fused sublayer computes the statistics again
            attention += 4 * (s.heads + s.kv_heads) + (0 if compiled else 8 * channels)
        mlp = ((6 if compiled else 8) if shape.gated_mlp else 4) * s.mlp_width
        if shape.num_experts:  # each choice has its own copy of input and output
            mlp += s.leaf("experts per token", shape.num_experts_per_tok) * 4 * s.hidden
        less = SAVED_BF16 - saved
        # Attention's backward needs its output in 16 bits, whatever the projection after it keeps of it beside that.
        output = s.queries * less
        per_token = "per token and layer"
        stream = width * ((8 if compiled else 20) * s.hidden + 8) - 2 * s.hidden * less
        self.stream = named(f"residual stream and norms, {per_token}", stream)
        self.attention = named(f"attention, {per_token}", width * attention + output)
        self.mlp = named(f"MLP, {per_token}", width * mlp - s.mlp_width * less)
        self.block_input = 4 * (width * s.hidden)  # a recomputed block keeps the pair (residual, delta)
        self.normed = width * s.hidden - s.hidden * less / 2
        self.gradients: tuple[float, float] | None = None
        if s.spec.fused:
            of_attention, of_mlp = sublayer_gradients(s)
            self.gradients = (
                named(f"temporary gradients of attention, {per_token}", width * of_attention),
                named(f"temporary gradients of the MLP, {per_token}", width * of_mlp),
            )

    @property
    def block(self) -> float:
        return self.stream + self.attention + self.mlp

    @property
    def last_gradients(self) -> float:
        """Temporary gradients of the first block, where the backward ends."""
        return self.block * TEMPORARY if self.gradients is None else self.gradients[0]

    def kept(self, rung: Checkpointing) -> float:
        """Return what all layers keep. A recomputed sublayer does not keep its normed input."""
        if rung == "block":
            return self.sizes.layers * self.block_input
        if rung == "none":
            return self.sizes.layers * self.block
        other = self.mlp if rung == "attention" else self.attention
        return self.sizes.layers * (self.stream - 2 * self.normed + other)

    def backward(self, rung: Checkpointing) -> float:
        """Return what the backward of the last block allocates: temporary gradients and recomputed activations."""
        if self.gradients is None:
            if rung == "none":
                return self.block * TEMPORARY
            if rung == "block":
                return self.block * RECOMPUTE
            return ((self.attention if rung == "attention" else self.mlp) + self.stream / 2) * RECOMPUTE
        # Each fused sublayer recomputes and differentiates itself alone. The MLP goes first, and its kept activations
        # are free when attention begins.
        attention, mlp = self.gradients
        if rung == "none":
            return mlp
        if rung == "attention":
            return max(mlp, self.attention + attention - self.mlp)
        whole_mlp = self.normed + self.mlp + mlp
        return whole_mlp if rung == "mlp" else max(whole_mlp, self.normed + self.attention + attention)

    def copied_weights(self, rung: Checkpointing) -> float:
        """Return the weights of the blocks whose bfloat16 copies autograd keeps from the forward to the backward."""
        attention = self.sizes.layers * self.sizes.attention_weights
        return {
            "none": self.sizes.block_weights,
            "attention": self.sizes.block_weights - attention,
            "mlp": attention,
            "block": 0.0,
        }[rung]
