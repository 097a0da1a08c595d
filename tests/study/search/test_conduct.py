"""A complete search with fake trials: planner, pruning, kill -9, confirmation, preset and report."""

import os
import statistics
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
from scipy import stats

from deskside.config import merge, presets
from deskside.report.write import write_report
from deskside.study.execute.journal import FILE, replay_file
from deskside.study.execute.trial_process import TrialEnd
from deskside.study.search.outcome import Outcome, read_outcome
from deskside.study.search.proxy import Proxy
from deskside.study.search.search_folder import SearchFolder
from tests.study.fake_trials import ROOT
from tests.study.search import made_search


@pytest.fixture(scope="module", autouse=True)
def fast() -> "object":
    """Poll without waiting, because fake trials take no time."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("deskside.study.execute.runner.POLL_SECONDS", 0.0)
        patch.setattr("deskside.study.search.search_queue.READ_SECONDS", 0.0)
        patch.setattr("deskside.study.execute.results_io.write_parquet", lambda results, path: None)
        yield


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> tuple[SearchFolder, Outcome]:
    folder = tmp_path_factory.mktemp("search") / "s"
    where, _ = made_search.begin(folder)
    outcome, stopped = made_search.run(where)
    assert stopped is None and outcome.complete
    return where, outcome


def test_a_search_finds_the_known_best_and_prunes(done: tuple[SearchFolder, Outcome]) -> None:
    _, outcome = done
    assert outcome.counts().keys() <= {"finished", "pruned"} and outcome.counts()["pruned"] >= 3
    assert sum(outcome.counts().values()) == 12
    first = outcome.trials[0]
    assert first.settings == {"optim.lr": 0.04} and first.status == "finished"  # the default comes first
    losses = [trial.loss for trial in outcome.trials if trial.status == "finished"]
    assert outcome.winner != 0 and outcome.best_so_far[-1][1] == min(losses) < losses[0]
    for trial in outcome.trials:  # a pruned trial has the loss of its last report, which is not a result
        assert (trial.loss is not None) == (trial.status == "finished") and (trial.reason != "") == (
            trial.status == "pruned"
        )


def test_what_the_confirmation_trains() -> None:
    plan = made_search.plan(Path("data"))
    small = Proxy({"model": {"num_hidden_layers": 1}}, "")
    found = [replace(plan, confirm_at_target=at, proxy=proxy).confirmed_on for at, proxy in (
        (True, small), (False, small), (False, Proxy({}, "")),
    )]  # fmt: skip
    assert len(set(found)) == 3 and "proxy" in found[1] and "proxy" not in found[0] + found[2]


def test_the_winner_is_confirmed_on_fresh_seeds_with_students_interval(
    done: tuple[SearchFolder, Outcome],
) -> None:
    where, outcome = done
    configs = made_search.starts(where.path.parent)
    assert {config["seed"] for config in configs[:12]} == {1}
    fresh = configs[12:]
    assert sorted(config["seed"] for config in fresh) == [2, 2, 3, 3, 4, 4]
    winner = outcome.settings["optim.lr"]
    by_lr = {
        lr: {c["seed"]: made_search.loss(c) for c in fresh if c["optim"]["lr"] == lr} for lr in (winner, 0.04)
    }
    differences = [by_lr[winner][seed] - by_lr[0.04][seed] for seed in (2, 3, 4)]
    low, high = stats.t.interval(
        0.95, 2, statistics.mean(differences), statistics.stdev(differences) / 3**0.5 or 1e-300
    )
    assert outcome.confirmed.difference == pytest.approx(statistics.mean(differences))
    assert (outcome.confirmed.low, outcome.confirmed.high) == pytest.approx((low, high))
    assert outcome.confirmed.verdict == "lower" and outcome.winner_mean < outcome.default_mean
    assert "shown to be better" in outcome.answer and outcome.answer.count(". ") == 0


def test_the_preset_is_what_was_confirmed(done: tuple[SearchFolder, Outcome]) -> None:
    where, outcome = done
    config = merge.build(presets.layers(str(where.path / "winner.toml")))
    assert config.optim.lr == outcome.settings["optim.lr"]
    plan = where.read()
    assert config.model == plan.target().model and config.data == plan.target().data


def test_the_report_has_the_answer_and_every_trial(done: tuple[SearchFolder, Outcome]) -> None:
    where, outcome = done
    page = write_report(where.path)
    text = page.with_suffix(".md").read_text()
    assert " ".join(outcome.answer.split()) in " ".join(text.replace("\\", "").split())
    assert "<svg" in page.read_text() and (where.path / "plots" / "best_so_far.svg").exists()
    assert read_outcome(where.path) == outcome


def test_a_resume_of_a_finished_search_runs_nothing(done: tuple[SearchFolder, Outcome]) -> None:
    where, outcome = done
    before = len(made_search.starts(where.path.parent))
    again, stopped = made_search.run(where)
    assert stopped is None and len(made_search.starts(where.path.parent)) == before
    assert again.trials == outcome.trials and again.confirmed == outcome.confirmed


def test_a_default_that_cannot_run_is_not_called_a_lack_of_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    poll = made_search.MadeTrial.poll

    def oom_at_the_default(trial: made_search.MadeTrial) -> TrialEnd | None:
        return TrialEnd("oom", "no memory left", 1.0) if trial.config["optim"]["lr"] == 0.04 else poll(trial)

    monkeypatch.setattr(made_search.MadeTrial, "poll", oom_at_the_default)
    where, _ = made_search.begin(tmp_path / "s", max_trials=3)
    outcome, stopped = made_search.run(where)
    assert stopped is None and outcome.complete and outcome.confirmed is None
    assert outcome.default_mean is None and outcome.winner_mean is not None
    assert "the time was over" not in outcome.answer and "no memory left" in outcome.answer


def test_what_the_planner_refuses_never_starts(tmp_path: Path) -> None:
    where, plan = made_search.begin(tmp_path / "s", "model.depth", max_trials=3, prune=False)
    fits = made_search.check(4.0)
    while fits.excess(plan.trial({"model.depth": 5}))[0] == 0:
        fits = replace(fits, capacity=int(0.97 * fits.capacity))
    assert fits.excess(plan.trial({"model.depth": 4}))[0] == 0  # the default
    outcome, _ = made_search.run(where, gib=fits.capacity / 2**30)
    refused = [trial for trial in outcome.trials if trial.status == "infeasible"]
    started = {config["model"]["num_hidden_layers"] for config in made_search.starts(tmp_path)}
    assert refused and all(trial.reason and trial.run == "" for trial in refused)
    assert not started & {trial.settings["model.depth"] for trial in refused}
    assert all(fits.excess(plan.trial({"model.depth": depth}))[0] == 0 for depth in started)


def test_a_best_trial_at_the_edge_of_its_range_is_reported(tmp_path: Path) -> None:
    """The best rate of the range is its upper end, which is the default."""
    where, _ = made_search.begin(tmp_path / "s", "optim.lr=0.005:0.04,model.depth", max_trials=3)
    outcome, _ = made_search.run(where)
    assert outcome.winner == 0 and outcome == read_outcome(where.path)
    option = "--over optim.lr=0.0141:0.114,model.depth"
    assert "optim.lr 0.04 (the high end of 0.005 to 0.04" in outcome.edge_text and option in outcome.edge_text
    text = " ".join(write_report(where.path).with_suffix(".md").read_text().replace("\\", "").split())
    assert outcome.edge_text in text and f"deskside {outcome.further_command}" in text


def test_a_gaussian_process_finds_the_known_best_in_ten_trials(tmp_path: Path) -> None:
    where, _ = made_search.begin(tmp_path / "s", sampler="gp", max_trials=10, seeds=1)
    outcome, _ = made_search.run(where)
    assert outcome.settings["optim.lr"] == pytest.approx(made_search.BEST_LR, rel=0.2)
    assert "by a Gaussian process (Optuna)" in write_report(where.path).with_suffix(".md").read_text()


@pytest.mark.full
def test_kill_9_in_mid_trial_loses_and_repeats_nothing(tmp_path: Path) -> None:
    where, _ = made_search.begin(tmp_path / "s", max_trials=4, prune=False)
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.study.search.made_search", str(where.path), "3"],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stderr=subprocess.DEVNULL,
    )
    until = time.monotonic() + 60
    while not (tmp_path / made_search.STARTS).exists() or len(made_search.starts(tmp_path)) < 3:
        assert process.poll() is None and time.monotonic() < until
        time.sleep(0.02)
    process.kill()
    process.wait()
    seen = read_outcome(where.path)  # what the dashboard shows
    assert not seen.complete and [trial.status for trial in seen.trials] == [
        "finished",
        "finished",
        "running",
    ]
    assert seen.best_so_far and seen.confirmed is None
    outcome, stopped = made_search.run(where)
    assert stopped is None and outcome.counts() == {"finished": 4}
    rates = [config["optim"]["lr"] for config in made_search.starts(tmp_path) if config["seed"] == 1]
    assert len(rates) == 5 and rates[2] == rates[3]  # only the killed trial starts again
    assert len(set(rates)) == 4
    # The suggestions after the kill are those of a search without it.
    straight, _ = made_search.begin(tmp_path / "straight" / "s", max_trials=4, prune=False)
    assert [t.settings for t in made_search.run(straight)[0].trials] == [t.settings for t in outcome.trials]


def test_two_devices_share_the_trials(tmp_path: Path) -> None:
    where, _ = made_search.begin(tmp_path / "s", max_trials=5)
    outcome, _ = made_search.run(where, devices=2)
    assert len(made_search.starts(tmp_path)) == len(outcome.trials) + 6 and outcome.devices == 2
    used = {history.device for history in replay_file(where.path / "trials" / FILE).values()}
    assert used == {"cpu:0", "cpu:1"} and outcome.confirmed.n == 3


def test_the_search_ends_when_its_time_is_over(tmp_path: Path) -> None:
    where, _ = made_search.begin(tmp_path / "s", hours=0.0, max_trials=None)
    outcome, _ = made_search.run(where)
    assert outcome.trials == [] and outcome.winner is None and not (tmp_path / made_search.STARTS).exists()
