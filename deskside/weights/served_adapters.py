"""PEFT adapters that are kept next to the weights of one model, so that each row of a batch can use another one."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from deskside.model.transformer import Transformer
from deskside.ops.linear import Linear
from deskside.precision.frozen import FrozenLinear
from deskside.precision.lora import add_adapter
from deskside.precision.row_adapters import RowAdapters, RowChoice
from deskside.utils.errors import UsageError
from deskside.weights.peft_adapters import PeftAdapters
from deskside.weights.peft_placement import Placement, placements


@torch.no_grad()
def attach_by_row(model: Transformer, adapters: Sequence[PeftAdapters]) -> RowChoice:
    """Add adapters to a model that generates, whose weights may be stored in codes, in place. Their numbers begin at 1.

    Raises UsageError for adapters that also change tables, tokens, experts or other whole tensors: these can be served
    alone, merged. Raises RunError if an adapter does not fit the model.
    """
    stacks: dict[str, _Stack] = {}
    choice = RowChoice(len(adapters))
    for number, adapter in enumerate(adapters, start=1):
        placed, others = placements(adapter, model.config)
        if others:
            raise UsageError(
                f"{adapter.folder}: also changes {others[0]}, which an adapter beside others cannot; serve it alone: "
                f"deskside serve {adapter.folder}"
            )
        for placement in placed:
            linear = model.get_submodule(placement.path)
            assert isinstance(linear, Linear)
            stack = stacks.setdefault(placement.path, _Stack(linear, len(adapters)))
            stack.add(number, placement)
    for stack in stacks.values():
        add_adapter(stack.linear, stack.joined(choice, model.activation_dtype))
    return choice


@dataclass
class _Stack:
    """The adapters of one Linear, in pieces on the host."""

    linear: Linear
    count: int
    a: list[Tensor] = field(default_factory=list)
    b: list[Tensor] = field(default_factory=list)
    layout: list[int] = field(default_factory=list)
    gain_CO: Tensor | None = None

    def add(self, number: int, placement: Placement) -> None:
        """Add the part of an adapter that belongs to this Linear."""
        _, _, start, stop, low_rank = placement
        b = torch.zeros(self.linear.out_features, len(low_rank.a))
        b[start:stop] = low_rank.scale * low_rank.b
        self.a.append(low_rank.a)
        self.b.append(b)
        self.layout += [number] * len(low_rank.a)
        if low_rank.magnitude is not None:
            if self.gain_CO is None:
                self.gain_CO = torch.ones(self.count + 1, self.linear.out_features)
            frozen = isinstance(self.linear, FrozenLinear)
            weight = self.linear.dense() if frozen else self.linear.weight  # type: ignore[operator]
            self.gain_CO[number, start:stop] = low_rank.gain(weight[start:stop]).cpu()

    def joined(self, choice: RowChoice, dtype: torch.dtype) -> RowAdapters:
        """Return the module, on the device of the Linear."""
        device = next(iter((*self.linear.parameters(), *self.linear.buffers()))).device
        gain_CO = None if self.gain_CO is None else self.gain_CO.to(device, dtype)
        a_RI, b_OR = torch.cat(self.a).to(device, dtype), torch.cat(self.b, dim=1).to(device, dtype)
        return RowAdapters(a_RI, b_OR, tuple(self.layout), gain_CO, choice)
