"""Resolution of relative paths in a run's configuration, which refer to the directory where the run was started."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from deskside.config.align import GrpoConfig
from deskside.config.run import RunConfig


def reached(path: str, directory: object) -> str:
    """Resolve a path of a configuration.

    directory: where the run was started, if known. A path that no longer exists there, because the tree was moved,
    is also looked up from the current directory.
    """
    if not isinstance(directory, str) or Path(path).is_absolute() or Path(directory) == Path.cwd():
        return path
    there = Path(directory) / path
    return path if not there.exists() and Path(path).exists() else str(there)


def reached_by(config: RunConfig, run: Mapping[str, Any]) -> RunConfig:
    """Return the configuration with the paths of its data and reward file resolved. run: the content of run.json."""
    directory = run.get("directory")
    if config.data.path is not None:
        data = config.data.model_copy(update={"path": reached(config.data.path, directory)})
        config = config.model_copy(update={"data": data})
    if isinstance(config.align, GrpoConfig) and ".py:" in config.align.reward:
        file, _, function = config.align.reward.rpartition(":")
        align = config.align.model_copy(update={"reward": f"{reached(file, directory)}:{function}"})
        config = config.model_copy(update={"align": align})
    return config
