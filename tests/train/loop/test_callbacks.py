"""Run callbacks: they see every row once, can stop the run, and have time before and after it."""

import gzip
import json
import os
import time
from pathlib import Path
from typing import Any

import pytest

import deskside
from deskside.data import tokenizer as bpe
from deskside.data.reading.loader import evaluated_rows
from deskside.data.reading.rows import IGNORE, PackedDataset
from deskside.run.directory import RunDirectory
from deskside.train import next_token, training_run
from deskside.train.loop.callbacks import Callback
from deskside.train.loop.clock import Clock
from deskside.utils.signals import StopSignal
from tests.train import tiny_run
from tests.train.tiny_run import curve


class Notes(Callback):
    """Keeps what it sees, and stops the run at a step."""

    resume_command = "deskside go --resume"

    def __init__(self, stop_at: int | None = None, spent: float = 0.0, reserve: float = 0.0):
        self.earlier_seconds, self.stop_at, self.kept = spent, stop_at, reserve
        self.steps: list[int] = []
        self.closed = False

    def begin(self, run: RunDirectory, stop: StopSignal, validation: PackedDataset) -> None:
        self.stop = stop
        assert validation.index.splits["val"].tokens > 0

    def on_step(self, row: dict[str, Any], total_steps: int) -> None:
        self.steps.append(row["step"])
        if row["step"] == self.stop_at:
            self.stop.requested = "that is enough"

    def close(self) -> None:
        self.closed = True

    def reserve(self, limit: float | None) -> float:
        return self.kept

    def summary_entries(self, summary: dict[str, Any]) -> dict[str, Any]:
        return {"noted": len(self.steps), "of": summary["steps"]}


def start(root: Path, config: Any, watch: Callback, name: str = "run") -> training_run.RunOutcome:
    deskside.STARTED = time.perf_counter()
    return training_run.start(config, (root, name, "run"), "a test", watch=watch)


def test_it_sees_every_row_and_adds_to_the_summary(data: Path, tmp_path: Path) -> None:
    watch = Notes()
    summary = start(tmp_path, tiny_run.config(data, schedule={"length": "12 steps"}), watch).summary
    assert watch.steps == list(range(1, 13)) and watch.closed
    assert summary["noted"] == summary["of"] == 12
    assert RunDirectory(tmp_path / "run").read_json("summary.json")["noted"] == 12


