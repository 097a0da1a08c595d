"""The points of a sweep, their order, and estimates of their time. Pure arithmetic.

A sweep measures a grid of model sizes, sequence lengths and options. Its corners come first, because points between
measured ones can be interpolated and points outside cannot. Each subsequent point is the one farthest from all before
it (greedy maximin, Gonzalez 1985: "Clustering to minimize the maximum intercluster distance"), which on one axis is
bisection. So the measured points cover the whole grid, whenever the sweep is stopped.
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

from deskside.budget.shape import flops_per_token, matmul_params, num_params
from deskside.config.model import ModelConfig
from deskside.utils.errors import UsageError
from deskside.utils.format import count

MAX_POINTS = 400  # takes some hours on a fast GPU
LONGEST_SEQUENCE = 2**20
# Maximum FLOPs of a step: batches are halved down to it, so that a point takes seconds and not minutes.
STEP_FLOPS = {"cuda": 4e14, "cpu": 4e10}
WARMUP_SECONDS = {"cuda": 2.0, "cpu": 0.5}
COUNTED_SECONDS = {"cuda": 4.0, "cpu": 2.0}
WARMUP_STEPS, COUNTED_STEPS = 2, 5  # minimum steps of a point, even if they are slow
FITTING_STEPS = 3  # time spent on the search for the largest micro-batch, in steps
STATE_BYTES = 18  # per parameter with AdamW: weight, gradient, two moments, bfloat16 copy
STATES_SHARE = 0.5  # of the GPU's memory, for the states of the largest calibration model
CPU_VOCABULARY = 1024
OPTION_DISTANCE = 0.6  # between neighbouring options; the whole range of sizes, or of sequence lengths, is 1
# Positions of (size, sequence length) in the grid: first the cheapest, then the most expensive.
CORNERS = ((0.0, 0.0), (1.0, 1.0), (0.0, 1.0), (1.0, 0.0))
SHAPE_FIELDS = (
    "vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim",
    "intermediate_size", "max_position_embeddings",
)  # fmt: skip
# Approximate share of a forward pass that activation checkpointing recomputes, to estimate the time of a point.
RECOMPUTED_FORWARDS = {"block": 1.0, "mlp": 0.6, "attention": 0.4, "none": 0.0}

# Assumptions until a point has been measured on the machine: seconds of set-up (start, compilation) and of the device
# benchmark, and the FLOP/s of a step: a share of the matmul peak or, if that is unknown, an absolute rate.
SETUP_SECONDS = {"cuda": 30.0, "cpu": 8.0}
BENCHMARK_SECONDS = {"cuda": 20.0, "cpu": 10.0}
ASSUMED_FLOPS_PER_SECOND = {"cuda": 1e13, "cpu": 5e9}
SHARE_OF_PEAK = 0.25


@dataclass(frozen=True)
class Size:
    """A model size of the grid: its configuration, and the sequence length and tokens per step of its preset."""

    model: ModelConfig
    sequence_length: int
    tokens: int


@dataclass(frozen=True)
class Point:
    """One point of the grid. `spec` is the argument of `probe.point.measure_point` without device and durations."""

    model: ModelConfig
    spec: Mapping[str, Any]

    @property
    def sequence_length(self) -> int:
        return int(self.spec["sequence_length"])

    @property
    def options(self) -> tuple[str, str, str]:
        """(precision, optimizer, activation checkpointing)."""
        spec = self.spec
        return str(spec["precision"]), str(spec["optimizer"]), str(spec["activation_checkpointing"])

    @property
    def shape(self) -> str:
        """Text such as "12x768 12/3 E8": layers x hidden size, query heads / key-value heads, experts."""
        model = self.model
        heads = f"{model.num_attention_heads}/{model.num_key_value_heads}"
        experts = f" E{model.num_experts}" if model.num_experts else ""
        return f"{model.num_hidden_layers}x{model.hidden_size} {heads}{experts}"

    @property
    def step_flops(self) -> float:
        """FLOPs of one optimizer step, including recomputation."""
        passes = 3 + RECOMPUTED_FORWARDS[self.options[2]]
        return flops_per_token(self.model, self.sequence_length) * int(self.spec["tokens"]) * passes / 3

    def title(self) -> str:
        """Return a one-line description: shape, parameters, sequence length, options."""
        words = [self.shape, count(num_params(self.model)), f"T {self.sequence_length}"]
        return ", ".join([*words, option_words(self.options, "checkpointing ")])


def option_words(options: tuple[str, str, str], before_checkpointing: str = "") -> str:
    """Return a text such as "muon, fp8-rowwise, block", omitting default precision and checkpointing."""
    precision, optimizer, checkpointing = options
    words = [optimizer]
    words += [precision] if precision != "auto" else []
    words += [f"{before_checkpointing}{checkpointing}"] if checkpointing != "none" else []
    return ", ".join(words)


def make_point(
    model: ModelConfig,
    sequence_length: int,
    tokens: int,
    optimizer: str = "muon",
    precision: str = "auto",
    checkpointing: str = "none",
    micro_tokens: int | str = "auto",
    cuda_graph: str | None = None,
) -> Point:
    """Return a point. Equal models get equal specs: fields with default values are left out, except `SHAPE_FIELDS`.

    cuda_graph: as in `compute.cuda_graph`; None to leave the decision to the run.
    """
    if sequence_length > model.max_position_embeddings:
        model = model.model_copy(update={"max_position_embeddings": sequence_length})
    fields = model.model_dump(exclude_defaults=True) | {name: getattr(model, name) for name in SHAPE_FIELDS}
    if model.num_experts:
        del fields["intermediate_size"]  # experts have another one, and a configuration may not have both
    spec = {
        "model": fields,
        "sequence_length": sequence_length,
        "tokens": tokens,
        "micro_tokens": micro_tokens,
        "optimizer": optimizer,
        "precision": precision,
        "activation_checkpointing": checkpointing,
        **({"cuda_graph": cuda_graph} if cuda_graph else {}),
    }
    return Point(model, spec)


def expand(
    sizes: Sequence[Size],
    sequence_lengths: Sequence[int],
    precisions: Sequence[str],
    optimizers: Sequence[str],
    checkpointings: Sequence[str],
    device: str,
) -> list[Point]:
    """Return every point of the grid once. Raises UsageError.

    If `sequence_lengths` is empty, each size has its preset's sequence length.
    """
    for length in sequence_lengths:
        if not 2 <= length <= LONGEST_SEQUENCE:
            raise UsageError(f"--sequence: {length} cannot be measured; use 2 to {LONGEST_SEQUENCE} tokens")
    points: dict[str, Point] = {}
    for size in sizes:
        lengths = sequence_lengths or [size.sequence_length]
        for length, precision, optimizer, checkpointing in product(
            lengths, precisions, optimizers, checkpointings
        ):
            tokens = step_tokens(size, length, device)
            point = make_point(size.model, length, tokens, optimizer, precision, checkpointing)
            points.setdefault(json.dumps(point.spec, sort_keys=True), point)
    if len(points) > MAX_POINTS:
        raise UsageError(
            f"the grid has {len(points)} points, at most {MAX_POINTS} are allowed: give fewer values"
        )
    return list(points.values())


def step_tokens(size: Size, sequence_length: int, device: str) -> int:
    """Return the tokens of an optimizer step: the preset's, halved until the step is short enough to repeat."""
    rows = max(1, round(size.tokens / sequence_length))
    per_row = flops_per_token(size.model, sequence_length) * sequence_length
    while rows > 1 and rows * per_row > STEP_FLOPS[device]:
        rows = (rows + 1) // 2
    return rows * sequence_length


