"""Activations that wait for the backward pass in host memory instead of on the GPU.

With activation checkpointing, a fused sublayer saves one tensor, the residual stream. All of them together are most of
what long rows need: 24 layers of 2048 channels and 16,384 tokens save 3 GiB. They are written once and read once, in
reverse order, so that both copies can overlap with the computation:

    forward     compute  | layer 0 | layer 1 | layer 2 | ...          to host             | 0 | 1 | 2 ...
    backward    compute  ... | layer 2 | layer 1 | layer 0 |          to the GPU    | 2 | 1 | 0 |

torch's `saved_tensors_hooks` hand over what autograd saves, and ask for it back. The compute stream waits if more than
`IN_FLIGHT` tensors are on their way to the host, so the memory on the GPU is bounded, whatever the speed of the bus.
The last block's tensors stay on the GPU, because the backward needs them at once. The copies are exact, and so are the
gradients. On a CPU, tensors are copied without streams, for tests.
"""

import weakref
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from deskside.optim.offload import host_zeros

MIN_BYTES = 2**20  # smaller tensors stay on the GPU
IN_FLIGHT = 2  # tensors on their way to the host
AHEAD = 2  # tensors that are fetched before they are needed: those of one block


class _Stored:
    """A tensor in host memory. device_copy: set once its way back to the GPU has begun."""

    def __init__(self, host: Tensor, shape: torch.Size):
        self.host, self.shape = host, shape
        self.on_host: torch.cuda.Event | None = None
        self.device_copy: Tensor | None = None
        self.on_device: torch.cuda.Event | None = None


class ActivationOffload:
    """Moves what blocks save for their backward to host memory and back."""

    def __init__(self, device: torch.device):
        self.device = device
        self._streams: tuple[torch.cuda.Stream, torch.cuda.Stream] | None = None
        self._in_flight: deque[tuple[Tensor, torch.cuda.Event]] = deque()
        self._free: dict[tuple[int, torch.dtype], list[Tensor]] = {}
        # In the order in which they were saved; the backward takes them from the end.
        self._stored: deque[weakref.ref[_Stored]] = deque()
        self.host_bytes = 0

    def attach(self, blocks: Sequence[nn.Module]) -> None:
        """Wrap the forward of every block but the last one."""
        for block in blocks[:-1]:
            block.forward = self._wrapped(block.forward)

    def _wrapped(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            if not torch.is_grad_enabled():
                return forward(*args, **kwargs)
            with saved_tensors_hooks(self._pack, self._unpack):
                return forward(*args, **kwargs)

        return wrapped

    def _pack(self, tensor: Tensor) -> Tensor | _Stored:
        kept = isinstance(tensor, nn.Parameter) or tensor.device != self.device or not tensor.is_contiguous()
        if kept or tensor.nbytes < MIN_BYTES:
            return tensor
        host = self._host_buffer(tensor)
        stored = _Stored(host, tensor.shape)
        weakref.finalize(stored, self._free[host.numel(), host.dtype].append, host)
        if self.device.type != "cuda":
            host.copy_(tensor.flatten())
        else:
            self._send(tensor.detach().view(-1), stored)
        self._stored.append(weakref.ref(stored))
        return stored

    def _send(self, flat: Tensor, stored: _Stored) -> None:
        to_host, to_device = self._get_streams()
        compute = torch.cuda.current_stream(self.device)
        to_host.wait_stream(compute)
        to_host.wait_stream(to_device)  # an earlier tensor may still be read from the same host buffer
        with torch.cuda.stream(to_host):
            stored.host.copy_(flat, non_blocking=True)
            stored.on_host = to_host.record_event()
        self._in_flight.append((flat, stored.on_host))
        while len(self._in_flight) > IN_FLIGHT:
            # The memory may be used again once the compute stream is behind this copy.
            compute.wait_event(self._in_flight.popleft()[1])

    def _unpack(self, saved: Tensor | _Stored) -> Tensor:
        if isinstance(saved, Tensor):
            return saved
        if self.device.type != "cuda":
            return saved.host.clone().view(saved.shape)
        if saved.device_copy is None:
            self._fetch(saved)
        tensor, saved.device_copy = saved.device_copy, None
        assert tensor is not None and saved.on_device is not None
        torch.cuda.current_stream(self.device).wait_event(saved.on_device)
        self._fetch_ahead(saved)
        return tensor.view(saved.shape)

    def _fetch(self, stored: _Stored) -> None:
        _, to_device = self._get_streams()
        # Allocated on the compute stream, where it is used and freed, so earlier work there may still use its memory.
        stored.device_copy = torch.empty_like(stored.host, device=self.device, pin_memory=False)
        to_device.wait_stream(torch.cuda.current_stream(self.device))
        assert stored.on_host is not None
        to_device.wait_event(stored.on_host)
        with torch.cuda.stream(to_device):
            stored.device_copy.copy_(stored.host, non_blocking=True)
            stored.on_device = to_device.record_event()

    def _fetch_ahead(self, current: _Stored) -> None:
        """Begin to fetch the tensors that were saved before `current`, which the backward needs next."""
        compute = torch.cuda.current_stream(self.device)
        while self._in_flight:
            compute.wait_event(self._in_flight.popleft()[1])
        while self._stored and self._stored[-1]() in (None, current):
            self._stored.pop()
        for reference in list(self._stored)[-AHEAD:][::-1]:
            stored = reference()
            if stored is not None and stored.device_copy is None and stored.on_device is None:
                self._fetch(stored)

    def _host_buffer(self, tensor: Tensor) -> Tensor:
        free = self._free.setdefault((tensor.numel(), tensor.dtype), [])
        if free:
            return free.pop()
        # A pass of another size has begun, so the buffers of earlier passes are not needed any more.
        for others in self._free.values():
            self.host_bytes -= sum(buffer.nbytes for buffer in others)
            others.clear()
        self.host_bytes += tensor.nbytes
        return host_zeros((tensor.numel(),), tensor.dtype, self.device, "compute.activation_offloading")

    def _get_streams(self) -> tuple[torch.cuda.Stream, torch.cuda.Stream]:
        """Return the streams of copies to the host and to the GPU."""
        if self._streams is None:
            self._streams = torch.cuda.Stream(self.device), torch.cuda.Stream(self.device)
        return self._streams
