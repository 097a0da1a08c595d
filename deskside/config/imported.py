"""A configuration of another trainer, translated key by key, with an account of every key."""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from deskside.config import merge


@dataclass
class Imported:
    """The translation of another trainer's file.

    Attributes:
        given: Its keys that are not translated yet; those of sections as section.key.
        command: The command that the file is for: sft, dpo, kto or grpo.
        model: Name or path of the base model, with its revision as NAME@REVISION.
        layer: Our configuration, a table for each part.
        used: (their key, our key and value) of each translated key.
        same: (their key, reason) of each key that changes nothing here.
        missing: (their key and value, what to do) of each key without counterpart.
    """

    given: dict[str, Any]
    command: str = "sft"
    model: str | None = None
    layer: dict[str, Any] = field(default_factory=dict)
    used: list[tuple[str, str]] = field(default_factory=list)
    same: list[tuple[str, str]] = field(default_factory=list)
    missing: list[tuple[str, str]] = field(default_factory=list)

    def take(self, key: str) -> Any:
        """Return a value and remove its key; None if it is absent, null or empty."""
        value = self.given.pop(key, None)
        return None if value in ("", [], {}) else value

    def set(self, key: str, ours: str, value: Any) -> None:
        """Set our key PART.NAME, or NAME outside every part, for their key."""
        part, _, name = ours.rpartition(".")
        table = self.layer.setdefault(part, {}) if part else self.layer
        table[name] = value
        self.used.append((key, f"{ours} = {toml_value(value)}"))

    def number(self, key: str) -> float | None:
        """Take a number. PyYAML reads 2e-5, which has no point, as text."""
        value = self.take(key)
        if value is None or isinstance(value, bool):
            return None
        try:
            number = float(value)
        except (TypeError, ValueError):
            number = math.nan
        if not math.isfinite(number):
            self.lack(key, value, "is not a number; set our key by hand")
            return None
        return number

    def copy_numbers(self, names: Mapping[str, str]) -> None:
        """Translate numbers that mean the same: their key -> our key."""
        for key, ours in names.items():
            value = self.number(key)
            if value is not None:
                self.set(key, ours, int(value) if value.is_integer() and ours not in _FLOATS else value)

    def lack(self, key: str, value: Any, remedy: str) -> None:
        """Note a key without counterpart."""
        text = json.dumps(value, default=str)
        self.missing.append((f"{key}: {text if len(text) <= 60 else text[:57] + '...'}", remedy))

    def skip(self, reasons: Mapping[str, str]) -> None:
        """Take keys that change nothing here: their key -> the reason."""
        for key, reason in reasons.items():
            if key in self.given:
                self.given.pop(key)
                self.same.append((key, reason))

    def finish(self) -> None:
        """Note the keys that are left, and validate the result. Raises UsageError if it is invalid."""
        for key, value in self.given.items():
            if value is False or value in (None, "", [], {}):
                self.same.append((key, "is off or empty"))
            else:
                self.lack(key, value, "is left out")
        self.layer.setdefault("data", {})["document_mask"] = True  # as in every fine-tuning
        length = self.layer.get("batch", {}).get("sequence_length")
        model = {} if length is None else {"model": {"max_position_embeddings": max(2048, length)}}
        merge.build([model, self.layer])  # the model's own context is known only when it is loaded

    def toml(self) -> str:
        """Return our configuration as TOML."""
        scalars = {key: value for key, value in self.layer.items() if not isinstance(value, dict)}
        tables = {key: value for key, value in self.layer.items() if isinstance(value, dict)}
        lines = [f"{key} = {toml_value(value)}" for key, value in scalars.items()]
        for part, values in tables.items():
            lines += ["", f"[{part}]", *(f"{key} = {toml_value(value)}" for key, value in values.items())]
        return "\n".join(lines).strip() + "\n"


_FLOATS = (
    "optim.lr",
    "optim.weight_decay",
    "optim.grad_clip",
    "adapter.alpha",
    "align.beta",
)


def toml_value(value: Any) -> str:
    """Return a text, number, truth value or list of them in TOML's notation, which is JSON's for these."""
    return json.dumps(value, ensure_ascii=False)


