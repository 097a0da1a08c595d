"""`deskside dpo`: train a model on preference pairs."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deskside.cli.finetune import (
    COMMON,
    FinetuneDefaults,
    FinetuneOptions,
    FinetuneRun,
    default_batch,
    prepared_examples,
)
from deskside.cli.options import Command
from deskside.config.align import DpoConfig


@dataclass(kw_only=True)
class DpoOptions(FinetuneOptions):
    """Train a model to prefer the better of two answers (direct preference optimization, DPO).

    Examples:
      deskside dpo runs/chat --data pairs.jsonl
      deskside dpo runs/chat --data pairs.jsonl.gz --align.beta 0.05 --name polite
      deskside dpo models/Qwen3-0.6B --data pairs.parquet --adapter.rank 16
      deskside dpo --resume runs/polite

    A pair is {"prompt": "..." or messages, "chosen": "...", "rejected": "..."}.
    """


COMMAND = Command("dpo", DpoOptions, configuration=True, align=DpoConfig, common=("align.beta", *COMMON))


class DpoRun(FinetuneRun):
    """Direct preference optimization."""

    command = COMMAND
    example = "pairs.jsonl"

    def prepare(self, tokenizer: Path) -> Path:
        from deskside.align.preference_data import prepare_pairs
        from deskside.align.prepared import Spec

        align = self.align
        spec = Spec("preference", align.data, align.val, align.val_fraction, most_held_out=500)
        return prepared_examples(
            self.given, spec, "pairs", tokenizer, lambda out: prepare_pairs(spec, tokenizer, out)
        )

    def recipe(self, loaded: Any, data: Path, vocabulary: int) -> FinetuneDefaults:
        from deskside.align.prepared import open_index

        index = open_index(data, "preference", max(vocabulary, loaded.config.vocab_size))
        tokens = index["splits"]["train"]["tokens"]
        batch = default_batch(loaded, self.given, tokens, 65536, 40, sequence_length=2048)
        # The model answers already, and large steps would undo that.
        return FinetuneDefaults(batch, lr_factor=0.1, warmup=0.05, final_lr_fraction=0.1)


def run(argv: Sequence[str]) -> int:
    """Run `deskside dpo` and return the exit code. Raises UsageError and RunError."""
    return DpoRun(argv).run()
