"""Sums of the gradients of several passes, for weights that are stored in bfloat16.

The gradient of such a weight is in bfloat16, too. Autograd would round each sum to nearest, so that a pass whose
gradient is small beside the sum of earlier passes loses most of its bits. Here each sum is computed in float32 and
rounded stochastically, layer by layer during the backward: its expected value is exact, and after P passes the error
has a variance of at most (P - 1) / 4 squared rounding steps, each 2^-7 of the largest partial sum.
"""

from collections.abc import Collection

import torch
from torch import Tensor, nn

from deskside.kernels.stochastic_rounding import add_rounded_, rounding_seed
from deskside.optim.groups import clean_name
from deskside.train.loop.gradient_hooks import call_after_gradient


class GradientSums:
    """Takes the gradients of a model's bfloat16 weights from autograd after each pass, and returns their sums.

    It does nothing for weights in other dtypes, nor in a step of one pass. without: names of parameters to leave out.
    """

    def __init__(self, model: nn.Module, without: Collection[str] = ()):
        self._step = self._pass = 0
        self._passes = 1
        self._sums: dict[str, Tensor] = {}
        self._parameters = {
            name: parameter
            for name, parameter in model.named_parameters()
            if parameter.requires_grad
            and parameter.dtype == torch.bfloat16
            and clean_name(name) not in without
        }
        for name, parameter in self._parameters.items():
            call_after_gradient(parameter, self._add, name)

    def begin_step(self, step: int) -> None:
        """Begin step number `step`, from which the rounding of its sums follows."""
        self._step = step

    def begin_passes(self, passes: int) -> None:
        """Expect the gradients of this number of passes. Drops sums that were not finished."""
        self._pass, self._passes = 0, passes
        self._sums.clear()

    def end_pass(self) -> None:
        """End a pass. After the last one, sums to which its backward added nothing become gradients too."""
        self._pass += 1
        if self._pass == self._passes:
            for name, total in self._sums.items():
                self._parameters[name].grad = total
            self._sums.clear()

    def _add(self, name: str, parameter: Tensor) -> None:
        """Move a gradient that autograd has just completed into the sum; in the last pass, the sum takes its place."""
        if self._passes == 1 or parameter.grad is None:
            return
        grad, parameter.grad = parameter.grad.contiguous(), None
        if name in self._sums:
            add_rounded_(self._sums[name], grad, rounding_seed(f"{name}/{self._pass}", self._step))
        else:
            self._sums[name] = grad
        if self._pass == self._passes - 1:
            parameter.grad = self._sums.pop(name)
