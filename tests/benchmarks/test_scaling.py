"""The scaling benchmark, with two CPU processes in place of two GPUs."""

import argparse
import contextlib
import json
import math
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import scaling, scaling_cases, scaling_resume, scaling_worker
from benchmarks.scaling_cases import Case, cases, forecast
from benchmarks.scaling_table import table
from benchmarks.step_profile import Activity
from deskside.data.corpus.analyze import CorpusOptions
from deskside.data.corpus.prepare import prepare
from deskside.kernels.attention import BACKENDS
from deskside.train.parallel import World
from deskside.utils.signals import Interrupted
from tests.train.tiny_run import ONE_THREAD, SHAPE, write_text


def test_cases_have_those_of_one_gpu_beside_them() -> None:
    found = cases((1, 2, 4, 8))
    assert len(set(found)) == len(found) == len({case.name for case in found})
    assert all(case.alone in found for case in found if case.mode == "replicate")
    assert {case.tokens // case.gpus for case in found[:24]} == {65_536}  # the most important ones first
    for tokens in (8 * 65_536, 65_536):
        assert Case("124m", "muon", "fp8", 8, tokens) in found
    slow = [case for case in cases((1, 2), p2p=False) if not case.p2p]
    assert slow and all(case.gpus == 2 and case.alone.p2p for case in slow)


def test_a_forecast_and_its_error() -> None:
    one, two = (Case("124m", "adamw", "bf16", gpus, gpus * 65_536) for gpus in (1, 2))
    expected = forecast(two, "h200")
    speed = expected["tokens_per_second"]
    assert expected["case"] == two.name and speed["low"] < speed["expected"] < speed["high"]
    traces = [{"exposed_ms": 3.0, "compute_ms": 9.0}, {"exposed_ms": 1.25, "compute_ms": 8.9}]
    rows = [
        {"case": case.name, **vars(case), "p10": p50 - 1, "p50": p50, "p90": p50 + 1, "peak_gib": [20.5, 20.0],
         "watts": [700.0] * case.gpus, "profile": traces}
        for case, p50 in ((one, 700_000.0), (one, 655_360.0), (one, 640_000.0), (two, 1_250_000.0))
    ]  # fmt: skip
    bus = [{"gpus": 2, "p2p": True, "bytes": size, "bus_bandwidth": size * 1e3} for size in (1, 2**29)]
    line = [cell.strip() for cell in table(rows, [expected], bus)[-1].strip("|").split("|")]
    assert line[0] == two.name and line[3:7] == ["95.4%", "97.7%", "4.86", "1.25"]
    assert line[7:10] == ["536.9", "1,400", "20.5"]
    assert line[11] == f"{speed['expected'] / 1_250_000 - 1:+.1%}"
    # A pair of cards is compared with its own two, without the slower third.
    pair = [{**row, "card": card} for row, card in zip(rows, ("0", "1", "2", "0,1"), strict=True)]
    line = [cell.strip() for cell in table(pair, [expected], bus)[-1].strip("|").split("|")]
    assert line[3:5] == [f"{1.25e6 / (2 * (700_000 + 655_360) / 2):.1%}", "95.4%"]
    without_nvml = table([{**row, "watts": []} for row in rows], [])
    assert [line.strip("|").split("|")[8].strip() for line in without_nvml[2:]] == ["", ""]


def test_exposed_communication_is_what_no_other_kernel_covers() -> None:
    kernels = [
        Activity("matmul", 0, 10_000, ()),
        Activity("ncclDevKernel_AllReduce", 8_000, 6_000, ()),
        Activity("matmul", 12_000, 1_000, ()),
    ]
    assert scaling_worker.communication(kernels, 2) == {
        "communication_ms": 3.0, "compute_ms": 5.5, "busy_ms": 7.0, "exposed_ms": 1.5, "collectives": 0.5,
    }  # fmt: skip


def test_a_row_says_which_attention_was_measured() -> None:
    config = {"model": SHAPE, "batch": {"sequence_length": 32}, "compute": {"device": "cpu"}}
    case = {"preset": "demo", "optimizer": "adamw", "tokens": 64, "config": config}
    row = scaling_worker.measure(case, {"seconds": 0.0, "profile": False}, World(torch.device("cpu")))
    assert row["attention"].keys() == {"full"} and row["attention"]["full"] in BACKENDS
    assert row["watts"] == []
    assert row["launch_seconds_of_ranks"][0] > 0 and row["sensor_seconds_of_ranks"] == [0.0]


def test_a_row_names_the_cards(monkeypatch: pytest.MonkeyPatch) -> None:
    class Properties:
        uuid = "1b2c"

    assert scaling_worker.about(World(torch.device("cpu")))["uuids"] == []
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: Properties)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H200")
    facts = scaling_worker.about(World(torch.device("cuda", 0)))
    assert (facts["uuids"], facts["device"]) == (["1b2c"], "NVIDIA H200")


