"""The points of a sweep, their order, and estimates of their time. Pure arithmetic.

A map is a grid of model sizes, sequence lengths and options. Its corners come first, because what lies between two
measured points can be interpolated and what lies outside cannot; then each next point is the one farthest from all that
came before it (greedy maximin, Gonzalez 1985: "Clustering to minimize the maximum intercluster distance"), which on one
axis is bisection. So whenever a probe is stopped, what it has is spread over the whole map.
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

LARGEST_MAP = 400  # points; some hours on a fast card
LONGEST_SEQUENCE = 2**20
# FLOPs that a step may have: batches are halved until it has no more, so that a point takes seconds and not minutes.
STEP_FLOPS = {"cuda": 4e14, "cpu": 4e10}
WARMUP_SECONDS = {"cuda": 2.0, "cpu": 0.5}
COUNTED_SECONDS = {"cuda": 4.0, "cpu": 2.0}
WARMUP_STEPS, COUNTED_STEPS, DRY_STEPS = 2, 5, 3
STATE_BYTES = 18  # of a parameter under AdamW: weight, gradient, two moments, bfloat16 copy
STATES_SHARE = 0.5  # of the card's memory
CPU_VOCABULARY = 1024
OPTION_DISTANCE = 0.6  # between two options, where the longest way along sizes or sequences is 1
CORNERS = ((0.0, 0.0), (1.0, 1.0), (0.0, 1.0), (1.0, 0.0))  # of (size, sequence length), the cheapest first
SHAPE = (
    "vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim",
    "intermediate_size", "max_position_embeddings",
)  # fmt: skip
# Forward passes that activation checkpointing adds, about; it matters for the time that a point is given.
RECOMPUTED = {"block": 1.0, "mlp": 0.6, "attention": 0.4, "none": 0.0}

# Before anything was measured on a machine: seconds of starting, compiling and fitting, and FLOP/s.
SETUP_SECONDS = {"cuda": 30.0, "cpu": 8.0}
CARD_SECONDS = {"cuda": 20.0, "cpu": 10.0}
SLOW_FLOPS = {"cuda": 1e13, "cpu": 5e9}
SHARE_OF_PEAK = 0.25


@dataclass(frozen=True)
class Size:
    """A model of a grid: its shape, and the sequence length and tokens per step of its preset."""

    model: ModelConfig
    sequence_length: int
    tokens: int


@dataclass(frozen=True)
class Point:
    """One point of a grid. `spec` is the input of `probe.point.measure_point` without the measuring time."""

    model: ModelConfig
    spec: Mapping[str, Any]

    @property
    def sequence_length(self) -> int:
        return int(self.spec["sequence_length"])

    @property
    def options(self) -> tuple[str, str, str]:
        """Precision, optimizer, activation checkpointing."""
        spec = self.spec
        return str(spec["precision"]), str(spec["optimizer"]), str(spec["activation_checkpointing"])

    @property
    def shape(self) -> str:
        """Layers x hidden size, query heads / key-value heads."""
        model = self.model
        heads = f"{model.num_attention_heads}/{model.num_key_value_heads}"
        experts = f" E{model.num_experts}" if model.num_experts else ""
        return f"{model.num_hidden_layers}x{model.hidden_size} {heads}{experts}"

    @property
    def step_flops(self) -> float:
        """FLOPs of one optimizer step, including recomputation."""
        passes = 3 + RECOMPUTED[self.options[2]]
        return flops_per_token(self.model, self.sequence_length) * int(self.spec["tokens"]) * passes / 3

    def title(self) -> str:
        """Return a one-line description: shape, parameters, sequence length, options."""
        words = [self.shape, count(num_params(self.model)), f"T {self.sequence_length}"]
        return ", ".join([*words, option_words(self.options, "checkpointing ")])


def option_words(options: tuple[str, str, str], before_checkpointing: str = "") -> str:
    """Return the options of a point without those that are defaults, such as "muon, fp8-rowwise, block"."""
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
) -> Point:
    """Make a point. Equal work has an equal spec: defaults of the model are left out, its shape never is."""
    if sequence_length > model.max_position_embeddings:
        model = model.model_copy(update={"max_position_embeddings": sequence_length})
    fields = model.model_dump(exclude_defaults=True) | {name: getattr(model, name) for name in SHAPE}
    spec = {
        "model": fields,
        "sequence_length": sequence_length,
        "tokens": tokens,
        "micro_tokens": micro_tokens,
        "optimizer": optimizer,
        "precision": precision,
        "activation_checkpointing": checkpointing,
    }
    return Point(model, spec)


def expand(
    sizes: Sequence[Size],
    sequences: Sequence[int],
    precisions: Sequence[str],
    optimizers: Sequence[str],
    checkpointings: Sequence[str],
    device: str,
) -> list[Point]:
    """Return every point of the grid once; without `sequences` each size has its own. Raises UsageError."""
    for length in sequences:
        if not 2 <= length <= LONGEST_SEQUENCE:
            raise UsageError(f"--sequence: {length} cannot be measured; use 2 to {LONGEST_SEQUENCE} tokens")
    points: dict[str, Point] = {}
    for size in sizes:
        lengths = sequences or [size.sequence_length]
        for length, precision, optimizer, kept in product(lengths, precisions, optimizers, checkpointings):
            tokens = step_tokens(size, length, device)
            point = make_point(size.model, length, tokens, optimizer, precision, kept)
            points.setdefault(json.dumps(point.spec, sort_keys=True), point)
    if len(points) > LARGEST_MAP:
        raise UsageError(f"the map has {len(points)} points, and {LARGEST_MAP} is the most; leave values out")
    return list(points.values())


def step_tokens(size: Size, sequence_length: int, device: str) -> int:
    """Return the tokens of an optimizer step: the preset's, halved until the step is short enough to repeat."""
    rows = max(1, round(size.tokens / sequence_length))
    per_row = flops_per_token(size.model, sequence_length) * sequence_length
    while rows > 1 and rows * per_row > STEP_FLOPS[device]:
        rows = (rows + 1) // 2
    return rows * sequence_length


