"""Reading a run's checkpoints: listing, verification, and loading of weights.

A checkpoint is a folder `step-000001000` whose manifest.json has the size and the checksum (XXH3-128) of every
other file. `deskside/weights/checkpoint.py` writes them and explains the design.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from deskside.utils.errors import RunError
from deskside.utils.files import fingerprint
from deskside.utils.parsing import json_value

NAME = re.compile(r"step-(\d{9})")
WEIGHTS, OPTIMIZER, STATE = "model.safetensors", "optimizer.safetensors", "state.json"
SHARDED, MANIFEST = "sharded", "manifest.json"
PICKLED = ".metadata"  # written by versions before 2026-11-22, in torch.distributed.checkpoint's own format
SCHEMA_VERSION = 1


T = TypeVar("T")


@dataclass(frozen=True)
class Checkpoint:
    """A complete checkpoint on disk."""

    path: Path
    step: int

    @property
    def sharded(self) -> bool:
        """Return whether the tensors are in shards, in a folder of their own (weights/sharded_files.py)."""
        return (self.path / SHARDED).is_dir()


class Damaged(Exception):
    """A checkpoint whose files do not match its manifest. The message names the file and the difference."""


def folder_name(step: int) -> str:
    """Return step-000001000 for step 1000."""
    return f"step-{step:09d}"


def find(folder: Path) -> list[Checkpoint]:
    """Return the complete checkpoints, newest first."""
    found = []
    for entry in folder.iterdir() if folder.is_dir() else ():
        match = NAME.fullmatch(entry.name)
        if match and entry.is_dir():
            found.append(Checkpoint(entry, int(match[1])))
    return sorted(found, key=lambda c: c.step, reverse=True)


def newest_readable(
    folder: Path, read: Callable[[Checkpoint], T], warn: Callable[[str], None]
) -> tuple[Checkpoint, T] | None:
    """Return the newest checkpoint that `read` does not find Damaged, and its result. Damaged ones go to `warn`."""
    for checkpoint in find(folder):
        try:
            return checkpoint, read(checkpoint)
        except Damaged as damage:
            warn(f"checkpoint of step {checkpoint.step} is not used: {damage}")
    return None


def verify(checkpoint: Checkpoint, weights_only: bool = False) -> None:
    """Check size and checksum of every file, or only of those with weights, against the manifest.

    Raises Damaged if one differs, and RunError for the old sharded format.
    """
    refuse_pickle(checkpoint)
    path = checkpoint.path
    try:
        manifest = json_value((path / MANIFEST).read_bytes())
        version = manifest["schema_version"]
        listed = {name: (entry["bytes"], entry["xxh3_128"]) for name, entry in manifest["files"].items()}
    except OSError as error:
        raise Damaged(f"{path / MANIFEST} cannot be read ({error.strerror})") from None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise Damaged(f"{path / MANIFEST} is damaged ({type(error).__name__}: {error})") from None
    if version != SCHEMA_VERSION:
        raise Damaged(f"{path / MANIFEST} has schema version {version}; this deskside reads {SCHEMA_VERSION}")
    if unlisted := {str(p.relative_to(path)) for p in files_of(path)} - listed.keys() - {MANIFEST}:
        raise Damaged(f"{path / MANIFEST} is damaged: it does not list {min(unlisted)}")
    if weights_only:
        listed = {n: v for n, v in listed.items() if n == WEIGHTS or n.startswith(f"{SHARDED}/")}
        if not listed:
            raise Damaged(f"{path / MANIFEST} lists no weights")
    for name, expected in listed.items():
        try:
            found = fingerprint(path / name)
        except (OSError, ValueError) as error:  # a flipped bit can make a file name invalid
            raise Damaged(f"{path / name} cannot be read ({error})") from None
        for what, is_, should in zip(("bytes", "xxh3_128"), found, expected, strict=True):
            if is_ != should:
                raise Damaged(f"{path / name} is damaged: {what} {is_}, expected {should}")


def refuse_pickle(checkpoint: Checkpoint) -> None:
    """Raise RunError for the old sharded format, whose metadata is a pickle and may execute any code."""
    old = checkpoint.path / SHARDED / PICKLED
    if old.exists():
        raise RunError(
            f"{old}: this checkpoint is in the sharded format of deskside before 2026-11-22, a pickle, which can run "
            f"code when it is read, so it is not read; if you trust it, export it with the version that wrote it "
            f"(deskside export RUN --to hf --out DIR) and continue from its weights with: deskside train --init DIR"
        )


def files_of(folder: Path) -> list[Path]:
    """Return every file of a checkpoint, sorted by name."""
    return sorted(p for p in folder.rglob("*") if p.is_file())


def load_file_into(
    model: nn.Module, checkpoint: Checkpoint, device: torch.device | str, trained_only: bool = False
) -> None:
    """Load the weights of an unsharded checkpoint. Raises Damaged, or RunError if they do not fit the model."""
    file = checkpoint.path / WEIGHTS
    try:
        tensors = load_file(file, device=str(device))
    except (SafetensorError, OSError) as error:
        raise Damaged(f"{file} cannot be read ({error})") from None
    try:
        load_weights(model, tensors, trained_only)
    except RunError as error:
        raise RunError(f"{checkpoint.path}: {error}") from None


@torch.no_grad()
def load_weights(model: nn.Module, tensors: dict[str, Tensor], trained_only: bool = False) -> None:
    """Copy tensors into a model's parameters by name.

    trained_only: into trainable parameters only. Raises RunError if names or shapes differ.
    """
    own = {n: p for n, p in model.named_parameters() if p.requires_grad or not trained_only}
    if own.keys() != tensors.keys():
        odd = min(own.keys() ^ tensors.keys())
        raise RunError(f"these weights belong to another architecture: only one of both has '{odd}'")
    for name, parameter in own.items():
        if parameter.shape != tensors[name].shape:
            raise RunError(
                f"these weights belong to another architecture: '{name}' is {tuple(tensors[name].shape)}, "
                f"{tuple(parameter.shape)} is needed"
            )
        parameter.copy_(tensors[name])
