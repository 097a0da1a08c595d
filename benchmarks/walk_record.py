"""The record of a walk through the documentation: docs/data/DATE-walk/walk.md, with a section for each page.

A page that is walked again replaces its section, which names the day and the commit.
"""

import hashlib
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from benchmarks.docs_steps import ROOT, Step

HEAD = """# The documentation, every command in order

`python -m benchmarks.docs_walk` wrote this file, and replaces the section of each page that it walks again. Programs
and files are named by their first line, length and digest.
"""
TABLE = ("| written | run | seconds | exit code | wanted |", "|---|---|---|---|---|")
ROW = re.compile(r"(\| .* \|) ([\d.]*) ?\| (\d*) ?\| (\d*) ?\|")
# The planner writes these pages, and their commands are checked by dry runs: the options count, not their values.
VALUES_VARY = "docs/cards/"


def newest_record() -> Path:
    """Return the newest committed record."""
    return max((ROOT / "docs" / "data").glob("*-walk/walk.md"))


def row(step: Step, code: int | None = None, seconds: float | None = None) -> str:
    """Return the row of a step. What has not run, or is a file, has no exit code."""
    if code is None:
        return f"{_what(step)} | | |"
    return f"{_what(step)} {seconds or 0:.1f} | {code} | {step.exit_code} |"


def _what(step: Step) -> str:
    """Return the cells that name a step: as written, and as run."""
    written = _cell(step, step.written)
    if step.kind == "file":
        return f"| {step.name}: {written} | a file |"
    if step.run is None:
        return f"| {written} | not run: {step.reason} |"
    return f"| {written} | {'the same' if step.run == step.written else _cell(step, step.run)} |"


def _cell(step: Step, text: str) -> str:
    lines = text.strip().splitlines() or [""]
    shown = f"`{lines[0]}`".replace("|", "\\|")
    if step.kind == "command":
        return shown
    return f"{shown} ({len(lines)} lines, {hashlib.sha256(text.encode()).hexdigest()[:8]})"


def section(rows: Sequence[str], walked: str) -> str:
    """Return the section of a page. walked: the day and the commit."""
    return "\n".join([walked, "", *TABLE, *rows])


def read_record(text: str) -> dict[str, str]:
    """Return the sections of a record by page."""
    parts = re.split(r"^## (.+)\n", text, flags=re.MULTILINE)
    return {page: body.strip() for page, body in zip(parts[1::2], parts[2::2], strict=True)}


def write_record(path: Path, walked: Mapping[str, str], order: Sequence[str]) -> None:
    """Write a record, or replace the sections of these pages in it. order: all pages; others are dropped."""
    before = path.read_text("utf-8") if path.exists() else ""
    head = before.partition("\n## ")[0].strip() or HEAD.strip()
    found = {**read_record(before), **walked}
    sections = [f"## {page}\n\n{found[page]}" for page in order if page in found]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n\n".join([head, *sections]) + "\n", "utf-8")


def not_walked(page: str, todo: Sequence[Step], record: Mapping[str, str]) -> list[str]:
    """Return what a page asks to run or to write that its section lacks, or has with another exit code than wanted."""

    def key(cells: str) -> str:
        return re.sub(r"\d[\d.]*", "0", cells) if page.startswith(VALUES_VARY) else cells

    rows = [found for line in record.get(page, "").splitlines() if (found := ROW.fullmatch(line))]
    walked = {(key(found[1]), found[3]) for found in rows if found[3] == found[4]}
    failed = {key(found[1]) for found in rows if found[3] != found[4]}
    wanted = {
        step: "" if step.kind == "file" else str(step.exit_code) for step in todo if step.run is not None
    }
    return [
        step.written
        for step, code in wanted.items()
        if (key(_what(step)), code) not in walked or key(_what(step)) in failed
    ]
