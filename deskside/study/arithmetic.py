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

from deskside.budget.energy import energy, gpu_watts, wall_watts
from deskside.budget.memory import training_memory
from deskside.budget.money import Ownership, own_or_rent, per_billion_tokens
from deskside.budget.shape import flops_per_token, kv_bytes_per_token
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


def _rtx5090_against_a100() -> Answer:
    ours = _estimate("rtx5090", "124m", _batch(18, 16), precision="fp8").tokens_per_second
    theirs = _estimate("a100 40gb", "124m", _batch(16, 16), precision="bf16").tokens_per_second
    low, value, high = (a / b - 1 for a, b in zip(ours, reversed(theirs), strict=True))
    return Answer(low, value, high, "modelled", "124m, RTX 5090 and A100 40GB")


def _rows_memory(rows: int) -> Callable[[], Answer]:
    def formula() -> Answer:
        # 112M parameters with 49,152 entries: the head shares the embedding.
        overrides = {**_batch(rows, 16), "model": {"vocab_size": 49152, "tie_word_embeddings": True}}
        found = _estimate("rtx5090", "124m", overrides, precision="fp8")
        return _ranged(found.memory_bytes, 1 / 2**30, f"124m, {rows} x 2048 tokens, FP8")

    return formula


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


def _dollars(hours: float, on: str) -> Answer:
    used = energy(wall_watts(gpu_watts(gpus.find("rtx5090")), 8), hours)
    return _ranged((used.low, used.expected, used.high), CLAIMED_PRICE, on)


def _cost_of_49b() -> Answer:
    return _dollars(GPT2_TOKENS / CLAIMED_CLUSTER_SPEED / 3600, "8 x RTX 5090, $0.10 per kWh")


def _cost_per_billion() -> Answer:
    return _dollars(1e9 / CLAIMED_CLUSTER_SPEED / 3600, "8 x RTX 5090, $0.10 per kWh")


def _hours_of_49b() -> Answer:
    return _exact(GPT2_TOKENS / CLAIMED_CLUSTER_SPEED / 3600, on="1.3M tokens/s")


def _cost_per_billion_a100() -> Answer:
    return _exact(per_billion_tokens(0.79, 188_000), on="$0.79 per hour, 188,000 tokens/s")


def _break_even_hours() -> Answer:
    def hours(rent: float) -> float:
        found = own_or_rent(8, Ownership(2000.0), 3600.0, CLAIMED_PRICE, rent / 8).break_even_hours
        assert found is not None  # such rents are far above electricity
        return found

    return Answer(hours(50), hours(40), hours(30), "arithmetic", "$16,000, $30 to $50 per hour")


def _rent_rtx5090() -> Answer:
    gpu = gpus.find("rtx5090")
    offers, first = [price.usd for price in prices.rents(gpu)], prices.rent(gpu)
    assert first is not None  # facts/prices.toml has this card
    return Answer(min(offers), first.usd, max(offers), "published prices", f"{gpu.name}, {first.date}")


FORMULAS: dict[str, Callable[[], Answer]] = {
    "kv_cache_gqa4": _kv_cache(12, 4),
    "kv_cache_gqa8": _kv_cache(16, 8),
    "kv_cache_mqa": _kv_cache(12, 12),
    "fp4_storage": _fp4_storage,
    "fp4_weights_3b": _fp4_weights_3b,
    "mixed_precision_memory": _mixed_precision_memory,
    "bandwidth_rtx5090": _sheet("rtx5090", lambda gpu: gpu.bandwidth / 1e12),
    "board_power_rtx5090": _sheet("rtx5090", lambda gpu: gpu.watts),
    "memory_rtx5090": _sheet("rtx5090", lambda gpu: gpu.memory_bytes / 2**30),
    "fp8_rate_rtx4090": _sheet("rtx4090", lambda gpu: (gpu.fp8_flops or 0.0) / 1e12),
    "fp4_rate_h100": _sheet("h100 sxm", lambda gpu: (gpu.fp4_flops or 0.0) / 1e12),
    "speed_124m": _speed("124m"),
    "speed_355m": _speed("355m"),
    "speed_774m": _speed("774m", fitted=True),
    "speed_1_5b": _speed("1.5b", fitted=True),
    "cluster_speed": _speed("124m", cards=8),
    "rtx5090_against_a100": _rtx5090_against_a100,
    "hours_of_49b": _hours_of_49b,
    "memory_18_rows": _rows_memory(18),
    "memory_20_rows": _rows_memory(20),
    "moe_memory": _moe_memory,
    "moe_speed": _moe_speed,
    "moe_step_seconds": _moe_step_seconds,
    "moe_hours": _moe_hours,
    "day_on_4090": _day_on_4090,
    "cluster_kilowatts": _cluster_kilowatts,
    "cost_of_49b": _cost_of_49b,
    "cost_per_billion": _cost_per_billion,
    "cost_per_billion_a100": _cost_per_billion_a100,
    "break_even_hours": _break_even_hours,
    "rent_rtx5090": _rent_rtx5090,
}