def test_it_stops_the_run_which_can_be_resumed(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tiny_run.config(data, schedule={"length": "20 steps"})
    watch = Notes(stop_at=7)
    outcome = start(tmp_path, config, watch)
    assert outcome.status == "that is enough" and watch.steps[-1] in (7, 8) and watch.closed
    assert f"deskside go --resume {tmp_path / 'run'}" in capsys.readouterr().err
    again = Notes()
    assert training_run.resume(tmp_path / "run", watch=again).status == "finished"
    assert again.steps == list(range(watch.steps[-1] + 1, 21))
    tiny_run.train(tmp_path, config, "straight")
    assert curve(tmp_path / "run") == curve(tmp_path / "straight")


@pytest.mark.full
def test_time_that_was_spent_before_and_time_that_is_kept(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny_run.VirtualTime(monkeypatch, lambda step: 0.1)
    config = tiny_run.config(data, schedule={"length": "10s"})
    free = start(tmp_path, config, Notes(), "free").summary
    bound = start(tmp_path, config, Notes(spent=3.0, reserve=2.0), "bound").summary
    assert 9.7 <= free["seconds"] <= 10 and 7.7 <= bound["seconds"] <= 8
    assert free["steps"] - bound["steps"] == pytest.approx(5 / 0.1, abs=2)


def test_the_wall_clock_never_shows_less_than_was_spent() -> None:
    """Steps since the last checkpoint are lost, but the time that they took is not."""
    clock = Clock("wall", time.perf_counter(), earlier_seconds=100.0)
    clock.restore(60.0)
    assert 100 <= clock.seconds() < 101
    clock.restore(160.0)
    assert 160 <= clock.seconds() < 161


def test_into_a_directory_that_was_made_for_it(data: Path, tmp_path: Path) -> None:
    """It is used, and it remains if the run fails before it has a plan."""
    run = RunDirectory.create(tmp_path, "made", "made")
    (run.path / "go.json").write_text("{}")
    config = tiny_run.config(data, schedule={"length": "3 steps"})
    outcome = training_run.start(config, run, "a test")
    assert outcome.run.path == run.path and not (tmp_path / "other").exists()
    failing = RunDirectory.create(tmp_path, "failing", "failing")
    impossible = tiny_run.config(data, model={"vocab_size": 10}, schedule={"length": "3 steps"})
    with pytest.raises(Exception, match="vocab_size"):
        training_run.start(impossible, failing, "a test")
    assert failing.path.is_dir()


def test_what_the_final_evaluation_takes_is_learnt_on_the_way(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A machine of half the speed also evaluates at half the speed, and the run still ends within its length."""
    virtual = tiny_run.VirtualTime(monkeypatch, lambda step: 0.1 * (1 + (virtual.now > 10)))
    original = next_token.evaluate_dataset
    took: list[float] = []

    def evaluate_dataset(*arguments: Any, **given: Any) -> Any:
        result = original(*arguments, **given)
        took.append(0.0002 * result.tokens * (1 + (virtual.now > 10)))
        virtual.now += took[-1]
        return result

    monkeypatch.setattr(next_token, "evaluate_dataset", evaluate_dataset)
    config = tiny_run.config(data, schedule={"length": "20s"}, evaluate={"every": "4s", "tokens": 200})
    summary = start(tmp_path, config, Notes()).summary
    # The final evaluation takes twice what the first ones had shown, but at most a twentieth.
    assert 0.3 < took[-1] < 1.0
    assert 0.95 * 20 <= summary["seconds"] <= 20


def test_evaluations_during_training_take_a_twentieth_of_their_interval(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The whole validation text would take 50 s every 4 s. All evaluations read the same part, also after a resume."""
    virtual = tiny_run.VirtualTime(monkeypatch, lambda step: 1.0)
    original = next_token.evaluate_dataset
    asked: list[int] = []

    def evaluate_dataset(*arguments: Any, **given: Any) -> Any:
        result = original(*arguments, **given)
        virtual.now += 50.0 * result.targets / arguments[1].num_tokens
        asked.append(given["max_tokens"])
        return result

    monkeypatch.setattr(next_token, "evaluate_dataset", evaluate_dataset)
    config = tiny_run.config(data, schedule={"length": "80s"}, evaluate={"every": "16s", "tokens": 10**6})
    summary = start(tmp_path, config, Notes()).summary
    during = tiny_run.plan(tmp_path / "run")["evaluate_tokens"]
    tokens = PackedDataset(data, split="val", sequence_length=32).num_tokens
    assert during == pytest.approx(tokens * 0.05 * 16 / 50, rel=0.1)
    assert asked.count(during) >= 3 and 0.9 * 80 <= summary["seconds"] <= 80


@pytest.mark.parametrize("clock", ["wall", pytest.param("training", marks=pytest.mark.full)])
def test_a_short_run_evaluates_what_there_is_time_for(
    clock: str, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A validation text that would take half of the run gets a twentieth. On the
    training clock, evaluation is free.
    """
    virtual = tiny_run.VirtualTime(monkeypatch, lambda step: 0.1)
    original = next_token.evaluate_dataset
    evaluated: list[int] = []
    limits: list[int] = []

    def evaluate_dataset(*arguments: Any, **given: Any) -> Any:
        result = original(*arguments, **given)
        virtual.now += 10.0 * result.targets / arguments[1].num_tokens
        evaluated.append(result.targets)
        limits.append(given["max_tokens"])
        return result

    monkeypatch.setattr(next_token, "evaluate_dataset", evaluate_dataset)
    config = tiny_run.config(data, schedule={"length": "20s", "clock": clock})
    summary = start(tmp_path, config, Notes()).summary
    split = PackedDataset(data, split="val", sequence_length=32)
    whole, baselines = split.num_tokens, split.index.splits["val"]
    if clock == "wall":
        # gzip and unigrams belong to the part that the model was evaluated on.
        rows = split.rows_by_number(evaluated_rows(split, limits[-1] // 32)).targets
        kept = rows[(rows != IGNORE) & (rows != split.index.tokenizer.eos_id)]
        text = bpe.load(data).decode(kept.tolist()).encode()
        assert len(text) == summary["val_bytes"]
        assert summary["gzip_bpb"] == pytest.approx(8 * len(gzip.compress(text, 9)) / len(text), rel=0.02)
        assert summary["gzip_bpb"] != baselines.gzip_bpb and summary["unigram_bpb"] != baselines.unigram_bpb
    else:
        assert (summary["gzip_bpb"], summary["unigram_bpb"]) == (baselines.gzip_bpb, baselines.unigram_bpb)
    if clock == "wall":
        # a twentieth of 20 s, at 10 s for everything
        assert evaluated[-1] == pytest.approx(0.1 * whole, rel=0.2)
        assert 0.95 * 20 <= summary["seconds"] <= 20
    else:
        assert evaluated[-1] == whole and 0.97 * 20 <= summary["seconds"] <= 20
    assert f"final evaluation: {evaluated[-1]:,} of {whole:,}" in tiny_run.events(tmp_path / "run")
    assert summary.get("val_share", 1) == pytest.approx(evaluated[-1] / whole)


def with_its_own_stopwatch(root: Path, config: Any) -> None:
    """Run a rank whose stopwatch shows ten times as much for an evaluation as the previous rank's."""
    patch, original, rank = pytest.MonkeyPatch(), next_token.evaluate_dataset, int(os.environ["RANK"])
    virtual = tiny_run.VirtualTime(patch, lambda step: 0.2)
    limits: list[int | None] = []

    def evaluate_dataset(*arguments: Any, **given: Any) -> Any:
        result = original(*arguments, **given)
        virtual.now += 10.0 ** (rank + 1) * result.targets / arguments[1].num_tokens
        limits.append(given["max_tokens"])
        return result

    patch.setattr(next_token, "evaluate_dataset", evaluate_dataset)
    tiny_run.train(root, config)
    (root / f"limits-{rank}.json").write_text(json.dumps(limits), "utf-8")


def test_every_process_evaluates_the_same_at_the_end(data: Path, tmp_path: Path) -> None:
    """The ranks' stopwatches differ, but shards wait for each other in every pass of the model."""
    config = tiny_run.config(data, schedule={"length": "20s"})
    child = tiny_run.call(with_its_own_stopwatch, tmp_path, config, log=tmp_path / "log", ranks=2)
    assert child.wait() == 0, child.text()
    first, second = (json.loads((tmp_path / f"limits-{rank}.json").read_text("utf-8")) for rank in (0, 1))
    whole = PackedDataset(data, split="val", sequence_length=32).num_tokens
    assert first == second and first[-1] == pytest.approx(0.1 * whole, rel=0.2)
