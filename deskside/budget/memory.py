"""GPU memory of one training step, item by item. Everything here is modelled, not measured.

The peak of allocated bytes is the largest sum among four instants:

    loss        all saved activations, a chunk of logits, the head's gradient, and the ends of the residual stream
    backward    the backward of the last block: its temporary gradients and its recomputed activations
    gradients   the end of the backward: all gradients, and the activations of the first block only
    update      the optimizer step: gradients, and Muon's stacks of matrices

If a step has several passes, the gradients of earlier passes are allocated during all of them; with one pass, gradients
are allocated during its backward. The activations that a block saves for its backward, in bfloat16, were read from the
tensors that autograd (eager) and torch.compile's partitioner (compiled) save for this project's blocks; a test reads
them again:

    bytes per token and layer           compiled                 eager
    residual, deltas, norms             8 D + 8                  20 D + 8
    q, k, v, attention output           4 (Hc + Kc) + 4 H        4 (Hc + Kc) + 4 H
    q, k once more, if RoPE or QK-norm  2 (Hc + Kc)              2 (Hc + Kc)
    QK-norm                             4 (H + K)                8 (Hc + Kc) + 4 (H + K)
    MLP, gated                          6 F                      8 F
    MLP, not gated                      4 F                      4 F

D is the hidden size, F the MLP width, H the heads, K the key-value heads, Hc = H x head_dim, Kc = K x head_dim. In a
mixture of experts, F is the sum over the k chosen experts, and each of them has its own copy of input and output, 4 k D
in all. A fused one (`precision/fused_moe.py`) keeps no such copies and no output of the activation: 4 F, or 2 F without
a gate, and the routing, 2 bytes per expert and 20 per choice, which is saved even if the sublayer is recomputed. A
recomputed sublayer saves its input, and no bfloat16 copies of its weights; a recomputed block saves the pair (residual,
delta), 4 D.

Cached copies of converted weights stay allocated between optimizer steps (`budget/format_costs.py` has their bytes). In
FP8, the input of a projection is saved as transposed FP8 codes for the weight gradient. That takes one byte less per
value for the normed inputs (2 D) and the MLP's activation (F), but one byte more for attention's output (Hc), which
attention's own backward needs in 16 bits. Fused sublayers (`precision/fused_sublayers.py`) save what the table lists as
compiled, without the statistics of QK-norm. Blocks that stay in BF16 are as in the table.

Offloaded activations (`train/activation_offload.py`) leave those of two blocks on the GPU. `separate_gradients.py` has
the gradients that do not wait on the GPU for the update.

The other allocations of a fused step were read from its code, not fitted:

- Ends of the residual stream, 4 D: the residual of the last norm, and the hidden states while the loss is computed.
- Logits: the gradient of a chunk of logits overwrites it, and is still allocated when the next chunk begins. An FP8
  head has 16-bit logits, gradients in 8 bits, transposed gradients of two chunks, the hidden states in FP8 in both
  layouts, and a second gradient of its weight.
- Temporary gradients of a sublayer, the larger of two moments. W are the output channels of its first projection: 2 F
  in the MLP, F without a gate, Hc + 2 Kc in attention. Before the backward of this projection: 2 D + 2 F + 2 W in the
  MLP, and 2 D + 8 Hc + 4 Kc in attention, whose kernels accumulate dq in float32. Within it: 6 D + 2 W, with 2 W more
  in FP8 (also in the first step of delayed scales, which casts existing tensors) and 4 W more in emulated NVFP4. If the
  last blocks stay in BF16, they determine this number, because the backward begins with them. In a mixture of experts,
  2 D + 2 k D + 4 F + 2 W before the backward of the first product. FP8 casts rows while it gathers them, saving 2 k D
  there, but needs 2 D + 2 W + 2 F and 1 byte (3 if emulated) of F + k D within the gradient of the second weight; NVFP4
  needs 2 D + 2 W + 4 F + 4 k D there. With dropout 2 D more, because the gradients of residual and delta differ.
- The gradient of a layer's experts leaves the grouped product in 16 bits and is converted to the weights' format; if
  there are earlier passes, it then exists beside their sum.

Sharded weights (FSDP2, one group per block and one for the rest, `train/parallel.py`) are gathered in float32: two
blocks at a time, and the root (embedding, head) from the forward to the end of the backward. Gradients are scattered in
the last pass of a step. So with several passes, every GPU holds whole gradients; with one, only those of the blocks
that are being reduced and of the root, which is reduced last. A test tracks the memory of two such processes. Without
sharding, GPUs sum their gradients in buckets while the backward runs (`budget/replicas.py`).

If adapters are trained over frozen weights (`budget/adapters.py`), only the adapters have gradients and optimizer
states, the head has no gradient, a quantized weight is dequantized while it is used, and the gradient of a chunk of
logits overwrites it as above.

For blocks compiled by torch, two numbers were fitted to 63 configurations measured on an H200, with the loss of that
time, which allocated gradients besides logits (docs/planner-accuracy.md): 7 D bytes per token for the two ends of the
residual stream, and 1.36 times the activations of a sublayer while it is recomputed and differentiated.
"""

