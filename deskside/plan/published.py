"""Calibration of cards that were not measured with deskside, from published measurements.

The operator model (`budget/speed.py`) has its efficiencies from one H200. Other architectures come nearer to their
matmul rate, or stay farther from it, and other trainers are faster or slower than ours. Both show in published runs:

    log(measured speed / modelled speed) = trainer + architecture + noise

fitted by medians in turn (Tukey's median polish), with deskside on Hopper as zero. What counts here is the
architecture's part: two cards that ran the same trainer tell how much better one of them suits the model than the
other. Of each architecture only every second row takes part, by its place in the table; the others are kept to see
how well this predicts (`benchmarks/planner_published.py`, docs/planner-accuracy.md).

Attention of these runs is that of their kernels' generation, not of ours (`attention_share`). Left out are runs that
recompute or offload in ways we cannot map, and sequences beyond 8,192.
"""

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import pairwise

from deskside.budget.speed import Rates, tokens_per_second
from deskside.budget.step_spec import StepSpec
from deskside.config.model import ModelConfig
from deskside.facts.gpus import Gpu
from deskside.facts.measurements import Measurement, published

ANCHOR = "Hopper"  # where deskside itself was measured
LONGEST = 8192
STEP_TOKENS = 2**19  # where a row does not say how many tokens an optimizer step had
ROUNDS = 20
PLAIN_SAVINGS = ("", "FULL_SHARD ckpt=False")
# Efficiency of attention kernels relative to ours (cuDNN, FlashAttention-3). The second generation doubles the first
# (arXiv 2307.08691). On Hopper, whose instructions it does not use, it reaches 35 % of 989 TFLOP/s (arXiv 2407.08608),
# which is 0.44 of a large product's 790 beside our 0.59.
FIRST_GENERATION = 0.5  # of the second
SECOND_ON_HOPPER = 0.74
FIRST_KERNELS = ("FlashAttention", "Flash (PT2.0)")  # as published; before FlashAttention-2 of July 2023
SECOND_KERNELS = ("FA2", "SDPA", "SDPA causal", "SDPA flash GQA")
# Measured large BF16 products as a share of the data sheet, for cards that lack one: medians of facts/gpus.csv.
SHEET_SHARE = {"GeForce": 1.03, "other": 0.80}
# Share of the data sheet's bandwidth that exchanges reach. Modelled, except for the host: optimizer states of 124m that
# travelled at each step on an H200 (docs/data/2026-11-22-release/memory/memory_124m.json) took what 0.8 of PCIe 5.0 x16
# gives.
FABRIC_SHARE, PEER_SHARE, HOST_SHARE = 0.78, 0.70, 0.80


@dataclass(frozen=True)
class Fitted:
    """exp of the parts: how many times the model's speed a trainer and an architecture reach; rows: how many took part.

    spread: the share within which nine in ten of the rows that took part lie."""

    trainers: Mapping[str, float]
    architectures: Mapping[str, float]
    rows: Mapping[str, int]
    spread: float


def matmul_rate(gpu: Gpu) -> float:
    """Return FLOP/s of a large BF16 product: measured and published, else the data sheet's times what its class
    reaches."""
    if gpu.measured_bf16_flops is not None:
        return gpu.measured_bf16_flops
    return gpu.bf16_flops * SHEET_SHARE["GeForce" if gpu.geforce else "other"]


def sheet_rates(gpu: Gpu) -> Rates:
    """Rates of a card by what is published about it, with deskside's efficiencies from Hopper."""
    rate = matmul_rate(gpu)
    low = None if gpu.fp8_flops is None else gpu.fp8_flops * rate / gpu.bf16_flops
    fp4 = None if gpu.fp4_flops is None else gpu.fp4_flops * rate / gpu.bf16_flops
    # FP32 runs beside the tensor cores, two FLOPs per lane and clock.
    lanes = 64 if gpu.compute_capability == "8.0" else 128
    single = 2.0 * lanes * gpu.multiprocessors * gpu.boost_hz
    return Rates(
        rate,
        gpu.bandwidth,
        low_precision_flops=low,
        fp4_flops=fp4,
        single_flops=single,
        link_bandwidth=link_bandwidth(gpu),
        host_bandwidth=HOST_SHARE * gpu.pcie_bandwidth,
    )


def link_bandwidth(gpu: Gpu) -> float:
    """Return the bytes/s that one card exchanges with the others of a machine while all do."""
    if gpu.fabric_bandwidth is not None:
        return FABRIC_SHARE * gpu.fabric_bandwidth
    return PEER_SHARE * gpu.pcie_bandwidth


