"""Muon: momentum, made orthogonal, for the logical matrices of a model (Jordan et al. 2024, kellerjordan.github.io).

The work is arranged around two facts. The iteration wants many matrices of one shape at once, because one of 768 x 768
does not fill a GPU. And q, k, v of one fused weight are three matrices, which must be orthogonalised apart. So every
step gathers the slices of all layers into stacks of one shape (wide ones transposed, so that up and down projections
share a stack), updates each stack as one batch, and scatters the result back:

    gradient -> momentum (float32, shaped and sharded like the parameter) -> look-ahead (Nesterov)
             -> stack (bfloat16 on CUDA, float32 on a CPU) -> Newton-Schulz -> row normalisation -> parameter

Row normalisation is NorMuon's (arXiv 2510.05491): each row of the update is divided by its running size, then the
whole update gets its old Frobenius norm back. It acts along the longer side, because orthogonalisation has already made
the vectors along the shorter side equally long.

The update of a (rows, columns) matrix is scaled by sqrt(max(1, rows / columns)), which keeps the change of the output
per unit of learning rate independent of the shape (Jordan et al.). Weight decay is decoupled; "cautious" applies it
only where the update, too, moves the weight towards zero (arXiv 2510.12402).

Gradients are consumed: the look-ahead is written into them. A sharded parameter (FSDP2) keeps its momentum sharded; the
look-ahead is gathered in full, every rank does the same iteration, and each writes back its own rows.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from deskside.config.optim import MuonConfig
from deskside.optim.groups import ParameterInfo
from deskside.optim.newton_schulz import Coefficients, coefficients, orthogonalize
from deskside.optim.sharded import first_row, full_like, gradient_of, local

STACK_ELEMENTS = 2**26
"""Largest stack. Beyond this a bigger batch is no faster, and its temporaries would decide the peak memory."""


@dataclass(frozen=True)
class _Slice:
    """Rows `start:stop` of a parameter, as one matrix, or as one per expert."""

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
    def tall(self) -> tuple[int, int]:
        return max(self.shape), min(self.shape)

    def rows_of(self, stack: Tensor) -> Tensor:
        """This slice's place in a stack (experts, long, short), turned to (experts, rows, columns)."""
        return stack if self.shape == self.tall else stack.mT

    def part_of(self, whole: Tensor) -> Tensor:
        """(experts, rows, columns) of a full tensor shaped like the parameter."""
        return (whole if whole.ndim == 3 else whole.unsqueeze(0))[:, self.start : self.stop]


@dataclass
class _Stack:
    """Slices of one shape that are updated as one batch of `len(slices) * experts` matrices."""

    slices: list[_Slice]
    scales: Tensor  # (batch, 1, 1), sqrt(max(1, rows / columns))
    row_sizes: Tensor | None = None  # (batch, long), NorMuon's running mean square of each row

    def places(self, stack: Tensor) -> list[Tensor]:
        """The stack (batch, long, short) as one (experts, rows, columns) view per slice."""
        parts = stack.split(self.slices[0].experts)
        return [s.rows_of(part) for s, part in zip(self.slices, parts, strict=True)]


