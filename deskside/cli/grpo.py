"""`deskside grpo`: reinforcement learning with verifiable rewards."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from deskside.cli.finetune import COMMON, FinetuneOptions, FinetuneRun, PreparedData
from deskside.cli.finetune_defaults import FinetuneDefaults, row_length
from deskside.cli.options import Command, option
from deskside.config.align import GrpoConfig
from deskside.utils.errors import UsageError

QUESTIONS = 16  # per step
QUESTION_TOKENS = 256  # room for the question in a row, unless batch.sequence_length is given
DEFAULTS = FinetuneDefaults(
    {
        "tokens": f"{QUESTIONS} questions x align.group x batch.sequence_length",
        "sequence_length": f"align.answer_tokens + {QUESTION_TOKENS}, or the model's context if that is shorter",
    },
    lr_factor=0.05,  # gradients are noisy, and there are many steps
    warmup=0.05,
    final_lr_fraction=0.1,
    # Gradient norms vary more from step to step than in pretraining.
    more={"guard": {"spike_factor": 100.0}},
)


@dataclass(kw_only=True)
class GrpoOptions(FinetuneOptions):
    """Train a model by reinforcement learning with verifiable rewards (GRPO).

    Examples:
      deskside grpo runs/chat --data sums.jsonl --hours 1 --questions 32
      deskside grpo runs/chat --data sums.jsonl --align.reward 0.9*number+0.1*format
      deskside grpo runs/chat --data tasks.jsonl --align.reward my_reward.py:score
      deskside grpo runs/chat --data tasks.jsonl --align.reward http://localhost:9000/score
      deskside grpo runs/chat --data tasks.jsonl --align.tools my_tools.py:search
      deskside grpo --resume runs/chat-grpo

    A question is {"prompt": "..." or messages, "answer": "..."}, and perhaps
    "tools" and "system".
    A reward is a function of prompt, completion and answer.
    """

    questions: int | None = option(
        f"questions per step, instead of --batch.tokens; default: {QUESTIONS}", None, metavar="N"
    )


COMMAND = Command(
    "grpo",
    GrpoOptions,
    configuration=True,
    align=GrpoConfig,
    common=("align.reward", "align.group", "align.answer_tokens", "align.temperature", "align.kl", *COMMON),
    defaults=DEFAULTS.help_texts(),
)


class GrpoRun(FinetuneRun):
    """`deskside grpo`: group-relative policy optimization."""

    command = COMMAND
    defaults = DEFAULTS
    example = "questions.jsonl"

    def check(self) -> None:
        from deskside.align import rewards
        from deskside.align.tools import Tools

        if self.align.tools is not None:
            Tools.parse(self.align.tools)
        rewards.parse(self.align).check()

    def data(self, tokenizer: Path) -> PreparedData:
        from deskside.align.grpo_data import QuestionForm, prepare_questions
        from deskside.align.prepared import FolderSpec, key_of
        from deskside.align.tools import Tools

        align = self.align
        tools = "" if align.tools is None else json.dumps(Tools.parse(align.tools).schemas)
        form = QuestionForm(align.system, align.columns, not align.reward_is_server, tools)
        spec = FolderSpec(
            "questions", align.data, align.val, align.val_fraction, max_held_out=200, options=form.key()
        )
        prepare = partial(prepare_questions, spec, form, tokenizer)
        return PreparedData(align.data[0], "questions", "questions", spec.key(tokenizer), key_of, prepare)

    def batch(self, loaded: Any, data: Path, vocab_size: int) -> dict[str, int]:
        questions, given_batch, align = self.options.questions, self.given.get("batch", {}), self.align
        if questions is not None and "tokens" in given_batch:
            raise UsageError("--questions and --batch.tokens both set the size of a step; give one of them")
        if questions is not None and questions < 1:
            raise UsageError(f"--questions: must be at least 1, not {questions}")
        length = row_length(loaded, self.given, align.answer_tokens + QUESTION_TOKENS)
        if questions is None:
            questions = max(1, QUESTIONS // self.processes) * self.processes  # as many for each process
        return {"sequence_length": length, "tokens": questions * align.group * length}


def run(argv: Sequence[str]) -> int:
    """Run `deskside grpo` and return the exit code. Raises UsageError and RunError."""
    return GrpoRun(argv).run()
