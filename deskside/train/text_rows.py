"""The rows of a pretraining run. Imports no torch, so that a dry run checks the data as the run itself does."""

from pathlib import Path
from typing import Any

from deskside.config.run import RunConfig
from deskside.data.reading.index_file import is_prepared
from deskside.data.reading.rows import PackedDataset
from deskside.train.preflight import check_path, check_vocabulary


def open_text(config: RunConfig, path: Path, split: str, sequence_length: int) -> PackedDataset:
    """Open a split of prepared text in rows of `sequence_length` tokens.

    Raises UsageError if it is missing or does not fit the configuration, RunError if it is damaged.
    """
    mixture: dict[str, Any] = {}  # the validation split is evaluated as it is
    if split == "train":
        mixture = {
            "weights": dict(config.data.weights) or None,
            "language_temperature": config.data.language_temperature,
            "source_temperature": config.data.source_temperature,
            "packing": config.data.packing,
        }
    dataset = PackedDataset(path, split=split, sequence_length=sequence_length, **mixture)
    check_vocabulary(config, dataset.index.tokenizer.vocab_size)
    return dataset


def check_data(config: RunConfig) -> None:
    """Check the data of a run as its start would, with the same errors. A run without data passes.

    Data that the run would first prepare from its sources is not checked. Raises as `open_text`.
    """
    if config.data.path is None:
        return
    check_path(config)
    path = Path(config.data.path)
    if config.align is not None or not is_prepared(path):
        return
    for length in {stage.sequence_length: None for stage in config.stages()}:
        open_text(config, path, "train", length)
    open_text(config, path, "val", config.batch.sequence_length)
