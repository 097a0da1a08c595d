"""`deskside grpo`: questions are prepared, a model learns from rewards for its own answers, its report is written."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import tyro

from deskside.cli import overrides, sft
from deskside.config.align_grpo import GrpoConfig
from deskside.config.run import RunConfig
from deskside.utils.errors import UsageError

DESCRIPTION = """Train a model on questions whose answers can be checked: what was right becomes likelier (GRPO).

Examples:
  deskside grpo runs/chat --data sums.jsonl --hours 1 --questions 32
  deskside grpo runs/chat --data sums.jsonl --align.reward 0.9*number+0.1*format
  deskside grpo runs/chat --data tasks.jsonl --align.reward my_reward.py:score
  deskside grpo --resume runs/chat-grpo

A question is {"prompt": "..." or messages, "answer": "..."}; a reward is a function of prompt, completion, answer.
"""
QUESTIONS = 16
QUESTION_TOKENS = 256  # room for questions beside answers, unless batch.sequence_length says otherwise
# Steps are many and each is noisy: a twentieth of what fine-tuning takes.
RATE = 0.05


@dataclass(kw_only=True)
class GrpoOptions:
    """Options of the command itself."""

    source: Annotated[
        tyro.conf.Positional[str | None],
        tyro.conf.arg(metavar="RUN|HF_DIR", help="the model to begin with, best one that was fine-tuned"),
    ] = None
    sources: Annotated[
        tuple[str, ...],
        tyro.conf.arg(
            name="data",
            metavar="SOURCE",
            help="questions: .jsonl[.gz|.zst], .parquet, a folder, hf:owner/name",
        ),
    ] = ()
    val: Annotated[
        tuple[str, ...],
        tyro.conf.arg(metavar="SOURCE", help="held-out questions; default: a share of the data"),
    ] = ()
    questions: Annotated[
        int | None,
        tyro.conf.arg(
            metavar="N", help=f"questions in a step, instead of --batch.tokens; default: {QUESTIONS}"
        ),
    ] = None
    name: Annotated[
        str | None, tyro.conf.arg(metavar="NAME", help="folder under --runs; default: the model's and -grpo")
    ] = None
    epochs: Annotated[
        str | None, tyro.conf.arg(metavar="E", help="times through the questions; default: 1")
    ] = None
    hours: Annotated[str | None, tyro.conf.arg(metavar="H", help="length in time instead of epochs")] = None
    resume: Annotated[str | None, tyro.conf.arg(metavar="RUN", help="go on with a stopped run")] = None
    runs: Annotated[str, tyro.conf.arg(metavar="DIR", help="where run directories are made")] = "runs"
    json: Annotated[bool, tyro.conf.FlagCreatePairsOff, tyro.conf.arg(help="JSON on standard output")] = False


def run(argv: Sequence[str]) -> int:
    """The command; returns the exit code. Raises UsageError and RunError."""
    options, given = overrides.parse(GrpoOptions, argv, "deskside grpo", DESCRIPTION, align=GrpoConfig)
    if options.resume is not None:
        return sft.go_on(options, given, "grpo", _gained)
    sft.require(options, "grpo", "questions.jsonl")
    sft.length_into(given, options.epochs, options.hours, "1 epochs")
    align = sft.objective("grpo", options, given)
    _check_reward(align)
    return sft.learn(
        "grpo",
        argv,
        options,
        given,
        align.template,
        lambda tokenizer: _prepared(align, given, tokenizer),
        lambda loaded, path, size: _configure(loaded, given, align, path, size, options.questions),
        _gained,
        sft.wall_limit(given),
    )


def _check_reward(align: GrpoConfig) -> None:
    """A reward that does not exist is refused before anything is loaded. Raises UsageError."""
    from deskside.align import rewards

    rewards.parse(align.reward)


def _prepared(align: GrpoConfig, given: dict[str, Any], tokenizer: Path) -> Path:
    from deskside.align.grpo_data import prepare_questions
    from deskside.align.prepared import Spec

    spec = Spec(
        "questions",
        align.data,
        align.val,
        align.val_fraction,
        most_held_out=200,
        options=(("system", align.system),),
    )
    return sft.prepared_from(
        given, spec, "questions", tokenizer, lambda out: prepare_questions(spec, align.system, tokenizer, out)
    )


def _configure(
    loaded: Any, given: dict[str, Any], align: GrpoConfig, path: Path, vocabulary: int, questions: int | None
) -> RunConfig:
    asked = given.get("batch", {})
    if questions is not None and "tokens" in asked:
        raise UsageError("--questions and --batch.tokens: both say how large a step is; give one of them")
    if questions is not None and questions < 1:
        raise UsageError(f"--questions: {questions} must be at least 1")
    longest = min(align.answer_tokens + QUESTION_TOKENS, loaded.config.max_position_embeddings)
    length = int(asked.get("sequence_length", longest))
    batch = {"sequence_length": length, "tokens": (questions or QUESTIONS) * align.group * length}
    # The norms of gradients differ more from step to step than in pretraining.
    return sft.configure(
        loaded,
        given,
        align,
        path,
        vocabulary,
        batch,
        RATE,
        warmup=0.05,
        final_lr_fraction=0.1,
        more={"guard": {"spike_factor": 100.0}},
    )


def _gained(summary: dict[str, Any]) -> str:
    before = summary["before"]["val_reward"]
    return (
        f"mean reward {before:.3f} -> {summary['val_reward']:.3f} on {summary['val_questions']:,} questions, "
        f"{summary['val_answer_tokens']:.0f} tokens an answer"
    )
