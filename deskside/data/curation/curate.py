"""Curation of text before training: `deskside data curate`.

1. Read all documents, in batches of about 16 MB. Worker processes identify the language, apply the quality filters,
look for word sequences of the evaluation tasks and compute signatures, which are saved in work/ for each batch.

2. Find exact duplicates by a hash of the text, then near-duplicates by signature (`near_duplicates`), among the
documents that no filter removes.

3. Read again, and write every document to kept/ or, with one reason, to removed/. Input that is not a document at all
is listed in removed/unreadable.jsonl.

A batch is a pure function of the arguments and the text, so a repeated command continues after a kill and writes the
same bytes. Memory: about 500 bytes per document, and for each process a batch and the arrays of a million characters.
"""

from __future__ import annotations

import contextlib
import json
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import xxhash
from numpy.typing import NDArray

from deskside.data.corpus.analyze import CorpusOptions, documents_of, labelled_source
from deskside.data.corpus.bad_input import BadInputLog
from deskside.data.corpus.prepare_state import describe_difference
from deskside.data.corpus.process_pool import Task, WorkerDied, WorkerPool
from deskside.data.corpus.sources import Source
from deskside.data.curation import worker
from deskside.data.curation.contamination import EvaluationNgrams
from deskside.data.curation.near_duplicates import duplicates_of
from deskside.data.curation.quality import DEFAULT_FILTERS, FILTERS
from deskside.data.curation.report import REPORT, build_report, markdown
from deskside.data.curation.worker import DocumentBatch, DocumentVerdict
from deskside.utils import strict_json
from deskside.utils.child_process import cpu_cores
from deskside.utils.errors import RunError, UsageError
from deskside.utils.files import fingerprint, write_atomically, write_error
from deskside.utils.parsing import json_value, read_json_object
from deskside.utils.progress import ProgressBar

STATE, WORK, UNREADABLE, PAGE = "curate.json", "work", "removed/unreadable.jsonl", "report.md"
VERSION = 4  # of the rules
DEFAULT_SIMILARITY = 0.7


@dataclass(frozen=True, kw_only=True)
class CurationOptions:
    """Options of `curate`.

    reading: how documents are read, and `workers`, `resume` and `quiet`. filters: of quality.FILTERS. similarity: from
    which documents are near-duplicates; None keeps them. languages: those to keep; () for all. items: texts of
    evaluation items by name of the task. batch_bytes: text per batch.
    """

    reading: CorpusOptions = field(default_factory=CorpusOptions)
    filters: tuple[str, ...] = DEFAULT_FILTERS
    similarity: float | None = DEFAULT_SIMILARITY
    languages: tuple[str, ...] = ()
    items: Mapping[str, Sequence[str]] = field(default_factory=dict)
    batch_bytes: int = 16 << 20


def curate(sources: Sequence[str], out: str | Path, options: CurationOptions) -> dict[str, Any]:
    """Curate `sources` into the folder `out`, and return the report (see `report.build_report`).

    Raises UsageError for wrong arguments, refused input or if `out` holds other files; RunError if a file is damaged or
    cannot be written, or a worker process died.
    """
    unknown = [name for name in options.filters if name not in FILTERS]
    if unknown:
        raise UsageError(f"--filters {unknown[0]}: give some of {', '.join(FILTERS)}, or none.")
    if options.similarity is not None and not 0.3 <= options.similarity <= 1:
        raise UsageError(f"--similarity {options.similarity}: give 0.3 to 1, or 0 to keep near-duplicates.")
    if options.reading.workers is not None and options.reading.workers < 1:
        raise UsageError(f"--workers {options.reading.workers}: give a number of at least 1.")
    if "" in options.languages:
        raise UsageError("--languages: a code is empty. Give codes with commas between them, such as en,hi.")
    if not sources:
        raise UsageError("no source given. Name a file, a directory or hf:owner/name.")
    curation = _Curation([labelled_source(spec) for spec in sources], Path(out), options)
    curation.open()
    try:
        return curation.report() if curation.is_complete() else curation.run()
    except WorkerDied as error:
        raise RunError(
            "a process that curates was killed, most likely for lack of memory. Run the same command again with "
            "fewer --workers; it continues."
        ) from error


class _UnreadableLog(BadInputLog):
    """Writes every place to a file, because a report only has the first few."""

    file: BinaryIO

    def add(self, reason: str, origin: str, detail: str = "") -> None:
        super().add(reason, origin, detail)
        line = json.dumps({"id": origin, "reason": reason, "detail": detail}) + "\n"
        self.file.write(line.encode())


