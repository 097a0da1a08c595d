"""CUDA graphs that share a memory pool, the memory that they need, and the errors of a capture that runs out of it."""

import gc
from collections.abc import Callable
from functools import cache
from typing import Protocol

import torch

from deskside.utils.errors import chain_of


class Graph(Protocol):
    """Captured work."""

    def replay(self) -> None:
        """Queue the work again."""


class GraphPool(Protocol):
    """Graphs that share memory for what they compute. They must be replayed in the order of their captures."""

    def capture(self, work: Callable[[], None]) -> Graph:
        """Capture the work that this function would queue, without running it.

        Raises torch.OutOfMemoryError, and RuntimeError if the function does what a graph cannot contain, or if CUDA or
        a library has too little memory (see `memory_error`).
        """

    def reserved_bytes(self) -> int:
        """Return the device memory that the graphs have reserved."""

    def release(self) -> None:
        """Free the graphs and their memory. Tensors that were allocated in captures must not be used any more."""


class CudaGraphPool:
    """CUDA graphs in a memory pool of torch's allocator."""

    def __init__(self, device: torch.device):
        self.device, self._stream = device, _capture_stream(device)
        gc.collect()  # so that no collection during a capture frees anything
        torch.cuda.empty_cache()
        self._pool = torch.cuda.graph_pool_handle()
        self._graphs: list[torch.cuda.CUDAGraph] = []
        self._before = torch.cuda.memory_reserved(device)

    def capture(self, work: Callable[[], None]) -> Graph:
        graph, stream = torch.cuda.CUDAGraph(), torch.cuda.current_stream(self.device)
        self._graphs.append(graph)
        try:
            # thread_local: the threads of the loader and of a checkpoint may use the device during the capture.
            with torch.cuda.graph(graph, self._pool, self._stream, capture_error_mode="thread_local"):
                work()
        finally:
            # torch leaves the stream of the capture current if the capture cannot be ended.
            torch.cuda.set_stream(stream)
        return graph

    def reserved_bytes(self) -> int:
        return max(0, torch.cuda.memory_reserved(self.device) - self._before)

    def release(self) -> None:
        torch.cuda.synchronize(self.device)  # a replay may still run
        for graph in self._graphs:
            graph.reset()
        self._graphs.clear()
        gc.collect()
        torch.cuda.empty_cache()


@cache
def _capture_stream(device: torch.device) -> torch.cuda.Stream:
    """Return the stream on which passes are captured, with the workspaces of cuBLAS for it.

    cuBLAS has a workspace for each stream and thread, which torch allocates at the first product and never frees. In a
    capture, it would be in the pool, and keep it from being freed. The product here is computed in this thread, and its
    gradient in autograd's.
    """
    stream, current = torch.cuda.Stream(device), torch.cuda.current_stream(device)
    stream.wait_stream(current)
    with torch.cuda.stream(stream), torch.enable_grad():
        x = torch.ones(16, 16, device=device, requires_grad=True)
        torch.autograd.grad((x @ x).sum(), x)
    current.wait_stream(stream)
    return stream


class PassMemory:
    """Memory that a pass needs on a GPU; none on a CPU."""

    def __init__(self, device: torch.device):
        self.device = device

    def begin(self) -> None:
        """Begin to measure a pass."""
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)

    def needed(self) -> int:
        """Return the bytes that the pass has needed at its peak and does not use any more."""
        if self.device.type != "cuda":
            return 0
        return torch.cuda.max_memory_allocated(self.device) - torch.cuda.memory_allocated(self.device)

    def reserve(self, size: int) -> object:
        """Return an object that keeps this number of bytes allocated. Raises torch.OutOfMemoryError."""
        return torch.empty(size, dtype=torch.uint8, device=self.device)


def memory_error(error: BaseException) -> BaseException | None:
    """Return the out-of-memory error among an exception and its causes; None if there is none.

    torch raises torch.OutOfMemoryError only for its own allocations; the errors of CUDA, cuBLAS and Triton can be
    recognized only by their text. If a capture runs out of memory, ending it may fail too, which hides the first error.
    """
    for one in chain_of(error):
        text = str(one)
        if isinstance(one, torch.OutOfMemoryError) or "out of memory" in text or "ALLOC_FAILED" in text:
            return one
    return None
