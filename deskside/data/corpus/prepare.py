"""Preparation of text as token shards: `deskside data prepare`.

1. Read everything once (`analyze`): count, find the tags, choose the validation split, sample text for the
tokenizer.

2. Train the tokenizer on the sample, or copy the given one.

3. Read again, in the same order, and cut the documents into shards of about `shard_bytes` of text. Worker processes
tokenize and write them. Reading is some twenty times faster than tokenizing, so one reader feeds many workers.

4. Measure the baselines on the validation text (gzip, unigrams) and write the index.

prepare.json is rewritten after every shard, and a shard is a pure function of the arguments and the text. So the
same command again keeps complete shards, makes the others, and repairs a shard whose checksum fails. Without
`resume` the data set is made in a folder beside `out`, which replaces it when it is complete.
"""

from __future__ import annotations

import contextlib
import dataclasses
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import xxhash

from deskside.data import tokenizer as bpe
from deskside.data.corpus.analyze import (
    Analysis,
    CorpusOptions,
    Splitter,
    TextSampler,
    analyze,
    documents_of,
    note_tag,
    validation_texts,
)
from deskside.data.corpus.baselines import GzipMeter, token_counts, unigram_bits, write_train_counts
from deskside.data.corpus.heldout import validation_warnings
from deskside.data.corpus.prepare_state import PrepareState, check_owned, difference, open_state, write_state
from deskside.data.corpus.process_pool import Task, WorkerDied, WorkerPool
from deskside.data.corpus.progress_bar import ProgressBar
from deskside.data.corpus.shard_worker import ShardBatcher, ShardJob, make_shard, start_worker
from deskside.data.corpus.sources import BadInputLog, Source
from deskside.data.reading import shards
from deskside.data.reading.shards import DatasetIndex, ShardInfo, SplitInfo, TagInfo, TokenizerInfo
from deskside.utils.child_process import cpu_cores
from deskside.utils.errors import RunError, UsageError
from deskside.utils.files import delete_files, fingerprint, replace_folder, write_error

VALIDATION = 2  # version of the rules that choose the split
DEFAULTS = CorpusOptions()


@dataclass(frozen=True)
class Report:
    """The result of `prepare`. made, kept: number of shards; sizes are per split."""

    out: str
    vocab_size: int
    documents: dict[str, int]
    tokens: dict[str, int]
    text_bytes: dict[str, int]
    gzip_bpb: float | None
    unigram_bpb: float | None
    bad_input: dict[str, Any]
    ignored_files: Mapping[str, Any]
    duplicates_of_validation: int
    warnings: list[str]
    made: int
    kept: int
    seconds: float


