"""Runs whose time limit is shorter than their set-up would take: they end on time, or are refused at once.

Time is virtual (`Slow`), so nothing depends on the speed of this machine.
"""

import json
import re
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

import deskside
from deskside.align import answers
from deskside.align.sampler import Sampler
from deskside.cli import dpo as dpo_command
from deskside.cli import finetune
from deskside.cli import grpo as grpo_command
from deskside.cli import kto as kto_command
from deskside.train.loop.step import Stepper
from deskside.utils.errors import UsageError
from deskside.utils.progress import ProgressBar, time_limit
from tests.align import tiny


class Slow:
    """A replacement for `time.perf_counter` that advances with rows of steps, rows of passes and sampled tokens."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, step_row: float, pass_row: float, token: float = 0.0):
        self.now = 0.0
        original, score, sample = Stepper.run, answers.score, Sampler.sample

        def run(stepper: Stepper, batches: Sequence[Any], step: int, dry: bool = False) -> Any:
            self.now += step_row * sum(batch.tokens_BT.shape[0] for batch in batches)
            return original(stepper, batches, step, dry)  # type: ignore[arg-type]

        def scored(model: Any, batch: Any, *rest: Any) -> Any:
            self.now += 0.0 if torch.is_grad_enabled() else pass_row * batch.tokens_BT.shape[0]
            return score(model, batch, *rest)

        def sampled(sampler: Sampler, prompts: Sequence[Any], *rest: Any) -> Any:
            self.now += token * rest[-1]
            return sample(sampler, prompts, *rest)

        monkeypatch.setattr(Stepper, "run", run)
        monkeypatch.setattr(answers, "score", scored)
        monkeypatch.setattr(Sampler, "sample", sampled)
        monkeypatch.setattr(time, "perf_counter", self.look)
        monkeypatch.setattr(deskside, "STARTED", 0.0)

    def look(self) -> float:
        self.now += 1e-6
        return self.now


def summary(run: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((run / "summary.json").read_text())
    return found


def recommended(error: UsageError) -> str:
    found = re.search(r"give --hours ([0-9.]+),", str(error))
    assert found is not None, str(error)
    return found[1]


def dpo(folder: Path, base: Path, name: str, *more: str) -> Path:
    data = tiny.jsonl(folder / "pairs.jsonl", tiny.pairs(400))
    argv = [str(base), "--data", str(data), "--data.path", str(folder / "data"), "--runs", str(folder)]
    argv += ["--name", name, *tiny.RUN, "--batch.sequence_length", "160", "--batch.tokens", "1280"]
    dpo_command.run([*argv, *more])
    return folder / name


def test_dpo_uses_the_pairs_that_there_is_time_for(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Computing the reference log-probabilities of all pairs would take longer than the run."""
    slow = Slow(monkeypatch, step_row=0.5, pass_row=2.0)
    run = dpo(tmp_path, base, "short", "--schedule.length", "200s")
    used = json.loads((run / "reference.json").read_text())["rows"]
    assert 8 <= used["train"] < 100 and used["val"] >= 1
    assert summary(run)["steps"] >= 1
    assert slow.now <= 200
    lrs = [row["lr"] for row in tiny.metrics(run)]
    assert lrs[-1] < 0.5 * max(lrs)


