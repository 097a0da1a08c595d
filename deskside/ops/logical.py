"""Logical tensors: the names and shapes that a model's parameters would have if nothing were fused.

Initialization, import and export must not depend on whether q, k and v share a weight, so they iterate over
`logical_tensors(model)` instead of `named_parameters()`. A logical name is the module path without `transparent`
modules (operators, lists of projections), in which the name of a Linear is replaced by that of its slice: rows 0-767 of
`layers.0.attn.input.projections.0.weight` are `layers.0.attn.q_proj.weight`. Experts add their index:
`layers.0.mlp.experts.3.gate_proj.weight`.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from torch import Tensor, nn

from deskside.ops.composite import AttentionSublayer, LayerNorm, RMSNorm
from deskside.ops.linear import Embedding, Linear
from deskside.ops.moe import ROUTER_BIAS, Experts, MixtureOfExperts

Kind = Literal["matrix", "head", "embedding", "position", "norm", "bias"]


@dataclass(frozen=True)
class LogicalTensor:
    """Rows `start:stop` of a parameter or, if the parameter stacks experts, of one expert."""

    name: str
    kind: Kind
    parameter: nn.Parameter
    start: int
    stop: int
    expert: int | None = None

    def slice_of(self, tensor: Tensor) -> Tensor:
        """Return this tensor's part of `tensor`: the parameter, its gradient or an optimizer state of that shape."""
        if self.expert is not None:
            tensor = tensor[self.expert]
        return tensor[self.start : self.stop]

    @property
    def view(self) -> Tensor:
        """The values: a detached view of the parameter."""
        return self.slice_of(self.parameter.detach())


def logical_tensors(model: nn.Module) -> list[LogicalTensor]:
    """Return all parameters of `model` as logical tensors, each once, in module order."""
    tensors: list[LogicalTensor] = []
    seen: set[int] = set()
    for path, module in model.named_modules():
        for tensor in _module_tensors(model, path, module):
            tensors.append(tensor)
            seen.add(id(tensor.parameter))
    missing = [name for name, parameter in model.named_parameters() if id(parameter) not in seen]
    if missing:
        raise TypeError(
            f"these parameters belong to modules that have no logical tensors: {', '.join(missing)}"
        )
    return tensors


def _module_tensors(model: nn.Module, path: str, module: nn.Module) -> Iterator[LogicalTensor]:
    def make_tensor(
        attribute: str, name: str, kind: Kind, start: int, stop: int, expert: int | None = None
    ) -> LogicalTensor:
        return LogicalTensor(name, kind, getattr(module, attribute), start, stop, expert)

    prefix = _logical_path(model, path)
    if isinstance(module, Linear):
        owner = prefix.rpartition(".")[0]
        if module.weight is None:
            raise TypeError(f"{path}: its weight is stored in codes; merge the model first")
        for s in module.slices:
            name = f"{owner}.{s.name}" if owner else s.name
            yield make_tensor("weight", f"{name}.weight", module.role, s.start, s.stop)
            if module.bias is not None:
                yield make_tensor("bias", f"{name}.bias", "bias", s.start, s.stop)
    elif isinstance(module, Embedding):
        yield make_tensor("weight", f"{prefix}.weight", module.role, 0, module.weight.shape[0])
    elif isinstance(module, RMSNorm | LayerNorm):
        yield make_tensor("weight", f"{prefix}.weight", "norm", 0, module.weight.shape[0])
        if isinstance(module, LayerNorm) and module.bias is not None:
            yield make_tensor("bias", f"{prefix}.bias", "bias", 0, module.bias.shape[0])
    elif isinstance(module, AttentionSublayer) and module.sinks is not None:
        yield make_tensor("sinks", f"{prefix}.sinks", "bias", 0, module.heads)
    elif isinstance(module, MixtureOfExperts) and module.e_score_correction_bias is not None:
        experts = len(module.e_score_correction_bias)
        yield make_tensor(ROUTER_BIAS, f"{prefix}.router.{ROUTER_BIAS}", "bias", 0, experts)
    elif isinstance(module, Experts):
        if module.gate_up_weight is None:
            raise TypeError(f"{path}: its weights are stored in codes; merge the model first")
        for attribute, slices in module.slices.items():
            for expert in range(getattr(module, attribute).shape[0]):
                for s in slices:
                    name = f"{prefix}.{expert}.{s.name}"
                    yield make_tensor(attribute, f"{name}.weight", "matrix", s.start, s.stop, expert)
                    bias = attribute.replace("weight", "bias")
                    if getattr(module, bias) is not None:
                        first = expert * slices[-1].stop
                        yield make_tensor(bias, f"{name}.bias", "bias", first + s.start, first + s.stop)


def _logical_path(model: nn.Module, path: str) -> str:
    """Return `path` without transparent modules and lists of projections."""
    parts: list[str] = []
    module = model
    inside_operator = getattr(model, "transparent", False)
    for name in path.split(".") if path else []:
        module = getattr(module, name)
        if getattr(module, "transparent", False):
            inside_operator = True
        elif inside_operator and isinstance(module, nn.ModuleList):
            pass
        else:
            parts.append(name)
    return ".".join(parts)
