"""The overfitting warning: its rate of false alarms, its result for real curves, and its effect on a run."""

import gzip
import itertools
import json
import math
import os
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy.stats import kendalltau

from deskside.config import merge
from deskside.run.directory import RunDirectory
from deskside.train import next_token
from deskside.train.loop.overfitting import MAX_FALLING_PAIRS, WINDOW, OverfittingWatch, overfits
from deskside.train.next_token import NextToken
from deskside.train.objective import Evaluation, Session
from deskside.train.state.checkpointer import Checkpointer
from deskside.utils.errors import RunError, UsageError
from deskside.utils.signals import StopSignal
from deskside.weights.load import load_model
from tests.train import tiny_run
from tests.train.tiny_run import events, plan, rows

DATA = Path(__file__).parents[3] / "docs" / "data"
FALLING = [3.0 - 0.1 * number for number in range(WINDOW)]  # training losses
STATED_RATE = 7 / 5040
OVERFITTING = [3.0, 2.5, 2.2, 2.1, 2.2, 2.3, 2.4, 2.5, 2.6, 2.7, 2.8, 2.9]


def test_the_rule_is_kendalls_trend_test() -> None:
    """For all orders of seven losses, it equals scipy's exact test at the stated rate."""
    order, alarms = list(range(WINDOW)), 0
    for number, losses in enumerate(itertools.permutations(order)):
        alarm = overfits([9.0, *losses], [9.0, *FALLING])
        alarms += alarm
        if alarm or number % 97 == 0:
            p = kendalltau(order, losses, alternative="greater", method="exact").pvalue
            assert alarm == (p <= STATED_RATE + 1e-12)
    assert alarms == 1 + (WINDOW - 1) * MAX_FALLING_PAIRS == 7


@pytest.mark.parametrize("noise", ["normal", "cauchy"])
def test_false_alarms_of_noise(noise: str) -> None:
    """With 24 evaluations of a loss that has stopped falling, at most 18 x 0.14 % of runs
    raise an alarm; with a falling loss, none.
    """
    rng = np.random.default_rng(0)
    draw = rng.standard_normal if noise == "normal" else rng.standard_cauchy
    training = np.linspace(3, 2, 24)
    flat = sum(alarmed(1 + 0.01 * draw(24), training) for _ in range(4000))
    assert 0.004 < flat / 4000 < 18 * STATED_RATE
    fall = 2 + 10 / np.arange(10, 34)
    assert sum(alarmed(fall + 0.003 * rng.standard_normal(24), training) for _ in range(500)) == 0


def alarmed(validation: np.ndarray, training: np.ndarray) -> bool:
    ends = range(WINDOW, len(validation) + 1)
    return any(overfits(validation[:end].tolist(), training[:end].tolist()) for end in ends)


def test_if_both_losses_rise_it_is_not_overfitting() -> None:
    rising = FALLING[::-1]
    assert overfits(rising, FALLING) and not overfits(rising, rising)
    assert not overfits(rising[1:], FALLING[1:]) and not overfits([], [])


def watched(curve: Iterable[dict[str, Any]]) -> int | None:
    """Return the step at which a stored curve is found to overfit."""
    watch = OverfittingWatch()
    return next((row["step"] for row in curve if watch._add(row)), None)


def stored(name: str) -> list[dict[str, Any]]:
    with gzip.open(DATA / name, "rt") as file:
        return [json.loads(line) for line in file]


def test_real_curves() -> None:
    """29 epochs of 123,000 tokens on a CPU have the lowest loss at epoch 6, are found at epoch 11, and end at 4.7
    bits. Runs of 2 to 3 epochs, also with noisy repetitions of their last evaluations, are not found to overfit.
    """
    curve = stored("2026-11-24-own-corpus/overfit.metrics.jsonl.gz")
    best = min((row["val_bpb"], row["step"]) for row in curve if "val_bpb" in row)
    found = watched(curve)
    assert best[1] == 360 and found == 660 and curve[found - 1]["val_bpb"] < 1.07 * best[0]
    for name in ("go", "slow"):
        fine = stored(f"2026-11-20-planner/{name}/metrics.jsonl.gz")
        assert sum(row.get("val_bpb") is not None for row in fine) >= 5 and watched(fine) is None


