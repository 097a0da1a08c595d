"""Which optimiser a parameter belongs to, read from the module that owns it.

Modules say what their weights are, with two attributes that anything may carry (a precision recipe's replacement of a
Linear too): `role` ("matrix", "head", "embedding", "position") for the parameter `weight`, and `slices`, the rows
`start:stop` of the projections that a fused weight stacks. Where a module has several stacked weights (experts),
`slices` maps each one's attribute to its slices. Parameters of one dimension are vectors, whoever owns them. Modules of
the roles "adapter" and "rows" (single rows of a frozen table) say so of everything in them.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from torch import nn

from deskside.utils.errors import UsageError

Role = Literal["matrix", "embedding", "position", "head", "vector", "adapter", "rows"]


@dataclass(frozen=True)
class ParameterInfo:
    """A parameter, its name in the model, what it is, and the rows of the logical matrices in it.

    A matrix is (rows, columns), or (experts, rows, columns); its `slices` cover the rows. They are empty otherwise.
    """

    name: str
    parameter: nn.Parameter
    role: Role
    slices: tuple[tuple[int, int], ...] = ()


def classify(model: nn.Module) -> list[ParameterInfo]:
    """Every trainable parameter of `model` once, in the order of `named_parameters`.

    A token table that is also the output head, because modules share it or the model has no separate head, is a "head":
    the gradient of the logits dominates it, and an embedding's learning rate would be far too high for it.
    Raises UsageError for a weight of two or more dimensions that no module explains.
    """
    known: dict[int, tuple[Role, tuple[tuple[int, int], ...]]] = {}
    for module in model.modules():
        for parameter, role, slices in _explained(module):
            if id(parameter) not in known or role == "head":
                known[id(parameter)] = (role, slices)
    tied = not any(role == "head" for role, _ in known.values())
    found = []
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        if parameter.ndim < 2:
            found.append(ParameterInfo(clean_name(name), parameter, "vector"))
        elif id(parameter) in known:
            role, slices = known[id(parameter)]
            role = "head" if tied and role == "embedding" else role
            found.append(ParameterInfo(clean_name(name), parameter, role, slices if role == "matrix" else ()))
        else:
            raise UsageError(
                f"the optimiser does not know what parameter '{name}' {tuple(parameter.shape)} is: "
                "give its module a `role` (matrix, head, embedding or position), or freeze it"
            )
    return found


def clean_name(name: str) -> str:
    """The name without what torch.compile and activation checkpointing insert, so that a checkpoint fits either way."""
    return name.replace("_orig_mod.", "").replace("_checkpoint_wrapped_module.", "")


def _explained(module: nn.Module) -> Iterator[tuple[nn.Parameter, Role, tuple[tuple[int, int], ...]]]:
    slices = getattr(module, "slices", None)
    whole: Role | None = getattr(module, "role", None)
    if whole in ("adapter", "rows"):
        for parameter in module.parameters():
            yield parameter, whole, ()
        return
    if isinstance(slices, Mapping):
        for attribute, rows in slices.items():
            yield _checked(getattr(module, attribute), "matrix", rows, attribute)
        return
    role, weight = getattr(module, "role", None), getattr(module, "weight", None)
    if role is not None and isinstance(weight, nn.Parameter):
        yield _checked(weight, role, slices or (), "weight")


def _checked(
    parameter: nn.Parameter, role: Role, slices: Sequence[Any], attribute: str
) -> tuple[nn.Parameter, Role, tuple[tuple[int, int], ...]]:
    if role not in ("matrix", "embedding", "position", "head"):
        raise UsageError(f"'{role}' is not a role of a weight: use matrix, head, embedding or position")
    rows = parameter.shape[-2]
    spans = tuple((s.start, s.stop) for s in slices) or ((0, rows),)
    edges = [0, *(stop for _, stop in spans)]
    if [start for start, _ in spans] != edges[:-1] or edges[-1] != rows:
        raise UsageError(f"slices {list(spans)} of '{attribute}' do not cover its {rows} rows")
    return parameter, role, spans
