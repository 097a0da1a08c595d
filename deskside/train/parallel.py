"""More than one process: replicas whose gradients are summed, or FSDP2 shards.

Gradients of replicas are summed in fixed buckets of fixed order after the last micro-batch. torch's DDP would overlap
that with the backward pass, but it regroups its buckets after the first step, so the order of a sum, and with it the
last bits, would differ between a run and its resumed twin.

The loss of every process is already divided by the valid tokens of all processes, so gradients are summed, not
averaged.
"""

import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from deskside.utils.errors import UsageError

BUCKET_ELEMENTS = 32 * 2**20


@dataclass(frozen=True)
class World:
    """Rank, size and device of this process. A world of size 1 has no process group."""

    device: torch.device
    rank: int = 0
    size: int = 1
    sharded: bool = False

    @property
    def first(self) -> bool:
        """True on rank 0, which writes the run directory."""
        return self.rank == 0

    def agreed(self, numbers: Sequence[float]) -> list[float]:
        """Return rank 0's numbers on every rank."""
        if self.size == 1:
            return list(numbers)
        values = torch.tensor(numbers, dtype=torch.float64)
        dist.broadcast(values, src=0)
        return values.tolist()

    def shared(self, make: Callable[[], Any]) -> Any:
        """Return rank 0's result of `make` on every rank. For choices that depend on timing or on a device check."""
        if self.size == 1:
            return make()
        box = [make() if self.first else None]
        dist.broadcast_object_list(box, src=0)
        return box[0]

    def smallest(self, number: int) -> int:
        """Return the minimum over all ranks."""
        if self.size == 1:
            return number
        value = torch.tensor(number, dtype=torch.int64)
        dist.all_reduce(value, op=dist.ReduceOp.MIN)
        return int(value)

    def summed(self, values: Tensor) -> Tensor:
        """Sum over all ranks, in place."""
        if self.size > 1:
            dist.all_reduce(values)
        return values

    def largest(self, values: Tensor) -> Tensor:
        """Element-wise maximum over all ranks, in place."""
        if self.size > 1:
            dist.all_reduce(values, op=dist.ReduceOp.MAX)
        return values

    def barrier(self) -> None:
        if self.size > 1:
            dist.barrier()


def join(device: str, mode: str) -> World:
    """Join the process group that torchrun's environment describes, if any. Raises UsageError for an impossible one."""
    size = int(os.environ.get("WORLD_SIZE", "1"))
    chosen = device if device != "auto" else ("cuda" if torch.cuda.is_available() else "cpu")
    if chosen == "cuda" and not torch.cuda.is_available():
        raise UsageError(
            "compute.device: cuda was asked for, but torch finds no GPU; use --compute.device cpu"
        )
    if size == 1:
        if mode != "auto":
            raise UsageError(
                f"parallel.mode: {mode} needs more than one process: torchrun --nproc-per-node N -m deskside train ..."
            )
        # With an index, which some of torch's memory functions require.
        return World(
            torch.device("cuda", torch.cuda.current_device()) if chosen == "cuda" else torch.device("cpu")
        )
    local = int(os.environ["LOCAL_RANK"])
    if chosen == "cuda" and local >= torch.cuda.device_count():
        raise UsageError(f"torchrun started more processes than the {torch.cuda.device_count()} GPUs here")
    target = torch.device("cuda", local) if chosen == "cuda" else torch.device("cpu")
    if chosen == "cuda":
        torch.cuda.set_device(target)
    # Small broadcasts use gloo on the CPU, so that they never wait for the GPU.
    dist.init_process_group("cpu:gloo,cuda:nccl" if chosen == "cuda" else "gloo")
    return World(target, dist.get_rank(), dist.get_world_size(), mode == "shard")


def leave(world: World) -> None:
    """End the process group."""
    if world.size > 1:
        dist.destroy_process_group()


def shard(model: nn.Module, blocks: Iterable[nn.Module], methods: Sequence[str], world: World) -> None:
    """Shard a model with FSDP2 over all ranks: each block, then the rest. `methods`: entry points besides forward."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import FSDPModule, fully_shard, register_fsdp_forward_method

    mesh = init_device_mesh(world.device.type, (world.size,))
    for block in blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    for name in methods:
        register_fsdp_forward_method(model, name)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)  # gloo supports sum only


def reshard(model: nn.Module) -> None:
    """Reshard after a pass without backward, which leaves the root's parameters unsharded."""
    from torch.distributed.fsdp import FSDPModule

    if isinstance(model, FSDPModule):
        model.reshard()


def set_last_micro_batch(model: nn.Module, last: bool) -> None:
    """Make FSDP2 reduce gradients once, with the last micro-batch."""
    from torch.distributed.fsdp import FSDPModule

    if isinstance(model, FSDPModule):
        model.set_requires_gradient_sync(last)


def sum_gradients(parameters: Iterable[nn.Parameter], world: World) -> None:
    """Sum the gradients of replicas, in place, in buckets whose order never changes."""
    if world.size == 1 or world.sharded:
        return
    bucket: list[Tensor] = []
    for parameter in parameters:
        if parameter.grad is None:
            raise RuntimeError(
                "a parameter has no gradient on this rank; the ranks would deadlock in the all-reduce"
            )
        bucket.append(parameter.grad)
        if sum(g.numel() for g in bucket) >= BUCKET_ELEMENTS:
            _sum_bucket(bucket)
            bucket = []
    if bucket:
        _sum_bucket(bucket)


def _sum_bucket(gradients: list[Tensor]) -> None:
    flat = torch.cat([g.reshape(-1) for g in gradients])
    dist.all_reduce(flat)
    for gradient, part in zip(gradients, flat.split([g.numel() for g in gradients]), strict=True):
        gradient.copy_(part.view_as(gradient))
