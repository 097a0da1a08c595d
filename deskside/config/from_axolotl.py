"""Translation of axolotl's configuration files (docs.axolotl.ai, "Config Reference")."""

from collections.abc import Mapping
from typing import Any

from deskside.config.imported import (
    Imported,
    set_batch,
    set_checkpointing,
    set_dropout,
    set_optimizer,
    set_schedule,
)

# Keys that change nothing here, with the reason.
SAME = {
    "model_type": "config.json says it",
    "tokenizer_type": "tokenizer.json is read",
    "trust_remote_code": "no code of a model is run",
    "strict": "every tensor must fit",
    "tf32": "the kernels choose",
    "flash_attention": "the fastest attention that passes a check is used",
    "sdp_attention": "the fastest attention that passes a check is used",
    "xformers_attention": "the fastest attention that passes a check is used",
    "sample_packing": "conversations are packed into rows, and do not see each other",
    "eval_sample_packing": "conversations are packed into rows, and do not see each other",
    "pad_to_sequence_len": "rows are packed full",
    "group_by_length": "rows are packed full",
    "dataset_prepared_path": "prepared data is kept in data/",
    "dataset_processes": "every core is used",
    "logging_steps": "every step is logged",
    "save_safetensors": "always",
    "eval_batch_size": "measured",
    "gradient_checkpointing_kwargs": "blocks are recomputed without autograd's re-entry",
    "ddp_timeout": "not needed",
    "local_rank": "set by --gpus",
}
NUMBERS = {
    "learning_rate": "optim.lr",
    "weight_decay": "optim.weight_decay",
    "adam_epsilon": "optim.eps",
    "max_grad_norm": "optim.grad_clip",
    "lora_r": "adapter.rank",
    "lora_alpha": "adapter.alpha",
    "seed": "seed",
    "save_total_limit": "checkpoint.keep",
}
# Formats of records that are recognised by their fields.
RECOGNISED = ("", "chat_template", "alpaca", "sharegpt", "chatml")
LOSSES = {"dpo": "sigmoid", "ipo": "ipo", "orpo": "orpo", "simpo": "simpo"}


def from_axolotl(source: Mapping[str, Any]) -> Imported:
    """Translate the content of a file. Raises UsageError if the result is invalid."""
    imported = Imported(dict(source))
    model, revision = imported.take("base_model"), imported.take("revision_of_model")
    imported.model = None if model is None else f"{model}@{revision}" if revision else str(model)
    for key in ("base_model_config", "tokenizer_config"):
        if (other := imported.take(key)) not in (None, model):
            imported.lack(key, other, "configuration and tokenizer are the base model's")
    _objective(imported)
    _data(imported)
    _adapter(imported)
    set_optimizer(imported, "optimizer", str(imported.take("optimizer") or "adamw_torch_fused"))
    set_batch(imported, "micro_batch_size", "gradient_accumulation_steps", "sequence_len")
    set_schedule(
        imported,
        imported.take("lr_scheduler") or "cosine",
        "max_steps",
        "num_epochs",
        ("warmup_steps", "warmup_ratio"),
    )
    if (least := imported.number("cosine_min_lr_ratio")) is not None:
        imported.set("cosine_min_lr_ratio", "schedule.final_lr_fraction", least)
    betas = imported.number("adam_beta1"), imported.number("adam_beta2")
    if betas != (None, None):
        values = [
            default if beta is None else beta for beta, default in zip(betas, (0.9, 0.999), strict=True)
        ]
        imported.set("adam_beta1, adam_beta2", "optim.betas", values)
    imported.copy_numbers(NUMBERS)
    _intervals(imported)
    _rest(imported)
    imported.skip(SAME)
    imported.finish()
    return imported


def _objective(imported: Imported) -> None:
    rl = imported.take("rl")
    loss = LOSSES.get(str(rl))
    if rl is not None and loss is None and rl not in ("kto", "grpo"):
        imported.lack("rl", rl, "objectives here are sft, dpo (with --align.loss), kto and grpo")
        return
    imported.command = "sft" if rl is None else "dpo" if loss else str(rl)
    imported.layer["align"] = {"name": imported.command}
    if rl is not None:
        imported.used.append(("rl", f"deskside {imported.command}"))
    if loss not in (None, "sigmoid"):
        imported.set("rl", "align.loss", loss)
    if imported.command in ("dpo", "kto"):
        imported.copy_numbers({"rl_beta": "align.beta", "dpo_beta": "align.beta", "orpo_alpha": "align.beta"})


def _data(imported: Imported) -> None:
    for key, ours in (("datasets", "align.data"), ("test_datasets", "align.val")):
        given = imported.take(key) or []
        datasets = given if isinstance(given, list) else [given]
        sources = [source for each in datasets for source in _sources(imported, key, each)]
        if sources:
            imported.set(key, ours, sources)
    held_out = imported.number("val_set_size")
    if held_out is not None and 0 < held_out < 0.5:
        imported.set("val_set_size", "align.val_fraction", held_out)
    elif held_out:
        imported.lack("val_set_size", held_out, "give align.val_fraction, a share below 0.5")
    elif held_out == 0:
        imported.lack(
            "val_set_size", 0, "a share of the data is always held out; --align.val_fraction sets it"
        )
    if imported.take("train_on_inputs"):
        imported.lack("train_on_inputs", True, "only answers are trained on")
    template = imported.take("chat_template")
    if template not in (None, "tokenizer_default"):
        imported.lack(
            "chat_template", template, "the model's own is used; --align.template FILE gives another"
        )


