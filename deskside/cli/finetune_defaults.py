"""Training defaults of fine-tuning: learning rate, optimizer, length of a row and tokens per step."""

from dataclasses import dataclass, field
from typing import Any

from pydantic import ValidationError

from deskside.config.base import first_problem
from deskside.config.sections import BatchConfig
from deskside.utils.errors import UsageError


@dataclass(frozen=True)
class FinetuneDefaults:
    """Training defaults of an objective.

    lr_factor: factor on the learning rate of supervised fine-tuning (`default_optimizer`).
    more: further configuration, as a nested dict.
    """

    batch: dict[str, int]
    lr_factor: float
    warmup: float
    final_lr_fraction: float
    more: dict[str, Any] = field(default_factory=dict)


def default_optimizer(hidden_size: int, given: dict[str, Any]) -> dict[str, Any]:
    """Return the default optimizer options: AdamW without weight decay, unless Muon is given.

    `optim.scale` is off, since the scaling rules hold for training from random weights. The learning rate is 1e-4 at a
    width of 768 and inversely proportional to the width, like Adam's best rate (Yang et al. 2022, arXiv 2203.03466); at
    4096 this is the usual 2e-5. For adapters it is ten times as large (Schulman et al. 2025, "LoRA Without Regret").
    """
    if given.get("optim", {}).get("name") == "muon":
        return {"name": "muon"}
    lr = 1e-4 * 768 / hidden_size
    optimizer: dict[str, Any] = {"name": "adamw", "lr": lr, "betas": [0.9, 0.95], "weight_decay": 0.0}
    if "adapter" in given:
        return {**optimizer, "lr": 10 * lr}  # `scale` has no effect with adapters
    return {**optimizer, "scale": False}


def default_batch(
    loaded: Any,
    given: dict[str, Any],
    tokens: int,
    step_tokens: int,
    steps_per_epoch: int,
    sequence_length: int,
    processes: int,
) -> dict[str, int]:
    """Return the default batch sizes. They do not grow with the GPUs, since most fine-tuning data is small.

    Args:
        tokens: Tokens of the training data.
        step_tokens: Maximum tokens of a step; fewer, if an epoch would otherwise have fewer than `steps_per_epoch`
            steps. Each process has at least one row of a step, and a power of two of them.
        sequence_length: See `row_length`.
        processes: Number of processes, which share the rows of a step.
    """
    length = row_length(loaded, given, sequence_length)
    rows = max(1, min(step_tokens, tokens // steps_per_epoch) // (length * processes))
    rows = 2 ** (rows.bit_length() - 1)  # rounded down to a power of two
    return {"sequence_length": length, "tokens": processes * int(rows) * length}


def row_length(loaded: Any, given: dict[str, Any], default: int) -> int:
    """Return batch.sequence_length if it is given, else `default` or the model's context if that is shorter.

    Raises UsageError if it is not a positive integer.
    """
    length = given.get("batch", {}).get(
        "sequence_length", min(default, loaded.config.max_position_embeddings)
    )
    try:
        return BatchConfig(sequence_length=length, tokens=length).sequence_length
    except ValidationError as error:
        raise UsageError(f"batch.{first_problem(error)}") from None
