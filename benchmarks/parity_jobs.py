"""Arms of the parity benchmark: the validated configuration and the arguments of `deskside train` of each arm."""

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
from deskside.data.reading.index import read_index
from deskside.utils.errors import UsageError

EVALUATIONS = 12  # approximate number per run

Keys = list[tuple[str, str]]  # configuration keys and their values


@dataclass(frozen=True)
class Job:
    """An arm with a seed.

    words: arguments of `deskside train`; setting: values that must be equal in all runs that are compared.
    """

    arm: str
    seed: int
    words: list[str]
    config: RunConfig
    setting: dict[str, Any]

    @property
    def label(self) -> str:
        """The name of the job, which is also its folder's."""
        return re.sub(r"[^A-Za-z0-9._=-]", "-", self.arm) + f"-seed{self.seed}"


def parse_keys(words: Sequence[str]) -> Keys:
    """Return --a.b value ... as [("a.b", "value")]. `jobs` rejects unknown keys. Raises UsageError."""
    keys: Keys = []
    rest = list(words)
    while rest:
        key = rest.pop(0)
        if not key.startswith("--") or "." not in key:
            raise UsageError(f"unexpected argument {key}; configuration keys are written --part.key value")
        if not rest:
            raise UsageError(f"{key}: needs a value")
        keys.append((key[2:], rest.pop(0)))
    return keys


def parse_integer(text: str, what: str) -> int:
    """Parse a non-negative integer. Raises UsageError, which starts with `what`."""
    if not text.strip().isdigit():
        raise UsageError(f"{what}: '{text}' is not a whole number")
    return int(text)


def jobs(preset: str, arms: str, seeds: Sequence[int], tokens: str, data: Path, keys: Keys) -> list[Job]:
    """Return every arm with every seed, ordered by seed, after validating all of them. Raises UsageError."""
    try:
        length = Duration.parse(f"{tokens} tokens")
    except ValueError as error:
        raise UsageError(f"--tokens {tokens}: {error}") from None
    split_tokens = {name: split.tokens for name, split in read_index(data).splits.items()}
    chosen = [part for part in (part.strip() for part in arms.split(",")) if part]
    if not chosen or not seeds:
        raise UsageError("--arms and --seeds: give at least one of each")
    all_jobs = []
    for index, seed in enumerate(seeds):
        for arm in chosen:
            name, at, own_seed = arm.partition("@")
            if at and index > 0:
                continue  # an arm that names its seed runs once
            arm_seed = parse_integer(own_seed, arm) if at else seed
            all_jobs.append(_job(preset, name, arm_seed, int(length.value), data, split_tokens, keys))
    labels = [job.label for job in all_jobs]
    for label in labels:
        if labels.count(label) > 1:
            raise UsageError(f"--arms: {label} is there more than once")
    return all_jobs


def slots(gpus: str) -> list[str]:
    """Return the value of CUDA_VISIBLE_DEVICES for each concurrent run, "" for the CPU. Raises UsageError.

    gpus: "cpu", "all", or torch's numbers, which count only the GPUs that CUDA_VISIBLE_DEVICES leaves visible.
    """
    if gpus == "cpu":
        return [""]
    import torch

    count = torch.cuda.device_count()
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    all_names = visible.split(",") if visible else [str(number) for number in range(count)]
    names = [name.strip() for name in all_names[:count]]
    environment = "" if visible is None else f" with CUDA_VISIBLE_DEVICES={visible}"
    if not names:
        raise UsageError(
            f"--gpus: there is no usable GPU{environment}; train on the processor with --gpus cpu"
        )
    if gpus == "all":
        return names
    numbers = [parse_integer(part, "--gpus") for part in gpus.split(",")]
    if max(numbers) >= count or len(set(numbers)) < len(numbers):
        raise UsageError(f"--gpus {gpus}: there are GPUs 0 to {count - 1}{environment}; name each once")
    return [names[number] for number in numbers]


def _job(
    preset: str, arm: str, seed: int, tokens: int, data: Path, split_tokens: dict[str, int], keys: Keys
) -> Job:
    """Build a job. split_tokens: tokens of each split of the dataset."""
    name, *settings = arm.split(":")
    arm_keys: Keys = [("precision.name", name)]
    for option in settings:
        key, equals, value = option.partition("=")
        if not equals:
            raise UsageError(f"--arms {arm}: '{option}' must be key=value, such as head=fp8")
        arm_keys.append((f"precision.{key}", value))
    lengths = {f"schedule.{unit}" for unit in ("length", *merge.LENGTH_ALIASES)}
    fixed = {"data.path", "precision.name", *lengths}
    for key, _ in keys:
        if key in fixed:
            raise UsageError(
                f"--{key}: this benchmark sets it itself; use --data, --seeds, --arms or --tokens"
            )
    given = [("data.path", str(data.resolve())), *arm_keys, *keys]
    step_tokens = _run_config(preset, given).mean_step_tokens()
    steps = math.ceil(tokens / step_tokens)
    defaults = {
        "evaluate.every": f"{max(1, math.ceil(steps / EVALUATIONS))} steps",
        # The whole split, so that all points of the curve use the same text.
        "evaluate.tokens": str(split_tokens["val"]),
        "checkpoint.every": f"{steps + 1} steps",
        "checkpoint.keep": "1",
    }
    named = {key for key, _ in given}
    given += [("schedule.length", f"{steps} steps"), *((k, v) for k, v in defaults.items() if k not in named)]
    config = _run_config(preset, given)
    setting: dict[str, Any] = {
        "preset": preset,
        "steps": steps,
        "tokens_per_step": step_tokens,
        "sequence_length": config.batch.sequence_length,
        "optimizer": config.optim.name,
        "train_tokens": split_tokens["train"],
        "keys": dict(keys),
    }
    return Job(arm, seed, [preset, "--seed", str(seed), *_words(given)], config, setting)


def _words(given: Keys) -> list[str]:
    return [word for key, value in given for word in (f"--{key}", value)]


def _run_config(preset: str, given: Keys) -> RunConfig:
    """Return the configuration as `deskside train` will read it. Raises UsageError."""
    _, keys = COMMAND.parse_config(_words(given))
    return merge.build([*presets.layers(preset), keys])