def _sources(imported: Imported, key: str, dataset: Any) -> list[str]:
    """Return the sources of ours for one dataset: its files, or its name on the hub."""
    if not isinstance(dataset, Mapping):
        return [str(dataset)]
    rest = dict(dataset)
    path, config, split = str(rest.pop("path", "")), rest.pop("name", None), rest.pop("split", None)
    files, kind = rest.pop("data_files", None), rest.pop("type", None) or ""
    if kind in ("completion", "pretrain"):
        imported.lack(
            f"{key}.type", kind, "for plain text, use deskside data prepare and deskside train --init"
        )
    elif str(kind).split(".")[0] not in RECOGNISED:
        imported.lack(f"{key}.type", kind, "formats are recognized by their fields; look at the data")
    for known in ("ds_type", "conversation", "field_messages", "message_property_mappings", "roles_to_train"):
        if known in rest and rest[known] not in (None, ["assistant"], "messages", "conversations"):
            imported.lack(
                f"{key}.{known}", rest[known], "formats are recognized by their fields; look at the data"
            )
        rest.pop(known, None)
    for name, value in rest.items():
        imported.lack(f"{key}.{name}", value, "has no counterpart here")
    is_file = path.startswith((".", "/", "~")) or path.endswith((".jsonl", ".json", ".parquet"))
    if not (files or is_file or path.count("/") != 1):
        parts = [path, *([config or ""] if config or split else []), *([split] if split else [])]
        return ["hf:" + ":".join(map(str, parts))]
    for name, value in (("name", config), ("split", split)):
        if value not in (None, "train"):
            imported.lack(f"{key}.{name}", value, "is for data of the hub; files are read whole")
    if not files:
        return [path]
    return [str(file) for file in (files if isinstance(files, list) else [files])]


def _adapter(imported: Imported) -> None:
    adapter, four, eight = (imported.take(key) for key in ("adapter", "load_in_4bit", "load_in_8bit"))
    if adapter in (None, "none"):
        for key, value in (("load_in_4bit", four), ("load_in_8bit", eight)):
            if value:
                imported.lack(
                    key, value, "without adapter, all weights train; set adapter.base with adapter.rank"
                )
        return
    if adapter not in ("lora", "qlora"):
        imported.lack("adapter", adapter, "adapters here are LoRA, rsLoRA and DoRA")
    base = "nf4" if four or adapter == "qlora" else "int8" if eight else "bf16"
    imported.set("adapter, load_in_4bit, load_in_8bit", "adapter.base", base)
    targets = imported.take("lora_target_modules")
    if imported.take("lora_target_linear") or targets in (None, "all-linear"):
        imported.set("lora_target_linear", "adapter.targets", "all")
    else:
        imported.set("lora_target_modules", "adapter.targets", targets)
    if tables := imported.take("lora_modules_to_save"):
        imported.set("lora_modules_to_save", "adapter.modules_to_save", tables)
    for key, ours in (("peft_use_dora", "adapter.dora"), ("peft_use_rslora", "adapter.rank_stabilised")):
        if imported.take(key):
            imported.set(key, ours, True)
    set_dropout(imported, "lora_dropout")


def _intervals(imported: Imported) -> None:
    for key, ours in (("save_steps", "checkpoint.every"), ("eval_steps", "evaluate.every")):
        steps = imported.number(key)
        if steps is not None and steps >= 1:
            imported.set(key, ours, f"{int(steps)} steps")
        elif steps:
            imported.lack(key, steps, f"set {ours}, such as 500 steps or 10m")
    for key, ours in (("saves_per_epoch", "checkpoint.every"), ("evals_per_epoch", "evaluate.every")):
        if value := imported.take(key):
            imported.lack(key, value, f"set {ours}, such as 500 steps or 10m")


def _rest(imported: Imported) -> None:
    if project := imported.take("wandb_project"):
        imported.set("wandb_project", "track.wandb", str(project))
    if imported.take("use_tensorboard"):
        imported.set("use_tensorboard", "track.tensorboard", True)
    if imported.take("gradient_checkpointing"):
        set_checkpointing(imported, "gradient_checkpointing")
    if (bf16 := imported.take("bf16")) in (False, "false"):
        imported.lack("bf16", bf16, "BF16 is the default on a GPU; --precision.name fp32 is without it")
    elif bf16 is not None:
        imported.same.append(("bf16", "BF16 is the default on a GPU"))
    if imported.take("load_best_model_at_end"):
        imported.lack("load_best_model_at_end", True, "the last checkpoint is the model")
    ends = imported.take("train_on_eos")
    if ends not in (None, "turn"):
        imported.lack("train_on_eos", ends, "the end of each answer is trained on")
    elif ends:
        imported.same.append(("train_on_eos", "the end of each answer is trained on"))
    if imported.take("fp16"):
        imported.lack("fp16", True, "BF16 is used; it needs no loss scale")
    if folder := imported.take("output_dir"):
        imported.lack("output_dir", folder, "give --name NAME; runs are in runs/, or --runs DIR")
    for key in ("deepspeed", "fsdp", "fsdp_config", "fsdp_version"):
        if value := imported.take(key):
            imported.lack(
                key, value, "--gpus auto, and --parallel.mode shard if the model does not fit on one"
            )
    if name := imported.take("hub_model_id"):
        imported.lack(
            "hub_model_id", name, f"afterwards: deskside export RUN --to hf --out DIR --push {name}"
        )