from dataclasses import dataclass, replace
from functools import cached_property

from deskside.budget.adapters import (
    extra_activation_bytes,
    frozen_bytes,
    head_trains,
    largest_dequantized_bytes,
    stacked_adapter_bytes,
    trained_params,
)
from deskside.budget.format_costs import (
    SAVED_BF16,
    expert_native,
    product_formats,
    quantized,
    saved_input_bytes,
    weight_copies,
)
from deskside.budget.replicas import bucket_bytes, update_shares
from deskside.budget.separate_gradients import (
    STACK_BYTES,
    STACK_WEIGHTS,
    gradients_in_backward,
    gradients_in_update,
    has_side_stream,
    muon_bytes,
    update_in_backward,
)
from deskside.budget.shape import Shape, block_norms
from deskside.budget.shared_rows import gathered_bytes
from deskside.budget.sizes import Sizes
from deskside.budget.states import gpu_average_bytes, gpu_state_bytes
from deskside.budget.step_spec import AdapterSpec, Checkpointing, StepSpec
from deskside.budget.terms import Line, explained, named

# Bytes per token and hidden channel at the two ends of the residual stream: embedding, its casts, the last norm. In a
# fused step they are freed when the backward begins.
STREAM_ENDS, FUSED_STREAM_END = 7, 4
# Memory of a sublayer that is recomputed and differentiated, relative to the activations that it saves otherwise.
RECOMPUTE_FACTOR = 1.36
GRADIENTS_FACTOR = RECOMPUTE_FACTOR - 1  # temporary gradients of a block, relative to its activations
LIBRARIES = 64 * 2**20  # bytes of cuBLAS workspaces
# What the allocator reserved beyond the peak of allocated bytes: medians of measurements.
RESERVED_SHARE, RESERVED_BYTES = 0.05, 256 * 2**20
Items = dict[str, float]  # bytes by item


