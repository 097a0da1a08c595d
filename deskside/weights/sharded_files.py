"""Sharded tensors of a checkpoint: torch.distributed.checkpoint with safetensors files.

Every rank writes its own shards. The header of a file contains the names of its tensors and the offsets of their
shards. Loading executes no code, and the number of processes may differ between saving and loading.
"""

import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch.distributed.checkpoint as dcp
from safetensors import SafetensorError
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.checkpoint import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.tensor import DTensor

from deskside.utils.errors import RunError
from deskside.weights.checkpoint_folder import SHARDED, Checkpoint, Damaged, refuse_pickle

FILE_BYTES = 2**29  # a file is assembled in host memory before it is written, so files must be small

Groups = Mapping[str, Mapping[str, Tensor]]


def write(folder: Path, groups: Groups, process_group: ProcessGroup | None = None) -> None:
    """Write the shards of this rank. Every rank calls this. process_group: of all ranks; None: the default one.

    Raises OSError, on every rank, with the error of the lowest rank that failed.
    """
    files = _files({f"{group}.{name}": t for group, tensors in groups.items() for name, t in tensors.items()})
    writer = HuggingFaceStorageWriter(str(folder), fqn_to_index_mapping=files, save_distributed=True)
    try:
        dcp.save(dict(groups), storage_writer=writer, process_group=process_group, no_dist=False)
    except CheckpointException as error:
        raise OSError(str(_first(error))) from None


def read(checkpoint: Checkpoint, groups: Groups, no_dist: bool = False) -> None:
    """Read a checkpoint into the given tensors, sharded or whole, in place.

    Every rank calls this, or a single process if `no_dist` is True. Raises Damaged if the files cannot be read or lack
    parts of tensors, and RunError if a tensor is missing or has another shape, or for the old format, a pickle.
    """
    refuse_pickle(checkpoint)
    folder = checkpoint.path / SHARDED
    reader = HuggingFaceStorageReader(str(folder))
    try:
        stored = reader.read_metadata().state_dict_metadata
    except (
        OSError,
        SafetensorError,
        ValueError,
        KeyError,
        TypeError,
        AttributeError,
        RecursionError,  # raised by torch's parser for deeply nested headers
    ) as error:
        raise Damaged(f"{folder} cannot be read ({type(error).__name__}: {error})") from None
    for group, tensors in groups.items():
        for name, tensor in tensors.items():
            _check(folder, f"{group}.{name}", tensor, stored)
    try:
        # torch warns if a single process reads the shards of many, which is fine.
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled")
            dcp.load(dict(groups), storage_reader=reader, no_dist=no_dist)
    except CheckpointException as error:
        raise Damaged(f"{folder} cannot be read ({_first(error)})") from None


def _check(folder: Path, name: str, tensor: Tensor, stored: Mapping[str, Any]) -> None:
    """Raise RunError if a stored tensor is missing or has a different shape, and Damaged if it is incomplete."""
    metadata = stored.get(name)
    if not isinstance(metadata, TensorStorageMetadata):
        raise RunError(
            f"{folder}: these tensors belong to another architecture or optimizer: '{name}' is missing"
        )
    if metadata.size != tensor.shape:
        raise RunError(
            f"{folder}: these tensors belong to another architecture or optimizer: '{name}' is {tuple(metadata.size)}, "
            f"{tuple(tensor.shape)} is needed"
        )
    elements = sum(chunk.sizes.numel() for chunk in metadata.chunks)
    if elements != metadata.size.numel():
        raise Damaged(f"{folder} holds {elements:,} of the {metadata.size.numel():,} elements of '{name}'")


def _files(tensors: Mapping[str, Tensor]) -> dict[str, int]:
    """Assign tensors to numbered files of about FILE_BYTES each."""
    result, number, size = {}, 1, 0
    for name, tensor in tensors.items():
        if size >= FILE_BYTES:
            number, size = number + 1, 0
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        size += local.numel() * local.element_size()
        result[name] = number
    return result


def _first(error: CheckpointException) -> Exception:
    """Return the exception of the lowest rank that failed. A KeyboardInterrupt is raised instead of returned."""
    _, (first, _) = min(error.failures.items(), key=lambda failure: failure[0])
    if not isinstance(first, Exception):
        raise first from None
    return first
