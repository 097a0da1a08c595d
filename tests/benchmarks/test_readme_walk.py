"""The walk through the README covers every line of its code blocks."""

from pathlib import Path

import pytest

from benchmarks import readme_walk
from benchmarks.readme_walk import LEFT_OUT, SMALLER, commands
from deskside.cli.main import COMMANDS

README = (Path(__file__).resolve().parents[2] / "README.md").read_text("utf-8")


def test_every_line_of_every_code_block_is_run_or_left_out_with_a_reason() -> None:
    found = commands(README)
    lines = [line for block in README.split("```")[1::2] for line in block.splitlines() if line.strip()]
    assert len(found) == len(lines) >= 25
    assert all(c.run is not None or c.reason for c in found)
    named = {c.written.split()[1] for c in found if c.written.startswith("deskside")}
    assert named >= set(COMMANDS) - {"report"}


def test_no_entry_is_stale() -> None:
    written = [c.written for c in commands(README)]
    for start in (*SMALLER, *LEFT_OUT):
        assert any(line.startswith(start) for line in written), start


def test_what_is_unknown_or_changed_is_refused() -> None:
    with pytest.raises(ValueError, match="unknown command"):
        commands("```\npip install deskside\n```\n")
    with pytest.raises(ValueError, match="does not contain"):
        commands("```\ndeskside grpo runs/x --data y --hours 3\n```\n")


def test_inputs_are_made(tmp_path: Path) -> None:
    readme_walk.make_inputs(tmp_path)
    made = {path.name for path in tmp_path.iterdir()}
    assert made >= {"corpus", "chats.jsonl.gz", "pairs.jsonl.gz", "sums.jsonl.gz", "tasks"}
