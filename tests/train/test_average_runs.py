"""Runs that average their weights: the average is evaluated, exported and loaded, and training is unchanged."""

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from deskside.train import next_token
from deskside.train.evaluation import Evaluator
from deskside.train.loop.trainer import Trainer
from deskside.train.objective import Evaluation
from deskside.utils.errors import UsageError
from deskside.weights.checkpoint_folder import AVERAGE, WEIGHTS
from deskside.weights.load import load_model
from tests.train import tiny_run
from tests.train.tiny_run import checkpoints, curve, rows

STEPS, LAST = 20, "checkpoints/step-000000020"
EMA = {"name": "ema", "start": 0.3, "half_life": 0.1}
RUN: dict[str, Any] = {
    "schedule": {"length": f"{STEPS} steps"},
    "checkpoint": {"every": "5 steps"},
    "evaluate": {"every": "5 steps"},
}


@pytest.fixture(scope="module")
def runs(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run without an average, and one whose blend is chosen on the validation split."""
    folder = tmp_path_factory.mktemp("average")
    tiny_run.train(folder, tiny_run.config(data, **RUN), "without")
    tiny_run.train(folder, tiny_run.config(data, average={**EMA, "blend": "auto"}, **RUN), "averaged")
    return folder


def weights(run: Path, name: str) -> dict[str, torch.Tensor]:
    return load_file(run / LAST / name)


def equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(t, other[name]) for name, t in one.items())


def test_training_is_not_changed(runs: Path) -> None:
    without, averaged = runs / "without", runs / "averaged"
    assert curve(without) == curve(averaged)
    assert equal(weights(without, WEIGHTS), weights(averaged, WEIGHTS))
    assert not list(without.rglob(AVERAGE))
    raw = {r["step"]: r["val_bpb"] for r in rows(without) if "val_bpb" in r}
    for row in rows(averaged):
        if row["step"] == 5:  # before 30 % of the run
            assert row["val_bpb"] == raw[5] and "val_bpb_raw" not in row
        elif row["step"] in raw:
            assert row["val_bpb_raw"] == raw[row["step"]] != row["val_bpb"]


def test_the_blend_is_evaluated_and_exported(runs: Path) -> None:
    """Also by plain transformers."""
    run = runs / "averaged"
    summary = json.loads((run / "summary.json").read_text())
    entry = summary["average"]
    tried = {row["blend"]: row["val_bpb"] for row in entry["by_blend"]}
    assert set(tried) == {0.0, 0.2, 0.4, 0.6, 0.8, 1.0}
    assert entry["blend"] == min(tried, key=lambda blend: tried[blend])
    assert entry["updates"] == 14
    tokens = torch.arange(10, 40)[None]
    theirs = AutoModelForCausalLM.from_pretrained(run / "model", dtype=torch.float32)(tokens).logits
    for choice in (None, "averaged", "raw"):
        with torch.no_grad():
            ours = load_model(run, weights=choice).model(tokens)
        same = torch.allclose(ours, theirs, atol=1e-4)
        assert same == (choice != "raw" or entry["blend"] == 0.0)


def test_a_choice_that_is_not_there_is_refused(runs: Path) -> None:
    for path, choice in (("without", "averaged"), ("averaged/model", "raw")):
        with pytest.raises(UsageError, match="--weights"):
            load_model(runs / path, weights=choice)
    load_model(runs / "without", weights="raw")


@pytest.mark.parametrize(
    "average", [EMA, {"name": "tail", "start": 0.3, "every": 2, "offload": True, "blend": 0.5}]
)
def test_a_resumed_run_has_the_same_average(
    average: dict[str, Any], data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tiny_run.config(data, average=average, **RUN)
    whole = tiny_run.train(tmp_path, config, "whole").run.path
    one_step = Trainer.one_step

    def killed(self: Trainer) -> None:
        if self.progress.step == 13:
            raise KeyboardInterrupt
        one_step(self)

    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "one_step", killed)
        with pytest.raises(KeyboardInterrupt):
            tiny_run.train(tmp_path, config)
    run = tmp_path / "run"
    assert "step-000000010" in checkpoints(run)
    tiny_run.resume(run)
    assert curve(run) == curve(whole)
    for name in (WEIGHTS, AVERAGE):
        assert equal(weights(run, name), weights(whole, name))
    summaries = [json.loads((path / "summary.json").read_text()) for path in (run, whole)]
    assert summaries[0]["average"] == summaries[1]["average"]
    assert summaries[0]["val_bpb"] == summaries[1]["val_bpb"]


@pytest.mark.parametrize(
    ("losses", "chosen"),
    [((math.nan, 2.0, math.nan, 1.5, math.inf, 1.6), 0.6), ((math.nan,) * 6, 0.0)],
    ids=["some", "all"],
)
def test_blends_whose_loss_is_not_finite(
    losses: tuple[float, ...], chosen: float, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """None of them is the best. They are recorded as null, and the checkpoint that contains them can be read."""
    original, left = Evaluator.evaluate, list(losses)

    def evaluate(self: Evaluator, max_tokens: int | None) -> Evaluation:
        evaluation = original(self, max_tokens)
        if not self.average or self.average.updates < 7 or not left:
            return evaluation
        return replace(evaluation, metrics={**evaluation.metrics, "val_bpb": left.pop(0)})

    monkeypatch.setattr(Evaluator, "evaluate", evaluate)
    short = {"schedule": {"length": "10 steps"}, "evaluate": {"every": None}}
    run = tiny_run.train(tmp_path, tiny_run.config(data, average={**EMA, "blend": "auto"}, **short)).run.path
    entry = json.loads((run / "summary.json").read_text())["average"]
    assert entry["blend"] == chosen
    assert [row["val_bpb"] for row in entry["by_blend"]] == [x if math.isfinite(x) else None for x in losses]
    state = json.loads((run / "checkpoints" / "step-000000010" / "state.json").read_text())
    assert state["average"]["by_blend"] == entry["by_blend"]
    assert ("not finite" in (run / "events.log").read_text()) == (chosen == 0.0)
    assert load_model(run).step == 10


def test_a_damaged_average_is_noticed(data: Path, tmp_path: Path) -> None:
    """The earlier checkpoint is used instead. The raw weights of the damaged step can still be loaded."""
    run = tiny_run.train(tmp_path, tiny_run.config(data, average=EMA, **RUN)).run.path
    with (run / LAST / AVERAGE).open("r+b") as file:
        file.seek(-8, 2)
        file.write(b"\xff" * 8)
    told: list[str] = []
    assert load_model(run, warn=told.append).step == 15
    assert len(told) == 1 and AVERAGE in told[0]
    assert load_model(run, warn=told.append, weights="raw").step == 20
    assert len(told) == 1


def test_both_evaluations_have_their_share_of_the_time(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Together, the evaluations of the averaged and of the raw weights take at most 5 % of the interval."""
    virtual = tiny_run.VirtualTime(monkeypatch, lambda step: 0.5)
    original = next_token.evaluate_dataset

    def evaluate_dataset(*arguments: Any, **given: Any) -> Any:
        result = original(*arguments, **given)
        virtual.now += 0.001 * result.tokens
        return result

    monkeypatch.setattr(next_token, "evaluate_dataset", evaluate_dataset)
    limits = []
    for name in ("none", "ema"):
        config = tiny_run.config(
            data,
            schedule={"length": "20s"},
            evaluate={"every": "5s", "tokens": 10_000},
            average={"name": name},
        )
        limits.append(tiny_run.plan(tiny_run.train(tmp_path, config, name).run.path)["evaluate_tokens"])
    assert limits == [pytest.approx(250, rel=0.05), pytest.approx(125, rel=0.05)]


@pytest.mark.full
@pytest.mark.parametrize("mode", ["replicate", "shard"])
def test_two_processes_average_like_one(mode: str, data: Path, tmp_path: Path) -> None:
    config = tiny_run.config(data, average=EMA, optim={"name": "adamw"}, **RUN)
    alone = tiny_run.train(tmp_path, config, "alone").run.path
    together = config.model_copy(update={"parallel": config.parallel.model_copy(update={"mode": mode})})
    child = tiny_run.call(tiny_run.train, tmp_path, together, "together", log=tmp_path / "log", ranks=2)
    assert child.wait() == 0, child.text()
    for choice in ("raw", "averaged"):
        models = [load_model(tmp_path / name, weights=choice).model for name in ("alone", "together")]
        for one, other in zip(*(model.parameters() for model in models), strict=True):
            torch.testing.assert_close(one, other, atol=1e-3, rtol=1e-3)
    summaries = [json.loads((tmp_path / name / "summary.json").read_text()) for name in ("alone", "together")]
    assert summaries[0]["val_bpb"] == pytest.approx(summaries[1]["val_bpb"], abs=1e-3)
    assert alone.exists()


def test_what_does_not_go_together(data: Path) -> None:
    for changes, key in (
        ({"average": {**EMA, "offload": True}, "parallel": {"mode": "shard"}}, "average.offload"),
        (
            {"average": EMA, "checkpoint": {"keep_best": True}, "evaluate": {"every": "5 steps"}},
            "checkpoint.keep_best",
        ),
        ({"average": {**EMA, "blend": 0.0}}, "average.blend"),
        ({"average": {**EMA, "start": 1.0}}, "average.start"),
    ):
        with pytest.raises(ValidationError) as error:
            tiny_run.config(data, **changes)
        found = [".".join(str(part) for part in e["loc"]) + e["msg"] for e in error.value.errors()]
        assert any(key in text for text in found)
