"""Preparation of text as token shards: `deskside data prepare`.

1. Read all sources once (`analyze`): count, find the tags, choose the validation split, sample text for the
tokenizer.

2. Train the tokenizer on the sample, or copy the given one.

3. Read again, in the same order, and group the documents into shards of about `shard_bytes` of text. Worker processes
tokenize and write them, with the library that `encoder` has chosen.

4. Measure the baselines on the validation text (gzip, unigrams) and write the index.

prepare.json is rewritten after every shard, and a shard is a pure function of the arguments and the text. So repeating
the same command keeps complete shards, makes the others, and repairs a shard whose checksum fails. Without `resume`,
a data set in `out` is replaced by one that is made in a folder beside it, once that is complete.
"""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from deskside.data import tokenizer as bpe
from deskside.data.corpus.analyze import (
    Analysis,
    CorpusOptions,
    Splitter,
    add_tag,
    analyze,
    documents_of,
    labelled_source,
    read_validation_texts,
)
from deskside.data.corpus.bad_input import BadInputLog
from deskside.data.corpus.baselines import (
    TRAIN_COUNTS,
    GzipMeter,
    read_train_counts,
    token_counts,
    unigram_bits,
    write_train_counts,
)
from deskside.data.corpus.encoder_sample import EncoderSample
from deskside.data.corpus.prepare_report import Report
from deskside.data.corpus.prepare_state import (
    PrepareState,
    check_owned,
    describe_difference,
    open_state,
    write_state,
)
from deskside.data.corpus.process_pool import Calls, WorkerDied, WorkerPool
from deskside.data.corpus.shard_worker import ShardBatcher, ShardJob, make_shard, start_worker
from deskside.data.corpus.source_files import FileRecord, first_change, record_files, sources_changed
from deskside.data.corpus.sources import Source
from deskside.data.corpus.tokenizer_sample import check_temperature, plan_sample
from deskside.data.encoder import EncoderInfo, choose_encoder, still_valid
from deskside.data.reading import shards
from deskside.data.reading.index import (
    SCHEMA_VERSION,
    DatasetIndex,
    ShardInfo,
    SplitInfo,
    TokenizerInfo,
    dtype_for,
    read_index,
    write_index,
)
from deskside.data.reading.index_file import INDEX
from deskside.data.reading.tags import TagInfo
from deskside.data.reading.verify import shard_problem, verify
from deskside.utils.child_process import cpu_cores
from deskside.utils.console import say
from deskside.utils.errors import RunError, UsageError
from deskside.utils.files import (
    clear_temporary,
    create_folder,
    delete_files,
    fingerprint,
    locked_folder,
    replace_folder,
    write_error,
)
from deskside.utils.progress import ProgressBar

if TYPE_CHECKING:
    from tokenizers import Tokenizer

VALIDATION = 2  # version of the rules that choose the validation split
_FAST_WORKERS = 3  # by default: reading takes 1/170 s a megabyte, and a worker with fastokens 1/100 s
DEFAULTS = CorpusOptions()


def prepare(sources: Sequence[str], out: str | Path, options: CorpusOptions = DEFAULTS) -> Report:
    """Prepare a data set in the directory `out`; see the module's docstring.

    Raises UsageError if the arguments are wrong, input is refused, there is nothing to read, or `out` contains other
    files; RunError if the tokenizer is damaged, the disk is full, or a worker process died.
    """
    fraction, workers = options.val_fraction, options.workers
    if not sources:
        raise UsageError(
            "no source given. Name a file, a directory, hf:owner/name or bundled:tiny_shakespeare.txt."
        )
    if fraction is not None and not 0 <= fraction < 1:
        raise UsageError(f"--val-fraction {fraction}: give a number from 0 up to, but not including, 1.")
    if fraction is not None and options.val_sources:
        raise UsageError("--val-fraction: has no effect with --val; remove one of them.")
    check_temperature(options)
    if workers is not None and workers < 1:
        raise UsageError(f"--workers {workers}: give a number of at least 1.")
    train_list, val_list = ([labelled_source(s) for s in names] for names in (sources, options.val_sources))
    arguments: dict[str, Any] = {
        "sources": [s.identity() for s in train_list],
        "val_sources": [s.identity() for s in val_list],
        "field": options.field,
        "val_fraction": options.val_fraction,
        "on_bad": options.on_bad,
        "seed": options.seed,
        "shard_bytes": options.shard_bytes,
        "max_line_bytes": options.line_limit,
        "validation": VALIDATION,
    }
    # Only if they are not the defaults, so that preparations from before these options can be resumed.
    arguments |= {
        name: value
        for name in ("lang_field", "lang", "tokenizer_temperature")
        if (value := getattr(options, name)) != getattr(DEFAULTS, name)
    }
    if options.tokenizer is None:
        arguments |= {"vocab_size": options.vocab_size, "sample_bytes": options.sample_bytes}
        bpe.check_size(options.vocab_size)
    else:
        tokenizer, _ = bpe.load_for_data(options.tokenizer)  # raises before the corpus is read
        arguments["tokenizer"] = xxhash.xxh3_128_hexdigest(tokenizer.to_str().encode("utf-8"))
    out = Path(out)
    with contextlib.ExitStack() as locks:
        if out.is_dir():  # two processes would delete each other's temporary files
            locks.enter_context(locked_folder(out))
        return _prepare(out, arguments, train_list, val_list, options, locks)


