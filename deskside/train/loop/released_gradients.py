"""Weights that are updated during the backward pass, so that their gradients never exist together.

As soon as autograd has completed the gradient of a weight, the optimizer updates the weight, and the gradient is freed
(LOMO, Lv et al. 2023, arXiv 2306.09782). With optimizer states in host memory, the update overlaps with the backward.

An update cannot wait for the rest of the backward. So gradients are not clipped, and a bad step cannot
always be undone: a loss that is not finite changes no weight, but if the norm of the gradients so far stops being
finite or exceeds the guard's limit in the middle of the backward, only the weights from there on keep their values. The
step counts as skipped, and after several of them in a row the run goes back to its last checkpoint, as usual.
"""

from functools import partial

import torch
from torch import Tensor, nn

from deskside.optim.build import Optimizer
from deskside.optim.groups import ParameterInfo
from deskside.optim.sharded import gradient_of, no_gradient, sum_of_squares
from deskside.optim.side_stream import SideStream
from deskside.train.loop.gradient_hooks import call_after_gradient


class ReleasedGradients:
    """Updates the optimizer's separate parameters as soon as their gradients are complete."""

    def __init__(self, optimizer: Optimizer, device: torch.device):
        # Kept only during a step, because a run replaces the optimizer of its dry steps, whose state may fill the host.
        self._optimizer: Optimizer | None = None
        self._side, self._limit = SideStream(device), 0.0
        self._received: set[str] = set()  # names of the parameters that were updated in this step
        # Changed in place, because both streams use them.
        self._stopped, self._squares = torch.zeros((), device=device), torch.zeros((), device=device)
        self._infos = {info.name: info for info in optimizer.separate_parameters}
        for name, info in self._infos.items():
            call_after_gradient(info.parameter, self._release, name)

    def begin_step(self, optimizer: Optimizer, passes: int, step: int, limit: float) -> None:
        """Begin a step. limit: largest norm of the gradients; 0, for dry steps, changes no weight.

        Raises ValueError for a step of several passes, whose gradients are complete only after the last one.
        """
        if passes > 1:
            raise ValueError("gradients can only be released in a step of one pass")
        self._optimizer, self._limit = optimizer, limit
        self._side.join()  # a step that ran out of memory may have left work behind
        self._squares.zero_()
        self._received.clear()

    def begin_backward(self, loss: Tensor) -> None:
        """Begin the backward of this loss."""
        if self._limit:
            self._stopped.copy_(~loss.detach().isfinite())
        else:
            self._stopped.fill_(1.0)

    def end_pass(self) -> None:
        """End the backward: all updates are done before the next work on the device."""
        assert self._optimizer is not None
        if missing := self._optimizer.separate - self._received:
            raise no_gradient(min(missing))
        self._side.join()

    def squares(self) -> Tensor:
        """Return the sum of the squares of all gradients that were released, a float32 scalar on the device."""
        return self._squares

    def update(self, skip: Tensor) -> None:
        """End the step: all updates were done in the backward."""
        self._optimizer = None

    def _release(self, name: str, parameter: nn.Parameter) -> None:
        info = self._infos[name]
        self._received.add(name)
        assert self._optimizer is not None
        if self._optimizer.streamer is None:
            self._update(info)
        else:
            self._side.run(partial(self._update, info), gradient_of(info))

    @torch.no_grad()
    def _update(self, info: ParameterInfo) -> None:
        assert self._optimizer is not None
        self._squares.add_(sum_of_squares([gradient_of(info)]))
        within = self._squares.sqrt() <= self._limit
        self._stopped.copy_(torch.maximum(self._stopped, 1.0 - within.float()))
        self._optimizer.step_one(info, self._stopped)
