"""AdamW with state by parameter name (for checkpoints), in several formats, on the device or in host memory.

A step can be skipped by a number on the device, without waiting for the host. There are two implementations:

- `kernels/adamw.py` updates one weight per launch, with state in float32, bfloat16, 8 or 4 bits, on the device or in
  host memory. It clips the gradient while reading it, which saves a pass over all gradients.
- torch's fused kernel (`torch.optim.adamw.adamw` with `found_inf`) updates many weights at once, with float32 state on
  the device. It is always used for weights of less than 4,096 elements (norms, biases): other state would save little
  memory there, and 8 bits would hurt most. If the state of larger weights is also float32 on the device, it is used for
  those of less than 262,144 elements (adapters have hundreds, and launching a kernel for each takes the host longer
  than clipping takes the GPU), and on a CPU for all weights. It is never used for weights in bfloat16, which it would
  round to nearest.

AdamW works elementwise, so each rank updates its local shard of a sharded parameter (FSDP2's DTensor). 8-bit and
4-bit state has blocks of 256 or 128 elements, which would differ for another number of GPUs, so it needs unsharded
weights, as does offloaded state.
"""

from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from deskside.budget.step_spec import StateFormat
from deskside.kernels import adamw_4bit
from deskside.kernels.adamw import adamw_update
from deskside.kernels.adamw_state import (
    BLOCK,
    EXP_AVG,
    EXP_AVG_MAX,
    EXP_AVG_SQ,
    EXP_AVG_SQ_MAX,
    MASTER,
    RESIDUAL,
    AdamWHyperparameters,
    num_blocks,
    zero_code,
)
from deskside.kernels.functional import at_least_float32
from deskside.kernels.stochastic_rounding import rounding_seed
from deskside.optim.groups import EVERYTHING, ParameterInfo
from deskside.optim.offload import OffloadJob, Streamer, parts, run_jobs, zero_state
from deskside.optim.sharded import gradient_of, local

SMALL = 4096  # elements; the state of smaller weights is always float32 on the device
OWN_LAUNCH = 2**18  # elements; a weight with at least this many gets its own kernel launch
STEP = "step"


@dataclass
class AdamWGroup:
    """Parameters with a common learning rate and weight decay. lr, weight_decay: those of the next step."""

    name: str
    parameters: list[ParameterInfo]
    peak_lr: float
    peak_weight_decay: float
    lr: float = 0.0

    def __post_init__(self) -> None:
        self.weight_decay = self.peak_weight_decay


