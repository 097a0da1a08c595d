"""Training defaults of fine-tuning: learning rate, optimizer, length of a row and tokens per step."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from pydantic import ValidationError

from deskside.config.base import first_problem
from deskside.config.optim import MuonConfig
from deskside.config.schedule import WsdConfig
from deskside.config.sections import BatchConfig
from deskside.utils.errors import UsageError

LR_TIMES_WIDTH = 1e-4 * 768  # see `default_optimizer`
ADAPTER_LR_FACTOR = 10
OPTIM: dict[str, Any] = {"name": "adamw", "betas": [0.9, 0.95], "weight_decay": 0.0}
CHECKPOINT = {"every": "10m"}
# Configuration of every fine-tuning run: examples in one row do not attend to each other.
DOCUMENT_MASK: dict[str, Any] = {"data": {"document_mask": True}}


@dataclass(frozen=True)
class FinetuneDefaults:
    """Training defaults of an objective, apart from the batch.

    Attributes:
        batch: How the batch is chosen, for the help: key of `batch` -> text.
        lr_factor: Factor on the learning rate of supervised fine-tuning (`default_optimizer`).
        epochs: Length of a run, in passes over the data.
        more: Further configuration, as a nested dict.
    """

    batch: Mapping[str, str]
    lr_factor: float
    warmup: float
    final_lr_fraction: float
    epochs: int = 1
    more: dict[str, Any] = field(default_factory=dict)

    def layer(self, hidden_size: int, given: dict[str, Any]) -> dict[str, Any]:
        """Return the configuration layer of these defaults for a model of this width, without the batch."""
        optim = default_optimizer(hidden_size, given)
        if "lr" in optim:
            optim["lr"] *= self.lr_factor
        schedule: dict[str, Any] = {"warmup": self.warmup}
        if given.get("schedule", {}).get("name", "cosine") == "cosine":
            schedule |= {"name": "cosine", "final_lr_fraction": self.final_lr_fraction}
        return {**DOCUMENT_MASK, "optim": optim, "schedule": schedule, "checkpoint": CHECKPOINT, **self.more}

    def help_texts(self) -> dict[str, str]:
        """Return the defaults as the help states them: option or configuration key -> text."""
        muon, lr = MuonConfig(), LR_TIMES_WIDTH * self.lr_factor
        texts = {
            "epochs": str(self.epochs),
            "optim.lr": f"{lr:g} / width of the model, which is {lr / 768:g} at 768; {ADAPTER_LR_FACTOR} times as much "
            f"with adapters; muon: {muon.lr:g}",
            "optim.embedding_lr": f"that of --optim.lr; muon: {muon.embedding_lr:g}",
            "optim.head_lr": f"that of --optim.lr; muon: {muon.head_lr:g}",
            "optim.name": OPTIM["name"],
            "optim.weight_decay": f"{OPTIM['weight_decay']:g}; muon: {muon.weight_decay:g}",
            "optim.scale": f"false; muon: {str(muon.scale).lower()}",
            "schedule.name": "cosine",
            "schedule.warmup": f"{self.warmup:g}",
            "schedule.final_lr_fraction": f"cosine: {self.final_lr_fraction:g}; wsd: {WsdConfig().final_lr_fraction:g}",
            "data.document_mask": "true",
            "checkpoint.every": CHECKPOINT["every"],
            **{f"batch.{key}": text for key, text in self.batch.items()},
        }
        for part, values in self.more.items():
            texts |= {f"{part}.{key}": f"{value:g}" for key, value in values.items()}
        return texts


def default_optimizer(hidden_size: int, given: dict[str, Any]) -> dict[str, Any]:
    """Return the default optimizer options: AdamW without weight decay, unless Muon is given.

    `optim.scale` is off, since the scaling rules hold for training from random weights. The learning rate is 1e-4 at a
    width of 768 and inversely proportional to the width, like Adam's best rate (Yang et al. 2022, arXiv 2203.03466); at
    4096 this is the usual 2e-5. For adapters it is ten times as large (Schulman et al. 2025, "LoRA Without Regret").
    """
    if given.get("optim", {}).get("name") == "muon":
        return {"name": "muon"}
    optimizer = {**OPTIM, "lr": LR_TIMES_WIDTH / hidden_size}
    if "adapter" in given:
        return {**optimizer, "lr": ADAPTER_LR_FACTOR * optimizer["lr"]}  # `scale` has no effect with adapters
    return {**optimizer, "scale": False}


@dataclass(frozen=True)
class StepSize:
    """Default size of a step.

    tokens: maximum tokens of a step; fewer, if an epoch would otherwise have fewer than `per_epoch` steps.
    sequence_length: see `row_length`.
    """

    tokens: int
    per_epoch: int
    sequence_length: int


def batch_help(step: StepSize) -> dict[str, str]:
    """Return the help texts of `default_batch`."""
    return {
        "tokens": f"up to {step.tokens}, with at least {step.per_epoch} steps per epoch",
        "sequence_length": f"{step.sequence_length}, or the model's context if that is shorter",
    }


def default_batch(
    loaded: Any, given: dict[str, Any], tokens: int, step: StepSize, processes: int
) -> dict[str, int]:
    """Return the default batch sizes. They do not grow with the GPUs, since most fine-tuning data is small.

    Each process has at least one row of a step, and a power of two of them.

    Args:
        tokens: Tokens of the training data.
        processes: Number of processes, which share the rows of a step.
    """
    length = row_length(loaded, given, step.sequence_length)
    rows = max(1, min(step.tokens, tokens // step.per_epoch) // (length * processes))
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