def _prepare(
    out: Path,
    arguments: dict[str, Any],
    train_list: list[Source],
    val_list: list[Source],
    options: CorpusOptions,
    locks: contextlib.ExitStack,
) -> Report:
    """Prepare a data set from checked arguments. locks: that of `out` if it exists; that of a new folder is added."""
    start = time.monotonic()
    old = open_state(out)
    replaced = old if old is not None and old.scan is not None and not options.resume else None
    if replaced:
        check_owned(out, replaced)
        clear_temporary(out)
    target = out.resolve()  # replace the target of a symbolic link
    new = target.with_name(f".{target.name}.new")
    preparation = _Preparation(new if replaced else out, arguments, train_list, val_list, options)
    if not preparation.out.exists():
        preparation.created_folder = True
        create_folder(preparation.out)
    if replaced or preparation.created_folder:
        locks.enter_context(locked_folder(preparation.out))
    preparation.open(discard=replaced is not None)
    try:
        index = preparation.intact_index()
        if index is None:
            preparation.first_pass()
            preparation.second_pass()
            index = preparation.finish()
    except UsageError:
        preparation.undo()
        raise
    finally:
        clear_temporary(preparation.out)
    if replaced:
        try:
            replace_folder(target, new, replaced.written_files)
        except OSError as error:
            raise RunError(
                f"--out {out}: cannot be replaced ({error.strerror}). The new data is in {new}."
            ) from error
    return Report.of(out, index, preparation.made, preparation.kept, time.monotonic() - start)


