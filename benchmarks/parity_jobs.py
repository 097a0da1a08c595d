"""Arms of the parity benchmark: a validated configuration and the arguments of `deskside train` for each."""

import math
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deskside.cli.train import COMMAND
from deskside.config import merge, presets
from deskside.config.duration import Duration
from deskside.config.run import RunConfig
from deskside.data.reading.shards import read_index
from deskside.utils.errors import UsageError

EVALUATIONS = 12  # approximate number per run

Pairs = list[tuple[str, str]]


@dataclass(frozen=True)
class Job:
    """An arm with a seed.

    words: arguments of `deskside train`; setting: what must be equal in runs that are compared.
    """

    arm: str
    seed: int
    words: list[str]
    config: RunConfig
    setting: dict[str, Any]

    @property
    def label(self) -> str:
        """The name of the job as a file name."""
        return re.sub(r"[^A-Za-z0-9._=-]", "-", self.arm) + f"-seed{self.seed}"


def pairs(words: Sequence[str]) -> Pairs:
    """Return --a.b value ... as [("a.b", "value")]. `jobs` rejects unknown keys. Raises UsageError."""
    found: Pairs = []
    rest = list(words)
    while rest:
        key = rest.pop(0)
        if not key.startswith("--") or "." not in key:
            raise UsageError(f"unexpected argument {key}; configuration keys are written --part.key value")
        if not rest:
            raise UsageError(f"{key}: needs a value")
        found.append((key[2:], rest.pop(0)))
    return found


def whole(text: str, what: str) -> int:
    """Parse a non-negative integer. Raises UsageError."""
    if not text.strip().isdigit():
        raise UsageError(f"{what}: '{text}' is not a whole number")
    return int(text)


def jobs(preset: str, arms: str, seeds: Sequence[int], tokens: str, data: Path, keys: Pairs) -> list[Job]:
    """Return every arm with every seed, ordered by seed, after validating all of them. Raises UsageError."""
    try:
        length = Duration.parse(f"{tokens} tokens")
    except ValueError as error:
        raise UsageError(f"--tokens {tokens}: {error}") from None
    text = {name: split.tokens for name, split in read_index(data).splits.items()}
    chosen = [part for part in (part.strip() for part in arms.split(",")) if part]
    if not chosen or not seeds:
        raise UsageError("--arms and --seeds: give at least one of each")
    found = []
    for number, seed in enumerate(seeds):
        for arm in chosen:
            name, at, own = arm.partition("@")
            if at and number:
                continue  # the arm names its seed, so one run is enough
            found.append(
                _job(preset, name, whole(own, arm) if at else seed, int(length.value), data, text, keys)
            )
    labels = [job.label for job in found]
    for label in labels:
        if labels.count(label) > 1:
            raise UsageError(f"--arms: {label} is there more than once")
    return found


def slots(gpus: str) -> list[str]:
    """Return the CUDA_VISIBLE_DEVICES of each concurrent run; "" is a run on the CPU. Raises UsageError.

    gpus: numbers as torch counts them, that is, among those that the environment leaves visible.
    """
    if gpus == "cpu":
        return [""]
    import torch

    count = torch.cuda.device_count()
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    every = visible.split(",") if visible else [str(number) for number in range(count)]
    names = [name.strip() for name in every[:count]]
    among = "" if visible is None else f" with CUDA_VISIBLE_DEVICES={visible}"
    if not names:
        raise UsageError(f"--gpus: there is no usable GPU{among}; train on the processor with --gpus cpu")
    if gpus == "all":
        return names
    numbers = [whole(part, "--gpus") for part in gpus.split(",")]
    if max(numbers) >= count or len(set(numbers)) < len(numbers):
        raise UsageError(f"--gpus {gpus}: there are GPUs 0 to {count - 1}{among}; name each once")
    return [names[number] for number in numbers]


def _job(preset: str, arm: str, seed: int, tokens: int, data: Path, text: dict[str, int], keys: Pairs) -> Job:
    """Build a job. text: tokens by split of the dataset."""
    name, *settings = arm.split(":")
    own: Pairs = [("precision.name", name)]
    for option in settings:
        key, equals, value = option.partition("=")
        if not equals:
            raise UsageError(f"--arms {arm}: '{option}' must be key=value, such as head=fp8")
        own.append((f"precision.{key}", value))
    lengths = {f"schedule.{unit}" for unit in ("length", *merge.LENGTH_ALIASES)}
    fixed = {"data.path", "precision.name", *lengths}
    for key, _ in keys:
        if key in fixed:
            raise UsageError(f"--{key}: this benchmark sets it itself (--data, --seeds, --arms, --tokens)")
    given = [("data.path", str(data.resolve())), *own, *keys]
    step_tokens = _configured(preset, given).mean_step_tokens()
    steps = math.ceil(tokens / step_tokens)
    defaults = {
        "evaluate.every": f"{max(1, math.ceil(steps / EVALUATIONS))} steps",
        "evaluate.tokens": str(
            text["val"]
        ),  # the whole split, so that the curve and its end use the same text
        "checkpoint.every": f"{steps + 1} steps",
        "checkpoint.keep": "1",
    }
    named = {key for key, _ in given}
    given += [("schedule.length", f"{steps} steps"), *((k, v) for k, v in defaults.items() if k not in named)]
    config = _configured(preset, given)
    setting: dict[str, Any] = {
        "preset": preset,
        "steps": steps,
        "tokens_per_step": step_tokens,
        "sequence_length": config.batch.sequence_length,
        "optimizer": config.optim.name,
        "train_tokens": text["train"],
        "keys": dict(keys),
    }
    return Job(arm, seed, [preset, "--seed", str(seed), *_words(given)], config, setting)


def _words(given: Pairs) -> list[str]:
    return [word for key, value in given for word in (f"--{key}", value)]


def _configured(preset: str, given: Pairs) -> RunConfig:
    """Return the configuration as `deskside train` will read it. Raises UsageError."""
    _, keys = COMMAND.parse_config(_words(given))
    return merge.build([*presets.layers(preset), keys])
