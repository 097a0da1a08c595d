"""Calibration of cards that were not measured with deskside, from published measurements.

The efficiencies of the operator model (`budget/speed.py`) were fitted on one H200. Other architectures reach a
different share of their matmul rate, and other trainers are faster or slower than ours. Published runs show both:

    log(measured speed / modelled speed) = trainer + architecture + noise

The two terms are fitted by alternating medians (Tukey's median polish), with Hopper as zero. The architecture's term is
used for calibration: it compares cards that ran the same trainer. Only every second BF16 row of an architecture, in
the order of the table, takes part; the others are held out to test the predictions (`benchmarks/planner_published.py`,
docs/planner-accuracy.md).

The modelled speed uses the efficiency of the run's own attention kernel, not of ours (`attention_share`). Runs with
recomputation or offloading that the model cannot represent, and sequences longer than 8,192, are left out.
"""

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import pairwise

from deskside.budget.speed import FUSED_EFFICIENCY, Efficiency, Rates, tokens_per_second
from deskside.budget.step_spec import StepSpec
from deskside.config.model import ModelConfig
from deskside.facts.gpus import Gpu
from deskside.facts.measurements import Measurement, published

REFERENCE_ARCHITECTURE = "Hopper"  # where deskside itself was measured
MAX_SEQUENCE = 8192
STEP_TOKENS = 2**19  # assumed tokens per optimizer step
MAX_ROUNDS = 20  # of the median polish, which usually converges earlier
PLAIN_SAVINGS = ("", "FULL_SHARD ckpt=False")  # column `saving` of runs without recomputation or offloading
# Efficiency of attention kernels relative to ours (cuDNN, FlashAttention-3). FlashAttention-2 is twice as fast as the
# first version (arXiv 2307.08691). It does not use Hopper's instructions and reaches 35 % of 989 TFLOP/s there (arXiv
# 2407.08608). That is 0.44 of the rate of a large matmul, 790 TFLOP/s; ours reaches 0.59.
FIRST_GENERATION = 0.5  # relative to the second
SECOND_ON_HOPPER = 0.74
# The same for shared rows. In one row of 65,536 tokens on two H200, attention took 1,273 and 2,309 ms of a step in
# torch's FlashAttention, at head_dim 64 and 128, where the model says 784 and 1,283; in cuDNN it took 838 ms at
# head_dim 64, and 128 was not measured (docs/data/2026-11-28-scaling/third and fourth).
HOPPER_CHUNKS = {"flash_chunks_64": 0.616, "flash_chunks_128": 0.556, "cudnn_chunks": 0.935}
FIRST_KERNELS = ("FlashAttention", "Flash (PT2.0)")  # names in the table, before FlashAttention-2 (July 2023)
SECOND_KERNELS = ("FA2", "SDPA", "SDPA causal", "SDPA flash GQA")
# Rate of large BF16 matmuls as a share of the data sheet, for cards without a measurement: about the medians in
# facts/gpus.csv, laptops left out.
SHEET_SHARE = {"GeForce": 1.03, "other": 0.80}
# Share of the data sheet's bandwidth that transfers reach: over NVLink or Infinity Fabric, over PCIe, and to the host.
# The first two are assumptions. The last was measured: the offloaded optimizer states of 124m on an H200 (PCIe 5.0 x16,
# docs/data/2026-11-22-release/memory/memory_124m.json).
FABRIC_SHARE, PEER_SHARE, HOST_SHARE = 0.78, 0.70, 0.80


@dataclass(frozen=True)
class SpeedFactors:
    """Speed relative to the operator model, by trainer and by architecture.

    rows: number of fitted rows by architecture; spread: 90th percentile of the relative errors of the fitted rows.
    """

    trainers: Mapping[str, float]
    architectures: Mapping[str, float]
    rows: Mapping[str, int]
    spread: float


def matmul_rate(gpu: Gpu) -> float:
    """Return the FLOP/s of a large BF16 matmul: measured, else a typical share of the data sheet's rate."""
    if gpu.measured_bf16_flops is not None:
        return gpu.measured_bf16_flops
    return gpu.bf16_flops * SHEET_SHARE["GeForce" if gpu.geforce else "other"]


