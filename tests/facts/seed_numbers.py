"""Numbers of the documents that the project started from, line by line, and what each line was mapped to.

`seed_numbers.csv` has one row per line with a number: the document, the line, the numbers as written, the ids of the
claims that they make (facts/claims.toml), and for numbers that claim nothing the reason, one of `REASONS`. `python -m
tests.facts.seed_numbers DIRECTORY` prints the lines of the documents that the table lacks.
"""

import csv
import re
import sys
from dataclasses import dataclass
from pathlib import Path

TABLE = Path(__file__).with_suffix(".csv")
DOCUMENTS = {
    "verdict": "000_48f8b30187d8d43c.txt",
    "guide": "001_acf8399c9a079d5d.txt",
    "fp8": "002_4eb74b1733e4e8a8.txt",
    "pipeline": "003_9e7f65da9cfdec0c.txt",
    "budget": "004_087337de1d84d2cb.txt",
}
REASONS = {
    "code": "a constant, an index or a command in a listing",
    "configuration": "a setting of a run or a model: advice or a condition, with no effect stated",
    "date": "a date",
    "heading": "the number of a heading, a list item, a phase or a milestone, or how many items a list has",
    "version": "the version of a program, a driver or an architecture",
    "log": "a line of a training log, whose summary is a claim of its own",
    "opinion": "a confidence, a rating or a slogan, with nothing that could be measured",
    "effort": "how much the authors did",
    "plan": "a plan for work to come, or a question about it",
    "setup": "what the document's own runs used: a condition of its claims",
    "requirement": "a need of the program described, with no effect stated",
    "name": "the name of a card, or of how many of them",
}
# Digits after a letter or an underscore belong to a name (FP8, H100, d26), and so do those after a hyphen (GPT-2) and
# after RTX. Letters directly after a number are its unit (16K, 2x, 24GB). After a space, only the usual units count.
_UNIT = "tokens?(?:/sec(?:ond)?)?|GB|TB/s|hours?|minutes?|days?|seconds?|steps?|params|parameters|Billion"
_NUMBER = re.compile(
    r"(?<!\w)(?<!\d\.)(?<![A-Za-z]-)(?<!RTX )(?:(?<!-)[<>~$+-])?(?:(?<=~)\$)?"
    r"\d[\d,]*(?:\.\d+)*(?:e-?\d+)?"
    rf"(?:%|\u00d7|\u00b0C|[KMBk]?\+? tok/s|[kKM]?\+? ?tokens?/sec(?:ond)?|[A-Za-z]\w*\+?|\+| (?:{_UNIT})\b)?"
)


@dataclass(frozen=True)
class Row:
    """One line of a document with its numbers, the claims they make, and why the others make none."""

    document: str
    line: int
    numbers: tuple[str, ...]
    claims: tuple[str, ...]
    reason: str


def numbers(line: str) -> tuple[str, ...]:
    """Return the numbers of a line, each with its unit as written."""
    return tuple(" ".join(found.group().split()).rstrip(",") for found in _NUMBER.finditer(line))


def numbered_lines(text: str) -> dict[int, tuple[str, ...]]:
    """Return the numbers of every line that has any, by line number."""
    found = {at: numbers(line) for at, line in enumerate(text.splitlines(), start=1)}
    return {at: those for at, those in found.items() if those}


def rows() -> list[Row]:
    """Return the committed table."""
    with TABLE.open(encoding="utf-8", newline="") as file:
        return [
            Row(
                row["document"],
                int(row["line"]),
                tuple(row["numbers"].split("; ")),
                tuple(row["claims"].split()),
                row["reason"],
            )
            for row in csv.DictReader(file)
        ]


def unmapped(directory: Path) -> list[str]:
    """Return the differences between the documents' numbered lines and the table, as 'document:line: numbers'."""
    table = {(row.document, row.line): row.numbers for row in rows()}
    found = {
        (name, at): those
        for name, file in DOCUMENTS.items()
        for at, those in numbered_lines((directory / file).read_text("utf-8")).items()
    }
    places = sorted(table.keys() | found.keys())
    return [
        f"{name}:{at}: {'; '.join(found.get((name, at), ()))} (table: {'; '.join(table.get((name, at), ()))})"
        for name, at in places
        if found.get((name, at)) != table.get((name, at))
    ]


if __name__ == "__main__":
    print("\n".join(unmapped(Path(sys.argv[1]))))
