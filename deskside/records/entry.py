"""A new entry of `facts/records.toml` from finished runs."""

import json
import shlex
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from deskside.config.duration import Duration
from deskside.facts.records import FILE, MINUTES, LossRecord, corpora, parse_corpora, parse_records
from deskside.records.score import ScoredRun, check_corpus, score_run
from deskside.run.record import RunRecord, mapping, text
from deskside.utils.errors import UsageError
from deskside.utils.files import write_atomically
from deskside.utils.parsing import Unreadable, toml_table

# Options of `deskside train` that a record does not repeat, or sets itself; each has one value.
LEFT_OUT = (
    "data.path", "seed", "name", "runs", "hours", "schedule.length", "schedule.clock", "schedule.hours",
    "checkpoint.every", "checkpoint.keep", "track",
    "track.wandb", "track.trackio", "track.tensorboard",
)  # fmt: skip


def options_of(run: RunRecord) -> tuple[str, ...]:
    """Return the options of `deskside train` that define a run. Raises UsageError if another command started it."""
    words = shlex.split(text(run.run.get("command")))
    if words[:2] != ["deskside", "train"]:
        raise UsageError(
            f"{run.path}: was not started by deskside train, so no command would repeat it: {shlex.join(words)}"
        )
    options, left = [], iter(words[2:])
    for word in left:
        name, equals, _ = word.removeprefix("--").replace("-", "_").partition("=")
        if word.startswith("--") and name == "json":
            continue
        if word.startswith("--") and name in ("gpus", "resume"):
            raise UsageError(f"{run.path}: was started with {word}; a record is one run on one card")
        if word.startswith("--") and name in LEFT_OUT:
            if not equals:
                next(left, None)
            continue
        options.append(word)
    return tuple(options)


def record_of_runs(
    runs: Sequence[RunRecord], corpus_name: str, data: str, **described: str
) -> tuple[LossRecord, list[ScoredRun]]:
    """Score finished runs that differ only in their seed, and return them as a record.

    described: the record's name, commit, date, raw and note. Raises UsageError for runs that are not one record.
    """
    if corpus_name not in corpora():
        raise UsageError(f"{corpus_name}: there is no such corpus; use one of {', '.join(corpora())}")
    corpus = corpora()[corpus_name]
    check_corpus(corpus, data)
    first, minutes = runs[0], _minutes(runs[0])
    for run in runs:
        if options_of(run) != options_of(first) or _comparable(run) != _comparable(first):
            raise UsageError(
                f"{run.path}: differs from {first.path} in more than its seed; give runs of one command"
            )
    seeds = [run.config.get("seed") for run in runs]
    if len(set(map(str, seeds))) < len(seeds):
        raise UsageError(f"two of the runs have the same seed ({', '.join(map(str, seeds))}); leave one out")
    scored = [score_run(run, corpus, data, minutes) for run in runs]
    if len({run.card for run in scored}) > 1:
        raise UsageError(
            f"the runs were trained on different cards: {', '.join(sorted({r.card for r in scored}))}"
        )
    record = LossRecord(
        card=scored[0].card,
        corpus=corpus_name,
        minutes=minutes,
        options=options_of(first),
        seeds=tuple(run.seed for run in scored),
        bits_per_byte=tuple(round(run.bits_per_byte, 5) for run in scored),
        **described,
    )
    return record, scored


def check_addable(name: str, file: Path) -> None:
    """Raise UsageError if a record of this name cannot be added to a file, before its runs are scored."""
    _, known = _with_entry(file, "")
    if any(record.name == name for record in known):
        raise UsageError(f"--name {name}: {file} has a record of this name; choose another name")


def append_record(record: LossRecord, file: Path) -> None:
    """Append a record to a file in the format of `records.toml`. Raises UsageError if the result would not be valid."""
    content, _ = _with_entry(file, as_toml(record))
    write_atomically(file, content)


def _with_entry(file: Path, entry: str) -> tuple[bytes, tuple[LossRecord, ...]]:
    """Return the content of a file of records with an entry at its end, and its records. Raises UsageError."""
    try:
        content = file.read_bytes().rstrip() + f"\n\n{entry}".encode()
        table = toml_table(content)
        parse_corpora(table)
        return content, parse_records(table)
    except OSError as error:
        raise UsageError(
            f"{file}: {error.strerror}; give the records.toml of a checkout with --file"
        ) from None
    except Unreadable as error:
        raise UsageError(f"{file}: not valid TOML: {error}") from None
    except (KeyError, TypeError, AttributeError) as error:
        raise UsageError(f"{file}: is no {FILE} ({error}); give that of a checkout with --file") from None


def as_toml(record: LossRecord) -> str:
    """Return an entry of `records.toml`."""
    lines = ["[[record]]"]
    for key, value in asdict(record).items():
        if value != "":  # a JSON string, number or list of them is also TOML
            lines.append(f"{key} = {json.dumps(value, ensure_ascii=False)}")
    return "\n".join(lines) + "\n"


def _minutes(run: RunRecord) -> int:
    """Return the length of a run in minutes. Raises UsageError if it is not one that records have."""
    length = text(mapping(run.config.get("schedule")).get("length"))
    seconds = Duration.parse(length) if length else None
    for minutes in MINUTES:
        if seconds is not None and seconds.unit == "seconds" and seconds.value == minutes * 60:
            return minutes
    limits = " or ".join(f"{minutes}m" for minutes in MINUTES)
    raise UsageError(f"{run.path}: has a length of {length or 'its preset'}; a record's is {limits}")


def _comparable(run: RunRecord) -> dict[str, Any]:
    """Return the configuration of a run without what may differ between the runs of a record."""
    config = {key: value for key, value in run.config.items() if key not in ("seed", "track", "checkpoint")}
    return {**config, "data": {**mapping(config.get("data")), "path": None}}
