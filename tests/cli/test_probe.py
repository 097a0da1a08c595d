"""`deskside probe` with real child processes whose measurements are faked, real signals, and one-line errors."""

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
from deskside.cli.probe import ProbeOptions, probe
from deskside.measurements.store import make_key, make_row, open_store, this_machine
from deskside.utils.errors import RunError, UsageError
from tests.measurements.test_store import RESULT, SPEC
from tests.utils.test_child_process import gone_within

FAKES = "tests.probe.fakes:"


def call(tmp_path: Path, target: str = "measure_point", **options: Any) -> int:
    given = ProbeOptions(
        **{"depth": "4,16", "sequence": "512,8192", "probes": str(tmp_path / "probes"), **options}
    )
    return probe(given, FAKES + target, FAKES + "measure_card")


def test_json_store_and_picture(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert call(tmp_path, json=True) == 0
    out, err = capsys.readouterr()
    found = json.loads(out)
    assert [p["status"] for p in found["points"]] == ["ok", "oom", "ok", "oom"]
    assert {p["origin"] for p in found["points"]} == {"measured"}
    assert found["card"]["result"]["matmul_peak"] == 2e13
    first = found["points"][0]
    assert first["modelled"]["tokens_per_24h"] == pytest.approx(
        86400 * first["measured"]["tokens_per_second"]
    )
    assert Path(found["map"]).read_bytes().startswith(b"\x89PNG")
    assert len(Path(found["store"]).read_text().splitlines()) == 5
    assert "1 of 4: 4x256 2/2" in err and "20.00 TFLOP/s" in err
    # The second call measures nothing and says so.
    before = Path(found["store"]).read_bytes()
    assert call(tmp_path) == 0
    out, err = capsys.readouterr()
    assert "4 of 4 points were stored before" in out
    assert err == ""
    assert Path(found["store"]).read_bytes() == before


def test_without_a_model_it_calibrates(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert call(tmp_path, depth=None, sequence=None, json=True) == 0
    points = json.loads(capsys.readouterr().out)["points"]
    assert len(points) == 5 and {p["status"] for p in points} == {"ok"}
    assert max(p["params"] for p in points) < 1e7, "this machine has no GPU, so the shapes are tiny"


def test_rows_of_another_driver_are_not_used(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    store, machine = open_store(tmp_path / "probes"), this_machine()
    key = make_key(machine, SPEC)
    store.add(make_row("point", {**key, "machine": {**key["machine"], "torch": "2.9.1"}}, "ok", RESULT))
    line = store.path(machine.card).read_bytes()
    assert call(tmp_path, depth="4", sequence="512") == 0
    err = capsys.readouterr().err
    assert f"1 row was measured with torch 2.9.1 (here {machine.torch}), and not used" in err
    assert store.path(machine.card).read_bytes().startswith(line)
    assert len(store.rows(machine)) == 2


def test_crashes_are_stored_and_only_crashes_are_an_error(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="no point could be measured: the process was ended by SIGABRT"):
        call(tmp_path, "crash")
    rows = open_store(tmp_path / "probes").rows(this_machine(), "point")
    assert {row["status"] for row in rows} == {"failed"}


def test_too_few_minutes_for_a_point(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"--minutes: 0\.05 is too short"):
        call(tmp_path, minutes=0.05)


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--depth", "7"], "depth 7: must be even and at least 2"),
        (["--depth", "-2"], "--depth: '-2' is not a positive"),
        (["--depth", "12,,14"], "--depth: '12,,14' has an empty value"),
        (["--depth", "0"], "--depth: '0' is not a positive"),
        (["--depth", "9" * 5000], "--depth: 99999999999999999999... cannot be measured; use at most 128"),
        (["--depth", "12,1000000"], "--depth: 1000000 cannot be measured; use at most 128"),
        (["--depth", "12", "--sequence", "1000000000"], "--sequence: 1000000000 cannot be measured; use at"),
        (["--preset", "124m", "--sequence", "1048577"], "--sequence: 1048577 cannot be measured; use at"),
        (["--preset", "125m"], "125m: no such preset"),
        (["--preset", "124m", "--depth", "12"], "--preset and --depth"),
        (["--preset", "124m", "--sequence", "many"], "--sequence: 'many' is not a positive"),
        (["--preset", "124m", "--optimizer", "sgd"], "--optimizer: 'sgd' is not one of muon, adamw"),
        (["--preset", "124m", "--precision", "fp17"], "--precision: 'fp17' is not one of auto"),
        (["--preset", "124m", "--checkpointing", "all"], "--checkpointing: 'all' is not one of none"),
        (["--sequence", "512"], "--sequence: has no effect without a model"),
        (["--minutes", "-3"], "--minutes: "),
        (["--minutes", "nan"], "--minutes: "),
        (["--minutes", "inf"], "--minutes: "),
        (["--deptth", "12"], "did you mean --depth?"),
        (["--probes", "FILE"], "is not a folder"),
    ],
)
def test_mistakes_are_one_line(
    argv: list[str], words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "FILE").write_text("")
    argv = [str(tmp_path / "FILE") if word == "FILE" else word for word in argv]
    argv += [] if "--probes" in argv else ["--probes", str(tmp_path / "probes")]
    assert main(["probe", *argv]) == 2
    out, err = capsys.readouterr()
    assert words in err and err.count("\n") == 1 and out == ""
    assert not (tmp_path / "probes").exists()


def test_a_damaged_store_is_an_error_and_not_changed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = open_store(tmp_path).path(this_machine().card)
    path.write_text("rubbish\n")
    assert main(["probe", "--depth", "4", "--probes", str(tmp_path)]) == 2
    err = capsys.readouterr().err
    assert f"{path}:1: this is not JSON" in err and err.count("\n") == 1
    assert path.read_text() == "rubbish\n"


def test_a_second_probe_at_the_same_time_is_refused(tmp_path: Path) -> None:
    card = this_machine().card
    with open_store(tmp_path / "probes").measuring(card):
        with pytest.raises(UsageError, match=rf"another probe \(process {os.getpid()}\) is measuring"):
            call(tmp_path)
        assert not open_store(tmp_path / "probes").path(card).exists()
    assert call(tmp_path) == 0
    with open_store(tmp_path / "probes").measuring(card):  # everything is stored, so nothing is measured
        assert call(tmp_path, depth="4", sequence="512") == 0


def test_an_unwritable_store_is_an_error_before_measuring(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("deskside.utils.child_process.run", lambda *given: pytest.fail("it is measured"))
    assert main(["probe", "--depth", "4", "--probes", "/proc/probes"]) == 2
    err = capsys.readouterr().err
    assert "/proc/probes: results could not be stored there" in err and err.count("\n") == 1


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_the_command_and_its_child_process(tmp_path: Path, number: int) -> None:
    pid = tmp_path / "pid"
    code = (
        "import sys; from deskside.cli.probe import ProbeOptions, probe\n"
        f"sys.exit(probe(ProbeOptions(depth='4', sequence='512', probes={str(tmp_path / 'probes')!r}),"
        f" {FAKES + 'measure_point_slowly'!r}, {FAKES + 'measure_card'!r}))"
    )
    command = subprocess.Popen(
        [sys.executable, "-c", code],
        env={**os.environ, "DESKSIDE_TEST_PID": str(pid)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    began = time.monotonic()
    while not (pid.exists() and pid.read_text()) and time.monotonic() - began < 60:
        time.sleep(0.05)
    command.send_signal(number)
    out, err = command.communicate(timeout=60)
    assert command.returncode == 128 + number and out == ""
    assert "interrupted: 0 points measured and stored" in err
    assert "Traceback" not in err
    assert gone_within(int(pid.read_text()), 10)
    assert [row["kind"] for row in open_store(tmp_path / "probes").rows(this_machine())] == ["card"]


@pytest.mark.full
def test_the_time_limit_interrupts_a_measurement(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DESKSIDE_TEST_PID", str(tmp_path / "pid"))
    # With real estimates, no measurement would start within such a short limit.
    monkeypatch.setattr("deskside.probe.sweep.BENCHMARK_SECONDS", {"cpu": 0.0, "cuda": 0.0})
    monkeypatch.setattr("deskside.probe.grid.SETUP_SECONDS", {"cpu": 0.0, "cuda": 0.0})
    began = time.monotonic()
    with pytest.raises(UsageError, match="too short"):
        call(tmp_path, "measure_point_slowly", depth="2", sequence="64", minutes=12 / 60)
    assert 5 < time.monotonic() - began < 12
    assert open_store(tmp_path / "probes").rows(this_machine(), "point") == []
