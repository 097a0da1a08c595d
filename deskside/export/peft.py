"""Exports of a run with adapters: only the adapters, or the original weights with the adapters merged.

`save_peft` writes a directory that peft.PeftModel.from_pretrained loads on top of the base model. It contains
adapter_config.json and adapter_model.safetensors in the layout of the PEFT library: `lora_A` and `lora_B` of every
adapted projection under Hugging Face's module names, and trained embedding rows as trainable_token_indices. Experts are
stacked parameters in transformers (from version 5), so PEFT (from 0.17) names them in target_parameters. It has one
adapter for gate and up together; the two of a run become one of twice the rank, with the same product.

A run with adapters stores its base in BF16, INT8 or NF4. If the original weights are still available,
`merge_into_original` uses them, which avoids the rounding of the base. To verify that they are the original, they are
frozen again and must then be bit-identical to the run's base.
"""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from deskside.config.run import RunConfig
from deskside.config.sections import AdapterConfig
from deskside.model.transformer import Transformer
from deskside.ops.moe import Experts
from deskside.precision.lora import Adapter, adapters_of, saved_tables, trained_rows_of
from deskside.run.directory import resolve_path
from deskside.train.state.init_weights import resize_vocabulary
from deskside.utils import hub
from deskside.utils.errors import RunError, UsageError
from deskside.weights import frozen_base
from deskside.weights.checkpoint_folder import Damaged, find
from deskside.weights.hf import finish_export, hf_name, is_stacked, replaced_when_complete, write_safetensors
from deskside.weights.hf_families import family_of
from deskside.weights.hf_family import Family
from deskside.weights.load import Loaded, load_model
from deskside.weights.merge_adapters import load_adapted_model, merge_into
from deskside.weights.peft_config import CONFIG, PREFIX, WEIGHTS

EXPERT_PARAMETERS = {"gate_up_weight": "mlp.experts.gate_up_proj", "down_weight": "mlp.experts.down_proj"}


