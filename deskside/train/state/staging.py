"""A copy of a run's state in host memory, from which a checkpoint is written while training continues.

`torch.distributed.checkpoint.async_save` also copies and then saves in a thread, but its future completes when the
tensors are written: checksums, state, flush and rename would need a second thread behind it. So the copy is made here,
and the whole of `weights/checkpoint.save`, which publishes a checkpoint, runs in one thread (`checkpointer.py`).
"""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from deskside.budget.host_memory import HOST_SHARE
from deskside.optim.offload import aligned, host_zeros
from deskside.optim.sharded import is_sharded, local
from deskside.utils.errors import UsageError
from deskside.utils.format import gib
from deskside.weights.checkpoint import Tensors

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

OPTION = "checkpoint.background"


class Staging:
    """Host memory for a copy of groups of tensors. Sharded tensors are copied in part: this rank's shards.

    Every copy reuses the memory, which is page-locked if `device` is a GPU. Raises UsageError if the host lacks the
    memory, and RunError if it cannot be page-locked.

    usable: bytes of host memory before any process allocates; None: unknown. processes: how many processes of this
    machine allocate as much.
    """

    def __init__(
        self,
        groups: Sequence[Mapping[str, Tensor]],
        device: torch.device,
        usable: int | None = None,
        processes: int = 1,
    ):
        self.device = device
        self.nbytes = sum(aligned(local(t).nbytes) for tensors in groups for t in tensors.values())
        needed = processes * self.nbytes
        if usable is not None and needed > HOST_SHARE * usable:
            raise UsageError(
                f"{OPTION}: the copy of the state that checkpoints are written from takes {gib(needed)} of host "
                f"memory, and this machine has {gib(usable)} left; close other programs, or use --{OPTION} false"
            )
        self._memory = host_zeros((self.nbytes,), torch.uint8, device, OPTION)
        self._mesh: DeviceMesh | None = None
        self._used = 0
        self._copies = [{name: self._place_for(t) for name, t in tensors.items()} for tensors in groups]

    @torch.no_grad()
    def copy(self, groups: Sequence[Mapping[str, Tensor]]) -> list[Tensors]:
        """Copy the tensors and return their copies, which are valid until the next call.

        groups: names, shapes and dtypes as at first; the values may have changed, and a group may be empty. Waits until
        everything is copied.
        """
        for copies, tensors in zip(self._copies, groups, strict=True):
            assert copies.keys() == tensors.keys() or not tensors
            for name, tensor in tensors.items():
                local(copies[name]).copy_(local(tensor), non_blocking=True)
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()
        return [copies if tensors else {} for copies, tensors in zip(self._copies, groups, strict=True)]

    def _place_for(self, tensor: Tensor) -> Tensor:
        """Return a tensor like this one in memory that is still free."""
        own = local(tensor)
        memory = self._memory[self._used : self._used + own.nbytes]
        self._used += aligned(own.nbytes)
        place = memory.view(own.dtype).view(own.shape)
        if not is_sharded(tensor):
            return place
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.tensor import DTensor

        if self._mesh is None:  # `from_local` would move the part to the device of the tensor's own mesh
            self._mesh = init_device_mesh("cpu", tensor.device_mesh.shape)
        return DTensor.from_local(
            place, self._mesh, tensor.placements, run_check=False, shape=tensor.shape, stride=tensor.stride()
        )
