"""PEFT adapters that stay beside the weights of one model, so that each row of a batch can use another one."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from deskside.model.transformer import Transformer
from deskside.ops.linear import Linear
from deskside.ops.logical import LogicalTensor
from deskside.precision.frozen import FrozenLinear
from deskside.precision.lora import add_adapter
from deskside.precision.row_adapters import RowAdapters, RowChoice
from deskside.utils.errors import UsageError
from deskside.weights.hf import by_hf_name
from deskside.weights.hf_families import family_of
from deskside.weights.peft_adapters import LowRank, PeftAdapters, in_our_rows


@torch.no_grad()
def attach_by_row(model: Transformer, adapters: Sequence[PeftAdapters]) -> RowChoice:
    """Add adapters to a model that generates, whose weights may be stored in codes, in place. Their numbers begin at 1.

    Raises UsageError for adapters that also change tables, tokens, experts or other whole tensors: these can be served
    alone, merged. Raises RunError if an adapter does not fit the model.
    """
    with torch.device("meta"):
        skeleton = Transformer(
            model.config
        )  # has the names of all weights, also of those that are codes in the model
    by_name = by_hf_name(skeleton, family_of(model.config))
    path_of = {
        id(module.weight): path
        for path, module in skeleton.named_modules()
        if isinstance(module, Linear) and module.role == "matrix"
    }
    stacks: dict[str, _Stack] = {}
    choice = RowChoice(len(adapters))
    for number, adapter in enumerate(adapters, start=1):
        _check_supported(adapter, by_name, path_of)
        for module in adapter.low_rank:
            parts = by_name[f"{module}.weight"]
            low_rank, row = in_our_rows(adapter, module, parts, model.config), 0
            for part in parts:
                path = path_of[id(part.parameter)]
                linear = model.get_submodule(path)
                assert isinstance(linear, Linear)
                stack = stacks.setdefault(path, _Stack(linear, len(adapters)))
                stack.add(number, low_rank.rows(row, row + part.stop - part.start), part.start, part.stop)
                row += part.stop - part.start
    for stack in stacks.values():
        add_adapter(stack.linear, stack.joined(choice, model.activation_dtype))
    return choice


def _check_supported(
    adapter: PeftAdapters, by_name: Mapping[str, Sequence[LogicalTensor]], path_of: Mapping[int, str]
) -> None:
    others = [*adapter.tensors, *adapter.rows, *adapter.experts]
    for module in adapter.low_rank:
        if f"{module}.weight" not in by_name:
            raise UsageError(f"{adapter.folder}: adapts {module}, which this base model does not have")
        if not all(id(part.parameter) in path_of for part in by_name[f"{module}.weight"]):
            others.append(module)
    if others:
        raise UsageError(
            f"{adapter.folder}: also changes {others[0]}, which an adapter beside others cannot; serve it alone: "
            f"deskside serve {adapter.folder}"
        )


@dataclass
class _Stack:
    """The adapters of one Linear, in pieces on the host."""

    linear: Linear
    count: int
    a: list[Tensor] = field(default_factory=list)
    b: list[Tensor] = field(default_factory=list)
    layout: list[int] = field(default_factory=list)
    gain_CO: Tensor | None = None

    def add(self, number: int, low_rank: LowRank, start: int, stop: int) -> None:
        """Add an adapter of the rows `start:stop` of the weight."""
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
