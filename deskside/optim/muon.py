"""Muon: orthogonalized momentum for the logical matrices of a model (Jordan et al. 2024, kellerjordan.github.io).

A single matrix of 768 x 768 does not fill a GPU, so the iteration should process many matrices of one shape at once.
And q, k and v in one fused weight are three matrices, which must be orthogonalized separately. So every step gathers
the slices of all layers into stacks of one shape (with wide matrices transposed, so that up and down projections share
a stack), updates each stack as one batch, and scatters the result back:

    gradient -> momentum (shaped and sharded like the parameter) -> look-ahead (Nesterov)
             -> stack (16 bits on CUDA, float32 on a CPU) -> Newton-Schulz -> row normalization -> parameter

The steps before and after Newton-Schulz (`kernels/newton_schulz.py`) read and write each tensor once; on CUDA, they are
one launch each for a whole stack (`kernels/muon.py`). They move 14 bytes per weight before and 10 after, the division
by the norm 4, and the mean squares of the rows 2. For the 85M block weights of `124m` this is 2.5 GB, or 0.61 ms at
4.2 TB/s. torch.compile is not used, because it would take seconds before the first step.

Row normalization follows NorMuon (arXiv 2510.05491): each row of the update is divided by the root of its running mean
square, then the update is scaled back to its previous Frobenius norm. Rows are those of the tall matrix, one for each
index along the longer side. Its columns have equal norms already, by orthogonalization.

The update of a (rows, columns) matrix is scaled by sqrt(max(1, rows / columns)), so that, for square and tall matrices,
the change of the output per unit of learning rate does not depend on the shape (Jordan et al.). Weight decay is
decoupled. "Cautious" decay applies only to weights that the update moves towards zero too (arXiv 2510.12402).

The momentum of a sharded parameter (FSDP2) is sharded too. Its look-ahead is written into the gradient and gathered in
full, every rank runs the same iteration, and each writes back its own rows. For momentum in host memory
(`optim/offload.py`) or in 8 bits (`kernels/momentum_8bit.py`), the look-ahead is written into the gradients too. So
they are invalid after a step.

If several processes hold the same weights, each matrix is updated by one of them (`optim/owners.py`).
"""

from collections.abc import Container, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from deskside.config.optim import MuonConfig
from deskside.kernels.adamw_state import BLOCK, RESIDUAL, num_blocks
from deskside.kernels.functional import at_least_float32
from deskside.kernels.momentum_8bit import look_ahead_8bit
from deskside.kernels.muon import Direction, PointerTable, Update, apply, look_ahead, row_sums
from deskside.kernels.newton_schulz import MIN_SYMMETRIC, coefficients, orthogonalize
from deskside.kernels.stochastic_rounding import rounding_seed
from deskside.optim.groups import EVERYTHING, ParameterInfo
from deskside.optim.muon_stacks import (
    Stack,
    flops_of_iteration,
    local_part,
    make_stacks,
    slices_of,
    with_expert_dim,
)
from deskside.optim.normuon import normuon_factors
from deskside.optim.offload import OffloadJob, Streamer, parts, run_jobs, zero_state
from deskside.optim.owners import ALONE, NewWeights, Replicas, assign_owners, receive_on_rank_zero
from deskside.optim.row_factors import row_factors
from deskside.optim.sharded import gather_full, gradient_of, is_sharded, local

MOMENTUM, MOMENTUM_SCALES = "momentum", "momentum_scales"  # names of tensors of the state


