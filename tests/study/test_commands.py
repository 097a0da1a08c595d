"""`deskside study` used like a person does, with trials that really train."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from deskside.cli.main import main
from deskside.study import results as files
from deskside.study.execute.devices import Device
from deskside.study.execute.journal import FILE, replay_file
from deskside.study.execute.runner import Runner
from deskside.study.execute.study_folder import StudyFolder
from deskside.utils.errors import RunError
from tests.study import tiny_study
from tests.study.fake_trials import ROOT
from tests.train import tiny_run

STUDY = """
name = "tiny"
question = "Do two layers beat one?"
base = "demo"
[budget]
steps_per_arm = 12
[set]
model = {{ vocab_size = 300, hidden_size = 32, num_attention_heads = 2, head_dim = 16, intermediate_size = 64 }}
data = {{ path = "{data}", sources = [] }}
batch = {{ sequence_length = 32, tokens = 256 }}
evaluate.tokens = 500
checkpoint.every = "4 steps"
compute = {{ device = "cpu", attention = "reference" }}
[[factor]]
name = "depth"
[[factor.level]]
name = "one"
set.model.num_hidden_layers = 1
[[factor.level]]
name = "two"
set.model.num_hidden_layers = 2
"""


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def study(here: Path, data: Path) -> Path:
    (here / "tiny.toml").write_text(STUDY.format(data=data))
    return here / "tiny.toml"


@pytest.fixture
def no_report(monkeypatch: pytest.MonkeyPatch) -> None:
    """Disable plots, which take longer than such small trials. The first test below has them."""
    monkeypatch.setattr("deskside.report.write.write_report", lambda folder: folder / "report.html")


def refused(argv: list[str], capsys: pytest.CaptureFixture[str], code: int = 2) -> str:
    """Return the one-line error of a command that is refused and prints nothing else."""
    assert main(["study", *argv]) == code
    shown = capsys.readouterr()
    assert shown.out == "" and shown.err.count("\n") == 1, shown
    return shown.err.removeprefix("deskside: ").strip()


def test_from_the_definition_to_the_report(
    study: Path, here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert main(["study", "tiny.toml", "--json"]) == 0
    shown = capsys.readouterr()
    summary = json.loads(shown.out)
    assert summary["status"] == "complete" and summary["trials"] == {"finished": 2}
    folder = here / "studies" / "tiny"
    assert Path(summary["report"]) == folder.relative_to(here) / "report.html"
    for name in ("study.toml", "study.json", "journal.jsonl", "results.json", "results.parquet", "report.md"):
        assert (folder / name).stat().st_size > 0
    assert (folder / "study.toml").read_text() == study.read_text()
    assert "Do two layers beat one?" in shown.err and "[2/2 done]" in shown.err
    results = files.read(folder)
    assert results.complete and results.groups[0].budget == "12 steps"
    for arm in results.arms:
        (trial,) = arm.trials
        run = folder / trial.run
        assert trial.metrics["steps"] == 12 and trial.metrics["val_bpb"] > 0
        # An ordinary run with the arm's configuration. What only a resume needs has been deleted.
        config = json.loads((run / "run.json").read_text())["config"]
        assert config["model"]["num_hidden_layers"] == {"one": 1, "two": 2}[arm.levels["depth"]]
        assert config["seed"] == 1 and (run / "tokenizer.json").exists()
        assert not (run / "checkpoints").exists() and not (run / "model").exists()
        assert trial.metrics["total_seconds"] > trial.metrics["seconds"] > 0
    more = next(arm for arm in results.arms if arm.id != arm.baseline)
    assert {c.metric for c in more.comparisons} >= {"val_bpb", "tokens_per_second", "parameters"}

    # It is not restarted by accident, and resuming it runs nothing.
    line = refused(["tiny.toml"], capsys)
    assert line.startswith("studies/tiny: already holds a study")
    before = (folder / FILE).read_bytes()
    with monkeypatch.context() as patch:
        patch.setattr("deskside.report.write.write_report", lambda folder: folder / "report.html")
        assert main(["study", "tiny.toml", "--resume"]) == 0
    capsys.readouterr()
    for named in (["--out", "studies/tiny"], ["tiny.toml"]):
        assert main(["study", *named, "--resume", "--dry-run"]) == 0
        shown = capsys.readouterr().out
        assert shown == "study tiny: 2 of 2 trials are done\n"
    assert (folder / FILE).read_bytes() == before
    capsys.readouterr()

    # A different definition under the same name is not mixed with it.
    study.write_text(study.read_text().replace("hidden_size = 32", "hidden_size = 64"))
    line = refused(["tiny.toml", "--resume"], capsys)
    assert "arm depth_one has a different configuration" in line

    # More seeds add their trials.
    assert main(["study", "studies/tiny", "--resume", "--seeds", "2", "--dry-run", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["left"] == 2
    assert files.read(folder).seeds == [1]


@pytest.mark.usefixtures("no_report")
def test_a_study_whose_trials_all_fail_says_why(
    study: Path, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Uses an attention backend that needs a GPU, a mistake that only shows when a trial begins."""
    argv = ["study", "tiny.toml", "--only", "depth=one", "--compute.attention", "cudnn", "--out", "x"]
    assert main(argv) == 1
    shown = capsys.readouterr()
    assert "refused after" in shown.err or "failed after" in shown.err
    assert "deskside: x: no trial finished" in shown.err and "cudnn" in shown.err
    assert "Traceback" not in shown.err
    assert files.read(here / "x").complete