def order(points: Sequence[Point]) -> list[Point]:
    """Order points: the corners first, then each time the point farthest from all before it."""
    if not points:
        return []
    coordinates = _coordinates(points)
    chosen: list[int] = []
    for corner in CORNERS:
        at_corner = [i for i, position in enumerate(coordinates) if position[:2] == corner]
        chosen += at_corner[:1]
    rest = [i for i in range(len(points)) if i not in chosen]
    distances = {
        i: min((math.dist(coordinates[i], coordinates[j]) for j in chosen), default=math.inf) for i in rest
    }
    while distances:
        farthest = max(distances, key=lambda i: (distances[i], -i))  # ties go to the first
        del distances[farthest]
        chosen.append(farthest)
        for i in distances:
            distances[i] = min(distances[i], math.dist(coordinates[i], coordinates[farthest]))
    return [points[i] for i in chosen]


def needs_at_least_as_much_memory(point: Point, other: Point) -> bool:
    """Return True if `point` certainly needs at least as much memory as `other`, each with its smallest micro-batch.

    That is, if it has the same kind of model, precision and optimizer, no smaller dimension, no shorter sequence, no
    smaller micro-batch and no more recomputation.
    """
    if point.options[:2] != other.options[:2]:
        return False
    checkpointing, others_checkpointing = point.options[2], other.options[2]
    # "none" keeps the most activations and "block" the fewest; "attention" and "mlp" are not comparable.
    if checkpointing not in (others_checkpointing, "none") and others_checkpointing != "block":
        return False
    fields, other_fields = point.model.model_dump(), other.model.model_dump()
    sizes = {*SHAPE_FIELDS, "num_experts", "moe_intermediate_size"}
    return (
        all(
            fields[name] >= other_fields[name] if name in sizes else fields[name] == other_fields[name]
            for name in fields
        )
        and point.sequence_length >= other.sequence_length
        and _fewest_tokens(point) >= _fewest_tokens(other)
    )