@dataclass
class _Curation:
    """A curation in progress.

    written: what `worker.write` returned, by number of the batch. all_text: checksum of all batches. is_copy: whether a
    document is an exact duplicate, shape [documents].
    """

    sources: list[Source]
    out: Path
    options: CurationOptions
    written: dict[str, dict[str, Any]] = field(default_factory=dict)
    bad_input: dict[str, Any] = field(default_factory=dict)
    complete: bool = False
    all_text: str = ""
    is_copy: NDArray[np.bool_] = field(default_factory=lambda: np.zeros(0, np.bool_))

    def __post_init__(self) -> None:
        reading, options = self.options.reading, self.options
        self.ngrams = EvaluationNgrams.of(options.items)
        self.arguments: dict[str, Any] = {
            "sources": [source.identity() for source in self.sources],
            **{
                name: getattr(reading, name)
                for name in ("field", "lang_field", "lang", "on_bad", "line_limit")
            },
            "filters": list(options.filters),
            "similarity": options.similarity,
            "languages": list(options.languages),
            "evaluation": self.ngrams.digest,
            "batch_bytes": options.batch_bytes,
            "rules": [VERSION, version("rensa"), version("py3langid")],
        }

    def open(self) -> None:
        """Resume the curation in `out`, or start one."""
        out = self.out
        if out.exists() and not out.is_dir():
            raise UsageError(f"--out {out}: is a file. Give a directory.")
        if (out / STATE).is_file():
            state = self._read_state()
            difference = describe_difference(state["arguments"], self.arguments)
            if not difference and self.options.reading.resume:
                self.written, self.complete = state["written"], state["complete"]
                self.bad_input = state["bad_input"]
                return
            if difference and self.options.reading.resume:
                raise UsageError(
                    f"--out {out}: was curated with other arguments ({difference}). Give another --out, or --no-resume "
                    "to replace it."
                )
            self._delete()
        elif out.is_dir() and any(out.iterdir()):
            raise UsageError(f"--out {out}: is not empty and holds no curated data. Give another directory.")
        try:
            for folder in ("kept", "removed", WORK):
                (out / folder).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UsageError(f"--out {out}: cannot be created ({error.strerror}).") from error
        self._save()

    def _read_state(self) -> dict[str, Any]:
        path = self.out / STATE
        try:
            state = read_json_object(path)
            names = {"arguments": dict, "written": dict, "bad_input": dict, "complete": bool}
            if not all(isinstance(state.get(name), kind) for name, kind in names.items()):
                raise ValueError("a key is missing")
        except ValueError as error:
            raise RunError(
                f"{path}: is damaged ({error}). Give another --out, or delete this folder."
            ) from None
        return state

    def _delete(self) -> None:
        """Delete the files of an earlier curation in `out`, recorded or not, and no others."""
        patterns = [STATE, REPORT, PAGE, UNREADABLE, f"{WORK}/part-*.npz*"]
        patterns += ["kept/kept-*.zst", "removed/removed-*.zst"]
        for path in [path for pattern in patterns for path in self.out.glob(pattern)]:
            path.unlink()

    def _save(self) -> None:
        state = {
            "arguments": self.arguments,
            "bad_input": self.bad_input,
            "complete": self.complete,
            "written": self.written,
        }
        write_atomically(self.out / STATE, json.dumps(state, ensure_ascii=False) + "\n")

    def is_complete(self) -> bool:
        """Return True if the curation is finished and every file has its checksum."""
        self.complete = self.complete and all(map(self._is_intact, self.written.values()))
        return self.complete

    def _is_intact(self, entry: Mapping[str, Any]) -> bool:
        files = entry["files"].items()
        return all(
            (self.out / name).is_file() and fingerprint(self.out / name) == tuple(expected)
            for name, expected in files
        )

    def run(self) -> dict[str, Any]:
        (self.out / WORK).mkdir(exist_ok=True)
        workers = self.options.reading.workers or cpu_cores()
        arguments = (self.options.filters, self.options.languages, self.ngrams)
        pool: AbstractContextManager[WorkerPool | None] = contextlib.nullcontext()
        if workers > 1:
            pool = WorkerPool(workers, worker.start_worker, arguments)
        else:
            worker.start_worker(*arguments)
        with pool as opened:
            parts = self._analyse_all(opened)
            verdicts = self._resolve(parts)
            self._write_all(opened, verdicts, parts)
        self.complete = True
        self._save()
        report = self.report()
        shutil.rmtree(self.out / WORK)  # a killed process may have left temporary files in it
        return report

    def _batches(self, log: BadInputLog) -> Iterator[DocumentBatch]:
        """Yield the documents in batches. The same text is always cut into the same batches."""
        batch, digest = DocumentBatch(0, 0), xxhash.xxh3_128()
        for document in documents_of(self.sources, log, self.options.reading):
            batch.texts.append(document.data)
            batch.sources.append(document.source)
            batch.languages.append(document.lang)
            origin = document.origin.encode("utf-8", "replace").decode("utf-8")
            batch.origins.append(origin)
            batch.text_bytes += len(document.data)
            digest.update(f"\n{document.source}\n{document.lang}\n{origin}\n".encode())
            digest.update(document.data)
            if batch.text_bytes >= self.options.batch_bytes:
                batch.key = digest.hexdigest()
                yield batch
                batch, digest = (
                    DocumentBatch(batch.number + 1, batch.first + len(batch.texts)),
                    xxhash.xxh3_128(),
                )
        if batch.texts:
            batch.key = digest.hexdigest()
            yield batch

    def _analyse_all(self, pool: WorkerPool | None) -> list[Path]:
        """Save the findings of each batch, and return the files."""
        log = _UnreadableLog(self.options.reading.on_bad)
        parts, keys = [], xxhash.xxh3_128()
        try:
            with (
                (self.out / UNREADABLE).open("wb") as log.file,
                _Calls(pool) as calls,
                ProgressBar("analyse", None, "MB", quiet=self.options.reading.quiet) as bar,
            ):
                for batch in self._batches(log):
                    part = self.out / WORK / f"part-{batch.number:05d}.npz"
                    parts.append(part)
                    keys.update(batch.key.encode())
                    bar.advance(batch.text_bytes / 1e6)
                    if not _has_key(part, batch.key):
                        save = _Saver(part, batch.key)
                        calls.submit(save, worker.analyse, batch.texts, batch.languages)
        except OSError as error:
            raise write_error(self.out / UNREADABLE, error) from error
        self.bad_input, self.all_text = log.as_dict(), keys.hexdigest()
        if not parts:
            raise UsageError(f"the sources hold no document {log.why_nothing_is_usable('they are empty')}.")
        return parts

    def _resolve(self, parts: Sequence[Path]) -> NDArray[np.int64]:
        """Return for each document -1 if it is unique, else the index of the kept one; -2 if a filter removed it."""
        hashes, minima, words, passed = [], [], [], []
        for part in parts:
            with np.load(part, allow_pickle=False) as arrays:
                hashes.append(arrays["hash"])
                minima.append(arrays["minima"])
                words.append(arrays["words"])
                passed.append(np.array([verdict is None for _, verdict in _verdicts(arrays)], np.bool_))
        all_hashes, keep = np.concatenate(hashes), np.concatenate(passed)
        remaining = np.flatnonzero(keep)
        _, first, group = np.unique(
            np.ascontiguousarray(all_hashes[remaining]).view("V16").ravel(),
            return_index=True,
            return_inverse=True,
        )
        original = np.arange(len(keep))
        original[remaining] = remaining[first[group]]
        result = np.where(original < np.arange(len(keep)), original, -1)
        if self.options.similarity is not None:
            present = keep & (result < 0) & np.concatenate(words)
            near = duplicates_of(np.concatenate(minima), present, self.options.similarity)
            result = np.where(result >= 0, result, near)
            # The first of several equal documents may itself be a near-duplicate of another, which is the one kept.
            copies = np.flatnonzero(original < np.arange(len(keep)))
            result[copies] = np.where(near[original[copies]] >= 0, near[original[copies]], original[copies])
        # A copy of a near-duplicate has not the text of the document that is kept.
        self.is_exact = (result >= 0) & (result == original)
        return np.where(keep, result, -2)

    def _write_all(self, pool: WorkerPool | None, kept_of: NDArray[np.int64], parts: Sequence[Path]) -> None:
        for number, entry in list(self.written.items()):
            if not entry["key"].endswith(self.all_text):  # of other text: a duplicate may now be unique
                for name in entry["files"]:
                    (self.out / name).unlink(missing_ok=True)
                del self.written[number]
        cited = set(np.unique(kept_of[kept_of >= 0]).tolist())
        origins: dict[int, str] = {}
        total = 0
        with (
            _Calls(pool) as calls,
            ProgressBar("write", None, "MB", quiet=self.options.reading.quiet) as bar,
        ):
            for batch in self._batches(BadInputLog()):
                if batch.number >= len(parts) or not _has_key(parts[batch.number], batch.key):
                    raise _sources_changed(self.out)
                batch.key += self.all_text
                numbers = range(batch.first, batch.first + len(batch.texts))
                origins |= {i: batch.origins[i - batch.first] for i in numbers if i in cited}
                total += 1
                bar.advance(batch.text_bytes / 1e6)
                done = self.written.get(str(batch.number))
                if done is not None and done["key"] == batch.key and self._is_intact(done):
                    continue
                verdicts = self._final(batch, kept_of, parts[batch.number], origins)
                calls.submit(_Recorder(self, batch.number), worker.write, self.out, batch, verdicts)
        if total != len(parts):
            raise _sources_changed(self.out)
        self.written = dict(sorted(self.written.items(), key=lambda item: int(item[0])))

    def _final(
        self, batch: DocumentBatch, kept_of: NDArray[np.int64], part: Path, origins: Mapping[int, str]
    ) -> list[DocumentVerdict | None]:
        """Return the verdicts of a batch, and set the identified languages of its documents without one."""
        with np.load(part, allow_pickle=False) as arrays:
            found = _verdicts(arrays)
        result: list[DocumentVerdict | None] = []
        for i, (language, verdict) in enumerate(found):
            batch.languages[i] = batch.languages[i] or language
            other = int(kept_of[batch.first + i])
            if verdict is not None:
                result.append(DocumentVerdict(verdict[0], verdict[1]))
            elif other >= 0:
                reason = worker.EXACT if self.is_exact[batch.first + i] else worker.NEAR
                result.append(DocumentVerdict(reason, f"of {origins[other]}", origins[other]))
            else:
                result.append(None)
        return result

    def report(self) -> dict[str, Any]:
        """Write the report as JSON and as a page, and return it."""
        ignored = [name for source in self.sources for name in source.ignored]
        report = build_report(self.written.values(), self.bad_input, ignored, self.ngrams.too_short)
        write_atomically(self.out / REPORT, strict_json.dumps(report, indent=1) + "\n")
        write_atomically(self.out / PAGE, markdown(report))
        return report


