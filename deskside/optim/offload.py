"""Optimizer state in host memory, streamed through a few buffers on the device while it is updated.

The update runs on the device because this is faster. Per weight, float32 moments move 8 bytes in each direction over
the bus, in both directions at once, which takes 0.3 ns at the 25 GB/s of PCIe 4 x16 (0.08 ns with 8-bit moments). An
update on the CPU would read and write 28 bytes of host memory, which takes 0.6 ns at a desktop's 50 GB/s, and would
also move gradient and weight over the bus. Besides, results, skipped steps and checkpoints are the same as without
offloading.

    host to device | piece 0 | piece 1 | piece 2 | piece 3 ...
    update                   | piece 0 | piece 1 | piece 2 ...
    device to host                     | piece 0 | piece 1 ...

The device needs memory for only three buffers of one piece each. If the device is a CPU, updates work on the state in
place.
"""

import math
import mmap
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from deskside.utils.errors import RunError

PIECE = 2**22  # weights per piece: 16 MiB of a float32 moment, enough for the full rate of the bus
BUFFERS = 3  # one being copied to the device, one being updated, one being copied to the host
# What to use if the host lacks the memory for an option.
INSTEAD = {
    "optim.offload": "--optim.states 8bit",
    "optim.gradients": "--optim.gradients released",
    "average.offload": "false",
    "compute.activation_offloading": "false",
    "checkpoint.background": "false",
}
ALIGNMENT = 256  # bytes, of each tensor's start in a buffer


@dataclass(frozen=True)
class OffloadJob:
    """An update of parts of the host state.

    update: changes their copies on the device in place. reads: False if it does not need their values.
    """

    host_state: Sequence[Tensor]
    update: Callable[[Sequence[Tensor]], None]
    reads: bool = True


def host_zeros(
    shape: Sequence[int], dtype: torch.dtype, device: torch.device, option: str = "optim.offload"
) -> Tensor:
    """Return zeros in host memory, page-locked if `device` is a GPU, so that copies are asynchronous.

    The memory is mapped and locked here, because torch's allocator of page-locked memory rounds sizes up to a power of
    two. Raises RunError, which names `option`, if the system does not allow locking this much memory.
    """
    if device.type != "cuda":
        return torch.zeros(shape, dtype=dtype)
    size = math.prod(shape) * dtype.itemsize
    pages = mmap.mmap(-1, max(size, 1))
    flat = torch.frombuffer(pages, dtype=dtype, count=math.prod(shape))
    flat.zero_()  # maps the pages, by all threads of torch; cudaHostRegister would map them one after another
    runtime = torch.cuda.cudart()
    if error := int(runtime.cudaHostRegister(flat.data_ptr(), size, 0)):
        raise RunError(
            f"{option}: {size / 2**20:.0f} MiB of host memory could not be page-locked (CUDA error {error}); free "
            f"memory, raise `ulimit -l`, or use {INSTEAD[option]}"
        )
    weakref.finalize(pages, runtime.cudaHostUnregister, flat.data_ptr()).atexit = False
    return flat.view(tuple(shape))


class Streamer:
    """Runs offload jobs in order, with copies and updates overlapping. device: where the updates run."""

    def __init__(self, device: torch.device):
        self.device = device
        self._streams: tuple[torch.cuda.Stream, torch.cuda.Stream] | None = None
        self._buffers: list[Tensor] = []
        self._free: list[torch.cuda.Event | None] = [None] * BUFFERS

    def run(self, jobs: Sequence[OffloadJob]) -> None:
        """Queue all jobs; waits only if the buffers must grow. Call `wait` before the host reads the state."""
        if self.device.type != "cuda":
            for job in jobs:
                job.update(job.host_state)
            return
        to_device, to_host = self._prepare(
            max(sum(aligned(t.nbytes) for t in job.host_state) for job in jobs)
        )
        compute = torch.cuda.current_stream(self.device)
        to_device.wait_stream(to_host)  # the results of the last step must have arrived in host memory
        for number, job in enumerate(jobs):
            slot = number % BUFFERS
            parts = _views(self._buffers[slot], job.host_state)
            with torch.cuda.stream(to_device):
                if (free := self._free[slot]) is not None:
                    to_device.wait_event(free)
                if job.reads:
                    for part, host in zip(parts, job.host_state, strict=True):
                        part.copy_(host, non_blocking=True)
            compute.wait_stream(to_device)
            job.update(parts)
            to_host.wait_stream(compute)
            with torch.cuda.stream(to_host):
                for part, host in zip(parts, job.host_state, strict=True):
                    host.copy_(part, non_blocking=True)
                self._free[slot] = to_host.record_event()

    def wait(self) -> None:
        """Wait until all state has been copied back to the host."""
        if self._streams is not None:
            self._streams[1].synchronize()

    def wait_on_device(self) -> None:
        """Let the current stream wait until all state has been copied back to the host."""
        if self._streams is not None:
            torch.cuda.current_stream(self.device).wait_stream(self._streams[1])

    def _prepare(self, size: int) -> tuple[torch.cuda.Stream, torch.cuda.Stream]:
        if self._streams is None:
            self._streams = torch.cuda.Stream(self.device), torch.cuda.Stream(self.device)
        to_device, to_host = self._streams
        if not self._buffers or self._buffers[0].nbytes < size:
            self.wait()
            self._buffers = [torch.empty(size, dtype=torch.uint8, device=self.device) for _ in range(BUFFERS)]
            self._free = [None] * BUFFERS
            # Work that was queued on the current stream earlier may still read this memory.
            to_device.wait_stream(torch.cuda.current_stream(self.device))
        return to_device, to_host


def pieces(elements: int) -> list[slice]:
    """Return slices of at most PIECE elements that cover `elements` elements."""
    return [slice(start, min(start + PIECE, elements)) for start in range(0, elements, PIECE)]


def zero_state(
    parameter: Tensor, shape: Sequence[int], dtype: torch.dtype, streamer: Streamer | None
) -> Tensor:
    """Return zeros for a state of a parameter: in host memory with a streamer, else on the device, sharded like it."""
    if streamer is not None:
        return host_zeros(shape, dtype, parameter.device)
    if shape == parameter.shape:
        return torch.zeros_like(parameter, dtype=dtype, requires_grad=False)
    return torch.zeros(shape, dtype=dtype, device=parameter.device)


def parts(elements: int, streamer: Streamer | None) -> list[slice]:
    """Return the slices of a weight's elements that are updated at a time: `pieces` with a streamer, else all."""
    return [slice(0, elements)] if streamer is None else pieces(elements)


def run_jobs(jobs: Sequence[OffloadJob], streamer: Streamer | None) -> None:
    """Run jobs through the streamer, or without one in place."""
    if streamer is None:
        for job in jobs:
            job.update(job.host_state)
    elif jobs:
        streamer.run(jobs)


def aligned(size: int) -> int:
    """Round a number of bytes up to a multiple of ALIGNMENT."""
    return -(-size // ALIGNMENT) * ALIGNMENT


def _views(buffer: Tensor, tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return views of a buffer with the sizes and dtypes of these (flat) tensors."""
    views, start = [], 0
    for tensor in tensors:
        views.append(buffer[start : start + tensor.nbytes].view(tensor.dtype))
        start += aligned(tensor.nbytes)
    return views