def test_a_rollback_is_forgotten(tmp_path: Path) -> None:
    """After it, the watch has the same state as in a run that was resumed there."""
    run = RunDirectory.create(tmp_path, "run", "run")
    live = OverfittingWatch()
    live.begin(run, StopSignal(), [])  # type: ignore[arg-type]

    def log(step: int, loss: float) -> None:
        row = {"step": step, "tokens": step, "loss": 3 - 0.1 * step, "val_bpb": loss}
        run.append_metrics(row)
        live.on_step(row, 20)

    for step, loss in enumerate((2.0, 1.0, 1.1, math.nan, 1.2), 1):
        log(step, loss)
    run.cut_metrics(2)
    for step in range(3, 9):
        log(step, 1.0 + 0.1 * step)
        resumed = OverfittingWatch()
        resumed.begin(run, StopSignal(), [])  # type: ignore[arg-type]
        state = {**vars(live), "detected": None}
        assert state == {**vars(resumed), "detected": None}
        assert live.detected == (step == 8)


# Runs


def planned_losses(monkeypatch: pytest.MonkeyPatch, losses: list[float]) -> list[float]:
    """Make evaluations during training return `losses` in turn, after the one of the
    rehearsal. Return the list of remaining losses.
    """
    original, left = NextToken.evaluate, list(losses)

    def evaluate(self: NextToken, session: Session, max_tokens: int | None) -> Evaluation:
        evaluation = original(self, session, max_tokens)
        if max_tokens != session.config.evaluate.tokens or not left:
            return evaluation
        return replace(evaluation, metrics={**evaluation.metrics, "val_bpb": left.pop(0)})

    monkeypatch.setattr(NextToken, "evaluate", evaluate)
    return left


def config(data: Path, **changes: Any) -> Any:
    """Return 60 steps with an evaluation every 5. The last of `planned_losses` is that of the end."""
    changes["evaluate"] = {"every": "5 steps", "tokens": 321, **changes.get("evaluate", {})}
    return tiny_run.config(data, **{"schedule": {"length": "60 steps"}, **changes})