@dataclass
class _Saver:
    """Saves the findings of a batch."""

    path: Path
    key: str

    def __call__(self, findings: worker.Findings) -> None:
        pairs = [[a, b] for a, b in zip(findings.language, findings.verdict, strict=True)]
        arrays: dict[str, Any] = {
            "key": np.frombuffer(self.key.encode(), np.uint8),
            "hash": findings.hash,
            "minima": findings.minima,
            "words": findings.words,
            "verdicts": np.frombuffer(json.dumps(pairs).encode(), np.uint8),
        }
        write_atomically(self.path, lambda file: np.savez(file, **arrays))


@dataclass
class _Recorder:
    """Records a written batch in curate.json."""

    curation: _Curation
    number: int

    def __call__(self, entry: dict[str, Any]) -> None:
        self.curation.written[str(self.number)] = entry
        self.curation._save()


class _Calls:
    """Context manager of calls in worker processes, or here without a pool, each with a function for its result."""

    def __init__(self, pool: WorkerPool | None) -> None:
        self.pool = pool
        self.running: list[tuple[Task[Any], Callable[[Any], None]]] = []

    def submit(self, then: Callable[[Any], None], function: Callable[..., Any], *arguments: Any) -> None:
        if self.pool is None:
            then(function(*arguments))
            return
        self.running.append((self.pool.submit(function, *arguments), then))
        self._collect()

    def _collect(self) -> None:
        for entry in [entry for entry in self.running if entry[0].done]:
            self.running.remove(entry)
            entry[1](entry[0].result())

    def __enter__(self) -> _Calls:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        while kind is None and self.running and self.pool is not None:
            self.pool.receive()
            self._collect()


def _verdicts(arrays: Mapping[str, NDArray[Any]]) -> list[tuple[str, tuple[str, str] | None]]:
    """Return the (identified language, verdict of the filters) of each document of a part."""
    pairs: list[tuple[str, tuple[str, str] | None]] = json_value(arrays["verdicts"].tobytes())
    return pairs


def _has_key(part: Path, key: str) -> bool:
    """Return True if the findings of a batch are saved. A damaged file counts as missing."""
    import zipfile

    if not part.is_file():
        return False
    try:
        with np.load(part, allow_pickle=False) as arrays:
            return all(name in arrays for name in ("hash", "minima", "words", "verdicts")) and (
                bytes(arrays["key"]) == key.encode()
            )
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile):
        return False


def _sources_changed(out: Path) -> UsageError:
    return UsageError(
        f"--out {out}: the sources have changed. Run again with --no-resume, or give another --out."
    )
