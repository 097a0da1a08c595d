"""`deskside search`: refused options, the dry run, and a real search on a small text."""

import json
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from deskside.cli.main import main
from deskside.study.search.outcome import read_outcome
from tests.study.search.made_search import begin
from tests.train import tiny_run

QUICK = ["--minutes-per-trial", "0.05", "--schedule.length", "3s", "--compute.device", "cpu"]


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "100")
    return tmp_path


@pytest.mark.parametrize(
    ("argv", "begins"),
    [
        (["demo"], "--hours: is missing"),
        (["demo", "--hours", "x"], "--hours: "),
        (["demo", "--hours", "1", "--minutes-per-trial", "0"], "--minutes-per-trial: "),
        (["demo", "--hours", "1", "--minutes-per-trial", "-1"], "--minutes-per-trial: "),
        (["demo", "--hours", "nan"], "--hours: "),
        (["demo", "--hours", "inf"], "--hours: "),
        (["demo", "--hours", "-1"], "--hours: must be above zero"),
        (["demo", "--hours", "1", "--over", "optim.rate"], "--over optim.rate: cannot be searched"),
        (["demo", "--hours", "0.001"], "--hours: "),
        (["demo", "--hours", "1", "--trials", "1"], "--trials: "),
        (["demo", "--hours", "1", "--seeds", "0"], "--seeds: "),
        (["demo", "--hours", "1", "--sampler", "grid"], "--sampler: "),
        (["demo", "--hours", "1", "--resume"], "searches/demo: there is no search"),
        (["124m", "--hours", "9"], "data.path: "),
        (["demo", "--hours", "1", "--schedule.length", "2 epochs"], "schedule.length: "),
        (["demo", "--hours", "1", "--optim.scale", "false", "--schedule.length", "9h"], "optim.scale: "),
        (["demo", "--hours", "1", "--over", "optim.lr,model.num_hidden_layers", "--schedule.length", "9h"],
         "--over model.num_hidden_layers: "),
        (["demo", "--hours", "1", "--over", "model.residual_multiplier=0.5:3", "--schedule.length", "9h"],
         "--over model.residual_multiplier: "),
        (["demo", "--hours", "1", "--compute.device", "cpu", "--batch.sequence_length", "16777216",
          "--batch.tokens", "16777216", "--model.max_position_embeddings", "16777216"],
         "the default configuration needs"),
    ],
)  # fmt: skip
def test_wrong_usage_is_one_line(
    argv: list[str], begins: str, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["search", *argv]) == 2
    shown = capsys.readouterr()
    assert shown.out == "" and shown.err.count("\n") == 1
    assert shown.err.removeprefix("deskside: ").startswith(begins), shown.err
    assert not (here / "searches").exists()


def test_without_optuna_nothing_is_written(
    here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "optuna", None)  # an import fails
    assert main(["search", "demo", "--hours", "1", *QUICK]) == 2
    assert "deskside[search]" in capsys.readouterr().err
    assert not (here / "searches").exists()


def test_a_dry_run_says_what_is_searched_and_makes_nothing(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = ["search", "demo", "--hours", "1", "--schedule.length", "2h", "--dry-run"]
    assert main(argv) == 0
    assert "model.depth" in capsys.readouterr().out
    assert main([*argv, "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan["target"]["seconds"] == 7200 and plan["trial"]["seconds"] < 300
    assert plan["trial"]["parameters"] < plan["target"]["parameters"] and "CompleteP" in plan["proxy"]
    assert plan["confirmation"]["at_target"] is False
    assert {one["key"] for one in plan["space"]} >= {"optim.lr", "batch.tokens", "model.depth"}
    assert not (here / "searches").exists()


@pytest.mark.parametrize(
    ("argv", "code"),
    [
        (["searches/demo"], 0),
        (["searches/demo/"], 0),  # as a shell completes it
        (["searches/demo", "--resume"], 0),
        (["demo", "--resume"], 0),
        (["--out", "searches/demo", "--resume"], 0),
        (["124m", "--out", "searches/demo", "--resume"], 2),
        (["demo", "--resume", "--hours", "1", "--seeds", "5"], 0),
        (["demo", "--resume", "--seeds", "3"], 2),  # the default, but not of this search
        (["demo", "--resume", "--hours", "2"], 2),
    ],
)
def test_a_search_is_continued_with_its_own_preset_and_options_only(
    argv: list[str], code: int, here: Path
) -> None:
    command = "deskside search demo --hours 1 --seeds 5"
    begin(here / "searches" / "demo", command=command)
    assert main(["search", *argv, "--dry-run"]) == code


@pytest.mark.full
def test_ctrl_c_ends_the_search_and_a_resume_continues_its_trial(here: Path, data: Path) -> None:
    (here / "tiny.toml").write_text(tiny_run.SMALLEST_PRESET)
    log, search = here / "log", here / "searches" / "tiny"
    run = search / "trials" / "runs" / "trial-0000-s1"

    def interrupted(argv: list[str], moment: Callable[[], bool]) -> None:
        """Start the search, send SIGINT at the moment, and check how it ends."""
        log.unlink(missing_ok=True)
        process = tiny_run.program(["search", *argv], log)
        deadline = time.monotonic() + 120
        while not moment():
            assert process.poll() is None and time.monotonic() < deadline, log.read_text()
            time.sleep(0.02)
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 130, log.read_text()
        text = log.read_text()
        assert "Traceback" not in text and text.count("deskside search searches/tiny --resume") == 1, text

    def ended() -> list[str]:
        return [trial.status for trial in read_outcome(search).trials if trial.status == "finished"]

    argv = ["tiny.toml", "--data.path", str(data), *QUICK]
    argv += ["--hours", "0.1", "--over", "optim.lr", "--trials", "2", "--seeds", "1"]
    interrupted(argv, lambda: len(tiny_run.rows(run)) >= 3)
    saved = tiny_run.rows(run)[-1]["step"]
    assert not ended() and not (run / "summary.json").exists()
    interrupted(["searches/tiny", "--resume"], lambda: bool(ended()))
    assert f"resumed at step {saved}" in tiny_run.events(run)
    assert [row["step"] for row in tiny_run.rows(run)] == list(range(1, tiny_run.rows(run)[-1]["step"] + 1))


@pytest.mark.full
def test_from_the_text_to_a_preset_that_trains(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    argv = [
        "search",
        "demo",
        "--hours",
        "0.06",
        "--trials",
        "4",
        "--seeds",
        "2",
        "--over",
        "optim.lr,batch.tokens",
    ]
    assert main([*argv, *QUICK, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    outcome = read_outcome(here / "searches" / "demo")
    assert (
        told["answer"] == outcome.answer and "oom" not in told["trials"] and told["trials"]["finished"] >= 1
    )
    assert outcome.spent_seconds <= 0.06 * 3600 + 30
    assert main(["search", "searches/demo", "--resume", "--hours", "2"]) == 2
    assert main(["search", *argv[1:], *QUICK]) == 2  # it is not restarted by accident
    assert (
        main(["search", *argv[1:], *QUICK, "--dry-run"])
        == main(["search", "searches/demo", "--dry-run"])
        == 0
    )
    capsys.readouterr()
    assert main(["search", *argv[1:], *QUICK, "--resume", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["trials"] == told["trials"]
    assert main(["report", "searches/demo"]) == 0
    if told["preset"] is not None:
        assert main(["train", told["preset"], "--steps", "3", "--name", "x"]) == 0
        assert tiny_run.rows(here / "runs" / "x")
