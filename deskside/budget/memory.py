"""GPU memory of one training step, item by item. Everything here is modelled, not measured.

It serves to choose the first micro-batch that is tried on a card, and to show where the memory goes. The sum is the
peak of allocated bytes, near the start of the backward pass; the allocator's fragmentation and the CUDA context come
on top. What a block keeps for its backward pass, in bfloat16, was read from the tensors that autograd (eager) and
torch.compile's partitioner (compiled) save for this project's own blocks; a test reads them again:

    bytes per token and layer           compiled                 eager
    residual, deltas, norms             8 D + 8                  20 D + 8
    q, k, v, attention output           4 (Hc + Kc) + 4 H        4 (Hc + Kc) + 4 H
    q, k once more, if RoPE or QK-norm  2 (Hc + Kc)              2 (Hc + Kc)
    QK-norm                             4 (H + K)                8 (Hc + Kc) + 4 (H + K)
    MLP, gated                          6 F                      8 F
    MLP, not gated                      4 F                      4 F

Hc is heads x head_dim, Kc is key-value heads x head_dim. Of a mixture of experts F is the chosen experts' together, and
each choice has its own copy of input and output.
"""

from collections.abc import Callable
from typing import Literal

from deskside.budget.shape import Shape, num_params, parameter_groups

Checkpointing = Literal["none", "attention", "mlp", "block"]


def training_memory(
    shape: Shape,
    micro_tokens: int,
    *,
    optimizer: Literal["adamw", "muon"] = "muon",
    compiled: bool = True,
    activation_checkpointing: Checkpointing = "none",
    loss_chunk_tokens: int = 8192,
    low_precision: bool = True,
    shards: int = 1,
) -> dict[str, int]:
    """Modelled bytes by item: weights, gradients, optimizer, copies, activations, logits.

    micro_tokens: tokens of one forward pass on this GPU; low_precision: float32 weights cast to bfloat16 where they are
    used (else everything is float32); shards: GPUs that FSDP spreads weights, gradients and optimizer over.
    """
    if micro_tokens < 1 or loss_chunk_tokens < 1 or shards < 1:
        raise ValueError("micro_tokens, loss_chunk_tokens and shards must be at least 1")
    parameters, matrices = num_params(shape), _block_matrices(shape)
    states = 4 * matrices + 8 * (parameters - matrices) if optimizer == "muon" else 8 * parameters
    width = 1 if low_precision else 2  # the table's bytes are bfloat16's
    chunk = min(loss_chunk_tokens, micro_tokens)
    head = shape.vocab_size * shape.hidden_size
    return {
        "weights": 4 * parameters // shards,
        "gradients": 4 * parameters // shards,
        "optimizer": states // shards,
        "copies": 2 * (matrices + head) if low_precision else 0,
        "activations": int(
            width * micro_tokens * _kept_bytes_per_token(shape, compiled, activation_checkpointing)
        ),
        # One chunk of logits in float32 and its gradient in the activations' dtype.
        "logits": chunk * shape.vocab_size * (4 + 2 * width),
    }


def largest_micro_tokens(
    memory: Callable[[int], dict[str, int]], sequence_length: int, free_bytes: int, margin: float = 1.1
) -> int:
    """The most tokens, a power of two of rows, that are modelled to fit; one row if not even that does.

    memory: micro-batch in tokens -> bytes by item (`training_memory` with its options filled in); margin: what
    allocated bytes are multiplied with before they must fit, for fragmentation.
    """
    rows = 1
    while sum(memory(2 * rows * sequence_length).values()) * margin <= free_bytes:
        rows *= 2
    return rows * sequence_length


def _kept_bytes_per_token(shape: Shape, compiled: bool, checkpointing: Checkpointing) -> float:
    """Bytes that all blocks keep per token, in bfloat16."""
    D, layers = shape.hidden_size, shape.num_hidden_layers
    heads = shape.num_attention_heads + shape.num_key_value_heads
    channels = heads * shape.head_dim
    stream = (8 if compiled else 20) * D + 8
    attention = 4 * channels + 4 * shape.num_attention_heads
    if shape.qk_norm or shape.position_embedding == "rope":
        attention += 2 * channels
    if shape.qk_norm:
        attention += 4 * heads + (0 if compiled else 8 * channels)
    per_ffn = (6 if compiled else 8) if shape.gated_mlp else 4
    if shape.num_experts:
        mlp = shape.num_experts_per_tok * (per_ffn * shape.moe_intermediate_size + 4 * D)
    else:
        mlp = per_ffn * shape.intermediate_size
    # A recomputed part keeps its input of 2 D and lives once, for the layer that is being recomputed.
    if checkpointing == "block":
        return layers * 2 * D + stream + attention + mlp
    if checkpointing == "attention":
        return layers * (stream + mlp) + attention
    if checkpointing == "mlp":
        return layers * (stream + attention) + mlp
    return layers * (stream + attention + mlp)


def _block_matrices(shape: Shape) -> int:
    """Weights that Muon updates: all matrices of the blocks."""
    groups = parameter_groups(shape)
    biases = 0
    if shape.attention_bias:
        biases += (
            shape.num_attention_heads + 2 * shape.num_key_value_heads
        ) * shape.head_dim + shape.hidden_size
    if shape.mlp_bias:
        biases += (shape.gated_mlp + 1) * shape.intermediate_size + shape.hidden_size
    return groups["attention"] + groups["mlp"] - shape.num_hidden_layers * biases
