"""GPU memory of one training step, item by item. Everything here is modelled, not measured.

The peak of allocated bytes is the largest sum among these instants:

    loss        all saved activations, a chunk of logits, the head's gradient, and the ends of the residual stream
    backward    the backward of the last block: its temporary gradients and its recomputed activations
    gradients   the end of the backward: all gradients, and the activations of the first block only
    update      the optimizer step: gradients, and Muon's stacks of matrices
    evaluation  of a run whose passes are CUDA graphs: the forward of a micro-batch

If a step has several passes, the gradients of earlier passes are allocated during all of them; with one pass, gradients
are allocated during its backward. `activations.py` has the activations that a layer saves and its temporary gradients,
`converted_weights.py` the copies of weights in other formats, `states.py` the optimizer states, and
`separate_gradients.py` the gradients that do not wait on the GPU for the update.

These allocations of a fused step were read from its code, not fitted:

- Ends of the residual stream, 4 D bytes per token with the hidden size D: the residual of the last norm, and the hidden
  states while the loss is computed.
- Logits: the gradient of a chunk of logits overwrites it, and is still allocated when the next chunk begins. An FP8
  head has 16-bit logits, gradients in 8 bits, transposed gradients of two chunks, the hidden states in FP8 in both
  layouts, and a second gradient of its weight.
- The gradient of a layer's experts leaves the grouped product in 16 bits and is converted to the weights' format; if
  there are earlier passes, it then exists beside their sum.

For blocks compiled by torch, the ends of the residual stream, 7 D bytes per token, were fitted to 63 configurations
measured on an H200, with the loss of that time, which allocated gradients besides logits (docs/planner-accuracy.md).

Sharded weights (FSDP2, one group per block and one for the rest, `train/parallel.py`) are gathered in float32: two
blocks at a time, and the root (embedding, head) from the forward to the end of the backward. Gradients are scattered in
the last pass of a step. So with several passes, every GPU holds whole gradients; with one, only those of the blocks
that are being reduced and of the root, which is reduced last. A test tracks the memory of two such processes. Without
sharding, GPUs sum their gradients in buckets while the backward runs (`budget/replicas.py`).

A pass that is a CUDA graph (`train/loop/graphed_pass.py`) keeps what it needs at its peak, also during updates and
evaluations. Gradients exist all the time, and during the update also the sums over GPUs of those that share buckets.

If adapters are trained over frozen weights (`budget/adapters.py`), only the adapters have gradients and optimizer
states, the head has no gradient, a quantized weight is dequantized while it is used, and the gradient of a chunk of
logits overwrites it as above.
"""

from dataclasses import dataclass, replace
from functools import cached_property

from deskside.budget.activations import LayerActivations, saved_bytes_per_value
from deskside.budget.adapters import (
    extra_activation_bytes,
    frozen_bytes,
    head_trains,
    largest_dequantized_bytes,
    stacked_adapter_bytes,
    trained_params,
)
from deskside.budget.converted_weights import cached_weights, copied_weights, has_weight_cache
from deskside.budget.format_costs import SAVED_BF16, quantized
from deskside.budget.host import replays_passes
from deskside.budget.replicas import bucket_bytes, keeps_gradients, update_shares
from deskside.budget.separate_gradients import (
    STACK_BYTES,
    STACK_WEIGHTS,
    gradients_in_backward,
    gradients_in_update,
    has_float32_directions,
    has_side_stream,
    muon_bytes,
    update_in_backward,
)
from deskside.budget.shape import Shape
from deskside.budget.shared_rows import gathered_bytes
from deskside.budget.sizes import Sizes
from deskside.budget.states import gpu_average_bytes, gpu_state_bytes
from deskside.budget.step_spec import AdapterSpec, StepSpec
from deskside.budget.terms import Line, explained

# Bytes per token and hidden channel at the two ends of the residual stream: embedding, its casts, the last norm. In a
# fused step they are freed when the backward begins.
STREAM_ENDS, FUSED_STREAM_END = 7, 4
LIBRARIES = 64 * 2**20  # bytes of cuBLAS workspaces
# What the allocator reserves beyond the peak of allocated bytes: medians of measurements.
RESERVED_SHARE, RESERVED_BYTES = 0.05, 256 * 2**20
Items = dict[str, float]  # bytes by item


