"""Matrices that one rank updates for all replicas.

Every replica would compute the same Newton-Schulz iteration from the same gradient. Instead, each matrix has one owner:
the rank that has the sum of its gradients, keeps its momentum, and computes its update (as in ZeRO, Rajbhandari et al.
2019, arXiv 1910.02054, and in the distributed Muon of github.com/KellerJordan/modded-nanogpt). Then the owners send the
new weights to the others while the device continues. Code that reads a weight calls `NewWeights.wait` first.
"""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

import torch.distributed as dist
from torch import Tensor

from deskside.optim.groups import ParameterInfo


@dataclass(frozen=True)
class Replicas:
    """The processes that hold the same weights: their number, and the rank of this one."""

    rank: int = 0
    size: int = 1


ALONE = Replicas()


def assign_owners(costs: Mapping[str, float], ranks: int) -> dict[str, int]:
    """Return a rank for each name: the largest cost first, to the rank with the least so far. No owners for one rank.

    The result depends on nothing but the arguments, and is the same on all ranks.
    """
    if ranks == 1:
        return {}
    loads, owners = [0.0] * ranks, {}
    for name in sorted(costs, key=lambda name: (-costs[name], name)):
        owner = loads.index(min(loads))
        owners[name] = owner
        loads[owner] += costs[name]
    return owners


class NewWeights:
    """Updated matrices on their way from their owners to the other ranks."""

    def __init__(self) -> None:
        self.pending: dict[str, dist.Work] = {}

    def send(self, infos: Iterable[ParameterInfo], owners: Mapping[str, int]) -> None:
        """Begin to send these matrices, in this order, behind all work of the device so far."""
        for info in infos:
            work = dist.broadcast(info.parameter.detach(), src=owners[info.name], async_op=True)
            assert work is not None
            self.pending[info.name] = work

    def wait(self, names: Collection[str] | None = None) -> None:
        """Let the device (on a CPU: this process) wait until these matrices have arrived; None: all of them."""
        for name in list(self.pending) if names is None else names:
            if (work := self.pending.pop(name, None)) is not None:
                work.wait()


def receive_on_rank_zero(tensor: Tensor, owner: int, rank: int) -> Tensor | None:
    """Send a tensor from its owner to rank 0. Returns it there, on the host if it is not its own; elsewhere, None.

    tensor: on the owner, the tensor; on other ranks, memory of its size, which is overwritten.
    """
    if owner != 0:
        dist.broadcast(tensor, src=owner)
    if rank != 0:
        return None
    return tensor if owner == 0 else tensor.cpu()


def sum_over_ranks(number: Tensor) -> Tensor:
    """Return the sum of a scalar over all ranks, computed in place."""
    dist.all_reduce(number)
    return number
