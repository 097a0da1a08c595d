"""The training loop as a whole: ending on time, bad steps, rollback, evaluation during training, given weights."""

import itertools
import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from deskside.cli.main import GPU_MEMORY_HINT, main
from deskside.config.run import RunConfig
from deskside.config.sections import PrecisionConfig
from deskside.data.reading.loader import Batch, Loader, LoaderOptions
from deskside.data.reading.rows import PackedDataset
from deskside.data.tokenizer import load as load_tokenizer
from deskside.evaluate.bpb import evaluate_dataset
from deskside.precision import CheckResult
from deskside.run.directory import RunDirectory
from deskside.train import next_token
from deskside.train.loop.guard import Diverged
from deskside.train.loop.step import StepMetrics, Stepper
from deskside.train.objective import Loss
from deskside.train.prepare import setup
from deskside.train.state.checkpointer import Checkpointer
from deskside.train.state.init_weights import InitialWeights
from deskside.utils.errors import OutsideError, RunError, UsageError
from deskside.weights.load import load_model
from tests.train import tiny_run
from tests.train.tiny_run import checkpoints, curve, events, plan, rows

# Ending on time


@pytest.mark.parametrize(
    "clock, slower", [("wall", 2.0), pytest.param("training", 0.5, marks=pytest.mark.full)]
)
def test_a_run_in_hours_ends_on_time_when_the_speed_changes(
    clock: str, slower: float, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The throughput halves or doubles in the middle. The run ends within the limit with its learning rate decayed."""
    limit = 6.0
    virtual = tiny_run.VirtualTime(
        monkeypatch, lambda step: 0.03 * (slower if virtual.now > limit / 2 else 1.0)
    )
    schedule = {"length": f"{limit}s", "clock": clock, "warmup": 0.1, "decay": 0.5, "final_lr_fraction": 0.1}
    config = tiny_run.config(
        data, schedule=schedule, optim={"name": "adamw"}, checkpoint={"every": "100 steps"}
    )
    summary = tiny_run.train(tmp_path, config).summary
    found = rows(tmp_path / "run")
    assert 0.97 * limit <= summary["seconds"] <= limit
    assert [r["step"] for r in found] == list(range(1, summary["steps"] + 1))
    lrs = [r["lr"] for r in found]
    # The last step is one step short of the end, so its rate is the final one and a step's worth of decay.
    assert 0.1 <= lrs[-1] / max(lrs) <= 0.1 + 3 * 0.9 / (0.5 * len(lrs))
    # It falls without a jump from the middle on, whatever was revised.
    steepest = max(a - b for a, b in itertools.pairwise(lrs))
    assert steepest <= 3 * max(lrs) * 0.9 / (0.5 * len(lrs))
    revisions = plan(tmp_path / "run")["revisions"]
    assert len(revisions) > 1 and all(r["reason"] for r in revisions)


def test_time_lost_all_at_once_leaves_steps_to_decay(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One step at full learning rate uses up all remaining time, so a few more are taken, within 2 %."""
    tiny_run.VirtualTime(monkeypatch, lambda step: 5.0 if step == 100 else 0.02)
    schedule = {"length": "6s", "clock": "training", "warmup": 0.0, "decay": 0.2, "final_lr_fraction": 0.0}
    summary = tiny_run.train(tmp_path, tiny_run.config(data, schedule=schedule)).summary
    lrs = [r["lr"] for r in rows(tmp_path / "run")]
    assert 104 < summary["steps"] <= 108 and lrs[-1] < 0.75 * lrs[0]
    over = summary["seconds"] - rows(tmp_path / "run")[100]["seconds"]
    assert over <= 0.02 * 6 + 0.02  # the limit had already passed in the step that lost the time
    assert "the length of 6 s cannot be met: 5 more steps" in events(tmp_path / "run")


def test_a_warmup_in_steps_does_not_move_when_the_plan_is_revised(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny_run.VirtualTime(monkeypatch, lambda step: 0.02 if step < 60 else 0.06)
    schedule = {"length": "6s", "clock": "training", "warmup": 40, "decay": 0.2}
    tiny_run.train(tmp_path, tiny_run.config(data, schedule=schedule))
    lrs = [r["lr"] for r in rows(tmp_path / "run")]
    peak = lrs.index(max(lrs))
    assert all(b <= a for a, b in itertools.pairwise(lrs[peak:])) and 35 <= peak <= 45


def test_a_length_that_no_step_fits_into_says_so(data: Path, tmp_path: Path) -> None:
    config = tiny_run.config(data, schedule={"length": "0.001s"})
    child = tiny_run.call(tiny_run.train, tmp_path, config, log=tmp_path / "log")
    child.wait()
    assert "too short" in child.text() and "; give --hours" in child.text()


# Bad steps


class Poison:
    """Makes the loss of chosen data non-finite (or a spike), and records the data of each real step.

    Data is identified by the position of the step's first row, counted in steps.
    """

    def __init__(self, patch: pytest.MonkeyPatch, bad: Callable[[int], bool], factor: float = float("nan")):
        self.seen: list[int] = []
        position_of: dict[int, int] = {}
        original_next, original_loss = Loader.__next__, Stepper.loss
        poison = self

        def following(loader: Loader) -> list[Batch]:
            position = loader._next_row // loader.options.rows_per_step
            batches = original_next(loader)
            position_of.update({id(b): position for b in batches})
            poison.kept = batches  # keeps the ids from being reused while they count
            return batches

        def loss(stepper: Stepper, batch: Batch) -> Loss:
            found = original_loss(stepper, batch)
            position = position_of.get(id(batch))
            if position is None:
                return found  # a dry step
            poison.seen.append(position)
            return replace(found, sum=found.sum * factor) if bad(position) else found

        self.kept: list[Batch] = []
        patch.setattr(Loader, "__next__", following)
        patch.setattr(Stepper, "loss", loss)


def test_bad_steps_are_skipped_and_logged(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tiny_run.config(data, schedule={"length": "40 steps"})
    Poison(monkeypatch, lambda at: at in (23, 24, 25))
    run = tiny_run.train(tmp_path, config).run.path
    found = rows(run)
    assert [r["step"] for r in found if r["skipped"]] == [24, 25, 26]
    assert all(r["loss"] is None and r["grad_norm"] is None for r in found if r["skipped"])
    assert all(r["loss"] < 6 for r in found if not r["skipped"]) and len(found) == 40
    for step in (24, 25, 26):
        assert f"step {step} skipped: loss nan" in events(run)
    assert "went back" not in events(run)


def test_spikes_during_the_warmup_are_explained_once(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tiny_run.config(data, schedule={"length": "24 steps", "warmup": "22 steps", "decay": 0.05})
    Poison(monkeypatch, lambda at: at in (18, 20), factor=1e4)
    run = tiny_run.train(tmp_path, config).run.path
    assert [r["step"] for r in rows(run) if r["skipped"]] == [19, 21]
    assert events(run).count("--schedule.warmup") == 1


def test_a_spike_is_skipped_and_changes_no_weight(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tiny_run.config(
        data, schedule={"length": "25 steps"}, checkpoint={"every": "1 steps", "keep": 25}
    )
    Poison(monkeypatch, lambda at: at == 21, factor=1e4)
    run = tiny_run.train(tmp_path, config).run.path
    found = rows(run)
    assert [r["step"] for r in found if r["skipped"]] == [22]
    assert "step 22 skipped: gradient norm" in events(run) and "10 times the 90th percentile" in events(run)
    assert "--schedule.warmup" not in events(run)  # it was over
    files = [run / "checkpoints" / f"step-{step:09d}" for step in (21, 22, 23)]
    before, after, later = (
        {n: (f / n).read_bytes() for n in ("model.safetensors", "optimizer.safetensors")} for f in files
    )
    assert before == after and all(later[n] != after[n] for n in after)


def test_too_many_bad_steps_go_back_and_past_the_data(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tiny_run.config(data, schedule={"length": "40 steps"}, guard={"max_skips": 4})
    straight = tiny_run.train(tmp_path, config, "straight").run.path
    with monkeypatch.context() as patch:
        Poison(patch, lambda at: 22 <= at < 60)
        with pytest.raises(Diverged, match=r"4 steps in a row had to be skipped.* 2 times"):
            tiny_run.train(tmp_path, config, "hopeless")
    assert events(tmp_path / "hopeless").count("went back to step 20") == 2

    with monkeypatch.context() as patch:
        poison = Poison(patch, lambda at: 22 <= at < 27)
        run = tiny_run.train(tmp_path, config).run.path
    assert curve(run)[:20] == curve(straight)[:20]
    assert [r["step"] for r in rows(run)] == list(range(1, 41)) and not any(r["skipped"] for r in rows(run))
    assert events(run).count("went back to step 20 and skipped the data in between") == 1
    # 22 good steps and 4 bad ones, one step in flight, and on from there: no row twice, none of the bad ones again.
    assert poison.seen == list(range(27 + 20))


def test_after_going_back_bad_steps_are_counted_from_zero(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The checkpoint that the run goes back to was saved after two of the three bad steps."""
    config = tiny_run.config(
        data,
        schedule={"length": "10 steps"},
        checkpoint={"every": "1 steps"},
        guard={"max_skips": 3, "max_rollbacks": 1},
    )
    Poison(monkeypatch, lambda at: at in (4, 5, 6, 7))
    run = tiny_run.train(tmp_path, config).run.path
    assert events(run).count("went back to step 6") == 1
    assert [r["step"] for r in rows(run) if r["skipped"]] == [5, 6, 7]


@pytest.mark.parametrize("prevents", ["skips", "disk"])
def test_a_failure_outside_is_told_even_if_nothing_can_be_saved(
    prevents: str, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Too many skipped steps are noticed only as the last step is logged. The last checkpoint stays, and is resumed."""
    config = tiny_run.config(
        data,
        schedule={"length": "12 steps"},
        checkpoint={"every": "5 steps", "background": False},
        guard={"max_skips": 2},
    )
    with monkeypatch.context() as patch:
        Poison(patch, lambda at: prevents == "skips" and at in (5, 6))
        original_next, original_publish = Loader.__next__, Checkpointer._publish

        def following(loader: Loader) -> list[Batch]:
            if loader._next_row == 7 * loader.options.rows_per_step:
                raise OutsideError("the server is gone")
            return original_next(loader)

        def publish(checkpointer: Checkpointer, step: int, *rest: Any) -> float:
            if step == 7:
                raise RunError("the disk is full")
            return original_publish(checkpointer, step, *rest)

        patch.setattr(Loader, "__next__", following)
        patch.setattr(Checkpointer, "_publish", publish)
        with pytest.raises(OutsideError, match="the server is gone"):
            tiny_run.train(tmp_path, config)
    run = tmp_path / "run"
    assert checkpoints(run) == ["step-000000000", "step-000000005"]
    assert "not saved at step 7: " in events(run)
    tiny_run.resume(run)
    assert [r["step"] for r in rows(run)] == list(range(1, 13))


def test_going_back_to_the_beginning_clears_the_optimizer(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run then equals one that started at that place in the data."""
    config = tiny_run.config(
        data, schedule={"length": "15 steps"}, checkpoint={"every": "1000 steps"}, guard={"max_skips": 2}
    )
    with monkeypatch.context() as patch:
        Poison(patch, lambda at: at in (5, 6))
        run = tiny_run.train(tmp_path, config, "back").run.path
    assert "went back to step 0" in events(run)

    class Later(Loader):
        def __init__(self, dataset: PackedDataset, options: LoaderOptions) -> None:
            super().__init__(
                dataset, replace(options, start_row=options.start_row + 8 * options.rows_per_step)
            )

    monkeypatch.setattr(next_token, "Loader", Later)
    assert curve(tiny_run.train(tmp_path, config, "later").run.path) == curve(run)


def test_a_run_that_went_back_resumes_exactly(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tiny_run.config(data, schedule={"length": "45 steps"}, guard={"max_skips": 3})
    Poison(monkeypatch, lambda at: 22 <= at < 25)
    straight = tiny_run.train(tmp_path, config, "straight").run.path

    class Stopped(BaseException):
        pass

    original = RunDirectory.append_metrics

    def append_metrics(self: RunDirectory, row: dict[str, Any]) -> None:
        original(self, row)
        if row["step"] == 36:
            raise Stopped

    with monkeypatch.context() as patch:
        patch.setattr(RunDirectory, "append_metrics", append_metrics)
        with pytest.raises(Stopped):
            tiny_run.train(tmp_path, config)
    tiny_run.resume(tmp_path / "run")
    assert curve(tmp_path / "run") == curve(straight)


# Memory


def test_out_of_memory_is_met_with_smaller_passes_of_the_same_batch(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tiny_run.config(data, schedule={"length": "12 steps"})
    asked = tiny_run.config(data, schedule={"length": "12 steps"}, batch={"micro_tokens": 64})
    fitted = tiny_run.train(tmp_path, asked, "asked").run.path
    original = Stepper.run

    def small(self: Stepper, batches: list[Batch], step: int, dry: bool = False) -> StepMetrics:
        if len(batches[0].tokens_BT) > 2:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1 GiB.")
        return original(self, batches, step, dry)

    monkeypatch.setattr(Stepper, "run", small)
    run = tiny_run.train(tmp_path, config).run.path
    fit = plan(run)["fit"][0]
    assert (fit["micro_rows"], fit["accumulation"]) == (2, 4)
    assert [a["fits"] for a in fit["attempts"]] == [False, False, True]
    assert "8 rows do not fit" in events(run) and "4 rows do not fit" in events(run)
    assert curve(run) == curve(fitted)


def test_a_run_that_is_out_of_memory_later_says_what_to_do_and_can_be_resumed(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It loses the steps since the last checkpoint. A resumed run has the same passes, whether they fit or not."""
    settings = {"schedule": {"length": "12 steps"}, "checkpoint": {"every": "5 steps"}}
    asked = tiny_run.config(data, **settings, batch={"micro_tokens": 128})
    straight = tiny_run.train(tmp_path, asked, "straight").run.path
    original, fails_at = Stepper.run, [8]

    def full(self: Stepper, batches: list[Batch], step: int, dry: bool = False) -> StepMetrics:
        if step in fails_at and len(batches[0].tokens_BT) == 4:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1 GiB. More text.\nAnd more.")
        return original(self, batches, step, dry)

    monkeypatch.setattr(Stepper, "run", full)
    with pytest.raises(torch.OutOfMemoryError):
        tiny_run.train(tmp_path, asked)
    run = tmp_path / "run"
    assert checkpoints(run) == ["step-000000000", "step-000000005"] and not (run / "summary.json").exists()
    capsys.readouterr()
    for fails_at[0] in (8, 1):  # in the same step, then already in the dry step
        assert main(["train", "--resume", str(run)]) == 1
        said = capsys.readouterr().err.splitlines()
        out_of_memory = "deskside: out of memory: CUDA out of memory. Tried to allocate 1 GiB. More text."
        assert said[-2:] == [out_of_memory, GPU_MEMORY_HINT]
        assert rows(run)[-1]["step"] == 6 and "out of memory" not in events(run)
    fails_at.clear()
    assert main(["train", "--resume", str(run)]) == 0
    assert plan(run)["fit"][0]["micro_rows"] == 4 and curve(run) == curve(straight)


# Evaluation during training


def test_evaluation_on_the_way_is_that_of_the_weights_then(data: Path, tmp_path: Path) -> None:
    config = tiny_run.config(
        data,
        schedule={"length": "30 steps"},
        evaluate={"every": "10 steps", "tokens": 1_000_000},
        checkpoint={"every": "10 steps", "keep": 5},
    )
    outcome = tiny_run.train(tmp_path, config)
    run, summary = outcome.run.path, outcome.summary
    found = {r["step"]: r["val_bpb"] for r in rows(run) if "val_bpb" in r}
    assert list(found) == [10, 20]
    validation = PackedDataset(data, split="val", sequence_length=32)
    for step, expected in (*found.items(), (30, summary["val_bpb"])):
        model = load_model(run / "checkpoints" / f"step-{step:09d}").model
        assert evaluate_dataset(model, validation, micro_rows=4).bpb == pytest.approx(expected, rel=1e-6)
    assert found[10] > found[20] > summary["val_bpb"]
    assert json.loads((run / "summary.json").read_text()) == summary


# Starting from given weights


def test_a_run_begins_from_given_weights(data: Path, tmp_path: Path) -> None:
    """From a run, and from the Hugging Face model in it: the same first loss, close to the run's last one."""
    optim = {"name": "adamw", "lr": 1e-2, "scale": False}
    base = tiny_run.train(tmp_path, tiny_run.config(data, optim=optim), "base").run.path
    options = f"--data.path {data} --batch.sequence_length 32 --batch.tokens 256 --compute.device cpu"
    options += f" --schedule.length 4_steps --checkpoint.every 2 --runs {tmp_path}"
    firsts = []
    for name, source in (("of-run", base), ("of-hf", base / "model")):
        argv = ["train", "--init", str(source), "--name", name]
        argv += [o.replace("4_steps", "4 steps") for o in options.split()]
        child = tiny_run.command(argv, tmp_path / f"{name}.log")
        assert child.wait() == 0, child.text()
        firsts.append(rows(tmp_path / name)[0]["loss"])
        assert json.loads((tmp_path / name / "run.json").read_text())["init"] == str(source)
    last = float(np.mean([r["loss"] for r in rows(base)[-5:]]))
    assert firsts[0] == pytest.approx(firsts[1], abs=1e-5)
    assert firsts[0] == pytest.approx(last, abs=0.25) and firsts[0] < rows(base)[0]["loss"] - 1


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        (
            {"compute": {"compile": "fused"}, "model": {"norm": "layernorm"}},
            r"compute\.compile: fused .*use auto",
        ),
        (
            {"precision": {"name": "fp8", "native": "never"}},
            r"fails its self-check on this machine: output is all zero",
        ),
    ],
    ids=["uncovered", "self-check"],
)
def test_what_cannot_be_is_refused_before_data_is_prepared(
    parts: dict[str, Any], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Preparing may take hours. The run's directory is removed too."""
    if "precision" in parts:
        failed = CheckResult(False, {"output": 1.0}, "output is all zero")
        monkeypatch.setattr(setup, "check", lambda *_: failed)
    path = tmp_path / "data"
    sources = {"path": str(path), "sources": ["bundled:tiny_shakespeare.txt"]}
    with pytest.raises(UsageError, match=message):
        tiny_run.train(tmp_path / "runs", tiny_run.config(path, data=sources, **parts))
    assert not path.exists() and not (tmp_path / "runs" / "run").exists()


def test_the_summary_tells_an_emulated_recipe(data: Path, tmp_path: Path) -> None:
    length = {"schedule": {"length": "2 steps"}}
    for name, emulated in (("bf16", False), ("fp8-rowwise", True)):
        config = tiny_run.config(data, **length, precision={"name": name})
        summary = tiny_run.train(tmp_path, config, name).summary
        assert (summary["precision"], summary["emulated"]) == (name, emulated)


def test_why_a_recipe_is_emulated_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    emulated = CheckResult(True, {}, "emulated: input gradient is all zero", native=False)
    monkeypatch.setattr(setup, "check", lambda *_: emulated)
    said: list[str] = []
    config = RunConfig(precision=PrecisionConfig(name="fp8"))
    chosen, facts = setup.choose_recipe(config, torch.device("cpu"), said.append)
    assert (chosen, facts["native"]) == ("fp8-delayed", False)
    assert said[0].startswith("fp8-delayed is emulated on this device (input gradient is all zero): ")


def foreign(data: Path) -> InitialWeights:
    """Save weights that fit no model, with the data's own tokenizer."""
    vocabulary = load_tokenizer(data).get_vocab(with_added_tokens=True)
    return InitialWeights("runs/base", {"only_here": torch.zeros(3)}, vocabulary)


def test_weights_of_another_tokenizer_are_refused(data: Path, tmp_path: Path) -> None:
    initial = foreign(data)
    first, second = sorted(initial.vocabulary, key=initial.vocabulary.__getitem__)[-2:]
    swapped = {
        **initial.vocabulary,
        first: initial.vocabulary[second],
        second: initial.vocabulary[first],
    }
    with pytest.raises(
        UsageError, match=r"a different tokenizer .* \(in 2 tokens\); prepare the data with it"
    ):
        tiny_run.train(tmp_path, tiny_run.config(data), initial=replace(initial, vocabulary=swapped))


def test_a_run_does_not_go_on_with_other_data(data: Path, tmp_path: Path) -> None:
    moved = tmp_path / "data"
    shutil.copytree(data, moved)
    run = tiny_run.train(tmp_path, tiny_run.config(moved, schedule={"length": "3 steps"})).run
    (run.path / "summary.json").unlink()
    plan_before = plan(run.path)
    run.write_json("plan.json", {**plan_before, "data": "0" * 32})
    with pytest.raises(UsageError, match=r"is not the data that .* was trained on"):
        tiny_run.resume(run.path)
    run.write_json("plan.json", plan_before)
    tiny_run.resume(run.path)


def test_given_weights_of_another_shape_are_refused(data: Path, tmp_path: Path) -> None:
    config = tiny_run.config(data)
    with pytest.raises(
        RunError, match=r"another architecture: only one of weights and model has 'embed\.weight'"
    ):
        tiny_run.train(tmp_path, config, initial=foreign(data))


@pytest.mark.parametrize("source", ["hf", "gone"])
def test_a_run_from_given_weights_that_has_no_checkpoint_starts_over(
    source: str, data: Path, tmp_path: Path
) -> None:
    config = tiny_run.config(data, schedule={"length": "3 steps"})
    loaded = load_model(tiny_run.train(tmp_path, config, "base").run.path)
    straight = tiny_run.train(tmp_path, config, "straight", initial=InitialWeights.of(loaded, "base"))
    run = tiny_run.train(tmp_path, config, "run").run
    init = str(tmp_path / ("base" if source == "hf" else "gone"))
    run.write_json(
        "run.json", {**run.read_json("run.json"), "init": init, "command": "deskside train --init x"}
    )
    (run.path / "summary.json").unlink()
    shutil.rmtree(run.checkpoints)
    run.checkpoints.mkdir()
    run.metrics.unlink()
    if source == "gone":
        with pytest.raises(RunError, match=r"gone.* start again with: deskside train --init x"):
            tiny_run.resume(run.path)
    else:
        tiny_run.resume(run.path)
        assert tiny_run.curve(run.path) == tiny_run.curve(straight.run.path)


def test_what_fails_before_its_plan_leaves_no_run(data: Path, tmp_path: Path) -> None:
    config = tiny_run.config(data, schedule={"length": "3 steps"})
    with pytest.raises(RunError, match="another architecture"):
        tiny_run.train(tmp_path, config, initial=foreign(data))
    assert not (tmp_path / "run").exists()


def test_a_run_is_trained_by_one_process_at_a_time(data: Path, tmp_path: Path) -> None:
    run = tiny_run.train(tmp_path, tiny_run.config(data, schedule={"length": "3 steps"})).run
    (run.path / "summary.json").unlink()
    with run.lock_for_training(True), pytest.raises(UsageError, match="another process is training this run"):
        tiny_run.resume(run.path)
    tiny_run.resume(run.path)


# Deterministic kernels


def _twice(root: Path, config: Any) -> None:
    tiny_run.train(root, config, "one")
    assert torch.are_deterministic_algorithms_enabled()
    tiny_run.train(root, config, "two")


@pytest.mark.full
def test_deterministic_kernels_suffice(data: Path, tmp_path: Path) -> None:
    """Runs in a separate process, because the setting is global. On a CPU, the numbers equal those without it."""
    config = tiny_run.config(data, deterministic=True, schedule={"length": "10 steps"})
    child = tiny_run.call(_twice, tmp_path, config, log=tmp_path / "log")
    assert child.wait() == 0, child.text()
    assert curve(tmp_path / "one") == curve(tmp_path / "two")
    plain = tiny_run.config(data, schedule={"length": "10 steps"})
    assert curve(tiny_run.train(tmp_path, plain, "plain").run.path) == curve(tmp_path / "one")