def order(points: Sequence[Point]) -> list[Point]:
    """Order points by information: corners first, then always the one farthest from all before it."""
    if not points:
        return []
    places = _places(points)
    chosen: list[int] = []
    for corner in CORNERS:
        there = [i for i, place in enumerate(places) if place[:2] == corner]
        chosen += there[:1]
    rest = [i for i in range(len(points)) if i not in chosen]
    gaps = {i: min((math.dist(places[i], places[j]) for j in chosen), default=math.inf) for i in rest}
    while gaps:
        farthest = max(gaps, key=lambda i: (gaps[i], -i))
        del gaps[farthest]
        chosen.append(farthest)
        for i in gaps:
            gaps[i] = min(gaps[i], math.dist(places[i], places[farthest]))
    return [points[i] for i in chosen]


def needs_more_memory(point: Point, other: Point) -> bool:
    """Return whether `point` certainly needs at least the memory of `other`, each with its smallest micro-batch.

    True only where no modelling is needed to say so: the same kind of model with the same precision and optimiser,
    nothing smaller, nothing more recomputed.
    """
    if point.options[:2] != other.options[:2]:
        return False
    mine, theirs = point.options[2], other.options[2]
    if mine != theirs and mine != "none" and theirs != "block":
        return False
    fields, others = point.model.model_dump(), other.model.model_dump()
    sizes = {*SHAPE, "num_experts", "moe_intermediate_size"}
    return (
        all(
            fields[name] >= others[name] if name in sizes else fields[name] == others[name] for name in fields
        )
        and point.sequence_length >= other.sequence_length
        and _fewest_tokens(point) >= _fewest_tokens(other)
    )


