"""Lines of the progress of a study or search."""

from pathlib import Path

import pytest

from deskside.config import merge
from deskside.study.execute.study_progress import RemainingTime, StudyDisplay
from deskside.study.spec.expand import PlannedArm


@pytest.mark.parametrize(("trials", "count"), [(4, "[1/4 done]"), (None, "[1 done]")])
def test_the_count_is_out_of_the_ordered_trials(
    trials: int | None, count: str, capsys: pytest.CaptureFixture[str]
) -> None:
    display = StudyDisplay(trials, 1, RemainingTime({}, 1))
    arm = PlannedArm("trial-1", "optim.lr 0.02", "search", {}, "trial-0", merge.build([]), "")
    display.name_of = lambda arm, _: arm.id
    display.started(arm, 1, "cpu", Path("run"), resumed=False)
    display._say_progress()
    start, line = capsys.readouterr().err.splitlines()
    assert start.startswith(f"{count} trial-1: ") and start.endswith(arm.label)
    assert line.startswith(f"{count} trial-1: ") and arm.label not in line
