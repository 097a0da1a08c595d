"""Computed answers to claims that compare no trials: exact bytes, data sheets, electricity, prices and rents.

`FORMULAS` maps the `formula` of a claim (facts/claims.toml) to a function that returns its `Answer`. Answers about
whole runs are in planned_formulas.py. No answer is a measurement. "The guide"
is the first document in claims.toml.
"""

from collections.abc import Callable
from functools import cache, partial

from deskside.budget.memory import training_memory
from deskside.budget.running_costs import (
    gpu_watts,
    kilowatt_hours,
    own_or_rent,
    per_billion_tokens,
    wall_watts,
)
from deskside.budget.shape import kv_bytes_per_token
from deskside.budget.step_spec import Precision, StepSpec
from deskside.config import merge, presets
from deskside.config.model import ModelConfig
from deskside.facts import gpus
from deskside.facts.power_and_prices import rental_prices
from deskside.study.claims.planned_formulas import PLANNED
from deskside.study.claims.verdicts import Answer

NVFP4_BITS = 4 + 8 / 16  # per value, with its share of the 8-bit scale of 16 values
CLAIMED_USD_PER_KWH = 0.10  # in the guide
CLAIMED_CLUSTER_SPEED = 1.3e6  # tokens/s of eight RTX 5090 in the guide
CLAIMED_CARD_SPEED = 185_000  # tokens/s of one RTX 5090 in the guide
CLAIMED_A100_SPEED, CLAIMED_H100_SPEED = 188_000, 280_000  # tokens/s in the guide
GPT2_TOKENS = 49e9  # of the guide's pretraining run


# Bytes


