"""A run that is stopped anywhere and resumed equals one that was never stopped, to the last bit of every loss."""

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from deskside.config.run import RunConfig
from deskside.run.directory import RunDirectory
from deskside.train import next_token
from tests.train import tiny_run
from tests.train.tiny_run import curve, kill_at_step, plan, rows, settings

STEPS = 60
# about 15 ms a step: enough time to be killed at a chosen one
SLOWER = {"sequence_length": 32, "tokens": 1024}


def as_toml(config: dict[str, Any]) -> str:
    """Return the configuration as a preset file."""
    lines = []
    for part, values in config.items():
        lines.append(f"[{part}]")
        lines += [f"{key} = {value!r}" for key, value in values.items() if value is not None]
    return "\n".join(lines) + "\n"


def preset(folder: Path, prepared: Path, /, **changes: Any) -> str:
    path = folder / "tiny.toml"
    path.write_text(as_toml(settings(prepared, **changes)))
    return str(path)


def arguments(folder: Path, name: str, file: str) -> list[str]:
    return ["train", file, "--runs", str(folder), "--name", name]


def straight(folder: Path, config: RunConfig, ranks: int = 1) -> Path:
    """Run without interruption, in this process, or in a child process for each rank."""
    if ranks == 1:
        tiny_run.train(folder, config, "straight")
    else:
        child = tiny_run.call(
            tiny_run.train, folder, config, "straight", log=folder / "straight.log", ranks=ranks
        )
        assert child.wait() == 0, child.text()
    return folder / "straight"


def check_same(run: Path, straight: Path, steps: int = STEPS) -> None:
    assert [r["step"] for r in rows(run)] == list(range(1, steps + 1))
    assert curve(run) == curve(straight)
    weights = "model/model.safetensors"
    assert (run / weights).read_bytes() == (straight / weights).read_bytes()


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.full)])
def test_kill_9_and_resume_as_a_person_does(ranks: int, data: Path, tmp_path: Path) -> None:
    """Commands start as new processes (under torchrun for two), and are killed with SIGKILL once step 25 is logged."""
    file = preset(tmp_path, data, batch=SLOWER)
    first = tiny_run.program(arguments(tmp_path, "killed", file), tmp_path / "log", ranks)

    def kill() -> None:
        for pid in tiny_run.descendants(first.pid):
            os.kill(pid, signal.SIGKILL)

    run = tmp_path / "killed"
    last = kill_at_step(run, 25, kill, lambda: first.poll() is None)
    first.wait(30)
    assert 25 <= last < STEPS and not (run / "summary.json").exists()
    again = tiny_run.program(["train", "--resume", str(run)], tmp_path / "log", ranks)
    assert again.wait(120) == 0, (tmp_path / "log").read_text()
    check_same(run, straight(tmp_path, tiny_run.config(data, batch=SLOWER), ranks))
    # A kill during the write in the background loses one interval at most.
    newest = last // 10 * 10
    assert any(f"resumed at step {step}" in tiny_run.events(run) for step in (newest, newest - 10))


MUON, ADAMW = {"name": "muon"}, {"name": "adamw", "lr": 3e-3}
STAGES = [
    {"until": 0.5, "sequence_length": 32},
    {"until": 1.0, "sequence_length": 64, "batch_tokens": 2048},
]


EXPERTS = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "router_aux_loss_coef": 0.01,
}
OFFLOADED = {"compile": "fused", "activation_checkpointing": "block", "activation_offloading": True}
BFLOAT16 = {"weights": "bfloat16", "offload": True}
WIDER = {"hidden_size": 64, "intermediate_size": 128}  # matrices that are updated one at a time


