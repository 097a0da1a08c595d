"""Export of a run's adapters to a directory that peft.PeftModel.from_pretrained loads on top of the base model.

The directory has adapter_config.json and adapter_model.safetensors in the layout of the PEFT library: `lora_A` and
`lora_B` of every projection under Hugging Face's module names, and the trained embedding rows of new tokens as
trainable_token_indices.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from deskside.config.sections import AdapterConfig
from deskside.model.transformer import Transformer
from deskside.precision.lora import adapter_of, trained_rows_of
from deskside.utils.errors import UsageError
from deskside.weights.hf import hf_name, replaced_when_complete, seal
from deskside.weights.hf_families import family_of

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
