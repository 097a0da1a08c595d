"""Memory of training LoRA adapters over frozen weights: parameters, weight bytes, and saved activations per layer.

Frozen weights of the blocks are stored in the formats of `precision/frozen.py`, tables in 16 bits, vectors in 32:

    bytes per weight     bf16  2
                         int8  1, and 4 per output row
                         nf4   1/2 + 1/64 + 4 / 16384, and 1028 per matrix for a table of 256 numbers and a mean

Routers stay in 16 bits. Every expert of a layer has its own adapters; a token meets those of its chosen experts.

Only adapters have gradients (4 bytes) and optimizer states. A frozen weight needs no gradient, so the input of a
projection is saved for the backward only if the projection has an adapter. The adapter also saves x A^T, 2 bytes x rank
per token. Eager norms save nothing for the gradient of their weights. A and B are copied in the activations' dtype; for
a fused weight, A is stacked and B put on a block diagonal (`precision/lora.py`). The first block saves a little less
than modelled, because nothing before it is trained. Quantized weights are dequantized one at a time, in the forward and
again in the backward.

DoRA has a magnitude (with gradient and states) and a norm for each row, and saves the output that the magnitude scales.
Tables that train whole are stored in 32 bits, with gradients and states.
"""

from typing import NamedTuple

from deskside.budget.shape import Shape, block_matrix_params, block_norms, flops_per_token, matmul_params
from deskside.budget.sizes import Sizes
from deskside.budget.step_spec import AdapterSpec, StepSpec
from deskside.budget.terms import leaf

NF4_BLOCK, NF4_SCALE_BLOCK = 64, 256  # weights per 8-bit scale, and 8-bit scales per float32 scale
NF4_TABLE_BYTES = 4 * 257  # per weight matrix
# Projections that share a weight by default, and so the steps of an adapter.
WEIGHTS = (("q_proj", "k_proj", "v_proj"), ("o_proj",), ("gate_proj", "up_proj"), ("down_proj",))


class ProjectionSize(NamedTuple):
    """The shape of a projection of a block, or of one expert; their number; and how many of them a token meets."""

    rows: int
    columns: int
    copies: int = 1
    per_token: int = 1


def projection_sizes(shape: Shape) -> dict[str, ProjectionSize]:
    """Return the size of each projection of a block, by name. Routers have no adapter and are left out."""
    D, F, experts = shape.hidden_size, shape.intermediate_size, (1, 1)
    if shape.num_experts:
        F, experts = shape.moe_intermediate_size, (shape.num_experts, shape.num_experts_per_tok)
    q, kv = shape.num_attention_heads * shape.head_dim, shape.num_key_value_heads * shape.head_dim
    sizes = {"q_proj": (q, D), "k_proj": (kv, D), "v_proj": (kv, D), "o_proj": (D, q)}
    mlp = {"up_proj": (F, D), "down_proj": (D, F)}
    if shape.gated_mlp:
        mlp = {"gate_proj": (F, D), **mlp}
    return {name: ProjectionSize(*size) for name, size in sizes.items()} | {
        name: ProjectionSize(*size, *experts) for name, size in mlp.items()
    }


def adapter_params(shape: Shape, adapter: AdapterSpec, active: bool = False) -> int:
    """Return the number of parameters of all adapters. active: of those that a token meets."""
    sizes = [projection_sizes(shape)[name] for name in adapter.targets]
    elements = sum((size.rows + size.columns) * (size.per_token if active else size.copies) for size in sizes)
    return shape.num_hidden_layers * adapter.rank * elements


def table_params(shape: Shape, adapter: AdapterSpec) -> int:
    """Return the number of parameters of the tables that train whole."""
    return len(adapter.tables) * shape.vocab_size * shape.hidden_size


def trained_params(shape: Shape, adapter: AdapterSpec) -> int:
    """Return the number of parameters that train: adapters, magnitudes and whole tables."""
    rows = sum(projection_sizes(shape)[name].rows for name in adapter.targets) if adapter.dora else 0
    magnitudes = shape.num_hidden_layers * rows
    return adapter_params(shape, adapter) + magnitudes + table_params(shape, adapter)


def training_flops_per_token(
    shape: Shape, sequence_length: int, adapter: AdapterSpec | None, traced: bool = False
) -> float:
    """Return the FLOPs per token of a run with these adapters, or without any, by the convention of `budget/shape.py`.

    A frozen weight takes part in the forward and in the gradient of its input, but has no gradient of its own: 4 FLOPs
    instead of 6. Adapters and a head that trains whole have all three. The products of quantized weights count like
    those of BF16. Not counted, because they are not per token: the norms of DoRA's rows. Not subtracted: the frozen
    input of the first block has no gradient, so its q, k and v need 2 FLOPs per weight less.

    traced: return a `Term`, which carries the formula.
    """
    flops = flops_per_token(shape, sequence_length, traced)
    if adapter is None:
        return flops
    head = shape.vocab_size * shape.hidden_size if head_trains(shape, adapter) else 0
    frozen: float = matmul_params(shape) - head
    adapters: float = adapter_params(shape, adapter, active=True)
    if traced:
        frozen = leaf("frozen weights that a token is multiplied with", frozen)
        adapters = leaf("weights of adapters that a token is multiplied with", adapters)
    return flops - 2 * frozen + 6 * adapters


