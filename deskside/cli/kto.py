"""`deskside kto`: train a model on labelled answers."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from deskside.cli.dpo import DEFAULTS, preference_batch
from deskside.cli.finetune import COMMON, FinetuneOptions, FinetuneRun, PreparedData
from deskside.cli.options import Command
from deskside.config.align import KtoConfig


@dataclass(kw_only=True)
class KtoOptions(FinetuneOptions):
    """Train a model on answers that are labelled good or bad (Kahneman-Tversky optimization, KTO).

    Examples:
      deskside kto runs/chat --data thumbs.jsonl
      deskside kto runs/chat --data thumbs.jsonl.gz --align.undesirable_weight 1.5
      deskside kto models/Qwen3-0.6B --data thumbs.parquet --adapter.rank 16
      deskside kto --resume runs/chat-kto

    A record is {"prompt": "..." or messages, "completion": "...", "label": true or false},
    and perhaps "tools" and "system".
    """


COMMAND = Command(
    "kto",
    KtoOptions,
    configuration=True,
    align=KtoConfig,
    common=("align.beta", *COMMON),
    defaults=DEFAULTS.help_texts(),
)


class KtoRun(FinetuneRun):
    """`deskside kto`: Kahneman-Tversky optimization."""

    command = COMMAND
    defaults = DEFAULTS
    example = "thumbs.jsonl"

    def data(self, tokenizer: Path) -> PreparedData:
        from deskside.align.labelled_data import prepare_labelled
        from deskside.align.prepared import FolderSpec, key_of

        align = self.align
        spec = FolderSpec("labelled", align.data, align.val, align.val_fraction, max_held_out=500)
        prepare = partial(prepare_labelled, spec, tokenizer)
        return PreparedData(
            align.data[0], "labelled", "labelled answers", spec.key(tokenizer), key_of, prepare
        )

    def batch(self, loaded: Any, data: Path, vocab_size: int) -> dict[str, int]:
        from deskside.align.prepared import open_index

        index = open_index(data, "labelled", max(vocab_size, loaded.config.vocab_size))
        return preference_batch(self, loaded, index)


def run(argv: Sequence[str]) -> int:
    """Run `deskside kto` and return the exit code. Raises UsageError and RunError."""
    return KtoRun(argv).run()
