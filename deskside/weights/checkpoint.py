"""Checkpoints that are written atomically, and verified before they are loaded.

A checkpoint is a folder `step-000001000` with weights, optimizer state and, if the run averages its weights, their
average (safetensors, which executes no code on load), `state.json`, and `manifest.json` with the size and checksum of
every other file. It is written under a temporary name, synced, and then renamed, so a folder with its final name is
complete. `verify` compares the files with the manifest. If a checkpoint is damaged, a warning names it and the next
older one is used. If all are damaged, the run stops, because only the user should decide to start over.

Sharded runs write one set of safetensors files per rank instead (sharded_files.py), in the same folder under the
same manifest.
"""

import contextlib
import json
import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal, TypeVar

import torch
import torch.distributed as dist
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from deskside.utils.errors import RunError, UsageError
from deskside.utils.files import fingerprint, sync
from deskside.utils.parsing import json_value
from deskside.weights.checkpoint_folder import (
    AVERAGE,
    MANIFEST,
    SHARDED,
    STATE,
    WEIGHTS,
    Checkpoint,
    Damaged,
    files_of,
    find,
    folder_name,
    refuse_pickle,
)

SCHEMA_VERSION = 1
SET_ASIDE = "damaged-"  # prefix of the names that `set_aside` gives
Tensors = dict[str, Tensor]
Weights = Literal["raw", "averaged"]  # of the checkpoint's step, or averaged over steps
T = TypeVar("T")


def newest_readable(
    folder: Path, read: Callable[[Checkpoint], T], warn: Callable[[str], None]
) -> tuple[Checkpoint, T] | None:
    """Return the newest checkpoint for which `read` does not raise Damaged, and the result of `read`, or None.

    `warn` is called with a sentence about each damaged checkpoint.
    """
    for checkpoint in find(folder):
        try:
            return checkpoint, read(checkpoint)
        except Damaged as damage:
            warn(f"checkpoint of step {checkpoint.step} is not used: {damage}")
    return None


def verify(checkpoint: Checkpoint) -> None:
    """Check size and checksum of every file against the manifest.

    Raises Damaged if a file differs, is missing or is not listed, and RunError for the old sharded format.
    """
    _compare(checkpoint, _listed_files(checkpoint))


def verify_weights(checkpoint: Checkpoint, weights: Weights | None = None) -> None:
    """Check the files of the weights like `verify`. weights: "raw" leaves out a file of their average.

    Shards hold everything, so all of them are checked.
    """
    names = (WEIGHTS,) if weights == "raw" else (WEIGHTS, AVERAGE)
    listed = {
        name: entry
        for name, entry in _listed_files(checkpoint).items()
        if name in names or name.startswith(f"{SHARDED}/")
    }
    if not listed:
        raise Damaged(f"{checkpoint.path / MANIFEST} lists no weights")
    _compare(checkpoint, listed)


def _listed_files(checkpoint: Checkpoint) -> dict[str, tuple[int, str]]:
    """Return (bytes, checksum) of every file by name, as the manifest lists them. Raises as `verify`."""
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
        raise Damaged(
            f"{path / MANIFEST} has schema version {version}; this version of deskside reads {SCHEMA_VERSION}"
        )
    if unlisted := {str(p.relative_to(path)) for p in files_of(path)} - listed.keys() - {MANIFEST}:
        raise Damaged(f"{path / MANIFEST} is damaged: it does not list {min(unlisted)}")
    return listed


def _compare(checkpoint: Checkpoint, listed: Mapping[str, tuple[int, str]]) -> None:
    """Raise Damaged if a listed file is missing or differs from its (bytes, checksum)."""
    for name, expected in listed.items():
        path = checkpoint.path / name
        try:
            found = fingerprint(path)
        except (OSError, ValueError) as error:  # a flipped bit can make a file name invalid
            raise Damaged(f"{path} cannot be read ({error})") from None
        for key, actual, wanted in zip(("bytes", "xxh3_128"), found, expected, strict=True):
            if actual != wanted:
                raise Damaged(f"{path} is damaged: {key} {actual}, expected {wanted}")