class Muon:
    """Muon over the matrices `parameters`. The next step uses `lr`, `weight_decay` and `momentum`.

    streamer: keep the momentum in host memory and update it through this streamer.
    fused: run the Triton kernels instead of their reference; None: on CUDA only.
    separate: a stack holds slices of one parameter only, so that parameters can be updated one at a time.
    replicas: the processes that share the update. Only the owner of a matrix (`owners`) needs its gradient.
    clip_coefficient: factor of the gradients in the next step; None means 1.
    """

    def __init__(
        self,
        parameters: list[ParameterInfo],
        config: MuonConfig,
        streamer: Streamer | None = None,
        fused: bool | None = None,
        separate: bool = False,
        replicas: Replicas = ALONE,
    ):
        self.parameters, self.replicas = parameters, replicas
        self.owners = assign_owners(
            {info.name: flops_of_iteration(info) for info in parameters}, replicas.size
        )
        self.new_weights = NewWeights()
        self.config = config
        self.separate = separate
        self.streamer = streamer
        self.lr = self.peak_lr = 0.0
        self.weight_decay = self.peak_weight_decay = 0.0
        self.momentum = config.momentum
        self.rounding_step = 0
        self.clip_coefficient: Tensor | None = None
        self.momentum_buffers: dict[str, Tensor] = {}  # codes, if it is in 8 bits
        self.momentum_scales: dict[str, Tensor] = {}  # of the blocks of codes
        self.residuals: dict[str, Tensor] = {}  # of weights in 24 bits, on the device
        self._fused = fused
        self._coefficients = coefficients(config.coefficients, config.ns_steps)
        self._owned = [info for info in parameters if self.owns(info.name)]
        self._stacks = make_stacks(self._owned, separate)
        self._has_state = False

    def owns(self, name: str) -> bool:
        """Return True if this process updates the matrix `name`."""
        return self.owners.get(name, self.replicas.rank) == self.replicas.rank

    def set_progress(self, lr_factor: float, progress: float, step: int) -> None:
        """See `Optimizer.set_progress`."""
        config = self.config
        self.rounding_step = step
        self.lr = self.peak_lr * lr_factor
        self.weight_decay = self.peak_weight_decay * self.decay_factor(progress)
        warmup = min(step / config.momentum_warmup_steps, 1.0) if config.momentum_warmup_steps else 1.0
        self.momentum = config.momentum_start + (config.momentum - config.momentum_start) * warmup
        if config.momentum_end is not None:
            left = min(max(1 - progress, 0.0) / config.momentum_cooldown, 1.0)
            self.momentum = config.momentum_end + (self.momentum - config.momentum_end) * left

    def decay_factor(self, progress: float) -> float:
        """Return the weight decay as a fraction of its peak."""
        constant = self.config.weight_decay_schedule == "constant"
        return 1.0 if constant else 1 - min(max(progress, 0.0), 1.0)

    def create_state(self) -> None:
        """Create missing momentum and row mean squares, filled with zeros."""
        self._has_state = True
        for info in self._owned:
            if info.name not in self.momentum_buffers:
                parameter, dtype = info.parameter, self._momentum_dtype(info)
                self.momentum_buffers[info.name] = zero_state(
                    parameter, parameter.shape, dtype, self.streamer
                )
                if self.config.momentum_in_8_bits:
                    blocks = (num_blocks(parameter.numel()),)
                    self.momentum_scales[info.name] = zero_state(
                        parameter, blocks, torch.float32, self.streamer
                    )
                if self._has_residual(info):
                    self.residuals[info.name] = torch.zeros_like(
                        parameter, dtype=torch.int8, requires_grad=False
                    )
        if self.config.normalize == "neuron":
            for stack in self._stacks:
                if stack.row_mean_squares is None:
                    first = stack.slices[0]
                    weight = first.info.parameter
                    shape = (len(stack.slices) * first.experts, first.tall_shape[0])
                    stack.row_mean_squares = torch.zeros(
                        shape, dtype=at_least_float32(weight), device=local(weight).device
                    )

    def step(self, skip: Tensor | None, names: Container[str] = EVERYTHING) -> None:
        """Update the matrices `names`. Their gradients may be overwritten and are invalid afterwards.

        skip: float scalar on the device; if it is 1, no weight and no state changes.
        """
        infos = [info for info in self.parameters if info.name in names]
        if not infos:
            return
        self.create_state()
        self.new_weights.wait()  # weights that no layer has read yet
        if skip is None:
            skip = torch.zeros((), device=local(self.parameters[0].parameter).device)
        mine = [info for info in infos if self.owns(info.name)]
        try:
            for group in [[info] for info in mine] if self.separate else [mine]:
                self._update(group, skip)
        finally:  # a rank that runs out of memory in a dry step must not leave the others waiting
            if self.owners:
                self.new_weights.send(infos, self.owners)

    def _update(self, infos: list[ParameterInfo], skip: Tensor) -> None:
        """Update matrices that this process owns."""
        directions: dict[str, Tensor] = {}
        if self.config.momentum_in_8_bits or self.streamer is not None:
            directions = self._whole_directions(infos, skip)
        updated = {info.name for info in infos}
        for stack in self._stacks:
            if stack.slices[0].info.name in updated:
                self._update_stack(stack, directions, skip)

    def _whole_directions(self, infos: list[ParameterInfo], skip: Tensor) -> dict[str, Tensor]:
        """Update momentum in host memory or in 8 bits. Returns the directions to orthogonalize, by parameter."""
        jobs, directions = [], {}
        for info in infos:
            gradient = gradient_of(info)
            if not self.config.momentum_in_8_bits:
                gradient = gradient.to(at_least_float32(info.parameter))
            directions[info.name] = gradient = gradient.contiguous()
            flat, momentum = gradient.view(-1), self.momentum_buffers[info.name].view(-1)
            for part in parts(flat.numel(), self.streamer):
                state = [momentum[part]]
                if self.config.momentum_in_8_bits:
                    blocks = slice(part.start // BLOCK, num_blocks(part.stop))
                    state.append(self.momentum_scales[info.name][blocks])
                update = partial(self._update_momentum, gradient=flat[part], skip=skip)
                jobs.append(OffloadJob(state, update))
        run_jobs(jobs, self.streamer)
        return directions

    def _update_momentum(self, device_state: Sequence[Tensor], gradient: Tensor, skip: Tensor) -> None:
        momentum, *scales = device_state
        if scales:
            fused = gradient.is_cuda if self._fused is None else self._fused
            nesterov, clip = self.config.nesterov, self.clip_coefficient
            look_ahead_8bit(gradient, momentum, scales[0], self.momentum, nesterov, skip, clip, fused)
        else:  # without the kernel, because the copies over the bus determine the time of a piece
            self._look_ahead([Direction(gradient, momentum, gradient)], skip, None)

    def _look_ahead(self, slices: list[Direction], skip: Tensor, table: PointerTable | None) -> Tensor | None:
        return look_ahead(slices, self.momentum, self.config.nesterov, skip, self.clip_coefficient, table)

    def _fill(
        self, stack: Stack, x: Tensor, directions: dict[str, Tensor], skip: Tensor, fused: bool
    ) -> Tensor | None:
        """Write the directions of the stack's slices into x (batch, long side, short side). Updates their momentum.

        Returns the sum of the squares of each matrix, if the kernel computed it.
        """
        gathered: dict[str, Tensor] = {}
        held: list[Direction] = []
        for s, x_slice in zip(stack.slices, stack.slice_views(x), strict=True):
            name, parameter = s.info.name, s.info.parameter
            if is_sharded(parameter):
                if name not in gathered:  # in the dtype of the stack, which halves the traffic
                    direction = self._sharded_direction(s.info, directions, skip, fused)
                    gathered[name] = gather_full(direction.to(x.dtype), parameter)
                x_slice.copy_(s.part_of(gathered[name]))
            elif name in directions:
                x_slice.copy_(s.part_of(directions[name]))
            else:
                gradient = s.part_of(gradient_of(s.info).contiguous())
                held.append(Direction(gradient, s.part_of(self.momentum_buffers[name]), x_slice))
        return self._look_ahead(held, skip, stack.look_ahead_table if fused else None) if held else None

    def _sharded_direction(
        self, info: ParameterInfo, directions: dict[str, Tensor], skip: Tensor, fused: bool
    ) -> Tensor:
        """Return this rank's part of the direction.

        The result is kept in `directions`, because slices of one weight can be in several stacks.
        """
        if info.name not in directions:
            g, momentum = local(gradient_of(info)), local(self.momentum_buffers[info.name])
            g = g.to(at_least_float32(g)).contiguous()
            g_ERC, momentum_ERC = with_expert_dim(g), with_expert_dim(momentum)
            self._look_ahead([Direction(g_ERC, momentum_ERC, g_ERC)], skip, PointerTable() if fused else None)
            directions[info.name] = g
        return directions[info.name]

    def _update_stack(self, stack: Stack, directions: dict[str, Tensor], skip: Tensor) -> None:
        first = stack.slices[0]
        weight = local(first.info.parameter)
        fused = weight.is_cuda and weight.dtype != torch.float64 if self._fused is None else self._fused
        shape = (len(stack.slices) * first.experts, *first.tall_shape)
        x = torch.empty(shape, dtype=_stack_dtype(weight), device=weight.device)
        squares = self._fill(stack, x, directions, skip, fused)
        u = orthogonalize(x, self._coefficients, fused and shape[2] >= MIN_SYMMETRIC, squares)
        del x
        factors = normuon_factors(
            u, stack.row_mean_squares, self.config.normalize_beta, at_least_float32(weight), skip
        )
        updates = []
        for s, u_ERC, factors_ERC in zip(
            stack.slices, stack.slice_views(u), stack.slice_views(factors), strict=True
        ):
            (update, part), (factor, _) = local_part(s, u_ERC), local_part(s, factors_ERC)
            if part.numel():
                seed = rounding_seed(f"{s.info.name}/{s.start}", 0)
                residual = self.residuals.get(s.info.name)
                own = None if residual is None else local_part(s, u_ERC, residual)[1]
                updates.append(Update(part, update, factor, s.scale, seed, residual=own))
        if updates:
            updates = self._with_row_factors(updates, stack.row_sums_table if fused else None)
            decay, cautious = self.lr * self.weight_decay, self.config.cautious_weight_decay
            table = stack.apply_table if fused else None
            apply(updates, self.lr, decay, cautious, skip, self.rounding_step, table)

    def _with_row_factors(self, updates: list[Update], table: PointerTable | None) -> list[Update]:
        """Return the updates with the factors of `row_floor` and `radial_brake`, if any is set."""
        if not self.config.uses_row_sums:
            return updates
        sums = row_sums(updates, table)
        factors = row_factors(sums, self.lr, self.config.row_floor, self.config.radial_brake)
        return [
            replace(update, row_factors=own[:, : update.p.shape[0], : update.p.shape[1]])
            for update, own in zip(updates, factors, strict=True)
        ]

    def state(self) -> dict[str, Tensor]:
        """Return the state of the matrices that this process owns, by `kind/parameter name`."""
        tensors = {f"{MOMENTUM}/{name}": momentum for name, momentum in self.momentum_buffers.items()}
        tensors |= {f"{MOMENTUM_SCALES}/{name}": scales for name, scales in self.momentum_scales.items()}
        tensors |= {f"{RESIDUAL}/{name}": residual for name, residual in self.residuals.items()}
        return tensors | {f"row_sizes/{name}": rows for name, rows in self.row_mean_squares().items()}

    def state_on_rank_zero(self) -> dict[str, Tensor]:
        """Return the state of all matrices on rank 0, that of other owners on the host. All replicas call this."""
        own = self.state()
        if not self.owners or not self._has_state:
            return own
        whole: dict[str, Tensor] = {}
        for info in self.parameters:
            for key, (shape, dtype, device) in self._layouts(info).items():
                tensor = own[key] if self.owns(info.name) else torch.empty(shape, dtype=dtype, device=device)
                received = receive_on_rank_zero(tensor, self.owners[info.name], self.replicas.rank)
                whole |= {} if received is None else {key: received}
        return whole

    def state_names(self) -> set[str]:
        """Return the keys of the state of all matrices."""
        return {key for info in self.parameters for key in self._layouts(info)}

    def _layouts(self, info: ParameterInfo) -> dict[str, tuple[torch.Size, torch.dtype, torch.device]]:
        """Return the shape, dtype and device of a matrix's state."""
        weight = local(info.parameter)
        host = torch.device("cpu") if self.streamer is not None else weight.device
        layouts = {f"{MOMENTUM}/{info.name}": (info.parameter.shape, self._momentum_dtype(info), host)}
        if self.config.momentum_in_8_bits:
            blocks = torch.Size((num_blocks(info.parameter.numel()),))
            layouts[f"{MOMENTUM_SCALES}/{info.name}"] = (blocks, torch.float32, host)
        if self._has_residual(info):
            layouts[f"{RESIDUAL}/{info.name}"] = (info.parameter.shape, torch.int8, weight.device)
        if self.config.normalize == "neuron":
            rows = sum(s.experts * s.tall_shape[0] for s in slices_of(info))
            layouts[f"row_sizes/{info.name}"] = (torch.Size((rows,)), at_least_float32(weight), weight.device)
        return layouts

    def _has_residual(self, info: ParameterInfo) -> bool:
        return self.config.weights == "24bit" and info.parameter.dtype == torch.bfloat16

    def _momentum_dtype(self, info: ParameterInfo) -> torch.dtype:
        if self.config.momentum_in_8_bits:
            return torch.int8
        return at_least_float32(info.parameter) if self.config.states == "float32" else torch.bfloat16

    def row_mean_squares(self) -> dict[str, Tensor]:
        """Return copies of NorMuon's running mean squares by parameter, flattened in the order slice, expert, row."""
        parts: dict[str, list[Tensor]] = {}
        for name, _, rows in self._named_row_mean_squares():
            parts.setdefault(name, []).append(rows.flatten())
        return {name: torch.cat(rows) for name, rows in parts.items()}

    def set_row_mean_squares(self, name: str, values: Tensor) -> None:
        """Restore the result of `row_mean_squares` for one parameter."""
        position = 0
        for _, _, rows in (entry for entry in self._named_row_mean_squares() if entry[0] == name):
            rows.copy_(values[position : position + rows.numel()].view_as(rows))
            position += rows.numel()

    def _named_row_mean_squares(self) -> list[tuple[str, int, Tensor]]:
        """Return (parameter name, first row of the slice, running mean squares as a view) for each slice, sorted."""
        entries = []
        for stack in self._stacks:
            if stack.row_mean_squares is not None:
                for s, rows in zip(
                    stack.slices, stack.row_mean_squares.split(stack.slices[0].experts), strict=True
                ):
                    entries.append((s.info.name, s.start, rows))
        return sorted(entries, key=lambda entry: entry[:2])


def _stack_dtype(weight: Tensor) -> torch.dtype:
    return torch.bfloat16 if weight.is_cuda and weight.dtype != torch.float64 else at_least_float32(weight)
