"""What arithmetic answers of others' claims: data sheets, exact bytes, the planner's models, prices. It needs no trial.

`FORMULAS` maps the `formula` of a claim (facts/claims.toml) to its answer. An answer's `source` says what it rests on:
"arithmetic", "data sheet", "modelled" (budget/ and plan/, never a measurement on the card named) or "published prices".
Modelled answers have a range, as plans have.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from tempfile import TemporaryDirectory
from typing import Any, Literal

import numpy as np

from deskside.budget import loss
from deskside.budget.energy import energy, gpu_watts, wall_watts
from deskside.budget.memory import training_memory
from deskside.budget.money import Ownership, own_or_rent, per_billion_tokens
from deskside.budget.shape import flops_per_token, kv_bytes_per_token, matmul_params, num_params
from deskside.budget.work import Precision, Work
from deskside.config import merge, presets
from deskside.config.model import ModelConfig
from deskside.facts import gpus, prices
from deskside.plan.estimate import Estimate, Range
from deskside.plan.make import make_plan
from deskside.plan.request import ask

Source = Literal["arithmetic", "data sheet", "modelled", "published prices"]

NVFP4_BITS = 4 + 8 / 16  # a value, and its share of an 8-bit scale for 16 values
CLAIMED_PRICE = 0.10  # dollars per kWh, as the guide reckons
CLAIMED_CLUSTER_SPEED = 1.3e6  # tokens/s of its eight cards, as the guide reckons with
GPT2_TOKENS = 49e9
SPEEDRUN_FLOPS = 4.33e19
DAY = 24 * 3600.0

# The model of the FP8 document: 49,152 entries, and the head shares the embedding.
FP8_MODEL = {"vocab_size": 49152, "tie_word_embeddings": True}

# The shape was not given: 3.0 billion parameters, 8 experts, 16K context (tests/plan/test_claims.py).
MOE = {
    "vocab_size": 50304,
    "hidden_size": 2048,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "max_position_embeddings": 16384,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 2048,
}
MOE_ROW, MOE_STEP_ROWS, MOE_PASS_ROWS, MOE_STEPS = 16384, 32, 2, 100_000


@dataclass(frozen=True)
class Answer:
    """value with its range, in the claim's unit; of a claimed change: relative, -0.3 for 30 % less. on: of what."""

    low: float
    value: float
    high: float
    source: Source
    on: str


@cache
def answer(formula: str) -> Answer:
    """Raises KeyError for a formula that there is none of."""
    return FORMULAS[formula]()


def _exact(value: float, source: Source = "arithmetic", on: str = "any card") -> Answer:
    return Answer(value, value, value, source, on)


# Bytes


