"""Exports of a run with adapters: the adapters alone, or their merge into the original weights.

`save_peft` writes a directory that peft.PeftModel.from_pretrained loads on top of the base model. It has
adapter_config.json and adapter_model.safetensors in the layout of the PEFT library: `lora_A` and `lora_B` of every
projection under Hugging Face's module names, and the trained embedding rows of new tokens as trainable_token_indices.

A run with adapters keeps its base in BF16, INT8 or NF4. If the original is still available, `merge_into_original`
avoids that rounding. Freezing the original again must reproduce the run's base bit for bit, which proves that it is
the original.
"""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from deskside.config.run import RunConfig
from deskside.config.sections import AdapterConfig
from deskside.model.transformer import Transformer
from deskside.precision.lora import adapter_of, trained_rows_of
from deskside.run.directory import resolve_path
from deskside.train.state.init_weights import resize_vocabulary
from deskside.utils.errors import RunError, UsageError
from deskside.weights import frozen_base
from deskside.weights.checkpoint import Damaged, find
from deskside.weights.hf import hf_name, replaced_when_complete, seal
from deskside.weights.hf_families import family_of
from deskside.weights.load import Loaded, load_model
from deskside.weights.merge_adapters import merge_into, read_adapted

PREFIX = "base_model.model."
CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"


def to_peft(
    model: Transformer, adapter: AdapterConfig, init: str | None
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return the content of adapter_config.json and the tensors. init: the base model's name or path.

    Raises UsageError for architectures without a Hugging Face form, and for GPT-2, whose fused q, k, v module
    cannot have an adapter for each.
    """
    family = family_of(model.config)
    if family.transposed:
        raise UsageError(
            f"--to peft: {family.architecture} has q, k and v in one module; use --to hf, which merges"
        )
    tensors: dict[str, Tensor] = {}
    targets: set[str] = set()
    for path, module in model.named_modules():
        if (found := adapter_of(module)) is not None:
            half = ".".join(path.split(".")[:3])  # layers.0.attn
            for s in found.adapted:
                targets.add(s.name)
                theirs = PREFIX + hf_name(f"{half}.{s.name}.weight", family).removesuffix(".weight")
                tensors[f"{theirs}.lora_A.weight"] = found.a[s.name].detach()
                tensors[f"{theirs}.lora_B.weight"] = found.b[s.name].detach()
    content: dict[str, Any] = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": init,
        "r": adapter.rank,
        "lora_alpha": adapter.alpha,
        "lora_dropout": adapter.dropout,
        "use_rslora": adapter.rank_stabilised,
        "target_modules": sorted(targets),
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
    }
    ids: dict[str, list[int]] = {}
    for ours, theirs, module in (("embed", "embed_tokens", model.embed), ("lm_head", "lm_head", model.head)):
        if (trained := trained_rows_of(module)) is not None:
            ids[theirs] = trained.ids.tolist()
            owner = hf_name(f"{ours}.weight", family).removesuffix(".weight")
            tensors[f"{PREFIX}{owner}.token_adapter.trainable_tokens_delta"] = trained.rows.detach()
    if ids:
        # With a plain list, PEFT applies the embedding's rows to a tied head as well.
        content["trainable_token_indices"] = ids if len(ids) > 1 else next(iter(ids.values()))
    return content, {name: tensor.to("cpu", torch.float32).contiguous() for name, tensor in tensors.items()}


def save_peft(
    model: Transformer,
    adapter: AdapterConfig,
    init: str | None,
    out_dir: Path,
    about: Mapping[str, Any] | None = None,
    card: str | None = None,
) -> Path:
    """Write the directory as a whole, replacing only an earlier export. card: the content of README.md.

    Raises UsageError as `to_peft` and `check_out` do.
    """
    content, tensors = to_peft(model, adapter, init)
    with replaced_when_complete(out_dir) as folder:
        (folder / CONFIG).write_text(json.dumps(content, indent=2, sort_keys=True) + "\n", "utf-8")
        save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})
        seal(folder, about, card)
    return out_dir


class Unavailable(Exception):
    """The original weights cannot be used; the message gives the reason."""


def merge_into_original(loaded: Loaded, warn: Callable[[str], None]) -> str:
    """Overwrite a loaded run's weights with its adapters merged into the original weights; return their path.

    Needs memory for the original in float32 and for its frozen form. Raises Unavailable.
    """
    run_dir = loaded.run_dir
    assert run_dir is not None
    config = RunConfig.model_validate(loaded.run["config"])
    assert config.adapter is not None
    checkpoint = next((c for c in find(run_dir / "checkpoints") if c.step == loaded.step), None)
    if checkpoint is None:
        raise Unavailable("the run has no checkpoint, so its adapters are not at hand apart")
    source = loaded.run.get("init")
    if not isinstance(source, str):
        raise Unavailable("the run does not say which model it was started from")
    path = resolve_path(source, loaded.run.get("directory"))
    try:
        original = load_model(path, warn=warn)
        weights = {name: parameter.detach() for name, parameter in original.model.named_parameters()}
        if config.align is not None:
            fresh = loaded.run.get("fresh")
            if not isinstance(fresh, list) or not all(type(token) is int for token in fresh):
                raise Unavailable("the run does not say which tokens it added to the original")
            weights = resize_vocabulary(weights, config.model.vocab_size, fresh)
        same = frozen_base.is_made_from(run_dir, config.model, config.adapter, config.seed, weights)
        model = read_adapted(run_dir, checkpoint, config, "cpu")
    except (UsageError, RunError, Damaged) as error:
        raise Unavailable(f"the original cannot be used: {error}") from None
    if not same:
        raise Unavailable(
            f"{path} is not the original to the last bit: rounded to {config.adapter.base} here, it differs from what "
            "the run kept"
        )
    merge_into(loaded.model, model, weights)
    return path
