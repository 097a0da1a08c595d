"""Work on gradients that overlaps with the backward pass, on a separate CUDA stream.

The host queues the backward faster than it runs. Without a limit, the gradients that wait for their copies over the bus
would pile up on the GPU, so when there are more than WAITING, the main stream waits for the oldest one.
"""

from collections import deque
from collections.abc import Callable

import torch
from torch import Tensor

WAITING = 2  # functions whose work has not finished yet


class SideStream:
    """Runs functions in order on a second stream of the device; on a CPU, at once.

    waiting: functions that may be unfinished before the main stream waits for the oldest.
    """

    def __init__(self, device: torch.device, waiting: int = WAITING):
        self.device, self.waiting = device, waiting
        self._stream: torch.cuda.Stream | None = None
        self._waiting: deque[tuple[tuple[Tensor, ...], torch.cuda.Event]] = deque()

    def run(self, work: Callable[[], None], *tensors: Tensor) -> None:
        """Queue work behind all work of the main stream so far. tensors: what it uses, allocated on the main stream."""
        if self.device.type != "cuda":
            work()
            return
        main = torch.cuda.current_stream(self.device)
        if self._stream is None:
            self._stream = torch.cuda.Stream(self.device)
        self._stream.wait_stream(main)
        with torch.cuda.stream(self._stream):
            work()
            self._waiting.append((tensors, self._stream.record_event()))
        while len(self._waiting) > self.waiting:
            # The tensors' memory may be used again once the main stream is behind this event.
            main.wait_event(self._waiting.popleft()[1])

    def join(self) -> None:
        """Let the main stream wait for all work."""
        if self._stream is not None:
            torch.cuda.current_stream(self.device).wait_stream(self._stream)
        self._waiting.clear()
