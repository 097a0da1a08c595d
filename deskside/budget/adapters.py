"""Memory of training adapters beside frozen weights: parameters, bytes of the weights, activations kept per layer.

Frozen weights of the blocks are stored in the formats of `precision/frozen.py`, tables in 16 bits, vectors in 32:

    bytes per weight     bf16  2
                         int8  1, and 4 for each output row
                         nf4   1/2 + 1/64 + 4 / 16384, and 1028 for each weight's table of 256 numbers and their mean

Only adapters have gradients (4 bytes) and optimizer states. A frozen weight needs no gradient, so the input of a
projection is kept only if an adapter beside it needs it. The adapter also keeps x A^T, 2 bytes x rank per token.
Eager norms keep nothing for the gradient of their weights. A and B are kept once more as the products take them: all A
of a weight stacked, all B on a block diagonal (`ops/lora.py`), in the activations' dtype. The first block keeps a
little less than this, because nothing before it is trained. Quantized codes are dequantized where they are used, one
weight at a time, in the forward and again in the backward.
"""

from deskside.budget.shape import Shape, block_matrices
from deskside.budget.sizes import Sizes
from deskside.budget.step_spec import AdapterSpec, StepSpec

NF4_BLOCK, NF4_SCALE_BLOCK, NF4_TABLE = 64, 256, 4 * 257


def projection_sizes(shape: Shape) -> dict[str, tuple[int, int]]:
    """Return (rows, columns) of each projection of a dense block."""
    D, F = shape.hidden_size, shape.intermediate_size
    q, kv = shape.num_attention_heads * shape.head_dim, shape.num_key_value_heads * shape.head_dim
    found = {"q_proj": (q, D), "k_proj": (kv, D), "v_proj": (kv, D), "o_proj": (D, q)}
    if not shape.num_experts:
        found |= {"gate_proj": (F, D)} if shape.gated_mlp else {}
        found |= {"up_proj": (F, D), "down_proj": (D, F)}
    return found


def adapter_params(shape: Shape, adapter: AdapterSpec) -> int:
    """Return the number of trained parameters."""
    sizes = projection_sizes(shape)
    each = sum(sum(sizes[name]) for name in adapter.targets)
    return shape.num_hidden_layers * adapter.rank * each


def frozen_bytes(sizes: Sizes, adapter: AdapterSpec) -> float:
    """Return the bytes of all frozen weights."""
    matrices = sizes.leaf(f"bytes of the blocks in {adapter.base}", matrix_bytes(sizes.shape, adapter))
    return matrices + 2 * sizes.root_weights + 4 * sizes.leaf("weights of norms and biases", sizes.vectors)


def matrix_bytes(shape: Shape, adapter: AdapterSpec) -> float:
    """Return the bytes of the blocks' matrices, fused as they are by default."""
    matrices, sizes = block_matrices(shape), projection_sizes(shape)
    if adapter.base == "bf16":
        return 2.0 * matrices
    if adapter.base == "int8":
        return matrices + 4.0 * shape.num_hidden_layers * sum(rows for rows, _ in sizes.values())
    per_weight = 1 / 2 + 1 / NF4_BLOCK + 4 / (NF4_BLOCK * NF4_SCALE_BLOCK)
    return per_weight * matrices + 4 * shape.num_hidden_layers * NF4_TABLE


def dense_bytes(shape: Shape, spec: StepSpec) -> int:
    """Return the bytes of the largest dequantized weight, in the activations' dtype; 0 for weights in BF16."""
    assert spec.adapter is not None
    if spec.adapter.base == "bf16":
        return 0
    sizes = {name: rows * columns for name, (rows, columns) in projection_sizes(shape).items()}
    qkv = sizes["q_proj"] + 2 * sizes["k_proj"]
    entering = sizes["up_proj"] + sizes.get("gate_proj", 0)
    return (4 if spec.precision == "fp32" else 2) * max(qkv, entering, sizes["o_proj"], sizes["down_proj"])


def joined_bytes(shape: Shape, spec: StepSpec) -> float:
    """Return the bytes of A and B of all layers as the products take them. In float32, a weight that is not fused
    uses the parameters themselves."""
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
    """Return the bytes per token and layer, in 16 bits, that adapters keep beyond full training. Negative where
    frozen weights without an adapter keep less."""
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
