"""Merging of adapters into the weights: W + scale B A for every adapted projection, where W is the dequantized base.

The merged model has no adapters and computes the same function up to rounding. Samples, the summary and exports use
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
from deskside.precision.frozen import FrozenExperts, FrozenLinear
from deskside.precision.lora import adapters_of, trained_rows_of
from deskside.run.directory import resolve_path
from deskside.utils.errors import RunError, UsageError
from deskside.utils.parsing import read_json_object
from deskside.weights import frozen_base
from deskside.weights.checkpoint import Weights, load_file_into, newest_readable, verify_weights
from deskside.weights.checkpoint_folder import Checkpoint, find


@torch.no_grad()
def merged(
    model: Transformer, device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32
) -> Transformer:
    """Return a merged copy of the model on `device`. The given model is unchanged.

    dtype: dtype of weights with two or more dimensions. The sums are computed in float32.
    """
    plain = allocate(model.config, device, dtype)
    merge_into(plain, model)
    return plain


@torch.no_grad()
def merge_into(
    plain: Transformer, model: Transformer, original: Mapping[str, torch.Tensor] | None = None
) -> None:
    """Overwrite the weights of a model without adapters (`plain`) with the merged weights of an adapted `model`.

    The models may be on different devices. The device of `plain` needs memory for one more weight, quantized and in
    float32.

    original: the unquantized base weights by parameter name, used instead of the frozen ones.
    """
    sources = dict(model.named_modules())
    for path, target in plain.named_modules():
        source = sources[path]
        for leaf, parameter in target.named_parameters(recurse=False):
            source_parameter = source._parameters.get(leaf)
            frozen = source_parameter is None or not source_parameter.requires_grad
            original_weight = original[f"{path}.{leaf}"] if original is not None and frozen else None
            if not leaf.endswith("weight"):
                parameter.copy_(getattr(source, leaf) if original_weight is None else original_weight)
                continue
            # The merged weight has no local name, so that it is freed before the next one is computed.
            parameter.copy_(_merged_weight(source, leaf, parameter.device, original_weight))


@dataclass(frozen=True)
class AdaptedRun:
    """A run's model with its adapters, the run's configuration, and the step of its checkpoint.

    init: the directory of the base model. If the run started from another run, this is the exported model of that run.
    """

    model: Transformer
    config: RunConfig
    adapter: AdapterConfig
    step: int
    init: str | None


def load_adapted_run(
    run_dir: Path,
    warn: Callable[[str], None],
    device: torch.device | str = "cpu",
    weights: Weights | None = None,
    step: int | None = None,
) -> AdaptedRun:
    """Load the newest good checkpoint of a run with adapters, with its base.

    weights: as in `load_model`. step: that of the checkpoint to load instead, which is a good one.

    Raises UsageError for a run without adapters or checkpoints, and RunError if run.json, the base or all checkpoints
    are damaged.
    """
    run = read_json_object(run_dir / "run.json")
    config = run_config(run_dir, run)
    if config.adapter is None:
        raise UsageError(f"{run_dir}: was trained without adapters; train with them: --adapter.rank 16")
    checkpoints = run_dir / "checkpoints"

    def read(checkpoint: Checkpoint) -> Transformer:
        return load_adapted_model(run_dir, checkpoint, config, device, weights)

    if step is None:
        newest = newest_readable(checkpoints, read, warn)
    else:
        newest = next(((each, read(each)) for each in find(checkpoints) if each.step == step), None)
    if newest is None:
        if found := find(checkpoints):
            raise RunError(f"{run_dir}: all {len(found)} checkpoints are damaged; restore one of them")
        raise UsageError(f"{run_dir}: has no checkpoint yet; resume it first")
    checkpoint, model = newest
    init = run.get("init")
    if init is not None:
        init = resolve_path(init, run.get("directory"))
        if (Path(init) / "run.json").is_file():
            init = str(Path(init) / "model")
    return AdaptedRun(model, config, config.adapter, checkpoint.step, init)


def run_config(run_dir: Path, run: Mapping[str, Any]) -> RunConfig:
    """Return the configuration in the content of run.json. Raises RunError if it is not valid."""
    try:
        return RunConfig.model_validate(run.get("config"))
    except ValidationError as error:
        raise RunError(f"{run_dir / 'run.json'}: config.{first_problem(error)}; restore the file") from None


def load_adapted_model(
    run_dir: Path,
    checkpoint: Checkpoint,
    config: RunConfig,
    device: torch.device | str,
    weights: Weights | None = None,
) -> Transformer:
    """Load the base and one checkpoint. Raises Damaged for a damaged checkpoint, RunError for a damaged base."""
    assert config.adapter is not None
    verify_weights(checkpoint, weights)
    model = frozen_base.load(run_dir, config.model, config.adapter, config.seed, device)
    load_file_into(model, checkpoint, device, trainable_only=True, weights=weights)
    return model


def _merged_weight(
    module: nn.Module, name: str, device: torch.device, original: torch.Tensor | None
) -> torch.Tensor:
    """Return the weight `name` with which a module computes, including its adapter and trained rows.

    It is float32 on `device`, or the parameter itself if nothing needs to be computed. original: used instead of the
    frozen weight.
    """
    adapter, trained = adapters_of(module).get(name), trained_rows_of(module)
    if original is not None:
        weight = original.to(device).to(torch.float32, copy=True)
    elif isinstance(module, FrozenLinear):
        weight = module.dense(device=device)
    elif isinstance(module, FrozenExperts):
        weight = module.dense(name, device)
    else:
        weight = module.get_parameter(name).detach()
        if adapter is None and trained is None:
            return weight
        weight = weight.to(device).to(torch.float32, copy=True)
    if adapter is not None:
        adapter.merge(weight)
    if trained is not None:
        weight[trained.ids.to(device)] = trained.rows.detach().to(device, torch.float32)
    return weight
