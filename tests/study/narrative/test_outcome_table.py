"""The table that a study prints at its end."""

import io
from pathlib import Path

import pytest

from deskside.cli import study as study_command
from deskside.study.execute.study_folder import StudyFolder
from deskside.study.narrative.outcome_table import print_outcome
from deskside.study.results import Results
from deskside.study.stats.compare import compare
from deskside.utils.printer import Printer
from tests.study.made import results as made
from tests.study.made_languages import RISING, bits_per_byte, write
from tests.study.small import arm, study


def printed(results: Results) -> list[str]:
    out = io.StringIO()
    print_outcome(results, Printer(out, 80))
    return out.getvalue().splitlines()


def test_best_first_with_the_verdict_of_the_comparison() -> None:
    arms = [arm("base", [1.0, 1.1, 1.2]), arm("twin", [1.01, 1.09, 1.21]), arm("far", [2.0, 2.1, 2.2])]
    results = compare(study([*arms, arm("near", [0.9, 0.99, 1.08])]))
    lines = printed(results)
    rows = [next(line for line in lines if line.startswith(name)) for name in ("near", "base", "twin", "far")]
    assert [lines.index(row) for row in rows] == sorted(lines.index(row) for row in rows)
    said = ("shown: better", "baseline", "no difference shown", "shown: worse")
    assert all(words in row for words, row in zip(said, rows, strict=True))
    # The numbers are those of the comparison.
    near = next(a for a in results.arms if a.id == "near").comparisons
    found = next(c for c in near if c.metric == "val_bpb")
    assert f"{100 * found.relative:+.1f} %" in rows[0]


@pytest.mark.parametrize("seeds", [1, 3])
def test_every_arm_within_80_columns(seeds: int) -> None:
    results = compare(made(seeds=seeds))
    lines = printed(results)
    assert max(map(len, lines)) <= 80
    assert sum("baseline" in line for line in lines) >= 1
    assert ("1 seed" in " ".join(lines)) == (seeds == 1)
    assert "out of memory" in lines[-1] or "out of memory" in lines[-2]


def test_a_study_ends_with_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    results = compare(made(seeds=3))
    study_command._print_outcome(
        StudyFolder(tmp_path), results, tmp_path / "report.html", "deskside study x --resume"
    )
    out = capsys.readouterr().out
    assert "lowest validation loss" in out and "no difference shown" in out
    assert out.index("shown: worse") < out.index("results  ")


def test_it_says_what_overfits(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    results = write(tmp_path, bits_per_byte(2), RISING, mixture_epochs={"gu": 9.0})
    study_command._print_outcome(
        StudyFolder(tmp_path), results, tmp_path / "report.html", "deskside study x --resume"
    )
    out = capsys.readouterr().out
    assert (
        out.index("lowest validation loss")
        < out.index("Overfitting in \u201cdense\u201d")
        < out.index("results  ")
    )
    assert "gu 9 times" in out and "closer to 1" in " ".join(out.split())


def test_nothing_before_a_trial_has_ended() -> None:
    assert printed(compare(study([arm("base", [None])]))) == []
