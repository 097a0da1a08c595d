"""Optimiser state in the host's memory, streamed through a few buffers on the device while it is updated.

The update stays on the device, for this reason. Per weight, float32 moments need 8 bytes each way over the bus, both
ways at once: 0.3 ns at the 25 GB/s of PCIe 4 x16. An update on the CPU reads and writes 28 bytes of host memory, 0.6 ns
at a desktop's 50 GB/s, and moves gradient and weight over the bus as well. With moments in 8 bits the bus needs
0.08 ns. And numbers, skipped steps and checkpoints stay those of an optimiser that lives on the device.

    copy up      | piece 0 | piece 1 | piece 2 | piece 3 ...
    update                 | piece 0 | piece 1 | piece 2 ...
    copy down                        | piece 0 | piece 1 ...

Three buffers of one piece each are all that the device holds. On a CPU there is nothing to stream: updates work on the
state where it lies.
"""

import math
import mmap
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from deskside.utils.errors import RunError

PIECE = 2**22  # weights that travel at a time: 16 MiB of a float32 moment, enough for the bus' full rate
BUFFERS = 3  # one on its way up, one being updated, one on its way down
ALIGNMENT = 256


@dataclass(frozen=True)
class OffloadJob:
    """Parts of host state, and what is to be done with them: `update` gets them on the device, and changes them."""

    held: Sequence[Tensor]
    update: Callable[[Sequence[Tensor]], None]


def host_zeros(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros in the host's memory; page-locked where `device` is a GPU, so that copies need no processor.

    Pages of their own are locked, because torch's allocator of locked memory rounds sizes up to a power of two.
    Raises RunError where the system does not let so much memory be locked.
    """
    if device.type != "cuda":
        return torch.zeros(shape, dtype=dtype)
    size = math.prod(shape) * dtype.itemsize
    pages = mmap.mmap(-1, max(size, 1))
    flat = torch.frombuffer(pages, dtype=dtype, count=math.prod(shape))
    runtime = torch.cuda.cudart()
    if error := int(runtime.cudaHostRegister(flat.data_ptr(), size, 0)):
        raise RunError(
            f"optim.offload: {size / 2**20:.0f} MiB of host memory could not be page-locked (CUDA error {error}); "
            "free memory, raise `ulimit -l`, or use --optim.states 8bit"
        )
    weakref.finalize(pages, runtime.cudaHostUnregister, flat.data_ptr()).atexit = False
    return flat.view(tuple(shape))


class Streamer:
    """Runs jobs in order. `device` is where the updates happen."""

    def __init__(self, device: torch.device):
        self.device = device
        self._streams: tuple[torch.cuda.Stream, torch.cuda.Stream] | None = None
        self._buffers: list[Tensor] = []
        self._free: list[torch.cuda.Event | None] = [None] * BUFFERS

    def run(self, jobs: Sequence[OffloadJob]) -> None:
        """Queue all jobs. Nothing waits for the device; `wait` before the host reads the state."""
        if self.device.type != "cuda":
            for job in jobs:
                job.update(job.held)
            return
        up, down = self._prepare(max(sum(_aligned(t.nbytes) for t in job.held) for job in jobs))
        compute = torch.cuda.current_stream(self.device)
        up.wait_stream(down)  # the last step's results must have arrived
        for number, job in enumerate(jobs):
            slot = number % BUFFERS
            parts = _views(self._buffers[slot], job.held)
            with torch.cuda.stream(up):
                if (free := self._free[slot]) is not None:
                    up.wait_event(free)
                for part, host in zip(parts, job.held, strict=True):
                    part.copy_(host, non_blocking=True)
            compute.wait_stream(up)
            job.update(parts)
            down.wait_stream(compute)
            with torch.cuda.stream(down):
                for part, host in zip(parts, job.held, strict=True):
                    host.copy_(part, non_blocking=True)
                self._free[slot] = down.record_event()

    def wait(self) -> None:
        """Until everything has come back to the host."""
        if self._streams is not None:
            self._streams[1].synchronize()

    def _prepare(self, size: int) -> tuple[torch.cuda.Stream, torch.cuda.Stream]:
        if self._streams is None:
            self._streams = torch.cuda.Stream(self.device), torch.cuda.Stream(self.device)
        up, down = self._streams
        if not self._buffers or self._buffers[0].nbytes < size:
            self.wait()
            self._buffers = [torch.empty(size, dtype=torch.uint8, device=self.device) for _ in range(BUFFERS)]
            self._free = [None] * BUFFERS
            # This memory may still be read by what was queued before.
            up.wait_stream(torch.cuda.current_stream(self.device))
        return up, down


def pieces(elements: int) -> list[slice]:
    """Slices of at most PIECE that cover so many elements."""
    return [slice(start, min(start + PIECE, elements)) for start in range(0, elements, PIECE)]


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


def _views(buffer: Tensor, held: Sequence[Tensor]) -> list[Tensor]:
    """Room in a buffer for tensors like those held."""
    found, start = [], 0
    for tensor in held:
        found.append(buffer[start : start + tensor.nbytes].view(tensor.dtype))
        start += _aligned(tensor.nbytes)
    return found
