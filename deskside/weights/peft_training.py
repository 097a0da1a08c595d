"""Adapters of a PEFT directory as the beginning of training: options of a run, and their values in its model."""

from typing import Any

import torch

from deskside.config.dimensions import adaptable_projections
from deskside.config.model import ModelConfig
from deskside.config.sections import PROJECTIONS
from deskside.model.transformer import Transformer
from deskside.precision.lora import Adapter
from deskside.utils.errors import RunError, UsageError
from deskside.weights.hf import hf_name
from deskside.weights.hf_families import family_of
from deskside.weights.peft_adapters import PeftAdapters
from deskside.weights.peft_placement import placements


def adapter_options(adapters: PeftAdapters, config: ModelConfig) -> dict[str, Any]:
    """Return the options `adapter.*` of a run that continues to train these adapters. config: of the base model.

    Raises UsageError if a run cannot have such adapters: with ranks or factors of their own, in some layers only, or
    beside other trained weights than whole tables.
    """
    placed, others = placements(adapters, config)
    tables = _tables(config)
    reason = next((f"they also change {name}" for name in others if name not in tables), None)
    if config.tie_word_embeddings and adapters.tensors and not adapters.config.ensure_weight_tying:
        reason = "they untie embedding and head"
    names = {placement.name for placement in placed}
    if len({(len(p.low_rank.a), p.low_rank.scale) for p in placed}) > 1:
        reason = "their ranks or factors differ"
    elif len(placed) != len(names) * config.num_hidden_layers:
        reason = "only some layers have them"
    elif foreign := names - set(adaptable_projections(config)):
        reason = f"{foreign.pop()} cannot be adapted"
    if not placed or reason:
        raise UsageError(
            f"--resume-from {adapters.folder}: a run cannot have such adapters ({reason or 'there are none'}); give "
            "the directory as the model, which merges them, and train new ones: --adapter.rank 16"
        )
    given = adapters.config
    rank = len(placed[0].low_rank.a)
    return {
        "rank": rank,
        "alpha": placed[0].low_rank.scale * (rank**0.5 if given.use_rslora else rank),
        "rank_stabilised": given.use_rslora,
        "targets": [name for name in PROJECTIONS if name in names],
        "dora": given.use_dora,
        "modules_to_save": sorted({tables[name] for name in adapters.tensors}),
        "dropout": given.lora_dropout,
    }


@torch.no_grad()
def load_adapters(model: Transformer, adapters: PeftAdapters) -> None:
    """Set the adapters of a model, which has those of `adapter_options`, to the values of the directory."""
    placed, _ = placements(adapters, model.config)
    for placement in placed:
        adapter = model.get_submodule(placement.path).adapter
        assert isinstance(adapter, Adapter)
        adapter.a[placement.name].copy_(placement.low_rank.a)
        adapter.b[placement.name].copy_(placement.low_rank.b)
        if placement.low_rank.magnitude is not None and adapter.magnitudes is not None:
            adapter.magnitudes.values[placement.name].copy_(placement.low_rank.magnitude)
    for name, tensor in adapters.tensors.items():
        table = model.embed if _tables(model.config)[name] == "embed_tokens" else model.head
        assert table is not None
        if len(tensor) > len(table.weight) or tensor.shape[1:] != table.weight.shape[1:]:
            raise RunError(
                f"{adapters.folder}: {name} is {tuple(tensor.shape)}, which is larger than the model's"
            )
        table.weight[: len(tensor)] = tensor.to(table.weight)


def _tables(config: ModelConfig) -> dict[str, str]:
    """Return the name in `adapter.modules_to_save` of each table that may train, by its name in transformers."""
    family = family_of(config)
    # PEFT stores two copies of a tied table.
    head = "embed_tokens" if config.tie_word_embeddings else "lm_head"
    return {hf_name("embed.weight", family): "embed_tokens", hf_name("lm_head.weight", family): head}
