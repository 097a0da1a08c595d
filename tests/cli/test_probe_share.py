"""`deskside probe --share` with fake measurements of a GPU: what is written, and what is refused before measuring."""

import getpass
import io
import json
import socket
from pathlib import Path
from typing import Any

import pytest

from deskside.cli import probe as cli_probe
from deskside.cli.main import main
from deskside.cli.probe import ProbeOptions, probe
from deskside.doctor import examine
from deskside.measurements.card_report import read_report
from deskside.utils.errors import UsageError
from tests.measurements.made_report import H200

FAKES = "tests.probe.fakes:"


@pytest.fixture(autouse=True)
def _on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pretend that this machine has an H200 whose doctor report names the host, a user's folder and a UUID."""
    checks = [
        {"id": "bf16", "verdict": "works", "reason": "", "name": "BF16"},
        {"id": "step_bf16", "verdict": "crashed", "reason": f"{Path.home()}/x.so: no such file", "name": "a"},
    ]
    machine = {"host": socket.gethostname(), "gpus": [{"uuid": "GPU-5e1ec7ed-0000"}]}
    monkeypatch.setattr(cli_probe, "this_machine", lambda: H200)
    monkeypatch.setattr(examine, "examine", lambda *given: {"machine": machine, "checks": checks})


def share(tmp_path: Path, **options: Any) -> int:
    given = {"depth": "4", "sequence": "512", "probes": str(tmp_path / "probes"), "yes": True}
    given |= {"share": str(tmp_path / "card.json")}
    return probe(ProbeOptions(**given | options), FAKES + "measure_point", FAKES + "measure_card")


def test_the_file_is_what_was_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert share(tmp_path, sequence="512,1024", json=True) == 0
    out, err = capsys.readouterr()
    assert len(json.loads(out)["points"]) == 2
    text = (tmp_path / "card.json").read_text()
    assert text in err
    report = read_report(tmp_path / "card.json")
    assert report.card == "NVIDIA H200" and report.memory_bytes == H200.memory_bytes
    assert report.doctor == {"bf16": "works", "step_bf16": "crashed"}
    assert report.benchmark is not None and report.benchmark.copy_bytes_per_second == 1e12
    assert {point.sequence_length for point in report.points} == {512, 1024}
    measured = {p["spec"]["sequence_length"]: p["measured"] for p in json.loads(out)["points"]}
    for point in report.points:
        assert point.tokens_per_second == pytest.approx(measured[point.sequence_length]["tokens_per_second"])
        assert point.watts == 321.5
    for private in (
        socket.gethostname(),
        getpass.getuser(),
        str(tmp_path),
        str(Path.home()),
        "GPU-5e1e",
        "/",
    ):
        assert private not in text, private


def test_stored_points_are_shared_without_measuring_again(tmp_path: Path) -> None:
    assert share(tmp_path) == 0
    assert share(tmp_path, share=str(tmp_path / "again.json")) == 0
    assert read_report(tmp_path / "again.json").points == read_report(tmp_path / "card.json").points


@pytest.mark.parametrize(("answer", "written"), [("YES\n", True), ("\n", False), ("", False)])
def test_it_asks_before_it_writes(
    answer: str, written: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    terminal = io.StringIO(answer)
    monkeypatch.setattr(terminal, "isatty", lambda: True)
    monkeypatch.setattr("sys.stdin", terminal)
    assert share(tmp_path, yes=False) == 0
    assert (tmp_path / "card.json").exists() is written


@pytest.mark.parametrize("case", ["exists", "no folder", "no terminal", "no GPU"])
def test_what_cannot_be_written_is_refused_before_measuring(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options: dict[str, Any] = {}
    if case == "exists":
        (tmp_path / "card.json").touch()
    if case == "no folder":
        options["share"] = str(tmp_path / "none" / "card.json")
    if case == "no terminal":
        monkeypatch.setattr("sys.stdin", io.StringIO())
        options["yes"] = False
    if case == "no GPU":
        monkeypatch.undo()
    with pytest.raises(UsageError, match="--share") as error:
        share(tmp_path, **options)
    assert "\n" not in str(error.value)
    assert not (tmp_path / "probes").exists()


def test_yes_needs_share(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["probe", "--yes"]) == 2
    assert "--share" in capsys.readouterr().err


def test_too_few_minutes_for_the_doctor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def out_of_time(quick: bool, say: Any, seconds: float) -> None:
        assert seconds < 6
        raise TimeoutError

    monkeypatch.setattr(examine, "examine", out_of_time)
    with pytest.raises(UsageError, match="--minutes"):
        share(tmp_path, minutes=0.1)