def averaged(checkpoint: Checkpoint, weights: Weights | None) -> bool:
    """Return True if the average of the weights is to be loaded instead of those of the checkpoint's step.

    weights: None: the average if there is one. Raises UsageError if "averaged" is asked for and there is none.
    """
    if weights == "raw":
        return False
    if checkpoint.sharded:
        exists = load_state(checkpoint).get("average") is not None
    else:
        exists = (checkpoint.path / AVERAGE).is_file()
    if weights == "averaged" and not exists:
        raise UsageError(
            f"--weights averaged: {checkpoint.path} has no average of the weights; leave it out, or train with "
            "--average.name ema"
        )
    return exists


def load_file_into(
    model: nn.Module,
    checkpoint: Checkpoint,
    device: torch.device | str,
    trainable_only: bool = False,
    weights: Weights | None = None,
) -> None:
    """Load the weights of an unsharded checkpoint into a model. Raises Damaged, or RunError if they do not fit.

    trainable_only: the checkpoint contains the trainable parameters only. weights: as in `averaged`.
    """
    file = checkpoint.path / (AVERAGE if averaged(checkpoint, weights) else WEIGHTS)
    try:
        tensors = load_file(file, device=str(device))
    except (SafetensorError, OSError) as error:
        raise Damaged(f"{file} cannot be read ({error})") from None
    try:
        load_weights(model, tensors, trainable_only)
    except RunError as error:
        raise RunError(f"{checkpoint.path}: {error}") from None


@torch.no_grad()
def load_weights(model: nn.Module, tensors: dict[str, Tensor], trainable_only: bool = False) -> None:
    """Copy tensors into a model's parameters by name.

    trainable_only: into trainable parameters only. Raises RunError if names or shapes differ.
    """
    parameters = {n: p for n, p in model.named_parameters() if p.requires_grad or not trainable_only}
    check_match(parameters, tensors)
    for name, parameter in parameters.items():
        parameter.copy_(tensors[name])


def check_match(parameters: Mapping[str, Tensor], weights: Mapping[str, Tensor]) -> None:
    """Raise RunError if the names or shapes of `weights` are not those of a model's parameters."""
    if parameters.keys() != weights.keys():
        unmatched = min(parameters.keys() ^ weights.keys())
        raise RunError(
            f"these weights belong to another architecture: only one of weights and model has '{unmatched}'"
        )
    for name, parameter in parameters.items():
        if parameter.shape != weights[name].shape:
            raise RunError(
                f"these weights belong to another architecture: '{name}' is {tuple(weights[name].shape)}, "
                f"{tuple(parameter.shape)} is needed"
            )


def save(
    folder: Path,
    step: int,
    groups: Mapping[str, Tensors],
    state: dict[str, Any],
    sharded: bool = False,
    group: "dist.ProcessGroup | None" = None,
) -> Checkpoint:
    """Write one checkpoint. Every rank calls this if `sharded`, otherwise rank 0 only.

    groups: the tensors by group: model, optimizer and, if there is one, average. Each is a file of this name.
    group: processes of all ranks for the messages between them; None: the default group. A thread needs its own.
    Raises RunError on every calling rank if one of them fails to write. Older checkpoints are then unchanged.
    """
    temporary, final = folder / f".tmp-{folder_name(step)}", folder / folder_name(step)
    try:
        _on_rank_zero(sharded, group, lambda: _prepare(folder, temporary))
        if sharded:
            from deskside.weights import sharded_files

            sharded_files.write(temporary / SHARDED, groups, group)
        else:
            for name, tensors in groups.items():
                save_file({k: v.contiguous() for k, v in tensors.items()}, temporary / f"{name}.safetensors")
        _on_rank_zero(sharded, group, lambda: _finish(temporary, final, state))
    except (OSError, SafetensorError) as error:
        free = shutil.disk_usage(folder if folder.exists() else folder.parent).free / 2**20
        if not sharded or dist.get_rank() == 0:
            with contextlib.suppress(OSError):
                shutil.rmtree(temporary)
        raise RunError(
            f"checkpoint of step {step} could not be written to {folder} ({error}; {free:.0f} MiB free); "
            f"older checkpoints are untouched"
        ) from None
    return Checkpoint(final, step)


def newest_good(folder: Path, warn: Callable[[str], None]) -> Checkpoint | None:
    """Return the newest undamaged checkpoint, or None if there are no checkpoints.

    `warn` is called with a sentence about each damaged checkpoint. Raises RunError if all are damaged, or for the old
    sharded format.
    """
    newest = newest_readable(folder, verify, warn)
    if newest is None and (found := find(folder)):
        raise RunError(
            f"no checkpoint in {folder} can be used: {', '.join(c.path.name for c in found)} are damaged; restore one "
            f"of them, or start a new run"
        )
    return newest and newest[0]


