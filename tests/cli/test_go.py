"""`deskside go`: refused options, complete pipelines, kills in every phase, a
change of the band, and a target loss.
"""

import json
import random
import re
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import deskside
from deskside.cli import go as go_command
from deskside.cli.main import main
from deskside.pipeline import checks, planning
from deskside.pipeline import pipeline_state as journals
from deskside.pipeline.pipeline_state import PHASES, PipelineState
from deskside.run.directory import RunDirectory
from deskside.train import run_execution
from deskside.utils import child_process
from deskside.utils.errors import UsageError
from tests.train import tiny_run
from tests.train.tiny_run import rows

PRESET = """
[model]
vocab_size = 300
num_hidden_layers = 2
hidden_size = 32
num_attention_heads = 2
num_key_value_heads = 1
head_dim = 16
intermediate_size = 64
max_position_embeddings = 128
[batch]
sequence_length = 32
tokens = 256
[compute]
device = "cpu"
attention = "reference"
[checkpoint]
every = "10 steps"
[evaluate]
every = "1h"
"""
LIMIT, STEP = 60.0, 0.25  # seconds of the virtual clock
TAIL = 6.0 + 0.005 * LIMIT  # seconds reserved for the end, on an idle machine
HOURS = 0.004  # 14.4 s of real time


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tiny.toml").write_text(PRESET, "utf-8")
    # independent of other processes on this machine
    monkeypatch.setattr(journals, "contention", lambda: 1.0)
    deskside.STARTED = time.perf_counter()
    return tmp_path


def go(words: list[str]) -> None:
    """Run `deskside go` in a child process with a virtual clock, on which a step takes `STEP` seconds."""
    journals.SAVE_SECONDS = 0.02
    journals.contention = lambda: 1.0
    virtual(pytest.MonkeyPatch())
    sys.exit(main(words))


def virtual(
    patch: pytest.MonkeyPatch, seconds_of: Callable[[int], float] = lambda step: STEP
) -> tiny_run.VirtualTime:
    time_ = tiny_run.VirtualTime(patch, seconds_of)
    deskside.STARTED = time.perf_counter()
    return time_


def argv(data: Path, *more: str, hours: float = LIMIT / 3600) -> list[str]:
    return ["go", "--hours", str(hours), "--preset", "tiny.toml", "--data", str(data), "--yes", *more]


def refused(words: list[str], capsys: pytest.CaptureFixture[str], code: int = 2) -> str:
    assert main(words) == code
    shown = capsys.readouterr()
    assert shown.out == "", shown
    return shown.err.strip().splitlines()[-1].removeprefix("deskside: ")


def state(run: Path) -> dict[str, Any]:
    return dict(json.loads((run / "go.json").read_text("utf-8")))