def prepare(sources: Sequence[str], out: str | Path, options: CorpusOptions = DEFAULTS) -> Report:
    """Prepare a data set in the directory `out`; see the module's docstring.

    Raises: UsageError: wrong arguments, refused input, nothing to read, or `out` holds something else. RunError:
    the tokenizer is damaged, the disk is full, or a worker process died.
    """
    begin = time.monotonic()
    fraction, workers = options.val_fraction, options.workers
    if not sources:
        raise UsageError(
            "no source given. Name a file, a directory, hf:owner/name or bundled:tiny_shakespeare.txt."
        )
    if fraction is not None and not 0 <= fraction < 1:
        raise UsageError(f"--val-fraction {fraction}: give a number from 0 up to, but not including, 1.")
    if workers is not None and workers < 1:
        raise UsageError(f"--workers {workers}: at least 1.")
    train_list, val_list = ([Source.parse(s) for s in names] for names in (sources, options.val_sources))
    arguments: dict[str, Any] = {
        "sources": [s.identity() for s in train_list],
        "val_sources": [s.identity() for s in val_list],
        **{
            name: getattr(options, name)
            for name in ("field", "val_fraction", "on_bad", "seed", "shard_bytes")
        },
        "max_line_bytes": options.line_limit,
        "validation": VALIDATION,
    }
    if options.tokenizer is None:
        arguments |= {"vocab_size": options.vocab_size, "sample_bytes": options.sample_bytes}
        bpe.check_size(options.vocab_size)
    else:
        given, _ = bpe.load_for_data(options.tokenizer)  # before a corpus is read
        arguments["tokenizer"] = xxhash.xxh3_128_hexdigest(given.to_str().encode("utf-8"))
    out = Path(out)
    old = open_state(out)
    replaced = None if options.resume or old is None or old.scan is None else old
    if replaced:
        check_owned(out, replaced)
        shards.clear_temporary(out)
    target = out.resolve()  # replace the target of a symbolic link
    new = target.with_name(f".{target.name}.new")
    work = _Work(new if replaced else out, arguments, train_list, val_list, options)
    work.open(discard=replaced is not None)
    try:
        complete = work.complete()
        if complete is None:
            work.first_pass()
            work.second_pass(workers or cpu_cores())
            complete = work.finish()
    except UsageError:
        work.undo()
        raise
    finally:
        shards.clear_temporary(work.out)
    if replaced:
        try:
            replace_folder(target, new, replaced.own_files)
        except OSError as error:
            raise RunError(
                f"--out {out}: cannot be replaced ({error.strerror}). The new data is in {new}."
            ) from error
    return _report(out, work, complete, time.monotonic() - begin)


