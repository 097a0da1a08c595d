"""Several processes: replicas that sum their gradients, parameters sharded with FSDP2, rows shared by a few processes.

Replicas sum their gradients in `loop/gradient_buckets.py`.
"""

import contextlib
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from deskside.kernels.attention import ContextRanks
from deskside.optim.owners import ALONE, Replicas
from deskside.utils.errors import UsageError

NO_LIMIT = timedelta(days=365)  # for a wait that may take hours


@dataclass(frozen=True)
class World:
    """The rank and device of this process, and the collectives over all processes.

    A world of size 1 has no process group. sharded: the model's parameters are sharded with FSDP2. context: the
    processes that share the rows of this one (`parallel.context`), consecutive ranks; None: it has whole rows.
    """

    device: torch.device
    rank: int = 0
    size: int = 1
    sharded: bool = False
    context: ContextRanks | None = None

    @property
    def readers(self) -> int:
        """The number of processes that read different rows; those that share rows count once."""
        return self.size if self.context is None else self.size // self.context.size

    @property
    def reader(self) -> int:
        """The number of this process among the `readers`."""
        return self.rank if self.context is None else self.rank // self.context.size

    @property
    def replicas(self) -> Replicas:
        """The processes that hold the same weights: all of them, unless the model is sharded."""
        return ALONE if self.sharded else Replicas(self.rank, self.size)

    @property
    def waits_within_passes(self) -> bool:
        """True if processes wait for each other within a forward or backward pass, and not only at its end."""
        return self.sharded or self.context is not None

    @property
    def is_rank_zero(self) -> bool:
        """True in the process that writes the run directory."""
        return self.rank == 0

    def broadcast(self, numbers: Sequence[float]) -> list[float]:
        """Return rank 0's numbers on every rank."""
        if self.size == 1:
            return list(numbers)
        values = torch.tensor(numbers, dtype=torch.float64)
        dist.broadcast(values, src=0)
        return values.tolist()

    def broadcast_result(self, make: Callable[[], Any]) -> Any:
        """Call `make` on rank 0 and return its result on every rank.

        Use it for a choice that depends on timing, files or a device check, because ranks could decide differently.
        """
        if self.size == 1:
            return make()
        box = [make() if self.is_rank_zero else None]
        dist.broadcast_object_list(box, src=0)
        return box[0]

    def gather(self, value: Any) -> list[Any]:
        """Return the values of all ranks, in their order."""
        values = [value] * self.size
        if self.size > 1:
            dist.all_gather_object(values, value)
        return values

    def all_reduce_min(self, number: int) -> int:
        """Return the minimum over all ranks."""
        if self.size == 1:
            return number
        value = torch.tensor(number, dtype=torch.int64)
        dist.all_reduce(value, op=dist.ReduceOp.MIN)
        return int(value)

    def all_reduce_sum(self, values: Tensor) -> Tensor:
        """Return the sum over all ranks, computed in place."""
        if self.size > 1:
            dist.all_reduce(values)
        return values

    def all_reduce_max(self, values: Tensor) -> Tensor:
        """Return the element-wise maximum over all ranks, computed in place."""
        if self.size > 1:
            dist.all_reduce(values, op=dist.ReduceOp.MAX)
        return values

    def barrier(self) -> None:
        """Wait until every rank has called this, for at most the timeout of torch's process group."""
        if self.size > 1:
            dist.barrier()

    @contextlib.contextmanager
    def wait_at_end(self) -> Iterator[None]:
        """Context manager in which each rank may work for hours; at its end, all wait for each other.

        An exception on one rank ends the wait of the others with an error, as soon as its process ends.
        """
        if self.size == 1:
            yield
            return
        # The default group waits for 10 or 30 minutes.
        group = dist.new_group(backend="gloo", timeout=NO_LIMIT)
        yield
        dist.barrier(group)
        dist.destroy_process_group(group)

    @contextlib.contextmanager
    def rank_zero_first(self) -> Iterator[bool]:
        """Context manager in which rank 0 works, and the others wait as in `wait_at_end`. Yields True on rank 0."""
        with self.wait_at_end():
            yield self.is_rank_zero


