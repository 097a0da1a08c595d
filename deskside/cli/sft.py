"""`deskside sft`: fine-tune a model on conversations."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from deskside.cli.finetune import COMMON, FinetuneOptions, FinetuneRun, PreparedData
from deskside.cli.finetune_defaults import FinetuneDefaults, StepSize, batch_help, default_batch
from deskside.cli.options import Command
from deskside.config.align import SftConfig

STEP = StepSize(tokens=32768, per_epoch=50, sequence_length=2048)


@dataclass(kw_only=True)
class SftOptions(FinetuneOptions):
    """Fine-tune a model on conversations, with the loss on assistant tokens only.

    Examples:
      deskside sft runs/124m --data chats.jsonl
      deskside sft runs/124m --data chats.jsonl.gz --epochs 2 --name chat
      deskside sft models/Qwen3-0.6B --data hf:HuggingFaceH4/no_robots --hours 1
      deskside sft --resume runs/chat
      deskside sft --resume-from adapters/polite --data chats.jsonl

    A conversation is {"messages": [{"role": "user", "content": "..."},
      {"role": "assistant", "content": "..."}]}, with "tools", "tool_calls" and
    "reasoning_content" if the model's chat template writes them. Records of
    ShareGPT ("conversations") and Alpaca ("instruction", "output") are
    recognized.
    """


# The learning rate ends at 0, since usually no training follows.
DEFAULTS = FinetuneDefaults(batch_help(STEP), lr_factor=1.0, warmup=0.03, final_lr_fraction=0.0, epochs=3)
COMMAND = Command(
    "sft",
    SftOptions,
    configuration=True,
    align=SftConfig,
    common=COMMON,
    defaults=DEFAULTS.help_texts(),
)


class SftRun(FinetuneRun):
    """`deskside sft`: supervised fine-tuning."""

    command = COMMAND
    example = "chats.jsonl"
    defaults = DEFAULTS

    def data(self, tokenizer: Path) -> PreparedData:
        from deskside.data.chat.prepare_chat import ChatSpec, cache_key, prepare_chat
        from deskside.data.reading.index import read_index

        align = self.align
        spec = ChatSpec(align.data, align.val, align.val_fraction, align.turns)

        def key_of(path: Path) -> str | None:
            index = read_index(path)
            return None if index.chat is None else str(index.arguments.get("key"))

        key = cache_key(spec, tokenizer)
        prepare = partial(prepare_chat, spec, tokenizer)
        return PreparedData(align.data[0], "chat", "conversations", key, key_of, prepare)

    def batch(self, loaded: Any, data: Path, vocab_size: int) -> dict[str, int]:
        from deskside.data.reading.index import read_index

        tokens = read_index(data).splits["train"].tokens
        return default_batch(loaded, self.given, tokens, STEP, self.processes)


def run(argv: Sequence[str]) -> int:
    """Run `deskside sft` and return the exit code. Raises UsageError and RunError."""
    return SftRun(argv).run()
