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
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import xxhash

from deskside.data.corpus.analyze import CorpusOptions, documents_of, labelled_source
from deskside.data.corpus.bad_input import BadInputLog, OnBad
from deskside.data.corpus.prepare_state import describe_difference
from deskside.data.corpus.process_pool import Calls, WorkerDied, WorkerPool
from deskside.data.corpus.source_files import FileRecord, first_change, record_files, sources_changed
from deskside.data.corpus.sources import Source
from deskside.data.curation import saved_findings, worker
from deskside.data.curation.contamination import EvaluationNgrams
from deskside.data.curation.duplicates import Duplicates
from deskside.data.curation.language import is_language_code
from deskside.data.curation.quality import DEFAULT_FILTERS, FILTERS
from deskside.data.curation.report import REPORT, build_report, markdown
from deskside.data.curation.state import STATE, CurationState, WrittenBatch, read_state, write_state
from deskside.data.curation.worker import DocumentBatch, DocumentVerdict
from deskside.utils import strict_json
from deskside.utils.child_process import cpu_cores
from deskside.utils.errors import RunError, UsageError
from deskside.utils.files import (
    clear_temporary,
    create_folder,
    fingerprint,
    locked_folder,
    write_atomically,
    write_error,
)
from deskside.utils.progress import ProgressBar

WORK, UNREADABLE, PAGE = "work", "removed/unreadable.jsonl", "report.md"
VERSION = 4  # of the rules
DEFAULT_SIMILARITY = 0.7