@dataclass(frozen=True)
class Memory:
    """Bytes by item at one instant: weights, gradients, optimizer, copies, activations, logits, workspace, and if there
    are any, the average of the weights and the later targets of multi-token prediction.

    allocated: their sum; reserved: the bytes that torch's allocator is expected to reserve, fragmentation included.
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
    return max(instants(shape, spec).values(), key=lambda memory: memory.allocated)


def instants(shape: Shape, spec: StepSpec) -> dict[str, Memory]:
    """Return the modelled memory at each of the four instants, by name."""
    return {
        name: Memory({item: int(size) for item, size in items.items()}, name)
        for name, items in _instants(Sizes(shape, spec)).items()
    }


def explain_memory(shape: Shape, spec: StepSpec, instant: str, item: str) -> list[Line]:
    """Return the lines of arithmetic that lead to one item at one instant."""
    value = _instants(Sizes(shape, spec, traced=True))[instant][item]
    *steps, last = explained(
        f"{item}, at the instant '{instant}'", value, "bytes", nothing="none at this instant"
    )
    return [*steps, replace(last, value=int(value))]


def _instants(sizes: Sizes) -> dict[str, Items]:
    adapter = sizes.spec.adapter
    return _full_training(sizes) if adapter is None else _adapter_training(sizes, adapter)


def _extras(s: Sizes) -> Items:
    """Return the items that only some steps have."""
    items: Items = {} if s.spec.average == "none" else {"average": gpu_average_bytes(s)}
    if s.spec.future_targets:  # 64-bit token numbers of all passes
        items["later targets"] = 8.0 * s.tokens * s.leaf("later targets of a token", s.spec.future_targets)
    return items


def _full_training(s: Sizes) -> dict[str, Items]:
    """Return the four instants of a step that trains all weights."""
    spec = s.spec
    fp32 = spec.precision == "fp32"
    width = 2 if fp32 else 1  # factor on the byte counts of this module, which are for bfloat16
    several_passes = spec.accumulation > 1
    checkpointing = spec.activation_checkpointing

    layer = _LayerBytes(s, width, saved_bytes_per_value(s.shape, spec))
    stream_end = s.pass_tokens * (s.hidden * width)
    ends = FUSED_STREAM_END * stream_end if spec.fused else STREAM_ENDS * stream_end
    ends_in_backward = 0.0 if spec.fused else ends

    # Bytes of gradients or of gathered weights.
    head_sum: float = 4.0 * s.vocabulary * s.hidden  # the loss adds up the gradient of the head in float32
    head: float = spec.weight_bytes * s.vocabulary * s.hidden
    root: float = spec.weight_bytes * s.root_weights
    all_gradients: float = spec.weight_bytes * s.parameters
    one_layer = spec.weight_bytes * s.block_weights / s.layers
    separate = spec.gradients != "device"  # see separate_gradients.py
    earlier_gradients = all_gradients if several_passes and not separate else 0.0
    in_backward = update_in_backward(s)

    # Converted weights: kept from forward to backward by autograd, or from step to step by the cache.
    copies = lasting_copies = 0.0
    head_copy = 0.0 if fp32 or spec.weights == "bfloat16" else 2 * s.vocabulary * s.hidden
    if has_weight_cache(spec):
        copies = lasting_copies = cached_weights(s)
        if spec.fp8_head:  # the cache includes W and W^T of the head
            head_copy = 0.0
    elif spec.copies == "pass" and not fp32 and spec.weights == "float32":
        copies = 2.0 * layer.copied_weights(checkpointing)

    experts = expert_gradients(s)
    # Gradients of matrices that other GPUs update.
    freed = spec.weight_bytes * s.block_weights * (1 - 1 / update_shares(spec))

    # FSDP gathers the weights of the current block and of the next block in float32.
    libraries = s.leaf("cuBLAS workspaces", LIBRARIES)
    shared = s.leaf("gathered keys and values", gathered_bytes(s)) if spec.context > 1 else 0.0
    gathered = libraries + shared + (2 * one_layer + root if spec.sharded else 0.0)
    gathered_at_end = libraries + shared + (one_layer + root if spec.sharded else 0.0)
    summed = bucket_bytes(s, s.parameters)
    # Gradients of a block exist a second time while they are reduced, in one flat tensor.
    reduced = 0.0
    if spec.sharded:
        reduced = one_layer if several_passes else 2 * one_layer

    def beside(backward: float, update: float) -> float:
        """Return the memory of a backward and of an update on the same stream, or on a side stream."""
        return backward + update if has_side_stream(spec) else max(backward, update)

    logits = s.chunk_tokens * s.vocabulary * logit_bytes(spec)
    hidden = hidden_bytes(spec) * s.pass_tokens * s.hidden
    always: Items = {
        "weights": spec.weight_bytes * s.parameters / s.shards,
        "optimizer": gpu_state_bytes(s),
        **_extras(s),
    }
    return {
        "loss": {
            **always,
            "gradients": earlier_gradients,
            "copies": copies + head_copy,
            "activations": s.pass_tokens * layer.kept(checkpointing) + ends,
            "logits": logits + head_gradients(spec) * head_sum + hidden,
            "workspace": gathered,
        },
        "backward": {
            **always,
            "gradients": head + gradients_in_backward(s) if separate else max(earlier_gradients, head),
            "copies": copies,
            "activations": s.pass_tokens * layer.kept(checkpointing) + ends_in_backward,
            # The gradient of a tied head stays separate until the embedding's gradient is added.
            "logits": head if s.shape.tie_word_embeddings and several_passes else 0.0,
            "workspace": gathered
            + reduced
            + summed
            + beside(experts + s.pass_tokens * layer.backward(checkpointing), in_backward),
        },
        "gradients": {
            **always,
            "gradients": root + gradients_in_backward(s)
            if separate
            else (all_gradients if several_passes else (all_gradients - root) / s.shards + root),
            "copies": lasting_copies,
            "activations": s.pass_tokens * layer.block + ends_in_backward,
            "logits": 0.0,
            # With several passes, the peak is in a pass before the last one, where gradients are not reduced.
            "workspace": gathered_at_end
            + summed
            + (head if several_passes and not separate else reduced)
            + beside(s.pass_tokens * layer.last_gradients, in_backward),
        },
        "update": {
            **always,
            "gradients": gradients_in_update(s) if separate else (all_gradients - freed) / s.shards,
            "copies": lasting_copies,
            "activations": 0.0,
            "logits": 0.0,
            # Not both at once: gradients are summed between GPUs before Muon uses them.
            "workspace": libraries + max(_muon_stack_bytes(s), summed),
        },
    }


def _adapter_training(s: Sizes, adapter: AdapterSpec) -> dict[str, Items]:
    """Return the four instants of a step that trains only adapters. Its blocks are not fused."""
    spec = s.spec
    fp32 = spec.precision == "fp32"
    width, checkpointing = 2 if fp32 else 1, spec.activation_checkpointing
    gradients = 4.0 * s.leaf("parameters of the adapters", trained_params(s.shape, adapter))
    layer = _LayerBytes(s, width, SAVED_BF16)
    extra = s.leaf(
        "kept more for the adapters, per token and layer", width * extra_activation_bytes(s.shape, spec)
    )
    # Share of the layers' extra bytes that is saved: checkpointing of one sublayer leaves about half.
    kept_share = {"none": 1.0, "block": 0.0}.get(checkpointing, 0.5)
    kept = layer.kept(checkpointing) + s.layers * extra * kept_share
    ends, dense = STREAM_ENDS * s.pass_tokens * s.hidden * width, largest_dequantized_bytes(s.shape, spec)
    earlier_gradients = gradients if spec.accumulation > 1 else 0.0
    # 16-bit weights are used as they are in BF16; in FP32, autograd keeps a converted copy.
    copies = 4.0 * layer.copied_weights(checkpointing) if fp32 and adapter.base == "bf16" else 0.0
    copies += kept_share * s.leaf("joined A and B", stacked_adapter_bytes(s.shape, spec))
    libraries = s.leaf("cuBLAS workspaces", LIBRARIES)
    dequantized = s.leaf("largest dequantized weight", dense) if dense else 0.0
    always: Items = {
        "weights": frozen_bytes(s, adapter) + gradients,
        "optimizer": gpu_state_bytes(s),
        **_extras(s),
    }
    # A frozen head in 16 bits is cast in FP32, and one that trains in BF16; the loss adds up its gradient in float32.
    trained_head = head_trains(s.shape, adapter)
    head: float = 4.0 * s.vocabulary * s.hidden if trained_head else 0.0
    head_copy = (4.0 if fp32 else 2.0) * s.vocabulary * s.hidden if fp32 != trained_head else 0.0
    return {
        "loss": {
            **always,
            "gradients": earlier_gradients,
            "copies": copies + head_copy,
            "activations": s.pass_tokens * kept + ends,
            "logits": s.chunk_tokens * s.vocabulary * logit_bytes(spec)
            + head
            + hidden_bytes(spec) * s.pass_tokens * s.hidden,
            "workspace": libraries,
        },
        "backward": {
            **always,
            "gradients": max(earlier_gradients, head),
            "copies": copies,
            "activations": s.pass_tokens * kept + ends,
            # As in full training, that of a tied head stays separate until the embedding's is added.
            "logits": head if s.shape.tie_word_embeddings and spec.accumulation > 1 else 0.0,
            "workspace": libraries
            + s.pass_tokens * (layer.backward(checkpointing) + (extra if checkpointing == "block" else 0.0))
            + dequantized,
        },
        "gradients": {
            **always,
            "gradients": gradients,
            "copies": 0.0,
            "activations": s.pass_tokens * (layer.block + extra) + ends,
            "logits": 0.0,
            "workspace": libraries + s.pass_tokens * layer.last_gradients + dequantized,
        },
        "update": {
            **always,
            "gradients": gradients,
            "copies": 0.0,
            "activations": 0.0,
            "logits": 0.0,
            "workspace": libraries + bucket_bytes(s, gradients / 4),
        },
    }


def logit_bytes(spec: StepSpec) -> int:
    """Return the bytes per logit of a chunk: the logits, their gradient, and the gradient of the chunk before.

    The fused kernel writes the gradient over the logits; the loss that compiled blocks were measured with allocated
    another tensor. The gradient of a chunk is still allocated when the next chunk begins.
    """
    several_chunks = spec.loss_chunk_tokens < spec.micro_tokens
    if spec.fused and spec.fp8_head:
        return 5 if several_chunks else 3  # logits 2, gradients 1; transposed gradients of two chunks 2
    tensors = (1 if spec.fused or spec.adapter is not None else 2) + several_chunks
    return tensors * (4 if spec.precision == "fp32" else 2)


def hidden_bytes(spec: StepSpec) -> int:
    """Return the bytes that the loss allocates per hidden value: its gradient, and two FP8 layouts for an FP8 head."""
    return (4 if spec.precision == "fp32" else 2) + (2 if spec.fused and spec.fp8_head else 0)


def head_gradients(spec: StepSpec) -> int:
    """Return the number of gradients of the head's weight in the loss. FP8 products cannot accumulate in place."""
    return 2 if spec.fused and spec.fp8_head and spec.loss_chunk_tokens < spec.micro_tokens else 1


