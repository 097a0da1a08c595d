"""Memory of training LoRA adapters over frozen weights: parameters, weight bytes, and saved activations per layer.

Frozen weights of the blocks are stored in the formats of `precision/frozen.py`, tables in 16 bits, vectors in 32:

    bytes per weight     bf16  2
                         int8  1, and 4 per output row
                         nf4   1/2 + 1/64 + 4 / 16384, and 1028 per matrix for a table of 256 numbers and a mean

Only adapters have gradients (4 bytes) and optimizer states. A frozen weight needs no gradient, so the input of a
projection is saved for the backward only if the projection has an adapter. The adapter also saves x A^T, 2 bytes x rank
per token. Eager norms save nothing for the gradient of their weights. A and B are copied in the activations' dtype; for
a fused weight, A is stacked and B put on a block diagonal (`precision/lora.py`). The first block saves a little less
than modelled, because nothing before it is trained. Quantized weights are dequantized one at a time, in the forward and
again in the backward.
"""

from deskside.budget.shape import Shape, block_matrix_params
from deskside.budget.sizes import Sizes
from deskside.budget.step_spec import AdapterSpec, StepSpec

NF4_BLOCK, NF4_SCALE_BLOCK = 64, 256  # weights per 8-bit scale, and 8-bit scales per float32 scale
NF4_TABLE_BYTES = 4 * 257  # per weight matrix


def projection_sizes(shape: Shape) -> dict[str, tuple[int, int]]:
    """Return (rows, columns) of each projection of a block, without those of experts."""
    D, F = shape.hidden_size, shape.intermediate_size
    q, kv = shape.num_attention_heads * shape.head_dim, shape.num_key_value_heads * shape.head_dim
    sizes = {"q_proj": (q, D), "k_proj": (kv, D), "v_proj": (kv, D), "o_proj": (D, q)}
    if not shape.num_experts:
        if shape.gated_mlp:
            sizes["gate_proj"] = (F, D)
        sizes |= {"up_proj": (F, D), "down_proj": (D, F)}
    return sizes


def adapter_params(shape: Shape, adapter: AdapterSpec) -> int:
    """Return the number of parameters of all adapters."""
    sizes = projection_sizes(shape)
    rows_and_columns = sum(sum(sizes[name]) for name in adapter.targets)
    return shape.num_hidden_layers * adapter.rank * rows_and_columns


def frozen_bytes(sizes: Sizes, adapter: AdapterSpec) -> float:
    """Return the bytes of all frozen weights."""
    matrices = sizes.leaf(f"bytes of the blocks in {adapter.base}", block_bytes(sizes.shape, adapter))
    return matrices + 2 * sizes.root_weights + 4 * sizes.leaf("weights of norms and biases", sizes.vectors)


def block_bytes(shape: Shape, adapter: AdapterSpec) -> float:
    """Return the bytes of the block matrices, with q, k, v and gate, up fused as by default."""
    matrices, sizes = block_matrix_params(shape), projection_sizes(shape)
    if adapter.base == "bf16":
        return 2.0 * matrices
    if adapter.base == "int8":
        return matrices + 4.0 * shape.num_hidden_layers * sum(rows for rows, _ in sizes.values())
    per_weight = 1 / 2 + 1 / NF4_BLOCK + 4 / (NF4_BLOCK * NF4_SCALE_BLOCK)
    return per_weight * matrices + 4 * shape.num_hidden_layers * NF4_TABLE_BYTES


def largest_dequantized_bytes(shape: Shape, spec: StepSpec) -> int:
    """Return the bytes of the largest dequantized weight, in the activations' dtype; 0 for a BF16 base."""
    assert spec.adapter is not None
    if spec.adapter.base == "bf16":
        return 0
    sizes = {name: rows * columns for name, (rows, columns) in projection_sizes(shape).items()}
    qkv = sizes["q_proj"] + 2 * sizes["k_proj"]
    gate_up = sizes["up_proj"] + sizes.get("gate_proj", 0)
    return (4 if spec.precision == "fp32" else 2) * max(qkv, gate_up, sizes["o_proj"], sizes["down_proj"])


def stacked_adapter_bytes(shape: Shape, spec: StepSpec) -> float:
    """Return the bytes of the copies of A and B, over all layers. In float32, a weight that is not fused needs none."""
    assert spec.adapter is not None
    sizes, fp32 = projection_sizes(shape), spec.precision == "fp32"
    elements = 0
    for fused in (("q_proj", "k_proj", "v_proj"), ("o_proj",), ("gate_proj", "up_proj"), ("down_proj",)):
        present = [sizes[name] for name in fused if name in sizes]
        ranks = spec.adapter.rank * sum(name in sizes and name in spec.adapter.targets for name in fused)
        if ranks and not (fp32 and len(present) == 1):
            columns, rows = present[0][1], sum(rows for rows, _ in present)
            elements += ranks * (columns + rows)
    return (4.0 if fp32 else 2.0) * shape.num_hidden_layers * elements


def extra_activation_bytes(shape: Shape, spec: StepSpec) -> float:
    """Return the bytes per token and layer, for 16-bit activations, that are saved beyond those of full training.

    Negative if frozen weights without an adapter save more memory than the adapters need.
    """
    assert spec.adapter is not None
    targets = set(spec.adapter.targets)
    extra = 2.0 * spec.adapter.rank * len(targets)
    if not spec.compiled:  # eager norms save their result in float32 for the gradient of their weights
        channels = (shape.num_attention_heads + shape.num_key_value_heads) * shape.head_dim
        extra -= 8 * shape.hidden_size + (4 * channels if shape.qk_norm else 0)
    if not targets & {"q_proj", "k_proj", "v_proj"}:
        extra -= 2 * shape.hidden_size
    if shape.num_experts:
        return extra
    if not targets & {"gate_proj", "up_proj"}:
        extra -= 2 * shape.hidden_size
    if "down_proj" not in targets:
        extra -= 2 * shape.intermediate_size
    return extra
