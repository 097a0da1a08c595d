"""Putting adapters on a model: its weights are frozen in the base's format, and only what is added here trains.

Nothing is asked of a model but that its blocks are made of `Linear`s with named projections. The hand-written halves do
not know adapters; `precision.convert.not_covered` says so, and such a model runs as it is written.
"""

import hashlib
from collections.abc import Sequence

import torch
from torch import nn

from deskside.config.adapter import AdapterConfig
from deskside.ops.linear import Embedding, Linear
from deskside.ops.lora import Adapter, TrainedRows
from deskside.precision.frozen import FrozenLinear, freeze
from deskside.utils.errors import UsageError


def attach(model: nn.Module, config: AdapterConfig, seed: int, trained_tokens: Sequence[int] = ()) -> None:
    """Freezes `model` in place, unless it is frozen already, and gives every projection of `config.targets` an adapter.

    trained_tokens: entries of the vocabulary whose rows in the embedding, and in a head of its own, train as well.
    Initial values are a function of (seed, name). Raises UsageError for a base that this model or machine cannot have,
    for tokens outside of the vocabulary, and where no projection is a target.
    """
    if not any(isinstance(module, FrozenLinear) for module in model.modules()):
        freeze(model, config.base)
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    count = 0
    for path, module in model.named_modules():
        if not isinstance(module, Linear) or module.role != "matrix":
            continue
        slices = [s for s in module.slices if s.name != "router" and _wanted(s.name, config)]
        if not slices:
            continue
        adapter = Adapter(
            module.in_features,
            module.out_features,
            slices,
            config.rank,
            config.scale,
            config.dropout,
            _device(module),
        )
        adapter.reset(_generator(seed, path))
        module.adapter = adapter
        count += len(slices)
    if not count:
        raise UsageError(f"adapter.targets: no projection of this model is among {config.targets}")
    _train_rows(model, trained_tokens)


def trained_parameters(model: nn.Module) -> int:
    """Numbers that train."""
    return sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)


def _train_rows(model: nn.Module, tokens: Sequence[int]) -> None:
    if not tokens:
        return
    ids = sorted(set(tokens))
    for module in model.modules():
        table = isinstance(module, Embedding) and module.role == "embedding"
        if table or (isinstance(module, Linear) and module.role == "head"):
            weight = module.weight
            assert isinstance(weight, nn.Parameter)
            if ids[0] < 0 or ids[-1] >= weight.shape[0]:
                raise UsageError(f"the vocabulary has {weight.shape[0]} entries, none of them is {ids[-1]}")
            module.trained = TrainedRows(weight, ids)


def _wanted(name: str, config: AdapterConfig) -> bool:
    return config.targets == "all" or name in config.targets


def _device(module: Linear) -> torch.device:
    return module.codes.device if isinstance(module, FrozenLinear) else module.weight.device


def _generator(seed: int, path: str) -> torch.Generator:
    digest = hashlib.blake2b(f"{seed}:{path}.adapter".encode(), digest_size=8).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest, "little") % 2**63)