@pytest.mark.full
def test_dpo_with_enough_time_uses_all(base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    slow = Slow(monkeypatch, step_row=0.4, pass_row=0.01)
    run = dpo(tmp_path, base, "long", "--schedule.length", "100s")
    assert "rows" not in json.loads((run / "reference.json").read_text())
    assert 85 <= slow.now <= 100


@pytest.mark.full
def test_without_a_reference_all_time_is_for_steps_and_evaluations(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow = Slow(monkeypatch, step_row=0.5, pass_row=2.0)
    run = dpo(tmp_path, base, "free", "--schedule.length", "200s", "--align.loss", "simpo")
    assert not (run / "reference.json").exists()
    assert summary(run)["steps"] >= 10
    assert 150 <= slow.now <= 200


@pytest.mark.full
def test_a_restricted_run_is_resumed_the_same(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        Slow(patch, step_row=0.5, pass_row=2.0)
        tiny.kill_at(patch, 3)
        with pytest.raises(tiny.Killed):
            dpo(tmp_path, base, "killed", "--schedule.length", "200s")
    used = json.loads((tmp_path / "killed" / "reference.json").read_text())["rows"]
    with monkeypatch.context() as patch:
        Slow(patch, step_row=0.5, pass_row=2.0)
        assert dpo_command.run(["--resume", str(tmp_path / "killed")]) == 0
    assert f"train: {used['train']} of" in (tmp_path / "killed" / "events.log").read_text()
    assert all(row["loss"] > 0 for row in tiny.metrics(tmp_path / "killed"))


def test_no_time_for_a_step_is_refused_with_a_length_that_does(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        slow = Slow(patch, step_row=2.0, pass_row=1.0)
        with pytest.raises(UsageError, match="is too short") as caught:
            dpo(tmp_path, base, "refused", "--hours", "0.01")
        assert slow.now < 60  # seconds; the old set-up took hundreds
    assert not (tmp_path / "refused").exists()
    with monkeypatch.context() as patch:
        slow = Slow(patch, step_row=2.0, pass_row=1.0)
        run = dpo(tmp_path, base, "longer", "--hours", recommended(caught.value))
        assert slow.now <= float(recommended(caught.value)) * 3600
    assert summary(run)["steps"] >= 5


def test_kto_counts_the_pass_for_its_kl_against_its_hours(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [
        {"prompt": pair["prompt"], "completion": pair[kind], "label": kind == "chosen"}
        for pair in tiny.pairs(400)
        for kind in ("chosen", "rejected")
    ]
    argv = tiny.command_line(base, tiny.jsonl(tmp_path / "labelled.jsonl", rows), tmp_path, "kto")
    argv += ["--batch.sequence_length", "160", "--batch.tokens", "1280", "--schedule.length", "200s"]
    slow = Slow(monkeypatch, step_row=0.5, pass_row=0.3)
    assert kto_command.run(argv) == 0
    assert 150 <= slow.now <= 200
    first = json.loads((tmp_path / "kto" / "plan.json").read_text())["initial"]
    # eight rows, and nearly as many for the estimate of the KL divergence
    assert first["step_seconds"] > 8 * (0.5 + 0.25)


def grpo(folder: Path, model: Path, name: str, *more: str) -> Path:
    data = tiny.jsonl(folder / "questions.jsonl", tiny.questions())
    argv = [str(model), "--data", str(data), "--data.path", str(folder / "data"), "--runs", str(folder)]
    argv += ["--name", name, *tiny.RUN, "--batch.sequence_length", "64", "--align.answer_tokens", "8"]
    grpo_command.run([*argv, "--questions", "4", "--align.group", "4", *more])
    return folder / name


def test_grpo_counts_sampling_against_its_hours(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow = Slow(monkeypatch, step_row=0.1, pass_row=0.0, token=0.5)
    run = grpo(tmp_path, base, "short", "--schedule.length", "150s")
    assert summary(run)["steps"] >= 5
    assert slow.now <= 150
    first = json.loads((run / "plan.json").read_text())["initial"]
    assert first["step_seconds"] > 8 * 0.5  # includes the answers


@pytest.mark.full
def test_grpo_without_time_for_its_answers_is_refused(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        slow = Slow(patch, step_row=0.1, pass_row=0.0, token=5.0)
        with pytest.raises(UsageError, match="is too short") as caught:
            grpo(tmp_path, base, "refused", "--hours", "0.01")
        assert slow.now < 60
    with monkeypatch.context() as patch:
        slow = Slow(patch, step_row=0.1, pass_row=0.0, token=5.0)
        run = grpo(tmp_path, base, "longer", "--hours", recommended(caught.value))
        assert slow.now <= float(recommended(caught.value)) * 3600
    assert summary(run)["steps"] >= 5


def test_a_step_that_takes_longer_than_the_run_is_refused_after_one_row(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow = Slow(monkeypatch, step_row=30.0, pass_row=1.0)
    with pytest.raises(UsageError, match="one row takes 30"):
        dpo(tmp_path, base, "refused", "--schedule.length", "50s")
    assert slow.now <= 2 * 30 + 1


def test_preparing_data_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    with (
        pytest.raises(UsageError, match="98 s"),
        time_limit(50, lambda left: UsageError(f"{left:.0f} s")),
        ProgressBar("render", 100, "pairs", quiet=True) as bar,
    ):
        for _ in range(100):
            now[0] += 1
            bar.advance(1)
    assert now[0] == 2
    monkeypatch.setattr(time, "perf_counter", lambda: deskside.STARTED + 10)
    assert finetune.wall_limit({"schedule": {"hours": "90m"}}) == 5400
    assert finetune.wall_limit({"schedule": {"length": "5 epochs"}}) is None
