"""The slices of parameters that are logical matrices, and the stacks in which Muon updates them (optim/muon.py)."""

from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from deskside.kernels.muon import PointerTable
from deskside.kernels.newton_schulz import iteration_flops
from deskside.optim.groups import ParameterInfo
from deskside.optim.sharded import first_row, is_sharded, local

STACK_ELEMENTS = 2**26
"""Largest stack of several slices. A larger one is not faster, and its temporaries would determine the peak memory."""


@dataclass(frozen=True)
class Slice:
    """Rows `start:stop` of a parameter: one logical matrix, or one for each expert."""

    info: ParameterInfo
    start: int
    stop: int

    @property
    def experts(self) -> int:
        return self.info.parameter.shape[0] if self.info.parameter.ndim == 3 else 1

    @property
    def shape(self) -> tuple[int, int]:
        return self.stop - self.start, self.info.parameter.shape[-1]

    @property
    def tall_shape(self) -> tuple[int, int]:
        """(long side, short side): the shape, transposed if the matrix is wide."""
        return max(self.shape), min(self.shape)

    @property
    def scale(self) -> float:
        """Factor of the update: sqrt(max(1, rows / columns))."""
        return max(1.0, self.shape[0] / self.shape[1]) ** 0.5

    def part_of(self, whole: Tensor) -> Tensor:
        """Return this slice, (experts, rows, columns), of an unsharded tensor with the parameter's shape."""
        return with_expert_dim(whole)[:, self.start : self.stop]


@dataclass
class Stack:
    """Slices of one shape that are updated as one batch of `len(slices) * experts` matrices.

    They are gathered into a tensor of shape (batch, long side, short side).
    """

    slices: list[Slice]
    row_mean_squares: Tensor | None = None  # (batch, long side), NorMuon's running mean square of each row
    # Addresses of tensors, by the kernel that reads them.
    look_ahead_table: PointerTable = field(default_factory=PointerTable)
    apply_table: PointerTable = field(default_factory=PointerTable)
    row_sums_table: PointerTable = field(default_factory=PointerTable)

    def slice_views(self, stack: Tensor) -> list[Tensor]:
        """Return a view (experts, rows, columns) of the stack for each slice."""
        parts = zip(self.slices, stack.split(self.slices[0].experts), strict=True)
        return [part if s.shape == s.tall_shape else part.mT for s, part in parts]


def make_stacks(parameters: list[ParameterInfo], separate: bool) -> list[Stack]:
    """Group the slices of all parameters by shape, and split large groups into stacks of equal size."""
    by_shape: dict[tuple[Any, ...], list[Slice]] = {}
    for info in parameters:
        for s in slices_of(info):
            alone = info.name if separate else ""
            key = (s.tall_shape, s.experts, info.parameter.dtype, local(info.parameter).device, alone)
            by_shape.setdefault(key, []).append(s)
    stacks = []
    for (tall_shape, experts, *_), slices in by_shape.items():
        # Stacks of equal size, because a small remainder would not fill the device.
        slice_elements = tall_shape[0] * tall_shape[1] * experts
        divisors = [n for n in range(len(slices), 0, -1) if len(slices) % n == 0]
        size = next((n for n in divisors if n * slice_elements <= STACK_ELEMENTS), 1)
        for i in range(0, len(slices), size):
            stacks.append(Stack(slices[i : i + size]))
    return stacks


def slices_of(info: ParameterInfo) -> list[Slice]:
    return [Slice(info, start, stop) for start, stop in info.slices]


def flops_of_iteration(info: ParameterInfo) -> float:
    """Return the FLOPs of one Newton-Schulz iteration over all matrices in this parameter."""
    return sum(s.experts * iteration_flops(*s.tall_shape) for s in slices_of(info))


def with_expert_dim(whole: Tensor) -> Tensor:
    """View a tensor with a parameter's shape as (experts, rows, columns)."""
    return whole if whole.ndim == 3 else whole.unsqueeze(0)


def local_part(s: Slice, x_slice: Tensor, like: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Return this rank's part of a slice, as views of x_slice (its place in a stack) and of the parameter.

    like: a tensor with the parameter's shape and shards, to view instead of it.
    """
    parameter = s.info.parameter.detach() if like is None else like
    if not is_sharded(parameter):
        return x_slice, s.part_of(parameter)
    shard, first = parameter.to_local(), first_row(parameter)
    if shard.ndim == 3:  # sharded along the experts
        return x_slice[first : first + shard.shape[0]], shard[:, s.start : s.stop]
    low = max(s.start, first)
    high = max(min(s.stop, first + shard.shape[0]), low)
    return x_slice[:, low - s.start : high - s.start], shard.unsqueeze(0)[:, low - first : high - first]