def uncalibrated_rates(gpu: Gpu) -> Rates:
    """Return a card's rates: BF16 by `matmul_rate`, others from its data sheet; efficiencies as fitted on Hopper.

    FlashAttention of shared rows has its own efficiency only on Hopper: no other card was measured.
    """
    bf16 = matmul_rate(gpu)
    fp8 = None if gpu.fp8_flops is None else gpu.fp8_flops * bf16 / gpu.bf16_flops
    fp4 = None if gpu.fp4_flops is None else gpu.fp4_flops * bf16 / gpu.bf16_flops
    # FP32 matmuls run on the CUDA cores, two FLOPs per lane and clock.
    lanes = 64 if gpu.compute_capability == "8.0" else 128
    fp32 = 2.0 * lanes * gpu.multiprocessors * gpu.boost_hz
    chunks = HOPPER_CHUNKS if gpu.architecture == "Hopper" else {}
    return Rates(
        efficiency=replace(Efficiency(), **chunks),
        fused=replace(FUSED_EFFICIENCY, **chunks),
        matmul_flops=bf16,
        bandwidth=gpu.bandwidth,
        low_precision_flops=fp8,
        fp4_flops=fp4,
        single_flops=fp32,
        link_bandwidth=link_bandwidth(gpu),
        host_bandwidth=HOST_SHARE * gpu.pcie_bandwidth,
    )


def link_bandwidth(gpu: Gpu) -> float:
    """Return the bytes/s that one card exchanges with the others while all of them communicate."""
    if gpu.fabric_bandwidth is not None:
        return FABRIC_SHARE * gpu.fabric_bandwidth
    return PEER_SHARE * gpu.pcie_bandwidth


def usable(row: Measurement) -> bool:
    """Return True if the operator model applies to a published run."""
    saving = row.saving
    chunked = all(word.startswith(("--lmhead-chunks", "--attn-bwd-chunks")) for word in saving.split())
    plain = saving in PLAIN_SAVINGS or chunked
    return (
        row.complete_for_speed
        and bool(row.card)
        and plain
        and row.precision in ("bf16", "fp8")
        and (row.sequence_length or 0) <= MAX_SEQUENCE
    )


def modelled_speed(row: Measurement) -> float:
    """Return the tokens per second of a published run by the operator model, without the architecture's factor."""
    gpu = row.data_sheet()
    assert gpu is not None
    shape, spec = shape_of(row), step_of(row)
    rates, share = uncalibrated_rates(gpu), attention_share(row, gpu)
    ours = rates.efficiency
    theirs = replace(ours, attention_64=share * ours.attention_64, attention_128=share * ours.attention_128)
    return tokens_per_second(shape, spec, replace(rates, efficiency=theirs))


def attention_share(row: Measurement, gpu: Gpu) -> float:
    """Return the efficiency of a published run's attention kernel relative to ours."""
    second = SECOND_ON_HOPPER if gpu.architecture == "Hopper" else 1.0
    if row.attention in FIRST_KERNELS:
        return FIRST_GENERATION * second
    return second if row.attention in SECOND_KERNELS else 1.0


def shape_of(row: Measurement) -> ModelConfig:
    """Return the model of a published run. The activation is assumed to be SiLU if gated, else squared ReLU."""
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


def step_of(row: Measurement) -> StepSpec:
    """Return the optimizer step of a published run, of about STEP_TOKENS tokens or one pass if that is more."""
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


def calibration_split() -> tuple[list[Measurement], list[Measurement]]:
    """Return (calibrating rows, held-out rows). They alternate within each architecture and precision, in the order of
    the table."""
    counts: dict[tuple[str, str], int] = {}
    parts: tuple[list[Measurement], list[Measurement]] = ([], [])
    for row in published():
        if usable(row):
            gpu = row.data_sheet()
            assert gpu is not None
            index = counts.get((gpu.architecture, row.precision), 0)
            counts[gpu.architecture, row.precision] = index + 1
            parts[index % 2].append(row)
    return parts


@cache
def speed_factors() -> SpeedFactors:
    """Return the factors fitted to the calibrating BF16 rows."""
    return fit_speed_factors(row for row in calibration_split()[0] if row.precision == "bf16")


