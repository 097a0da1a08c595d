"""`deskside dpo`: train a model on preference pairs."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from deskside.cli.finetune import COMMON, FinetuneOptions, FinetuneRun, PreparedData
from deskside.cli.finetune_defaults import FinetuneDefaults, default_batch
from deskside.cli.options import Command
from deskside.config.align import DpoConfig


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
    "dpo", DpoOptions, configuration=True, align=DpoConfig, common=("align.loss", "align.beta", *COMMON)
)


class DpoRun(FinetuneRun):
    """`deskside dpo`: direct preference optimization and its variants."""

    command = COMMAND
    example = "pairs.jsonl"

    def data(self, tokenizer: Path) -> PreparedData:
        from deskside.align.preference_data import prepare_pairs
        from deskside.align.prepared import FolderSpec, key_of

        align = self.align
        spec = FolderSpec("preference", align.data, align.val, align.val_fraction, max_held_out=500)
        prepare = partial(prepare_pairs, spec, tokenizer)
        return PreparedData(align.data[0], "pairs", "pairs", spec.key(tokenizer), key_of, prepare)

    def defaults(self, loaded: Any, data: Path, vocab_size: int) -> FinetuneDefaults:
        from deskside.align.prepared import open_index

        index = open_index(data, "preference", max(vocab_size, loaded.config.vocab_size))
        return preference_defaults(self, loaded, index)


def preference_defaults(run: FinetuneRun, loaded: Any, index: dict[str, Any]) -> FinetuneDefaults:
    """Return the training defaults for learning preferences. index: of the prepared data."""
    batch = default_batch(
        loaded,
        run.given,
        index["splits"]["train"]["tokens"],
        step_tokens=65536,
        steps_per_epoch=40,
        sequence_length=2048,
        processes=run.processes,
    )
    # The model can answer already; a large learning rate would undo what it has learned.
    return FinetuneDefaults(batch, lr_factor=0.1, warmup=0.05, final_lr_fraction=0.1)


def run(argv: Sequence[str]) -> int:
    """Run `deskside dpo` and return the exit code. Raises UsageError and RunError."""
    return DpoRun(argv).run()