class Workers:
    """Workers that write a row for each case, beside a group that ends for a reason of its own."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.started: list[tuple[int, list[str]]] = []  # group and cases of each start
        self.stop_after: int | None = (
            None  # rows, after which the command is stopped while it writes another one
        )
        self.failing = ""
        monkeypatch.setattr(scaling, "run_workers", self.run)

    def run(
        self, group: int, gpus: int, options: Any, spec: dict[str, Any], stopped: threading.Event
    ) -> str | None:
        names = [case["row"]["case"] for case in spec["cases"]]
        self.started.append((group, names))
        card = ",".join(str(group * gpus + index) for index in range(gpus))
        with Path(spec["rows"]).open("a") as file:
            for number, case in enumerate(spec["cases"]):
                if case["row"]["case"] == self.failing:
                    return "out of memory"
                line = json.dumps({**case["row"], "card": card, "number": len(self.started)}) + "\n"
                if number == self.stop_after:
                    file.write(line[:20])
                    raise InterruptedError
                file.write(line)
        return None


@pytest.mark.parametrize("finished", [False, True])
def test_after_ctrl_c_no_further_case_starts(
    finished: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """finished: the workers have written all rows of whole rows before they end."""
    started: list[int] = []
    stopped = threading.Event()

    def interrupted(group: int, gpus: int, options: Any, spec: dict[str, Any], event: threading.Event) -> str:
        started.append(group)
        stopped.set()  # as `measure` does when it is interrupted
        if finished:
            scaling.append(Path(spec["rows"]), [case["row"] for case in spec["cases"]])
        return "interrupted"

    monkeypatch.setattr(scaling, "run_workers", interrupted)
    options = argparse.Namespace(out=tmp_path, others={})
    share = [case for case in cases((1,)) if case.preset in ("124m", "indicmoe-3b")]
    assert {case.mode == "context" for case in share} == {False, True}
    assert not scaling.measure_share(share, 0, 1, math.inf, options, stopped)
    assert started == [0] and not (tmp_path / "failed.jsonl").exists()


def test_rows_of_a_stopped_call_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    workers = Workers(monkeypatch)
    given = ["measure", str(tmp_path), "--gpus", "1,2", "--only", "124m-adamw-bf16-2x65536,124m-muon-bf16"]
    workers.stop_after = 1
    with pytest.raises(InterruptedError):
        scaling.main(given)
    (stopped,) = workers.started
    assert len(stopped[1]) > 2 and not (tmp_path / "measured.jsonl").exists()
    workers.started, workers.stop_after = [], None
    assert scaling.main(given) == 0
    assert workers.started[0] == (0, stopped[1][1:])  # the first one has been measured
    rows = scaling.read_rows(tmp_path / "measured.jsonl")
    found = sorted((row["case"], row["card"]) for row in rows)
    chosen = [case for case in cases((1, 2)) if any(part in case.name for part in given[-1].split(","))]
    cards = [(case.name, case.gpus, case.is_usual) for case in chosen]
    once = [name for name, _, usual in cards if not usual]
    assert sorted(name for name, _ in found) == sorted(
        [*once, *(2 * [name for name, _, usual in cards if usual])]
    )
    assert len(set(found)) == len(found) and not list(tmp_path.glob("rows-*"))

    # The card whose row of a usual case is missing measures it, and no other.
    usual = "124m-muon-bf16-1x65536"
    kept = [row for row in rows if (row["case"], row["card"]) != (usual, "1")]
    (tmp_path / "measured.jsonl").write_text("".join(json.dumps(row) + "\n" for row in kept))
    workers.started = []
    assert scaling.main(given) == 0 and workers.started == [(1, [usual])]


def test_a_row_is_collected_once(tmp_path: Path) -> None:
    """The command may be stopped between copying a row and removing its file."""
    row = {"case": "a", "card": "0"}
    scaling.append(tmp_path / "measured.jsonl", [row])
    scaling.append(tmp_path / "rows-1-0.jsonl", [row, {**row, "card": "1"}])
    assert scaling.collect(tmp_path / "rows-1-0.jsonl", tmp_path) == 2
    assert scaling.read_rows(tmp_path / "measured.jsonl") == [row, {**row, "card": "1"}]


def test_a_failed_case_is_tried_again_by_the_next_call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    workers = Workers(monkeypatch)
    given = ["measure", str(tmp_path), "--gpus", "2", "--only", "124m-adamw-bf16"]
    workers.failing = "124m-adamw-bf16-2x65536"
    for _ in range(2):
        workers.started = []
        assert scaling.main(given) == 1
        # In a call, it is tried once, and the others are measured.
        assert sum(workers.failing in names for _, names in workers.started) == 1
    failed = scaling.read_rows(tmp_path / "failed.jsonl")
    assert [row["case"] for row in failed] == 2 * [workers.failing]
    assert len(scaling.read_rows(tmp_path / "measured.jsonl")) == 2
    workers.failing, workers.started = "", []
    assert scaling.main(given) == 0
    assert workers.started == [(0, ["124m-adamw-bf16-2x65536"])]
    assert scaling.main(given) == 0


RUN = """
import signal, sys, time
from pathlib import Path
signal.signal(signal.SIGTERM, lambda *_: sys.exit({code}))
run = Path({folder!r})
run.mkdir()
with (run / "metrics.jsonl").open("w") as file:
    for step in range(1, 5):
        print('{{"step": %d, "loss": 1.0, "tokens_per_second": 1.0}}' % step, file=file, flush=True)
        time.sleep({pause})