def usable(row: Measurement) -> bool:
    """Return whether a published run can be put beside the model."""
    saving = row.saving
    chunked = all(word.startswith(("--lmhead-chunks", "--attn-bwd-chunks")) for word in saving.split())
    plain = saving in PLAIN_SAVINGS or chunked
    return (
        row.complete_for_speed
        and bool(row.card)
        and plain
        and row.precision in ("bf16", "fp8")
        and (row.sequence_length or 0) <= LONGEST
    )


def modelled(row: Measurement) -> float:
    """Return tokens per second of a published run by the operator model, the architecture's part left out."""
    gpu = row.data_sheet()
    assert gpu is not None
    shape, spec = shape_of(row), work_of(row)
    rates, share = sheet_rates(gpu), attention_share(row, gpu)
    ours = rates.efficiency
    theirs = replace(ours, attention_64=share * ours.attention_64, attention_128=share * ours.attention_128)
    return tokens_per_second(shape, spec, replace(rates, efficiency=theirs))


def attention_share(row: Measurement, gpu: Gpu) -> float:
    """Return the efficiency of a published run's attention kernel against ours."""
    second = SECOND_ON_HOPPER if gpu.architecture == "Hopper" else 1.0
    if row.attention in FIRST_KERNELS:
        return FIRST_GENERATION * second
    return second if row.attention in SECOND_KERNELS else 1.0


def shape_of(row: Measurement) -> ModelConfig:
    """Return the model of a published run. Activations are of the same kind everywhere: gated SiLU, or ReLU squared."""
    assert row.hidden and row.heads and row.kv_heads and row.layers and row.vocab and row.ffn
    gated = row.mlp_matrices == 3
    return ModelConfig(
        vocab_size=row.vocab,
        hidden_size=row.hidden,
        num_hidden_layers=row.layers,
        num_attention_heads=row.heads,
        num_key_value_heads=row.kv_heads,
        head_dim=row.hidden // row.heads,
        intermediate_size=row.ffn,
        gated_mlp=gated,
        hidden_act="silu" if gated else "relu2",
        max_position_embeddings=max(2048, row.sequence_length or 0),
    )


def work_of(row: Measurement) -> StepSpec:
    """Return the optimizer step of a published run, of about half a million tokens."""
    assert row.sequence_length and row.rows
    micro = row.rows * row.sequence_length
    passes = max(1, round(STEP_TOKENS / (micro * row.gpus)))
    return StepSpec(
        sequence_length=row.sequence_length,
        tokens=micro * row.gpus * passes,
        micro_tokens=micro,
        gpus=row.gpus,
        sharded=row.gpus > 1 and "SHARD" in row.saving,
        optimizer="muon" if "muon" in row.optimizer.lower() else "adamw",
        precision="fp8" if row.precision == "fp8" else "bf16",
    )


def split() -> tuple[list[Measurement], list[Measurement]]:
    """Return (rows that calibrate, rows that are kept out): in the table's order, every second row of each architecture
    and precision is kept out."""
    seen: dict[tuple[str, str], int] = {}
    parts: tuple[list[Measurement], list[Measurement]] = ([], [])
    for row in published():
        if usable(row):
            gpu = row.data_sheet()
            assert gpu is not None
            place = seen.get((gpu.architecture, row.precision), 0)
            seen[gpu.architecture, row.precision] = place + 1
            parts[place % 2].append(row)
    return parts


@cache
def fitted() -> Fitted:
    """Return the parts of trainers and architectures, from the BF16 rows that calibrate."""
    return fit(row for row in split()[0] if row.precision == "bf16")


