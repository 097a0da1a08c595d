"""Callbacks that warn about a run: their warnings, and the measured runs below docs/data."""

import json
import tarfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import zstandard

from deskside.run.directory import RunDirectory
from deskside.train.loop.callbacks import Callback
from deskside.utils.signals import StopSignal

DATA = Path(__file__).parents[3] / "docs" / "data"


def warnings(watch: Callback, rows: Sequence[dict[str, Any]], folder: Path) -> list[str]:
    """Return the warnings of a callback that sees these rows of metrics.jsonl. folder: of the run, new."""
    folder.mkdir()
    watch.begin(RunDirectory(folder), StopSignal(), None)  # type: ignore[arg-type]
    for row in rows:
        watch.on_step(row, len(rows))
    path = folder / "events.log"
    return path.read_text().splitlines() if path.exists() else []


def measured_runs(archive: str, key: str) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """Yield the name of each run in an archive below docs/data, and the rows of its metrics.jsonl that have `key`."""
    with zstandard.open(DATA / archive) as packed, tarfile.open(fileobj=packed, mode="r|") as files:
        for member in files:
            content = files.extractfile(member) if member.name.endswith("/metrics.jsonl") else None
            if content is not None:
                rows = [json.loads(line) for line in content if f'"{key}"'.encode() in line]
                yield member.name.split("/")[-2], rows
