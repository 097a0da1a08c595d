"""Comparison of predictions with measurements of deskside's own training step on one card.

The configurations are drawn with a fixed seed from a grid of shapes, sequence lengths, micro-batches, optimizers and
levels of activation checkpointing, so that favorable ones cannot be selected. The constants of `budget/speed.py` were
fitted to the even rows of the first seed; the odd rows, and all rows of other seeds, are held out to test them.

There are three predictors of speed: the planner without a probe, the planner with one, and a formula with two constants
that does not model deskside (fitted to 28 published runs of llmq, nanochat, llm.c and others). There is one predictor
of memory, because probes do not calibrate `budget/memory.py`.
"""

import json
import random
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.planner_tables import Errors, formula
from deskside.budget.memory import instants
from deskside.budget.speed import Rates, tokens_per_second, with_graphs_decided
from deskside.budget.step_spec import StepSpec
from deskside.config.model import ModelConfig
from deskside.facts.gpus import Gpu, find
from deskside.measurements.store import open_store
from deskside.plan.calibrate import Calibration, calibrate
from deskside.utils.errors import UsageError

SEED = 20261120
# Seeds whose rows were examined before the host's term was added to budget/speed.py.
EXAMINED_SEEDS = (7, 8)
DRAWN = 64  # configurations per seed
# (layers, hidden, head_dim, ffn): 50M to 3B parameters.
SHAPES = (
    (8, 512, 64, 1408), (10, 640, 64, 1728), (12, 768, 128, 2048), (12, 896, 64, 2432), (16, 1024, 128, 2816),
    (24, 1024, 64, 2816), (20, 1280, 128, 3456), (36, 1280, 64, 3456), (24, 1536, 128, 4096), (24, 2048, 128, 5632),
    (48, 1536, 64, 4096), (32, 2560, 128, 6912), (26, 3072, 128, 8192),
)  # fmt: skip
QUERY_GROUPS = (1, 2, 4)  # query heads per key-value head
SEQUENCE_LENGTHS = (512, 1024, 2048, 4096, 8192)
VOCABULARIES = (32768, 32768, 50304)
MICRO_TOKENS = (8192, 16384, 32768, 65536)
CHECKPOINTING = ("none", "none", "none", "attention", "mlp", "block")
ACTIVATION_LIMIT = 9e10  # approximate bytes above which a configuration is not drawn
# Issue 3: nine in ten relative errors must be within these bounds.
MEMORY_TARGET, MEMORY_TARGET_UNPROBED, SPEED_TARGET, SPEED_TARGET_UNPROBED = 0.05, 0.15, 0.10, 0.30
MIN_CONFIGURATIONS = 24
FIRST_DRAW = (
    "Rows of the first draw do not record their software. They were measured on 2026-11-20 on the machine of "
    "docs/log.md: NVIDIA H200, 700 W, driver 580.159, torch 2.11.0+cu130, Triton 3.6."
)


def configurations(count: int, seed: int = SEED) -> list[dict[str, Any]]:
    """Return `count` different point specs, cycling through the shapes."""
    draw = random.Random(seed)
    specs: list[dict[str, Any]] = []
    while len(specs) < count:
        layers, hidden, head_dim, ffn = SHAPES[len(specs) % len(SHAPES)]
        heads = hidden // head_dim
        group = draw.choice([g for g in QUERY_GROUPS if heads % g == 0])
        length = draw.choice(SEQUENCE_LENGTHS)
        checkpointing, micro = draw.choice(CHECKPOINTING), draw.choice(MICRO_TOKENS)
        large = layers * hidden > 40_000
        # Without checkpointing a block keeps about 40 bytes per token and channel.
        if checkpointing == "none" and 40 * layers * hidden * micro > ACTIVATION_LIMIT:
            continue
        spec = {
            "model": {
                "vocab_size": draw.choice(VOCABULARIES),
                "hidden_size": hidden,
                "num_hidden_layers": layers,
                "num_attention_heads": heads,
                "num_key_value_heads": heads // group,
                "head_dim": head_dim,
                "intermediate_size": ffn,
                "max_position_embeddings": 8192,
                "tie_word_embeddings": draw.random() < 0.25,
            },
            "sequence_length": length,
            "tokens": max(micro, 32768 if large else 65536) * draw.choice((1, 1, 2)),
            "micro_tokens": micro,
            "optimizer": draw.choice(("muon", "adamw")),
            "activation_checkpointing": checkpointing,
        }
        if spec not in specs:
            specs.append(spec)
    return specs


def read_points(files: list[Path]) -> list[dict[str, Any]]:
    """Return the points of all files in the order of their draw, each with its `seed` and its `index` in that draw.

    Raises ValueError for a row that is in no draw.
    """
    rows = [json.loads(line) for file in files for line in file.read_text(encoding="utf-8").splitlines()]
    rows = [row for row in rows if "card" not in row["spec"]]
    drawn: dict[int, list[dict[str, Any]]] = {}
    for row in rows:
        row["seed"] = row.get("seed", SEED)  # rows of the first draw do not record it
        if row["seed"] not in drawn:
            drawn[row["seed"]] = configurations(DRAWN, row["seed"])
        row["index"] = drawn[row["seed"]].index(row["spec"])
    return sorted(rows, key=lambda row: (row["seed"] != SEED, row["seed"], row["index"]))


