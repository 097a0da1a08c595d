"""Checkpoints that survive kills, full disks and flipped bits: at most one checkpoint interval is lost.

A checkpoint is a folder `step-000001000` with weights and optimizer state (safetensors, which executes no code on
load), `state.json`, and `manifest.json` with the size and checksum of every other file. It is written under a
temporary name, synced, and then renamed, so a folder with its final name is complete. Loading verifies the
manifest; if a checkpoint is damaged, a warning names it and the next older one is used. If all are damaged, the run
stops, because only the user should decide to start over.

Sharded runs write one set of safetensors files per rank instead (sharded_files.py), in the same folder under the
same manifest.
"""

import contextlib
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from deskside.utils.errors import RunError
from deskside.utils.files import fingerprint, sync
from deskside.utils.parsing import json_value
from deskside.weights.checkpoint_files import (
    MANIFEST,
    OPTIMIZER,
    SCHEMA_VERSION,
    SHARDED,
    STATE,
    WEIGHTS,
    Checkpoint,
    Damaged,
    files_of,
    find,
    folder_name,
    newest_readable,
    verify,
)

SET_ASIDE = "damaged-"
Tensors = dict[str, Tensor]


def save(
    folder: Path, step: int, model: Tensors, optimizer: Tensors, state: dict[str, Any], sharded: bool = False
) -> Checkpoint:
    """Write one checkpoint. Every rank calls this if `sharded`, otherwise rank 0 only.

    Raises RunError on every calling rank if one of them fails to write; older checkpoints are then untouched, and
    there is no folder with the final name.
    """
    temporary, final = folder / f".tmp-{folder_name(step)}", folder / folder_name(step)
    try:
        _by_writer(sharded, lambda: _prepare(folder, temporary))
        if sharded:
            from deskside.weights import sharded_files

            sharded_files.write(temporary / SHARDED, {"model": model, "optimizer": optimizer})
        else:
            save_file({k: v.contiguous() for k, v in model.items()}, temporary / WEIGHTS)
            save_file({k: v.contiguous() for k, v in optimizer.items()}, temporary / OPTIMIZER)
        _by_writer(sharded, lambda: _finish(temporary, final, state))
    except (OSError, SafetensorError) as error:
        free = shutil.disk_usage(folder).free / 2**20
        if not sharded or dist.get_rank() == 0:
            with contextlib.suppress(OSError):
                shutil.rmtree(temporary)
        raise RunError(
            f"checkpoint of step {step} could not be written to {folder} ({error}; {free:.0f} MiB free); "
            f"older checkpoints are untouched"
        ) from None
    return Checkpoint(final, step)


def newest_good(folder: Path, warn: Callable[[str], None]) -> Checkpoint | None:
    """Return the newest checkpoint that verifies, or None if there are no checkpoints. Damaged ones go to `warn`.

    Raises RunError if all checkpoints are damaged.
    """
    newest = newest_readable(folder, verify, warn)
    if newest is None and (found := find(folder)):
        raise RunError(
            f"no checkpoint in {folder} can be used: {', '.join(c.path.name for c in found)} are damaged; restore one "
            f"of them, or start a new run"
        )
    return newest and newest[0]


def set_aside(folder: Path, newer_than: int) -> list[Path]:
    """Rename checkpoints of later steps, which are damaged, so that they neither count as kept nor block new ones.

    Returns the new paths.
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
        raise RunError(f"{path}: does not hold a JSON object; restore it, or delete {checkpoint.path}")
    return state


def load_tensors(checkpoint: Checkpoint, name: str, device: torch.device) -> Tensors:
    """Load WEIGHTS or OPTIMIZER of an unsharded checkpoint."""
    return load_file(checkpoint.path / name, device=str(device))


def load_sharded(checkpoint: Checkpoint, model: Tensors, optimizer: Tensors) -> None:
    """Fill the given (sharded) tensors in place. Every rank calls this."""
    from deskside.weights import sharded_files

    try:
        sharded_files.read(checkpoint, {"model": model, "optimizer": optimizer})
    except Damaged as damage:
        raise RunError(f"{damage}; restore it, or delete {checkpoint.path}") from None


def prune(folder: Path, keep: int, permanent: Callable[[Checkpoint], bool]) -> None:
    """Delete checkpoints beyond the newest `keep`, except those that `permanent` selects."""
    for checkpoint in find(folder)[keep:]:
        if not permanent(checkpoint):
            _delete(checkpoint.path)


def clean(folder: Path) -> None:
    """Remove the leftovers of an interrupted save or deletion."""
    for entry in folder.glob(".tmp-*"):
        shutil.rmtree(entry)


def _by_writer(sharded: bool, work: Callable[[], None]) -> None:
    """Run `work` on rank 0, and raise its OSError on every rank, so that no rank waits for a failed one."""
    if not sharded:
        work()
        return
    error: list[OSError | None] = [None]
    if dist.get_rank() == 0:
        try:
            work()
        except OSError as raised:
            error = [raised]
    dist.broadcast_object_list(error, src=0)
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
    # Renamed first: a kill during the deletion must not leave an incomplete checkpoint with its final name.
    doomed = path.with_name(f".tmp-old-{path.name}")
    os.replace(path, doomed)
    shutil.rmtree(doomed)
