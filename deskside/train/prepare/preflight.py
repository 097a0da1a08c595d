"""Checks and settings that come before torch is imported."""

import os
from pathlib import Path

from deskside.config.run import RunConfig
from deskside.utils.errors import UsageError

PREPARE = "deskside data prepare SOURCE --out data/NAME"


def check_start(config: RunConfig) -> None:
    """Raise UsageError for a run without a length or without data."""
    if config.schedule.length is None:
        raise UsageError(
            "schedule.length: the run has no length; give --hours 2, --schedule.steps 2000 or --schedule.tokens 1e9"
        )
    path = config.data.path
    if path is None:
        raise UsageError(
            f"data.path: no data was given; make some with: {PREPARE}; then add --data.path data/NAME"
        )
    if not config.data.sources and not (Path(path) / "index.json").exists():
        raise UsageError(f"data.path: {path} is not prepared data (no index.json); make some with: {PREPARE}")


def set_cublas_workspace(config: RunConfig) -> None:
    """Give cuBLAS the fixed workspace that deterministic runs need. CUDA reads it once, when torch starts it."""
    if config.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