def estimate_seconds(
    point: Point, measured: Sequence[tuple[Point, float, float]], device: str, peak_flops: float | None
) -> float:
    """Estimate the wall-clock seconds of measuring a point, erring on the high side.

    measured: (point, seconds of one step, seconds of the whole measurement) on this machine; peak_flops: FLOP/s of its
    matmuls. The estimate assumes the longest set-up so far, and for the steps the FLOP/s of the model nearest in size.
    """
    if measured:
        size = math.log(matmul_params(point.model))
        nearest, nearest_step, _ = min(
            measured, key=lambda m: abs(math.log(matmul_params(m[0].model)) - size)
        )
        step = nearest_step * point.step_flops / nearest.step_flops
        setup = max(total - _steps_seconds(seconds, device) for _, seconds, total in measured)
    else:
        step = point.step_flops / (
            SHARE_OF_PEAK * peak_flops if peak_flops else ASSUMED_FLOPS_PER_SECOND[device]
        )
        setup = SETUP_SECONDS[device]
    return max(0.0, setup) + _steps_seconds(step, device)


def calibration_points(memory_bytes: int, device: str) -> list[Point]:
    """Return the few points that calibrate the planner, most informative first. Measuring them takes minutes.

    The planner has few unknowns (the share of the benchmarked speed that each kind of work reaches, and the memory that
    it does not model), so each point varies several things at once: model size, sequence length, heads, optimizer,
    recomputation, accumulation. On a GPU, the largest model is chosen so that its states take at most half of the
    memory, if possible. The last point is launched by the host, not replayed, because it times the host.
    """
    if device == "cpu":
        return _cpu_calibration()
    layers_and_hidden = [(8, 512), (12, 768), (24, 1024), (16, 1536), (16, 2048), (20, 2560)]
    dense = [_dense(layers, hidden, 64 if hidden < 2048 else 128, 4) for layers, hidden in layers_and_hidden]
    fitting = [m for m in dense if STATE_BYTES * num_params(m) <= STATES_SHARE * memory_bytes]
    large = fitting[-1] if fitting else dense[0]
    small, middle = dense[0], dense[min(2, dense.index(large) // 2)]
    no_grouping = _dense(12, 768, 128, 1)  # as many key-value heads as query heads
    long_sequence = 8192 if memory_bytes > 20 * 2**30 else 4096
    return [
        make_point(small, 1024, 65536),
        make_point(large, 2048, 16384, "adamw"),
        make_point(middle, long_sequence, 32768),
        make_point(large, 1024, 16384, checkpointing="block"),
        make_point(no_grouping, 512, 32768, "adamw", micro_tokens=8192),
        make_point(middle, 2048, 32768, "adamw", checkpointing="block"),
        make_point(small, 2048, 16384, micro_tokens=2048, cuda_graph="off"),
    ]


def _cpu_calibration() -> list[Point]:
    demo = _dense(4, 128, 32, 4, CPU_VOCABULARY)
    small, large = _dense(2, 64, 32, 2, CPU_VOCABULARY), _dense(6, 256, 64, 1, CPU_VOCABULARY)
    return [
        make_point(demo, 128, 2048),
        make_point(large, 256, 1024, "adamw"),
        make_point(small, 64, 1024, "adamw"),
        make_point(demo, 512, 2048, checkpointing="block"),
        make_point(large, 64, 1024, micro_tokens=256),
    ]


def _dense(
    layers: int, hidden: int, head_dim: int, heads_per_kv: int, vocabulary: int = 32768
) -> ModelConfig:
    """Return a Qwen3-like model whose intermediate size is 8/3 x hidden size, rounded up to a multiple of 128."""
    heads = hidden // head_dim
    return ModelConfig(
        vocab_size=vocabulary,
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=heads // heads_per_kv,
        head_dim=head_dim,
        intermediate_size=-(-8 * hidden // (3 * 128)) * 128,
    )


def _steps_seconds(step: float, device: str) -> float:
    """Return the seconds of all steps of a measurement, each of which takes `step` seconds."""
    warmup = max(WARMUP_SECONDS[device], WARMUP_STEPS * step)
    return warmup + max(COUNTED_SECONDS[device], COUNTED_STEPS * step) + FITTING_STEPS * step


def _coordinates(points: Sequence[Point]) -> list[tuple[float, ...]]:
    """Return the coordinates of each point: logarithms of size and length scaled to 0 to 1, one axis per option."""
    sizes = _normalize([math.log(matmul_params(point.model)) for point in points])
    lengths = _normalize([math.log(point.sequence_length) for point in points])
    names = [list(dict.fromkeys(point.options[axis] for point in points)) for axis in range(3)]
    return [
        (size, length, *(OPTION_DISTANCE * names[axis].index(point.options[axis]) for axis in range(3)))
        for point, size, length in zip(points, sizes, lengths, strict=True)
    ]


def _normalize(values: list[float]) -> list[float]:
    low, high = min(values), max(values)
    return [(value - low) / (high - low) if high > low else 0.0 for value in values]


def _fewest_tokens(point: Point) -> int:
    """Return the tokens of the smallest micro-batch: one row, unless the point fixes the micro-batch."""
    micro = point.spec["micro_tokens"]
    return point.sequence_length if micro == "auto" else int(micro)
