"""The rows of the table of runs and studies."""

import csv
import fcntl
import io
import json
import os
from dataclasses import replace
from pathlib import Path

import pytest

from deskside.dashboard import file_cache, notes, run_details, run_table
from deskside.dashboard.run_table import RUN, SEARCH, STUDY, TRIAL, RowFilter, TableRow
from deskside.dashboard.searches import Search
from deskside.dashboard.sidebar import Context
from deskside.facts.power_and_prices import electricity_prices
from tests.dashboard import made_up


def rows(root: Path) -> dict[str, TableRow]:
    return {row.name: row for row in file_cache.rows(file_cache.scan_result(str(root)), root)}


def test_a_finished_run_has_the_numbers_of_its_summary(tmp_path: Path) -> None:
    made_up.run(tmp_path / "runs/a", seed=2)
    row = rows(tmp_path)["runs/a"]
    assert (row.kind, row.status, row.progress, row.title) == (RUN, "finished", None, "a")
    assert (row.tokens_per_second, row.mfu, row.seconds) == (131072.0, 0.42, 30.0)
    # The lowest of the three evaluations and of that at the end.
    assert (row.bpb, row.last_bpb) == (made_up.row(60)["val_bpb"], pytest.approx(1.12))
    assert row.losses[-1] == made_up.row(60)["loss"]
    assert 30 <= len(row.losses) <= run_table.SPARKLINE_POINTS


def test_a_running_run_has_its_newest_numbers(tmp_path: Path) -> None:
    with made_up.running(tmp_path / "runs/now", steps=40):
        row = rows(tmp_path)["runs/now"]
    assert (row.status, row.progress, row.bpb, row.seconds) == (
        "running",
        0.2,
        made_up.row(40)["val_bpb"],
        20.0,
    )


def test_the_best_of_a_run_that_overfits_is_not_its_last(tmp_path: Path) -> None:
    made_up.run(tmp_path / "over")
    rising = [{**made_up.row(step), "val_bpb": abs(step - 17) / 10 + 1.5} for step in range(1, 41)]
    lines = [json.dumps(row) for row in rising]
    (tmp_path / "over/metrics.jsonl").write_text("\n".join(lines))
    (tmp_path / "over/summary.json").unlink()
    row = rows(tmp_path)["over"]
    assert (row.bpb, row.last_bpb) == (1.5, 3.8)
    assert run_details.last_bpb_note(row) and not run_details.last_bpb_note(replace(row, last_bpb=1.5))
    (tmp_path / "over/summary.json").write_text(json.dumps({"status": "finished", "val_bpb": 1.4}))
    row = rows(tmp_path)["over"]
    assert (row.bpb, row.last_bpb) == (1.4, 1.4) and not run_details.last_bpb_note(row)


@pytest.mark.parametrize(
    ("result", "words"),
    [
        ({"val_accuracy": 0.25, "val_margin": 0.1, "val_loss": 0.4}, "25.0 % of held-out pairs"),
        ({"val_reward": 0.5}, "mean reward 0.500"),
        ({"val_margin": 0.1, "val_kl": 0.2, "val_loss": 0.4}, "held-out margin 0.100"),  # KTO
        ({"val_kl": 0.2, "val_loss": 0.4}, "held-out loss 0.4000"),  # KTO with held-out answers of one kind
        ({"val_bpb": 1.1, "val_loss": 0.4}, ""),  # in its own column
    ],
)
def test_a_run_without_bits_per_byte_has_the_result_of_its_objective(
    result: dict[str, float], words: str, tmp_path: Path
) -> None:
    made_up.run(tmp_path / "a")
    (tmp_path / "a/summary.json").write_text(json.dumps({"status": "finished", **result}))
    first, *_ = rows(tmp_path)["a"].details.split(" · ")
    assert first == words or (not words and "held-out" not in first)


def test_a_cpu_has_no_utilization(tmp_path: Path) -> None:
    made_up.run(tmp_path / "a", mfu=1.05)
    assert rows(tmp_path)["a"].mfu == 1.05
    (tmp_path / "a/environment.json").write_text(json.dumps({"device": "cpu", "cpu": "a CPU"}))
    assert rows(tmp_path)["a"].mfu is None


def test_broken_runs_have_rows_too(tmp_path: Path) -> None:
    made_up.broken(tmp_path)
    found = rows(tmp_path)
    assert (
        found["runs/half"].status == "interrupted"
        and found["runs/garbage"].details == "a card that was made up"
    )


def test_a_study_has_the_numbers_of_its_best_arm(tmp_path: Path) -> None:
    whole = made_up.study(tmp_path / "studies/made")
    row = rows(tmp_path)["studies/made"]
    means = {arm.id: arm.estimates["val_bpb"].mean for arm in whole.arms}
    best = whole.arm(min(means, key=means.__getitem__))
    assert best is not None and row.kind == STUDY and row.bpb == min(means.values())
    assert row.tokens_per_second == best.estimates["tokens_per_second"].mean


