"""`deskside dpo`: train a model on preference pairs."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from deskside.cli.finetune import COMMON, FinetuneOptions, FinetuneRun, PreparedData
from deskside.cli.finetune_defaults import FinetuneDefaults, StepSize, batch_help, default_batch
from deskside.cli.options import Command
from deskside.config.align import DpoConfig

STEP = StepSize(tokens=65536, per_epoch=40, sequence_length=2048)
# The model can answer already; a large learning rate would undo what it has learned.
DEFAULTS = FinetuneDefaults(batch_help(STEP), lr_factor=0.1, warmup=0.05, final_lr_fraction=0.1)


@dataclass(kw_only=True)
class DpoOptions(FinetuneOptions):
    """Train a model to prefer the better of two answers: DPO and its variants, ORPO, SimPO and CPO.

    Examples:
      deskside dpo runs/chat --data pairs.jsonl
      deskside dpo runs/chat --data pairs.jsonl.gz --align.beta 0.05 --name polite
      deskside dpo models/Qwen3-0.6B --data pairs.parquet --adapter.rank 16
      deskside dpo runs/124m --data pairs.jsonl --align.loss simpo
      deskside dpo --resume runs/polite

    A pair is {"prompt": "..." or messages, "chosen": "...", "rejected": "..."},
    and perhaps "tools" and "system".
    """


COMMAND = Command(
    "dpo",
    DpoOptions,
    configuration=True,
    align=DpoConfig,
    common=("align.loss", "align.beta", *COMMON),
    defaults=DEFAULTS.help_texts(),
)


class DpoRun(FinetuneRun):
    """`deskside dpo`: direct preference optimization and its variants."""

    command = COMMAND
    defaults = DEFAULTS
    example = "pairs.jsonl"

    def data(self, tokenizer: Path) -> PreparedData:
        from deskside.align.preference_data import prepare_pairs
        from deskside.align.prepared import FolderSpec, key_of

        align = self.align
        spec = FolderSpec("preference", align.data, align.val, align.val_fraction, max_held_out=500)
        prepare = partial(prepare_pairs, spec, tokenizer)
        return PreparedData(align.data[0], "pairs", "pairs", spec.key(tokenizer), key_of, prepare)

    def batch(self, loaded: Any, data: Path, vocab_size: int) -> dict[str, int]:
        from deskside.align.prepared import open_index

        index = open_index(data, "preference", max(vocab_size, loaded.config.vocab_size))
        return preference_batch(self, loaded, index)


def preference_batch(run: FinetuneRun, loaded: Any, index: dict[str, Any]) -> dict[str, int]:
    """Return the default batch for learning preferences. index: of the prepared data."""
    return default_batch(loaded, run.given, index["splits"]["train"]["tokens"], STEP, run.processes)


def run(argv: Sequence[str]) -> int:
    """Run `deskside dpo` and return the exit code. Raises UsageError and RunError."""
    return DpoRun(argv).run()
