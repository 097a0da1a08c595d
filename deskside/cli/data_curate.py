"""`deskside data curate`: remove duplicates, bad text and text of the evaluation tasks before `data prepare`."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from deskside.cli.options import option
from deskside.cli.output import print_json
from deskside.cli.shared_options import JsonOption
from deskside.utils.console import say, say_interrupted
from deskside.utils.errors import UsageError
from deskside.utils.format import plural
from deskside.utils.signals import signal_number

if TYPE_CHECKING:
    from deskside.data.corpus.analyze import CorpusOptions


@dataclass(kw_only=True)
class CurateOptions(JsonOption):
    """Remove duplicates, bad text and text of the evaluation tasks.

    Kept documents are in --out/kept, for deskside data prepare. Removed ones are in --out/removed with the reason, and
    --out/report.md has numbers and samples. An interrupted command continues when it is run again.

    Sources: as for deskside data prepare.

    Example: deskside data curate corpus/*.jsonl.gz --tasks-dir eval --out data/curated
    """

    sources: tuple[str, ...] = option("files, directories or datasets", metavar="SOURCE...", positional=True)
    out: str = option("directory of the curated text", metavar="DIR")
    similarity: float = option(
        "share of common word 5-grams from which a document is a near-duplicate of an earlier one; 0 keeps "
        "near-duplicates",
        0.7,
    )
    filters: str = option(
        "quality filters: gopher-repetition (text that repeats itself), gopher-quality (also removes documents of "
        "fewer than 50 words), gopher (both), fineweb (also removes poems and lists), c4 (also removes text with curly "
        "brackets), or none",
        "gopher-repetition",
        metavar="NAME,...",
    )
    languages: str | None = option(
        "keep only documents in these languages, such as en,hi; default: all", None, metavar="CODE,..."
    )
    tasks_dir: str | None = option(
        "remove documents with text of the evaluation tasks in this directory; hf: those of the Hugging Face Hub",
        None,
        metavar="DIR|hf:",
    )
    tasks: str = option("evaluation tasks for --tasks-dir", "all", metavar="NAME,...")
    against: tuple[str, ...] = option(
        "sources of other text that must not occur in the training text, such as validation text",
        (),
        metavar="SOURCE",
    )
    field: str = option("JSON field or parquet column of the text", "text")
    lang_field: str = option("JSON field or parquet column of a document's language", "lang")
    lang: str | None = option(
        "language of documents without one, in sources without LANG=; default: it is identified",
        None,
        metavar="CODE",
    )
    workers: int | None = option("processes; default: one per core", None)
    on_bad: Literal["skip", "refuse"] = option(
        "bad input (not UTF-8, damaged, or without the field): skip and list it, or stop", "skip"
    )
    max_line_mb: float = option(
        "maximum decompressed size of a line, parquet cell or row; a larger one is bad input, and a larger text file "
        "is split into documents",
        256,
        metavar="MB",
    )
    resume: bool = option("replace what --out holds instead of continuing", True)  # the option is --no-resume


def run(options: CurateOptions, line_limit: int) -> int:
    """Run `deskside data curate` and return the exit code. Raises as `curate.curate`."""
    from deskside.data.corpus.analyze import CorpusOptions
    from deskside.data.curation.curate import CurationOptions, curate

    reading = CorpusOptions(
        field=options.field,
        lang_field=options.lang_field,
        lang=options.lang or "",
        on_bad=options.on_bad,
        line_limit=line_limit,
        workers=options.workers,
        resume=options.resume,
    )
    curation = CurationOptions(
        reading=reading,
        filters=() if options.filters == "none" else tuple(options.filters.split(",")),
        similarity=options.similarity or None,
        languages=tuple(options.languages.split(",")) if options.languages else (),
        items=_unwanted_texts(options, reading),
    )
    try:
        report = curate(options.sources, options.out, curation)
    except KeyboardInterrupt as error:
        say_interrupted("interrupted; run the same command again to continue")
        return 128 + signal_number(error)
    if options.json:
        print_json({"out": options.out, **report})
    else:
        _print(options.out, report)
    return 0


def _unwanted_texts(options: CurateOptions, reading: CorpusOptions) -> dict[str, list[str]]:
    """Return the texts to look for, by name of the evaluation task or by source."""
    texts: dict[str, list[str]] = {}
    if options.tasks_dir is not None:
        from deskside.evaluate.item_texts import item_texts

        texts |= item_texts(options.tasks.split(","), options.tasks_dir)
    elif options.tasks != "all":
        raise UsageError(
            f"--tasks {options.tasks}: give --tasks-dir DIR, the directory of the tasks' files, too."
        )
    from deskside.data.corpus.analyze import documents_of, labelled_source
    from deskside.data.corpus.bad_input import BadInputLog

    for spec in options.against:
        log = BadInputLog(options.on_bad)
        texts[spec] = [document.text for document in documents_of([labelled_source(spec)], log, reading)]
        for reason, entry in log.as_dict().items():
            say(f"--against {spec}: {entry['count']:,} x {reason} not looked for, first {entry['first'][0]}")
        if not texts[spec]:
            raise UsageError(
                f"--against {spec}: holds no document {log.why_nothing_is_usable('it is empty')}."
            )
    return texts


def _print(out: str, report: dict[str, Any]) -> None:
    from deskside.cli.answer import print_answer
    from deskside.data.curation.worker import KEPT
    from deskside.utils.printer import Printer

    printer, documents, sizes = Printer(), report["documents"], report["text_bytes"]
    removed = sorted((reason for reason in documents if reason != KEPT), key=lambda name: -sizes[name])
    rows = [[name, f"{documents[name]:,}", f"{sizes[name] / 1e6:,.1f}"] for name in (KEPT, *removed)]
    printer.table(["", "documents", "MB of text"], rows, "lrr")
    for reason, entry in report["bad_input"].items():
        line = f"not read: {entry['count']:,} x {reason}, for example {', '.join(entry['first'])}"
        printer.text(line, "attention", hanging=2)
    if ignored := report["ignored_files"]:
        line = f"not read: {plural(ignored['count'], 'file')} of other types, for example {', '.join(ignored['first'])}"
        printer.text(line, "attention", hanging=2)
    if short := report["evaluation_items_too_short"]:
        line = f"not looked for: {sum(short.values()):,} evaluation items with fewer than 8 words"
        printer.text(line, hanging=2)
    folder = Path(out)
    kept, total = documents[KEPT], sum(documents.values())
    files = {"removed": folder / "removed", "report": folder / "report.md"}
    if not kept:
        answer = f"Nothing is left: all of {plural(total, 'document')} removed; the table says why."
        print_answer(printer, answer, files)
        return
    print_answer(
        printer,
        f"{plural(kept, 'document')} kept, {total - kept:,} removed.",
        {"text": folder / "kept", **files},
        f"data prepare {shlex.quote(str(folder / 'kept'))} --out {shlex.quote(str(folder))}-prepared",
    )
