"""The folder of a checkpoint: its name, its files, and the checkpoints of a run."""

import re
from dataclasses import dataclass
from pathlib import Path

from deskside.utils.errors import RunError

CHECKPOINT_NAME = re.compile(r"step-(\d{9})")
WEIGHTS, OPTIMIZER, STATE = "model.safetensors", "optimizer.safetensors", "state.json"
AVERAGE = "average.safetensors"  # absent without an average of the weights
SHARDED, MANIFEST = "sharded", "manifest.json"
PICKLED = ".metadata"  # written by versions before 2026-11-22, in the default format of torch.distributed.checkpoint


@dataclass(frozen=True)
class Checkpoint:
    """A complete checkpoint on disk."""

    path: Path
    step: int

    @property
    def sharded(self) -> bool:
        """True if the tensors are in shards, in the folder SHARDED (weights/sharded_files.py)."""
        return (self.path / SHARDED).is_dir()


class Damaged(Exception):
    """A checkpoint is damaged, or of an unknown version. The message names the file and the problem."""


def folder_name(step: int) -> str:
    """Return the name of a checkpoint's folder: step-000001000 for step 1000."""
    return f"step-{step:09d}"


def find(folder: Path) -> list[Checkpoint]:
    """Return the complete checkpoints, newest first."""
    found = []
    for entry in folder.iterdir() if folder.is_dir() else ():
        match = CHECKPOINT_NAME.fullmatch(entry.name)
        if match and entry.is_dir():
            found.append(Checkpoint(entry, int(match[1])))
    return sorted(found, key=lambda c: c.step, reverse=True)


def refuse_pickle(checkpoint: Checkpoint) -> None:
    """Raise RunError for the old sharded format, whose metadata is a pickle and may execute any code."""
    old = checkpoint.path / SHARDED / PICKLED
    if old.exists():
        raise RunError(
            f"{old}: this checkpoint has the sharded format of deskside before 2026-11-22, which is a pickle and can "
            f"run code when it is read, so it is not read; if you trust it, export it with the version that wrote it "
            f"(deskside export RUN --to hf --out DIR) and continue from its weights with: deskside train --init DIR"
        )


def files_of(folder: Path) -> list[Path]:
    """Return every file of a checkpoint, sorted by name."""
    return sorted(p for p in folder.rglob("*") if p.is_file())