def test_it_ends_with_the_best_checkpoint(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The lowest loss is that of step 20, which checkpoint.keep would have deleted. Its weights are exported, loaded
    from the run, and scored. Without the option, nothing is kept, and training itself is bitwise the same.
    """
    planned_losses(monkeypatch, OVERFITTING[:-1] + OVERFITTING)
    plain = tiny_run.train(tmp_path, config(data), "plain").summary
    assert plain["steps"] == 60 and plain["overfits"] and "best_step" not in plain
    assert load_model(tmp_path / "plain").step == 60
    every = {"every": "10 steps", "keep": 1, "keep_best": True}
    outcome = tiny_run.train(tmp_path, config(data, checkpoint=every))
    run = tmp_path / "run"
    assert (
        outcome.summary["best_step"] == 20 and outcome.summary["overfits"] and outcome.summary["steps"] == 60
    )
    assert [path.name for path in (run / "checkpoints").iterdir()] == ["step-000000020"]
    assert load_model(run).step == 20
    for other in (run / "model", run / "checkpoints" / "step-000000020"):
        for name, weight in load_model(other).model.named_parameters():
            assert weight.equal(load_model(run).model.get_parameter(name)), name
    assert "ends with the weights of step 20: validation loss 2.1000, at the end 2.9000" in events(run)
    assert events(run).count("warning: overfitting") == events(run).count("overfitting after 1.") == 1
    assert tiny_run.curve(run) == tiny_run.curve(tmp_path / "plain")


def overfits_on_a_rank(root: Path, config: Any) -> None:
    """Run a rank whose evaluations differ slightly from the previous rank's, as by rounding."""
    planned_losses(pytest.MonkeyPatch(), [loss + 1e-9 * int(os.environ["RANK"]) for loss in OVERFITTING])
    tiny_run.train(root, config)


def test_losses_that_are_not_finite(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are never the best, neither at first nor at the end."""
    planned_losses(monkeypatch, [math.nan, 2.5, 2.2, math.nan, 2.6, math.nan])
    short = {"checkpoint": {"keep_best": True}, "schedule": {"length": "30 steps"}}
    outcome = tiny_run.train(tmp_path, config(data, **short))
    assert outcome.summary["best_step"] == load_model(tmp_path / "run").step == 15


@pytest.mark.parametrize("keep_best", [False, True])
def test_losses_of_all_stages_are_of_the_same_rows_and_window(
    keep_best: bool, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They use the model at the end of the run, so that they can be compared.
    Otherwise each stage has its own window.
    """
    original, seen = next_token.evaluate_dataset, []

    def evaluate_dataset(model: Any, dataset: Any, **given: Any) -> Any:
        seen.append((dataset.sequence_length, model.layers[0].attn.window))
        return original(model, dataset, **given)

    monkeypatch.setattr(next_token, "evaluate_dataset", evaluate_dataset)
    stages = [{"until": 0.5, "sequence_length": 16, "window": 4}, {"until": 1.0, "sequence_length": 32}]
    staged = {"length": "20 steps", "stages": stages}
    model = {"window_pattern": "SL", "sliding_window": 8}
    tiny_run.train(tmp_path, config(data, model=model, schedule=staged, checkpoint={"keep_best": keep_best}))
    assert set(seen) == ({(32, 8)} if keep_best else {(32, 8), (32, 4)})


@pytest.mark.full
def test_all_ranks_end_with_the_same_checkpoint(data: Path, tmp_path: Path) -> None:
    two = config(data, checkpoint={"keep_best": True}, batch={"tokens": 256})
    child = tiny_run.call(overfits_on_a_rank, tmp_path, two, log=tmp_path / "log", ranks=2)
    assert child.wait() == 0, child.text()
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["best_step"] == 20
    assert [path.name for path in (tmp_path / "run" / "checkpoints").iterdir()] == ["step-000000020"]


def test_the_last_weights_stay_if_they_are_the_best(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    planned_losses(monkeypatch, sorted(OVERFITTING[:4], reverse=True))
    short = {"checkpoint": {"keep_best": True}, "schedule": {"length": "20 steps"}}
    outcome = tiny_run.train(tmp_path, config(data, **short))
    assert "best_step" not in outcome.summary and "overfits" not in outcome.summary
    assert load_model(tmp_path / "run").step == 20


def test_a_resumed_run_knows_its_best_checkpoint_and_its_losses(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    left = planned_losses(monkeypatch, OVERFITTING)
    stopping = config(data, checkpoint={"every": "10 steps", "keep": 1, "keep_best": True})
    tiny_run.train(tmp_path, stopping, watch=tiny_run.StopAfter(32))
    assert len(left) == len(OVERFITTING) - 6
    outcome = tiny_run.resume(tmp_path / "run")
    assert outcome.summary["best_step"] == 20 and outcome.summary["overfits"]
    assert events(tmp_path / "run").count("warning: overfitting") == 1


def test_a_best_checkpoint_that_is_damaged(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    planned_losses(monkeypatch, OVERFITTING)
    original = Checkpointer.return_to_best

    def damaged(checkpointer: Checkpointer) -> None:
        path = checkpointer.run.checkpoints / "step-000000020" / "model.safetensors"
        path.write_bytes(path.read_bytes()[:-1] + b"?")
        original(checkpointer)

    monkeypatch.setattr(Checkpointer, "return_to_best", damaged)
    short = {"checkpoint": {"keep_best": True}, "schedule": {"length": "30 steps"}}
    with pytest.raises(RunError, match="step-000000020"):
        tiny_run.train(tmp_path, config(data, **short))


@pytest.mark.parametrize("length", [pytest.param("400 steps", marks=pytest.mark.full), "20s"])
def test_it_stops_early_with_its_learning_rate_decayed(
    length: str, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Overfitting is found at step 50, and the run decays in 8 steps, although there is time for many more."""
    tiny_run.VirtualTime(monkeypatch, lambda step: 0.05)
    planned_losses(monkeypatch, OVERFITTING)
    early = config(data, evaluate={"stop_early": True}, schedule={"length": length, "final_lr_fraction": 0.0})
    outcome = tiny_run.train(tmp_path, early)
    found = rows(tmp_path / "run")
    lrs = [row["lr"] for row in found]
    assert 45 <= outcome.summary["steps"] <= 60 and outcome.summary["overfits"]
    assert lrs[-1] < 0.2 * max(lrs) and outcome.status == "finished"
    assert plan(tmp_path / "run")["revisions"][-1]["reason"] == "overfitting"


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"evaluate": {"every": None}}, "--evaluate.every"),
        ({"evaluate": {"every": 5}, "parallel": {"mode": "shard"}}, "--parallel.mode replicate"),
    ],
)
def test_combinations_that_are_refused(changes: dict[str, Any], why: str, data: Path) -> None:
    with pytest.raises(UsageError, match=why):
        merge.build([tiny_run.settings(data, checkpoint={"keep_best": True}, **changes)])