def to_peft(
    model: Transformer, adapter: AdapterConfig, init: str | None
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return the content of adapter_config.json and the tensors. init: the base model's name or path.

    Raises UsageError for options that Hugging Face's architectures lack, and for modules whose adapters PEFT cannot
    have: several of ours in one (q, k and v in GPT-2 and Phi-3, gate and up in Phi-3), dots.llm1's shared expert, whose
    adapters PEFT 0.21 drops, and Mixtral's experts, which have other names in memory than in the file.
    """
    family = family_of(model.config)
    unsupported = f"--to peft: {family.architecture} has %s; use --to hf, which merges"
    if family.transposed:
        raise UsageError(unsupported % "q, k and v in one module")
    tensors: dict[str, Tensor] = {}
    targets: set[str] = set()
    expert_ranks: dict[str, int] = {}  # by the name of the parameter
    for path, module in model.named_modules():
        sublayer = ".".join(path.split(".")[:3])  # layers.0.attn
        adapters = adapters_of(module)
        if isinstance(module, Experts):
            last = ".0.down_proj.weight"
            name = hf_name(f"{sublayer}.experts{last}", family)
            if adapters and not name.endswith(last):
                raise UsageError(unsupported % "other names of experts in memory than in its files")
            tensors |= _expert_tensors(f"{PREFIX}{name.removesuffix(last)}", adapters)
            for weight, lora in adapters.items():
                expert_ranks[EXPERT_PARAMETERS[weight]] = lora.rank * len(lora.adapted)
        elif "weight" in adapters:
            lora = adapters["weight"]
            owner = f"{sublayer}.shared_expert" if ".shared_expert." in path else sublayer
            if owner != sublayer and family.model_type == "dots1":
                raise UsageError(
                    f"--to peft: PEFT takes adapters of {family.architecture}'s shared expert for those of the other "
                    "experts, and drops them; use --to hf, which merges"
                )
            for s in lora.adapted:
                if is_stacked(f"{owner}.{s.name}", family):
                    raise UsageError(unsupported % f"{s.name} in one module with others")
                hf_module = PREFIX + hf_name(f"{owner}.{s.name}.weight", family).removesuffix(".weight")
                targets.add(hf_module.rpartition(".")[2])
                tensors[f"{hf_module}.lora_A.weight"] = lora.a[s.name].detach()
                tensors[f"{hf_module}.lora_B.weight"] = lora.b[s.name].detach()
                if lora.magnitudes is not None:
                    tensors[f"{hf_module}.lora_magnitude_vector"] = lora.magnitudes.values[s.name].detach()
    base = hub.hub_model(init) if init is not None and init.startswith(hub.PREFIX) else None
    content: dict[str, Any] = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base.name if base else init,
        "revision": base.revision if base else None,
        "r": adapter.rank,
        "lora_alpha": adapter.alpha,
        "lora_dropout": adapter.dropout,
        "use_rslora": adapter.rank_stabilised,
        "use_dora": adapter.dora,
        "target_modules": sorted(targets),
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
    }
    if expert_ranks:
        content |= _expert_options(expert_ranks, adapter)
    ids, rows = _trained_rows(model, family)
    if ids:
        # With a plain list, PEFT applies the embedding's rows to a tied head as well.
        content["trainable_token_indices"] = ids if "lm_head" in ids else ids["embed_tokens"]
    tensors |= rows
    saved = _saved_tables(model, adapter, family)
    if saved:
        content["modules_to_save"] = [name.split(".")[-2] for name in saved]
        content["ensure_weight_tying"] = model.config.tie_word_embeddings
        tensors |= {PREFIX + name: table for name, table in saved.items()}
    return content, {name: tensor.to("cpu", torch.float32).contiguous() for name, tensor in tensors.items()}


def _expert_tensors(module: str, adapters: Mapping[str, Adapter]) -> dict[str, Tensor]:
    """Return the tensors of the adapters of one layer's experts. module: PEFT's name of the experts."""
    tensors = {}
    for weight, lora in adapters.items():
        # PEFT wraps the module once for each parameter, so that the first parameter's wrapper is inside.
        inside = ".base_layer" if weight == "gate_up_weight" and "down_weight" in adapters else ""
        a, b = lora.joined(torch.float32)
        tensors[f"{module}{inside}.lora_A.weight"] = a.detach().flatten(0, 1)
        tensors[f"{module}{inside}.lora_B.weight"] = b.detach().permute(1, 2, 0).flatten(1, 2)
    return tensors


def _expert_options(ranks: Mapping[str, int], adapter: AdapterConfig) -> dict[str, Any]:
    """Return the entries of adapter_config.json for adapters of experts. ranks: by the name of the parameter."""
    others = {name: rank for name, rank in ranks.items() if rank != adapter.rank}
    return {
        "target_parameters": sorted(ranks),
        "rank_pattern": others,
        "alpha_pattern": {
            name: adapter.scale * (rank**0.5 if adapter.rank_stabilised else rank)
            for name, rank in others.items()
        },
    }


def _saved_tables(model: Transformer, adapter: AdapterConfig, family: Family) -> dict[str, Tensor]:
    """Return the tables that train whole, by their names in transformers. PEFT stores a tied one twice."""
    saved = {}
    for module in saved_tables(model, adapter):
        logical_names = ["embed"] if module is model.embed else ["lm_head"]
        if model.head is None:
            logical_names.append("lm_head")
        for logical_name in logical_names:
            saved[hf_name(f"{logical_name}.weight", family)] = module.weight.detach().clone()
    return saved


def _trained_rows(model: Transformer, family: Family) -> tuple[dict[str, list[int]], dict[str, Tensor]]:
    """Return the trained tokens by PEFT's name of the table, and the tensors of their rows."""
    ids: dict[str, list[int]] = {}
    tensors: dict[str, Tensor] = {}
    tables = (("embed", "embed_tokens", model.embed), ("lm_head", "lm_head", model.head))
    for logical_name, peft_name, module in tables:
        if (trained := trained_rows_of(module)) is not None:
            ids[peft_name] = trained.ids.tolist()
            hf_module = hf_name(f"{logical_name}.weight", family).removesuffix(".weight")
            tensors[f"{PREFIX}{hf_module}.token_adapter.trainable_tokens_delta"] = trained.rows.detach()
    return ids, tensors


def save_peft(
    model: Transformer,
    adapter: AdapterConfig,
    init: str | None,
    out_dir: Path,
    about: Mapping[str, Any] | None = None,
    card: str | None = None,
) -> Path:
    """Write the directory of the adapters; it may replace an earlier export.

    about: extra content of deskside.json. card: content of README.md. Raises UsageError as `to_peft` and
    `check_out_dir` do, and RunError if the disk is full.
    """
    content, tensors = to_peft(model, adapter, init)
    with replaced_when_complete(out_dir) as folder:
        (folder / CONFIG).write_text(json.dumps(content, indent=2, sort_keys=True) + "\n", "utf-8")
        write_safetensors(tensors, folder / WEIGHTS, out_dir)
        finish_export(folder, about, card)
    return out_dir


class OriginalUnavailable(Exception):
    """The original weights cannot be used; the message gives the reason."""


def merge_into_original(loaded: Loaded, warn: Callable[[str], None]) -> str:
    """Replace a loaded run's weights with the original ones, its adapters merged. Returns the original's path.

    Needs memory for the original weights in float32 and for their frozen form. Raises OriginalUnavailable.
    """
    run_dir = loaded.run_dir
    assert run_dir is not None
    config = RunConfig.model_validate(loaded.run["config"])
    assert config.adapter is not None
    checkpoint = next((c for c in find(run_dir / "checkpoints") if c.step == loaded.step), None)
    if checkpoint is None:
        raise OriginalUnavailable("the run has no checkpoint, so its adapters are not available separately")
    source = loaded.run.get("init")
    if not isinstance(source, str):
        raise OriginalUnavailable("the run does not record which model it was started from")
    path = resolve_path(source, loaded.run.get("directory"))
    try:
        original = load_model(path, warn=warn)
        weights = {name: parameter.detach() for name, parameter in original.model.named_parameters()}
        if config.align is not None:
            fresh = loaded.run.get("fresh")
            if not isinstance(fresh, list) or not all(type(token) is int for token in fresh):
                raise OriginalUnavailable("the run does not record which tokens it added to the original")
            weights = resize_vocabulary(weights, config.model.vocab_size, fresh)
        same = frozen_base.matches(run_dir, config.model, config.adapter, config.seed, weights)
        model = load_adapted_model(run_dir, checkpoint, config, "cpu", loaded.weights)
    except (UsageError, RunError, Damaged) as error:
        raise OriginalUnavailable(f"the original cannot be used: {error}") from None
    if not same:
        raise OriginalUnavailable(
            f"{path} is not exactly the original: its weights in {config.adapter.base} differ from the base in the run"
        )
    merge_into(loaded.model, model, weights)
    return path
