"""The commands that continue runs, by the files of the run."""

import json
from pathlib import Path
from typing import Any

import pytest

from deskside.run.continuing import check_unfinished, name_in_use, resume_command, weights_command
from deskside.utils.errors import UsageError

OBJECTIVES = [(None, "train"), ("sft", "sft"), ("dpo", "dpo"), ("kto", "kto"), ("grpo", "grpo")]


def write(path: Path, **files: Any) -> None:
    for name, content in files.items():
        (path / f"{name}.json").write_text(content if isinstance(content, str) else json.dumps(content))


def run_json(objective: str | None) -> dict[str, Any]:
    return {"config": {"align": None if objective is None else {"name": objective}}}


@pytest.mark.parametrize(("objective", "command"), OBJECTIVES)
def test_only_an_unfinished_run_is_continued(objective: str | None, command: str, tmp_path: Path) -> None:
    assert resume_command(tmp_path) is None
    write(tmp_path, run=run_json(objective))
    assert resume_command(tmp_path) == f"deskside {command} --resume {tmp_path}"
    assert f"deskside {command} --resume" in str(name_in_use(tmp_path))
    check_unfinished(tmp_path)
    write(tmp_path, summary={})
    assert resume_command(tmp_path) is None and "--resume" not in str(name_in_use(tmp_path))
    with pytest.raises(UsageError, match=f"deskside {command} "):
        check_unfinished(tmp_path)
    assert ("--init" in weights_command(tmp_path)) == (objective is None)


def test_a_pipeline_is_continued_until_its_report(tmp_path: Path) -> None:
    write(tmp_path, run=run_json(None), go={"phase": "train"})
    assert resume_command(tmp_path) == f"deskside go --resume {tmp_path}"
    write(tmp_path, summary={}, go={"phase": "report"})
    assert resume_command(tmp_path) == f"deskside go --resume {tmp_path}"
    write(tmp_path, go={"phase": "done"})
    assert resume_command(tmp_path) is None


@pytest.mark.parametrize("damage", ["", "{", "[]", '{"config": 3}'])
def test_a_damaged_run_has_a_command_too(damage: str, tmp_path: Path) -> None:
    write(tmp_path, run=damage)
    assert resume_command(tmp_path) == f"deskside train --resume {tmp_path}"
    write(tmp_path, go=damage)
    assert resume_command(tmp_path) == f"deskside go --resume {tmp_path}"