class AdamW:
    """AdamW over groups. State is created by the first step, or by `create_state`.

    states: format of the moments. streamer: keep the moments in host memory and update them through this streamer.
    fused: run the Triton kernel instead of its reference; None: on CUDA only.
    cautious: decay only weights that the update moves towards zero (arXiv 2510.12402).
    masters: with a streamer, keep a float32 copy of each weight in bfloat16 in its state. The copy is updated, and the
        weight is its nearest value.
    residuals: weights in bfloat16 have 8 more bits in their state, always on the device (`kernels/weights_24bit.py`).
    clip_coefficient: factor of the gradients in the next step, for parameters with `clips_gradient`; None means 1.
    rounding_step: number of completed steps, of which the rounding of weights in bfloat16 is a function.
    """

    def __init__(
        self,
        groups: list[AdamWGroup],
        betas: tuple[float, float],
        eps: float,
        states: StateFormat = "float32",
        streamer: Streamer | None = None,
        fused: bool | None = None,
        masters: bool = False,
        cautious: bool = False,
        residuals: bool = False,
    ):
        self.groups, self.cautious = groups, cautious
        self.masters, self.residuals = masters, residuals
        self.betas = betas
        self.eps = eps
        self.states = states
        self.streamer = streamer
        self.fused = fused
        self.rounding_step = 0
        self.state: dict[str, dict[str, Tensor]] = {}
        self.clip_coefficient: Tensor | None = None
        self._names = {info.name for group in groups for info in group.parameters}

    def create_state(self, names: Container[str] = EVERYTHING) -> None:
        """Create missing state: zero moments (sharded like the parameter) and a step counter on its device."""
        for group in self.groups:
            for info in group.parameters:
                if info.name not in self.state and info.name in names:
                    step = torch.zeros((), dtype=torch.float32, device=local(info.parameter).device)
                    state = self._zero_moments(info.parameter) | self._more_bits(info.parameter)
                    self.state[info.name] = state | {STEP: step}

    def step(self, skip: Tensor | None, names: Container[str] = EVERYTHING) -> None:
        """Update the parameters `names`.

        skip: float scalar on the device; if it is 1, neither weights nor state change.
        """
        self.create_state(names)
        jobs: list[OffloadJob] = []
        for group in self.groups:
            infos = [info for info in group.parameters if info.name in names]
            local_infos = [info for info in infos if local(info.parameter).numel()]
            self._step_torch([info for info in local_infos if self._uses_torch(info.parameter)], group, skip)
            jobs += self._jobs(
                [info for info in local_infos if not self._uses_torch(info.parameter)], group, skip
            )
        run_jobs(jobs, self.streamer)

    def clips_gradient(self, info: ParameterInfo) -> bool:
        """Return True if `step` multiplies this parameter's gradient by `clip_coefficient`."""
        return info.name in self._names and not self._uses_torch(info.parameter)

    def _uses_torch(self, parameter: Tensor) -> bool:
        """Return True if torch's fused kernel updates this parameter."""
        if parameter.dtype == torch.bfloat16:  # torch would round to nearest
            return False
        torch_state = self.states == "float32" and self.streamer is None
        own_launch = self._fused(parameter) and parameter.numel() >= OWN_LAUNCH
        return parameter.numel() < SMALL or (torch_state and not own_launch)

    def _fused(self, parameter: Tensor) -> bool:
        return local(parameter).is_cuda if self.fused is None else self.fused

    def _zero_moments(self, parameter: Tensor) -> dict[str, Tensor]:
        if self._uses_torch(parameter):
            return {key: torch.zeros_like(parameter, requires_grad=False) for key in (EXP_AVG, EXP_AVG_SQ)}
        n = parameter.numel()
        codes: Sequence[int]
        if self.states == "4bit":
            codes, blocks, zero = (adamw_4bit.num_bytes(n),), adamw_4bit.num_blocks(n), adamw_4bit.zero_byte
        elif self.states == "8bit":
            codes, blocks, zero = parameter.shape, num_blocks(n), zero_code
        else:
            dtype = torch.bfloat16 if self.states == "bfloat16" else at_least_float32(parameter)
            return {key: self._zeros(parameter, parameter.shape, dtype) for key in (EXP_AVG, EXP_AVG_SQ)}
        return {
            EXP_AVG: self._zeros(parameter, codes, torch.uint8).fill_(zero(signed=True)),
            EXP_AVG_SQ: self._zeros(parameter, codes, torch.uint8).fill_(zero(signed=False)),
            EXP_AVG_MAX: self._zeros(parameter, (blocks,), torch.float32),
            EXP_AVG_SQ_MAX: self._zeros(parameter, (blocks,), torch.float32),
        }

    def _more_bits(self, parameter: Tensor) -> dict[str, Tensor]:
        if parameter.dtype == torch.bfloat16 and self.residuals:
            return {RESIDUAL: torch.zeros_like(parameter, dtype=torch.int8, requires_grad=False)}
        if parameter.dtype == torch.bfloat16 and self.masters:
            return {MASTER: self._zeros(parameter, parameter.shape, torch.float32).copy_(parameter.detach())}
        return {}

    def _zeros(self, parameter: Tensor, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        return zero_state(parameter, shape, dtype, self.streamer)

    def _step_torch(self, infos: list[ParameterInfo], group: AdamWGroup, skip: Tensor | None) -> None:
        if not infos:
            return
        states = [self.state[info.name] for info in infos]
        weights = [local(info.parameter.detach()) for info in infos]
        cautious = self.cautious and group.weight_decay > 0
        before = [weight.clone() for weight in weights] if cautious else []
        adamw(
            weights,
            [local(gradient_of(info)) for info in infos],
            [local(state[EXP_AVG]) for state in states],
            [local(state[EXP_AVG_SQ]) for state in states],
            [],
            [state[STEP] for state in states],
            fused=True,
            found_inf=skip,
            amsgrad=False,
            beta1=self.betas[0],
            beta2=self.betas[1],
            lr=group.lr,
            weight_decay=0.0 if cautious else group.weight_decay,
            eps=self.eps,
            maximize=False,
        )
        for weight, old, state in zip(weights, before, states, strict=cautious):
            # The update has the sign of the first moment.
            decay = torch.where(local(state[EXP_AVG]) * old >= 0, group.lr * group.weight_decay * old, 0.0)
            weight.sub_(decay if skip is None else torch.where(skip > 0, 0.0, decay))

    def _jobs(self, infos: list[ParameterInfo], group: AdamWGroup, skip: Tensor | None) -> list[OffloadJob]:
        """Return the updates of these parameters, split into pieces if their state is streamed. Counts the step."""
        if not infos:
            return []
        steps = [self.state[info.name][STEP] for info in infos]
        if skip is None:
            skip = torch.zeros_like(steps[0])
        torch._foreach_add_(steps, [1 - skip] * len(steps))
        cautious = self.cautious and group.weight_decay > 0
        hparams = AdamWHyperparameters(group.lr, self.betas, self.eps, group.weight_decay, cautious)
        pairs = zip(infos, steps, strict=True)
        return [job for info, step in pairs for job in self._jobs_of(info, step, skip, hparams)]

    def _jobs_of(
        self, info: ParameterInfo, step: Tensor, skip: Tensor, hparams: AdamWHyperparameters
    ) -> Iterator[OffloadJob]:
        p, g = local(info.parameter.detach()).view(-1), local(gradient_of(info)).reshape(-1)
        state = {key: local(t).view(-1) for key, t in self.state[info.name].items() if key != STEP}
        residual = state.pop(RESIDUAL, None)
        fused, clip_coefficient = self._fused(info.parameter), self.clip_coefficient
        seed = rounding_seed(info.name, self.rounding_step)

        def update(part: slice, device_state: Sequence[Tensor]) -> None:
            moments = dict(zip(state, device_state, strict=True))
            master = moments.pop(MASTER, None)
            adamw_update(
                p[part] if master is None else master,
                g[part],
                moments,
                step,
                skip,
                hparams,
                fused,
                clip_coefficient,
                seed,
                part.start,
                None if residual is None else residual[part],
            )
            if master is not None:
                p[part].copy_(master)

        for part in parts(p.numel(), self.streamer):
            codes, scales = part, slice(part.start // BLOCK, num_blocks(part.stop))
            if self.states == "4bit":
                codes = slice(part.start // 2, adamw_4bit.num_bytes(part.stop))
                scales = slice(part.start // adamw_4bit.BLOCK, adamw_4bit.num_blocks(part.stop))
            slices = {EXP_AVG_MAX: scales, EXP_AVG_SQ_MAX: scales, MASTER: part}
            host_state = [t[slices.get(key, codes)] for key, t in state.items()]
            yield OffloadJob(host_state, partial(update, part))
