"""Requirements on a model: sizes that divide as its recipe needs, and layers that the fused kernels cover.

FP8 products take sizes that are multiples of 16 in every dimension; NVFP4 has blocks of 16, and a Hadamard transform
works on 16 or 128 values, along the dimension that a product sums over. That dimension is, for y = x W^T, the columns
of W in the output, the rows of W in the input gradient, and the tokens of a pass in the weight gradient. A fused
weight (q, k and v in one) counts as one. Tensor cores read packed NVFP4 in twos of its blocks: NATIVE_FP4_UNIT.
"""

import math
from collections.abc import Callable, Sequence

from deskside.config.model import ModelConfig
from deskside.config.recipes import Product, Recipe
from deskside.config.sections import PROJECTIONS, Projection

UNIT = 16  # every dimension of a quantized product
NATIVE_FP4_UNIT = 32  # of one that tensor cores read as packed NVFP4
VOCABULARY_UNIT = 64  # products with the output head are faster if the vocabulary size is a multiple of it


def padded_vocabulary(tokens: int) -> int:
    """Return the vocabulary size of a model for a tokenizer with this many tokens: the next multiple of 64."""
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
    """Raise ValueError that names the key and the nearest size that divides.

    head: the output head's products are quantized too; sequence_lengths: of the stages; micro_tokens: of one pass,
    None where it is any number of whole rows; chunk_tokens: of one pass through the head; unit: what every size of a
    product of a block is a multiple of.
    """
    columns, rows, tokens = (_multiple(product, unit) for product in recipe.products)
    hidden, inside = model.hidden_size, model.intermediate_size
    heads, kv_heads, channels = model.num_attention_heads, model.num_key_value_heads, model.head_dim
    _divides("model.hidden_size", hidden, math.lcm(columns, rows), recipe)
    # The MLP's width enters the down projection and leaves the one before, twice if gate and up are fused.
    leaving_mlp = rows // math.gcd(rows, 2) if model.gated_mlp and model.fused_gate_up else rows
    _divides("model.intermediate_size", inside, math.lcm(columns, leaving_mlp), recipe)

    def attention(size: int) -> bool:
        """Return whether heads of `size` channels divide: queries enter a product and, with keys and values, leave
        one."""
        q, kv = heads * size, kv_heads * size
        leaving = [q + 2 * kv] if model.fused_qkv else [q, kv]
        return size % 2 == 0 and q % columns == 0 and all(n % rows == 0 for n in leaving)

    if not attention(channels):
        near = _nearest(channels, attention)
        raise ValueError(
            f"model.head_dim: {heads} query and {kv_heads} key-value heads of {channels} channels do not divide by "
            f"{math.lcm(columns, rows)}, as {recipe.name} needs; use --model.head_dim {near}, or other numbers of heads"
        )
    if head:
        _divides("model.vocab_size", model.vocab_size, UNIT, recipe)
        _divides("compute.loss_chunk_tokens", chunk_tokens, UNIT, recipe)
    for length in sequence_lengths:
        key = "batch.sequence_length" if len(sequence_lengths) == 1 else "schedule.stages"
        if micro_tokens is None:
            _divides(key, length, tokens, recipe)
    if micro_tokens is not None:
        step = math.lcm(tokens, *sequence_lengths)
        if micro_tokens % tokens:
            near = _nearest(micro_tokens, lambda n: n % step == 0)
            raise ValueError(
                f"batch.micro_tokens: {micro_tokens} is not a multiple of {tokens}, as {recipe.name} needs for the "
                f"weight gradient; use {near}"
            )


def projections(model: ModelConfig) -> dict[tuple[str, ...], int]:
    """Return the weights of a dense block: the projections that share one, and its size."""
    D, F = model.hidden_size, model.intermediate_size
    q, kv = model.num_attention_heads * model.head_dim, model.num_key_value_heads * model.head_dim
    attention = {("q_proj",): q * D, ("k_proj",): kv * D, ("v_proj",): kv * D}
    mlp = {("gate_proj",): F * D, ("up_proj",): F * D} if model.gated_mlp else {("up_proj",): F * D}
    entering = [(attention, model.fused_qkv), (mlp, model.fused_gate_up)]
    found: dict[tuple[str, ...], int] = {("o_proj",): D * q, ("down_proj",): D * F}
    for weights, fused in entering:
        names = [name for (name,) in weights]
        if fused:
            found[tuple(names)] = sum(weights.values())
        else:
            found |= {(name,): weights[name,] for name in names}
    return found


def adaptable(model: ModelConfig) -> list[Projection]:
    """Return the projections that can have an adapter. Experts have none."""
    there = {name for weight in projections(model) for name in weight}
    there -= {"gate_proj", "up_proj", "down_proj"} if model.num_experts else set()
    return [name for name in PROJECTIONS if name in there]


def _multiple(product: Product, unit: int) -> int:
    """Return the number that a product's summed dimension must be a multiple of; 1 if it is not quantized."""
    if not product.quantized:
        return 1
    return math.lcm(unit, product.left.hadamard or 1, product.right.hadamard or 1)


def _divides(key: str, size: int, by: int, recipe: Recipe) -> None:
    if size % by:
        near = _nearest(size, lambda n: n % by == 0)
        raise ValueError(f"{key}: {size} is not a multiple of {by}, as {recipe.name} needs; use {near}")


def _nearest(size: int, good: Callable[[int], bool]) -> int:
    """Return the nearest size that passes, the larger one of two at equal distance."""
    distance = 0
    while True:
        for candidate in (size + distance, size - distance):
            if candidate > 0 and good(candidate):
                return candidate
        distance += 1


def uncovered_reason(
    *,
    rmsnorm_first: bool,
    num_projections: int,
    bias: bool = False,
    adapters: bool = False,
    head_dim: int = 1,
) -> str | None:
    """Return why the fused kernels do not cover a sublayer, or None if they do.

    `model_uncovered_reason` asks this about a configuration, `precision/convert.py` and `engine/fused.py` about
    modules.

    Args:
        rmsnorm_first: The sublayer starts with an RMSNorm whose output only its projections read.
        num_projections: Separate weights that read the norm's output. Fused QKV and fused gate/up are one each.
        head_dim: Channels per head of an attention sublayer. The kernel of QK-norm and RoPE holds one head in a
            block whose size must be a power of two.
    """
    if not rmsnorm_first:
        return "its norm is not RMSNorm before the projections"
    if num_projections != 1:
        return "its projections are not fused"
    if bias:
        return "its projections have a bias"
    if adapters:
        return "its weights are frozen, with adapters beside them"
    if head_dim & (head_dim - 1):
        return f"its head_dim {head_dim} is not a power of two"
    return None


def model_uncovered_reason(model: ModelConfig, adapters: bool = False) -> str | None:
    """Return why the fused kernels do not cover every sublayer of a model for training, or None if they do."""
    if model.num_experts:
        return "it is a mixture of experts"
    rmsnorm_first = model.norm == "rmsnorm" and model.norm_position == "pre"
    attention = uncovered_reason(
        rmsnorm_first=rmsnorm_first,
        num_projections=1 if model.fused_qkv else 3,
        bias=model.attention_bias,
        adapters=adapters,
        head_dim=model.head_dim,
    )
    mlp = uncovered_reason(
        rmsnorm_first=rmsnorm_first,
        num_projections=1 if model.fused_gate_up or not model.gated_mlp else 2,
        bias=model.mlp_bias,
        adapters=adapters,
    )
    return attention or mlp