@dataclass
class _Work:
    """A preparation in progress: its arguments, and the state in prepare.json."""

    out: Path
    arguments: dict[str, Any]
    sources: list[Source]
    val_sources: list[Source]
    options: CorpusOptions
    found: Analysis | None = None
    done: dict[str, ShardInfo] = dataclasses.field(default_factory=dict)
    names: dict[str, list[str]] = dataclasses.field(default_factory=lambda: {"val": [], "train": []})
    made: int = 0
    kept: int = 0
    duplicates: int = 0
    gzip_bits: int = 0
    fresh: bool = False  # begun by this call
    created: bool = False  # and its folder

    def open(self, *, discard: bool) -> None:
        """Resume the preparation in `out` or start one; refuse one with other arguments, or `discard` it."""
        state = open_state(self.out)
        if state is not None and state.scan is not None:
            what = difference(state.arguments, self.arguments)
            if not what:
                shards.clear_temporary(self.out)
                self.found, self.done = state.scan, dict(state.shards)
                return
            if not discard:
                raise UsageError(
                    f"--out {self.out}: was prepared with other arguments ({what}). "
                    "Give another --out, or --no-resume to replace it."
                )
            check_owned(self.out, state)
            delete_files(self.out, state.own_files)
        self.fresh, self.created = True, not self.out.exists()
        try:
            self.out.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UsageError(f"--out {self.out}: cannot be created ({error.strerror}).") from error
        shards.clear_temporary(self.out)
        self.save()

    def save(self) -> None:
        write_state(self.out, self.state)

    @property
    def state(self) -> PrepareState:
        return PrepareState(arguments=self.arguments, scan=self.found, shards=dict(sorted(self.done.items())))

    def undo(self) -> None:
        """Delete what this call started before it failed on a usage error, so that it does not block the next one."""
        if self.fresh:
            delete_files(self.out, self.state.own_files)
            if self.created:
                shards.clear_temporary(self.out)
                with contextlib.suppress(OSError):
                    self.out.rmdir()

    def complete(self) -> DatasetIndex | None:
        """Return the index if the data set is complete and every checksum matches."""
        if not (self.out / shards.INDEX).is_file():
            return None
        damaged = shards.verify(self.out).damaged
        if "tokenizer.json" in damaged:
            raise RunError(
                f"{self.out}: tokenizer.json is damaged, so its tokens cannot be decoded. Use --no-resume."
            )
        if not damaged:
            index = shards.read_index(self.out)
            self.kept = sum(len(split.shards) for split in index.splits.values())
            return index
        (self.out / shards.INDEX).unlink()
        return None

    def first_pass(self) -> None:
        """Analyze the sources and make the tokenizer. The state gets the analysis after the tokenizer is written."""
        if self.found is not None and (self.out / "tokenizer.json").is_file():
            return
        options, given = self.options, self.options.tokenizer
        sampler = TextSampler(options.sample_bytes, options.seed)
        found = analyze(self.sources, self.val_sources, options, sampler if given is None else None)
        try:
            if given is not None:
                bpe.copy(given, self.out)
            else:
                if not options.quiet:
                    print(f"train tokenizer: on {sampler.held / 1e6:,.1f} MB", file=sys.stderr, flush=True)
                bar = not options.quiet and sys.stderr.isatty()
                bpe.save(bpe.train(sampler.texts(found.holdout), options.vocab_size, progress=bar), self.out)
        except OSError as error:
            raise write_error(self.out / "tokenizer.json", error) from error
        self.found = found
        self.done = {}
        self.save()

    def second_pass(self, workers: int) -> None:
        """Make every missing shard."""
        assert self.found is not None
        shard_bytes = self.options.shard_bytes
        tokenizer = bpe.load(self.out)
        eos_id = bpe.end_of_text(tokenizer, self.out)[1]
        lengths = bpe.token_bytes(tokenizer)
        settings = (str(self.out), eos_id, shards.dtype_for(len(lengths)))
        total = self.found.text_bytes + self.found.val_text_bytes
        small = total <= 2 * shard_bytes
        several: AbstractContextManager[WorkerPool | None] = contextlib.nullcontext()
        if workers > 1 and not small:
            several = WorkerPool(workers, start_worker, settings)
        start_worker(*settings)
        running: list[tuple[Task[ShardInfo], ShardJob]] = []
        try:
            with several as pool, ProgressBar("tokenise", total / 1e6, "MB", quiet=self.options.quiet) as bar:
                for job in self._jobs():
                    if self._is_made(job):
                        self.kept += 1
                        bar.advance(job.text_bytes / 1e6)
                    elif pool is None or job.text_bytes > 2 * shard_bytes:
                        # A long document is tokenized here: a worker and the pipe would each need its memory again.
                        self._record(job, make_shard(job), bar)
                        job.texts.clear()
                    else:
                        running.append((pool.submit(make_shard, job), job))
                        self._record_done(running, bar)
                while running and pool is not None:
                    pool.receive()
                    self._record_done(running, bar)
        except WorkerDied as error:
            raise RunError(
                "a tokenizing process was killed, most likely for memory. Run the same command again with fewer "
                "--workers; it continues with the next shard."
            ) from error

    def _jobs(self) -> Iterator[ShardJob]:
        """Yield both splits, cut into shards, always in the same way for the same text. Validation comes first."""
        assert self.found is not None
        log = BadInputLog()  # already counted by the first pass
        held_out, _ = validation_texts(self.val_sources, log, self.options)
        splitter = Splitter(self.found.holdout, held_out)
        tags = {pair: i for i, pair in enumerate(self.found.tags)}
        gzip = GzipMeter()
        batchers = {split: ShardBatcher(split, self.options.shard_bytes) for split in ("val", "train")}
        for document in documents_of(self.val_sources, log, self.options):
            gzip.add(document.data)
            yield from batchers["val"].add(document.data, note_tag(tags, document.source, document.lang))
        for document in documents_of(self.sources, log, self.options):
            tag = note_tag(tags, document.source, document.lang)
            for split, text in zip(("train", "val"), splitter.divide(document.data), strict=True):
                if text and split == "val":
                    gzip.add(text)
                if text:
                    yield from batchers[split].add(text, tag)
        for batcher in batchers.values():
            yield from batcher.flush()
        if list(tags) != self.found.tags:
            raise _changed(self.out)
        self.duplicates = splitter.duplicates
        self.gzip_bits = gzip.bits()

    def _is_made(self, job: ShardJob) -> bool:
        self.names[job.split].append(job.name)
        info = self.done.get(job.name)
        if info is None:
            return False
        if info.key != job.key:
            raise _changed(self.out)
        return shards.shard_problem(self.out, info, checksums=True) == ""

    def _record_done(self, running: list[tuple[Task[ShardInfo], ShardJob]], bar: ProgressBar) -> None:
        for entry in [entry for entry in running if entry[0].done]:
            running.remove(entry)
            self._record(entry[1], entry[0].result(), bar)

    def _record(self, job: ShardJob, info: ShardInfo, bar: ProgressBar) -> None:
        self.done[job.name] = info
        self.made += 1
        self.save()  # noted first, so that every named file is known
        shards.publish(self.out, info)
        bar.advance(job.text_bytes / 1e6)

    def finish(self) -> DatasetIndex:
        """Measure the baselines and write the index."""
        assert self.found is not None
        if not self.names["train"]:
            raise UsageError(
                "no document is left to train on: every one is validation. Give more text, or lower --val-fraction."
            )
        tokenizer = bpe.load(self.out)
        eos, eos_id = bpe.end_of_text(tokenizer, self.out)
        lengths = bpe.token_bytes(tokenizer)
        dtype = shards.dtype_for(len(lengths))
        splits = {
            split: summarize_split([self.done[name] for name in names])
            for split, names in self.names.items()
            if names
        }
        if "val" in splits:
            val = splits["val"]
            counts = {s: token_counts(self.out, split, dtype, len(lengths)) for s, split in splits.items()}
            write_train_counts(self.out, counts["train"])
            splits["val"] = val.model_copy(
                update={
                    "gzip_bpb": self.gzip_bits / val.text_bytes,
                    "unigram_bpb": unigram_bits(counts["train"], counts["val"], eos_id) / val.text_bytes,
                }
            )
        index = DatasetIndex(
            schema_version=shards.SCHEMA_VERSION,
            dtype=dtype,
            tokenizer=TokenizerInfo(
                checksum=fingerprint(self.out / "tokenizer.json")[1],
                vocab_size=len(lengths),
                eos=eos,
                eos_id=eos_id,
            ),
            tags=[TagInfo(source=source, lang=lang) for source, lang in self.found.tags],
            splits=splits,
            bad_input=self.found.bad_input,
            ignored_files=self.found.ignored_files,
            duplicates_of_validation=self.duplicates,
            arguments=self.arguments,
        )
        shards.write_index(self.out, index)
        shards.verify(self.out)
        return index


