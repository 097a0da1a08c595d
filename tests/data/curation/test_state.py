"""curate.json with a value of a wrong kind anywhere: the error is one line that names the file."""

from __future__ import annotations

from pathlib import Path

from deskside.data.curation.curate import curate
from deskside.data.curation.state import STATE
from tests.data.curation.test_curate import QUIET, settings_of, write_lines
from tests.data.test_damage import check


def test_any_damage_of_the_state_is_one_line(tmp_path: Path) -> None:
    records = [{"text": "the same words twice"}, {"text": "the same words twice"}, {"body": 1}]
    source, options = write_lines(tmp_path / "a.jsonl", records), settings_of(reading=QUIET)
    curate([source], tmp_path / "out", options)
    assert check(tmp_path / "out" / STATE, lambda: curate([source], tmp_path / "out", options)) > 300
