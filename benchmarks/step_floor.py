"""Floor (minimum time) of each kind of work in a step, measured on this device.

Matmuls: FLOPs divided by the rate of a large matmul in their format, measured from a cool start: an upper bound of what
the power limit allows within a step. Beside that, each matmul of the model is timed alone at its exact shape, in BF16
with torch.mm and in FP8 with torch._scaled_mm on operands that are already quantized and laid out; repeated without
pause, this is slower than within a step, so it is no floor. Attention: the chosen backend is timed alone, forward and
backward.
Everything else: bytes divided by the bandwidth of a large copy. Every input is read once and every output written once,
in the dtype of the activations; the table counts these elements:

    add + norm              8 per token, channel and norm: residual and delta read, residual and normed written; two
                            gradients and the residual read, one gradient written (residual and delta share it)
    QK-norm + RoPE          5 per channel of queries and keys: read, written; gradient and input read, gradient written
    gated activation        8 per intermediate channel of the MLP; 5 without a gate
    loss                    2 per token and vocabulary entry: logits read, their gradient written; that of an FP8 head
                            has one byte
    casts and sums          6 bytes per weight and step for its copy in the format of the matmuls, 6 per weight for
                            its gradient into float32, 10 in each further pass, which accumulates
    quantization            0 if the producing kernel can write the format: only the output of attention and its
                            gradient remain, 4 bytes per query channel
    optimizer               bytes and Newton-Schulz matmuls of budget/operators/; the latter at the matmul peak

FP8 operands take as many bytes as BF16 operands, because Hopper and Ada multiply FP8 in one layout only, so two copies
are written. The floor of emulated matmuls is that of BF16 matmuls; for NVFP4 this is always so.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from deskside.budget.operators.step import step_operators
from deskside.budget.shape import block_matrix_params
from deskside.budget.step_spec import StepSpec
from deskside.config.recipes import Format, Product, Recipe, recipe_named
from deskside.config.run import RunConfig
from deskside.doctor import check_gemm
from deskside.doctor.check_tools import median_seconds
from deskside.kernels.attention import Requirements, choose
from deskside.kernels.matmul_peak import SIZES, measure_matmul_peak
from deskside.train.attention_backends import AttentionBackends

FP8: dict[Format, torch.dtype] = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}


@dataclass(frozen=True)
class Gemm:
    """The matmul y (tokens, rows) = x (tokens, columns) W^T of a layer, `times` per step, with its two gradients."""

    name: str
    tokens: int
    columns: int
    rows: int
    times: int


def gemms(config: RunConfig, micro_tokens: int) -> list[Gemm]:
    """Return the matmul of every linear layer. The head is multiplied in chunks of `compute.loss_chunk_tokens`."""
    model, passes = config.model, config.batch.tokens // micro_tokens
    D, layers = model.hidden_size, model.num_hidden_layers
    q, kv = model.num_attention_heads * model.head_dim, model.num_key_value_heads * model.head_dim
    times = layers * passes
    found = []
    if model.fused_qkv:
        found.append(Gemm("qkv", micro_tokens, D, q + 2 * kv, times))
    else:
        found += [Gemm("q", micro_tokens, D, q, times), Gemm("k, v", micro_tokens, D, kv, 2 * times)]
    found.append(Gemm("out", micro_tokens, q, D, times))
    tokens, intermediate = micro_tokens, model.intermediate_size
    if model.num_experts:
        # Assume that tokens are spread evenly over the experts.
        found.append(Gemm("router", micro_tokens, D, model.num_experts, times))
        tokens = max(1, micro_tokens * model.num_experts_per_tok // model.num_experts)
        intermediate, times = model.moe_intermediate_size, times * model.num_experts
    ups = 2 if model.gated_mlp else 1
    if ups == 2 and not model.fused_gate_up and not model.num_experts:
        found.append(Gemm("gate, up", tokens, D, intermediate, 2 * times))
    else:
        found.append(Gemm("gate-up" if ups == 2 else "up", tokens, D, ups * intermediate, times))
    found.append(Gemm("down", tokens, intermediate, D, times))
    chunk = min(config.compute.loss_chunk_tokens, micro_tokens)
    found.append(Gemm("head", chunk, D, model.vocab_size, -(-micro_tokens // chunk) * passes))
    return found


def measure(
    config: RunConfig,
    recipe_name: str,
    native: bool,
    attention: AttentionBackends,
    micro_tokens: int,
    dtype: torch.dtype,
    device: torch.device,
) -> dict[str, Any]:
    """Return the milliseconds per step of each kind of `step_kinds.KINDS` that has a floor, and how they were obtained.

    native: True if the matmuls of the recipe run in its formats on this device; emulated ones get the floor of BF16. A
    floor that does not fit in memory next to the model is None, with the reason in `notes`.
    """
    notes: list[str] = []
    recipe = config.precision.recipe(recipe_name)
    if device.type == "cuda":
        torch.cuda.empty_cache()
    bandwidth = float(check_gemm.copy(device.type)["speed"]["value"])
    kinds: dict[str, float | None] = {}
    table: list[dict[str, Any]] = []
    rates: dict[str, float] = {}

    def add_floor(kind: str, work: Callable[[], float]) -> None:
        try:
            kinds[kind] = work()
        except torch.OutOfMemoryError:
            kinds[kind] = None
            notes.append(f"{kind}: no floor, because its tensors do not fit in memory next to the model")

    add_floor(
        "gemm", lambda: _gemm_floor(config, recipe, native, micro_tokens, dtype, device, table, rates, notes)
    )
    add_floor("attention", lambda: _attention_floor(config, attention, micro_tokens, dtype, device))
    for kind, size in traffic_bytes(config, recipe, micro_tokens, dtype).items():
        kinds[kind] = 1e3 * size / bandwidth
    add_floor("optimizer", lambda: _optimizer_floor(config, micro_tokens, bandwidth, dtype, device))
    return {"kinds": kinds, "gemms": table, "rates": rates, "copy_bandwidth": bandwidth, "notes": notes}


def traffic_bytes(
    config: RunConfig, recipe: Recipe, micro_tokens: int, dtype: torch.dtype
) -> dict[str, float]:
    """Return the minimum bytes per step of the kinds without matmuls, by the table in the module docstring."""
    model, tokens, unit = config.model, float(config.batch.tokens), dtype.itemsize
    D, layers = model.hidden_size, model.num_hidden_layers
    q, kv = model.num_attention_heads * model.head_dim, model.num_key_value_heads * model.head_dim
    intermediate = model.intermediate_size
    if model.num_experts:
        intermediate = model.num_experts_per_tok * model.moe_intermediate_size
    per_token = 8 * D * (2 * layers + 1)
    if model.qk_norm or model.position_embedding == "rope":
        per_token += 5 * (q + kv) * layers
    per_token += (8 if model.gated_mlp else 5) * intermediate * layers
    passes = config.batch.tokens // micro_tokens
    weights = block_matrix_params(model) + model.vocab_size * D
    casts = 0.0 if unit == 4 else float(weights * (6 + 6 + 10 * (passes - 1)))
    traffic = {
        "elementwise": tokens * unit * per_token,
        "loss": tokens * model.vocab_size * (unit + (1 if _head_quantized(config) else unit)),
        "memory": casts,
        # Rows of the table are read and written out; gradients are read and scattered into a zeroed table.
        "embedding": tokens * D * (4 + 2 * unit) + 4.0 * passes * model.vocab_size * D,
    }
    if recipe.quantized:
        traffic["quantisation"] = 4.0 * tokens * q * layers
    return traffic


def _gemm_floor(
    config: RunConfig,
    recipe: Recipe,
    native: bool,
    micro_tokens: int,
    dtype: torch.dtype,
    device: torch.device,
    table: list[dict[str, Any]],
    rates: dict[str, float],
    notes: list[str],
) -> float:
    """Return the milliseconds of all matmuls of a step at the rates of large ones.

    A row per layer with the milliseconds of its matmuls alone is appended to `table`. rates: filled with FLOP/s.
    """
    quantized = native and recipe.quantized and any(f in FP8 for f in recipe.formats)
    if recipe.quantized and (not native or "nvfp4" in recipe.formats):
        notes.append("emulated matmuls are timed in BF16")
    rates["plain"] = measure_matmul_peak(device, dtype)
    if quantized:
        rates["quantized"] = _large_rate(recipe, dtype, device)
    layers = config.model.num_hidden_layers
    bf16_share = sum(recipe.kept_blocks(layers)) / layers
    total = 0.0
    for gemm in gemms(config, micro_tokens):
        bf16_ms = _three_matmuls(gemm, None, dtype, device)
        # The share of this layer's matmuls that stay in BF16.
        share = 1.0 if gemm.name in ("head", "router") else bf16_share
        if gemm.name == "head" and _head_quantized(config):
            share = 0.0
        row = {"name": gemm.name, "times": gemm.times, "plain_ms": bf16_ms}
        flops = 3 * 2.0 * gemm.tokens * gemm.columns * gemm.rows
        seconds = flops / rates["plain"]
        if quantized and (share < 1.0):
            fp8_ms = _three_matmuls(
                gemm, _head_recipe(recipe) if gemm.name == "head" else recipe, dtype, device
            )
            row["quantized_ms"] = fp8_ms
            seconds = share * seconds + (1 - share) * flops / rates["quantized"]
        table.append(row)
        total += gemm.times * seconds
    return 1e3 * total


def _large_rate(recipe: Recipe, dtype: torch.dtype, device: torch.device) -> float:
    """Return the FLOP/s of a large matmul with the FP8 operands of a recipe."""
    product = next(p for p in recipe.products if p.left.format in FP8 and p.right.format in FP8)
    n = SIZES[device.type]
    return 2 * n**3 / median_seconds(_matmul(n, n, n, product, dtype, device, False), device)


def _head_quantized(config: RunConfig) -> bool:
    return config.precision.quantized and config.precision.head == "fp8"


def _head_recipe(recipe: Recipe) -> Recipe:
    """Return the recipe of an FP8 head: that of the blocks, or tensorwise FP8 if the blocks use NVFP4."""
    return recipe_named("fp8-tensorwise") if "nvfp4" in recipe.formats else recipe


def _three_matmuls(
    gemm: Gemm, recipe: Recipe | None, dtype: torch.dtype, device: torch.device
) -> list[float]:
    """Return the milliseconds of output, input gradient and weight gradient; with a recipe, in its FP8 formats."""
    n, k, m = gemm.tokens, gemm.columns, gemm.rows
    shapes = ((n, k, m), (n, m, k), (m, n, k))
    products = (None, None, None) if recipe is None else recipe.products
    times = []
    for (rows, inner, columns), product in zip(shapes, products, strict=True):
        transposed = (rows, inner, columns) == (m, n, k)
        call = _matmul(rows, inner, columns, product, dtype, device, transposed)
        times.append(1e3 * median_seconds(call, device))
    return times


def _matmul(
    rows: int,
    inner: int,
    columns: int,
    product: Product | None,
    dtype: torch.dtype,
    device: torch.device,
    transposed: bool,
) -> Callable[[], Tensor]:
    """Return a call of left (rows, inner) @ right (inner, columns), with each operand in its layout in a step.

    transposed: for the weight gradient in BF16, whose left operand is a transposed view. FP8 operands are contiguous
    along the inner dimension, the only layout that every GPU supports.
    """
    if product is None or product.left.format not in FP8 or product.right.format not in FP8:
        left = (
            torch.randn(inner, rows, device=device).to(dtype).t()
            if transposed
            else _random(rows, inner, dtype, device)
        )
        right = _random(inner, columns, dtype, device)
        return partial(torch.mm, left, right)
    left_codes = _random(rows, inner, torch.float32, device).to(FP8[product.left.format])
    right_codes = _random(columns, inner, torch.float32, device).to(FP8[product.right.format]).t()
    by_row = product.left.scaling == "row"
    scale_left = torch.ones((rows, 1) if by_row else (), device=device)
    scale_right = torch.ones((1, columns) if by_row else (), device=device)
    # Fast accumulation for gradients too: a floor should not be slower than what other FP8 trainers do on Hopper.
    return partial(
        torch._scaled_mm,
        left_codes,
        right_codes,
        scale_a=scale_left,
        scale_b=scale_right,
        out_dtype=torch.bfloat16,
        use_fast_accum=True,
    )


def _random(rows: int, columns: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.randn(rows, columns, device=device).to(dtype)


def _attention_floor(
    config: RunConfig,
    attention: AttentionBackends,
    micro_tokens: int,
    dtype: torch.dtype,
    device: torch.device,
) -> float:
    """Return the milliseconds per step of the attention of all layers, forward and backward."""
    model, T = config.model, config.batch.sequence_length
    total = 0.0
    windows = [model.layer_window(i) for i in range(model.num_hidden_layers)]
    for window in set(windows):
        need = Requirements(
            batch=micro_tokens // T,
            tokens=T,
            heads=model.num_attention_heads,
            kv_heads=model.num_key_value_heads,
            head_dim=model.head_dim,
            dtype=dtype,
            device=device,
            window=window,
            documents=config.data.document_mask,
        )
        name = attention.full if window is None else attention.windowed or attention.full
        total += windows.count(window) * choose(need, [name]).seconds[name]
    return 1e3 * total * (config.batch.tokens // micro_tokens)


def _optimizer_floor(
    config: RunConfig, micro_tokens: int, bandwidth: float, dtype: torch.dtype, device: torch.device
) -> float:
    work = StepSpec(
        config.batch.sequence_length, config.batch.tokens, micro_tokens, optimizer=config.optim.name
    )
    operators = step_operators(config.model, work)
    traffic = sum(o.amount for o in operators if o.group == "optimizer_traffic")
    flops = sum(o.amount for o in operators if o.group == "optimizer_matmul")
    return 1e3 * (traffic / bandwidth + (flops / measure_matmul_peak(device, dtype) if flops else 0.0))