@pytest.mark.parametrize(
    "changes, at",
    [
        pytest.param(
            {
                "model": EXPERTS,
                "precision": {"name": "bf16"},
                "compute": OFFLOADED,
                "optim": {**MUON, **BFLOAT16},
            },
            26,
            marks=pytest.mark.full,
        ),
        pytest.param(
            {
                "model": EXPERTS,
                "precision": {"name": "bf16"},
                "compute": OFFLOADED,
                "optim": {**ADAMW, **BFLOAT16, "states": "8bit"},
            },
            28,
            marks=pytest.mark.full,
        ),
        pytest.param(
            {"model": EXPERTS, "compute": {"compile": "fused"}, "optim": MUON}, 22, marks=pytest.mark.full
        ),
        pytest.param(
            {"model": EXPERTS, "compute": {"compile": "block"}, "optim": ADAMW}, 24, marks=pytest.mark.full
        ),
        pytest.param({"optim": ADAMW}, 25, marks=pytest.mark.full),
        pytest.param({"optim": MUON, "schedule": {"stages": STAGES}}, 36, marks=pytest.mark.full),
        (
            {
                "optim": MUON,
                "schedule": {"stages": STAGES},
                "data": {"document_mask": True, "packing": "shuffled"},
                "multi_token": {"weights": [0.5, 0.25]},
                "dropout": 0.1,
            },
            29,
        ),
        pytest.param(
            {
                "optim": {
                    **MUON,
                    "row_floor": 0.35,
                    "radial_brake": 0.5,
                    "table_weight_decay": 0.1,
                    "ema_nesterov": 0.6,
                },
                "schedule": {"batch_growth": 4, "batch_lr": "sqrt", "decay_power": 1.2, "tied_until": 0.4},
            },
            23,
            marks=pytest.mark.full,
        ),
        pytest.param(
            {
                "optim": {**ADAMW, "weights": "bfloat16", "states": "8bit"},
                "batch": {**SLOWER, "micro_tokens": 256},
            },
            27,
            marks=pytest.mark.full,
        ),
        pytest.param(
            {
                "model": WIDER,
                "optim": {**ADAMW, **BFLOAT16, "states": "4bit", "gradients": "host", "master_weights": True},
                "batch": {**SLOWER, "micro_tokens": 256},
            },
            24,
            marks=pytest.mark.full,
        ),
        pytest.param(
            {
                "model": WIDER,
                "precision": {"name": "bf16"},
                "compute": {**OFFLOADED, "mlp_chunk_tokens": 128},
                "optim": {**ADAMW, **BFLOAT16, "states": "8bit", "gradients": "released", "grad_clip": 0.0},
            },
            26,
            marks=pytest.mark.full,
        ),
        pytest.param(
            {"model": WIDER, "optim": {**MUON, "gradients": "released", "offload": True}},
            25,
            marks=pytest.mark.full,
        ),
        pytest.param(
            {"optim": {**MUON, "weights": "bfloat16"}, "batch": {**SLOWER, "micro_tokens": 512}},
            23,
            marks=pytest.mark.full,
        ),
        pytest.param(
            {"optim": {**MUON, "weights": "24bit"}, "batch": {**SLOWER, "micro_tokens": 512}},
            24,
            marks=pytest.mark.full,
        ),
        pytest.param(
            {
                "optim": {**ADAMW, "weights": "24bit", "states": "8bit", "offload": True},
                "average": {"name": "ema"},
            },
            26,
            marks=pytest.mark.full,
        ),
        pytest.param(
            {"batch": {**SLOWER, "micro_tokens": 256}, "checkpoint": {"every": "7 steps"}},
            17,
            marks=pytest.mark.full,
        ),
    ],
)
def test_kill_and_resume(changes: dict[str, Any], at: int, data: Path, tmp_path: Path) -> None:
    config = tiny_run.config(data, **{"batch": SLOWER, **changes})
    child = tiny_run.call(tiny_run.train, tmp_path, config, log=tmp_path / "log")
    run = tmp_path / "run"
    kill_at_step(run, at, child.kill, child.alive)
    assert child.wait() == -signal.SIGKILL
    tiny_run.resume(run)
    check_same(run, straight(tmp_path, config))


@pytest.mark.parametrize(
    "number, ranks",
    [
        pytest.param(signal.SIGTERM, 1, marks=pytest.mark.full),
        (signal.SIGINT, 1),
        pytest.param(signal.SIGHUP, 1, marks=pytest.mark.full),
        pytest.param(signal.SIGTERM, 2, marks=pytest.mark.full),
    ],
)
def test_a_signal_saves_at_the_next_step_and_shows_in_the_exit_code(
    number: signal.Signals, ranks: int, data: Path, tmp_path: Path
) -> None:
    changes: dict[str, Any] = {"batch": SLOWER, "checkpoint": {"every": "1000 steps"}}
    file, config = preset(tmp_path, data, **changes), tiny_run.config(data, **changes)
    child = tiny_run.command([*arguments(tmp_path, "stopped", file), "--json"], tmp_path / "log", ranks)
    run = tmp_path / "stopped"
    seen = kill_at_step(run, 20, lambda: child.kill(number), child.alive)
    assert child.wait() == 128 + number, child.text()
    assert {process.exitcode for process in child.processes} == {128 + number}
    at = rows(run)[-1]["step"]
    # One step may be in flight when the signal arrives, and one may end before it is handled.
    assert seen <= at <= seen + 4 and tiny_run.checkpoints(run)[-1] == f"step-{at:09d}"
    assert f"{number.name}: saved at step {at}" in child.text()
    said = [json.loads(line) for line in child.text().splitlines() if line.startswith("{")]
    assert said == [{"status": "stopped", "signal": number.name, "run": str(run), "steps": at}]
    again = tiny_run.call(tiny_run.resume, run, log=tmp_path / "log", ranks=ranks)
    assert again.wait() == 0, again.text()
    assert "later steps are repeated" not in tiny_run.events(run)
    check_same(run, straight(tmp_path, config, ranks))