def fit(rows: Iterable[Measurement]) -> Fitted:
    """Median polish of log(measured / modelled), with the architecture `ANCHOR` moved to zero afterwards."""
    table = []
    for row in rows:
        gpu = row.data_sheet()
        assert gpu is not None
        assert row.tokens_per_second is not None
        table.append((row.framework, gpu.architecture, math.log(row.tokens_per_second / modelled(row))))
    trainers = dict.fromkeys({trainer for trainer, _, _ in table}, 0.0)
    architectures = dict.fromkeys({architecture for _, architecture, _ in table}, 0.0)
    for _ in range(ROUNDS):
        before = [*trainers.values(), *architectures.values()]
        for trainer in trainers:
            trainers[trainer] = statistics.median(v - architectures[a] for t, a, v in table if t == trainer)
        for architecture in architectures:
            architectures[architecture] = statistics.median(
                v - trainers[t] for t, a, v in table if a == architecture
            )
        if before == [*trainers.values(), *architectures.values()]:
            break
    # Not held at zero while fitting: the medians of the others would settle beside it and never come back.
    shift = architectures.get(ANCHOR, 0.0)
    architectures = {a: v - shift for a, v in architectures.items()}
    trainers = {t: v + shift for t, v in trainers.items()}
    left = sorted(abs(math.expm1(v - trainers[t] - architectures[a])) for t, a, v in table)
    return Fitted(
        trainers={t: math.exp(v) for t, v in trainers.items()},
        architectures={a: math.exp(v) for a, v in architectures.items()},
        rows={a: sum(1 for _, other, _ in table if other == a) for a in architectures},
        spread=left[int(0.9 * (len(left) - 1))] if left else 0.0,
    )


def unknown(gpu: Gpu) -> str:
    """Return what to say of an architecture that nothing calibrates, "" of one that something does."""
    if gpu.architecture == ANCHOR or gpu.architecture in fitted().architectures:
        return ""
    software = "; software: ROCm untested" if gpu.rocm else ""
    return f"no run of ours or published calibrates {gpu.architecture}{software}"


def architecture_factor(gpu: Gpu) -> tuple[float, str]:
    """Return (how many times the model's speed this architecture reaches, from what)."""
    found = fitted()
    if gpu.architecture == ANCHOR:
        return 1.0, "the architecture that the model's efficiencies come from"
    if gpu.architecture in found.architectures:
        count = found.rows[gpu.architecture]
        return found.architectures[gpu.architecture], f"{count} published runs on {gpu.architecture}"
    return 1.0, unknown(gpu)


@dataclass(frozen=True)
class Gain:
    """speed: FP8 tokens per second relative to BF16; source: measured or published, and whose pairs of runs."""

    speed: float
    source: str


def fp8_gain(gpu: Gpu, params: float) -> Gain | None:
    """Return the published speed-up of FP8 at this model size: on this card, else on its architecture, else None.

    It grows with the model, because products grow faster than the traffic around them. Between published sizes it is
    interpolated over log(size), and beyond them it is that of the nearest.
    """
    if gpu.fp8_flops is None:
        return None
    pairs = _fp8_pairs()
    own = [pair for pair in pairs if pair[0].card == gpu.name]
    sheets = [(pair, pair[0].data_sheet()) for pair in pairs]
    near = [pair for pair, sheet in sheets if sheet is not None and sheet.architecture == gpu.architecture]
    found = own or near
    if not found:
        return None
    by_size: dict[float, list[float]] = {}
    for fp8, bf16 in found:
        assert fp8.params and fp8.tokens_per_second and bf16.tokens_per_second
        by_size.setdefault(fp8.params, []).append(fp8.tokens_per_second / bf16.tokens_per_second)
    sizes = sorted(by_size)
    speed = _interpolated(
        math.log(params), [(math.log(size), statistics.median(by_size[size])) for size in sizes]
    )
    cards = ", ".join(dict.fromkeys(pair[0].card for pair in found))
    trainers = ", ".join(dict.fromkeys(pair[0].framework for pair in found))
    ends = [f"{size / 1e6:,.0f}M" for size in dict.fromkeys((sizes[0], sizes[-1]))]
    return Gain(speed, f"published: {trainers} on {cards}, {' to '.join(ends)} parameters")


def _interpolated(x: float, points: Sequence[tuple[float, float]]) -> float:
    for (left, low), (right, high) in pairwise(points):
        if left <= x <= right:
            return (high - low) / (right - left) * (x - left) + low
    return points[0][1] if x < points[0][0] else points[-1][1]


@cache
def _fp8_pairs() -> tuple[tuple[Measurement, Measurement], ...]:
    """Return (FP8, BF16) runs on one GPU that differ in nothing else."""

    def settings(row: Measurement) -> tuple[object, ...]:
        return (row.card, row.framework, row.model, row.sequence_length, row.rows, row.workload, row.saving)

    complete = [
        row
        for row in published()
        if row.card and row.gpus == 1 and row.params and row.tokens_per_second and not row.rejected
    ]
    bf16 = {settings(row): row for row in complete if row.precision == "bf16"}
    return tuple(
        (row, bf16[settings(row)]) for row in complete if row.precision == "fp8" and settings(row) in bf16
    )
