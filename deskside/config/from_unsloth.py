"""Translation of the configuration files of unsloth's command line and studio: model, data, training, lora, logging."""

from collections.abc import Mapping
from typing import Any

from deskside.config.imported import (
    Imported,
    sections,
    set_batch,
    set_checkpointing,
    set_dropout,
    set_optimizer,
    set_schedule,
)

SAME = {
    "data.format_type": "formats are recognized by their fields",
    "training.packing": "conversations are packed into rows, and do not see each other",
    "lora.finetune_language_layers": "the language model is what trains",
    "lora.finetune_attention_modules": "adapter.targets says it",
    "lora.finetune_mlp_modules": "adapter.targets says it",
    "lora.vision_all_linear": "for models that see",
    "lora.finetune_vision_layers": "for models that see",
    "logging.tensorboard_dir": "in the run's directory",
    "logging.hf_token": "set HF_TOKEN",
    "logging.wandb_token": "set WANDB_API_KEY",
    "training.is_vision": "for models that see",
}
NUMBERS = {
    "training.learning_rate": "optim.lr",
    "training.weight_decay": "optim.weight_decay",
    "training.random_seed": "seed",
    "lora.lora_r": "adapter.rank",
    "lora.lora_alpha": "adapter.alpha",
}


def from_unsloth(source: Mapping[str, Any]) -> Imported:
    """Translate the content of a file. Raises UsageError if the result is invalid."""
    imported = Imported(sections(source))
    model = imported.take("model") or imported.take("model.name")
    imported.model = None if model is None else str(model)
    imported.layer["align"] = {"name": "sft"}
    hub, local = imported.take("data.dataset"), imported.take("data.local_dataset")
    files = [local] if isinstance(local, str) else list(local or [])
    if data := [*([f"hf:{hub}"] if hub else []), *files]:
        imported.set("data", "align.data", data)
    if imported.take("training.train_on_completions") is False:
        imported.lack("training.train_on_completions", False, "only answers are trained on")
    _adapter(imported)
    set_optimizer(imported, "training.optim", str(imported.take("training.optim") or "adamw_8bit"))
    set_batch(
        imported, "training.batch_size", "training.gradient_accumulation_steps", "training.max_seq_length"
    )
    set_schedule(
        imported,
        imported.take("training.lr_scheduler_type"),
        "training.max_steps",
        "training.num_epochs",
        ("training.warmup_steps", "training.warmup_ratio"),
    )
    imported.copy_numbers(NUMBERS)
    if steps := imported.number("training.save_steps"):
        imported.set("training.save_steps", "checkpoint.every", f"{int(steps)} steps")
    if imported.take("training.gradient_checkpointing") in ("unsloth", "true", True):
        set_checkpointing(imported, "training.gradient_checkpointing")
    if folder := imported.take("training.output_dir"):
        imported.lack("training.output_dir", folder, "give --name NAME; runs are in runs/, or --runs DIR")
    for key, ours in (("wandb", "track.wandb"), ("tensorboard", "track.tensorboard")):
        project = imported.take(f"logging.{key}_project")
        if imported.take(f"logging.enable_{key}"):
            imported.set(f"logging.enable_{key}", ours, project or True)
    imported.skip(SAME)
    imported.finish()
    return imported


def _adapter(imported: Imported) -> None:
    if imported.take("training.training_type") == "full":
        for key in [
            key for key in imported.given if key.startswith("lora.") or key == "training.load_in_4bit"
        ]:
            imported.given.pop(key)
            imported.same.append((key, "training_type is full"))
        return
    four = imported.take("training.load_in_4bit")
    imported.set("training.load_in_4bit", "adapter.base", "bf16" if four is False else "nf4")
    targets = imported.take("lora.target_modules")
    names = [name.strip() for name in targets.split(",")] if isinstance(targets, str) else targets
    imported.set(
        "lora.target_modules", "adapter.targets", names if names and names != ["all-linear"] else "all"
    )
    if imported.take("lora.use_rslora"):
        imported.set("lora.use_rslora", "adapter.rank_stabilised", True)
    set_dropout(imported, "lora.lora_dropout")
    if imported.take("lora.use_loftq"):
        imported.lack("lora.use_loftq", True, "adapters begin at zero")
