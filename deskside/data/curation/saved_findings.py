"""The findings about the documents of each batch, in a file of work/ from the analysis to the end of a curation."""

from __future__ import annotations

import json
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from deskside.data.curation.duplicates import Duplicates, find_duplicates
from deskside.data.curation.worker import Findings
from deskside.utils.files import write_atomically
from deskside.utils.parsing import json_value


def save(path: Path, key: str, findings: Findings) -> None:
    """Save the findings of a batch. key: of the batch. Raises RunError if they cannot be written."""
    pairs = [[a, b] for a, b in zip(findings.language, findings.verdict, strict=True)]
    arrays: dict[str, Any] = {
        "key": np.frombuffer(key.encode(), np.uint8),
        "hash": findings.hash,
        "minima": findings.minima,
        "words": findings.words,
        "verdicts": np.frombuffer(json.dumps(pairs).encode(), np.uint8),
    }
    write_atomically(path, lambda file: np.savez(file, **arrays))


def is_saved(path: Path, key: str) -> bool:
    """Return True if the findings of a batch are saved. A damaged file counts as missing."""
    if not path.is_file():
        return False
    try:
        with np.load(path, allow_pickle=False) as arrays:
            return all(name in arrays for name in ("hash", "minima", "words", "verdicts")) and (
                bytes(arrays["key"]) == key.encode()
            )
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile):
        return False


def read_verdicts(path: Path) -> list[tuple[str, tuple[str, str] | None]]:
    """Return the (identified language, verdict of the filters) of each document of a batch."""
    with np.load(path, allow_pickle=False) as arrays:
        return _verdicts(arrays)


def duplicates_in(paths: Sequence[Path], similarity: float | None) -> Duplicates:
    """Return the duplicates among the documents of all batches that no filter removes.

    paths: of the batches, in order. similarity: see `find_duplicates`.
    """
    hashes, minima, words, passed = [], [], [], []
    for path in paths:
        with np.load(path, allow_pickle=False) as arrays:
            hashes.append(arrays["hash"])
            minima.append(arrays["minima"])
            words.append(arrays["words"])
            passed.append(np.array([verdict is None for _, verdict in _verdicts(arrays)], np.bool_))
    return find_duplicates(
        np.concatenate(hashes),
        np.concatenate(minima),
        np.concatenate(passed),
        np.concatenate(words),
        similarity,
    )


def _verdicts(arrays: Mapping[str, NDArray[Any]]) -> list[tuple[str, tuple[str, str] | None]]:
    pairs: list[tuple[str, tuple[str, str] | None]] = json_value(arrays["verdicts"].tobytes())
    return pairs
