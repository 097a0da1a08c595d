"""Configurations that the planner is tested on, and the rows of their measurements.

They are drawn with a fixed seed from a grid of shapes, sequence lengths, micro-batches, optimizers and levels of
activation checkpointing, so that favorable ones cannot be selected. The constants of `budget/speed.py` were fitted to
the even rows of the first seed; the odd rows, and all rows of other seeds, are held out to test them.
"""

import json
import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from deskside.budget.step_spec import StepSpec
from deskside.config.model import ModelConfig

SEED = 20261120
# Draws that showed that a step can be limited by the host; the host's term in budget/speed.py was added after them.
LOOKED_AT = (7, 8)
DRAWN = 64
# (layers, hidden, head_dim, ffn): 50M to 3B parameters.
SHAPES = (
    (8, 512, 64, 1408), (10, 640, 64, 1728), (12, 768, 128, 2048), (12, 896, 64, 2432), (16, 1024, 128, 2816),
    (24, 1024, 64, 2816), (20, 1280, 128, 3456), (36, 1280, 64, 3456), (24, 1536, 128, 4096), (24, 2048, 128, 5632),
    (48, 1536, 64, 4096), (32, 2560, 128, 6912), (26, 3072, 128, 8192),
)  # fmt: skip
GROUPS = (1, 2, 4)  # query heads per key-value head
LENGTHS = (512, 1024, 2048, 4096, 8192)
VOCABULARIES = (32768, 32768, 50304)
MICRO = (8192, 16384, 32768, 65536)
RUNGS = ("none", "none", "none", "attention", "mlp", "block")
ACTIVATION_LIMIT = 9e10  # approximate bytes above which a configuration is not drawn


def configurations(count: int, seed: int = SEED) -> list[dict[str, Any]]:
    """Return `count` different point specs, cycling through the shapes."""
    draw = random.Random(seed)
    found: list[dict[str, Any]] = []
    while len(found) < count:
        layers, hidden, head_dim, ffn = SHAPES[len(found) % len(SHAPES)]
        heads = hidden // head_dim
        group = draw.choice([g for g in GROUPS if heads % g == 0])
        length, rung, micro = draw.choice(LENGTHS), draw.choice(RUNGS), draw.choice(MICRO)
        large = layers * hidden > 40_000
        # Without checkpointing a block keeps about 40 bytes per token and channel.
        if rung == "none" and 40 * layers * hidden * micro > ACTIVATION_LIMIT:
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
            "activation_checkpointing": rung,
        }
        if spec not in found:
            found.append(spec)
    return found


def measured(files: list[Path]) -> list[dict[str, Any]]:
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


def gave_constants(row: dict[str, Any]) -> bool:
    """Return whether the constants of `budget/speed.py` were fitted to this row."""
    return row["seed"] == SEED and row["index"] % 2 == 0


def shape_of(spec: dict[str, Any]) -> ModelConfig:
    """Return the model of a configuration."""
    return ModelConfig(**spec["model"])


def work_of(
    spec: dict[str, Any], micro_tokens: int | None = None, result: Mapping[str, Any] | None = None
) -> StepSpec:
    """Return the optimizer step of a configuration.

    micro_tokens: the fitted micro-batch, if the spec does not set it. result: the result of the measurement, which
    records how the step was executed. The hand-written step keeps copies of weights; earlier draws were compiled by
    torch.
    """
    return StepSpec(
        spec["sequence_length"],
        spec["tokens"],
        micro_tokens or spec["micro_tokens"],
        optimizer=spec["optimizer"],
        copies="step" if (result or {}).get("compile") == "fused" else "pass",
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
