"""Checks of a run's configuration and data that come before torch is imported."""

import os
import shlex
from pathlib import Path

from deskside.config.run import RunConfig
from deskside.data.reading.index_file import INDEX, is_prepared
from deskside.utils.errors import UsageError

PREPARE_COMMAND = "deskside data prepare SOURCE --out data/NAME"


def check_start(config: RunConfig) -> None:
    """Raise UsageError for a run without a length or without data, or whose vocabulary is too small for its data."""
    if config.schedule.length is None:
        raise UsageError(
            "schedule.length: the run has no length; give --hours 2, --schedule.steps 2000 or --schedule.tokens 1e9"
        )
    check_path(config)
    path = Path(str(config.data.path))
    if config.align is None and is_prepared(path):
        from deskside.data.reading.index import read_index  # imports numpy, which takes time

        check_vocabulary(config, read_index(path).tokenizer.vocab_size)


def check_path(config: RunConfig) -> None:
    """Raise UsageError unless the run has prepared data, or sources to prepare it from."""
    path = config.data.path
    if path is None:
        raise UsageError(
            f"data.path: no data was given; prepare some with: {PREPARE_COMMAND}; then add --data.path data/NAME"
        )
    if not config.data.sources and not is_prepared(path):
        command = (
            PREPARE_COMMAND.replace("SOURCE", shlex.quote(path)) if Path(path).is_dir() else PREPARE_COMMAND
        )
        raise UsageError(f"data.path: {path} is not prepared data (no {INDEX}); prepare some with: {command}")


def check_vocabulary(config: RunConfig, tokens: int) -> None:
    """Raise UsageError if the model's vocabulary is smaller than that of the data, which has `tokens` tokens."""
    if tokens > config.model.vocab_size:
        raise UsageError(
            f"model.vocab_size: {config.data.path} has a vocabulary of {tokens}, the model only one of "
            f"{config.model.vocab_size}; use --model.vocab_size {tokens}, or prepare the data again with deskside data "
            f"prepare ... --vocab-size {config.model.vocab_size}"
        )


def set_cublas_workspace(config: RunConfig) -> None:
    """Give cuBLAS the fixed workspace that deterministic runs need. Call it before CUDA is initialized."""
    if config.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
