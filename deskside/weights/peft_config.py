"""adapter_config.json of the PEFT library: which adapters a directory holds, and with which factors they are applied.

PEFT itself attaches adapters to transformers' modules, which deskside does not use, so this module reads PEFT's files.
Unsupported settings that would change the model's output are refused by name, including unknown ones of newer versions.
"""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, PositiveInt, ValidationError

from deskside.config.base import first_problem
from deskside.utils.errors import RunError, UsageError
from deskside.utils.parsing import read_json_object

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
PREFIX = "base_model.model."  # of PEFT's tensor names, before transformers' names
# Keys without effect on the output of trained adapters. The names of the tensors show which modules have one.
WITHOUT_EFFECT = frozenset({
    "auto_mapping", "peft_type", "peft_version", "base_model_class", "parent_library", "inference_mode",
    "runtime_config", "megatron_core", "megatron_config", "qalora_group_size", "layers_to_transform", "layers_pattern",
    "exclude_modules", "target_modules", "eva_config", "corda_config", "lora_ga_config", "loftq_config",
    "velora_config",
})  # fmt: skip
# Initial values that leave the base as it is. The others also subtract the initial product from the base weights.
PLAIN_INITIALIZATIONS = ("gaussian", "eva", "orthogonal", "true", "false")


class PeftConfig(BaseModel):
    """The content of adapter_config.json that matters, under PEFT's names."""

    model_config = ConfigDict(frozen=True, extra="ignore", allow_inf_nan=False)

    base_model_name_or_path: str | None = None
    revision: str | None = None  # of the base
    task_type: Literal["CAUSAL_LM"] | None = None
    r: PositiveInt = 8
    lora_alpha: float = 8.0
    lora_dropout: float = Field(0.0, ge=0, lt=1)
    use_rslora: bool = False
    use_dora: bool = False
    rank_pattern: dict[str, PositiveInt] = {}
    alpha_pattern: dict[str, float] = {}
    target_parameters: tuple[str, ...] | None = None
    modules_to_save: tuple[str, ...] | None = None
    bias: Literal["none", "all", "lora_only"] = "none"
    fan_in_fan_out: bool = False
    trainable_token_indices: tuple[int, ...] | dict[str, tuple[int, ...]] | None = None
    ensure_weight_tying: bool = False
    init_lora_weights: bool | str | None = True

    def rank(self, module: str) -> int:
        """Return the rank of a module's adapter. module: its name in transformers."""
        return self.rank_pattern.get(_matching(self.rank_pattern, module), self.r)

    def scale(self, module: str) -> float:
        """Return the factor of a module's B A: alpha / rank, or alpha / sqrt(rank) with rsLoRA."""
        rank = self.rank(module)
        alpha = self.alpha_pattern.get(_matching(self.alpha_pattern, module), self.lora_alpha)
        return alpha / (rank**0.5 if self.use_rslora else rank)


def is_peft(folder: Path) -> bool:
    """Return True if this is a directory of adapters."""
    return (folder / CONFIG).is_file()


def read_peft_config(folder: Path) -> PeftConfig:
    """Read adapter_config.json. Raises UsageError for what is not supported, RunError for a damaged file."""
    path = folder / CONFIG
    if not path.is_file():
        problem = f"holds no adapters (no {CONFIG})" if folder.is_dir() else "no such folder"
        raise UsageError(f"{folder}: {problem}; give a directory of PEFT adapters")
    content = read_json_object(path)
    if content.get("peft_type") != "LORA":
        raise UsageError(
            f"{path}: peft_type {content.get('peft_type')} is not supported, only LORA (with rsLoRA and DoRA); merge "
            "it with PEFT's merge_and_unload, and give the merged model"
        )
    if (task := content.get("task_type")) not in (None, "CAUSAL_LM"):
        raise UsageError(f"{path}: task_type {task} is not supported, only CAUSAL_LM")
    known = WITHOUT_EFFECT | PeftConfig.model_fields.keys()
    if unknown := next((key for key, value in content.items() if value and key not in known), None):
        raise UsageError(
            f"{path}: {unknown} is not supported; merge it with PEFT's merge_and_unload, and give the merged model"
        )
    try:
        config = PeftConfig.model_validate(
            {key: value for key, value in content.items() if value is not None}
        )
    except ValidationError as error:
        raise RunError(f"{path}: {first_problem(error)}") from None
    if str(config.init_lora_weights).lower() not in PLAIN_INITIALIZATIONS:
        raise UsageError(
            f"{path}: init_lora_weights {config.init_lora_weights} also changes the base weights; convert it with "
            "PEFT's save_pretrained(path_initial_model_for_weight_conversion=...)"
        )
    return config


def _matching(patterns: Mapping[str, Any], module: str) -> str:
    """Return the first pattern that matches the end of a module's name, else the name. Patterns are regular expressions
    for whole parts of the name, as in PEFT."""
    for pattern in patterns:
        try:
            if re.match(rf"(.*\.)?({pattern})$", module):
                return pattern
        except re.error as error:
            raise UsageError(f"{CONFIG}: '{pattern}' is not a regular expression ({error})") from None
    return module