def head_trains(shape: Shape, adapter: AdapterSpec) -> bool:
    """Return True if the head, or the embedding that it is tied to, trains whole."""
    return ("embed_tokens" if shape.tie_word_embeddings else "lm_head") in adapter.tables


def scaled_rows(shape: Shape, adapter: AdapterSpec) -> int:
    """Return the rows of a block's weights whose outputs DoRA scales: all of a weight that has an adapter."""
    sizes = projection_sizes(shape)
    adapted = [names for names in WEIGHTS if set(names) & set(adapter.targets)] if adapter.dora else []
    return sum(sizes[name].rows for names in adapted for name in names if name in sizes)


def frozen_bytes(sizes: Sizes, adapter: AdapterSpec) -> float:
    """Return the bytes of all frozen weights, and of the norms of their rows for DoRA."""
    matrices = sizes.leaf(f"bytes of the blocks in {adapter.base}", block_bytes(sizes.shape, adapter))
    tables = sizes.root_weights
    if adapter.tables:
        tables = tables - sizes.leaf("weights of tables that train", table_params(sizes.shape, adapter))
    frozen = matrices + 2 * tables + 4 * sizes.leaf("weights of norms and biases", sizes.vectors)
    if adapter.dora:
        rows = sizes.shape.num_hidden_layers * scaled_rows(sizes.shape, adapter)
        frozen = frozen + 4 * sizes.leaf("rows with a magnitude", rows)
    return frozen


def block_bytes(shape: Shape, adapter: AdapterSpec) -> float:
    """Return the bytes of the block matrices, with q, k, v and gate, up fused as by default, and experts stacked."""
    sizes = projection_sizes(shape)
    if adapter.base == "bf16":
        return 2.0 * block_matrix_params(shape)
    routers = shape.num_hidden_layers * shape.num_experts * shape.hidden_size
    matrices = block_matrix_params(shape) - routers
    if adapter.base == "int8":
        rows = sum(size.rows * size.copies for size in sizes.values())
        return matrices + 4.0 * shape.num_hidden_layers * rows + 2.0 * routers
    per_weight = 1 / 2 + 1 / NF4_BLOCK + 4 / (NF4_BLOCK * NF4_SCALE_BLOCK)
    return per_weight * matrices + 4 * shape.num_hidden_layers * NF4_TABLE_BYTES + 2.0 * routers


def largest_dequantized_bytes(shape: Shape, spec: StepSpec) -> int:
    """Return the bytes of the largest dequantized weight, in the activations' dtype; 0 for a BF16 base."""
    assert spec.adapter is not None
    if spec.adapter.base == "bf16":
        return 0
    sizes = {name: size.rows * size.columns * size.copies for name, size in projection_sizes(shape).items()}
    qkv = sizes["q_proj"] + 2 * sizes["k_proj"]
    gate_up = sizes["up_proj"] + sizes.get("gate_proj", 0)
    return (4 if spec.precision == "fp32" else 2) * max(qkv, gate_up, sizes["o_proj"], sizes["down_proj"])


def stacked_adapter_bytes(shape: Shape, spec: StepSpec) -> float:
    """Return the bytes of the copies of A and B, over all layers. In float32, a weight that is not fused needs none."""
    assert spec.adapter is not None
    sizes, fp32 = projection_sizes(shape), spec.precision == "fp32"
    elements = 0
    for fused in WEIGHTS:
        present = [sizes[name] for name in fused if name in sizes]
        ranks = spec.adapter.rank * sum(name in sizes and name in spec.adapter.targets for name in fused)
        if ranks and not (fp32 and len(present) == 1):
            elements += ranks * present[0].copies * (present[0].columns + sum(size.rows for size in present))
    return (4.0 if fp32 else 2.0) * shape.num_hidden_layers * elements


def extra_activation_bytes(shape: Shape, spec: StepSpec) -> float:
    """Return the bytes per token and layer, for 16-bit activations, that are saved beyond those of full training.

    Negative if frozen weights without an adapter save more memory than the adapters need.
    """
    assert spec.adapter is not None
    targets = set(spec.adapter.targets)
    sizes = projection_sizes(shape)
    extra = 2.0 * spec.adapter.rank * sum(sizes[name].per_token for name in targets)
    extra += 2.0 * scaled_rows(shape, spec.adapter)
    if not spec.compiled:  # eager norms save their result in float32 for the gradient of their weights
        channels = (shape.num_attention_heads + shape.num_key_value_heads) * shape.head_dim
        extra -= 4 * block_norms(shape) * shape.hidden_size + (4 * channels if shape.qk_norm else 0)
    if not targets & {"q_proj", "k_proj", "v_proj"}:
        extra -= 2 * shape.hidden_size
    up = sizes["up_proj"]
    if not targets & {"gate_proj", "up_proj"}:
        extra -= 2 * up.columns * up.per_token
    if "down_proj" not in targets:
        extra -= 2 * up.rows * up.per_token
    return extra
