"""Gradients that are summed and kept in host memory until the update, with the same results as on the device.

As soon as autograd has completed the gradient of a weight, it is added to the sum in page-locked host memory and freed:
the sum so far travels to the device in pieces, and the new one back, beside the backward of earlier layers (as in llmq,
github.com/IST-DASLab/llmq). After the last pass the norm of all gradients is known. The optimizer then updates one
weight at a time, while the gradient of the next one is copied to the device. So clipping and skipped steps work as
usual, and a step may have any number of passes.

Sums of weights in bfloat16 are rounded with the random bits that `gradient_sums.py` uses, so they are the same to the
last bit. The norm is summed up in pieces, so its last bits may differ, and with it those of a clipped update.
"""

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor, nn

from deskside.kernels.stochastic_rounding import add_rounded_, rounding_seed
from deskside.optim.build import Optimizer
from deskside.optim.groups import ParameterInfo
from deskside.optim.offload import OffloadJob, Streamer, host_zeros, pieces
from deskside.optim.sharded import gradient_of, no_gradient, sum_of_squares
from deskside.optim.side_stream import SideStream
from deskside.train.loop.gradient_hooks import call_after_gradient


class HostGradients:
    """Moves the gradients of the optimizer's separate parameters to the host, and back for the update."""

    def __init__(self, optimizer: Optimizer, device: torch.device):
        # Kept only during a step, because a run replaces the optimizer of its dry steps, whose state may fill the host.
        self._optimizer: Optimizer | None = None
        self._device, self._side = device, SideStream(device)
        self._streamer = Streamer(device)
        self._fetch_stream: torch.cuda.Stream | None = None
        self._step = self._pass = 0
        self._passes = 1
        self._sums: dict[str, Tensor] = {}
        self._received: set[str] = set()  # in this pass
        self._squares = torch.zeros((), device=device)  # changed in place, because both streams use it
        self._infos = {info.name: info for info in optimizer.separate_parameters}
        for name, info in self._infos.items():
            call_after_gradient(info.parameter, self._send, name)

    def begin_step(self, optimizer: Optimizer, passes: int, step: int, limit: float) -> None:
        """Begin step number `step`. limit: not used; a step is skipped as usual."""
        self._optimizer, self._step, self._pass, self._passes = optimizer, step, 0, passes
        self._side.join()  # a step that ran out of memory may have left work behind
        self._received.clear()
        self._squares.zero_()

    def begin_backward(self, loss: Tensor) -> None:
        """Begin the backward of a pass."""

    def end_pass(self) -> None:
        """End the backward of a pass."""
        assert self._optimizer is not None
        if missing := self._optimizer.separate - self._received:
            raise no_gradient(min(missing))
        self._received.clear()
        self._pass += 1
        self._side.join()

    def squares(self) -> Tensor:
        """Return the sum of the squares of the step's gradients, a float32 scalar on the device."""
        return self._squares

    def update(self, skip: Tensor) -> None:
        """Update the separate parameters, and end the step."""
        assert self._optimizer is not None
        self._streamer.wait_on_device()
        waiting = [self._fetch(info) for info in self._optimizer.separate_parameters[:1]]
        for info, following in zip(
            self._optimizer.separate_parameters, [*self._optimizer.separate_parameters[1:], None], strict=True
        ):
            gradient, arrived = waiting.pop()
            if arrived is not None:
                torch.cuda.current_stream(self._device).wait_event(arrived)
            if following is not None:
                waiting.append(self._fetch(following))
            info.parameter.grad = gradient
            del gradient
            self._optimizer.step_one(info, skip)
        self._optimizer = None

    def _send(self, name: str, parameter: nn.Parameter) -> None:
        gradient, parameter.grad = gradient_of(self._infos[name]).contiguous(), None
        self._received.add(name)
        if name not in self._sums:
            self._sums[name] = host_zeros(gradient.shape, gradient.dtype, self._device, "optim.gradients")
        jobs = [
            OffloadJob(
                [self._sums[name].view(-1)[part]],
                partial(self._add, name, gradient.view(-1)[part], part.start),
                reads=self._pass > 0,
            )
            for part in pieces(gradient.numel())
        ]
        self._side.run(partial(self._streamer.run, jobs), gradient)

    @torch.no_grad()
    def _add(self, name: str, gradient: Tensor, first: int, parts: Sequence[Tensor]) -> None:
        """Add a part of a gradient to its sum; in the first pass, the part becomes the sum."""
        (total,) = parts
        if self._pass == 0:
            total.copy_(gradient)
        elif total.dtype == torch.bfloat16:
            add_rounded_(total, gradient, rounding_seed(f"{name}/{self._pass}", self._step), first)
        else:
            total.add_(gradient)
        if self._pass == self._passes - 1:
            self._squares.add_(sum_of_squares([total]))

    def _fetch(self, info: ParameterInfo) -> tuple[Tensor, torch.cuda.Event | None]:
        """Return the gradient on the device, and the event of its arrival."""
        total = self._sums[info.name]
        if self._device.type != "cuda":
            return total.clone(), None
        # Allocated on the main stream, where it is used and freed, so earlier work there may still use its memory.
        gradient = torch.empty_like(total, device=self._device, pin_memory=False)
        if self._fetch_stream is None:
            self._fetch_stream = torch.cuda.Stream(self._device)
        self._fetch_stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._fetch_stream):
            gradient.copy_(total, non_blocking=True)
            return gradient, self._fetch_stream.record_event()