class Muon:
    """Muon over the matrices `parameters`. `lr`, `weight_decay` and `momentum` are what the next step uses.

    compiled: None compiles the update of a stack on CUDA and nowhere else; the first step then takes seconds.
    """

    def __init__(self, parameters: list[ParameterInfo], config: MuonConfig, compiled: bool | None = None):
        self.parameters = parameters
        self.config = config
        self.compiled = compiled
        self.lr = 0.0
        self.weight_decay = 0.0
        self.momentum = config.momentum
        self.momentum_of: dict[str, Tensor] = {}
        self._coefficients = coefficients(config.coefficients, config.ns_steps)
        self._stacks = _make_stacks(parameters)
        self._compiled_update: Callable[..., None] | None = None

    def create_state(self) -> None:
        """Zero momentum and row sizes, where they do not exist yet."""
        for info in self.parameters:
            if info.name not in self.momentum_of:
                dtype = _working_dtype(info.parameter)
                self.momentum_of[info.name] = torch.zeros_like(
                    info.parameter, dtype=dtype, requires_grad=False
                )
        if self.config.normalize == "neuron":
            for stack in self._stacks:
                if stack.row_sizes is None:
                    first = stack.slices[0]
                    weight = first.info.parameter
                    shape = (len(stack.slices) * first.experts, first.tall[0])
                    stack.row_sizes = torch.zeros(
                        shape, dtype=_working_dtype(weight), device=local(weight).device
                    )

    def step(self, skip: Tensor | None) -> None:
        """One update. `skip`: float scalar on the device; at 1 no weight and no state changes. Consumes gradients."""
        if not self.parameters:
            return
        self.create_state()
        directions = self._directions(skip)
        if skip is None:
            skip = torch.zeros((), device=local(self.parameters[0].parameter).device)
        for stack in self._stacks:
            self._update_stack(stack, directions, skip)

    def _directions(self, skip: Tensor | None) -> dict[str, Tensor]:
        """Advances the momentum and returns what is to be made orthogonal, per parameter, as local shards."""
        momenta = [local(self.momentum_of[info.name]) for info in self.parameters]
        gradients = [
            local(gradient_of(info)).to(momentum.dtype)
            for info, momentum in zip(self.parameters, momenta, strict=True)
        ]
        if skip is not None:
            # Momentum in the gradient's place leaves the momentum as it is, and no NaN survives into the arithmetic.
            skipped = skip > 0
            for momentum, gradient in zip(momenta, gradients, strict=True):
                torch.where(skipped, momentum, gradient, out=gradient)
        torch._foreach_lerp_(momenta, gradients, 1 - self.momentum)
        if self.config.nesterov:
            torch._foreach_lerp_(gradients, momenta, self.momentum)
        chosen = gradients if self.config.nesterov else momenta
        return {info.name: t for info, t in zip(self.parameters, chosen, strict=True)}

    def _update_stack(self, stack: _Stack, directions: dict[str, Tensor], skip: Tensor) -> None:
        first = stack.slices[0]
        weight = local(first.info.parameter)
        shape = (len(stack.slices) * first.experts, *first.tall)
        dtype = _working_dtype(weight)
        x = torch.empty(shape, dtype=_iteration_dtype(weight), device=weight.device)
        whole: dict[str, Tensor] = {}
        for s in stack.slices:
            if s.info.name not in whole:
                whole[s.info.name] = _whole(directions[s.info.name], s.info.parameter, x.dtype)
        torch._foreach_copy_(stack.places(x), [s.part_of(whole[s.info.name]) for s in stack.slices])
        del whole

        sharded = any(isinstance(s.info.parameter, DTensor) for s in stack.slices)
        # Rows that other ranks hold are zeros here: they are computed with the rest and written nowhere.
        p = (torch.zeros if sharded else torch.empty)(shape, dtype=dtype, device=weight.device)
        pairs = [_overlap(s, place) for s, place in zip(stack.slices, stack.places(p), strict=True)]
        held, parts = [a for a, b in pairs if b.numel()], [b for _, b in pairs if b.numel()]
        if parts:
            torch._foreach_copy_(held, parts)
        update = self._update_function(weight)
        update(
            x,
            p,
            stack.row_sizes,
            stack.scales,
            torch.tensor(self.lr, dtype=dtype),
            torch.tensor(self.weight_decay, dtype=dtype),
            skip,
            self._coefficients,
            self.config.normalize_beta,
            self.config.cautious_weight_decay,
        )
        if parts:
            torch._foreach_copy_(parts, held)

    def _update_function(self, weight: Tensor) -> Callable[..., None]:
        if not (weight.is_cuda if self.compiled is None else self.compiled):
            return update_stack
        if self._compiled_update is None:
            self._compiled_update = torch.compile(update_stack, dynamic=False, fullgraph=True)
        return self._compiled_update

    def row_sizes_of(self) -> dict[str, Tensor]:
        """NorMuon's running sizes by parameter: one dimension, slice after slice, expert after expert. Copies."""
        parts: dict[str, list[Tensor]] = {}
        for name, _, rows in self._named_row_sizes():
            parts.setdefault(name, []).append(rows.flatten())
        return {name: torch.cat(rows) for name, rows in parts.items()}

    def set_row_sizes(self, name: str, sizes: Tensor) -> None:
        """Puts back what `row_sizes_of` gave for one parameter."""
        position = 0
        for _, _, rows in (item for item in self._named_row_sizes() if item[0] == name):
            rows.copy_(sizes[position : position + rows.numel()].view_as(rows))
            position += rows.numel()

    def _named_row_sizes(self) -> list[tuple[str, int, Tensor]]:
        found = []
        for stack in self._stacks:
            if stack.row_sizes is not None:
                for s, rows in zip(stack.slices, stack.row_sizes.split(stack.slices[0].experts), strict=True):
                    found.append((s.info.name, s.start, rows))
        return sorted(found, key=lambda item: item[:2])


