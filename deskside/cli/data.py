"""`deskside data`: curate text, and prepare, check and describe datasets.

With --json standard output holds one JSON object; everything else is printed on standard error.
"""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from deskside.cli import data_curate
from deskside.cli.options import Command, option
from deskside.cli.output import print_json
from deskside.cli.shared_options import JsonOption
from deskside.cli.subcommands import run_subcommand
from deskside.data.corpus.heldout import validation_warnings
from deskside.data.reading.index import DatasetIndex, read_index
from deskside.data.reading.verify import raise_if_damaged, verify
from deskside.utils import hub
from deskside.utils.console import say_interrupted
from deskside.utils.errors import UsageError
from deskside.utils.format import count, elapsed, plural
from deskside.utils.signals import signal_number

if TYPE_CHECKING:
    from deskside.data.corpus.prepare_report import Report
    from deskside.utils.printer import Printer

# A smaller corpus is read many times: the planner expects an RTX 4090 to read this many tokens 3 times in an hour, and
# half as many 10 times. Own-corpus mode regularizes beyond 4 times.
_SMALL_CORPUS = 100_000_000
_SHOWN_SOURCES = 10  # by `show` without --details
_SEQUENCE_LENGTHS = (512, 1024, 2048)  # for which `show` tells how full the rows are


@dataclass(kw_only=True)
class PrepareOptions(JsonOption):
    """Convert text to token shards.

    An interrupted command continues when it is run again. Damaged shards are written again.

    Sources: .txt .md .jsonl .jsonl.gz .jsonl.zst .parquet,
      a directory or a quoted glob of these,
      hf:owner/name[:config[:split]], bundled:tiny_shakespeare.txt.
      LANG=SOURCE gives the language of documents without one: hi=hindi.txt.

    Examples:
      deskside data prepare my-texts/ --out data/mine
      deskside data prepare corpus/*.jsonl.gz --val held.jsonl --out data/mine
    """

    sources: tuple[str, ...] = option("files, directories or datasets", metavar="SOURCE...", positional=True)
    out: str = option("directory of the prepared data", metavar="DIR")
    val: tuple[str, ...] = option(
        "sources of the validation split, instead of a share of the documents", (), metavar="SOURCE"
    )
    val_fraction: float | None = option(
        "probability with which a document is held out for validation; default: 500 kB over the size of the text, but "
        "at least 0.005 and at most 0.1. With few documents, the share that is held out can be far from it. Languages, "
        "sources, and files of several documents without any get one, up to a tenth of the text. Of fewer than ten "
        "documents, each one's end is held out: this share of it, default 0.1",
        None,
    )
    vocab_size: int = option(
        "maximum vocabulary size of the tokenizer that is trained; a small text gives fewer entries", 32768
    )
    tokenizer_temperature: float | None = option(
        "train the tokenizer on n^(1/temperature) of a language with n bytes of text, so that above 1 small languages "
        "get more of the vocabulary; 3.33 as mT5; default: on the text as it is",
        None,
    )
    tokenizer: str | None = option(
        "use this tokenizer.json, or that of this directory or hub model, instead of training one",
        None,
        metavar="FILE",
    )
    field: str = option("JSON field or parquet column of the text", "text")
    lang_field: str = option("JSON field or parquet column of a document's language", "lang")
    lang: str | None = option(
        "language of documents without one, in sources without LANG=, such as en", None, metavar="CODE"
    )
    workers: int | None = option(
        "tokenization processes; default: one per core, with fastokens up to three", None
    )
    on_bad: Literal["skip", "refuse"] = option(
        "bad input (not UTF-8, damaged, or without the field): skip and count it, or stop", "skip"
    )
    max_line_mb: float = option(
        "maximum decompressed size of a line, parquet cell or row; a larger one is bad input, and a larger text file "
        "is split into documents. Memory use is about five times this",
        256,
        metavar="MB",
    )
    resume: bool = option("replace what --out holds instead of continuing", True)  # the option is --no-resume
    seed: int = option("random seed of the validation split and the tokenizer's sample", 0)


@dataclass(kw_only=True)
class VerifyOptions(JsonOption):
    """Verify the checksums of a prepared dataset. The exit code is 1 if one of them differs.

    Example: deskside data verify data/mine
    """

    directory: str = option("directory of the prepared data", metavar="DIR", positional=True)


@dataclass(kw_only=True)
class ShowOptions(JsonOption):
    """Show the contents of a prepared dataset, and how full its rows are.

    Example: deskside data show data/mine
    """

    directory: str = option("directory of the prepared data", metavar="DIR", positional=True)
    details: bool = option("list all sources, not only the largest", False)


COMMANDS: dict[str, Command[Any]] = {
    "curate": Command("data curate", data_curate.CurateOptions),
    "prepare": Command("data prepare", PrepareOptions),
    "verify": Command("data verify", VerifyOptions),
    "show": Command("data show", ShowOptions),
}