def set_aside(folder: Path, newer_than: int) -> list[Path]:
    """Rename the checkpoints of later steps, which the caller found damaged. Returns the new paths.

    Under their old names, they would count as checkpoints to keep and would be in the way of new ones.
    """
    moved = []
    for checkpoint in find(folder):
        if checkpoint.step > newer_than:
            target = folder / f"{SET_ASIDE}{checkpoint.path.name}"
            if target.exists():
                shutil.rmtree(target)
            os.replace(checkpoint.path, target)
            moved.append(target)
    return moved


def load_state(checkpoint: Checkpoint) -> dict[str, Any]:
    """Return the JSON state of a checkpoint. Raises RunError if it cannot be read."""
    path = checkpoint.path / STATE
    try:
        state = json_value(path.read_bytes())
    except (OSError, ValueError) as error:
        raise RunError(f"{path}: cannot be read ({error}); restore it, or delete {checkpoint.path}") from None
    if not isinstance(state, dict):
        raise RunError(f"{path}: does not contain a JSON object; restore it, or delete {checkpoint.path}")
    return state


def load_tensors(checkpoint: Checkpoint, name: str, device: torch.device) -> Tensors:
    """Load WEIGHTS, OPTIMIZER or AVERAGE of an unsharded checkpoint."""
    return load_file(checkpoint.path / name, device=str(device))


def load_sharded(checkpoint: Checkpoint, groups: Mapping[str, Tensors]) -> None:
    """Load a sharded checkpoint into the given (sharded) tensors in place, by group. Every rank calls this."""
    from deskside.weights import sharded_files

    try:
        sharded_files.read(checkpoint, groups)
    except Damaged as damage:
        raise RunError(f"{damage}; restore it, or delete {checkpoint.path}") from None


def prune(folder: Path, keep: int, permanent: Callable[[Checkpoint], bool]) -> None:
    """Delete checkpoints beyond the newest `keep`, except those that `permanent` selects."""
    for checkpoint in find(folder)[keep:]:
        if not permanent(checkpoint):
            _delete(checkpoint.path)


def delete_newer(folder: Path, step: int) -> None:
    """Delete the checkpoints after `step`, the newest first."""
    for checkpoint in find(folder):
        if checkpoint.step > step:
            _delete(checkpoint.path)


def clean(folder: Path) -> None:
    """Remove the leftovers of an interrupted save or deletion."""
    for entry in folder.glob(".tmp-*"):
        shutil.rmtree(entry)


def _on_rank_zero(sharded: bool, group: "dist.ProcessGroup | None", work: Callable[[], None]) -> None:
    """Run `work` on rank 0, the only caller if not `sharded`.

    Every calling rank raises its OSError, so that none waits forever.
    """
    if not sharded:
        work()
        return
    error: list[OSError | None] = [None]
    if dist.get_rank() == 0:
        try:
            work()
        except OSError as raised:
            error = [raised]
    dist.broadcast_object_list(error, src=0, group=group)
    if error[0] is not None:
        raise error[0]


def _prepare(folder: Path, temporary: Path) -> None:
    clean(folder)
    temporary.mkdir(parents=True)


def _finish(temporary: Path, final: Path, state: dict[str, Any]) -> None:
    """Write state and manifest, sync everything, and rename the folder to its final name."""
    (temporary / STATE).write_text(json.dumps(state), "utf-8")
    files = files_of(temporary)
    listing = {
        str(p.relative_to(temporary)): dict(zip(("bytes", "xxh3_128"), fingerprint(p), strict=True))
        for p in files
    }
    manifest = {"schema_version": SCHEMA_VERSION, "files": listing}
    (temporary / MANIFEST).write_text(json.dumps(manifest, indent=1), "utf-8")
    for path in [*files, temporary / MANIFEST, *{p.parent for p in files}]:
        sync(path)
    if final.exists():
        _delete(final)
    os.replace(temporary, final)
    sync(final.parent)


def _delete(path: Path) -> None:
    # Renamed first, because a kill during the deletion must not leave an incomplete checkpoint with its final name.
    temporary = path.with_name(f".tmp-old-{path.name}")
    os.replace(path, temporary)
    shutil.rmtree(temporary)