@dataclass
class _Preparation:
    """A preparation in progress.

    files, analysis, finished: as `files`, `scan` and `shards` of `PrepareState`. is_text_known: `files` are those of
    the text that was read before. shard_names: of each split, in order. made, kept: number of shards.
    """

    out: Path
    arguments: dict[str, Any]
    sources: list[Source]
    val_sources: list[Source]
    options: CorpusOptions
    files: list[FileRecord] = dataclasses.field(default_factory=list)
    is_text_known: bool = True
    analysis: Analysis | None = None
    finished: dict[str, ShardInfo] = dataclasses.field(default_factory=dict)
    shard_names: dict[str, list[str]] = dataclasses.field(default_factory=lambda: {"val": [], "train": []})
    made: int = 0
    kept: int = 0
    duplicates: int = 0
    gzip_bits: int = 0
    encoder: EncoderInfo | None = None
    started_here: bool = False  # not resumed
    created_folder: bool = False

    def open(self, *, discard: bool) -> None:
        """Resume the preparation in `out`, or start one. With `discard`, one with other arguments is replaced."""
        state = open_state(self.out)
        if state is not None and state.scan is not None:
            difference = describe_difference(state.arguments, self.arguments)
            if difference and not discard:
                raise UsageError(
                    f"--out {self.out}: was prepared with other arguments ({difference}). "
                    "Give another --out, or --no-resume to replace it."
                )
            self.files = self._record_files(state.files or ())
            changed = first_change(state.files, self.files) if state.files is not None else ""
            if changed and not discard:
                raise sources_changed(self.out, changed)
            if not difference and not changed:
                clear_temporary(self.out)
                self.analysis, self.finished = state.scan, dict(state.shards)
                self.is_text_known = state.files is not None
                if self.is_text_known and self.files != state.files:
                    self._save_times()
                return
            check_owned(self.out, state)
            delete_files(self.out, state.written_files)
        self.started_here = True
        clear_temporary(self.out)
        self.files = self._record_files(self.files or (state.files if state and state.files else ()))
        self.save()

    def _record_files(self, known: Sequence[FileRecord] = ()) -> list[FileRecord]:
        return record_files([*self.sources, *self.val_sources], known, quiet=self.options.quiet)

    def _save_times(self) -> None:
        """Save the times of unchanged files. A read-only folder is no error: the next call only takes longer."""
        with contextlib.suppress(RunError):
            self.save()

    def save(self) -> None:
        write_state(self.out, self.state)

    @property
    def state(self) -> PrepareState:
        return PrepareState(
            arguments=self.arguments,
            files=self.files,
            scan=self.analysis,
            shards=dict(sorted(self.finished.items())),
        )

    def undo(self) -> None:
        """Delete the files of a preparation that this call started, so that they do not block the next attempt."""
        if self.started_here:
            delete_files(self.out, self.state.written_files)
            if self.created_folder:
                clear_temporary(self.out)
                with contextlib.suppress(OSError):
                    self.out.rmdir()

    def intact_index(self) -> DatasetIndex | None:
        """Return the index if the data set is complete and every checksum matches.

        Otherwise return None, and delete the index of a damaged data set, which is then repaired. Raises RunError if
        the index or the tokenizer is damaged, which cannot be repaired, and UsageError if the text has changed.
        """
        if not (self.out / INDEX).is_file():
            return None
        damaged = verify(self.out).damaged
        if "tokenizer.json" in damaged:
            raise RunError(
                f"{self.out}: tokenizer.json is damaged, so the tokens cannot be decoded. Use --no-resume to make "
                "the data again."
            )
        index = read_index(self.out)
        try:
            read_train_counts(self.out, index)
        except RunError:
            damaged[TRAIN_COUNTS] = "is damaged"
        if not damaged:
            if not self.is_text_known:
                self._compare_text()
            self.kept = sum(len(split.shards) for split in index.splits.values())
            return index
        (self.out / INDEX).unlink()
        return None

    def _compare_text(self) -> None:
        """Compare the text with a finished preparation that has no file records. Raises UsageError if it differs."""
        assert self.analysis is not None
        total = self.analysis.text_bytes + self.analysis.val_text_bytes
        keys = {}
        with ProgressBar("compare", total / 1e6, "MB", quiet=self.options.quiet) as bar:
            for job in self._jobs():
                keys[job.name] = job.key
                bar.advance(job.text_bytes / 1e6)
        if keys != {name: info.key for name, info in self.finished.items()}:
            raise sources_changed(self.out)
        self._save_times()

    def first_pass(self) -> None:
        """Analyze the sources and make the tokenizer. The analysis is saved only after the tokenizer is written."""
        if self.analysis is not None and (self.out / "tokenizer.json").is_file():
            return
        options, existing = self.options, self.options.tokenizer
        sample = plan_sample(self.sources, options) if existing is None else None
        encoder_sample = EncoderSample()
        sampler_of = sample.sampler_of if sample else None
        analysis = analyze(self.sources, self.val_sources, options, sampler_of, encoder_sample)
        try:
            if existing is not None:
                bpe.copy(existing, self.out)
            if sample is not None:
                if not options.quiet and (languages := sample.describe_languages()):
                    say(f"sample of the tokenizer: {languages}")
                with ProgressBar("train tokenizer", None, "MB", quiet=options.quiet) as bar:
                    texts = _counted(sample.texts(analysis.holdout), bar)
                    bpe.save(bpe.train(texts, options.vocab_size), self.out)
        except OSError as error:
            raise write_error(self.out / "tokenizer.json", error) from error
        analysis.encoder = choose_encoder(self.tokenizer[0], encoder_sample.texts())
        self.analysis = analysis
        self.finished = {}
        self.save()

    @cached_property
    def tokenizer(self) -> tuple[Tokenizer, NDArray[np.uint32], TokenizerInfo]:
        """The tokenizer that the first pass has written, the bytes of its tokens, and its entry in the index."""
        tokenizer = bpe.load(self.out)
        token_bytes = bpe.token_bytes(tokenizer)
        eos, eos_id = bpe.end_of_text(tokenizer, self.out)
        checksum = fingerprint(self.out / "tokenizer.json")[1]
        info = TokenizerInfo(checksum=checksum, vocab_size=len(token_bytes), eos=eos, eos_id=eos_id)
        return tokenizer, token_bytes, info

    def second_pass(self) -> None:
        """Make every missing or damaged shard in worker processes."""
        assert self.analysis is not None
        shard_bytes, (_, token_bytes, tokenizer) = self.options.shard_bytes, self.tokenizer
        self.encoder = still_valid(self.analysis.encoder)
        if not self.options.quiet:
            say(f"encode with {self.encoder.describe()}")
        most = _FAST_WORKERS if self.encoder.library == "fastokens" else cpu_cores()
        workers = self.options.workers or min(cpu_cores(), most)
        dtype = dtype_for(tokenizer.vocab_size)
        worker_arguments = (self.out, tokenizer.eos_id, dtype, token_bytes, self.encoder)
        total = self.analysis.text_bytes + self.analysis.val_text_bytes
        optional_pool: AbstractContextManager[WorkerPool | None] = contextlib.nullcontext()
        if workers > 1 and total > 2 * shard_bytes:
            optional_pool = WorkerPool(workers, start_worker, worker_arguments)
        is_worker = False  # this process, for long documents, or for all without a pool
        try:
            with (
                optional_pool as pool,
                ProgressBar("tokenize", total / 1e6, "MB", quiet=self.options.quiet) as bar,
                Calls(pool) as calls,
            ):
                for job in self._jobs():
                    self.shard_names[job.split].append(job.name)
                    if self._is_finished(job):
                        self.kept += 1
                        bar.advance(job.text_bytes / 1e6)
                    elif pool is None or job.text_bytes > 2 * shard_bytes:
                        # Tokenize a long document here, because a worker and the pipe would each need a copy of it.
                        if not is_worker:
                            start_worker(*worker_arguments)
                            is_worker = True
                        self._record(job, bar, make_shard(job))
                        job.texts.clear()
                    else:
                        calls.submit(partial(self._record, job, bar), make_shard, job)
        except WorkerDied as error:
            raise RunError(
                "a tokenizing process was killed, most likely for lack of memory. Run the same command again with "
                "fewer --workers; it keeps the finished shards."
            ) from error

    def _jobs(self) -> Iterator[ShardJob]:
        """Yield the shards of both splits. The same text is always cut into the same shards."""
        assert self.analysis is not None
        log = BadInputLog()  # only an argument: bad input was counted in the first pass
        held_out, _ = read_validation_texts(self.val_sources, log, self.options)
        splitter = Splitter(self.analysis.holdout, held_out)
        tags = {pair: i for i, pair in enumerate(self.analysis.tags)}
        gzip = GzipMeter()
        batchers = {split: ShardBatcher(split, self.options.shard_bytes) for split in ("val", "train")}
        for document in documents_of(self.val_sources, log, self.options):
            gzip.add(document.data)
            yield from batchers["val"].add(document.data, add_tag(tags, document.source, document.lang))
        for document in documents_of(self.sources, log, self.options):
            tag = add_tag(tags, document.source, document.lang)
            for split, text in zip(("train", "val"), splitter.divide(document.data), strict=True):
                if text and split == "val":
                    gzip.add(text)
                if text:
                    yield from batchers[split].add(text, tag)
        for batcher in batchers.values():
            yield from batcher.flush()
        if list(tags) != self.analysis.tags:
            raise sources_changed(self.out)
        self.duplicates = splitter.duplicates
        self.gzip_bits = gzip.bits()

    def _is_finished(self, job: ShardJob) -> bool:
        """Return True if the shard's files are intact. Raises UsageError if its text has changed."""
        info = self.finished.get(job.name)
        if info is None:
            return False
        if info.key != job.key:
            raise sources_changed(self.out)
        return shard_problem(self.out, info, checksums=True) == ""

    def _record(self, job: ShardJob, bar: ProgressBar, info: ShardInfo) -> None:
        """Save a finished shard in prepare.json, and give its files their final names."""
        self.finished[job.name] = info
        self.made += 1
        self.save()  # before the files get their final names, so that prepare.json lists all such files
        shards.publish(self.out, info)
        bar.advance(job.text_bytes / 1e6)

    def finish(self) -> DatasetIndex:
        """Measure the baselines and write the index."""
        assert self.analysis is not None
        if not self.shard_names["train"]:
            raise UsageError(
                "no document is left to train on: all are validation text. Give more text, or a lower --val-fraction."
            )
        now = self._record_files(self.files)
        if name := first_change(self.files, now):  # between two reads of the text
            raise sources_changed(self.out, name)
        if now != self.files:
            self.files = now
            self.save()
        tokenizer = self.tokenizer[2]
        vocab_size, eos_id = tokenizer.vocab_size, tokenizer.eos_id
        dtype = dtype_for(vocab_size)
        splits = {
            split: SplitInfo.of([self.finished[name] for name in names])
            for split, names in self.shard_names.items()
            if names
        }
        if "val" in splits:
            val = splits["val"]
            counts = {s: token_counts(self.out, split, dtype, vocab_size) for s, split in splits.items()}
            write_train_counts(self.out, counts["train"])
            splits["val"] = val.model_copy(
                update={
                    "gzip_bpb": self.gzip_bits / val.text_bytes,
                    "unigram_bpb": unigram_bits(counts["train"], counts["val"], eos_id) / val.text_bytes,
                }
            )
        index = DatasetIndex(
            schema_version=SCHEMA_VERSION,
            dtype=dtype,
            tokenizer=tokenizer,
            tags=[TagInfo(source=source, lang=lang) for source, lang in self.analysis.tags],
            splits=splits,
            bad_input=self.analysis.bad_input,
            ignored_files=self.analysis.ignored_files,
            duplicates_of_validation=self.duplicates,
            arguments=self.arguments,
            encoder=self.encoder,
        )
        write_index(self.out, index)
        verify(self.out)
        return index


def _counted(texts: Iterable[str], bar: ProgressBar) -> Iterator[str]:
    """Yield the texts, and advance the bar by their megabytes."""
    for text in texts:
        bar.advance(len(text.encode()) / 1e6)
        yield text