def run(argv: Sequence[str]) -> int:
    """Run `deskside data` and return the exit code. Raises UsageError and RunError."""
    functions: dict[str, Callable[[Any], int]] = {
        "curate": lambda options: data_curate.run(options, _line_limit(options.max_line_mb)),
        "prepare": _prepare,
        "verify": _verify,
        "show": _show,
    }
    about = "Curate text; prepare, verify and show datasets."
    return run_subcommand(COMMANDS, functions, argv, "deskside data", about)


def _prepare(options: PrepareOptions) -> int:
    from deskside.data.corpus import analyze
    from deskside.data.corpus.prepare import prepare

    if options.tokenizer is not None and options.vocab_size != PrepareOptions.vocab_size:
        raise UsageError(
            "--vocab-size: is for training a tokenizer, but --tokenizer gives one; remove one of them."
        )
    tokenizer = None if options.tokenizer is None else hub.find(options.tokenizer, "tokenizer").folder
    try:
        corpus_options = analyze.CorpusOptions(
            field=options.field,
            lang_field=options.lang_field,
            lang=options.lang or "",
            vocab_size=options.vocab_size,
            tokenizer_temperature=options.tokenizer_temperature,
            tokenizer=tokenizer,
            val_sources=options.val,
            val_fraction=options.val_fraction,
            on_bad=options.on_bad,
            line_limit=_line_limit(options.max_line_mb),
            workers=options.workers,
            resume=options.resume,
            seed=options.seed,
        )
        report = prepare(options.sources, options.out, corpus_options)
    except KeyboardInterrupt as error:
        say_interrupted("interrupted; run the same command again to continue")
        return 128 + signal_number(error)
    if options.json:
        print_json(vars(report))
        return 0
    from deskside.cli.answer import print_answer
    from deskside.utils.printer import Printer

    printer = Printer()
    for split in sorted(report.tokens):
        size, tokens = report.text_bytes[split], report.tokens[split]
        printer.text(
            f"{split}: {plural(report.documents[split], 'document')}, {tokens:,} tokens, "
            f"{size / 1e6:,.1f} MB of text, {size / tokens:.2f} bytes per token",
            hanging=2,
        )
    if report.gzip_bpb is not None and report.unigram_bpb is not None:
        printer.text(
            f"val baselines: gzip {report.gzip_bpb:.3f}, unigrams {report.unigram_bpb:.3f} bits per byte"
        )
    _print_left_out(printer, report.bad_input, report.ignored_files, report.duplicates_of_validation)
    for warning in report.warnings:
        printer.text(f"warning: {warning}", "attention", hanging=2)
    kept = f", {report.kept} kept" if report.kept else ""
    text = f"{count(report.tokens['train'])} training tokens, vocabulary {report.vocab_size:,}: "
    text += f"{plural(report.made, 'shard')} made{kept} in {elapsed(report.seconds)}."
    if report.tokens["train"] < _SMALL_CORPUS:
        text += " A run reads so few tokens many times; --own-corpus regularizes it."
    print_answer(printer, text, {"data": Path(report.out)}, *_next_commands(report, options))
    return 0


def _next_commands(report: Report, options: PrepareOptions) -> list[str]:
    """Return what to do with the data, without the name of the program."""
    data = shlex.quote(str(report.out))
    if report.tokens["train"] >= _SMALL_CORPUS:
        return [f"plan --here --hours 24 --data.path {data}", f"go --hours 24 --data {data}"]
    commands = [f"go --hours 1 --data {data} --own-corpus"]
    # The vocabulary of a published model would make the demo model many times larger.
    if options.tokenizer is None:
        commands.insert(0, f"go --preset demo --hours 0.05 --data {data}")
    return commands


def _line_limit(megabytes: float) -> int:
    """Return the limit in bytes."""
    if not 0.001 <= megabytes <= 16_384:
        raise UsageError(f"--max-line-mb {megabytes:g}: give 0.001 to 16384")
    return int(megabytes * 1e6)


def _print_left_out(
    printer: Printer, bad_input: Mapping[str, Any], ignored: Mapping[str, Any], duplicates: int
) -> None:
    """Print the numbers of records, files and documents that were left out, with examples."""
    lines = [
        f"left out of {split}: {entry['count']:,} x {reason}, for example {', '.join(entry['first'])}"
        for split, reasons in bad_input.items()
        for reason, entry in reasons.items()
    ]
    if ignored:
        lines.append(
            f"not read: {plural(ignored['count'], 'file')} of other types, for example {', '.join(ignored['first'])}"
        )
    if duplicates:
        lines.append(f"left out of train: {plural(duplicates, 'document')} also in the validation sources")
    for line in lines:
        printer.text(line, "attention", hanging=2)


