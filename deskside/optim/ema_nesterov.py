"""EMA-Nesterov (arXiv 2605.25395): gradients are taken ahead of the weights, along an average of their recent movement.

With weights x, an optimizer A and the average m of the movement, a step is

    x <- A(x + beta m),    m <- gamma m + (1 - gamma) (new x - old x)

A is run at the moved weights, and nothing is moved back. (Nesterov's own method moves along the last step alone, which
is mostly noise here.) One buffer is enough: for the moving average e of the weights, with the same gamma,

    e' = e + (1 - gamma) (x - e)    gives    m = (1 - gamma) (x - e) = (1 - gamma) / gamma (x - e')

so both updates are interpolations in place. After a step, when weights are evaluated or saved, they are x. A checkpoint
contains e. A step that the guard skips keeps its move.

modded-nanogpt (PRs 308 and 309) has gamma 0.99 and beta 0.6 (0.3 for a faster base) times the learning rate over its
peak, between 16 % and 76 % (10 % and 67 %) of the run.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from deskside.config.optim import AdamWConfig, MuonConfig
from deskside.optim.groups import ParameterInfo
from deskside.optim.sharded import local


class EmaNesterov:
    """The moving average of the weights, and the move along it. `averages` has it by parameter name, in float32."""

    def __init__(self, parameters: Sequence[ParameterInfo], config: AdamWConfig | MuonConfig):
        self.parameters, self.config = parameters, config
        self.averages: dict[str, Tensor] = {}
        self._lr_factor = self._progress = 0.0

    def set_progress(self, lr_factor: float, progress: float) -> None:
        """Set the learning rate over its peak and the progress of the run (0 to 1) for the next step."""
        self._lr_factor, self._progress = lr_factor, progress

    @torch.no_grad()
    def create_state(self) -> None:
        """Begin the average with the current weights, unless it has begun."""
        for info in self.parameters:
            if info.name not in self.averages:
                average = torch.zeros_like(info.parameter, requires_grad=False)
                local(average).copy_(local(info.parameter))
                self.averages[info.name] = average

    @torch.no_grad()
    def move(self) -> None:
        """Update the average with the weights, and move the weights ahead. Call it once before the passes of a step."""
        config = self.config
        self.create_state()
        if self._progress >= config.ema_nesterov_until:
            return
        weights = [local(info.parameter) for info in self.parameters]
        averages = [local(self.averages[info.name]) for info in self.parameters]
        gamma = config.ema_nesterov_decay
        torch._foreach_lerp_(averages, weights, 1 - gamma)
        if self._progress >= config.ema_nesterov_start:
            beta = config.ema_nesterov * self._lr_factor
            torch._foreach_lerp_(weights, averages, -beta * (1 - gamma) / gamma)
