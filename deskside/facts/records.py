"""Records: the lowest bits per byte that were measured within a time limit on one card (`records.toml`)."""

from dataclasses import dataclass, fields
from functools import cache
from typing import Any

from deskside.facts.data_files import toml_file
from deskside.facts.gpus import find
from deskside.utils.errors import UsageError

FILE = "records.toml"
MINUTES = (5, 60)  # time limits of a record


@dataclass(frozen=True)
class Corpus:
    """A text that records are measured on.

    Attributes:
        prepare: The command that makes its data set.
        fingerprint: `PackedDataset.fingerprint` of that data set.
        row_tokens: Length of the rows that are scored.
    """

    name: str
    title: str
    about: str
    prepare: str
    fingerprint: str
    row_tokens: int


@dataclass(frozen=True)
class LossRecord:
    """A measured result.

    Attributes:
        card: Name in the table of GPUs.
        minutes: Limit of the training time, without compilation, evaluation and checkpoints.
        options: Arguments of `deskside train`, without data, time limit, seed and folder.
        commit, date: Of deskside, and of the measurement.
        seeds, bits_per_byte: One value for each seed, by plain transformers on the exported model.
        raw: Folder or file in the repository with the raw data.
        note: What a reader must know in addition, or "".
    """

    name: str
    card: str
    corpus: str
    minutes: float
    options: tuple[str, ...]
    commit: str
    date: str
    seeds: tuple[int, ...]
    bits_per_byte: tuple[float, ...]
    raw: str
    note: str = ""

    @property
    def mean(self) -> float:
        """Mean bits per byte over the seeds."""
        return sum(self.bits_per_byte) / len(self.bits_per_byte)

    def arguments(self, data: str, seed: int) -> list[str]:
        """Return the arguments of `deskside train` that repeat one seed."""
        return [*self.options, *limit_arguments(self.minutes), "--data.path", data, "--seed", str(seed)]


def limit_arguments(minutes: float) -> list[str]:
    """Return the options of `deskside train` that set the time limit of a record."""
    return ["--schedule.length", f"{minutes:g}m", "--schedule.clock", "training"]


@cache
def corpora() -> dict[str, Corpus]:
    """Return the corpora by name."""
    return parse_corpora(toml_file(FILE))


@cache
def records() -> tuple[LossRecord, ...]:
    """Return all records, in the order of the file."""
    return parse_records(toml_file(FILE))


def find_record(name: str) -> LossRecord:
    """Return the record of this name. Raises UsageError if there is none."""
    for record in records():
        if record.name == name:
            return record
    known = ", ".join(record.name for record in records())
    raise UsageError(f"{name}: there is no such record; use one of {known}")


def best_records() -> tuple[LossRecord, ...]:
    """Return the record with the lowest mean for each card, corpus and time limit, in the order of the file."""
    best: dict[tuple[str, str, float], LossRecord] = {}
    for record in records():
        key = (record.corpus, record.card, record.minutes)
        if key not in best or record.mean < best[key].mean:
            best[key] = record
    return tuple(record for record in records() if record in best.values())


def parse_corpora(table: dict[str, Any]) -> dict[str, Corpus]:
    """Return the corpora in the content of `records.toml`."""
    return {name: Corpus(name=name, **values) for name, values in table["corpus"].items()}


def parse_records(table: dict[str, Any]) -> tuple[LossRecord, ...]:
    """Return the records in the content of `records.toml`. Raises UsageError for an entry that is not valid."""
    found: list[LossRecord] = []
    for entry in table.get("record", []):
        name = entry.get("name")
        missing = [
            field.name for field in fields(LossRecord) if field.name != "note" and field.name not in entry
        ]
        if missing:
            raise UsageError(f"{FILE}: record {name}: {missing[0]} is missing")
        values: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in entry.items()}
        record = LossRecord(**values)
        if any(record.name == other.name for other in found):
            raise UsageError(f"{FILE}: record {name}: there are two of this name")
        if record.corpus not in table["corpus"]:
            raise UsageError(f"{FILE}: record {name}: there is no corpus {record.corpus}")
        if find(record.card).name != record.card:
            raise UsageError(f"{FILE}: record {name}: the card's name is {find(record.card).name}")
        if record.minutes not in MINUTES:
            raise UsageError(f"{FILE}: record {name}: minutes is {' or '.join(map(str, MINUTES))}")
        if not record.seeds or len(record.seeds) != len(record.bits_per_byte):
            raise UsageError(f"{FILE}: record {name}: give one of bits_per_byte for each of seeds")
        found.append(record)
    return tuple(found)
