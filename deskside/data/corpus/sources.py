"""Sources of text: files, directories, globs, the Hugging Face hub and the bundled samples.

A source is given as a *spec string*:

    book.txt  notes.md             the whole file is one document
    a.jsonl  a.jsonl.gz  a.jsonl.zst   one JSON object per line, the text under one field
    a.parquet                      one row per document, the text in one column
    a/directory   "a/*.jsonl.gz"   every file of these kinds, sorted by path, except README.md
    hf:owner/name[:config[:split]] streamed through `datasets`
    bundled:tiny_shakespeare.txt   a file that comes with deskside
"""

from __future__ import annotations

import glob as globbing
import os
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

from deskside.utils.errors import UsageError

TEXT_KINDS = (".txt", ".md")
_KINDS = (*TEXT_KINDS, ".jsonl", ".jsonl.gz", ".jsonl.zst", ".parquet")

# How to convert file types that contain text in another form.
_HINTS = {
    ".pdf": "convert it to text first, for example with pdftotext",
    **dict.fromkeys(
        (".docx", ".odt", ".epub", ".html", ".htm", ".rtf"),
        "convert it to text first, for example with pandoc -t plain",
    ),
    ".json": "write one JSON object per line as .jsonl",
    **dict.fromkeys((".csv", ".tsv"), "write it as .jsonl or .parquet with the text in one field"),
    **dict.fromkeys((".zip", ".tar", ".tgz", ".7z"), "unpack it first"),
}


@dataclass(frozen=True)
class Source:
    """A resolved spec: its files in reading order, or a data set on the hub.

    tag: the source tag of documents whose record has no `source` field. lang: their language if it is known.
    """

    spec: str
    tag: str
    paths: tuple[Path, ...] = ()
    hub: tuple[str, str | None, str] | None = None  # name, config, split
    ignored: tuple[str, ...] = ()  # files of other kinds in a directory or glob
    unreadable: tuple[tuple[str, str], ...] = ()  # subdirectories that cannot be listed, with the reason
    lang: str = ""

    def identity(self) -> list[Any]:
        """Return the language, and the files' names and sizes without location, to detect changed inputs."""
        lang = [f"{self.lang}="] if self.lang else []
        if self.hub is not None:
            return [*lang, self.spec]
        return [*lang, *([p.name, p.stat().st_size if p.exists() else -1] for p in self.paths)]

    @classmethod
    def parse(cls, spec: str) -> Source:
        """Resolve a spec string. Raises UsageError if it does not name a source."""
        if not spec:
            raise UsageError(
                "'': an empty text names no source; give a file, a directory, hf:owner/name or bundled:NAME."
            )
        if spec.startswith("hf:"):
            name, *rest = spec.removeprefix("hf:").split(":")
            if len(rest) > 2 or name.count("/") != 1 or not all(name.split("/")):
                raise UsageError(
                    f"{spec}: write hf:owner/name, hf:owner/name:config or hf:owner/name:config:split."
                )
            config, split = [*rest, "", ""][:2]
            return cls(spec, name, hub=(name, config or None, split or "train"))
        if spec.startswith("bundled:"):
            name = spec.removeprefix("bundled:")
            folder = Path(str(files("deskside.data") / "bundled"))
            names = sorted(p.name for p in folder.iterdir() if kind_of(p) and not p.name.startswith("LICEN"))
            if name not in names:
                raise UsageError(f"{spec}: no such bundled text. Bundled: {', '.join(names)}.")
            return cls(spec, _stem(Path(name)), (folder / name,))
        path = Path(os.path.expanduser(spec))  # Path.expanduser raises RuntimeError for an unknown user
        if path.is_dir():
            paths, unreadable = _walk(path)
            return _from_files(spec, path.resolve().name, paths, f"in directory {spec}", unreadable)
        if not path.exists() and any(c in spec for c in "*?["):
            # A pattern with several ** finds a file several times.
            paths = sorted({Path(p) for p in globbing.glob(str(path), recursive=True) if os.path.isfile(p)})
            return _from_files(spec, path.parent.resolve().name, paths, f"match {spec}")
        if kind_of(path) is None and not path.exists():
            raise UsageError(f"{spec}: no such file or directory.")
        if kind_of(path) is None:
            hint = _HINTS.get(path.suffix.lower())
            raise UsageError(
                f"{spec}: unsupported file type{f'; {hint}' if hint else ''}. "
                f"Supported: {', '.join(_KINDS)}, a directory, hf:, bundled:."
            )
        if path.exists() and not path.is_file():
            raise UsageError(
                f"{spec}: is not a regular file, but data is read twice. Write the data to a file first."
            )
        return cls(spec, _stem(path), (path,))


def kind_of(path: Path) -> str | None:
    """Return the supported suffix of a file name, such as ".jsonl.gz", or None."""
    name = path.name.lower()
    return next((kind for kind in _KINDS if name.endswith(kind)), None)


def _stem(path: Path) -> str:
    kind = kind_of(path) or ""
    return path.name[: len(path.name) - len(kind)] or path.name


def _walk(folder: Path) -> tuple[list[Path], list[tuple[str, str]]]:
    """Return the sorted files below `folder`, and the directories that cannot be listed with the reason."""
    unreadable: list[tuple[str, str]] = []

    def on_error(error: OSError) -> None:
        unreadable.append((str(error.filename), error.strerror or ""))

    paths = [Path(parent, name) for parent, _, names in os.walk(folder, onerror=on_error) for name in names]
    return sorted(p for p in paths if p.is_file()), sorted(unreadable)


def _from_files(
    spec: str, tag: str, paths: list[Path], where: str, unreadable: Sequence[tuple[str, str]] = ()
) -> Source:
    """Return the source of the files of supported kinds. Raises UsageError if there is none.

    where: says in the message which files were looked for.
    """
    # README.md describes a data set.
    supported = tuple(p for p in paths if kind_of(p) and p.name.lower() != "readme.md")
    if not supported:
        details = [f" {folder} cannot be read ({reason})." for folder, reason in unreadable[:1]]
        hints = [f" {p.name}: {_HINTS[p.suffix.lower()]}." for p in paths if p.suffix.lower() in _HINTS]
        details += hints[:1]
        raise UsageError(f"no files {where}. Supported: {', '.join(_KINDS)}.{''.join(details)}")
    used = set(supported)
    ignored = tuple(str(p) for p in paths if p not in used)
    return Source(spec, tag, supported, ignored=ignored, unreadable=tuple(unreadable))