def sublayer_gradient_bytes(sizes: Sizes) -> tuple[float, float]:
    """Return the temporary gradients of a fused attention and a fused MLP, in bytes per token (module docstring)."""
    D, q, kv = sizes.hidden, sizes.queries, sizes.keys
    F, outputs = sizes.mlp_width, 2 if sizes.shape.gated_mlp else 1
    # Bytes per value of a projection's output gradient, in all formats in which products read it.
    backward_kind = product_formats(sizes.spec.precision)[1]
    output_gradient = (
        2 if sizes.spec.kept_blocks else {"fp32": 2, "bf16": 2, "fp8": 4, "nvfp4": 6}[backward_kind]
    )
    mlp: float = max(2 * D + 2 * F + 2 * outputs * F, 6 * D + output_gradient * outputs * F)
    if sizes.shape.num_experts:
        k = sizes.leaf("experts per token", sizes.shape.num_experts_per_tok)
        mlp = _expert_gradient_bytes(sizes, k * D, outputs)
    attention: float = max(2 * D + 8 * q + 4 * kv, 6 * D + output_gradient * (q + 2 * kv))
    if sizes.spec.dropout:
        attention, mlp = attention + 2 * D, mlp + 2 * D
    return attention, mlp


def _expert_gradient_bytes(sizes: Sizes, row: float, outputs: int) -> float:
    """Return the temporary gradients of fused experts in bytes per token (module docstring).

    row: values of a token's rows, k D. outputs: 2 with a gate, else 1.
    """
    D, F, spec = sizes.hidden, sizes.mlp_width, sizes.spec
    kind = "bf16" if spec.kept_blocks else product_formats(spec.precision)[1]
    before = 2 * D + (4 + 2 * outputs) * F
    if kind not in ("fp8", "nvfp4"):
        return before + 2 * row
    within = 2 * D + (2 * outputs + 2) * F
    if kind == "nvfp4":  # gathered rows and their quantized copies, in 16 bits
        return max(before + 2 * row, within + 2 * F + 4 * row)
    native = "fp8-grouped" in spec.native
    return max(before, within + (1 if native else 3) * (F + row))