# Errors before anything is written


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "--hours is required"),
        (
            ["--hours", "two"],
            "--hours: input should be a number of hours, or a time such as 2h or 1h30m, not 'two'",
        ),
        (["--hours", "-1"], "--hours: must be a number above zero, not -1"),
        (["--hours", "nan"], "--hours: must be a finite number"),
        (["--hours", "1e308"], "--hours: must be at most 1,000,000, not 1e+308"),
        (["--hours", "1e-9", "--preset", "demo", "--yes"], "--hours: 1e-09 h is too short: starting took "),
        (["--hours", "1", "--gpu-budget", "1e308"], "--gpu-budget: must be at most 1,000,000, not 1e+308"),
        (["--hours", "1"], "--data DIR is required"),
        (["--hours", "1", "--preset", "124m"], "data.path: no data was given"),
        (
            ["--hours", "1", "--preset", "demo", "--own-corpus"],
            "--own-corpus: needs the size of the text; give prepared data with --data DIR",
        ),
        (["--hours", "1", "--preset", "125m", "--yes"], "125m: no such preset"),
        (["--hours", "1", "--data", "nowhere"], "nowhere"),
        (["--hours", "1", "--data", "~/no/where"], f"{Path.home()}/no/where"),
        (
            ["--hours", "1", "--preset", "demo", "--target-loss", "0"],
            "--target-loss: must be a number above zero",
        ),
        (
            ["--hours", "1", "--preset", "demo", "--gpu-budget", "-4"],
            "--gpu-budget: must be a number above zero",
        ),
        (["--hours", "1", "--preset", "demo", "--gpu-budget", "4"], "--gpu-budget: this machine has no GPU"),
        (
            ["--hours", "1", "--preset", "demo", "--schedule.steps", "5"],
            "--schedule.steps: the length of the run is",
        ),
        (
            ["--hours", "1", "--preset", "demo", "--steps", "5", "--tokens", "5"],
            "--steps and --tokens: the run can have one length only",
        ),
        (["--hours", "1", "--data", "x", "--steps", "5"], "--steps: needs a model"),
        (
            ["--hours", "1", "--preset", "demo", "--steps", "few"],
            "--steps few: ",
        ),
        (["--resume", "x", "--tokens", "5M"], "--resume uses the options"),
        (
            ["--hours", "1", "--preset", "demo", "--data.path", "x"],
            "--data.path, --data.sources: give prepared data",
        ),
        (
            ["--hours", "1", "--preset", "demo"],
            "stdin is not a terminal",
        ),
        (
            ["--hours", "1", "--preset", "demo", "--name", "a/b", "--yes"],
            "--name 'a/b': must be a plain folder name",
        ),
        (
            ["--hours", "1", "--preset", "demo", "--adapter.rank", "8", "--optim.name", "adamw", "--yes"],
            "adapter: deskside go only pretrains",
        ),
        (["--resume", "nowhere"], "nowhere: has no pipeline to resume (no go.json)"),
        (["--resume", "x", "--hours", "1"], "--resume uses the options"),
        (["--resume", "x", "--own-corpus"], "--resume uses the options"),
        (["--resume", "x", "--probes", "mine"], "--resume uses the options"),
        (["--resume", "x", "--runs", "mine"], "--resume uses the options"),
        (
            ["--hours", "1", "--preset", "demo", "--model.num_key_value_heads", "3"],
            "model.num_key_value_heads: 4 heads",
        ),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_refused(
    words: list[str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.stdin", (tmp_path / "in").open("w+"))
    (tmp_path / "in").unlink()
    assert refused(["go", *words], capsys).startswith(message)
    assert list(tmp_path.iterdir()) == []


def test_the_name_of_an_existing_run(here: Path, data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (here / "runs" / "mine").mkdir(parents=True)
    line = refused(argv(data, "--name", "mine"), capsys)
    assert line == "runs/mine exists; choose another --name"
    (here / "runs" / "mine" / "go.json").touch()
    assert "deskside go --resume runs/mine" in refused(argv(data, "--name", "mine"), capsys)
    (here / "runs" / "mine" / "go.json").write_text('{"phase": "done"}')
    assert "--resume" not in refused(argv(data, "--name", "mine"), capsys)


def test_a_failure_before_training_leaves_no_run(
    here: Path, data: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def unfit(*_: Any) -> dict[str, Any]:
        return {"status": "unfit", "reason": "the sums are wrong"}

    monkeypatch.setattr(checks, "doctor", unfit)
    line = refused(argv(data), capsys, code=1)
    assert line == "training cannot work here: the sums are wrong; see deskside doctor"
    assert list((here / "runs").iterdir()) == []


def test_hours_too_short_for_a_step(
    here: Path, data: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error names the option that the user gave, and the run directory is deleted."""
    virtual(monkeypatch)
    original = run_execution.first_plan

    def slow(length: Any, stages: Any, elapsed: float, reserve: float, dry: Any) -> Any:
        return original(length, stages, LIMIT, reserve, dry)

    monkeypatch.setattr(run_execution, "first_plan", slow)
    line = refused(argv(data), capsys)
    assert line.startswith(
        "--hours: 0.0166667 h is too short: setting up took 60 s, evaluation and saving need "
    )
    assert not re.search(r"--hours \d", line)  # the hours of training alone would be too few
    assert list((here / "runs").iterdir()) == []


def test_it_asks_for_confirmation_once(
    here: Path, data: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []

    def answer() -> str:
        asked.append("?")
        return "n"

    monkeypatch.setattr("builtins.input", answer)
    monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)
    words = [word for word in argv(data) if word != "--yes"]
    assert refused(words, capsys) == "go? [Y/n] deskside: not confirmed; nothing was started" and asked == [
        "?"
    ]
    assert list((here / "runs").iterdir()) == []


@pytest.mark.usefixtures("no_figures")
@pytest.mark.full
@pytest.mark.parametrize("seconds", [0.5, 2 * LIMIT])
def test_a_wait_for_the_answer_does_not_count(
    seconds: float,
    here: Path,
    data: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    planned: list[float] = []
    original, clock = planning.plan, virtual(monkeypatch)

    def plan(request: planning.PipelineRequest, available: float, native_recipes: list[str]) -> Any:
        planned.append(available)
        return original(request, available, native_recipes)

    def answer() -> str:
        clock.now += seconds
        return "y"

    monkeypatch.setattr(planning, "plan", plan)
    monkeypatch.setattr("builtins.input", answer)
    monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)
    assert main([word for word in argv(data) if word != "--yes"]) == 0
    kept = state(here / "runs/tiny")
    assert [kept["results"]["plan"]["pretrain_seconds"]] == planned
    assert 0.85 * LIMIT <= kept["spent_seconds"] <= LIMIT
    assert clock.now - deskside.STARTED == pytest.approx(kept["spent_seconds"] + seconds, abs=0.1)


@pytest.mark.parametrize("yes", [True, False])
def test_a_resumed_pipeline_remembers_yes(yes: bool, here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options = {"preset": "demo", "data": None, "given": {}, "gpu_budget": None, "target_loss": None}
    run = RunDirectory.create(here / "runs", "mine", "go")
    PipelineState.begin(run, 1.0, {**options, "probes": "probes", "yes": yes}, "a test")
    monkeypatch.setattr("sys.stdin.isatty", lambda: False, raising=False)
    resumed = go_command.GoOptions(resume=str(run.path))
    if yes:
        assert go_command._resume_pipeline(resumed, {}).phase == "doctor" and resumed.yes
    else:
        with pytest.raises(UsageError, match="--yes"):
            go_command._resume_pipeline(resumed, {})


# Complete pipelines


def test_complete_pipeline(here: Path, data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    began = time.monotonic()
    assert main(argv(data, "--json", "--seed", "3", hours=HOURS)) == 0
    took = time.monotonic() - began
    shown = capsys.readouterr()
    result = json.loads(shown.out)
    run = here / "runs" / "tiny"
    assert result["run"] == "runs/tiny" and result["status"] == "finished"
    assert took <= HOURS * 3600 and result["spent_seconds"] <= result["budget_seconds"] == HOURS * 3600
    assert result["spent_seconds"] == pytest.approx(took, abs=1.0)
    for name in ("report.html", "pilot.json", "model/model.safetensors", "summary.json", "plots"):
        assert (run / name).exists(), name
    kept = state(run)
    assert kept["phase"] == "done" and kept["results"]["doctor"]["status"] == "skipped"
    assert kept["results"]["probe"]["status"] == "skipped" and "needs" in kept["results"]["probe"]["reason"]
    startup = json.loads((run / "plan.json").read_text("utf-8"))["startup"]["seconds"]
    assert list(startup)[:2] == ["earlier phases", "imports"] and sum(startup.values()) <= took
    configuration = json.loads((run / "run.json").read_text("utf-8"))["config"]
    assert configuration["seed"] == 3 and configuration["schedule"]["length"] == "14.4s"
    assert configuration["schedule"]["clock"] == "wall" and configuration["model"]["hidden_size"] == 32
    assert (
        refused(["go", "--resume", "runs/tiny"], capsys)
        == "runs/tiny is done; its report is runs/tiny/report.html"
    )


@pytest.mark.usefixtures("no_figures")
def test_a_length_in_steps(here: Path, data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    virtual(monkeypatch)
    assert main(argv(data, "--steps", "40")) == 0
    run = here / "runs/tiny"
    assert json.loads((run / "summary.json").read_text("utf-8"))["steps"] == 40
    lrs = [row["lr"] for row in rows(run)]
    assert lrs[-1] <= 0.1 * max(lrs)
    assert state(run)["options"]["length"] == "40 steps" and (run / "pilot.json").exists()


@pytest.mark.usefixtures("no_figures")
@pytest.mark.full
@pytest.mark.parametrize("slower", [1.0, 2.0])
def test_it_ends_on_time_when_throughput_drops(
    slower: float, here: Path, data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = virtual(monkeypatch, lambda step: STEP * (slower if clock.now > LIMIT / 2 else 1.0))
    assert main(argv(data, "--checkpoint.every", "200 steps")) == 0
    summary = json.loads((here / "runs/tiny/summary.json").read_text("utf-8"))
    assert 0.97 * (LIMIT - TAIL) <= summary["seconds"] <= LIMIT - TAIL
    lrs = [row["lr"] for row in rows(here / "runs/tiny")]
    assert lrs[-1] <= 0.08 * max(lrs)  # the schedule ends at 0.05
    assert state(here / "runs/tiny")["spent_seconds"] <= LIMIT


# Kills


def paused(phase: str, words: list[str], mark: str) -> None:
    """Run `deskside go` until it starts `phase`, then touch `mark` and wait to be killed."""

    def wait(*_: Any) -> None:
        Path(mark).touch()
        time.sleep(600)

    setattr(go_command.Pipeline, phase, wait)
    go(words)


def wait_for(true: Callable[[], bool], child: tiny_run.Child, seconds: float = 60) -> None:
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end and child.alive(), child.text()
        time.sleep(0.002)


@pytest.mark.full
@pytest.mark.parametrize("phase", ["doctor", "probe", "plan", "train", "report"])
def test_a_kill_in_every_phase(phase: str, here: Path, data: Path) -> None:
    """The pipeline continues in its phase with its remaining hours. The time between the processes does not count."""
    run, mark = here / "runs" / "tiny", here / "mark"
    child = tiny_run.call(paused, phase, argv(data), str(mark), log=here / "first.log")
    wait_for(mark.exists, child)
    child.kill()
    assert child.wait() == -signal.SIGKILL
    before = state(run)
    assert before["phase"] in (phase, "train") and set(before["results"]) == set(
        PHASES[: PHASES.index(phase)]
    ) - {"train", "report"}
    again = tiny_run.call(go, ["go", "--resume", str(run), "--yes"], log=here / "second.log")
    assert again.wait() == 0, again.text()
    after = state(run)
    assert after["phase"] == "done" and (run / "report.html").exists()
    assert before["spent_seconds"] <= after["spent_seconds"] <= LIMIT
    for name, result in before["results"].items():
        assert after["results"][name] == result


@pytest.mark.usefixtures("no_figures")
@pytest.mark.parametrize("seed", [1, pytest.param(2, marks=pytest.mark.full)])
def test_kills_during_training(
    seed: int,
    here: Path,
    data: Path,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    """After two kills, the pipeline still ends within its hours, which include the time of lost steps.

    It is resumed in another working directory, where its relative paths do not exist.
    """
    run = here / "runs" / "tiny"
    (here / "data").symlink_to(data)
    child = tiny_run.call(go, argv(Path("data")), log=here / "log")
    monkeypatch.chdir(tmp_path_factory.mktemp("elsewhere"))
    for number in (30 * seed, 30 * seed + 70):
        wait_for(lambda number=number: bool(rows(run)) and rows(run)[-1]["step"] >= number, child)  # type: ignore[misc]
        child.kill()
        assert child.wait() == -signal.SIGKILL
        spent = state(run)["spent_seconds"]
        assert state(run)["phase"] == "train" and spent > 0
        child = tiny_run.call(go, ["go", "--resume", str(run)], log=here / "log")
    assert child.wait() == 0, child.text()
    steps = [row["step"] for row in rows(run)]
    assert steps == list(range(1, len(steps) + 1))
    assert state(run)["phase"] == "done" and spent < state(run)["spent_seconds"] <= LIMIT
    # Lost steps took time too, so there are fewer steps than without kills.
    assert len(steps) < (LIMIT - TAIL) / STEP - 10
    lrs = [row["lr"] for row in rows(run)]
    assert lrs[-1] <= 0.1 * max(lrs)


@pytest.mark.full
@pytest.mark.parametrize("seed", range(3))
def test_kills_at_random_moments(seed: int, here: Path, data: Path) -> None:
    """After up to ten kills at random moments, the pipeline still ends within its hours."""
    rng, run = random.Random(seed), here / "runs" / "tiny"
    child = tiny_run.call(go, argv(data), log=here / "log")
    kills = 0
    while kills < 10:
        wait_for((run / "go.json").exists, child)
        time.sleep(rng.uniform(0.0, 1.2))
        if not child.alive():
            break
        child.kill()
        assert child.wait() == -signal.SIGKILL
        kills += 1
        if state(run)["phase"] == "done":
            break
        child = tiny_run.call(go, ["go", "--resume", str(run), "--yes"], log=here / "log")
    assert child.wait() in (0, -signal.SIGKILL) and "Traceback" not in child.text(), child.text()
    steps = [row["step"] for row in rows(run)]
    assert kills >= 3 and steps == list(range(1, len(steps) + 1))
    assert state(run)["phase"] == "done" and state(run)["spent_seconds"] <= 1.02 * LIMIT
    assert (run / "report.html").exists() and (run / "model" / "model.safetensors").exists()


def measuring(words: list[str], mark: str) -> None:
    """Run `deskside go` with a doctor that starts a child process that never ends."""

    def doctor(*_: Any) -> dict[str, Any]:
        lasting = ["sh", "-c", f"echo $$ > '{mark}'; exec sleep 600"]
        child_process.run("subprocess:call", {"args": lasting}, 600)
        return {}

    checks.doctor = doctor  # type: ignore[assignment]
    go(words)


@pytest.mark.full
def test_a_signal_before_training_ends_child_processes(here: Path, data: Path) -> None:
    run, mark = here / "runs" / "tiny", here / "mark"
    child = tiny_run.call(measuring, argv(data), str(mark), log=here / "log")
    wait_for(lambda: mark.exists() and mark.read_text("utf-8") != "", child)
    child.kill(signal.SIGTERM)
    assert child.wait() == 143, child.text()
    assert "; continue with: deskside go --resume runs/tiny" in child.text()
    stat = Path("/proc", mark.read_text("utf-8").strip(), "stat")
    # Ended, or a zombie, because nothing reaps it here.
    assert not stat.exists() or stat.read_text("utf-8").rsplit(")")[1].split()[0] == "Z"
    assert state(run)["phase"] == "doctor"
    again = tiny_run.call(go, ["go", "--resume", str(run), "--yes"], log=here / "log")
    assert again.wait() == 0 and state(run)["phase"] == "done", again.text()


@pytest.mark.full
@pytest.mark.usefixtures("no_figures")
@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGHUP, marks=pytest.mark.full)])
def test_a_signal_in_training_determines_the_exit_code(number: int, here: Path, data: Path) -> None:
    run = here / "runs" / "tiny"
    child = tiny_run.call(go, argv(data), log=here / "log")
    wait_for(lambda: len(rows(run)) >= 20, child)
    child.kill(number)
    assert child.wait() == 128 + number, child.text()
    assert "deskside go --resume runs/tiny" in child.text()
    again = tiny_run.call(go, ["go", "--resume", str(run)], log=here / "log")
    assert again.wait() == 0 and state(run)["phase"] == "done", again.text()


def without_a_terminal(words: list[str]) -> None:
    """Run `deskside go` like nohup, which ignores SIGHUP."""
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    go(words)


@pytest.mark.full
def test_nohup_ignores_sighup(here: Path, data: Path) -> None:
    run = here / "runs" / "tiny"
    child = tiny_run.call(without_a_terminal, argv(data), log=here / "log")
    wait_for(run.exists, child)
    child.kill(signal.SIGHUP)
    wait_for(lambda: len(rows(run)) >= 20, child)
    child.kill(signal.SIGHUP)
    assert child.wait() == 0 and state(run)["phase"] == "done", child.text()


@pytest.mark.full
def test_two_processes_train_and_one_goes_on(here: Path, data: Path) -> None:
    """43 seconds are too few for a probe. The processes of --gpus train within the launcher's hours."""
    run, log = here / "runs" / "tiny", here / "log"
    first = tiny_run.program(argv(data, "--gpus", "2", hours=0.012), log)
    tiny_run.kill_at_step(run, 20, lambda: first.send_signal(signal.SIGINT), lambda: first.poll() is None)
    assert first.wait(60) == 130, log.read_text()
    text = log.read_text()
    assert text.count("SIGINT: saved at step") == 1 and "deskside go --resume runs/tiny" in text
    assert "256 tokens per step, 128 on each of 2 processes" in text
    stopped = state(run)
    assert (stopped["phase"], stopped["options"]["gpus"]) == ("train", 2) and len(rows(run)) >= 20
    again = tiny_run.program(["go", "--resume", str(run), "--gpus", "1"], log)
    assert again.wait(150) == 0, log.read_text()
    done = state(run)
    assert (done["phase"], done["options"]["gpus"]) == ("done", 1)
    assert stopped["spent_seconds"] < done["spent_seconds"] < 1.2 * 0.012 * 3600
    assert [row["step"] for row in rows(run)] == list(range(1, len(rows(run)) + 1))


@pytest.mark.full
def test_ctrl_c_before_the_processes_train_is_one_line(here: Path, data: Path) -> None:
    """It comes while they import torch."""
    run, log = here / "runs" / "tiny", here / "log"
    process = tiny_run.program(argv(data, "--gpus", "2", hours=0.02), log)
    deadline = time.monotonic() + 60

    def started() -> bool:
        pids = tiny_run.descendants(process.pid)
        return len(pids) == 3 and all("libtorch" in Path(f"/proc/{pid}/maps").read_text() for pid in pids)

    while not started():
        assert process.poll() is None and time.monotonic() < deadline, log.read_text()
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    assert process.wait(60) == 130, log.read_text()
    text = log.read_text()
    assert text.endswith("\ninterrupted; continue with: deskside go --resume runs/tiny\n"), text
    assert text.count("interrupted") == 1 and not any(word in text for word in ("Traceback", "stopped")), text
    assert state(run)["phase"] == "train" and not rows(run)


def test_gpus_that_are_not_there_and_torchrun(
    here: Path, data: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    words = argv(data, "--gpus", "200", "--compute.device", "cuda")
    assert refused(words, capsys).startswith("--gpus: 200 are more than the ")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert refused(argv(data), capsys).startswith("deskside go starts the processes itself")
    assert not (here / "runs").exists()


def test_the_plan_is_for_all_gpus(here: Path, data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    def make_request(question: Any, *_: Any, **__: Any) -> Any:
        asked.append(question)
        raise UsageError("not measured")

    monkeypatch.setattr(planning, "make_request", make_request)
    options = {"preset": "124m", "data": None, "given": {}, "gpu_budget": None, "probes": "probes", "gpus": 4}
    result, _ = planning.plan(planning.PipelineRequest.of(1.0, options), 3000.0)
    assert asked[-1].gpus == 4 and result["config"]["batch"]["tokens"] == 131072
    # Processes on a CPU share its cores.
    planning.plan(
        planning.PipelineRequest.of(1.0, {**options, "given": {"compute": {"device": "cpu"}}}), 3000.0
    )
    assert asked[-1].gpus == 1


def test_launched_processes_share_the_clock(here: Path, data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """go.json contains the launcher's time, and a process that it has started does not count that time twice."""
    run = RunDirectory.create(here / "runs", "tiny", "tiny")
    options = {"preset": "tiny.toml", "data": str(data), "given": {}, "gpu_budget": None}
    options |= {"target_loss": None, "probes": "probes", "gpus": 2}
    monkeypatch.setattr(deskside, "STARTED", time.perf_counter() - 100)
    launcher = PipelineState.begin(run, 1.0, options, "deskside go", 50.0)
    assert launcher.seconds_spent() == pytest.approx(150, abs=1)
    assert PipelineState.of_launcher(run.path).seconds_spent() == pytest.approx(150, abs=1)


# Decisions of the pilot


@pytest.mark.usefixtures("no_figures")
def test_a_target_out_of_reach(
    here: Path, data: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = here / "runs" / "tiny"
    virtual(monkeypatch)
    line = refused(argv(data, "--target-loss", "0.01"), capsys, code=1)
    assert line.startswith("0.01 bits per byte is out of reach: its pilot leads to ")
    assert line.endswith("to continue anyway: deskside go --resume runs/tiny")
    assert not (run / "summary.json").exists() and json.loads((run / "pilot.json").read_text())["decision"]
    deskside.STARTED = time.perf_counter()
    assert main(["go", "--resume", str(run)]) == 0
    assert state(run)["phase"] == "done"


def two_bands(patch: pytest.MonkeyPatch) -> None:
    """Replace the plan by one whose speed is far too high, with a band that is better at the real speed."""
    original = planning.plan

    def wrong(
        request: planning.PipelineRequest, seconds: float, native_recipes: list[str]
    ) -> tuple[dict[str, Any], None]:
        found, _ = original(request, seconds, native_recipes)
        band = {
            "name": "target", "preset": "tiny", "params": 40000, "weights": 30000.0, "tokens": [1e9, 1e9, 1e9],
            "tokens_per_second": [1e8, 1e8, 1e8], "bpb": [1.0, 2.0, 9.0], "fits": "fits",
            "config": found["config"],
        }  # fmt: skip
        small = {**found["config"], "model": {**found["config"]["model"], "num_hidden_layers": 1}}
        other = {
            **band,
            "name": "safe",
            "preset": "small",
            "weights": 3e6,
            "tokens": [1e14] * 3,
            "config": small,
        }
        return {"status": "made", "reasons": [], "source": "a test", **band, "bands": [other, band]}, None

    patch.setattr(planning, "plan", wrong)


@pytest.mark.full
@pytest.mark.usefixtures("no_figures")
def test_another_band_is_trained_in_the_remaining_time(
    here: Path, data: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The pipeline continues in a new run, which has its own state and lock, with the same clock."""
    two_bands(monkeypatch)
    virtual(monkeypatch)
    monkeypatch.setattr(journals, "SAVE_SECONDS", 0.02)
    first, second = here / "runs/tiny", here / "runs/tiny-small"
    original, seen = go_command.Pipeline.report, []

    def report(pipeline: go_command.Pipeline) -> None:
        time.sleep(0.2)  # several intervals of saving the state
        seen.append(state(second)["spent_seconds"])
        with (
            pytest.raises(UsageError, match="another process is running this pipeline"),
            PipelineState.open(second).recording(),
        ):
            pass
        with PipelineState.open(first).recording():  # its lock is free
            pass
        original(pipeline)

    monkeypatch.setattr(go_command.Pipeline, "report", report)
    assert main(argv(data, "--json")) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["run"] == "runs/tiny-small" and state(first)["continued_in"] == "tiny-small"
    assert not (first / "summary.json").exists() and (second / "report.html").exists()
    assert json.loads((second / "run.json").read_text())["config"]["model"]["num_hidden_layers"] == 1
    assert result["spent_seconds"] <= LIMIT and state(second)["phase"] == "done"
    # The clock continued: the second run starts with the first one's time.
    assert rows(second)[0]["seconds"] > rows(first)[-1]["seconds"]
    assert seen[0] == pytest.approx(rows(second)[-1]["seconds"], abs=1.0)
    assert refused(["go", "--resume", str(first)], capsys).startswith(f"{second} is done")


@pytest.mark.usefixtures("no_figures")
@pytest.mark.full
@pytest.mark.parametrize("stopped", ["before", "between"])
def test_the_decision_for_another_band_survives_a_kill(
    stopped: str, here: Path, data: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kill comes before the new run has a directory, or before it has a state.
    The run is resumed in another directory.
    """
    two_bands(monkeypatch)
    virtual(monkeypatch)
    first, second = here / "runs/tiny", here / "runs/tiny-small"

    def killed(*_: Any) -> Any:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        if stopped == "before":
            patch.setattr(go_command.Pipeline, "_continue_with_band", killed)
        else:
            patch.setattr(go_command, "_create_pipeline", keeping(patch, killed))
        assert main(argv(data)) == 130
    steps = len(rows(first))
    spent = state(first)["spent_seconds"]
    assert not (second / "go.json").exists() and second.exists() == (stopped == "between")
    (here / "elsewhere").mkdir()
    monkeypatch.chdir(here / "elsewhere")
    deskside.STARTED = time.perf_counter()
    capsys.readouterr()
    assert main(["go", "--resume", "../runs/tiny", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["run"] == "../runs/tiny-small"
    assert len(rows(first)) == steps and not (first / "summary.json").exists()
    assert state(second)["phase"] == "done" and spent < rows(second)[0]["seconds"]
    assert sorted(path.name for path in (here / "runs").iterdir()) == ["tiny", "tiny-small"]


def keeping(patch: pytest.MonkeyPatch, killed: Callable[..., Any]) -> Callable[..., Any]:
    """Return `_create_pipeline` with a kill at the next creation of a state."""
    original = go_command._create_pipeline

    def create_pipeline(*arguments: Any) -> PipelineState:
        state = original(*arguments)
        patch.setattr(PipelineState, "begin", killed)
        return state

    return create_pipeline


@pytest.mark.full
def test_a_target_out_of_reach_survives_a_kill(
    here: Path, data: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first resume reports the target without a further step; the second one continues training."""
    run = here / "runs" / "tiny"
    virtual(monkeypatch)

    def killed(*_: Any) -> Any:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(PipelineState, "drop_target", killed)
        assert main(argv(data, "--target-loss", "0.01")) == 130
    steps = len(rows(run))
    deskside.STARTED = time.perf_counter()
    capsys.readouterr()
    line = refused(["go", "--resume", str(run)], capsys, code=1)
    assert line.startswith("0.01 bits per byte is out of reach: its pilot leads to ")
    assert len(rows(run)) == steps
    deskside.STARTED = time.perf_counter()
    assert main(["go", "--resume", str(run)]) == 0 and state(run)["phase"] == "done"
