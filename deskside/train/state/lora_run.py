"""Runs with LoRA adapters: the model, its execution mode, and what plan.json records."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from deskside.config.run import RunConfig
from deskside.config.sections import AdapterConfig
from deskside.model.transformer import Transformer
from deskside.precision.frozen import stored_bytes
from deskside.precision.lora import trained_parameters
from deskside.utils.errors import UsageError
from deskside.weights import frozen_base

WHY_NOT_FUSED = "the fused sublayers do not support adapters"


def make(
    config: RunConfig,
    weights: Mapping[str, Tensor] | None,
    device: torch.device,
    trained_tokens: Sequence[int] = (),
) -> Transformer:
    """The model of a new run: given weights, frozen in the base's format, and fresh adapters.

    weights: by parameter name, wherever they are; trained_tokens: entries of the vocabulary whose rows train as well.
    Raises UsageError without weights, RunError for those of another architecture.
    """
    if weights is None:
        raise UsageError("adapter: there is nothing to adapt; give trained weights with --init RUN|HF_DIR")
    return frozen_base.make(config.model, _adapter(config), config.seed, weights, device, trained_tokens)


def reopen(config: RunConfig, run_dir: Path, device: torch.device) -> Transformer:
    """The model of a run that is resumed, adapters as they began. Raises RunError where its base was changed."""
    return frozen_base.reopen(run_dir, config.model, _adapter(config), config.seed, device)


def keep_base(model: Transformer, run_dir: Path) -> None:
    """Write what is frozen into the run, once. Raises RunError when the disk refuses."""
    frozen_base.keep(model, run_dir)


def execution_mode(config: RunConfig, device: torch.device) -> str:
    """Return the execution mode: the ordinary forward, compiled on a GPU."""
    asked = config.compute.compile
    return asked if asked != "auto" else "block" if device.type == "cuda" else "off"


def facts(model: Transformer, config: RunConfig) -> dict[str, Any]:
    """For plan.json."""
    adapter = _adapter(config)
    trained = trained_parameters(model)
    return {
        "rank": adapter.rank,
        "scale": adapter.scale,
        "base": adapter.base,
        "trained_parameters": trained,
        "frozen_bytes": stored_bytes(model) - 4 * trained,
        "fused": WHY_NOT_FUSED,
    }


def sentence(model: Transformer, config: RunConfig) -> str:
    """Return one line about what trains and what is frozen."""
    found = facts(model, config)
    return (
        f"adapters of rank {found['rank']}: {found['trained_parameters']:,} parameters train, "
        f"{found['frozen_bytes'] / 2**20:,.0f} MiB of weights are frozen in {found['base']}; blocks run unfused, "
        f"because {WHY_NOT_FUSED}"
    )


def _adapter(config: RunConfig) -> AdapterConfig:
    assert config.adapter is not None
    return config.adapter
