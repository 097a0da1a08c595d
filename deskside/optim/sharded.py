"""The little that optimisers need to know of DTensor, FSDP2's sharded tensor (torch.distributed.tensor)."""

import sys
from typing import TYPE_CHECKING, TypeGuard

import torch
from torch import Tensor

from deskside.optim.groups import ParameterInfo
from deskside.utils.errors import RunError

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor, Placement


def is_sharded(tensor: object) -> TypeGuard["DTensor"]:
    """Return whether it is a DTensor. Does not import torch.distributed.tensor, which takes a second: without that
    import there are no DTensors."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def local(tensor: Tensor) -> Tensor:
    """This rank's part of a sharded tensor, sharing its memory; any other tensor as it is."""
    return tensor.to_local() if is_sharded(tensor) else tensor


def gradient_of(info: ParameterInfo) -> Tensor:
    """The gradient of a parameter. Raises RunError if it has none, because a silent skip would hide a dead weight."""
    if info.parameter.grad is None:
        raise RunError(
            f"parameter '{info.name}' got no gradient; freeze it (requires_grad = False) if that is meant"
        )
    return info.parameter.grad


def sum_over_shards(partial: Tensor, like: "DTensor") -> Tensor:
    """The sum over all ranks of a scalar that each rank computed from its shard of `like`. No host sync."""
    from torch.distributed.tensor import DTensor, Partial, Replicate

    placements: list[Placement] = [Partial() if p.is_shard() else Replicate() for p in like.placements]
    return DTensor.from_local(partial, like.device_mesh, placements, run_check=False).full_tensor()


def full_like(shard: Tensor, like: "DTensor") -> Tensor:
    """The whole tensor from every rank's `shard`, laid out as `like` is."""
    from torch.distributed.tensor import DTensor

    whole = DTensor.from_local(
        shard, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
    )
    return whole.full_tensor()


def first_row(like: "DTensor") -> int:
    """Where this rank's shard begins along dimension 0. Raises RunError for a sharding along another dimension."""
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    if any(p.is_shard() and not p.is_shard(0) for p in like.placements):
        raise RunError(f"Muon handles weights sharded along dimension 0, not {like.placements}")
    _, offset = compute_local_shape_and_global_offset(like.shape, like.device_mesh, like.placements)
    return offset[0]


def sum_of_squares(tensors: list[Tensor]) -> Tensor:
    """The sum of squares of all elements, as a float32 scalar on the device."""
    norms = torch._foreach_norm(tensors, 2, dtype=torch.float32)
    return torch.stack(norms).square().sum()