@pytest.mark.usefixtures("no_report")
def test_a_full_disk_is_one_line_that_says_how_to_go_on(
    here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(runner: Runner, todo: object) -> None:
        raise RunError("s/runs/x: cannot be written: No space left on device")

    monkeypatch.setattr(Runner, "run", full)
    monkeypatch.setattr("deskside.study.execute.runner.prepare_all", lambda arms, say: None)
    tiny_study.begin(here / "s")
    assert main(["study", "s", "--resume"]) == 1
    last = capsys.readouterr().err.splitlines()[-1]
    assert "No space left on device" in last and last.endswith("deskside study s --resume")


@pytest.mark.usefixtures("no_report")
def test_the_commands_that_continue_keep_the_models_and_the_gpus(
    here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("deskside.cli.study.choose", lambda devices, kinds: [Device("cpu")])
    monkeypatch.setattr("deskside.study.execute.runner.prepare_all", lambda arms, say: None)
    folder = tiny_study.begin(here / "s")
    argv = ["study", "s", "--resume", "--devices", "1", "--keep-models"]
    runner = tiny_study.runner(folder, depth_two__tied_no__s1="memory")
    runner.run(runner.remaining())
    monkeypatch.setattr(Runner, "run", lambda runner, trials: "SIGTERM")
    assert main(argv) == 143
    assert capsys.readouterr().err.endswith(f"deskside {' '.join(argv)}\n")
    monkeypatch.setattr(Runner, "run", lambda runner, trials: None)
    assert main(argv) == 0
    assert f"deskside {' '.join(argv)} --again oom" in capsys.readouterr().out


def test_a_recorded_study_takes_no_other_options(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tiny_study.begin(here / "s", seeds=2)
    for argv, option in (
        (["--only", "depth=two"], "--only"),
        (["--tokens-per-arm", "1M"], "--tokens-per-arm"),
        (["--optim.lr", "0.1"], "--optim"),
    ):
        for how in ("--resume", "--dry-run"):
            assert refused(["s", how, *argv], capsys).startswith(f"{option}: ")
    assert "begun with 2, not 1; give as many or more" in refused(["s", "--resume", "--seeds", "1"], capsys)


def test_a_dry_run_prints_the_plan_and_makes_nothing(
    study: Path, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["study", "tiny.toml", "--dry-run", "--seeds", "3"]) == 0
    shown = capsys.readouterr()
    assert "6 trials of 2 arms" in shown.out and max(map(len, shown.out.splitlines())) <= 80
    assert main(["study", "tiny.toml", "--dry-run", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["trials"] == 2
    assert not (here / "studies").exists()


def test_a_dry_run_refuses_data_as_the_study_does(
    study: Path, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    line = refused(["tiny.toml", "--dry-run", "--data.path", "nowhere"], capsys)
    assert "nowhere is not prepared data" in line and line.startswith("arm ")
    assert main(["study", "tiny.toml", "--data.path", "nowhere"]) == 2
    assert line in capsys.readouterr().err.splitlines()[-1]
    assert not (here / "studies").exists()


def test_a_dry_run_needs_no_torch(study: Path) -> None:
    dry_run = "import sys; from deskside.cli.main import main; main(['study', 'tiny.toml', '--dry-run']); "
    code = dry_run + "print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "False"


def test_a_dry_run_of_a_directory_says_what_is_left(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tiny_study.begin(here / "s")
    runner = tiny_study.runner(folder, depth_two__tied_no__s1="memory")
    runner.run(runner.remaining()[:3])
    capsys.readouterr()
    before = sorted(path.stat().st_mtime_ns for path in folder.path.rglob("*"))
    assert main(["study", "s", "--dry-run"]) == 0
    assert "study tiny: 3 of 4 trials are done" in capsys.readouterr().out
    assert main(["study", "s", "--resume", "--again", "oom", "--dry-run", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    left = 1 + sum(trial["status"] == "oom" for trial in told["trials"])
    assert told["left"] == left and len(told["trials"]) == 4
    assert sorted(path.stat().st_mtime_ns for path in folder.path.rglob("*")) == before


def command(argv: list[str], here: Path, log: Path) -> "subprocess.Popen[bytes]":
    with log.open("ab") as file:
        return subprocess.Popen(
            [sys.executable, "-m", "deskside", "study", *argv],
            cwd=here,
            stdout=file,
            stderr=file,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )


def wait_for(condition: Any, process: "subprocess.Popen[bytes]", log: Path, seconds: float = 120) -> None:
    until = time.monotonic() + seconds
    while not condition():
        assert process.poll() is None and time.monotonic() < until, log.read_text()
        time.sleep(0.02)


@pytest.mark.usefixtures("no_report")
def test_ctrl_c_ends_the_study_and_a_resume_continues_its_trial(study: Path, here: Path) -> None:
    study.write_text(study.read_text().replace("steps_per_arm = 12", "steps_per_arm = 300"))
    log = here / "log"
    process = command(["tiny.toml", "--only", "depth=one"], here, log)
    run = here / "studies" / "tiny" / "runs" / "depth_one-s1"
    wait_for(lambda: len(tiny_run.rows(run)) >= 2, process, log)
    process.send_signal(signal.SIGINT)
    assert process.wait(60) == 130, log.read_text()
    text = log.read_text()
    assert "Traceback" not in text and text.count("deskside study studies/tiny --resume") == 1, text
    saved = tiny_run.rows(run)[-1]["step"]
    assert saved < 300 and not (run / "summary.json").exists()
    assert main(["study", "studies/tiny", "--resume"]) == 0
    assert f"resumed at step {saved}" in tiny_run.events(run)
    assert [row["step"] for row in tiny_run.rows(run)] == list(range(1, 301))


@pytest.mark.usefixtures("no_report")
@pytest.mark.parametrize("number", [signal.SIGINT, pytest.param(signal.SIGKILL, marks=pytest.mark.full)])
@pytest.mark.full
def test_a_trial_that_was_interrupted_goes_on_to_the_same_numbers(
    number: signal.Signals, study: Path, here: Path
) -> None:
    study.write_text(study.read_text().replace("steps_per_arm = 12", "steps_per_arm = 300"))
    log, argv = here / "log", ["tiny.toml", "--only", "depth=one"]
    process = command(argv, here, log)
    run = here / "studies" / "tiny" / "runs" / "depth_one-s1"
    wait_for(lambda: len(tiny_run.rows(run)) >= 6, process, log)
    process.send_signal(number)
    assert process.wait(60) == (130 if number == signal.SIGINT else -9), log.read_text()
    if number == signal.SIGINT:
        assert "deskside study studies/tiny --resume" in log.read_text()
    assert main(["study", "studies/tiny", "--resume"]) == 0
    assert "resumed at step" in tiny_run.events(run)
    past = replay_file(here / "studies" / "tiny" / FILE)["depth_one", 1]
    assert past.status == "finished" and past.attempts == 2
    straight = tiny_run.train(
        here, StudyFolder(here / "studies" / "tiny").read().arms[0].config, "straight"
    ).run.path
    assert tiny_run.curve(run) == tiny_run.curve(straight)


@pytest.mark.full
def test_the_quick_matrix_killed_half_way_and_resumed(here: Path) -> None:
    """All 16 arms are accounted for, the report is complete, and it takes three minutes and a resume."""
    log, folder = here / "log", here / "studies" / "matrix16-quick"
    began = time.monotonic()
    process = command(["matrix16-quick"], here, log)

    def ended() -> int:
        past = replay_file(folder / FILE)
        return sum(one.status == "finished" for one in past.values())

    wait_for(lambda: ended() >= 8, process, log, 600)
    process.kill()
    process.wait()
    done = {key: one for key, one in replay_file(folder / FILE).items() if one.status == "finished"}
    resumed = command(["matrix16-quick", "--resume"], here, log)
    assert resumed.wait(600) == 0, log.read_text()
    took = time.monotonic() - began
    results = files.read(folder)
    assert len(results.arms) == 16 and results.complete
    assert {arm.status for arm in results.arms} == {"finished"}
    past = replay_file(folder / FILE)
    assert all(past[key].attempts == 1 for key in done) and sum(o.attempts for o in past.values()) <= 17
    report = (folder / "report.html").read_text()
    assert all(arm.label in report for arm in results.arms)
    assert (folder / "report.md").exists() and list((folder / "plots").glob("*.svg"))
    print(f"{took:.0f} s in all")