def estimate_seconds(
    point: Point, measured: Sequence[tuple[Point, float, float]], device: str, peak_flops: float | None
) -> float:
    """Estimate the wall-clock seconds of measuring a point, rather too long than too short.

    measured: (point, seconds of one step, seconds of the whole measurement) of this machine; peak_flops: of its matrix
    products, FLOP/s. The setting up is taken to last as long as the longest so far, the steps to run at the FLOP/s of
    the model nearest in size.
    """
    if measured:
        size = math.log(matmul_params(point.model))
        near = min(measured, key=lambda m: abs(math.log(matmul_params(m[0].model)) - size))
        step = near[1] * point.step_flops / near[0].step_flops
        setup = max(total - _stepping(of_step, device) for _, of_step, total in measured)
    else:
        step = point.step_flops / (SHARE_OF_PEAK * peak_flops if peak_flops else SLOW_FLOPS[device])
        setup = SETUP_SECONDS[device]
    return max(0.0, setup) + _stepping(step, device)


def calibration_points(memory_bytes: int, device: str) -> list[Point]:
    """Return the points that calibrate the planner: few, most informative first, minutes in total.

    The planner has few unknowns (how near to the measured rates each kind of work comes, and what memory it has not
    itemised), so every point differs from the others in several things at once: model size, sequence length, heads,
    optimiser, recomputation, accumulation. The largest model is one whose states take half of the memory.
    """
    if device == "cpu":
        return _cpu_calibration()
    ladder = [(8, 512), (12, 768), (24, 1024), (16, 1536), (16, 2048), (20, 2560)]
    dense = [_dense(layers, hidden, 64 if hidden < 2048 else 128, 4) for layers, hidden in ladder]
    fitting = [m for m in dense if STATE_BYTES * num_params(m) <= STATES_SHARE * memory_bytes]
    large = fitting[-1] if fitting else dense[0]
    small, middle = dense[0], dense[min(2, dense.index(large) // 2)]
    heads = _dense(12, 768, 128, 1)
    long = 8192 if memory_bytes > 20 * 2**30 else 4096
    return [
        make_point(small, 1024, 65536),
        make_point(large, 2048, 16384, "adamw"),
        make_point(middle, long, 32768),
        make_point(large, 1024, 16384, checkpointing="block"),
        make_point(heads, 512, 32768, "adamw", micro_tokens=8192),
        make_point(middle, 2048, 32768, "adamw", checkpointing="block"),
        make_point(small, 2048, 16384, micro_tokens=2048),
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
    """Return a Qwen3-shaped model with an MLP of 8/3 x hidden size, rounded up to a multiple of 128."""
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


def _stepping(step: float, device: str) -> float:
    warmup = max(WARMUP_SECONDS[device], WARMUP_STEPS * step)
    return warmup + max(COUNTED_SECONDS[device], COUNTED_STEPS * step) + DRY_STEPS * step


def _places(points: Sequence[Point]) -> list[tuple[float, ...]]:
    """Return the coordinates of a point: logarithms of size and length from 0 to 1, then one axis per option."""
    sizes = _unit([math.log(matmul_params(point.model)) for point in points])
    lengths = _unit([math.log(point.sequence_length) for point in points])
    names = [list(dict.fromkeys(point.options[axis] for point in points)) for axis in range(3)]
    return [
        (size, length, *(OPTION_DISTANCE * names[axis].index(point.options[axis]) for axis in range(3)))
        for point, size, length in zip(points, sizes, lengths, strict=True)
    ]


def _unit(values: list[float]) -> list[float]:
    low, high = min(values), max(values)
    return [(value - low) / (high - low) if high > low else 0.0 for value in values]


def _fewest_tokens(point: Point) -> int:
    """Return the minimum tokens of a forward pass: a fitted micro-batch can shrink to one row."""
    micro = point.spec["micro_tokens"]
    return point.sequence_length if micro == "auto" else int(micro)
