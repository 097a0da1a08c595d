"""Chart data of a search, compared with plain loops."""

from dataclasses import replace
from pathlib import Path

import pytest

from deskside.report import search_chart_data
from deskside.report.write import write_report
from deskside.study.search.outcome import Outcome, write_outcome
from tests.dashboard import made_up


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Outcome]:
    folder = tmp_path_factory.mktemp("search") / "s"
    return folder, made_up.search(folder)


@pytest.mark.parametrize(("x_key", "x"), [("trial", [0, 1, 2, 5, 6]), ("time", [1, 2, 3, 6, 7])])
def test_the_best_so_far_is_the_lowest_until_each_trial(
    made: tuple[Path, Outcome], x_key: str, x: list[float]
) -> None:
    data = search_chart_data.best_so_far(made[1], x_key)
    losses = [1.52, 1.61, 1.47, 1.44, 1.45]  # a repeated trial did not run
    assert data.numbers == [0, 1, 2, 5, 6]
    assert [loss for _, loss in data.points] == losses and [at for at, _ in data.points] == pytest.approx(x)
    assert [loss for _, loss in data.best] == [min(losses[: n + 1]) for n in range(5)]


def test_times_of_a_search_are_minutes_or_hours(made: tuple[Path, Outcome]) -> None:
    data = search_chart_data.best_so_far(made[1], "time")
    assert data.x_title.endswith(", min")
    long = replace(
        made[1], trials=[replace(one, elapsed=3600.0 * (one.number + 1)) for one in made[1].trials]
    )
    data = search_chart_data.best_so_far(long, "time")
    assert data.x_title.endswith(", h") and [x for x, _ in data.points] == [1, 2, 3, 6, 7]


def test_importance_has_the_names_of_the_settings(made: tuple[Path, Outcome]) -> None:
    assert search_chart_data.importances(made[1]) == [
        ("optim.lr", 0.7),
        ("batch.tokens", 0.2),
        ("optim.normalize", 0.1),
    ]


def test_there_is_a_slice_for_each_setting(made: tuple[Path, Outcome]) -> None:
    lr, tokens, normalize = search_chart_data.slices(made[1])
    assert lr.log and not tokens.log and lr.choices == tokens.choices == ()
    assert (lr.key, lr.x) == ("optim.lr", [0.04, 0.16, 0.02, 0.012, 0.01])
    assert tokens.ticks == (8192, 16384) and lr.ticks == ()  # a few whole numbers have one tick each
    assert (normalize.choices, normalize.x) == (("false", "true"), [0, 0, 1, 0, 0])
    assert lr.losses == tokens.losses == [1.52, 1.61, 1.47, 1.44, 1.45]


def test_the_report_has_a_figure_for_each_setting_and_every_trial(made: tuple[Path, Outcome]) -> None:
    folder, outcome = made
    page = write_report(folder)
    names = {path.stem for path in (folder / "plots").iterdir()}
    assert names == {"best_so_far", "slice_optim_lr", "slice_batch_tokens", "slice_optim_normalize"}
    html, text = page.read_text(), page.with_suffix(".md").read_text()
    assert html.count("<svg") == 4 and f"deskside train {folder}/winner.toml" in text
    for trial in outcome.trials:
        assert trial.reason in html
    assert "refused by the planner" in html


def test_a_percentage_of_the_verdict_stays_on_one_line(made: tuple[Path, Outcome]) -> None:
    folder, outcome = made
    write_outcome(replace(outcome, answer="better by 29 %"), folder)
    assert "better by 29\u00a0%" in write_report(folder).read_text()
    write_outcome(outcome, folder)