def init_distributed(device: str, mode: str, gpu_budget: float | None = None, context: int = 1) -> World:
    """Initialize the process group from the environment that `launch` and torchrun set; without it, a world of size 1.

    Args:
        device: `compute.device`: "auto", "cuda" or "cpu".
        mode: `parallel.mode`: "auto", "replicate" or "shard".
        gpu_budget: `compute.gpu_budget`: GiB that torch's allocator may use of this process's GPU; None: all of it.
            What CUDA itself needs, some 0.5 GiB, comes on top.
        context: `parallel.context`, which must divide the number of processes.

    Raises UsageError if CUDA or several processes are required but missing, or if a process has no GPU; and for a
    budget on a CPU.
    """
    size = int(os.environ.get("WORLD_SIZE", "1"))
    chosen = device if device != "auto" else ("cuda" if torch.cuda.is_available() else "cpu")
    if chosen == "cuda" and not torch.cuda.is_available():
        raise UsageError("compute.device: cuda is set, but torch finds no GPU; use --compute.device cpu")
    if gpu_budget is not None and chosen != "cuda":
        raise UsageError("compute.gpu_budget: this run has no GPU; leave it out")
    if size % context:
        raise UsageError(
            f"parallel.context: {context} processes share a row, and there are {size} in all; start a multiple of "
            f"{context}: --gpus {context}"
        )
    if size == 1:
        if mode != "auto":
            raise UsageError(
                f"parallel.mode: {mode} needs more than one process: add --gpus N, or auto for all GPUs"
            )
        # Include the index, because some of torch's memory functions require it.
        single = (
            torch.device("cuda", torch.cuda.current_device()) if chosen == "cuda" else torch.device("cpu")
        )
        limit_gpu_memory(single, gpu_budget)
        return World(single)
    local_rank = int(os.environ["LOCAL_RANK"])
    if chosen == "cuda" and local_rank >= torch.cuda.device_count():
        gpus = torch.cuda.device_count()
        raise UsageError(
            f"torchrun started more processes than this machine has GPUs; use at most --nproc-per-node {gpus}"
        )
    target = torch.device("cuda", local_rank) if chosen == "cuda" else torch.device("cpu")
    if chosen == "cuda":
        torch.cuda.set_device(target)
        limit_gpu_memory(target, gpu_budget)
    # `broadcast` and `all_reduce_min` use CPU tensors and gloo, so that they do not wait for queued GPU work.
    dist.init_process_group("cpu:gloo,cuda:nccl" if chosen == "cuda" else "gloo")
    world = World(target, dist.get_rank(), dist.get_world_size(), mode == "shard")
    return world if context == 1 else replace(world, context=_context_ranks(world, context))


def local_processes() -> int:
    """Return the number of processes of this run on this machine."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def _context_ranks(world: World, size: int) -> ContextRanks:
    """Return the processes that share rows with this one: `size` consecutive ranks."""
    groups = [dist.new_group(list(range(first, first + size))) for first in range(0, world.size, size)]
    return ContextRanks(groups[world.rank // size], world.rank % size, size)


def limit_gpu_memory(device: torch.device, budget_gib: float | None) -> None:
    """Let torch's allocator use at most `budget_gib` of the GPU in this process; None sets no limit."""
    if budget_gib is None:
        return
    total = torch.cuda.get_device_properties(device).total_memory
    torch.cuda.set_per_process_memory_fraction(min(1.0, budget_gib * 2**30 / total), device)


def destroy_distributed(world: World) -> None:
    """Destroy the process group, if there is one."""
    if world.size > 1:
        dist.destroy_process_group()


def shard(model: nn.Module, blocks: Iterable[nn.Module], methods: Sequence[str], world: World) -> None:
    """Shard a model over all ranks with FSDP2: each block separately, then the remaining parameters.

    methods: names of the methods besides `forward` that compute with the parameters, so FSDP2 must gather them first.
    """
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
            module.set_gradient_divide_factor(1.0)  # sum instead of average, as for replicas
            module.set_force_sum_reduction_for_comms(True)  # gloo supports sum only


def reshard(model: nn.Module) -> None:
    """Reshard after a forward pass without backward, which leaves the root module's parameters gathered."""
    from torch.distributed.fsdp import FSDPModule

    if isinstance(model, FSDPModule):
        model.reshard()


def set_gradient_sync(model: nn.Module, enabled: bool) -> None:
    """Set whether FSDP2 reduces gradients in backward passes: needed only for the last micro-batch of a step."""
    from torch.distributed.fsdp import FSDPModule

    if isinstance(model, FSDPModule):
        model.set_requires_gradient_sync(enabled)