@dataclass(frozen=True, kw_only=True)
class CurationOptions:
    """Options of `curate`.

    reading: how documents are read, and `workers`, `resume` and `quiet`. filters: of quality.FILTERS. similarity: the
    similarity from which documents count as near-duplicates; None keeps them. languages: those to keep; () for all.
    items: texts of evaluation items by name of the task. batch_bytes: text per batch.
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
    for code in options.languages:
        if not is_language_code(code):
            raise UsageError(f"--languages {code}: unknown language. Give codes of ISO 639, such as en,hi.")
    if not sources:
        raise UsageError("no source given. Name a file, a directory or hf:owner/name.")
    curation = _Curation([labelled_source(spec) for spec in sources], Path(out), options)
    if not curation.out.exists():
        create_folder(curation.out)
    try:
        # Two processes would delete each other's temporary files.
        with locked_folder(curation.out) if curation.out.is_dir() else contextlib.nullcontext():
            curation.open()
            return curation.report() if curation.is_complete() else curation.run()
    except WorkerDied as error:
        raise RunError(
            "a process that curates was killed, most likely for lack of memory. Run the same command again with "
            "fewer --workers; it continues."
        ) from error


class _UnreadableLog(BadInputLog):
    """Context manager that also writes every place to a file, because a report only has the first few.

    Raises RunError if the file cannot be written.
    """

    def __init__(self, on_bad: OnBad, path: Path) -> None:
        super().__init__(on_bad)
        self.path = path

    def add(self, reason: str, origin: str, detail: str = "") -> None:
        super().add(reason, origin, detail)
        line = json.dumps({"id": origin, "reason": reason, "detail": detail}) + "\n"
        with self._naming_the_file():
            self.file.write(line.encode())

    def __enter__(self) -> _UnreadableLog:
        with self._naming_the_file():
            self.file: BinaryIO = self.path.open("wb")
        return self

    def __exit__(self, *_: object) -> None:
        with self._naming_the_file():
            self.file.close()

    @contextlib.contextmanager
    def _naming_the_file(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise write_error(self.path, error) from error


@dataclass
class _Curation:
    """A curation in progress.

    files, written, bad_input, complete: as in `CurationState`. all_text: checksum of all batches.
    """

    sources: list[Source]
    out: Path
    options: CurationOptions
    files: list[FileRecord] = field(default_factory=list)
    written: dict[int, WrittenBatch] = field(default_factory=dict)
    bad_input: dict[str, Any] = field(default_factory=dict)
    complete: bool = False
    all_text: str = ""

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
        state = read_state(out)
        if state is None and out.is_dir() and any(out.iterdir()):
            raise UsageError(f"--out {out}: is not empty and holds no curated data. Give another directory.")
        if state is not None and self.options.reading.resume:
            self._resume(state)
            return
        if state is not None:
            self._delete()
        self._make_folders()
        self.files = self._record_files()
        self._save()

    def _resume(self, state: CurationState) -> None:
        """Take over the progress in `state`. Raises UsageError if its arguments or its text differ."""
        if difference := describe_difference(state.arguments, self.arguments):
            raise UsageError(
                f"--out {self.out}: was curated with other arguments ({difference}). Give another --out, or "
                "--no-resume to replace it."
            )
        self._make_folders()
        self.files = self._record_files(state.files or ())
        self.written, self.complete, self.bad_input = dict(state.written), state.complete, state.bad_input
        if state.files is not None and (name := first_change(state.files, self.files)):
            raise sources_changed(self.out, name)
        if state.files is None and self.complete and not self._is_of_this_text():
            raise sources_changed(self.out, "the text or its location")
        if self.files != state.files:
            with contextlib.suppress(RunError):  # only saves time later; the folder may be read-only
                self._save()

    def _record_files(self, known: Sequence[FileRecord] = ()) -> list[FileRecord]:
        return record_files(self.sources, known, quiet=self.options.reading.quiet)

    def _is_of_this_text(self) -> bool:
        """Read all documents, and return True if they are the ones that were written."""
        with ProgressBar("compare", None, "MB", quiet=self.options.reading.quiet) as bar:
            keys = []
            for batch in self._batches(BadInputLog()):
                keys.append(batch.key)
                bar.advance(batch.text_bytes / 1e6)
        all_text = _key_of_all(keys)
        return {n: entry.key for n, entry in self.written.items()} == {
            n: key + all_text for n, key in enumerate(keys)
        }

    def _make_folders(self) -> None:
        try:
            for folder in ("kept", "removed"):
                (self.out / folder).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UsageError(f"--out {self.out}: cannot be created ({error.strerror}).") from error

    def _delete(self) -> None:
        """Delete the files of an earlier curation in `out`, recorded or not, and no others."""
        patterns = [STATE, REPORT, PAGE, UNREADABLE, f"{WORK}/part-*.npz*"]
        patterns += ["kept/kept-*.zst", "removed/removed-*.zst"]
        for path in [path for pattern in patterns for path in self.out.glob(pattern)]:
            path.unlink()
        self._clear_temporary()

    def _clear_temporary(self) -> None:
        for folder in ("", "kept", "removed", WORK):
            clear_temporary(self.out / folder)

    def _save(self) -> None:
        state = CurationState(
            arguments=self.arguments,
            files=self.files,
            bad_input=self.bad_input,
            complete=self.complete,
            written=self.written,
        )
        write_state(self.out, state)

    def is_complete(self) -> bool:
        """Return True if the curation is finished and every file has its checksum."""
        self.complete = self.complete and all(map(self._is_intact, self.written.values()))
        return self.complete

    def _is_intact(self, entry: WrittenBatch) -> bool:
        return all(
            (self.out / name).is_file() and fingerprint(self.out / name) == expected
            for name, expected in entry.files.items()
        )

    def run(self) -> dict[str, Any]:
        self._clear_temporary()
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
            self._write_all(opened, saved_findings.duplicates_in(parts, self.options.similarity), parts)
        now = self._record_files(self.files)
        if name := first_change(self.files, now):  # between two reads of the text
            raise sources_changed(self.out, name)
        self.files = now
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
        parts, keys = [], []
        with (
            _UnreadableLog(self.options.reading.on_bad, self.out / UNREADABLE) as log,
            Calls(pool) as calls,
            ProgressBar("analyze", None, "MB", quiet=self.options.reading.quiet) as bar,
        ):
            for batch in self._batches(log):
                part = self.out / WORK / f"part-{batch.number:05d}.npz"
                parts.append(part)
                keys.append(batch.key)
                bar.advance(batch.text_bytes / 1e6)
                if not saved_findings.is_saved(part, batch.key):
                    save = partial(saved_findings.save, part, batch.key)
                    calls.submit(save, worker.analyse, batch.texts, batch.languages)
        self.bad_input, self.all_text = log.as_dict(), _key_of_all(keys)
        if not parts:
            raise UsageError(f"the sources hold no document {log.why_nothing_is_usable('they are empty')}.")
        return parts

    def _write_all(self, pool: WorkerPool | None, duplicates: Duplicates, parts: Sequence[Path]) -> None:
        for number, entry in list(self.written.items()):
            if not entry.key.endswith(self.all_text):  # of other text: a duplicate may now be unique
                for name in entry.files:
                    (self.out / name).unlink(missing_ok=True)
                del self.written[number]
        cited = set(np.unique(duplicates.kept[duplicates.kept >= 0]).tolist())
        origins: dict[int, str] = {}
        total = 0
        with (
            Calls(pool) as calls,
            ProgressBar("write", None, "MB", quiet=self.options.reading.quiet) as bar,
        ):
            for batch in self._batches(BadInputLog()):
                if batch.number >= len(parts) or not saved_findings.is_saved(parts[batch.number], batch.key):
                    raise sources_changed(self.out)
                batch.key += self.all_text
                numbers = range(batch.first, batch.first + len(batch.texts))
                origins |= {i: batch.origins[i - batch.first] for i in numbers if i in cited}
                total += 1
                bar.advance(batch.text_bytes / 1e6)
                done = self.written.get(batch.number)
                if done is not None and done.key == batch.key and self._is_intact(done):
                    continue
                verdicts = self._final(batch, duplicates, parts[batch.number], origins)
                calls.submit(partial(self._record, batch.number), worker.write, self.out, batch, verdicts)
        if total != len(parts):
            raise sources_changed(self.out)
        self.written = dict(sorted(self.written.items()))

    def _record(self, number: int, entry: WrittenBatch) -> None:
        self.written[number] = entry
        self._save()

    def _final(
        self, batch: DocumentBatch, duplicates: Duplicates, part: Path, origins: Mapping[int, str]
    ) -> list[DocumentVerdict | None]:
        """Return the verdicts of a batch, and set the identified language of each document that has none."""
        result: list[DocumentVerdict | None] = []
        for i, (language, verdict) in enumerate(saved_findings.read_verdicts(part)):
            batch.languages[i] = batch.languages[i] or language
            other = int(duplicates.kept[batch.first + i])
            if verdict is not None:
                result.append(DocumentVerdict(verdict[0], verdict[1]))
            elif other >= 0:
                reason = worker.EXACT if duplicates.is_exact[batch.first + i] else worker.NEAR
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


def _key_of_all(keys: Iterable[str]) -> str:
    """Return the checksum of all text. keys: of the batches."""
    return xxhash.xxh3_128_hexdigest("".join(keys).encode())