def summarize_split(infos: list[ShardInfo]) -> SplitInfo:
    """Return the split of these shards, without baselines."""
    return SplitInfo(
        tokens=sum(i.tokens for i in infos),
        documents=sum(i.documents for i in infos),
        text_bytes=sum(i.text_bytes for i in infos),
        token_text_bytes=sum(i.token_text_bytes for i in infos),
        shards=infos,
    )


def _changed(out: Path) -> UsageError:
    return UsageError(f"--out {out}: the sources changed since it was begun. Use --no-resume to begin anew.")


def _report(out: Path, work: _Work, index: DatasetIndex, seconds: float) -> Report:
    val = index.splits.get("val")
    return Report(
        out=str(out),
        vocab_size=index.tokenizer.vocab_size,
        documents={name: split.documents for name, split in index.splits.items()},
        tokens={name: split.tokens for name, split in index.splits.items()},
        text_bytes={name: split.text_bytes for name, split in index.splits.items()},
        gzip_bpb=val.gzip_bpb if val else None,
        unigram_bpb=val.unigram_bpb if val else None,
        bad_input=index.bad_input,
        ignored_files=index.ignored_files,
        duplicates_of_validation=index.duplicates_of_validation,
        warnings=validation_warnings(index),
        made=work.made,
        kept=work.kept,
        seconds=seconds,
    )