def is_fitting_row(row: dict[str, Any]) -> bool:
    """Return True if the constants of `budget/speed.py` were fitted to this row."""
    return row["seed"] == SEED and row["index"] % 2 == 0


def shape_of(spec: dict[str, Any]) -> ModelConfig:
    """Return the model of a configuration."""
    return ModelConfig(**spec["model"])


def step_spec_of(
    spec: dict[str, Any], micro_tokens: int | None = None, result: Mapping[str, Any] | None = None
) -> StepSpec:
    """Return the optimizer step of a configuration.

    micro_tokens: the fitted micro-batch, if the spec does not set it. result: of the measurement. It has the execution
    mode: the hand-written step keeps copies of the weights between passes, the compiled step of earlier draws does not.
    It also has `compute.cuda_graph`; the runs of earlier draws had no graphs.
    """
    return StepSpec(
        spec["sequence_length"],
        spec["tokens"],
        micro_tokens or spec["micro_tokens"],
        optimizer=spec["optimizer"],
        copies="step" if (result or {}).get("compile") == "fused" else "pass",
        graphs=(result or {}).get("cuda_graph", "off"),
        activation_checkpointing=spec["activation_checkpointing"],
    )


def label(spec: dict[str, Any]) -> str:
    """Return a one-line description."""
    if "card" in spec:
        return "card"
    m = spec["model"]
    return (
        f"{m['num_hidden_layers']}x{m['hidden_size']} {m['num_attention_heads']}/{m['num_key_value_heads']}x"
        f"{m['head_dim']} V{m['vocab_size']} T{spec['sequence_length']} micro {spec['micro_tokens']} of "
        f"{spec['tokens']} {spec['optimizer']} {spec['activation_checkpointing']}"
    )


@dataclass(frozen=True)
class ComparedRow:
    """A measured configuration with its predictions, in bytes and tokens per second.

    allocated, reserved, used: predicted bytes, allocated and reserved by torch and in use on the device. unprobed,
    probed, formula: predicted tokens per second. without_host_term: the speed without the host's term,
    which was added to the model after draws 7 and 8 had been examined; after a probe if there is one.
    """

    row: Mapping[str, Any]
    shape: ModelConfig
    allocated: int
    reserved: int
    used: int
    unprobed: float
    probed: float | None
    without_host_term: float
    formula: float

    @property
    def spec(self) -> Mapping[str, Any]:
        spec: Mapping[str, Any] = self.row["spec"]
        return spec

    def of(self, name: str) -> float:
        """Return a measured number."""
        return float(self.row["result"][name])

    @property
    def speed(self) -> float:
        return self.of("tokens_per_second")

    @property
    def name(self) -> str:
        return f"{self.row['seed'] % 100:02}-{self.row['index']:02}"

    @property
    def noise(self) -> float:
        """Half of the distance between the 10th and 90th percentile of the step times, relative to their median."""
        seconds = self.row["result"]["step_seconds"]
        return float(seconds["p90"] - seconds["p10"]) / 2 / float(seconds["median"])

    @property
    def missed(self) -> bool:
        """True if an error exceeds the bound that issue 3 sets for nine in ten rows."""
        memory = abs(self.allocated / self.of("peak_allocated_bytes") - 1)
        probed = 0.0 if self.probed is None else abs(self.probed / self.speed - 1)
        return (
            memory > MEMORY_TARGET
            or probed > SPEED_TARGET
            or abs(self.unprobed / self.speed - 1) > SPEED_TARGET_UNPROBED
        )


@dataclass(frozen=True)
class Comparison:
    """All compared rows, with the planner's calibrations. left_out: the number of excluded rows for each reason."""

    gpu: Gpu
    rows: list[ComparedRow]
    left_out: Counter[str]
    did_not_run: list[Mapping[str, Any]]
    unprobed: Calibration
    probed: Calibration | None
    probe_rows: list[Mapping[str, Any]]

    @property
    def plain(self) -> list[ComparedRow]:
        """Rows without activation checkpointing."""
        return [c for c in self.rows if c.spec["activation_checkpointing"] == "none"]

    def of_seed(self, seed: int) -> list[ComparedRow]:
        return [c for c in self.rows if c.row["seed"] == seed]

    @property
    def seeds(self) -> list[int]:
        return list(dict.fromkeys(c.row["seed"] for c in self.rows))

    @property
    def independent(self) -> list[ComparedRow]:
        """Rows of draws that were not used to fit the constants."""
        return [c for c in self.rows if c.row["seed"] != SEED]

    def memory(self, rows: Sequence[ComparedRow] | None = None) -> Errors:
        chosen = self.rows if rows is None else rows
        return Errors((c.allocated, c.of("peak_allocated_bytes")) for c in chosen)

    def speed(self, predictor: str, rows: Sequence[ComparedRow] | None = None) -> Errors:
        """Return the errors of a predictor: unprobed, probed, without_host_term or formula."""
        pairs = [(getattr(c, predictor), c.speed) for c in (self.rows if rows is None else rows)]
        return Errors((predicted, speed) for predicted, speed in pairs if predicted is not None)