def _verify(options: VerifyOptions) -> int:
    report = verify(options.directory)
    if options.json:
        print_json({**vars(report), "ok": not report.damaged})
        return 1 if report.damaged else 0
    if report.damaged:
        for file, problem in report.damaged.items():
            print(f"{file}: {problem}", file=sys.stderr)
        raise_if_damaged(options.directory, report.damaged)
    print(f"{report.directory}: {plural(report.shards, 'shard')}, {report.gib:.2f} GiB, all checksums match")
    return 0


def _show(options: ShowOptions) -> int:
    from deskside.data.reading.rows import PackedDataset

    directory = Path(options.directory)
    index = read_index(directory)
    splits: dict[str, Any] = {}
    for name, split in index.splits.items():
        splits[name] = {
            "documents": split.documents,
            "tokens": split.tokens,
            "text_bytes": split.text_bytes,
            "bytes_per_token": split.text_bytes / split.tokens,
            "gzip_bpb": split.gzip_bpb,
            "unigram_bpb": split.unigram_bpb,
            "utilisation": {
                str(length): PackedDataset(directory, name, length).utilisation
                for length in _SEQUENCE_LENGTHS
            },
            "tags": [
                {
                    "source": index.tags[tag].source,
                    "lang": index.tags[tag].lang,
                    "documents": documents,
                    "tokens": tokens,
                }
                for tag, (documents, tokens) in split.counts_by_tag().items()
            ],
            "languages": {
                language: {
                    **vars(count),
                    "bytes_per_token": count.bytes_per_token,
                    "fertility": count.fertility,
                }
                for language, count in split.counts_by_language(index.tags).items()
            },
        }
    if options.json:
        print_json({"vocab_size": index.tokenizer.vocab_size, "splits": splits})
        return 0
    from deskside.utils.printer import Printer

    printer = Printer()
    _print_tables(printer, index, splits, options.details)
    _print_left_out(printer, index.bad_input, index.ignored_files, index.duplicates_of_validation)
    for warning in validation_warnings(index):
        printer.text(f"warning: {warning}", "attention", hanging=2)
    return 0


def _print_tables(printer: Printer, index: DatasetIndex, splits: dict[str, Any], all_sources: bool) -> None:
    def row(label: str, cell: Callable[[dict[str, Any]], str]) -> list[str]:
        return [label, *map(cell, splits.values())]

    rows = [
        row("documents", lambda split: f"{split['documents']:,}"),
        row("tokens", lambda split: f"{split['tokens']:,}"),
        row("text, MB", lambda split: f"{split['text_bytes'] / 1e6:,.1f}"),
        row("bytes per token", lambda split: f"{split['bytes_per_token']:.2f}"),
        row("gzip, bits per byte", lambda split: f"{split['gzip_bpb']:.3f}" if split["gzip_bpb"] else ""),
        row(
            "unigrams, bits per byte",
            lambda split: f"{split['unigram_bpb']:.3f}" if split["unigram_bpb"] else "",
        ),
    ]
    for length in map(str, _SEQUENCE_LENGTHS):
        filled = (f"{split['utilisation'][length]:.2%}" for split in splits.values())
        rows.append([f"rows of {length} filled", *filled])
    printer.text(f"vocabulary {index.tokenizer.vocab_size:,}, {index.dtype}", "strong")
    printer.table(["", *splits], rows, "l" + "r" * len(splits))
    tags = [
        [tag["source"], tag["lang"], f"{tag['documents']:,}", f"{tag['tokens']:,}"]
        for tag in splits["train"]["tags"]  # most tokens first
    ]
    shown = tags if all_sources else tags[:_SHOWN_SOURCES]
    printer.heading("train by source")
    printer.table(["source", "lang", "documents", "tokens"], shown, "llrr")
    if len(shown) < len(tags):
        printer.text(f"and {plural(len(tags) - len(shown), 'smaller source')}; --details lists all")
    if closing := splits["train"]["tokens"] - sum(tag["tokens"] for tag in splits["train"]["tags"]):
        printer.text(
            f"and {plural(closing, 'end-of-text token')} behind the last document of a shard, of no source"
        )
    for name, split in splits.items():
        if len(split["languages"]) > 1:
            _print_languages(printer, name, split["languages"])


def _print_languages(printer: Printer, split: str, languages: dict[str, dict[str, Any]]) -> None:
    rows = []
    for name, row in languages.items():
        size, density, fertility = (row[key] for key in ("text_bytes", "bytes_per_token", "fertility"))
        rows.append(
            [
                name,
                f"{row['documents']:,}",
                f"{row['tokens']:,}",
                "" if size is None else f"{size / 1e6:,.1f}",
                "" if density is None else f"{density:.2f}",
                "" if fertility is None else f"{fertility:.2f}",
            ]
        )
    printer.heading(f"{split} by language; fertility: tokens per word")
    headings = ["language", "documents", "tokens", "text, MB", "bytes per token", "fertility"]
    printer.table(headings, rows, "lrrrrr")