def expert_gradients(sizes: Sizes) -> float:
    """Return the bytes of a layer's expert gradients beyond one sum in the weights' format, in a fused step."""
    shape, spec = sizes.shape, sizes.spec
    if not shape.num_experts or not spec.fused or spec.precision == "fp32":
        return 0.0
    matrix = shape.num_experts * shape.hidden_size * shape.moe_intermediate_size
    first = sizes.leaf("weights of the experts' first product", (2 if shape.gated_mlp else 1) * matrix)
    converted = 2 if spec.weights == "float32" else 0
    if spec.accumulation == 1 or spec.gradients != "device":
        return converted * first
    second = sizes.leaf("weights of the experts' second product", matrix)
    return (spec.weight_bytes + converted) * first + spec.weight_bytes * second


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
    if spec.weights == "bfloat16":
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


def saved_bytes_per_value(shape: Shape, spec: StepSpec) -> float:
    """Return the bytes per value of the inputs that projections save for weight gradients, averaged over weights."""
    share = spec.quantized_share(shape.num_hidden_layers)
    return (1 - share) * SAVED_BF16 + share * saved_input_bytes(spec.precision)


def _muon_stack_bytes(sizes: Sizes) -> float:
    """Return the bytes of the matrices that Muon updates at the same time."""
    spec = sizes.spec
    if spec.optimizer != "muon" or spec.gradients == "released":
        return 0.0
    if spec.gradients == "host" or (spec.offload_optimizer and spec.weights == "bfloat16"):
        return muon_bytes(sizes)
    mlp_width = max(sizes.shape.intermediate_size, sizes.shape.moe_intermediate_size)
    stack = max(STACK_WEIGHTS, sizes.shape.hidden_size * mlp_width)
    updated_here = sizes.block_weights / update_shares(spec)
    return STACK_BYTES * sizes.leaf("weights of Muon's stack", min(updated_here, stack))