def compare(files: list[Path], gpu_name: str, probes: Path | None) -> Comparison:
    """Compare every measured configuration that was not used in the fit and is not in the probe store.

    Raises UsageError for a store without a point of this card, or with points of several machines.
    """
    gpu = find(gpu_name)
    unprobed, stored = calibrate(gpu, []), _stored(probes)
    probed = calibrate(gpu, stored) if stored else None
    in_store = {
        _identity(row["key"]["spec"], row["result"].get("micro_tokens"))
        for row in stored
        if row["kind"] == "point"
    }
    rows: list[ComparedRow] = []
    left_out, did_not_run = Counter[str](), list[Mapping[str, Any]]()
    fitting = {
        _identity(row["spec"], row["spec"]["micro_tokens"])
        for row in read_points(files)
        if is_fitting_row(row)
    }
    for row in read_points(files):
        identity = _identity(row["spec"], row["spec"]["micro_tokens"])
        if identity in fitting:
            left_out["used in the fit"] += 1
        elif identity in in_store:
            left_out["in the probe store"] += 1
        elif row["status"] != "ok":
            left_out[f"did not run: {row['status']}"] += 1
            did_not_run.append(row)
        else:
            rows.append(_compared(row, gpu, unprobed, probed))
    return Comparison(gpu, rows, left_out, did_not_run, unprobed, probed, stored)


def without_host_term(rates: Rates) -> Rates:
    """Return the rates without the host's term, as before draws 7 and 8."""
    return replace(rates, host=replace(rates.host, compiled_attention=0.0))


def _stored(probes: Path | None) -> list[Mapping[str, Any]]:
    if probes is None:
        return []
    rows: list[Mapping[str, Any]] = list(open_store(probes).rows())
    machines = {json.dumps(row["key"]["machine"], sort_keys=True) for row in rows}
    if len(machines) != 1:
        raise UsageError(f"{probes}: has rows of {len(machines)} machines; give a store with one")
    return rows


def _identity(spec: Mapping[str, Any], micro_tokens: int | None) -> str:
    """Return a key that is equal for equal work, even if one spec leaves out default values."""
    parts = [ModelConfig(**spec["model"]).model_dump_json(), spec["sequence_length"], spec["tokens"]]
    return json.dumps([*parts, micro_tokens, spec["optimizer"], spec["activation_checkpointing"]])


def _compared(
    row: Mapping[str, Any], gpu: Gpu, unprobed: Calibration, probed: Calibration | None
) -> ComparedRow:
    shape = shape_of(row["spec"])
    rates, overhead = (probed or unprobed).rates, (probed or unprobed).overhead_bytes
    work = step_spec_of(row["spec"], row["result"]["micro_tokens"], row["result"])
    work = with_graphs_decided(shape, work, rates)
    # No row evaluates. torch counts the memory of a captured pass as reserved, but not as allocated.
    in_step = [memory for name, memory in instants(shape, work).items() if name != "evaluation"]
    reserved = max(memory.reserved for memory in in_step)
    return ComparedRow(
        row,
        shape,
        max(memory.allocated - memory.items.get("captured pass", 0) for memory in in_step),
        reserved,
        reserved + overhead,
        tokens_per_second(shape, work, unprobed.rates),
        tokens_per_second(shape, work, probed.rates) if probed is not None else None,
        tokens_per_second(shape, work, without_host_term(rates)),
        formula(shape, work.sequence_length, gpu),
    )


def target_errors(comparison: Comparison) -> list[tuple[str, float, Errors]]:
    """Return (description, target, errors) for each target of issue 3."""
    lines = []
    if comparison.independent:
        lines.append(
            (
                "Peak memory, draws not used in the fit",
                MEMORY_TARGET,
                comparison.memory(comparison.independent),
            )
        )
    examined = [c for c in comparison.rows if c.row["seed"] in EXAMINED_SEEDS]
    fresh = [c for c in comparison.independent if c not in examined]
    if comparison.probed is not None:
        lines += [
            (
                "Tokens/s after a probe, as predicted before the rows were seen",
                SPEED_TARGET,
                comparison.speed("without_host_term"),
            ),
            (
                "Tokens/s after a probe, as predicted before the rows were seen, draws 7 and 8",
                SPEED_TARGET,
                comparison.speed("without_host_term", examined),
            ),
            ("Tokens/s after a probe, by the current planner", SPEED_TARGET, comparison.speed("probed")),
        ]
    if fresh and comparison.probed is not None:
        lines.append(
            (
                "Tokens/s after a probe, draws not examined before",
                SPEED_TARGET,
                comparison.speed("probed", fresh),
            )
        )
    return [
        *lines,
        (
            "Peak memory, without a probe (31 of the rows were used to choose its constants)",
            MEMORY_TARGET_UNPROBED,
            comparison.memory(),
        ),
        (
            "Tokens/s without a probe, on the type of card that the constants come from",
            SPEED_TARGET_UNPROBED,
            comparison.speed("unprobed"),
        ),
    ]
