"""An adapted model -> a plain one: W + scale B A for every adapted projection, W being what its codes stand for.

The merged model computes what the adapted one computed, up to rounding, and needs nothing of ours: it is what samples,
summary and export are made of, and what `load_model` gives for a run with adapters.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from pydantic import ValidationError
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import nn

from deskside.config.adapter import AdapterConfig
from deskside.config.base import first_problem
from deskside.config.run import RunConfig
from deskside.model.init import allocate
from deskside.model.transformer import Transformer
from deskside.precision.frozen import FrozenLinear
from deskside.precision.lora import adapter_of, trained_rows_of
from deskside.utils.errors import RunError, UsageError
from deskside.utils.parsing import json_object
from deskside.weights import frozen_base
from deskside.weights.checkpoint_files import WEIGHTS, Checkpoint, Damaged, find, load_weights, verify


@torch.no_grad()
def merged(
    model: Transformer, device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32
) -> Transformer:
    """A model of its own on `device`, without adapters. dtype: of weights with two or more dimensions; sums are made
    in float32. The given model stays as it is."""
    plain = allocate(model.config, device, dtype)
    merge_into(plain, model)
    return plain


@torch.no_grad()
def merge_into(
    plain: Transformer, model: Transformer, original: Mapping[str, torch.Tensor] | None = None
) -> None:
    """Overwrite the weights of a model without adapters with those of an adapted one, merged. The two may lie on
    different devices. Beside them the first one's needs memory for one weight at a time: its codes and float32.

    original: the weights that were frozen, by parameter name, to merge into instead of their frozen form.
    """
    given = dict(model.named_modules())
    for path, target in plain.named_modules():
        source = given[path]
        for leaf, parameter in target.named_parameters(recurse=False):
            given_weight = None
            if original is not None and not _trains(source, leaf):
                given_weight = original[f"{path}.{leaf}"]
            if leaf != "weight":
                parameter.copy_(getattr(source, leaf) if given_weight is None else given_weight)
                continue
            # Not named: the next weight is made when this one is gone.
            parameter.copy_(_weight(source, parameter.device, given_weight))


@dataclass(frozen=True)
class AdaptedRun:
    """A run's model with its adapters apart, the run's configuration, and the step of its checkpoint. init: what they
    were trained on, as transformers would load it: of a run the Hugging Face model that it ended with."""

    model: Transformer
    config: RunConfig
    adapter: AdapterConfig
    step: int
    init: str | None


def open_adapted(
    run_dir: Path, warn: Callable[[str], None], device: torch.device | str = "cpu"
) -> AdaptedRun:
    """The newest good checkpoint of a run with adapters, beside its base.

    Raises UsageError for a run without adapters or checkpoints, RunError when run.json or all checkpoints are damaged.
    """
    path = run_dir / "run.json"
    run = json_object(path)
    try:
        config = RunConfig.model_validate(run.get("config"))
    except ValidationError as error:
        raise RunError(f"{path}: config.{first_problem(error)}; restore the file") from None
    if config.adapter is None:
        raise UsageError(f"{run_dir}: was trained without adapters; they are made with: --adapter.rank 16")
    found = find(run_dir / "checkpoints")
    for checkpoint in found:
        try:
            model = read_adapted(run_dir, checkpoint, config, device)
        except Damaged as damage:
            warn(f"checkpoint of step {checkpoint.step} is not used: {damage}")
            continue
        init = run.get("init")
        if init is not None and (Path(init) / "run.json").is_file():
            init = str(Path(init) / "model")
        return AdaptedRun(model, config, config.adapter, checkpoint.step, init)
    if found:
        raise RunError(f"{run_dir}: all {len(found)} checkpoints are damaged; restore one of them")
    raise UsageError(f"{run_dir}: has no checkpoint yet; resume it first")


def read_adapted(
    run_dir: Path, checkpoint: Checkpoint, config: RunConfig, device: torch.device | str
) -> Transformer:
    """The model of one checkpoint. Raises Damaged for the checkpoint, RunError for the base below it."""
    assert config.adapter is not None
    verify(checkpoint, weights_only=True)
    try:
        trained = load_file(checkpoint.path / WEIGHTS, device=str(device))
    except (SafetensorError, OSError) as error:
        raise Damaged(f"{checkpoint.path / WEIGHTS} cannot be read ({error})") from None
    model = frozen_base.reopen(run_dir, config.model, config.adapter, config.seed, device)
    try:
        load_weights(model, trained, trained_only=True)
    except RunError as error:
        raise RunError(f"{checkpoint.path}: {error}") from None
    return model


def _trains(module: nn.Module, leaf: str) -> bool:
    """Return whether a parameter trained as a whole, beside the adapters."""
    parameter = dict(module.named_parameters(recurse=False)).get(leaf)
    return parameter is not None and parameter.requires_grad


def _weight(module: nn.Module, device: torch.device, original: torch.Tensor | None = None) -> torch.Tensor:
    """The weight of a module as it computes: in float32 on `device` where it has to be made, else as it is.

    original: what to use in place of the frozen weight.
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
