"""Suggestions for unknown options and commands: "did you mean --optim.lr?"."""

import difflib
from collections.abc import Mapping, Sequence
from typing import Any

# Option names of other programs -> ours. Errors suggest ours; the names of other programs are not accepted.
SYNONYMS = {
    "learning-rate": "optim.lr",
    "optimizer": "optim.name",
    "max-steps": "steps",
    "num-steps": "steps",
    "iterations": "steps",
    "num-train-epochs": "epochs",
    "batch-size": "batch.tokens",
    "seq-len": "batch.sequence-length",
    "max-length": "batch.sequence-length",
    "context-length": "batch.sequence-length",
    "dtype": "precision.name",
    "fp8": "precision.name",
    "bf16": "precision.name",
    "gradient-checkpointing": "compute.activation-checkpointing",
    "lora-rank": "adapter.rank",
    "lora-r": "adapter.rank",
    "output-dir": "out",
    "dataset": "data",
    "model-name": "model",
}


def nearest_option(flag: str, known: Sequence[str]) -> str | None:
    """Return the known option that was probably meant, or None.

    It is our name for another program's option, the same key in another part, or a similarly spelled option.
    """
    name = f"--{flag.lstrip('-')}"
    key = name[2:].rsplit(".", 1)[-1]
    synonym = f"--{SYNONYMS.get(key, '')}"
    same_key = [other for other in known if other[2:].rsplit(".", 1)[-1] == key]
    if synonym in known:
        return synonym
    if len(same_key) == 1:
        return same_key[0]
    return next(iter(difflib.get_close_matches(name, known, n=1, cutoff=0.7)), None)


def command_hint(unknown: str, names: Mapping[str, Any]) -> str:
    """Return a hint for an unknown command: the most similar name, or all names."""
    similar = difflib.get_close_matches(unknown, names, n=1)
    return f"did you mean {similar[0]}?" if similar else f"commands are {', '.join(names)}"