def test_a_search_has_one_row_with_its_best_so_far(tmp_path: Path) -> None:
    whole = made_up.search(tmp_path / "searches/done")
    made_up.search(tmp_path / "searches/now", complete=False)
    found = rows(tmp_path)
    assert found.keys() == {"searches/done", "searches/now"}  # not the studies that they contain
    done, now = found["searches/done"], found["searches/now"]
    assert (done.kind, done.status, done.progress, done.bpb) == (SEARCH, "finished", None, whole.winner_mean)
    assert (now.status, now.progress, now.bpb) == ("running", 0.5, 1.44) and now.losses == (1.52, 1.47, 1.44)
    for name in ("spent.json", "result.json"):  # killed an hour ago
        path = tmp_path / "searches/now" / name
        if path.exists():
            os.utime(path, (1_700_000_000, 1_700_000_000))
    assert rows(tmp_path)["searches/now"].status == "interrupted"
    with (tmp_path / "searches/now/confirm/.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # held like by a search
        assert rows(tmp_path)["searches/now"].status == "running"


def damaged(folder: Path, text: str | None) -> None:
    """Write this text, or a directory, in place of the search's result.json."""
    path = folder / "result.json"
    path.unlink()
    if text is None:
        path.mkdir()
    else:
        path.write_text(text)


@pytest.mark.parametrize(
    "old, new",
    [
        ("{", None),
        ("{", ""),
        ('"hours": 1.0', '"hours": NaN'),
        ('"hours": 1.0', '"hours": 1e308'),
        ('"spent_seconds": 1800.0', '"spent_seconds": Infinity'),
        ('"optim.lr": 0.16', '"optim.lr": 1e308'),
        ('"trials": [', '"trials": [null,'),
    ],
)
def test_a_damaged_search_is_listed_with_the_reason(tmp_path: Path, old: str, new: str | None) -> None:
    made_up.search(tmp_path / "s")
    text = (tmp_path / "s/result.json").read_text()
    assert old in text
    damaged(tmp_path / "s", None if new is None else text.replace(old, new, 1))
    scan = file_cache.scan_result(str(tmp_path))
    told = notes.problem_rows(Context(tmp_path, scan, None))
    assert [row["directory"] for row in told] == ["s"] and rows(tmp_path) == {}
    assert "damaged" in told[0]["why"] or "cannot be read" in told[0]["why"]


@pytest.mark.parametrize("seconds, hours, share", [(-5.0, 1.0, 0.0), (9e3, 1.0, 1.0), (1.0, 0.0, 1.0)])
def test_the_share_of_a_search_is_between_0_and_1(
    tmp_path: Path, seconds: float, hours: float, share: float
) -> None:
    outcome = replace(made_up.search(tmp_path / "s", complete=False), hours=hours, spent_seconds=seconds)
    assert Search(tmp_path / "s", outcome, "", spent_seconds=seconds).share_spent == share


def test_a_trial_is_named_without_its_study(tmp_path: Path) -> None:
    made_up.study(tmp_path / "studies/made")
    made_up.run(tmp_path / "studies/made/runs/arm-s1")
    row = rows(tmp_path)["studies/made/runs/arm-s1"]
    assert (row.kind, row.title, run_table.study_of(row.name)) == (TRIAL, "arm-s1", "studies/made")


def test_cost_is_the_power_at_the_wall_times_the_price(tmp_path: Path) -> None:
    from deskside.facts.power_and_prices import host_watts, supply_efficiency

    hours, cards = 2.0, 3
    watts = (cards * 300.0 + host_watts().expected) / supply_efficiency().expected
    expected = watts / 1000 * hours * electricity_prices()[0].usd
    assert run_table.electricity(300.0, hours * 3600, cards) == pytest.approx(expected)
    made_up.run(tmp_path / "a")
    path = tmp_path / "a/metrics.jsonl"
    without = [{**json.loads(line), "watts": None} for line in path.read_text().splitlines()]
    path.write_text("".join(json.dumps(row) + "\n" for row in without))
    assert rows(tmp_path)["a"].dollars is None


@pytest.mark.parametrize(
    ("row_filter", "expected"),
    [
        (RowFilter(), {"runs/fp8-one", "study"}),
        (RowFilter(search="FP8 one"), {"runs/fp8-one"}),
        (RowFilter(search="rtx 4090"), {"runs/fp8-one"}),
        (RowFilter(kinds=frozenset((TRIAL,))), {"study/runs/t"}),
        (RowFilter(statuses=frozenset(("running",))), {"study"}),
        (RowFilter(search="4090 rtx"), set()),
    ],
)
def test_filters(row_filter: RowFilter, expected: set[str]) -> None:
    made = [
        TableRow("runs/fp8-one", RUN, "bf16 · RTX 4090", "finished"),
        TableRow("study", STUDY, "2 arms", "running"),
        TableRow("study/runs/t", TRIAL, "fp8", "finished"),
    ]
    assert {row.name for row in made if row_filter.passes(row)} == expected


def test_csv_has_all_digits_and_empty_cells_for_unknown_numbers() -> None:
    made = [TableRow('a, "b"', RUN, "", "finished", bpb=1.0 / 3), TableRow("c", RUN, "", "finished")]
    first, second = csv.DictReader(io.StringIO(run_table.to_csv(made)))
    assert first["name"] == 'a, "b"' and float(first["bpb"]) == 1.0 / 3 and second["bpb"] == ""


@pytest.mark.parametrize("length", [0, 1, 5, 33, 1000])
def test_a_sparkline_is_short_and_ends_with_the_newest_loss(length: int) -> None:
    losses = [float(length - i) for i in range(length)]
    line = run_table.sparkline(losses)
    assert len(line) == min(length - int(length * run_table.SPARKLINE_SKIPPED), run_table.SPARKLINE_POINTS)
    assert line == tuple(sorted(line, reverse=True)) and (not losses or line[-1] == 1.0)
