"""Plain lines in the terminal, and trackers that are off by default."""

import importlib.util
import re
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from deskside.cli.shared_options import set_trackers
from deskside.config.sections import TrackConfig
from deskside.run.directory import RunDirectory
from deskside.train.loop.callbacks import RunLog, Terminal, check_trackers, trackers
from deskside.utils.errors import UsageError


def row(step: int, **given: Any) -> dict[str, Any]:
    return {"step": step, "loss": 2.5, "tokens_per_second": 1234.0, **given}


@pytest.mark.parametrize("estimated", [False, True])
def test_plain_lines_come_now_and_then_and_at_the_end(
    estimated: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    terminal = Terminal(0, 500, estimated)
    for step in range(1, 501):
        terminal.on_step(row(step, **({"val_bpb": 1.25} if step == 200 else {})), 500)
    terminal.close()
    lines = capsys.readouterr().err.splitlines()
    time = r"  [\d.e-]+ s elapsed, about [\d.e-]+ s left"
    total = "~500" if estimated else "500"
    assert re.fullmatch(rf"step 1/{total} \(0%\)  loss 2.500  1,234 tok/s" + time, lines[0])
    last = r"step 500/500 \(100%\)  loss 2.500  val 1.250 bpb  1,234 tok/s"
    assert re.fullmatch(last + time.replace(r"about [\d.e-]+ s", "about 0 s"), lines[-1]) and len(lines) < 5


ASKED = {"tensorboard": True, "wandb": "project", "trackio": "project"}


def fake(monkeypatch: pytest.MonkeyPatch, name: str, **content: Any) -> None:
    """Create a package that looks installed."""
    module = ModuleType(name)
    module.__spec__ = ModuleSpec(name, None, origin="fake")
    for key, value in content.items():
        setattr(module, key, value)
    monkeypatch.setitem(sys.modules, name, module)


def test_trackers_are_off() -> None:
    check_trackers(TrackConfig())
    assert trackers(TrackConfig(), RunDirectory(Path("none")), {}) == []


@pytest.mark.parametrize("name", list(ASKED))
def test_a_missing_package_is_named_before_anything_is_set_up(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = TrackConfig(**{name: ASKED[name]})  # type: ignore[arg-type]
    wanted = rf"track\.{name}: the package is missing; install it with: pip install 'deskside\[{name}\]'"
    monkeypatch.setitem(sys.modules, name, None)
    for call in (check_trackers, lambda config: trackers(config, RunDirectory(tmp_path), {})):
        with pytest.raises(UsageError, match=wanted):
            call(config)
    fake(monkeypatch, name)
    check_trackers(config)
    monkeypatch.delitem(sys.modules, name)
    if importlib.util.find_spec(name) is None:
        # A folder in which a tracker wrote earlier is not a package.
        (tmp_path / name).mkdir()
        monkeypatch.syspath_prepend(tmp_path)
        assert importlib.util.find_spec(name) is not None
        with pytest.raises(UsageError, match=wanted):
            check_trackers(config)


@pytest.mark.parametrize("name", ["wandb", "trackio"])
def test_a_tracker_gets_the_numbers_of_each_step(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[Any] = []
    fake(
        monkeypatch,
        name,
        init=lambda **given: said.append(given),
        log=lambda numbers, step: said.append((numbers, step)),
        finish=lambda: said.append("finish"),
    )
    run = RunDirectory(tmp_path / "mine")
    run.path.mkdir()
    (tracker,) = trackers(TrackConfig(**{name: "project"}), run, {"seed": 1})  # type: ignore[arg-type]
    tracker.on_step(row(3, skipped=False, experts={"load": [[1.0]]}), 10)
    tracker.close()
    first = said[0]
    identity = first["id"] if name == "wandb" else first["name"].removeprefix("mine-")
    names = {"name": "mine", "id": identity} if name == "wandb" else {"name": f"mine-{identity}"}
    assert len(identity) == 8
    assert first == {"project": "project", "config": {"seed": 1}, "resume": "allow", **names}
    trackers(TrackConfig(**{name: "project"}), RunDirectory(run.path), {"seed": 1}, 3)  # type: ignore[arg-type]
    assert said.pop() == first  # a resumed run
    assert said[1] == ({"loss": 2.5, "tokens_per_second": 1234.0, "skipped": 0.0}, 3)
    assert said[2:] == ["finish"]


@pytest.mark.parametrize(
    ("value", "project"), [("true", "deskside"), (True, "deskside"), ("false", None), ("mine", "mine")]
)
def test_a_tracker_can_be_switched_on_without_a_project(value: Any, project: str | None) -> None:
    assert TrackConfig(wandb=value).wandb == TrackConfig(trackio=value).trackio == project


def test_track_names_trackers() -> None:
    given: dict[str, Any] = {"track": {"wandb": "mine"}}
    set_trackers(given, "wandb, tensorboard")
    assert given == {"track": {"wandb": "mine", "tensorboard": "true"}}
    assert TrackConfig(**given["track"]).tensorboard
    for project, expected in (("preset's", {}), (False, {"track": {"wandb": "true"}})):
        given = {}
        set_trackers(given, "wandb", [{"track": {"wandb": project}}])
        assert given == expected
    with pytest.raises(UsageError, match="mlflow"):
        set_trackers(given, "mlflow")


@pytest.mark.parametrize("first_step", [0, 2])
def test_tensorboard_gets_the_numbers_of_each_step(
    first_step: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The values of an earlier process, which may have ended before its first checkpoint, are removed first."""
    said: list[Any] = []

    class SummaryWriter:
        def __init__(self, folder: str, purge_step: int | None):
            said.append((folder, purge_step))

        def add_scalar(self, name: str, value: float, step: int) -> None:
            said.append((name, value, step))

        def close(self) -> None:
            said.append("close")

    fake(monkeypatch, "tensorboard")
    fake(monkeypatch, "torch.utils.tensorboard", SummaryWriter=SummaryWriter)
    (tracker,) = trackers(TrackConfig(tensorboard=True), RunDirectory(tmp_path), {}, first_step)
    tracker.on_step(row(3, skipped=False, experts={"load": [[1.0]]}), 10)
    tracker.close()
    assert said == [
        (str(tmp_path / "tensorboard"), first_step + 1),
        ("loss", 2.5, 3),
        ("tokens_per_second", 1234.0, 3),
        ("skipped", 0.0, 3),
        "close",
    ]
    said.clear()
    tracker.on_step(row(3), 10)  # the run went back, and repeats a step
    assert said[:3] == ["close", (str(tmp_path / "tensorboard"), 3), ("loss", 2.5, 3)]


def test_the_metrics_file_gets_every_step(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    for log in (RunLog(run), RunLog(run, active=False)):
        for step in (1, 2):
            log.step(row(step), 2)
    assert [r["step"] for r in run.read_metrics()] == [1, 2]


def test_messages_appear_above_the_progress_bar(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "80")
    terminal = Terminal(0, 10, estimated=False)
    try:
        Terminal.say("a [message]")
    finally:
        terminal.close()
    shown = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", capsys.readouterr().err)
    assert re.search(r"(^|[\r\n])a \[message\]\r?\nstep 0/10", shown)
    Terminal.say("afterwards")
    assert capsys.readouterr().err == "afterwards\n"