def fit_speed_factors(rows: Iterable[Measurement]) -> SpeedFactors:
    """Fit trainers and architectures to log(measured / modelled) by median polish, with REFERENCE_ARCHITECTURE as 1."""
    table = []
    for row in rows:
        gpu = row.data_sheet()
        assert gpu is not None
        assert row.tokens_per_second is not None
        table.append((row.framework, gpu.architecture, math.log(row.tokens_per_second / modelled_speed(row))))
    trainers = dict.fromkeys({trainer for trainer, _, _ in table}, 0.0)
    architectures = dict.fromkeys({architecture for _, architecture, _ in table}, 0.0)
    for _ in range(MAX_ROUNDS):
        previous = [*trainers.values(), *architectures.values()]
        for trainer in trainers:
            trainers[trainer] = statistics.median(v - architectures[a] for t, a, v in table if t == trainer)
        for architecture in architectures:
            architectures[architecture] = statistics.median(
                v - trainers[t] for t, a, v in table if a == architecture
            )
        if previous == [*trainers.values(), *architectures.values()]:
            break
    # The shift comes after the fit: with the reference fixed at zero during it, the medians converge to a worse result.
    shift = architectures.get(REFERENCE_ARCHITECTURE, 0.0)
    architectures = {a: v - shift for a, v in architectures.items()}
    trainers = {t: v + shift for t, v in trainers.items()}
    errors = sorted(abs(math.expm1(v - trainers[t] - architectures[a])) for t, a, v in table)
    return SpeedFactors(
        trainers={t: math.exp(v) for t, v in trainers.items()},
        architectures={a: math.exp(v) for a, v in architectures.items()},
        rows={a: sum(1 for _, other, _ in table if other == a) for a in architectures},
        spread=errors[int(0.9 * (len(errors) - 1))] if errors else 0.0,
    )


def uncalibrated_reason(gpu: Gpu) -> str:
    """Return a sentence about an architecture without calibrating runs, "" if there are some."""
    if gpu.architecture == REFERENCE_ARCHITECTURE or gpu.architecture in speed_factors().architectures:
        return ""
    software = ", and ROCm is untested" if gpu.rocm else ""
    return f"no measured or published run calibrates {gpu.architecture}{software}"


def architecture_factor(gpu: Gpu) -> tuple[float, str]:
    """Return (speed of this architecture relative to the operator model, source of this number)."""
    factors = speed_factors()
    if gpu.architecture == REFERENCE_ARCHITECTURE:
        return 1.0, "the architecture that the efficiencies were fitted on"
    if gpu.architecture in factors.architectures:
        count = factors.rows[gpu.architecture]
        return factors.architectures[gpu.architecture], f"{count} published runs on {gpu.architecture}"
    return 1.0, uncalibrated_reason(gpu)


@dataclass(frozen=True)
class Speedup:
    """FP8 speed-up. speed: tokens per second relative to BF16. source: measured or published, and from which runs."""

    speed: float
    source: str


def published_fp8_speedup(gpu: Gpu, params: float) -> Speedup | None:
    """Return the published speed-up of FP8 at this model size: on this card, else on its architecture, else None.

    It grows with the model, because the FLOPs of matmuls grow faster than memory traffic. It is interpolated over
    log(size) between published sizes, and constant beyond them.
    """
    if gpu.fp8_flops is None:
        return None
    pairs = _fp8_pairs()
    same_card = [pair for pair in pairs if pair[0].card == gpu.name]
    sheets = [(pair, pair[0].data_sheet()) for pair in pairs]
    same_architecture = [pair for pair, sheet in sheets if sheet and sheet.architecture == gpu.architecture]
    used = same_card or same_architecture
    if not used:
        return None
    by_size: dict[float, list[float]] = {}
    for fp8, bf16 in used:
        assert fp8.params and fp8.tokens_per_second and bf16.tokens_per_second
        by_size.setdefault(fp8.params, []).append(fp8.tokens_per_second / bf16.tokens_per_second)
    sizes = sorted(by_size)
    speed = _interpolated(
        math.log(params), [(math.log(size), statistics.median(by_size[size])) for size in sizes]
    )
    cards = ", ".join(dict.fromkeys(pair[0].card for pair in used))
    trainers = ", ".join(dict.fromkeys(pair[0].framework for pair in used))
    ends = [f"{size / 1e6:,.0f}M" for size in dict.fromkeys((sizes[0], sizes[-1]))]
    return Speedup(speed, f"published: {trainers} on {cards}, {' to '.join(ends)} parameters")


def _interpolated(x: float, points: Sequence[tuple[float, float]]) -> float:
    """Return y at `x` by linear interpolation of (x, y) points in ascending order; constant beyond them."""
    for (left, low), (right, high) in pairwise(points):
        if left <= x <= right:
            return (high - low) / (right - left) * (x - left) + low
    return points[0][1] if x < points[0][0] else points[-1][1]


@cache
def _fp8_pairs() -> tuple[tuple[Measurement, Measurement], ...]:
    """Return pairs of (FP8, BF16) runs on one GPU with the same trainer, model, batch shape and recomputation."""

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