def test_a_finished_run_is_not_resumed(data: Path, tmp_path: Path) -> None:
    outcome = tiny_run.train(tmp_path, tiny_run.config(data, schedule={"length": "3 steps"}))
    child = tiny_run.command(["train", "--resume", str(outcome.run.path)], tmp_path / "log")
    assert child.wait() == 2
    assert "is finished" in child.text() and "--init" in child.text() and child.text().count("\n") == 1


def test_a_run_killed_while_finishing_finishes(data: Path, tmp_path: Path, monkeypatch: Any) -> None:
    """The last checkpoint exists, so only evaluation, export and summary are repeated."""
    config = tiny_run.config(data, schedule={"length": "8 steps"}, checkpoint={"keep": 1})
    with monkeypatch.context() as patch:
        patch.setattr(next_token, "sample_text", lambda *a: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            tiny_run.train(tmp_path, config)
    run = tmp_path / "run"
    before = (run / "checkpoints/step-000000008/manifest.json").stat().st_mtime_ns
    summary = tiny_run.resume(run).summary
    assert summary["steps"] == 8 and [r["step"] for r in rows(run)] == list(range(1, 9))
    assert (run / "checkpoints/step-000000008/manifest.json").stat().st_mtime_ns == before


def test_relative_data_counts_from_where_the_run_was_begun(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, elsewhere = tmp_path / "begun", tmp_path / "elsewhere"
    begun.mkdir()
    elsewhere.mkdir()
    (begun / "data").symlink_to(data)
    monkeypatch.chdir(begun)
    with monkeypatch.context() as patch:
        patch.setattr(next_token, "sample_text", lambda *a: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            tiny_run.train(Path("runs"), tiny_run.config("data", schedule={"length": "2 steps"}))
    run = begun / "runs" / "run"
    monkeypatch.chdir(elsewhere)
    config = RunDirectory.open(run).config()
    assert config.data.path == str(begun / "data")
    assert tiny_run.resume(run).summary["steps"] == 2
    # The tree was moved, so the data is in the current directory.
    monkeypatch.chdir(begun.rename(tmp_path / "moved"))
    assert RunDirectory.open(Path("runs/run")).config().data.path == "data"


class Killed(BaseException):
    """Replaces kill -9 where the clock is virtual: no product code catches it, and nothing is saved."""


def test_a_run_in_hours_keeps_its_journal(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps that are repeated after a kill get their earlier learning rates, though the speed differs.

    The plan is revised soon after step 45, where the run slows down, thus between the checkpoint and the kill.
    """
    schedule = {"length": "4s", "clock": "training"}
    config = tiny_run.config(data, schedule=schedule, checkpoint={"every": "40 steps"})

    def slow_after_step_45(step: int) -> float:
        if step == 76:
            raise Killed
        return 0.01 if step <= 45 else 0.03

    run = tmp_path / "run"
    with monkeypatch.context() as patches:
        tiny_run.VirtualTime(patches, slow_after_step_45)
        with pytest.raises(Killed):
            tiny_run.train(tmp_path, config)
    before, journal = curve(run), plan(run)["revisions"]
    assert len(before) >= 74 and any(40 < r["step"] <= 75 for r in journal)
    tiny_run.VirtualTime(monkeypatch, lambda step: 0.02)
    tiny_run.resume(run)
    assert "resumed at step 40" in tiny_run.events(run)
    after, last = curve(run), plan(run)["revisions"][-1]
    assert after[: len(before)] == before
    assert plan(run)["revisions"][: len(journal)] == journal
    assert [row[0] for row in after] == list(range(1, last["step"] + last["remaining"] + 1))


def test_accumulation_changes_nothing(data: Path, tmp_path: Path) -> None:
    """Padding makes the micro-batches unequal, but their losses still add up to that of the whole batch."""
    curves = []
    for micro in (512, 64):
        batch = {"sequence_length": 64, "tokens": 512, "micro_tokens": micro}
        config = tiny_run.config(data, batch=batch, schedule={"length": "10 steps"}, optim={"name": "adamw"})
        run = tiny_run.train(tmp_path, config, f"micro-{micro}").run.path
        assert plan(run)["fit"][0]["accumulation"] == 512 // micro
        curves.append(curve(run))
    for other in curves[1:]:
        for one, two in zip(curves[0], other, strict=True):
            assert two[:3] == one[:3] and two[3] == pytest.approx(one[3], abs=1e-5)
    assert curves[1][0][3] == pytest.approx(curves[0][0][3], abs=1e-6)