def _kv_cache_change(heads: int, shared_by: int) -> Answer:
    """Return the relative change of the KV cache if every `shared_by` of `heads` heads share keys and values."""

    def bytes_with(kv_heads: int) -> float:
        shape = ModelConfig(num_attention_heads=heads, num_key_value_heads=kv_heads, head_dim=64)
        return kv_bytes_per_token(shape, 2)

    return Answer.exact(bytes_with(heads // shared_by) / bytes_with(heads) - 1, on=f"{heads} heads")


def _mixed_precision_memory() -> Answer:
    """Return the relative change of peak memory from FP32 to BF16."""
    shape = merge.build(presets.layers("medium")).model

    def peak(precision: Precision) -> int:
        work = StepSpec(512, 16 * 512, 16 * 512, optimizer="adamw", precision=precision, compiled=False)
        return training_memory(shape, work).allocated

    return Answer.exact(peak("bf16") / peak("fp32") - 1, "modelled", "medium, plain torch")


def _data_sheet(card: str, number: Callable[[gpus.Gpu], float | None]) -> Answer:
    """Return a number from a card's data sheet, 0 if it has none."""
    gpu = gpus.find(card)
    return Answer.exact(number(gpu) or 0.0, "data sheet", gpu.name)


def _training_time(tokens: float, unit_seconds: float, tokens_per_second: float, on: str) -> Answer:
    """Return the time to train on some tokens at a claimed speed, in a unit of `unit_seconds`."""
    return Answer.exact(tokens / tokens_per_second / unit_seconds, on=on)


# Electricity, rents and prices


def _cluster_kilowatts() -> Answer:
    """Return the power at the wall of eight cards in kW."""
    wall = wall_watts(gpu_watts(gpus.find("rtx5090")), 8)
    return Answer.modelled((wall.low, wall.expected, wall.high), 1e-3, "8 x RTX 5090 with their host")


def _electricity_cost(min_hours: float, cards: int = 8, max_hours: float | None = None) -> Answer:
    """Return the dollars of electricity for `min_hours` to `max_hours` (by default the same) at the guide's price."""
    wall = wall_watts(gpu_watts(gpus.find("rtx5090")), cards)
    max_hours = min_hours if max_hours is None else max_hours
    low, shortest, _ = kilowatt_hours(wall, min_hours, min_hours, min_hours)
    _, longest, high = kilowatt_hours(wall, max_hours, max_hours, max_hours)
    kwh = (low, (shortest + longest) / 2, high)
    return Answer.modelled(kwh, CLAIMED_USD_PER_KWH, f"{cards} x RTX 5090, $0.10 per kWh")


def _pretraining_cost(tokens: float) -> Answer:
    """Return the dollars of electricity to train on some tokens with eight cards at the claimed speed."""
    return _electricity_cost(tokens / CLAIMED_CLUSTER_SPEED / 3600)


def _total_cost() -> Answer:
    """Return the cost of the guide's whole pipeline: pretraining for 10.5 hours on eight cards, then on one card SFT
    for one hour and DPO for two to three."""
    stages = (_pretraining_cost(GPT2_TOKENS), _electricity_cost(1.0, 1), _electricity_cost(2.0, 1, 3.0))
    low, high = sum(stage.low for stage in stages), sum(stage.high for stage in stages)
    value = sum(stage.value for stage in stages)
    return Answer(low, value, high, "modelled", "10.5 h of 8 x RTX 5090, 3 to 4 h of one, $0.10 per kWh")


def _rent_per_billion(usd_per_hour: float, tokens_per_second: float) -> Answer:
    """Return the rent of a card in dollars per billion tokens."""
    on = f"${usd_per_hour} per hour, {tokens_per_second:,.0f} tokens/s"
    return Answer.exact(per_billion_tokens(usd_per_hour, tokens_per_second), on=on)


def _rent_over_electricity(usd_per_hour: float, tokens_per_second: float) -> Answer:
    """Return the rent per billion tokens as a multiple of the electricity of one's own eight cards."""
    rent, own = per_billion_tokens(usd_per_hour, tokens_per_second), _pretraining_cost(1e9)
    on = f"${usd_per_hour} per hour, {tokens_per_second:,.0f} tokens/s; electricity alone"
    return Answer(rent / own.high, rent / own.value, rent / own.low, "modelled", on)


def _electricity_over_rent(usd_per_hour: float, tokens_per_second: float) -> Answer:
    """Return the electricity of one's own eight cards in percent of the rent per billion tokens."""
    rent, own = per_billion_tokens(usd_per_hour, tokens_per_second), _pretraining_cost(1e9)
    on = f"${usd_per_hour} per hour, {tokens_per_second:,.0f} tokens/s; electricity alone"
    return Answer.modelled((own.low, own.value, own.high), 100 / rent, on)


def _break_even_hours() -> Answer:
    """Return the hours after which eight cards for $16,000 are cheaper than their rent of $30 to $50 per hour."""

    def hours(rent: float) -> float:
        result = own_or_rent(8, 2000.0, 3600.0, CLAIMED_USD_PER_KWH, rent / 8).break_even_hours
        assert result is not None  # such rents are far above the cost of electricity
        return result

    return Answer(hours(50), hours(40), hours(30), "arithmetic", "$16,000, $30 to $50 per hour")


def _rent_per_hour(card: str) -> Answer:
    """Return the published on-demand rent of a card in dollars per hour, with the range of all its prices."""
    gpu = gpus.find(card)
    first, *others = rental_prices(gpu)  # facts/prices.toml has this card
    offers = [first.usd, *(price.usd for price in others)]
    return Answer(min(offers), first.usd, max(offers), "published prices", f"{gpu.name}, {first.date}")


FORMULAS: dict[str, Callable[[], Answer]] = {
    "kv_cache_gqa4": partial(_kv_cache_change, 12, 4),
    "kv_cache_gqa8": partial(_kv_cache_change, 16, 8),
    "kv_cache_mqa": partial(_kv_cache_change, 12, 12),
    "fp4_storage": lambda: Answer.exact(NVFP4_BITS / 16 - 1, on="against 16-bit weights"),
    "fp4_weights_3b": lambda: Answer.exact(3e9 * NVFP4_BITS / 8 / 1e9, on="3 billion parameters"),
    "mixed_precision_memory": _mixed_precision_memory,
    "bandwidth_rtx5090": partial(_data_sheet, "rtx5090", lambda gpu: gpu.bandwidth / 1e12),
    "board_power_rtx5090": partial(_data_sheet, "rtx5090", lambda gpu: gpu.watts),
    "cores_rtx5090": partial(_data_sheet, "rtx5090", lambda gpu: 128 * gpu.multiprocessors),
    "capability_rtx5090": partial(_data_sheet, "rtx5090", lambda gpu: float(gpu.compute_capability)),
    "memory_rtx5090": partial(_data_sheet, "rtx5090", lambda gpu: gpu.memory_bytes / 2**30),
    "memory_rtx4090": partial(_data_sheet, "rtx4090", lambda gpu: gpu.memory_bytes / 2**30),
    "memory_h100": partial(_data_sheet, "h100 sxm", lambda gpu: gpu.memory_bytes / 2**30),
    "memory_a100": partial(_data_sheet, "a100 80gb sxm", lambda gpu: gpu.memory_bytes / 2**30),
    "fp8_rate_rtx4090": partial(_data_sheet, "rtx4090", lambda gpu: (gpu.fp8_flops or 0.0) / 1e12),
    "fp4_rate_h100": partial(_data_sheet, "h100 sxm", lambda gpu: (gpu.fp4_flops or 0.0) / 1e12),
    "price_rtx5090": partial(_data_sheet, "rtx5090", lambda gpu: gpu.msrp_usd),
    "price_rtx4090": partial(_data_sheet, "rtx4090", lambda gpu: gpu.msrp_usd),
    "price_h100": partial(_data_sheet, "h100 sxm", lambda gpu: gpu.msrp_usd),
    "price_a100": partial(_data_sheet, "a100 80gb sxm", lambda gpu: gpu.msrp_usd),
    "cluster_efficiency": lambda: Answer.exact(
        100 * CLAIMED_CLUSTER_SPEED / (8 * CLAIMED_CARD_SPEED), on="1.3M of 8 x 185,000 tokens/s"
    ),
    "hours_of_49b": partial(_training_time, GPT2_TOKENS, 3600, CLAIMED_CLUSTER_SPEED, "1.3M tokens/s"),
    "hours_of_25b": partial(_training_time, 25e9, 3600, CLAIMED_CLUSTER_SPEED, "1.3M tokens/s"),
    "minutes_of_2_5b": partial(_training_time, 2.5e9, 60, CLAIMED_CLUSTER_SPEED, "1.3M tokens/s"),
    "minutes_of_100m": partial(_training_time, 100e6, 60, CLAIMED_CARD_SPEED, "185,000 tokens/s"),
    "hours_in_all": lambda: Answer(13.5, 14.0, 14.5, "arithmetic", "10.5 + 1 + 2 to 3 hours"),
    "chinchilla_tokens": lambda: Answer.exact(20 * 124e6 / 1e9, on="20 tokens for each of 124M parameters"),
    "casts_saved": lambda: Answer.exact(16 - 1, on="one cast instead of 16 in a step of 16 passes"),
    "moe_sum": lambda: Answer.exact(3 + 3 + 6 + 8 + 4, on="the document's own items"),
    "moe_use": lambda: Answer.exact(100 * 28 / 32, on="28 of 32 GB"),
    "rent_saving": lambda: Answer.exact(100 * (1 - 0.50 / 0.79), on="$0.50 and $0.79 per hour"),
    "cluster_kilowatts": _cluster_kilowatts,
    "cluster_dollars_per_hour": partial(_electricity_cost, 1.0),
    "cost_of_49b": partial(_pretraining_cost, GPT2_TOKENS),
    "cost_of_sft": partial(_electricity_cost, 1.0, 1),
    "cost_of_dpo": partial(_electricity_cost, 2.0, 1, 3.0),
    "total_cost": _total_cost,
    "cost_per_billion": partial(_pretraining_cost, 1e9),
    "cost_per_billion_a100": partial(_rent_per_billion, 0.79, CLAIMED_A100_SPEED),
    "cost_per_billion_h100": partial(_rent_per_billion, 2.49, CLAIMED_H100_SPEED),
    "a100_rent_against_own": partial(_rent_over_electricity, 0.79, CLAIMED_A100_SPEED),
    "h100_rent_against_own": partial(_rent_over_electricity, 2.49, CLAIMED_H100_SPEED),
    "own_share_of_a100_rent": partial(_electricity_over_rent, 0.79, CLAIMED_A100_SPEED),
    "break_even_hours": _break_even_hours,
    # Rent per hour of as many A100 as have the claimed speed of eight RTX 5090.
    "cluster_rent": lambda: Answer.exact(
        CLAIMED_CLUSTER_SPEED / CLAIMED_A100_SPEED * 0.79,
        on="1.3M tokens/s, 188,000 per A100, $0.79 per hour",
    ),
    "rent_rtx5090": partial(_rent_per_hour, "rtx5090"),
    "rent_rtx4090": partial(_rent_per_hour, "rtx4090"),
    "rent_a100": partial(_rent_per_hour, "a100 80gb sxm"),
    "rent_h100": partial(_rent_per_hour, "h100 sxm"),
    **PLANNED,
}


@cache
def evaluate(formula: str) -> Answer:
    """Return the answer of a formula, which is computed only once. Raises KeyError for an unknown formula."""
    return FORMULAS[formula]()
