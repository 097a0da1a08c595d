"""Merging adapters into plain weights: W + scale B A for every adapted projection, where W is the dequantized base.

The merged model computes the same function up to rounding and has no adapters. Samples, the summary and exports use
it, and `load_model` returns it for a run with adapters.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError
from torch import nn

from deskside.config.base import first_problem
from deskside.config.run import RunConfig
from deskside.config.sections import AdapterConfig
from deskside.model.init import allocate
from deskside.model.transformer import Transformer
from deskside.precision.frozen import FrozenLinear
from deskside.precision.lora import adapter_of, trained_rows_of
from deskside.utils.errors import RunError, UsageError
from deskside.utils.parsing import read_json_object
from deskside.weights import frozen_base
from deskside.weights.checkpoint import Checkpoint, find, load_file_into, newest_readable, verify


@torch.no_grad()
def merged(
    model: Transformer, device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32
) -> Transformer:
    """Return a merged copy of the model on `device`; the given model is unchanged.

    dtype: of weights with two or more dimensions; the sums are computed in float32.
    """
    plain = allocate(model.config, device, dtype)
    merge_into(plain, model)
    return plain


@torch.no_grad()
def merge_into(
    plain: Transformer, model: Transformer, original: Mapping[str, torch.Tensor] | None = None
) -> None:
    """Overwrite the weights of a model without adapters with the merged weights of an adapted one.

    The models may be on different devices. The first device needs memory for one more weight: its codes and
    float32.

    original: the unquantized base weights by parameter name, used instead of the frozen ones.
    """
    given = dict(model.named_modules())
    for path, target in plain.named_modules():
        source = given[path]
        for leaf, parameter in target.named_parameters(recurse=False):
            given_weight = None
            own = source._parameters.get(leaf)
            if original is not None and (own is None or not own.requires_grad):  # else it trains as a whole
                given_weight = original[f"{path}.{leaf}"]
            if leaf != "weight":
                parameter.copy_(getattr(source, leaf) if given_weight is None else given_weight)
                continue
            # Not bound to a name, so that it is freed before the next weight is computed.
            parameter.copy_(_weight(source, parameter.device, given_weight))


@dataclass(frozen=True)
class AdaptedRun:
    """A run's model with its adapters, the run's configuration, and the step of its checkpoint.

    init: what transformers should load as the base; for a run that started from a run, that run's exported model.
    """

    model: Transformer
    config: RunConfig
    adapter: AdapterConfig
    step: int
    init: str | None


def open_adapted(
    run_dir: Path, warn: Callable[[str], None], device: torch.device | str = "cpu"
) -> AdaptedRun:
    """Load the newest good checkpoint of a run with adapters, with its base.

    Raises UsageError for a run without adapters or checkpoints, RunError if run.json or all checkpoints are
    damaged.
    """
    run = read_json_object(run_dir / "run.json")
    config = run_config(run_dir, run)
    if config.adapter is None:
        raise UsageError(f"{run_dir}: was trained without adapters; they are made with: --adapter.rank 16")
    checkpoints = run_dir / "checkpoints"
    newest = newest_readable(
        checkpoints, lambda checkpoint: read_adapted(run_dir, checkpoint, config, device), warn
    )
    if newest is None:
        if found := find(checkpoints):
            raise RunError(f"{run_dir}: all {len(found)} checkpoints are damaged; restore one of them")
        raise UsageError(f"{run_dir}: has no checkpoint yet; resume it first")
    checkpoint, model = newest
    init = run.get("init")
    if init is not None and (Path(init) / "run.json").is_file():
        init = str(Path(init) / "model")
    return AdaptedRun(model, config, config.adapter, checkpoint.step, init)


def run_config(run_dir: Path, run: Mapping[str, Any]) -> RunConfig:
    """Return the configuration in the content of run.json. Raises RunError if it is not valid."""
    try:
        return RunConfig.model_validate(run.get("config"))
    except ValidationError as error:
        raise RunError(f"{run_dir / 'run.json'}: config.{first_problem(error)}; restore the file") from None


def read_adapted(
    run_dir: Path, checkpoint: Checkpoint, config: RunConfig, device: torch.device | str
) -> Transformer:
    """Load one checkpoint. Raises Damaged for a bad checkpoint, RunError for a bad base."""
    assert config.adapter is not None
    verify(checkpoint, weights_only=True)
    model = frozen_base.reopen(run_dir, config.model, config.adapter, config.seed, device)
    load_file_into(model, checkpoint, device, trained_only=True)
    return model


def _weight(module: nn.Module, device: torch.device, original: torch.Tensor | None = None) -> torch.Tensor:
    """Return the weight that a module computes with: dequantized to float32 on `device`, or as it is.

    original: replaces the frozen weight.
    """
    adapter, trained = adapter_of(module), trained_rows_of(module)
    if original is not None:
        weight = original.to(device).to(torch.float32, copy=True)
    elif isinstance(module, FrozenLinear):
        weight = module.dense(device=device)
    else:
        weight = module.get_parameter("weight").detach()
        if adapter is None and trained is None:
            return weight
        weight = weight.to(device).to(torch.float32, copy=True)
    if adapter is not None:
        for s in adapter.adapted:
            weight[s.start : s.stop] += adapter.delta(s.name).to(device)
    if trained is not None:
        weight[trained.ids.to(device)] = trained.rows.detach().to(device, torch.float32)
    return weight
