"""What training adapters beside frozen weights takes: parameters, bytes of the weights, what a layer keeps.

Frozen weights of the blocks are stored in `precision/frozen.py`'s formats, tables in 16 bits, vectors in 32:

    bytes per weight     bf16  2
                         int8  1, and 4 for each output row
                         nf4   1/2 + 1/64 + 4 / 16384, and 1028 for each weight's table of 256 numbers and their mean

Only adapters have gradients (4 bytes) and optimiser states. A frozen weight needs no gradient, so what a projection
reads is kept only where an adapter beside it needs it, which also keeps x A^T: 2 bytes x rank per token; and eager
norms keep nothing for theirs. Kept too are A and B as the products take them: of each weight, fused or not, all A below
each other and all B on a diagonal (`ops/lora.py`), in the activations' dtype. What the first block keeps less, because
nothing before it trains, is not counted. Codes are dequantised where they are used, one weight at a time, in the
forward and again in the backward.
"""

from deskside.budget.shape import Shape, block_matrices, num_params, root_params
from deskside.budget.step_spec import AdapterSpec, StepSpec

NF4_BLOCK, NF4_SCALE_BLOCK, NF4_TABLE = 64, 256, 4 * 257


def projection_sizes(shape: Shape) -> dict[str, tuple[int, int]]:
    """(rows, columns) of a dense block's projections."""
    D, F = shape.hidden_size, shape.intermediate_size
    q, kv = shape.num_attention_heads * shape.head_dim, shape.num_key_value_heads * shape.head_dim
    found = {"q_proj": (q, D), "k_proj": (kv, D), "v_proj": (kv, D), "o_proj": (D, q)}
    if not shape.num_experts:
        found |= {"gate_proj": (F, D)} if shape.gated_mlp else {}
        found |= {"up_proj": (F, D), "down_proj": (D, F)}
    return found


def adapter_params(shape: Shape, adapter: AdapterSpec) -> int:
    """Numbers that train."""
    sizes = projection_sizes(shape)
    each = sum(sum(sizes[name]) for name in adapter.targets)
    return shape.num_hidden_layers * adapter.rank * each


def frozen_bytes(shape: Shape, adapter: AdapterSpec) -> float:
    """Of all weights that do not train."""
    matrices, tables = block_matrices(shape), root_params(shape)
    vectors = num_params(shape) - matrices - tables
    return matrix_bytes(shape, adapter) + 2 * tables + 4 * vectors


def matrix_bytes(shape: Shape, adapter: AdapterSpec) -> float:
    """Of the blocks' matrices, fused as they are by default."""
    matrices, sizes = block_matrices(shape), projection_sizes(shape)
    if adapter.base == "bf16":
        return 2.0 * matrices
    if adapter.base == "int8":
        return matrices + 4.0 * shape.num_hidden_layers * sum(rows for rows, _ in sizes.values())
    per_weight = 1 / 2 + 1 / NF4_BLOCK + 4 / (NF4_BLOCK * NF4_SCALE_BLOCK)
    return per_weight * matrices + 4 * shape.num_hidden_layers * NF4_TABLE


def dense_bytes(shape: Shape, spec: StepSpec) -> int:
    """The largest weight that codes are turned into, in the activations' dtype; 0 where they need not be."""
    assert spec.adapter is not None
    if spec.adapter.base == "bf16":
        return 0
    sizes = {name: rows * columns for name, (rows, columns) in projection_sizes(shape).items()}
    qkv = sizes["q_proj"] + 2 * sizes["k_proj"]
    entering = sizes["up_proj"] + sizes.get("gate_proj", 0)
    return (4 if spec.precision == "fp32" else 2) * max(qkv, entering, sizes["o_proj"], sizes["down_proj"])


def joined_bytes(shape: Shape, spec: StepSpec) -> float:
    """A and B of all layers as the products take them. In float32 those of a weight that is not fused are the
    parameters themselves."""
    assert spec.adapter is not None
    sizes, wide = projection_sizes(shape), spec.precision == "fp32"
    numbers = 0
    for fused in (("q_proj", "k_proj", "v_proj"), ("o_proj",), ("gate_proj", "up_proj"), ("down_proj",)):
        there = [sizes[name] for name in fused if name in sizes]
        ranks = spec.adapter.rank * sum(name in sizes and name in spec.adapter.targets for name in fused)
        if ranks and not (wide and len(there) == 1):
            numbers += ranks * (there[0][1] + sum(rows for rows, _ in there))
    return (4.0 if wide else 2.0) * shape.num_hidden_layers * numbers


def kept_more(shape: Shape, spec: StepSpec) -> float:
    """Bytes per token and layer that adapters keep beyond what full training keeps; below 0 where frozen weights
    without an adapter need less. In 16 bits."""
    assert spec.adapter is not None
    targets = set(spec.adapter.targets)
    kept = 2.0 * spec.adapter.rank * len(targets)
    if not spec.compiled:  # eager norms keep their result in float32 for the gradient of their weights
        channels = (shape.num_attention_heads + shape.num_key_value_heads) * shape.head_dim
        kept -= 8 * shape.hidden_size + (4 * channels if shape.qk_norm else 0)
    if not targets & {"q_proj", "k_proj", "v_proj"}:
        kept -= 2 * shape.hidden_size
    if shape.num_experts:
        return kept
    if not targets & {"gate_proj", "up_proj"}:
        kept -= 2 * shape.hidden_size
    if "down_proj" not in targets:
        kept -= 2 * shape.intermediate_size
    return kept
