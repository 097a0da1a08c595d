"""Fused AdamW with state that can be named, saved and skipped.

The arithmetic is torch's fused kernel, called through `torch.optim.adamw.adamw`, its functional form. We hold the
state ourselves because a checkpoint wants it by parameter name, and because the kernel's `found_inf` gives what the
training step needs: a step that changes nothing when a number on the device says so, without asking the host.

A sharded parameter (FSDP2's DTensor) is updated as its local shard: AdamW works on each element alone.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from deskside.optim.groups import ParameterInfo
from deskside.optim.sharded import gradient_of, local

STATE = ("exp_avg", "exp_avg_sq", "step")


@dataclass
class AdamWGroup:
    """Parameters that share a learning rate and a weight decay. `lr` is what the next step uses."""

    name: str
    parameters: list[ParameterInfo]
    peak_lr: float
    weight_decay: float
    lr: float = 0.0


class AdamW:
    """AdamW over groups. State is created by the first step, or by `create_state`."""

    def __init__(self, groups: list[AdamWGroup], betas: tuple[float, float], eps: float):
        self.groups = groups
        self.betas = betas
        self.eps = eps
        self.state: dict[str, dict[str, Tensor]] = {}

    def create_state(self) -> None:
        """Zero moments in the parameter's own dtype (and sharding), and a step counter per parameter on its device."""
        for group in self.groups:
            for info in group.parameters:
                if info.name not in self.state:
                    self.state[info.name] = {
                        "exp_avg": torch.zeros_like(info.parameter, requires_grad=False),
                        "exp_avg_sq": torch.zeros_like(info.parameter, requires_grad=False),
                        "step": torch.zeros((), dtype=torch.float32, device=local(info.parameter).device),
                    }

    def step(self, skip: Tensor | None) -> None:
        """One update of every group. `skip`: float scalar on the device; at 1 nothing changes, counters included."""
        self.create_state()
        for group in self.groups:
            parameters, gradients = [], []
            states: dict[str, list[Tensor]] = {key: [] for key in STATE}
            for info in group.parameters:
                shard = local(info.parameter.detach())
                if shard.numel() == 0:  # a rank without rows of this parameter
                    continue
                parameters.append(shard)
                gradients.append(local(gradient_of(info)))
                for key in STATE:
                    states[key].append(local(self.state[info.name][key]))
            if not parameters:
                continue
            adamw(
                parameters,
                gradients,
                states["exp_avg"],
                states["exp_avg_sq"],
                [],
                states["step"],
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