def update_stack(
    x: Tensor,
    p: Tensor,
    row_sizes: Tensor | None,
    scales: Tensor,
    lr: Tensor,
    weight_decay: Tensor,
    skip: Tensor,
    polynomials: Coefficients,
    beta: float,
    cautious: bool,
) -> None:
    """One Muon update of a stack, in place on the weights `p` and on `row_sizes`.

    x, p: (batch, long, short), the look-ahead and the weights; row_sizes: (batch, long) or None; scales: (batch, 1, 1);
    lr, weight_decay: scalars on the CPU (numbers would recompile at each step); skip: scalar on the device.
    """
    keep = skip > 0
    u = orthogonalize(x, polynomials).to(p.dtype)
    if row_sizes is not None:
        mean = u.square().mean(dim=-1)
        sizes = torch.where(keep, row_sizes, torch.lerp(row_sizes, mean, 1 - beta))
        row_sizes.copy_(sizes)
        inverse = 1 / sizes.clamp_min(1e-10)
        restore = mean.sum(dim=-1, keepdim=True) / (mean * inverse).sum(dim=-1, keepdim=True).clamp_min(1e-30)
        u = u * (inverse * restore).sqrt()[..., None]
    decay = lr * weight_decay * p
    if cautious:
        decay = torch.where(u * p >= 0, decay, 0.0)
    p.copy_(torch.where(keep, p, p - lr * scales * u - decay))


def _make_stacks(parameters: list[ParameterInfo]) -> list[_Stack]:
    by_shape: dict[tuple[Any, ...], list[_Slice]] = {}
    for info in parameters:
        for start, stop in info.slices:
            s = _Slice(info, start, stop)
            key = (s.tall, s.experts, info.parameter.dtype, local(info.parameter).device)
            by_shape.setdefault(key, []).append(s)
    stacks = []
    for (tall, experts, *_), slices in by_shape.items():
        # Parts of one size, so that each shape is compiled once.
        per_slice = tall[0] * tall[1] * experts
        parts = next(
            n
            for n in range(1, len(slices) + 1)
            if len(slices) % n == 0 and (len(slices) // n * per_slice <= STACK_ELEMENTS or n == len(slices))
        )
        size = len(slices) // parts
        for i in range(0, len(slices), size):
            stacks.append(_Stack(slices[i : i + size], _scales(slices[i : i + size])))
    return stacks


def _scales(slices: list[_Slice]) -> Tensor:
    scales = [max(1.0, s.shape[0] / s.shape[1]) ** 0.5 for s in slices for _ in range(s.experts)]
    weight = local(slices[0].info.parameter)
    return torch.tensor(scales, dtype=_working_dtype(weight), device=weight.device)[:, None, None]


def _whole(shard: Tensor, parameter: Tensor, dtype: torch.dtype) -> Tensor:
    """The full tensor of a direction; gathered in the iteration's dtype, which halves the traffic."""
    return full_like(shard.to(dtype), parameter) if isinstance(parameter, DTensor) else shard


def _overlap(s: _Slice, place: Tensor) -> tuple[Tensor, Tensor]:
    """The part of a slice that this rank holds: in the stack, and in the parameter (both views)."""
    parameter = s.info.parameter.detach()
    if not isinstance(parameter, DTensor):
        return place, s.part_of(parameter)
    shard, first = parameter.to_local(), first_row(parameter)
    if shard.ndim == 3:
        return place[first : first + shard.shape[0]], shard[:, s.start : s.stop]
    low, high = max(s.start, first), max(min(s.stop, first + shard.shape[0]), max(s.start, first))
    return place[:, low - s.start : high - s.start], shard.unsqueeze(0)[:, low - first : high - first]


def _working_dtype(weight: Tensor) -> torch.dtype:
    return torch.float64 if weight.dtype == torch.float64 else torch.float32


def _iteration_dtype(weight: Tensor) -> torch.dtype:
    return torch.bfloat16 if weight.is_cuda and weight.dtype != torch.float64 else _working_dtype(weight)
