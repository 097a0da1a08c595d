"""Sizes of a model that a precision recipe requires, and layers that the fused kernels cover.

FP8 products need multiples of 16 in every dimension. NVFP4 has blocks of 16 values, and a Hadamard transform takes 16
or 128 values, both along the dimension that a product sums over. For y = x W^T, these are the columns of W in the
output, the rows of W in the input gradient, and the tokens of a pass in the weight gradient. A fused weight (q, k and v
in one) counts as one weight. Tensor cores read packed NVFP4 in pairs of blocks (NATIVE_FP4_UNIT).
"""

import math
from collections.abc import Callable, Sequence

from deskside.config.model import ModelConfig
from deskside.config.recipes import Product, Recipe
from deskside.config.sections import PROJECTIONS, Projection

UNIT = 16  # dimensions of a quantized product are multiples of this
NATIVE_FP4_UNIT = 32  # the same, if tensor cores read the operands as packed NVFP4
VOCABULARY_UNIT = 64  # products with the output head are faster if the vocabulary size is a multiple of this


def padded_vocabulary(tokens: int) -> int:
    """Return the vocabulary size of a model for a tokenizer: its number of tokens, rounded up to a multiple of 64."""
    return math.ceil(tokens / VOCABULARY_UNIT) * VOCABULARY_UNIT


def check_dimensions(
    recipe: Recipe,
    model: ModelConfig,
    head: bool = False,
    sequence_lengths: Sequence[int] = (),
    micro_tokens: int | None = None,
    chunk_tokens: int = UNIT,
    unit: int = UNIT,
) -> None:
    """Raise ValueError, with the key and the nearest size that fits, if a size does not fit the recipe.

    Args:
        head: Whether the products with the output head are quantized too.
        sequence_lengths: Tokens per row in each stage.
        micro_tokens: Tokens of one pass, or None if a pass has any number of whole rows.
        chunk_tokens: Tokens of one pass through the output head.
        unit: The summed dimension of a quantized product of a block must be a multiple of this.
    """
    # Columns and rows of a weight, and tokens of a pass, must be multiples of these.
    columns, rows, tokens = (_required_multiple(product, unit) for product in recipe.products)
    heads, kv_heads, head_dim = model.num_attention_heads, model.num_key_value_heads, model.head_dim
    _check_multiple("model.hidden_size", model.hidden_size, math.lcm(columns, rows), recipe)
    # intermediate_size is the columns of the down projection and the rows of the up projection. If gate and up are
    # fused, as in experts, their weight has twice as many rows.
    fused = model.fused_gate_up or model.num_experts > 0
    up_rows = rows // math.gcd(rows, 2) if model.gated_mlp and fused else rows
    key = "moe_intermediate_size" if model.num_experts else "intermediate_size"
    _check_multiple(f"model.{key}", getattr(model, key), math.lcm(columns, up_rows), recipe)

    def heads_fit(head_dim: int) -> bool:
        # Queries have the size of o_proj's columns; q, k and v are the rows of their projections.
        q, kv = heads * head_dim, kv_heads * head_dim
        row_counts = [q + 2 * kv] if model.fused_qkv else [q, kv]
        return q % columns == 0 and all(count % rows == 0 for count in row_counts)

    if not heads_fit(head_dim):
        # RoPE needs an even size.
        nearest = _nearest(head_dim, lambda size: size % 2 == 0 and heads_fit(size))
        raise ValueError(
            f"model.head_dim: {heads} query and {kv_heads} key-value heads of {head_dim} channels are not multiples of "
            f"{math.lcm(columns, rows)}, as {recipe.name} needs; use --model.head_dim {nearest}, or other numbers of "
            f"heads"
        )
    if head:
        _check_multiple("model.vocab_size", model.vocab_size, UNIT, recipe)
        _check_multiple("compute.loss_chunk_tokens", chunk_tokens, UNIT, recipe)
    if micro_tokens is None:
        key = "batch.sequence_length" if len(sequence_lengths) == 1 else "schedule.stages"
        for length in sequence_lengths:
            _check_multiple(key, length, tokens, recipe)
    elif micro_tokens % tokens:
        whole_rows = math.lcm(tokens, *sequence_lengths)
        nearest = _nearest(micro_tokens, lambda size: size % whole_rows == 0)
        raise ValueError(
            f"batch.micro_tokens: {micro_tokens} is not a multiple of {tokens}, as {recipe.name} needs for the "
            f"weight gradient; use {nearest}"
        )


