"""AdamW with state that can be named, saved, skipped, made small and put aside.

A checkpoint wants state by parameter name. A training step wants a step that changes nothing when a number on the
device says so, without asking the host. `kernels/adamw.py` updates one weight at a time so, with state in float32,
bfloat16 or 8 bits, on the device or in the host's memory, and clips its gradient while it reads it, which saves a pass
over all of them. Weights of less than 4,096 elements (norms, biases) keep float32 state on the device, because small
ones save nothing, and are where 8 bits hurt; they are updated all at once by torch's fused kernel, called through its
functional form `torch.optim.adamw.adamw` with `found_inf`. So are weights of less than 262,144 elements whose state is
float32 on the device: adapters have hundreds, and launching a kernel for each takes the host longer than clipping takes
the card. On a CPU all with such state are.

A sharded parameter (FSDP2's DTensor) is updated as its local shard: AdamW works on each element alone. Blocks of 256
would not stay the same blocks on another number of GPUs, so 8-bit and offloaded state is for whole weights.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from deskside.config.optim import StateFormat
from deskside.kernels.adamw import adamw_update
from deskside.kernels.adamw_state import (
    BLOCK,
    EXP_AVG,
    EXP_AVG_MAX,
    EXP_AVG_SQ,
    EXP_AVG_SQ_MAX,
    AdamWHyperparameters,
    num_blocks,
    zero_code,
)
from deskside.optim.groups import ParameterInfo
from deskside.optim.offload import OffloadJob, Streamer, host_zeros, pieces
from deskside.optim.sharded import gradient_of, local

SMALL = 4096  # elements; state of smaller weights is float32 and stays on the device
ALONE = 2**18  # elements; a weight with at least this many gets its own launch
STEP = "step"


@dataclass
class AdamWGroup:
    """Parameters that share a learning rate and a weight decay. `lr` is what the next step uses."""

    name: str
    parameters: list[ParameterInfo]
    peak_lr: float
    weight_decay: float
    lr: float = 0.0


class AdamW:
    """AdamW over groups. State is created by the first step, or by `create_state`.

    states: the format of the moments; streamer: where given, they lie in the host's memory and are streamed by it;
    fused: run the Triton kernel rather than its reference, None for CUDA alone. factor: what the next step multiplies
    those gradients with that it clips itself; None is 1.
    """

    def __init__(
        self,
        groups: list[AdamWGroup],
        betas: tuple[float, float],
        eps: float,
        states: StateFormat = "float32",
        streamer: Streamer | None = None,
        fused: bool | None = None,
    ):
        self.groups = groups
        self.betas = betas
        self.eps = eps
        self.states = states
        self.streamer = streamer
        self.fused = fused
        self.state: dict[str, dict[str, Tensor]] = {}
        self.factor: Tensor | None = None
        self._names = {info.name for group in groups for info in group.parameters}

    def create_state(self) -> None:
        """Zero moments (sharded as the parameter is), and a step counter per parameter on its device."""
        for group in self.groups:
            for info in group.parameters:
                if info.name not in self.state:
                    step = torch.zeros((), dtype=torch.float32, device=local(info.parameter).device)
                    self.state[info.name] = self._zero_moments(info.parameter) | {STEP: step}

    def step(self, skip: Tensor | None) -> None:
        """One update of every group. `skip`: float scalar on the device; at 1 nothing changes, counters included."""
        self.create_state()
        jobs: list[OffloadJob] = []
        for group in self.groups:
            held = [info for info in group.parameters if local(info.parameter).numel()]
            self._step_plain([info for info in held if self._plain(info.parameter)], group, skip)
            jobs += self._jobs([info for info in held if not self._plain(info.parameter)], group, skip)
        if self.streamer is not None and jobs:
            self.streamer.run(jobs)
            return
        for job in jobs:
            job.update(job.held)

    def clips(self, info: ParameterInfo) -> bool:
        """Return whether `step` multiplies the gradient by `factor`."""
        return info.name in self._names and not self._plain(info.parameter)

    def _plain(self, parameter: Tensor) -> bool:
        """Return whether torch's own kernel updates it: its state has the weight's dtype and device."""
        here = self.states == "float32" and self.streamer is None
        alone = self._fused(parameter) and parameter.numel() >= ALONE
        return parameter.numel() < SMALL or (here and not alone)

    def _fused(self, parameter: Tensor) -> bool:
        return local(parameter).is_cuda if self.fused is None else self.fused

    def _zero_moments(self, parameter: Tensor) -> dict[str, Tensor]:
        if self._plain(parameter):
            return {key: torch.zeros_like(parameter, requires_grad=False) for key in (EXP_AVG, EXP_AVG_SQ)}
        if self.states != "8bit":
            dtype = torch.bfloat16 if self.states == "bfloat16" else parameter.dtype
            return {key: self._zeros(parameter, parameter.shape, dtype) for key in (EXP_AVG, EXP_AVG_SQ)}
        scales = (num_blocks(parameter.numel()),)
        return {
            EXP_AVG: self._zeros(parameter, parameter.shape, torch.uint8).fill_(zero_code(signed=True)),
            EXP_AVG_SQ: self._zeros(parameter, parameter.shape, torch.uint8).fill_(zero_code(signed=False)),
            EXP_AVG_MAX: self._zeros(parameter, scales, torch.float32),
            EXP_AVG_SQ_MAX: self._zeros(parameter, scales, torch.float32),
        }

    def _zeros(self, parameter: Tensor, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        if self.streamer is not None:
            return host_zeros(shape, dtype, parameter.device)
        if shape == parameter.shape:
            return torch.zeros_like(parameter, dtype=dtype, requires_grad=False)
        return torch.zeros(shape, dtype=dtype, device=parameter.device)

    def _step_plain(self, infos: list[ParameterInfo], group: AdamWGroup, skip: Tensor | None) -> None:
        if not infos:
            return
        states = [self.state[info.name] for info in infos]
        adamw(
            [local(info.parameter.detach()) for info in infos],
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
            weight_decay=group.weight_decay,
            eps=self.eps,
            maximize=False,
        )

    def _jobs(self, infos: list[ParameterInfo], group: AdamWGroup, skip: Tensor | None) -> list[OffloadJob]:
        """The updates of all parameters, in pieces where their state is streamed. Counts the step."""
        if not infos:
            return []
        steps = [self.state[info.name][STEP] for info in infos]
        if skip is None:
            skip = torch.zeros_like(steps[0])
        torch._foreach_add_(steps, [1 - skip] * len(steps))
        hparams = AdamWHyperparameters(group.lr, self.betas, self.eps, group.weight_decay)
        pairs = zip(infos, steps, strict=True)
        return [job for info, step in pairs for job in self._jobs_of(info, step, skip, hparams)]

    def _jobs_of(
        self, info: ParameterInfo, step: Tensor, skip: Tensor, hparams: AdamWHyperparameters
    ) -> Iterator[OffloadJob]:
        p, g = local(info.parameter.detach()).view(-1), local(gradient_of(info)).reshape(-1)
        state = {key: local(t).view(-1) for key, t in self.state[info.name].items() if key != STEP}
        fused, factor = self._fused(info.parameter), self.factor

        def update(part: slice, held: Sequence[Tensor]) -> None:
            moments = dict(zip(state, held, strict=True))
            adamw_update(p[part], g[part], moments, step, skip, hparams, fused, factor)

        for part in pieces(p.numel()) if self.streamer is not None else [slice(0, p.numel())]:
            scales = slice(part.start // BLOCK, num_blocks(part.stop))
            held = [t[scales if key in (EXP_AVG_MAX, EXP_AVG_SQ_MAX) else part] for key, t in state.items()]
            yield OffloadJob(held, partial(update, part))