@dataclass(frozen=True)
class Memory:
    """Bytes by item at one instant: weights, gradients, optimizer, copies, activations, logits, workspace, and if there
    are any, the average of the weights, the later targets of multi-token prediction, and the captured pass.

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
    """Return the modelled memory at each instant, by name."""
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
    """Return the instants of a step that trains all weights."""
    spec = s.spec
    fp32 = spec.precision == "fp32"
    width = 2 if fp32 else 1  # factor on the byte counts of this module, which are for bfloat16
    graphs = replays_passes(spec)
    several_passes = spec.accumulation > 1 or graphs  # gradients exist before the first backward
    checkpointing = spec.activation_checkpointing

    layer = LayerActivations(s, width, saved_bytes_per_value(s.shape, spec))
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
    head_copy = 0.0 if fp32 or spec.weights != "float32" else 2 * s.vocabulary * s.hidden
    if has_weight_cache(spec):
        copies = lasting_copies = cached_weights(s)
        if spec.fp8_head:  # the cache includes W and W^T of the head
            head_copy = 0.0
    elif spec.copies == "pass" and not fp32 and spec.weights == "float32":
        copies = 2.0 * copied_weights(s, checkpointing)

    experts = expert_gradients(s)
    # Gradients of matrices that other GPUs update.
    freed = 0.0 if graphs else spec.weight_bytes * s.block_weights * (1 - 1 / update_shares(spec))

    # FSDP gathers the weights of the current block and of the next block in float32.
    libraries = s.leaf("cuBLAS workspaces", LIBRARIES)
    shared = s.leaf("gathered keys and values", gathered_bytes(s)) if spec.context > 1 else 0.0
    gathered = libraries + shared + (2 * one_layer + root if spec.sharded else 0.0)
    gathered_at_end = libraries + shared + (one_layer + root if spec.sharded else 0.0)
    summed = bucket_bytes(s, s.parameters)
    summed_in_pass = 0.0 if graphs else summed
    # Gradients of a block exist a second time while they are reduced, in one flat tensor.
    reduced = 0.0
    if spec.sharded:
        reduced = one_layer if several_passes else 2 * one_layer

    def beside(backward: float, update: float) -> float:
        """Return the peak of a backward and an update: their sum if a side stream overlaps them, else the larger."""
        return backward + update if has_side_stream(spec) else max(backward, update)

    logits = s.chunk_tokens * s.vocabulary * logit_bytes(spec)
    hidden = hidden_bytes(spec) * s.pass_tokens * s.hidden
    always: Items = {
        "weights": spec.weight_bytes * s.parameters / s.shards,
        "optimizer": gpu_state_bytes(s),
        **_extras(s),
    }
    steps: dict[str, Items] = {
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
            + summed_in_pass
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
            + summed_in_pass
            + (head if several_passes and not separate else reduced)
            + beside(s.pass_tokens * layer.last_gradients, in_backward),
        },
        "update": {
            **always,
            "gradients": gradients_in_update(s) if separate else (all_gradients - freed) / s.shards,
            "copies": lasting_copies,
            "activations": 0.0,
            "logits": 0.0,
            # Gradients are summed between GPUs before Muon uses them.
            "workspace": libraries
            + (summed + _muon_stack_bytes(s) if keeps_gradients(spec) else max(_muon_stack_bytes(s), summed)),
        },
    }
    if not graphs:
        return steps
    high_precision = 0.0  # bytes of converted weights: evaluations are in BF16
    if quantized(spec.precision) and has_weight_cache(spec):
        high_precision = 2 * s.block_weights * spec.quantized_share(s.shape.num_hidden_layers)
    evaluation: Items = {
        **steps["update"],
        "gradients": all_gradients,
        "copies": lasting_copies + head_copy + high_precision,
        "activations": s.pass_tokens * layer.block + ends,
        "logits": s.chunk_tokens * s.vocabulary * width * 2,
        "workspace": libraries,
    }
    # Copies of weights are not part of a pass, and gradients are summed after it.
    in_pass = max(_temporary(items) for name, items in steps.items() if name != "update")
    kept = in_pass - libraries - lasting_copies
    steps["evaluation"] = evaluation
    for name in ("update", "evaluation"):
        steps[name]["captured pass"] = kept
    return steps


def _temporary(items: Items) -> float:
    """Return the bytes that a pass frees."""
    return sum(items[name] for name in ("copies", "activations", "logits", "workspace"))


def _adapter_training(s: Sizes, adapter: AdapterSpec) -> dict[str, Items]:
    """Return the instants of a step that trains only adapters. Its blocks are not fused."""
    spec = s.spec
    fp32 = spec.precision == "fp32"
    width, checkpointing = 2 if fp32 else 1, spec.activation_checkpointing
    gradients = 4.0 * s.leaf("parameters of the adapters", trained_params(s.shape, adapter))
    layer = LayerActivations(s, width, SAVED_BF16)
    extra = s.leaf(
        "kept more for the adapters, per token and layer", width * extra_activation_bytes(s.shape, spec)
    )
    # Share of the layers' extra bytes that is saved: checkpointing of one sublayer leaves about half.
    kept_share = {"none": 1.0, "block": 0.0}.get(checkpointing, 0.5)
    kept = layer.kept(checkpointing) + s.layers * extra * kept_share
    ends, dense = STREAM_ENDS * s.pass_tokens * s.hidden * width, largest_dequantized_bytes(s.shape, spec)
    earlier_gradients = gradients if spec.accumulation > 1 else 0.0
    # 16-bit weights are used as they are in BF16; in FP32, autograd keeps a converted copy.
    copies = 4.0 * copied_weights(s, checkpointing) if fp32 and adapter.base == "bf16" else 0.0
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
            # As in full training, the gradient of a tied head stays separate until the embedding's is added.
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

    The fused kernel writes the gradient over the logits; compiled blocks were measured with a loss that allocated
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


def _muon_stack_bytes(sizes: Sizes) -> float:
    """Return the bytes of the matrices that Muon updates at the same time."""
    spec = sizes.spec
    if spec.optimizer != "muon" or spec.gradients == "released":
        return 0.0
    if spec.gradients == "host" or (has_float32_directions(spec) and spec.weights != "float32"):
        return muon_bytes(sizes)
    shape = sizes.shape
    mlp_width = shape.num_experts * shape.moe_intermediate_size or shape.intermediate_size
    stack = max(STACK_WEIGHTS, shape.hidden_size * mlp_width)
    updated_here = sizes.block_weights / update_shares(spec)
    return STACK_BYTES * sizes.leaf("weights of Muon's stack", min(updated_here, stack))