class _LayerBytes:
    """Bytes per token that one layer saves for its backward: residual stream and norms, attention, MLP.

    width: 1 for 16-bit activations, 2 for float32. saved_bytes: bytes per value of a projection's input that is saved
    for the weight gradient.
    """

    def __init__(self, sizes: Sizes, width: int, saved_bytes: float):
        s, shape, compiled = sizes, sizes.shape, sizes.spec.compiled or sizes.spec.fused
        self.sizes = s
        channels = s.queries + s.keys
        attention = 4 * channels + 4 * s.heads
        if shape.qk_norm or shape.position_embedding == "rope":
            attention += 2 * channels
        if shape.qk_norm and not s.spec.fused:  # fused sublayers recompute the statistics
            normed_vectors = s.heads + s.kv_heads if shape.qk_norm_over == "head" else 2
            attention += 4 * normed_vectors + (0 if compiled else 8 * channels)
        mlp = ((6 if compiled else 8) if shape.gated_mlp else 4) * s.mlp_width
        self.routing = 0.0  # saved even if the sublayer is recomputed
        if shape.num_experts:
            chosen = s.leaf("experts per token", shape.num_experts_per_tok)
            if s.spec.fused:
                mlp = (4 if shape.gated_mlp else 2) * s.mlp_width
                self.routing = 2 * shape.num_experts + 20 * chosen
            else:  # each chosen expert has its own copy of input and output
                mlp += chosen * 4 * s.hidden
        saving = SAVED_BF16 - saved_bytes
        # Attention's backward needs its output in 16 bits. The codes that the output projection saves are additional.
        output_codes = s.queries * saving
        per_token = "per token and layer"
        # Experts quantize their inputs again in the backward, from 16 bits.
        mlp_saving = 0.0 if shape.num_experts else saving
        # An eager RMSNorm saves its input and its result in float32, an eager LayerNorm its input.
        norm_input = 2 if compiled else (8 if shape.norm == "rmsnorm" else 4)
        norms = block_norms(shape) * (norm_input * s.hidden + 4)
        if shape.parallel_residual and compiled:  # both sublayers read one residual, which is saved once
            norms -= norm_input * s.hidden
        stream = width * (norms + 4 * s.hidden) - s.hidden * (saving + mlp_saving)
        self.stream = named(f"residual stream and norms, {per_token}", stream)
        self.attention = named(f"attention, {per_token}", width * attention + output_codes)
        self.mlp = named(f"MLP, {per_token}", width * mlp - s.mlp_width * mlp_saving)
        self.block_input = 4 * (width * s.hidden)  # the pair (residual, delta)
        # The saved normed inputs of attention and of the MLP.
        self.normed = 2 * (width * s.hidden) - s.hidden * saving
        self.mlp_normed = 2 * (width * s.hidden) - s.hidden * mlp_saving
        self.gradients: tuple[float, float] | None = None
        if s.spec.fused:
            attention_gradients, mlp_gradients = sublayer_gradient_bytes(s)
            self.gradients = (
                named(f"temporary gradients of attention, {per_token}", width * attention_gradients),
                named(f"temporary gradients of the MLP, {per_token}", width * mlp_gradients),
            )

    @property
    def block(self) -> float:
        """Activations that a block saves without checkpointing."""
        return self.stream + self.attention + self.mlp + self.routing

    @property
    def last_gradients(self) -> float:
        """Temporary gradients at the end of the backward, in the first block."""
        return self.block * GRADIENTS_FACTOR if self.gradients is None else self.gradients[0]

    def kept(self, checkpointing: Checkpointing) -> float:
        """Return the bytes that all layers save. A recomputed sublayer does not save its normed input."""
        if checkpointing == "block":
            # If it is offloaded: that of the last block, and as much on its way to the host or back.
            blocks = 2 if self.sizes.spec.activation_offloading else self.sizes.layers
            return blocks * self.block_input + self.sizes.layers * self.routing
        if checkpointing == "none":
            return self.sizes.layers * self.block
        other = self.mlp if checkpointing == "attention" else self.attention
        normed = self.mlp_normed if checkpointing == "mlp" else self.normed
        return self.sizes.layers * (self.stream - normed + other + self.routing)

    def backward(self, checkpointing: Checkpointing) -> float:
        """Return the temporary gradients and recomputed activations in the backward of the last block."""
        if self.gradients is None:
            if checkpointing == "none":
                return self.block * GRADIENTS_FACTOR
            if checkpointing == "block":
                return self.block * RECOMPUTE_FACTOR
            recomputed = self.attention if checkpointing == "attention" else self.mlp
            return (recomputed + self.stream / 2) * RECOMPUTE_FACTOR
        # Fused sublayers recompute and differentiate one after the other. The MLP is first, and its saved activations
        # are freed when attention begins.
        attention, mlp = self.gradients
        if checkpointing == "none":
            return mlp
        if checkpointing == "attention":
            return max(mlp, self.attention + attention - self.mlp)
        whole_mlp = self.mlp_normed + self.mlp + mlp
        sizes, chunk = self.sizes, self.sizes.spec.mlp_chunk_tokens
        if chunk is not None and chunk < sizes.spec.micro_tokens:
            # A chunk's share of these, the gradient of the residual, and float32 sums of the weight gradients.
            part = sizes.leaf("tokens of an MLP chunk", chunk) / sizes.pass_tokens
            sums = 4 * sizes.mlp_weights / sizes.pass_tokens
            whole_mlp = whole_mlp * part + self.block_input / 2 + sums
        return (
            whole_mlp if checkpointing == "mlp" else max(whole_mlp, self.normed + self.attention + attention)
        )

    def copied_weights(self, checkpointing: Checkpointing) -> float:
        """Return the number of block weights whose bfloat16 copies autograd keeps from forward to backward."""
        attention = self.sizes.layers * self.sizes.attention_weights
        return {
            "none": self.sizes.block_weights,
            "attention": self.sizes.block_weights - attention,
            "mlp": attention,
            "block": 0.0,
        }[checkpointing]