def _kv_cache(heads: int, shared_by: int) -> Callable[[], Answer]:
    """Change of the cache of a model with `heads` heads when `shared_by` of them share their keys and values."""

    def formula() -> Answer:
        def bytes_with(kv_heads: int) -> float:
            shape = ModelConfig(num_attention_heads=heads, num_key_value_heads=kv_heads, head_dim=64)
            return kv_bytes_per_token(shape, 2)

        return _exact(bytes_with(heads // shared_by) / bytes_with(heads) - 1, on=f"{heads} heads")

    return formula


def _fp4_storage() -> Answer:
    return _exact(NVFP4_BITS / 16 - 1, on="against 16-bit weights")


def _fp4_weights_3b() -> Answer:
    return _exact(3e9 * NVFP4_BITS / 8 / 1e9, on="3 billion parameters")


def _mixed_precision_memory() -> Answer:
    shape = merge.build(presets.layers("medium")).model

    def peak(precision: Precision) -> int:
        work = Work(512, 16 * 512, 16 * 512, optimizer="adamw", precision=precision, compiled=False)
        return training_memory(shape, work).allocated

    return _exact(peak("bf16") / peak("fp32") - 1, "modelled", "medium, plain torch")


# Data sheets


def _sheet(card: str, number: Callable[[gpus.Gpu], float | None]) -> Callable[[], Answer]:
    def formula() -> Answer:
        gpu = gpus.find(card)
        return _exact(number(gpu) or 0.0, "data sheet", gpu.name)

    return formula


# Whole runs, by the planner


def _estimate(card: str, preset: str, overrides: dict[str, Any], **options: Any) -> Estimate:
    """The planner's estimate of one setting, from data sheets and published runs alone."""
    with TemporaryDirectory() as no_probes:
        request = ask(gpu=card, preset=preset, overrides=overrides, probes=no_probes, **options)
    found = make_plan(request).asked
    assert found is not None  # the model is given
    return found


def _batch(rows: int, passes: int = 1, gpus_count: int = 1, fitted: bool = False) -> dict[str, Any]:
    """AdamW, rows of 2,048 tokens. fitted: the planner finds the micro-batch."""
    tokens = 2048 * rows
    batch = {"tokens": tokens * passes * gpus_count, "sequence_length": 2048}
    return {
        "batch": batch if fitted else {**batch, "micro_tokens": tokens},
        "optim": {"name": "adamw"},
    }


def _ranged(values: Range, scale: float, on: str) -> Answer:
    low, value, high = (scale * v for v in values)
    return Answer(low, value, high, "modelled", on)


def _speed(preset: str, fitted: bool = False, cards: int = 1) -> Callable[[], Answer]:
    def formula() -> Answer:
        setting = _batch(12, gpus_count=cards, fitted=fitted)
        found = _estimate("rtx5090", preset, setting, precision="fp8", gpus_count=cards)
        on = "RTX 5090" if cards == 1 else f"{cards} x RTX 5090"
        return _ranged(found.tokens_per_second, 1.0, f"{preset}, FP8, {on}")

    return formula


def _rows_estimate(card: str, rows: int, precision: Precision) -> Estimate:
    """The FP8 document's model and batch on a card: 16 passes of `rows` rows."""
    return _estimate(card, "124m", {**_batch(rows, 16), "model": FP8_MODEL}, precision=precision)


def _card_speed(card: str, rows: int, precision: Precision) -> Callable[[], Answer]:
    def formula() -> Answer:
        found = _rows_estimate(card, rows, precision)
        on = f"112M parameters, {rows} x 2048 tokens, {precision.upper()}, {gpus.find(card).name}"
        return _ranged(found.tokens_per_second, 1.0, on)

    return formula


def _speed_ratio(ours: Estimate, theirs: Estimate, on: str) -> Answer:
    """The ratio of two modelled speeds. Its range takes the ends of both as independent."""
    (low, value, high), (slow, other, fast) = ours.tokens_per_second, theirs.tokens_per_second
    return Answer(low / fast, value / other, high / slow, "modelled", on)


def _rtx5090_against_a100() -> Answer:
    ours = _estimate("rtx5090", "124m", _batch(18, 16), precision="fp8")
    theirs = _estimate("a100 40gb", "124m", _batch(16, 16), precision="bf16")
    ratio = _speed_ratio(ours, theirs, "124m, RTX 5090 and A100 40GB")
    return Answer(ratio.low - 1, ratio.value - 1, ratio.high - 1, ratio.source, ratio.on)


def _a100_share() -> Answer:
    ours = _estimate("rtx5090", "124m", _batch(12), precision="fp8")
    theirs = _estimate("a100 40gb", "124m", _batch(12), precision="bf16")
    ratio = _speed_ratio(ours, theirs, "124m, RTX 5090 in FP8 and A100 40GB in BF16")
    return Answer(100 * ratio.low, 100 * ratio.value, 100 * ratio.high, ratio.source, ratio.on)


def _against_4090(card: str, precision: Precision) -> Callable[[], Answer]:
    """Speed of a card as a multiple of an RTX 4090's in BF16. A 3B model fits neither, so 355M stands in."""

    def formula() -> Answer:
        ours = _estimate(card, "355m", _batch(8, 4), precision=precision)
        theirs = _estimate("rtx4090", "355m", _batch(8, 4), precision="bf16")
        on = f"355m, {gpus.find(card).name} in {precision.upper()}, RTX 4090 in BF16"
        return _speed_ratio(ours, theirs, on)

    return formula


def _rows_memory(rows: int) -> Callable[[], Answer]:
    def formula() -> Answer:
        found = _rows_estimate("rtx5090", rows, "fp8")
        return _ranged(found.memory_bytes, 1 / 2**30, f"124m, {rows} x 2048 tokens, FP8")

    return formula


def _parameters_112m() -> Answer:
    shape = merge.build([*presets.layers("124m"), {"model": FP8_MODEL}]).model
    return _exact(num_params(shape) / 1e6, on="12 layers, 768, 3 key-value heads, 49,152 entries, tied")


def _tokens_over_parameters() -> Answer:
    """Relative change of bits per byte: 124M parameters on 100B tokens against the best larger model of equal compute.

    Both come from one law, so its offset and most of its error cancel. No range is given, since the law has none for
    a ratio.
    """
    params, tokens = matmul_params(merge.build(presets.layers("124m")).model), 100e9
    larger = np.geomspace(params, 100 * params, 400)[1:]
    best = min(loss.LAW.at(size, params * tokens / size) for size in larger)
    return _exact(
        float(loss.LAW.at(params, tokens) / best) - 1, "modelled", "the planner's loss law, equal compute"
    )


def _moe() -> Estimate:
    overrides = {
        "model": MOE,
        "batch": {
            "sequence_length": MOE_ROW,
            "tokens": MOE_STEP_ROWS * MOE_ROW,
            "micro_tokens": MOE_PASS_ROWS * MOE_ROW,
        },
        "optim": {"name": "adamw"},
        "compute": {"activation_checkpointing": "block"},
    }
    return _estimate("rtx5090", "124m", overrides)


def _moe_memory() -> Answer:
    return _ranged(_moe().memory_bytes, 1 / 2**30, "the 3B mixture, blocks recomputed")


def _moe_item(*items: str) -> Callable[[], Answer]:
    """Gigabytes of these items at the instant of the peak."""

    def formula() -> Answer:
        found = _moe()
        size = sum(found.memory.items[item] for item in items) / 1e9
        low, value, high = (size * end / found.memory_bytes[1] for end in found.memory_bytes)
        return Answer(low, value, high, "modelled", "the 3B mixture, blocks recomputed")

    return formula


def _moe_hadamard() -> Answer:
    """Milliseconds of the Hadamard transforms of a step: both operands of each weight gradient, 16 values at a time.

    Low: the operations alone at the card's BF16 rate, fused into casts that read and write anyway. High: passes of
    their own, which read and write two bytes a value.
    """
    gpu, shape = gpus.find("rtx5090"), ModelConfig(**MOE)
    heads, kv_heads = shape.num_attention_heads * shape.head_dim, shape.num_key_value_heads * shape.head_dim
    # Inputs and output gradients: q, k, v; o; and of each chosen expert gate, up and down.
    attention = shape.hidden_size + heads + 2 * kv_heads + heads + shape.hidden_size
    expert = (
        shape.hidden_size
        + 2 * MOE["moe_intermediate_size"]
        + MOE["moe_intermediate_size"]
        + shape.hidden_size
    )
    values = (
        shape.num_hidden_layers * (attention + MOE["num_experts_per_tok"] * expert) * MOE_STEP_ROWS * MOE_ROW
    )
    fused = 1e3 * values * 2 * 16 / gpu.bf16_flops
    apart = 1e3 * values * 4 / gpu.bandwidth
    return Answer(fused, (fused + apart) / 2, apart, "modelled", "RTX 5090, fused into the casts or apart")


def _speedrun_hours() -> Answer:
    """Hours of 4.33e19 FLOPs on eight H100, at the speed modelled for d20, the deepest preset."""
    found = _estimate("h100 sxm", "d20", {}, gpus_count=8)
    low, value, high = found.tokens_per_second
    hours = SPEEDRUN_FLOPS / found.setting.flops_per_token / 3600
    return Answer(hours / high, hours / value, hours / low, "modelled", "d20, BF16, 8 x H100 SXM")


def _moe_speed() -> Answer:
    return _ranged(_moe().tokens_per_second, 1.0, "the 3B mixture, BF16, RTX 5090")


def _moe_step_seconds() -> Answer:
    gpu = gpus.find("rtx5090")
    assert gpu.fp4_flops is not None  # of the data sheet
    flops = flops_per_token(ModelConfig(**MOE), MOE_ROW) * MOE_STEP_ROWS * MOE_ROW
    return _exact(flops / gpu.fp4_flops, on="RTX 5090, all at its FP4 rate")


def _moe_hours() -> Answer:
    step = _moe_step_seconds()
    return _exact(step.value * MOE_STEPS / 3600, step.source, step.on)


def _moe_days() -> Answer:
    hours = _moe_hours()
    return _exact(hours.value / 24, hours.source, hours.on)


def _day_on_4090() -> Answer:
    found = _estimate("rtx4090", "d16", {})
    share = 100 * DAY * found.setting.flops_per_token / SPEEDRUN_FLOPS
    return _ranged(found.tokens_per_second, share, "d16, BF16, RTX 4090")


# Power and money


def _cluster(scale: float, on: str) -> Answer:
    """Of the wall's watts with eight cards."""
    wall = wall_watts(gpu_watts(gpus.find("rtx5090")), 8)
    return _ranged((wall.low, wall.expected, wall.high), scale, on)


def _cluster_kilowatts() -> Answer:
    return _cluster(1e-3, "8 x RTX 5090 with their host")


def _dollars(hours: float, cards: int = 8, longest: float | None = None) -> Answer:
    """Electricity of so many hours, `longest` hours at most, at the documents' price."""
    wall = wall_watts(gpu_watts(gpus.find("rtx5090")), cards)
    used = energy(wall, hours), energy(wall, hours if longest is None else longest)
    kwh = (used[0].low, (used[0].expected + used[1].expected) / 2, used[1].high)
    return _ranged(kwh, CLAIMED_PRICE, f"{cards} x RTX 5090, $0.10 per kWh")


def _hours(tokens: float, tokens_per_second: float = CLAIMED_CLUSTER_SPEED) -> float:
    return tokens / tokens_per_second / 3600


def _time(tokens: float, unit_seconds: float, tokens_per_second: float, on: str) -> Callable[[], Answer]:
    """How long so many tokens take at a document's own speed."""
    return lambda: _exact(tokens / tokens_per_second / unit_seconds, on=on)


def _cost_of_49b() -> Answer:
    return _dollars(_hours(GPT2_TOKENS))


def _total_cost() -> Answer:
    """The guide's whole road: 10.5 hours of eight cards, one of SFT and two to three of DPO on one card."""
    parts = _dollars(_hours(GPT2_TOKENS)), _dollars(1.0, 1), _dollars(2.0, 1, 3.0)
    low, value, high = (sum(ends) for ends in zip(*((p.low, p.value, p.high) for p in parts), strict=True))
    return Answer(low, value, high, "modelled", "10.5 h of 8 x RTX 5090, 3 to 4 h of one, $0.10 per kWh")


def _cost_per_billion() -> Answer:
    return _dollars(_hours(1e9))


def _rented_per_billion(dollars: float, tokens_per_second: float) -> Callable[[], Answer]:
    on = f"${dollars} per hour, {tokens_per_second:,.0f} tokens/s"
    return lambda: _exact(per_billion_tokens(dollars, tokens_per_second), on=on)


def _rent_against_own(
    dollars: float, tokens_per_second: float, inverse: bool = False
) -> Callable[[], Answer]:
    """Rent per billion tokens as a multiple of one's own electricity; inverse: electricity in per cent of rent."""

    def formula() -> Answer:
        rented, own = per_billion_tokens(dollars, tokens_per_second), _cost_per_billion()
        on = f"${dollars} per hour, {tokens_per_second:,.0f} tokens/s; electricity alone"
        if inverse:
            return _ranged((own.low, own.value, own.high), 100 / rented, on)
        return Answer(rented / own.high, rented / own.value, rented / own.low, "modelled", on)

    return formula


def _break_even_hours() -> Answer:
    def hours(rent: float) -> float:
        found = own_or_rent(8, Ownership(2000.0), 3600.0, CLAIMED_PRICE, rent / 8).break_even_hours
        assert found is not None  # such rents are far above electricity
        return found

    return Answer(hours(50), hours(40), hours(30), "arithmetic", "$16,000, $30 to $50 per hour")


def _rent(card: str) -> Callable[[], Answer]:
    def formula() -> Answer:
        gpu = gpus.find(card)
        offers, first = [price.usd for price in prices.rents(gpu)], prices.rent(gpu)
        assert first is not None  # facts/prices.toml has this card
        return Answer(min(offers), first.usd, max(offers), "published prices", f"{gpu.name}, {first.date}")

    return formula


def _cluster_rent() -> Answer:
    """What as many A100 as eight RTX 5090 equal cost, by the speeds and the rent that the documents give."""
    return _exact(
        CLAIMED_CLUSTER_SPEED / 188_000 * 0.79, on="1.3M tokens/s, 188,000 per A100, $0.79 per hour"
    )


FORMULAS: dict[str, Callable[[], Answer]] = {
    "kv_cache_gqa4": _kv_cache(12, 4),
    "kv_cache_gqa8": _kv_cache(16, 8),
    "kv_cache_mqa": _kv_cache(12, 12),
    "fp4_storage": _fp4_storage,
    "fp4_weights_3b": _fp4_weights_3b,
    "mixed_precision_memory": _mixed_precision_memory,
    "parameters_112m": _parameters_112m,
    "bandwidth_rtx5090": _sheet("rtx5090", lambda gpu: gpu.bandwidth / 1e12),
    "board_power_rtx5090": _sheet("rtx5090", lambda gpu: gpu.watts),
    "cores_rtx5090": _sheet("rtx5090", lambda gpu: 128 * gpu.multiprocessors),
    "capability_rtx5090": _sheet("rtx5090", lambda gpu: float(gpu.compute_capability)),
    "memory_rtx5090": _sheet("rtx5090", lambda gpu: gpu.memory_bytes / 2**30),
    "memory_rtx4090": _sheet("rtx4090", lambda gpu: gpu.memory_bytes / 2**30),
    "memory_h100": _sheet("h100 sxm", lambda gpu: gpu.memory_bytes / 2**30),
    "memory_a100": _sheet("a100 80gb sxm", lambda gpu: gpu.memory_bytes / 2**30),
    "fp8_rate_rtx4090": _sheet("rtx4090", lambda gpu: (gpu.fp8_flops or 0.0) / 1e12),
    "fp4_rate_h100": _sheet("h100 sxm", lambda gpu: (gpu.fp4_flops or 0.0) / 1e12),
    "price_rtx5090": _sheet("rtx5090", lambda gpu: gpu.msrp_usd),
    "price_rtx4090": _sheet("rtx4090", lambda gpu: gpu.msrp_usd),
    "price_h100": _sheet("h100 sxm", lambda gpu: gpu.msrp_usd),
    "price_a100": _sheet("a100 80gb sxm", lambda gpu: gpu.msrp_usd),
    "speed_124m": _speed("124m"),
    "speed_355m": _speed("355m"),
    "speed_774m": _speed("774m", fitted=True),
    "speed_1_5b": _speed("1.5b", fitted=True),
    "cluster_speed": _speed("124m", cards=8),
    "cluster_speed_355m": _speed("355m", cards=8),
    "cluster_speed_774m": _speed("774m", fitted=True, cards=8),
    "cluster_efficiency": lambda: _exact(100 * 1.3e6 / (8 * 185_000), on="1.3M of 8 x 185,000 tokens/s"),
    "speed_fp8_8_rows": _card_speed("rtx5090", 8, "fp8"),
    "speed_fp8_18_rows": _card_speed("rtx5090", 18, "fp8"),
    "speed_bf16_8_rows": _card_speed("rtx5090", 8, "bf16"),
    "speed_rtx4090": _card_speed("rtx4090", 8, "bf16"),
    "speed_a100": _card_speed("a100 40gb", 8, "bf16"),
    "speed_h100": _card_speed("h100 sxm", 8, "fp8"),
    "rtx5090_against_a100": _rtx5090_against_a100,
    "a100_share": _a100_share,
    "rtx5090_against_4090": _against_4090("rtx5090", "fp8"),
    "h100_against_4090": _against_4090("h100 sxm", "fp8"),
    "a100_against_4090": _against_4090("a100 80gb sxm", "bf16"),
    "hours_of_49b": _time(GPT2_TOKENS, 3600, CLAIMED_CLUSTER_SPEED, "1.3M tokens/s"),
    "hours_of_25b": _time(25e9, 3600, CLAIMED_CLUSTER_SPEED, "1.3M tokens/s"),
    "minutes_of_2_5b": _time(2.5e9, 60, CLAIMED_CLUSTER_SPEED, "1.3M tokens/s"),
    "minutes_of_100m": _time(100e6, 60, 185_000, "185,000 tokens/s"),
    "hours_in_all": lambda: Answer(13.5, 14.0, 14.5, "arithmetic", "10.5 + 1 + 2 to 3 hours"),
    "chinchilla_tokens": lambda: _exact(20 * 124e6 / 1e9, on="20 tokens for each of 124M parameters"),
    "casts_saved": lambda: _exact(16 - 1, on="one cast instead of 16 in a step of 16 passes"),
    "tokens_over_parameters": _tokens_over_parameters,
    "memory_8_rows": _rows_memory(8),
    "memory_16_rows": _rows_memory(16),
    "memory_18_rows": _rows_memory(18),
    "memory_20_rows": _rows_memory(20),
    "moe_memory": _moe_memory,
    "moe_sum": lambda: _exact(3 + 3 + 6 + 8 + 4, on="the document's own items"),
    "moe_use": lambda: _exact(100 * 28 / 32, on="28 of 32 GB"),
    "moe_gradients": _moe_item("gradients"),
    "moe_optimizer": _moe_item("optimizer"),
    "moe_activations": _moe_item("activations", "logits", "workspace"),
    "moe_hadamard": _moe_hadamard,
    "moe_speed": _moe_speed,
    "moe_step_seconds": _moe_step_seconds,
    "moe_hours": _moe_hours,
    "moe_days": _moe_days,
    "day_on_4090": _day_on_4090,
    "speedrun_hours": _speedrun_hours,
    "cluster_kilowatts": _cluster_kilowatts,
    "cluster_dollars_per_hour": lambda: _dollars(1.0),
    "cost_of_49b": _cost_of_49b,
    "cost_of_sft": lambda: _dollars(1.0, 1),
    "cost_of_dpo": lambda: _dollars(2.0, 1, 3.0),
    "total_cost": _total_cost,
    "cost_per_billion": _cost_per_billion,
    "cost_per_billion_a100": _rented_per_billion(0.79, 188_000),
    "cost_per_billion_h100": _rented_per_billion(2.49, 280_000),
    "a100_rent_against_own": _rent_against_own(0.79, 188_000),
    "h100_rent_against_own": _rent_against_own(2.49, 280_000),
    "own_share_of_a100_rent": _rent_against_own(0.79, 188_000, inverse=True),
    "rent_saving": lambda: _exact(100 * (1 - 0.50 / 0.79), on="$0.50 and $0.79 per hour"),
    "break_even_hours": _break_even_hours,
    "cluster_rent": _cluster_rent,
    "rent_rtx5090": _rent("rtx5090"),
    "rent_rtx4090": _rent("rtx4090"),
    "rent_a100": _rent("a100 80gb sxm"),
    "rent_h100": _rent("h100 sxm"),
}
