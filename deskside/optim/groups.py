"""The role of each parameter for the optimizer, determined by the module that owns it.

A module declares its weight with two attributes: `role` ("matrix", "head", "embedding", "position") for the parameter
`weight`, and `slices`, the rows `start:stop` of the projections that are stacked in this weight. If a module has
several stacked weights (experts), `slices` maps the attribute name of each weight to its slices. Parameters with fewer
than two dimensions are always vectors. The roles "adapter" and "rows" (single rows of a frozen table) apply to all
parameters in a module. `without_gradient` names parameters of a module that have no gradient.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from torch import nn

from deskside.utils.errors import UsageError


class _Everything:
    """A container to which every name belongs."""

    def __contains__(self, name: object) -> bool:
        return True


EVERYTHING = _Everything()
Role = Literal["matrix", "embedding", "position", "head", "vector", "adapter", "rows"]


@dataclass(frozen=True)
class ParameterInfo:
    """A parameter with its name in the model and its role.

    slices: for a matrix (rows, columns) or (experts, rows, columns), the (start, stop) rows of the logical matrices
    stacked in it, which cover all rows; otherwise empty.
    """

    name: str
    parameter: nn.Parameter
    role: Role
    slices: tuple[tuple[int, int], ...] = ()


def classify_parameters(model: nn.Module) -> list[ParameterInfo]:
    """Return every parameter of `model` that a gradient trains, once, in the order of `named_parameters`.

    An embedding that is also the output head, because modules share it or the model has no separate head, gets the role
    "head": most of its gradient comes from the logits, and the learning rate of an embedding would be far too high.
    Raises UsageError for a weight with two or more dimensions whose module declares no role, or slices that do not
    cover the weight.
    """
    known: dict[int, tuple[Role, tuple[tuple[int, int], ...]]] = {}
    for module in model.modules():
        for parameter, role, slices in _declared_weights(module):
            if id(parameter) not in known or role == "head":
                known[id(parameter)] = (role, slices)
    without_gradient = {
        id(getattr(module, name))
        for module in model.modules()
        for name in getattr(module, "without_gradient", ())
    }
    tied = not any(role == "head" for role, _ in known.values())
    infos = []
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad or id(parameter) in without_gradient:
            continue
        if parameter.ndim < 2:
            infos.append(ParameterInfo(clean_name(name), parameter, "vector"))
        elif id(parameter) in known:
            role, slices = known[id(parameter)]
            role = "head" if tied and role == "embedding" else role
            infos.append(ParameterInfo(clean_name(name), parameter, role, slices if role == "matrix" else ()))
        else:
            raise UsageError(
                f"parameter '{name}' {tuple(parameter.shape)} has no role for the optimizer; "
                "give its module a `role` (matrix, head, embedding or position), or freeze it"
            )
    return infos


def trained_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters that training changes by name, tied ones once. Those without a gradient are included."""
    return {clean_name(name): p for name, p in model.named_parameters() if p.requires_grad}


def clean_name(name: str) -> str:
    """Return a parameter name without the parts that torch.compile and activation checkpointing insert."""
    return name.replace("_orig_mod.", "").replace("_checkpoint_wrapped_module.", "")


def _declared_weights(module: nn.Module) -> Iterator[tuple[nn.Parameter, Role, tuple[tuple[int, int], ...]]]:
    """Yield (parameter, role, slices) of the weights whose role this module declares."""
    slices = getattr(module, "slices", None)
    role: Role | None = getattr(module, "role", None)
    if role in ("adapter", "rows"):
        for parameter in module.parameters():
            yield parameter, role, ()
        return
    if isinstance(slices, Mapping):
        for attribute, rows in slices.items():
            if getattr(module, attribute) is None:
                continue  # frozen in codes
            yield _checked(getattr(module, attribute), "matrix", rows, attribute)
        return
    weight = getattr(module, "weight", None)
    if role is not None and isinstance(weight, nn.Parameter):
        yield _checked(weight, role, slices or (), "weight")


def _checked(
    parameter: nn.Parameter, role: Role, slices: Sequence[Any], attribute: str
) -> tuple[nn.Parameter, Role, tuple[tuple[int, int], ...]]:
    if role not in ("matrix", "embedding", "position", "head"):
        raise UsageError(f"'{role}' is not a role of a weight; use matrix, head, embedding or position")
    rows = parameter.shape[-2]
    spans = tuple((s.start, s.stop) for s in slices) or ((0, rows),)
    edges = [0, *(stop for _, stop in spans)]
    if [start for start, _ in spans] != edges[:-1] or edges[-1] != rows:
        raise UsageError(f"slices {list(spans)} of '{attribute}' do not cover its {rows} rows")
    return parameter, role, spans
