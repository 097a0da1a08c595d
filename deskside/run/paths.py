"""Where a run's files lie: relative paths in its configuration count from the directory in which it was begun."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from deskside.config.align_grpo import GrpoConfig
from deskside.config.run import RunConfig


def reached(path: str, directory: object) -> str:
    """A path of a configuration as it is reached from here.

    directory: what the run says it was begun in, None where it does not. What is not there any more, because the tree
    was moved, is looked for from here as well.
    """
    if not isinstance(directory, str) or Path(path).is_absolute() or Path(directory) == Path.cwd():
        return path
    there = Path(directory) / path
    return path if not there.exists() and Path(path).exists() else str(there)


def reached_by(config: RunConfig, run: Mapping[str, Any]) -> RunConfig:
    """The configuration with its prepared data and its reward's file as they are reached. run: what run.json holds."""
    directory = run.get("directory")
    if config.data.path is not None:
        data = config.data.model_copy(update={"path": reached(config.data.path, directory)})
        config = config.model_copy(update={"data": data})
    if isinstance(config.align, GrpoConfig) and ".py:" in config.align.reward:
        file, _, function = config.align.reward.rpartition(":")
        align = config.align.model_copy(update={"reward": f"{reached(file, directory)}:{function}"})
        config = config.model_copy(update={"align": align})
    return config