def projection_sizes(model: ModelConfig) -> dict[tuple[str, ...], int]:
    """Return the number of elements of each weight of a block, by the projections that the weight holds.

    The weights of all experts count as one weight. The router is left out.
    """
    D, F = model.hidden_size, model.intermediate_size
    if model.num_experts:
        F = model.num_experts * model.moe_intermediate_size
    q, kv = model.num_attention_heads * model.head_dim, model.num_key_value_heads * model.head_dim
    attention: dict[tuple[str, ...], int] = {("q_proj",): q * D, ("k_proj",): kv * D, ("v_proj",): kv * D}
    mlp: dict[tuple[str, ...], int] = {("gate_proj",): F * D} if model.gated_mlp else {}
    mlp[("up_proj",)] = F * D
    sizes: dict[tuple[str, ...], int] = {("o_proj",): D * q, ("down_proj",): D * F}
    for separate, fused in (
        (attention, model.fused_qkv),
        (mlp, model.fused_gate_up or model.num_experts > 0),
    ):
        if fused:
            sizes[tuple(name for (name,) in separate)] = sum(separate.values())
        else:
            sizes |= separate
    return sizes


def adaptable_projections(model: ModelConfig) -> list[Projection]:
    """Return the projections that can have an adapter: those of the blocks; of experts, every one has its own."""
    names = {name for weight in projection_sizes(model) for name in weight}
    return [name for name in PROJECTIONS if name in names]


def _required_multiple(product: Product, unit: int) -> int:
    """Return the number that the summed dimension of a product must be a multiple of; 1 if it is not quantized."""
    if not product.quantized:
        return 1
    return math.lcm(unit, product.left.hadamard or 1, product.right.hadamard or 1)


def _check_multiple(key: str, size: int, multiple: int, recipe: Recipe) -> None:
    if size % multiple:
        nearest = _nearest(size, lambda candidate: candidate % multiple == 0)
        raise ValueError(
            f"{key}: {size} is not a multiple of {multiple}, as {recipe.name} needs; use {nearest}"
        )


def _nearest(size: int, fits: Callable[[int], bool]) -> int:
    """Return the nearest size that fits; of two at the same distance, the larger one."""
    distance = 0
    while True:
        for candidate in (size + distance, size - distance):
            if candidate > 0 and fits(candidate):
                return candidate
        distance += 1


# Features of a sublayer that the fused kernels do not compute.
WITHOUT_KERNELS = {
    "qk_norm_over_projection": "its QK-norm spans all heads",
    "partial_rotary": "it rotates only some channels of a head",
    "sinks": "its attention has sinks",
    "parallel": "it reads the same residual as attention",
    "clamped_swiglu": "its activation is clamped_swiglu",
}


def uncovered_reason(
    *,
    rmsnorm_first: bool,
    num_projections: int,
    bias: bool = False,
    adapters: bool = False,
    head_dim: int = 1,
    **features: bool,
) -> str | None:
    """Return why the fused kernels do not cover a sublayer, or None if they do.

    `model_uncovered_reason` calls this for a configuration, `precision/convert.py` and `engine/fused.py` for modules.

    Args:
        rmsnorm_first: The sublayer starts with an RMSNorm whose output only its projections read.
        num_projections: Separate weights that read the norm's output. Fused QKV and fused gate/up are one each.
        head_dim: Channels per head of an attention sublayer. The kernel of QK-norm and RoPE holds one head in a
            block whose size must be a power of two, and normalises and rotates one head.
        features: Whether the sublayer has each feature of WITHOUT_KERNELS; false for those not given.
    """
    if not rmsnorm_first:
        return "it does not start with an RMSNorm before its projections"
    if num_projections != 1:
        return "its projections are not fused"
    if bias:
        return "its projections have a bias"
    if adapters:
        return "its weights are frozen and have adapters"
    if head_dim & (head_dim - 1) != 0:
        return f"its head_dim {head_dim} is not a power of two"
    return next((WITHOUT_KERNELS[name] for name, present in features.items() if present), None)


def model_uncovered_reason(model: ModelConfig, adapters: bool = False) -> str | None:
    """Return why the fused kernels do not cover every sublayer of a model for training, or None if they do."""
    rmsnorm_first = model.norm == "rmsnorm" and model.norm_position in ("pre", "sandwich")
    attention = uncovered_reason(
        rmsnorm_first=rmsnorm_first,
        num_projections=1 if model.fused_qkv else 3,
        bias=model.attention_bias or model.qkv_bias,
        adapters=adapters,
        head_dim=model.head_dim,
        qk_norm_over_projection=model.qk_norm_over == "projection",
        sinks=model.attention_sinks,
        partial_rotary=model.partial_rotary_factor < 1,
    )
    mlp = uncovered_reason(
        rmsnorm_first=rmsnorm_first,
        num_projections=1 if model.fused_gate_up or not model.gated_mlp or model.num_experts else 2,
        bias=model.mlp_bias,
        adapters=adapters,
        parallel=model.parallel_residual,
        clamped_swiglu=model.hidden_act == "clamped_swiglu",
    )
    return attention or mlp
