"""Muon: momentum, made orthogonal, for the logical matrices of a model (Jordan et al. 2024, kellerjordan.github.io).

The work is arranged around two facts. The iteration wants many matrices of one shape at once, because one of 768 x 768
does not fill a GPU. And q, k, v of one fused weight are three matrices, which must be orthogonalised apart. So every
step gathers the slices of all layers into stacks of one shape (wide ones transposed, so that up and down projections
share a stack), updates each stack as one batch, and scatters the result back:

    gradient -> momentum (shaped and sharded like the parameter) -> look-ahead (Nesterov)
             -> stack (bfloat16 on CUDA, float32 on a CPU) -> Newton-Schulz -> row normalisation -> parameter

What surrounds Newton-Schulz reads and writes each tensor once, on CUDA in two Triton kernels (`kernels/muon.py`): 14
bytes per weight before, 10 after and 2 for the rows' sizes. Of the 74M block weights of `124m` that is 1.9 GB, 0.45 ms
at 4.2 TB/s. Nothing is compiled by torch.compile, which would cost seconds before the first step.

Newton-Schulz finds the nearest matrix whose singular values are all one. An odd polynomial of a matrix changes its
singular values and keeps its singular vectors. Iterating X <- a X + b X (X^T X) + c X (X^T X)^2 with suited (a, b, c)
drives every singular value towards one, and needs only GEMMs, in which bfloat16 is good enough. There are two sets:

- `polar_express` (Amsel et al., arXiv 2505.16932, algorithm 1): each iteration uses the best polynomial for the
  interval that the one before left, for singular values from 1e-3 of the largest up.
- `quintic` (Jordan et al. 2024, kellerjordan.github.io/posts/muon): one polynomial, steepest at zero; singular values
  end between about 0.7 and 1.2 rather than at one.

Row normalisation is NorMuon's (arXiv 2510.05491): each row of the update is divided by its running size, then the
whole update gets its old Frobenius norm back. It acts along the longer side, because orthogonalisation has already made
the vectors along the shorter side equally long.

The update of a (rows, columns) matrix is scaled by sqrt(max(1, rows / columns)), which keeps the change of the output
per unit of learning rate independent of the shape (Jordan et al.). Weight decay is decoupled; "cautious" applies it
only where the update, too, moves the weight towards zero (arXiv 2510.12402).

A sharded parameter (FSDP2) keeps its momentum sharded; the look-ahead is written into its gradient and gathered in
full, every rank does the same iteration, and each writes back its own rows. Momentum in the host's memory
(`optim/offload.py`) is streamed, and its look-ahead is written into the gradients too. So gradients count as consumed.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor

from deskside.config.optim import MuonConfig
from deskside.kernels.muon import apply, look_ahead
from deskside.optim.groups import ParameterInfo
from deskside.optim.offload import OffloadJob, Streamer, host_zeros, pieces
from deskside.optim.sharded import first_row, full_like, gradient_of, is_sharded, local

STACK_ELEMENTS = 2**26
"""Largest stack. Beyond this a bigger batch is no faster, and its temporaries would decide the peak memory."""

Coefficients = tuple[tuple[float, float, float], ...]

_POLAR_EXPRESS: Coefficients = (
    (8.28721201814563, -23.595886519098837, 17.300387312530933),
    (4.107059111542203, -2.9478499167379106, 0.5448431082926601),
    (3.9486908534822946, -2.908902115962949, 0.5518191394370137),
    (3.3184196573706015, -2.488488024314874, 0.51004894012372),
    (2.300652019954817, -1.6689039845747493, 0.4188073119525673),
    (1.891301407787398, -1.2679958271945868, 0.37680408948524835),
    (1.8750014808534479, -1.2500016453999487, 0.3750001645474248),
)
_POLAR_EXPRESS_LIMIT = (1.875, -1.25, 0.375)
_QUINTIC = (3.4445, -4.775, 2.0315)

SAFETY = 1.01
"""Rounding may push a singular value above the interval, where the polynomials grow without bound: room for 1 %."""


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

    @property
    def scale(self) -> float:
        """sqrt(max(1, rows / columns))."""
        return max(1.0, self.shape[0] / self.shape[1]) ** 0.5

    def part_of(self, whole: Tensor) -> Tensor:
        """(experts, rows, columns) of a full tensor shaped like the parameter."""
        return _three(whole)[:, self.start : self.stop]


@dataclass
class _Stack:
    """Slices of one shape that are updated as one batch of `len(slices) * experts` matrices."""

    slices: list[_Slice]
    row_sizes: Tensor | None = None  # (batch, long), NorMuon's running mean square of each row

    def places(self, stack: Tensor) -> list[Tensor]:
        """The stack (batch, long, short) as one (experts, rows, columns) view per slice."""
        parts = zip(self.slices, stack.split(self.slices[0].experts), strict=True)
        return [part if s.shape == s.tall else part.mT for s, part in parts]


class Muon:
    """Muon over the matrices `parameters`. `lr`, `weight_decay` and `momentum` are what the next step uses.

    streamer: where given, the momentum lies in the host's memory and is streamed by it; fused: run the Triton kernels
    rather than their reference, None for CUDA alone.
    """

    def __init__(
        self,
        parameters: list[ParameterInfo],
        config: MuonConfig,
        streamer: Streamer | None = None,
        fused: bool | None = None,
    ):
        self.parameters = parameters
        self.config = config
        self.streamer = streamer
        self.lr = self.peak_lr = 0.0
        self.weight_decay = self.peak_weight_decay = 0.0
        self.momentum = config.momentum
        self.momentum_of: dict[str, Tensor] = {}
        self._fused = fused
        self._coefficients = coefficients(config.coefficients, config.ns_steps)
        self._stacks = _make_stacks(parameters)

    def set_progress(self, lr_factor: float, progress: float, step: int) -> None:
        """See `Optimizer.set_progress`."""
        config = self.config
        self.lr = self.peak_lr * lr_factor
        remaining = (
            1 - min(max(progress, 0.0), 1.0) if config.weight_decay_schedule == "linear to zero" else 1.0
        )
        self.weight_decay = self.peak_weight_decay * remaining
        risen = min(step / config.momentum_warmup_steps, 1.0) if config.momentum_warmup_steps else 1.0
        self.momentum = config.momentum_start + (config.momentum - config.momentum_start) * risen

    def create_state(self) -> None:
        """Zero momentum and row sizes, where they do not exist yet."""
        for info in self.parameters:
            if info.name not in self.momentum_of:
                parameter = info.parameter
                dtype = _working_dtype(parameter) if self.config.states == "float32" else torch.bfloat16
                self.momentum_of[info.name] = (
                    host_zeros(parameter.shape, dtype, parameter.device)
                    if self.streamer is not None
                    else torch.zeros_like(parameter, dtype=dtype, requires_grad=False)
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
        if skip is None:
            skip = torch.zeros((), device=local(self.parameters[0].parameter).device)
        directions: dict[str, Tensor] = {}
        if self.streamer is not None:
            directions = self._streamed_directions(self.streamer, skip)
        for stack in self._stacks:
            self._update_stack(stack, directions, skip)

    def _streamed_directions(self, streamer: Streamer, skip: Tensor) -> dict[str, Tensor]:
        """Advances momentum that lies on the host, piece by piece. What is to be made orthogonal, by parameter."""
        jobs, directions = [], {}
        for info in self.parameters:
            gradient = gradient_of(info).to(_working_dtype(info.parameter)).contiguous()
            directions[info.name] = gradient
            flat, momentum = gradient.view(-1), self.momentum_of[info.name].view(-1)
            for part in pieces(flat.numel()):
                jobs.append(OffloadJob([momentum[part]], partial(self._advance, g=flat[part], skip=skip)))
        streamer.run(jobs)
        return directions

    def _advance(self, held: Sequence[Tensor], g: Tensor, skip: Tensor) -> None:
        # Eager, because the bus is what these pieces wait for.
        look_ahead(g, held[0], g, self.momentum, self.config.nesterov, skip, fused=False)

    def _fill(
        self, stack: _Stack, x: Tensor, directions: dict[str, Tensor], skip: Tensor, fused: bool
    ) -> None:
        """Writes the directions of a stack's slices into it, (batch, long, short); advances their momentum."""
        whole: dict[str, Tensor] = {}
        for s, place in zip(stack.slices, stack.places(x), strict=True):
            name, parameter = s.info.name, s.info.parameter
            if is_sharded(parameter):
                if name not in whole:  # gathered in the iteration's dtype, which halves the traffic
                    direction = self._sharded_direction(s.info, directions, skip, fused)
                    whole[name] = full_like(direction.to(x.dtype), parameter)
                place.copy_(s.part_of(whole[name]))
            elif self.streamer is not None:
                place.copy_(s.part_of(directions[name]))
            else:
                gradient, momentum = s.part_of(gradient_of(s.info)), s.part_of(self.momentum_of[name])
                look_ahead(gradient, momentum, place, self.momentum, self.config.nesterov, skip, fused)

    def _sharded_direction(
        self, info: ParameterInfo, directions: dict[str, Tensor], skip: Tensor, fused: bool
    ) -> Tensor:
        """This rank's rows of the direction, computed once, because slices of one weight can be in several stacks."""
        if info.name not in directions:
            g, momentum = local(gradient_of(info)), local(self.momentum_of[info.name])
            g = g.to(_working_dtype(g))
            look_ahead(
                _three(g), _three(momentum), _three(g), self.momentum, self.config.nesterov, skip, fused
            )
            directions[info.name] = g
        return directions[info.name]

    def _update_stack(self, stack: _Stack, directions: dict[str, Tensor], skip: Tensor) -> None:
        first = stack.slices[0]
        weight = local(first.info.parameter)
        fused = weight.is_cuda and weight.dtype != torch.float64 if self._fused is None else self._fused
        shape = (len(stack.slices) * first.experts, *first.tall)
        x = torch.empty(shape, dtype=_iteration_dtype(weight), device=weight.device)
        self._fill(stack, x, directions, skip, fused)
        u = orthogonalize(x, self._coefficients)
        del x
        factors = _row_factors(u, stack.row_sizes, self.config.normalize_beta, _working_dtype(weight), skip)
        for s, u_ERC, factors_ERC in zip(stack.slices, stack.places(u), stack.places(factors), strict=True):
            (update, part), (factor, _) = _overlap(s, u_ERC), _overlap(s, factors_ERC)
            if part.numel():
                decay = self.lr * self.weight_decay
                cautious = self.config.cautious_weight_decay
                apply(part, update, factor, self.lr * s.scale, decay, cautious, skip, fused)

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


