"""The frozen base model of a run with adapters.

The run saves its (possibly quantized) base once as `base.safetensors`. A resumed run then trains with exactly the same
base weights, and the run is complete without the model that it started from. Checkpoints contain only the trained
tensors. `base.json` has the size and checksum of the base, and the tokens whose embedding rows train.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from pydantic import Field, NonNegativeInt, ValidationError
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from deskside.config.base import Part, first_problem
from deskside.config.model import ModelConfig
from deskside.config.sections import AdapterConfig
from deskside.model.transformer import Transformer
from deskside.optim.groups import clean_name
from deskside.precision.attach_adapters import attach_adapters
from deskside.precision.frozen import freeze, frozen_layer, is_quantized_by_freeze
from deskside.precision.lora import TrainedRows, saved_tables
from deskside.utils.errors import RunError
from deskside.utils.files import fingerprint, replace_atomically, write_atomically
from deskside.weights.checkpoint import check_match

BASE, FACTS = "base.safetensors", "base.json"


class BaseFacts(Part):
    """The content of base.json: size and checksum of base.safetensors, and the tokens whose rows train."""

    schema_version: int = Field(1, ge=1, le=1)
    bytes: NonNegativeInt
    xxh3_128: str
    trained_tokens: tuple[NonNegativeInt, ...]


@torch.no_grad()
def build(
    config: ModelConfig,
    adapter: AdapterConfig,
    seed: int,
    weights: Mapping[str, Tensor],
    device: torch.device | str,
    trained_tokens: Sequence[int] = (),
) -> Transformer:
    """Return a model on `device` with `weights` (by parameter name, on any device) frozen, and with new adapters.

    At most one block at a time is on the device in full precision. Raises RunError if the weights do not fit the
    architecture, and UsageError as `attach_adapters` does.
    """
    with torch.device("meta"):
        model = Transformer(config)
    check_match(dict(model.named_parameters()), weights)
    whole = {id(table) for table in saved_tables(model, adapter)}

    def fill(prefix: str, module: nn.Module, dtype: torch.dtype) -> None:
        for path, part in module.named_modules():
            for leaf, parameter in list(part.named_parameters(recurse=False)):
                if parameter.is_meta:
                    name = ".".join(filter(None, (prefix, path, leaf)))
                    parameter_dtype = (
                        dtype if parameter.ndim >= 2 and id(part) not in whole else torch.float32
                    )
                    tensor = weights[name].detach().to(device, parameter_dtype, copy=True)
                    part.register_parameter(leaf, nn.Parameter(tensor))

    # Quantization starts from full precision. Weights that stay in BF16 do not need it.
    for number, block in enumerate(model.layers):
        fill(f"layers.{number}", block, torch.bfloat16 if adapter.base == "bf16" else torch.float32)
        freeze(block, adapter.base)
    rest = nn.Module()  # everything but the blocks, under the same names
    for name, module in model.named_children():
        if module is not model.layers:
            rest.add_module(name, module)
    fill("", rest, torch.bfloat16)
    model.reset_buffers()
    attach_adapters(model, adapter, seed, trained_tokens)
    return model


def save(model: Transformer, run_dir: Path) -> None:
    """Write base.safetensors and base.json into a run. Raises RunError if they cannot be written."""
    tensors = _frozen_tensors(model)
    trained_rows = [module for module in model.modules() if isinstance(module, TrainedRows)]
    try:
        with replace_atomically(run_dir / BASE) as temporary:
            save_file(tensors, temporary)
            size, checksum = fingerprint(temporary)
    except SafetensorError as error:
        raise RunError(f"{run_dir / BASE}: cannot be written ({error})") from None
    facts = {
        "schema_version": 1,
        "bytes": size,
        "xxh3_128": checksum,
        "trained_tokens": trained_rows[0].ids.tolist() if trained_rows else [],
    }
    write_atomically(run_dir / FACTS, json.dumps(facts, indent=1) + "\n")


def load(
    run_dir: Path, config: ModelConfig, adapter: AdapterConfig, seed: int, device: torch.device | str
) -> Transformer:
    """Load the model that `save` wrote, with new adapters. Raises RunError if it is missing or damaged.

    Tables that train whole are not in the base. They are zero until the run's checkpoint is restored, and steps and
    evaluations that are only timed before read them.
    """
    path = run_dir / BASE
    facts = _verify(run_dir)
    with torch.device("meta"):
        model = Transformer(config)
    tensors = load_file(path, device=str(device))
    if adapter.base != "bf16":
        for parent_path, parent in list(model.named_modules()):
            for name, child in list(parent.named_children()):
                if is_quantized_by_freeze(child):
                    prefix = f"{parent_path}.{name}."
                    keys = [key for key in tensors if key.startswith(prefix) and not key.endswith("bias")]
                    stored = {key.removeprefix(prefix): tensors.pop(key) for key in keys}
                    setattr(parent, name, frozen_layer(child, adapter.base, stored))
    for table in saved_tables(model, adapter):
        table.weight = nn.Parameter(torch.zeros(table.weight.shape, device=device))
    for module_path, module in model.named_modules():
        for leaf, parameter in list(module.named_parameters(recurse=False)):
            if parameter.is_meta:
                tensor = tensors.pop(f"{module_path}.{leaf}")
                module.register_parameter(leaf, nn.Parameter(tensor, requires_grad=False))
    model.reset_buffers()
    attach_adapters(model, adapter, seed, facts.trained_tokens)
    return model


def matches(
    run_dir: Path, config: ModelConfig, adapter: AdapterConfig, seed: int, weights: Mapping[str, Tensor]
) -> bool:
    """Return True if freezing `weights` reproduces the run's base, bit for bit.

    Raises RunError if the base is damaged, or if the weights do not fit the architecture.
    """
    facts = _verify(run_dir)
    frozen = _frozen_tensors(build(config, adapter, seed, weights, "cpu", facts.trained_tokens))
    with safe_open(run_dir / BASE, "pt") as stored:  # one tensor at a time
        if set(stored.keys()) != frozen.keys():
            return False
        for name, tensor in frozen.items():
            expected = stored.get_tensor(name)
            if tensor.dtype != expected.dtype or tensor.shape != expected.shape:
                return False
            if not torch.equal(tensor.reshape(-1).view(torch.uint8), expected.reshape(-1).view(torch.uint8)):
                return False
    return True


def _verify(run_dir: Path) -> BaseFacts:
    """Check base.safetensors against base.json and return the latter. Raises RunError if they differ or are missing."""
    path = run_dir / BASE
    try:
        facts = BaseFacts.model_validate_json((run_dir / FACTS).read_bytes())
        found = fingerprint(path)
    except OSError as error:
        raise RunError(
            f"{error.filename}: cannot be read ({error.strerror}), and the adapters need it; restore it, or "
            f"start another run"
        ) from None
    except ValidationError as error:
        raise RunError(f"{run_dir / FACTS}: {first_problem(error)}; restore it") from None
    if found != (facts.bytes, facts.xxh3_128):
        raise RunError(f"{path}: is damaged: its checksum differs from {FACTS}; restore it")
    return facts


def _frozen_tensors(model: Transformer) -> dict[str, Tensor]:
    """Return the parameters and buffers that do not train, by name."""
    trained = {clean_name(name) for name, parameter in model.named_parameters() if parameter.requires_grad}
    named = ((clean_name(name), tensor) for name, tensor in model.state_dict().items())
    return {name: tensor.contiguous() for name, tensor in named if name not in trained}
