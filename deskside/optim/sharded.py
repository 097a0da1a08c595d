"""Helpers of the optimizers for DTensor, the sharded tensor of FSDP2 (torch.distributed.tensor)."""

import sys
from typing import TYPE_CHECKING, TypeGuard

import torch
from torch import Tensor

from deskside.optim.groups import ParameterInfo
from deskside.utils.errors import RunError

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor, Placement


def is_sharded(tensor: object) -> TypeGuard["DTensor"]:
    """Return True if this is a DTensor.

    Does not import torch.distributed.tensor, which takes a second. While it is not imported, there are no DTensors.
    """
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def local(tensor: Tensor) -> Tensor:
    """Return this rank's part of a sharded tensor, without a copy, or any other tensor unchanged."""
    return tensor.to_local() if is_sharded(tensor) else tensor


def gradient_of(info: ParameterInfo) -> Tensor:
    """Return the gradient of a parameter. Raises RunError if there is none: it may be unused by mistake."""
    if info.parameter.grad is None:
        raise no_gradient(info.name)
    return info.parameter.grad


def no_gradient(name: str) -> RunError:
    """Return the error for a parameter without a gradient."""
    return RunError(
        f"parameter '{name}' has no gradient; if this is intended, freeze it (requires_grad = False)"
    )


def sum_over_shards(partial: Tensor, like: "DTensor") -> Tensor:
    """Sum over all shards of `like` a scalar that each rank has computed from its own, without a host sync."""
    from torch.distributed.tensor import DTensor, Partial, Replicate

    placements: list[Placement] = [Partial() if p.is_shard() else Replicate() for p in like.placements]
    return DTensor.from_local(partial, like.device_mesh, placements, run_check=False).full_tensor()


def gather_full(shard: Tensor, like: "DTensor") -> Tensor:
    """Return the whole tensor, gathered from the shards of all ranks, which are sharded like `like`."""
    from torch.distributed.tensor import DTensor

    whole = DTensor.from_local(
        shard, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
    )
    return whole.full_tensor()


def first_row(like: "DTensor") -> int:
    """Return the first row of this rank's shard. Raises RunError if the tensor is sharded along another dimension."""
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    if any(p.is_shard() and not p.is_shard(0) for p in like.placements):
        raise RunError(f"Muon supports weights sharded along dimension 0 only, not {like.placements}")
    _, offset = compute_local_shape_and_global_offset(like.shape, like.device_mesh, like.placements)
    return offset[0]


def sum_of_squares(tensors: list[Tensor]) -> Tensor:
    """Return the sum of the squares of all elements, as a float32 scalar on the device."""
    norms = torch._foreach_norm(tensors, 2, dtype=torch.float32)
    return torch.stack(norms).square().sum()