"""


@pytest.mark.parametrize(("code", "pause"), [(1, 2), (0, 0)], ids=["crashed", "finished"])
def test_a_run_that_was_not_stopped_is_not_resumed(
    code: int, pause: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def command(case: Case, options: Any, run: Path) -> Sequence[str]:
        script = RUN.format(code=code, pause=0 if run.name == "whole" else pause, folder=str(run))
        return [sys.executable, "-c", script]

    monkeypatch.setattr(scaling_resume, "train_command", command)
    words = ["resume", str(tmp_path / "out"), "--data", "D", "--gpus", "2", "--steps", "4"]
    with pytest.raises(SystemExit, match=f"ended with exit code {code}; .* ends with 143"):
        scaling.main([*words, "--folder", str(tmp_path)])
    assert not (tmp_path / "out" / "resume.json").exists()


def test_the_run_of_an_interrupted_resume_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def command(case: Case, options: Any, run: Path) -> Sequence[str]:
        return ["sleep", "0" if run.name == "whole" else "60"]

    def metrics(run: Path) -> list[dict[str, Any]]:
        if run.name == "stopped":
            raise Interrupted(signal.SIGTERM)
        return [{"step": step, "loss": 1.0, "tokens_per_second": 1.0} for step in range(4)]

    monkeypatch.setattr(scaling_resume, "train_command", command)
    monkeypatch.setattr(scaling_resume, "metrics", metrics)
    began = time.monotonic()
    words = ["resume", str(tmp_path / "out"), "--data", "D", "--gpus", "2", "--steps", "4"]
    assert scaling.main([*words, "--folder", str(tmp_path)]) == 143
    assert time.monotonic() - began < 30


MEASURE = """
import sys
from benchmarks import scaling, scaling_cases
scaling_cases.TOKENS, scaling_cases.PRESETS = 256, ("demo",)
sys.exit(scaling.main(sys.argv[1:]))
"""


def processes_with(text: str) -> set[int]:
    """Return the ids of the processes that still run with `text` in their command lines."""
    found = set()
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if text.encode() in (folder / "cmdline").read_bytes():
                found.add(int(folder.name))
    return found


@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGKILL, marks=pytest.mark.full)])
def test_workers_end_with_the_command(number: signal.Signals, tmp_path: Path) -> None:
    """The workers of a command that `timeout` had ended held two cards when the next command began."""
    model = [f"--model.{key}={value}" for key, value in SHAPE.items()]
    more = "--gpus 2 --only 2x256 --seconds 600 --batch.sequence_length 32 --compute.device cpu"
    words = ["measure", str(tmp_path / "out"), *more.split(), "--compute.attention", "reference", *model]
    # Their specification, which their command lines name, is in a folder of this test.
    environment = {**os.environ, **ONE_THREAD, "TMPDIR": str(tmp_path)}
    with subprocess.Popen([sys.executable, "-c", MEASURE, *words], env=environment) as process:
        try:
            end = time.monotonic() + 120
            while len(started := processes_with(f"{tmp_path}/deskside-scaling-")) < 3:
                assert process.poll() is None and time.monotonic() < end
                time.sleep(0.1)
            time.sleep(1)  # until torchrun has set its handlers
            process.send_signal(number)
            process.wait(60)
        finally:
            process.kill()
    if number == signal.SIGTERM:
        assert process.returncode == 143
    else:  # the kernel ends the workers, after the command
        while processes_with(f"{tmp_path}/deskside-scaling-") and time.monotonic() < end:
            time.sleep(0.1)
    assert len(started) == 3 and not processes_with(f"{tmp_path}/deskside-scaling-")


@pytest.mark.full
def test_measured_rows_and_resumed_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in ONE_THREAD.items():
        monkeypatch.setenv(name, value)
    for constant, made in (
        ("PRESETS", ("demo",)),
        ("TOKENS", 256),
        ("LARGE", 512),
        ("SHARDED", ()),
        ("SHARED_ROWS", ("demo",)),
        ("ROW_TOKENS", 128),
    ):
        monkeypatch.setattr(scaling_cases, constant, made)
    write_text(tmp_path / "text.txt")
    prepare([str(tmp_path / "text.txt")], tmp_path / "data", CorpusOptions(vocab_size=300))
    model = [f"--model.{key}={value}" for key, value in SHAPE.items()]
    more = "--batch.sequence_length 32 --compute.device cpu --compute.attention reference"
    given = ["--data", str(tmp_path / "data"), "--gpus", "1,2", *more.split(), *model]
    out = tmp_path / "out"
    few = [*given, "--seconds", "0.1", "--only", "demo-muon-bf16,demo-adamw-bf16-2x,context"]
    assert scaling.main(["measure", str(out), *few, "--minutes", "0"]) == 0
    assert not scaling.read_rows(out / "measured.jsonl")
    assert scaling.main(["measure", str(out), *few]) == 0
    rows = scaling.read_rows(out / "measured.jsonl")
    found = sorted((row["optimizer"], row["gpus"], row["tokens"]) for row in rows)
    one = [("muon", 1, 128), ("muon", 1, 256), ("muon", 1, 256), ("muon", 1, 512)]  # 256 on both GPUs
    two = [(name, 2, tokens) for name in ("adamw", "muon") for tokens in (256, 512)]
    context = [("adamw", gpus, 128) for gpus in (1, 2)]
    assert found == sorted(one + two + context)
    for row in rows:
        assert 0 < row["p10"] <= row["p50"] <= row["p90"] and row["finite"]
        assert len(row["peak_gib"]) == row["gpus"] == len(row["step_seconds_of_ranks"])
        shared = row["mode"] == "context" and row["gpus"] > 1
        assert row["attention"] == {"full": "gathered" if shared else "reference"} and row["uuids"] == []
        # That of all ranks' tokens, however many ranks there are
        assert row["loss_last"] < 1.2 * math.log(SHAPE["vocab_size"])
    assert scaling.main(["measure", str(out), *few]) == 0  # a case is measured once
    assert len(scaling.read_rows(out / "measured.jsonl")) == len(rows)
    assert scaling.main(["bandwidth", str(out), *given]) == 0
    assert {row["gpus"] for row in scaling.read_rows(out / "bandwidth.jsonl")} == {2}
    assert scaling.main(["table", str(out), "--markdown", str(out / "table.md")]) == 0
    assert len((out / "table.md").read_text().splitlines()) == 2 + len({row["case"] for row in rows})

    # A case that fails is recorded, and the others are measured.
    bad = [*few, "--batch.micro_tokens", "256"]
    assert scaling.main(["measure", str(tmp_path / "bad"), *bad]) == 1
    failed = {row["case"] for row in scaling.read_rows(tmp_path / "bad" / "failed.jsonl")}
    measured = {row["case"] for row in scaling.read_rows(tmp_path / "bad" / "measured.jsonl")}
    assert failed and measured and not failed & measured

    words = ["--preset", "demo", "--tokens", "64", "--steps", "40", "--gpus", "2", "--then", "1"]
    assert scaling.main(["resume", str(out), *given, *words]) == 0
    differences = json.loads((out / "resume.json").read_text())["largest_relative_difference"]
    assert differences["2"] == 0 and differences["1"] < 1e-3