def sections(source: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keys of a file with those of its sections as section.key."""
    flat: dict[str, Any] = {}
    for key, value in source.items():
        if isinstance(value, Mapping):
            flat |= {f"{key}.{name}": inner for name, inner in value.items()}
        else:
            flat[str(key)] = value
    return flat


def set_batch(imported: Imported, micro: str, accumulation: str, length: str) -> None:
    """Translate rows per pass, passes per step and tokens per row to tokens per step."""
    rows, passes = imported.number(micro), imported.number(accumulation)
    tokens = imported.number(length)
    if tokens is not None:
        imported.set(length, "batch.sequence_length", int(tokens))
        if rows is not None:
            step = int(rows * (passes or 1) * tokens)
            imported.set(f"{micro} x {accumulation} x {length}", "batch.tokens", step)
            return
    for key, value in ((micro, rows), (accumulation, passes)):
        if value is not None:
            imported.lack(key, value, f"without {length}, set batch.tokens, the tokens of a step, by hand")


def set_dropout(imported: Imported, key: str) -> None:
    """Translate the dropout of adapters, which DoRA has none of here. Call it after the adapters' kind is known."""
    dropout, adapter = imported.number(key), imported.layer.get("adapter", {})
    if dropout and adapter.get("dora"):
        imported.lack(key, dropout, "is not supported with adapter.dora, which is kept")
    elif dropout is not None and adapter:
        imported.set(key, "adapter.dropout", dropout)


def set_checkpointing(imported: Imported, key: str) -> None:
    """Translate gradient checkpointing, which only saves memory, unless adapters have dropout. Call it after these."""
    if imported.layer.get("adapter", {}).get("dropout"):
        imported.lack(key, True, "excludes adapter.dropout here, which is kept; blocks are not recomputed")
    else:
        imported.set(key, "compute.activation_checkpointing", "block")


def set_schedule(imported: Imported, name: Any, steps: str, epochs: str, warmup: tuple[str, str]) -> None:
    """Translate the length, the warm-up (in steps, or as a fraction) and the shape of the learning rate.

    name: transformers' name of the schedule; None for their default, linear.
    """
    max_steps, max_epochs = imported.number(steps), imported.number(epochs)
    if max_steps is not None and max_steps > 0:
        imported.set(steps, "schedule.length", f"{int(max_steps)} steps")
    elif max_epochs is not None:
        imported.set(epochs, "schedule.length", f"{max_epochs:g} epochs")
    warmup_steps, warmup_ratio = imported.number(warmup[0]), imported.number(warmup[1])
    shape = str(name or "linear")
    if warmup_steps:
        imported.set(warmup[0], "schedule.warmup", f"{int(warmup_steps)} steps")
    elif warmup_ratio is not None or shape == "linear":
        imported.set(warmup[1], "schedule.warmup", warmup_ratio or 0.0)
    if shape == "linear":
        imported.set("lr_scheduler", "schedule.name", "wsd")
        share = warmup_ratio or 0.0
        if warmup_steps:  # of an unknown number of steps, 5 % is a guess
            share = min(1.0, warmup_steps / max_steps) if max_steps and max_steps > 0 else 0.05
        imported.set("lr_scheduler", "schedule.decay", 1.0 - share)
        imported.set("lr_scheduler", "schedule.final_lr_fraction", 0.0)
    elif shape == "cosine":
        imported.set("lr_scheduler", "schedule.name", "cosine")
        imported.set("lr_scheduler", "schedule.final_lr_fraction", 0.0)
    elif shape in ("constant", "constant_with_warmup"):
        imported.set("lr_scheduler", "schedule.name", "constant")
    else:
        imported.lack("lr_scheduler", shape, "choose schedule.name: wsd, cosine or constant")


def set_optimizer(imported: Imported, key: str, name: str) -> None:
    """Translate transformers' name of an optimizer. Learning rates of AdamW are meant as they are given."""
    plain, is_paged = name.lower().removeprefix("paged_"), name.lower().startswith("paged_")
    if plain == "muon":
        imported.set(key, "optim.name", "muon")
        return
    imported.set(key, "optim.name", "adamw")
    if "adapter" not in imported.layer:  # where it has no effect
        imported.set(key, "optim.scale", False)
    if plain in ("adamw_8bit", "adamw_bnb_8bit", "adamw_torch_8bit"):
        imported.set(key, "optim.states", "8bit")
    elif plain == "adamw_torch_4bit":
        imported.set(key, "optim.states", "4bit")
    elif plain not in ("adamw", "adamw_torch", "adamw_torch_fused", "adamw_hf", "adamw_apex_fused"):
        imported.lack(key, name, "AdamW is used instead; --optim.name muon is the other choice")
    if is_paged:
        imported.lack(key, name, "paged states: --optim.offload true keeps them in host memory")