def _row_factors(
    u: Tensor, row_sizes: Tensor | None, beta: float, dtype: torch.dtype, skip: Tensor
) -> Tensor:
    """Return the factor of each row of the update, shaped to broadcast over u; ones without row normalization.

    u: (batch, long, short); row_sizes: (batch, long), advanced in place unless skip is 1, or None.
    """
    if row_sizes is None:
        return torch.ones((1, 1, 1), dtype=dtype, device=u.device).expand(u.shape)
    mean = torch.linalg.vector_norm(u, dim=-1, dtype=dtype).square() / u.shape[-1]
    sizes = torch.where(skip > 0, row_sizes, torch.lerp(row_sizes, mean, 1 - beta))
    row_sizes.copy_(sizes)
    inverse = 1 / sizes.clamp_min(1e-10)
    restore = mean.sum(dim=-1, keepdim=True) / (mean * inverse).sum(dim=-1, keepdim=True).clamp_min(1e-30)
    return (inverse * restore).sqrt()[..., None].expand(u.shape)


def _make_stacks(parameters: list[ParameterInfo]) -> list[_Stack]:
    by_shape: dict[tuple[Any, ...], list[_Slice]] = {}
    for info in parameters:
        for start, stop in info.slices:
            s = _Slice(info, start, stop)
            key = (s.tall, s.experts, info.parameter.dtype, local(info.parameter).device)
            by_shape.setdefault(key, []).append(s)
    stacks = []
    for (tall, experts, *_), slices in by_shape.items():
        # Parts of one size: none is left over that would not fill the device.
        per_slice = tall[0] * tall[1] * experts
        parts = next(
            n
            for n in range(1, len(slices) + 1)
            if len(slices) % n == 0 and (len(slices) // n * per_slice <= STACK_ELEMENTS or n == len(slices))
        )
        size = len(slices) // parts
        for i in range(0, len(slices), size):
            stacks.append(_Stack(slices[i : i + size]))
    return stacks


def _three(whole: Tensor) -> Tensor:
    """(experts, rows, columns) of a tensor shaped like a parameter."""
    return whole if whole.ndim == 3 else whole.unsqueeze(0)


def _overlap(s: _Slice, place: Tensor) -> tuple[Tensor, Tensor]:
    """The part of a slice that this rank holds: in the stack, and in the parameter (both views)."""
    parameter = s.info.parameter.detach()
    if not is_sharded(parameter):
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


def coefficients(kind: Literal["polar_express", "quintic"], steps: int) -> Coefficients:
    """The polynomial (a, b, c) of each of `steps` iterations."""
    if kind == "quintic":
        return (_QUINTIC,) * steps
    safe = tuple((a / SAFETY, b / SAFETY**3, c / SAFETY**5) for a, b, c in _POLAR_EXPRESS)
    return (safe + (_POLAR_EXPRESS_LIMIT,) * steps)[:steps]


def orthogonalize(x: Tensor, polynomials: Coefficients) -> Tensor:
    """(batch, rows >= columns) -> the same shape and dtype, singular values near one. A zero matrix stays zero.

    Tall, so that the products X^T X are of the smaller size; the caller transposes wide matrices.
    """
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    norm = torch.linalg.vector_norm(x, dim=(-2, -1), keepdim=True, dtype=wide)
    x = x * (1 / (norm * SAFETY + 1e-12)).to(x.dtype)
    for a, b, c in polynomials:
        gram = x.mT @ x
        step = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
        x = torch.baddbmm(x, x, step, beta=a)
    return x
