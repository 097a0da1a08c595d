"""Freeze a model and add adapters to its projections."""

from collections.abc import Sequence

import torch
from torch import nn

from deskside.config.sections import PROJECTIONS, AdapterConfig
from deskside.ops.linear import Embedding, Linear, Slice
from deskside.ops.moe import Experts
from deskside.precision.dora import Magnitudes
from deskside.precision.frozen import FrozenLinear, freeze
from deskside.precision.lora import Adapter, add_adapter, add_expert_adapters, add_trained_rows, saved_tables
from deskside.utils.errors import UsageError
from deskside.utils.splitmix import derive_seed


def attach_adapters(
    model: nn.Module, config: AdapterConfig, seed: int, trained_tokens: Sequence[int] = ()
) -> None:
    """Freeze `model` in place, unless it is frozen already, and add an adapter to every projection in `config.targets`.

    The tables in `config.modules_to_save` train whole, in float32.

    Blocks must consist of `Linear`s with named projections, and `Experts`. The fused sublayers do not support adapters
    (`precision.convert.why_not_fused`), so such a model runs its ordinary forward.

    trained_tokens: tokens whose rows in the embedding, and in an untied head, are trained too.
    Initial values are a function of the seed and the module's name. Raises UsageError if this model or machine does not
    support the base format, a token is outside of the vocabulary, or no projection is a target.
    """
    whole = [(table, table.weight.detach().float()) for table in saved_tables(model, config)]
    if not any(isinstance(module, FrozenLinear) for module in model.modules()):
        freeze(model, config.base)
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    for table, weight in whole:
        table.weight = nn.Parameter(weight)
    count = 0
    targets = PROJECTIONS if config.targets == "all" else config.targets

    def make_adapter(
        path: str, module: nn.Module, shape: Sequence[int], slices: Sequence[Slice]
    ) -> Adapter | None:
        slices = [s for s in slices if s.name in targets]
        if not slices:
            return None
        device = next(iter((*module.parameters(), *module.buffers()))).device
        adapter = Adapter(shape, slices, config.rank, config.scale, config.dropout, device)
        adapter.reset(torch.Generator().manual_seed(derive_seed(seed, path)))
        return adapter

    for path, module in list(model.named_modules()):
        if isinstance(module, Experts):
            made = {
                name: make_adapter(f"{path}.adapters.{name}", module, shape, module.slices[name])
                for name, shape in module.shapes.items()
            }
            adapters = {name: adapter for name, adapter in made.items() if adapter is not None}
            if adapters:
                add_expert_adapters(module, adapters)
                count += sum(len(adapter.adapted) for adapter in adapters.values())
        elif isinstance(module, Linear) and module.role == "matrix":
            shape = (module.out_features, module.in_features)
            adapter = make_adapter(f"{path}.adapter", module, shape, module.slices)
            if adapter is not None:
                if config.dora:
                    weight = module.dense() if isinstance(module, FrozenLinear) else module.weight
                    adapter.magnitudes = Magnitudes(adapter.adapted, weight)
                add_adapter(module, adapter)
                count += len(adapter.adapted)
    if not count:
        raise UsageError(
            f"adapter.targets: this model has none of the projections {config.targets}; use all, or names from: "
            + ", ".join(PROJECTIONS)
        )
    _train_rows(model, trained_tokens)


def _train_rows(model: nn.Module, tokens: Sequence[int]) -> None:
    if not tokens:
        return
    ids = sorted(set(tokens))
    for module in model.modules():
        if not isinstance(module, Embedding | Linear) or module.role not in ("embedding", "head"):
            continue
        if module.weight.requires_grad:
            continue  # the whole table trains
        entries = module.weight.shape[0]
        if outside := [token for token in ids if not 0 <= token < entries]:
            raise UsageError(f"token {outside[-1]} is outside of the vocabulary of {entries} entries")
        add_trained_rows(module, ids)
