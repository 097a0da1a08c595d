"""The SkyPilot task of a plan: SkyPilot can parse it, its script starts, resumes and ends, and prices are shown."""

import json
import os
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from deskside.cli import plan as command
from deskside.facts.gpus import gpus
from deskside.plan.cloud import ACCELERATORS
from deskside.utils.errors import UsageError
from tests.sources import PACKAGE

SKYPILOT = "skypilot==0.14.1"  # 459 MB with its dependencies, so it is not in the extra dev
PARSE = """
import json, sys, sky
task = sky.Task.from_yaml(sys.argv[1])
(resources,) = task.resources
mounts = {path: mount.source for path, mount in task.storage_mounts.items()}
hardware = [resources.accelerators, resources.use_spot]
print(json.dumps([task.name, task.setup, task.run, *hardware, task.file_mounts, mounts]))
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder with a prepared corpus, as far as a plan reads it."""
    (tmp_path / "corpus").mkdir()
    (tmp_path / "corpus/index.json").write_text("{}")
    text = SimpleNamespace(
        splits={"train": SimpleNamespace(tokens=10**11)}, tokenizer=SimpleNamespace(vocab_size=32768)
    )
    monkeypatch.setattr("deskside.data.reading.index.read_index", lambda _: text)
    (tmp_path / "deskside-1-py3-none-any.whl").write_text("")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def planned(
    capsys: pytest.CaptureFixture[str], *more: str, gpu: str = "rtx4090", file: str = "task.yaml"
) -> tuple[dict[str, Any], Any]:
    """Return the plan as JSON, and the task in the file."""
    arguments = [
        "--gpu",
        gpu,
        "--hours",
        "24",
        "--data.path",
        "corpus",
        "--cloud",
        file,
        "--json",
        *more,
    ]
    Path(file).unlink(missing_ok=True)  # of an earlier plan, which the command would not overwrite
    assert command.run(arguments) == 0
    return json.loads(capsys.readouterr().out), yaml.safe_load(Path(file).read_text())


def test_the_task_carries_out_the_plan(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan, task = planned(capsys, "--gpus", "2", gpu="h100sxm")
    assert plan["cloud"]["task"] == task
    assert task["resources"] == {"accelerators": {"H100-SXM": 2, "H100": 2}, "use_spot": False}
    assert task["file_mounts"] == {"~/data": str(folder / "corpus")}
    best = next(band for band in plan["bands"] if band["recommended"])
    options = best["command"].partition("--data.path corpus")[2]
    assert options and options in task["run"] and "--data.path ~/data" in task["run"]


def test_prices_of_renting_stand_beside_owning(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    hours = 24
    plan, _ = planned(capsys, "--cloud-runs", "s3://mine")
    listed = tomllib.loads((PACKAGE / "facts/prices.toml").read_text())["rent"]
    prices = next(entry["offers"] for entry in listed if entry["card"] == "RTX 4090")
    shown = {row["offer"]: row["usd"] for row in plan["cloud"]["offers"]}
    assert shown.pop("owned") == pytest.approx(plan["cost"]["own"]["usd_per_hour"] * hours, abs=0.01)
    assert shown == {f"{who}, {terms}": pytest.approx(hours * usd) for who, terms, usd, *_ in prices}
    plan, _ = planned(capsys)  # without a bucket, no spot machine
    assert {row["offer"] for row in plan["cloud"]["offers"]} == {
        "owned",
        *(offer for offer in shown if "spot" not in offer),
    }


@pytest.mark.parametrize("on_all", [[], ["--gpus", "2"]])
def test_the_script_starts_resumes_and_ends(
    on_all: list[str], folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """bash runs it with a program in place of deskside that records its arguments."""
    _, task = planned(capsys, "--cloud-runs", "s3://mine", *on_all)
    program = folder / "venv/bin/deskside"
    program.parent.mkdir(parents=True)
    program.write_text('#!/bin/sh\nprintf "%s\\n" "$@" > ~/arguments\n')
    program.chmod(0o755)
    name = task["name"].removeprefix("deskside-")
    assert name.startswith("d2")
    run = folder / "runs" / name
    run.mkdir(parents=True)

    def arguments() -> list[str]:
        (folder / "arguments").unlink(missing_ok=True)
        subprocess.run(["bash", "-c", task["run"]], env={**os.environ, "HOME": str(folder)}, check=True)
        noted = folder / "arguments"
        return noted.read_text().splitlines() if noted.exists() else []

    first = arguments()
    assert first[:2] == ["train", name] and first[first.index("--data.path") + 1] == str(folder / "data")
    assert first[-2:] == ["--runs", str(folder / "runs")] and first[first.index("--name") + 1] == name
    stages = first[first.index("--schedule.stages") + 1]
    assert tomllib.loads(f"stages = {stages}")["stages"][-1]["until"] == 1.0
    assert ("--gpus" in first) == bool(on_all)
    (run / "run.json").write_text("{}")
    assert arguments() == ["train", "--resume", str(run), *on_all]
    (run / "summary.json").write_text("{}")
    assert arguments() == []


FITS = "--gpu rtx4090 --hours 24 --data.path corpus"


@pytest.mark.parametrize(
    "arguments, problem",
    [
        ("--gpu rtx4090 --hours 24 --cloud t.yaml", "--data.path DIR"),
        ("--gpu rtx4090 --hours 24 --data.path none --cloud t.yaml", "no prepared data"),
        ("--gpu rtx4060 --hours 24 --data.path corpus --cloud t.yaml", "RTX 4060"),
        ("--gpu rtx4060 --preset 7.2b --data.path corpus --cloud t.yaml", "answer is no"),
        ("--gpu rtx4090 --hours 100000 --data.path corpus --cloud t.yaml", "answer is no"),
        (f"{FITS} --cloud-runs s3://mine", "give that too"),
        (f"{FITS} --cloud t.yaml --cloud-runs /mnt/runs", "not a bucket URL"),
        (f"{FITS} --cloud t.yaml --cloud-runs s3://", "not a bucket URL"),
        (f"{FITS} --cloud t.yaml --cloud-wheel corpus", "is no wheel"),
        (f"{FITS} --cloud corpus/index.json", "exists already"),
        (f"{FITS} --cloud none/t.yaml", "cannot be written"),
        (f"{FITS} --cloud t.yaml --explain list", "leave out --explain"),
        ("--gpu rtx5090 --claim-watts 450 --cloud t.yaml", "give a budget or a model"),
        (f"{FITS} --cloud t.yaml --preset $(x).toml", "on this machine"),
    ],
)
def test_what_cannot_be_carried_out_is_refused(arguments: str, problem: str, folder: Path) -> None:
    Path("$(x).toml").write_text('base = "124m"')
    with pytest.raises(UsageError, match=problem):
        command.run(arguments.split())
    assert not Path("t.yaml").exists() and Path("corpus/index.json").read_text() == "{}"


def test_hostile_file_names_stay_names(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A wheel's name is one word in the shell, and the task's name cannot end the comment that contains it."""
    wheel, name = "a b;touch x.whl", "my $(task).yaml"
    Path(wheel).write_text("")
    plan, task = planned(capsys, "--cloud-wheel", wheel, file=name)
    assert task["file_mounts"][f"~/{wheel}"] == str(folder / wheel)
    install = task["setup"].splitlines()[1]
    home = {**os.environ, "HOME": "/home/me"}
    words = subprocess.run(
        ["bash", "-c", f"printf '%s\n' {install}"], env=home, capture_output=True, text=True, check=True
    )
    assert words.stdout.splitlines()[-1] == f"/home/me/{wheel}"
    assert shlex.split(plan["cloud"]["start"])[-1] == name
    arguments = [*FITS.split(), "--cloud", "t\nname: other.yaml"]
    with pytest.raises(UsageError, match="control characters"):
        command.run(arguments)


def test_every_card_with_a_price_has_a_name_of_skypilot() -> None:
    listed = tomllib.loads((PACKAGE / "facts/prices.toml").read_text())["rent"]
    assert {entry["card"] for entry in listed} <= ACCELERATORS.keys() <= {gpu.name for gpu in gpus()}


@pytest.mark.full
def test_skypilots_own_parser_reads_the_task(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    python = os.environ.get("SKYPILOT_PYTHON")  # an interpreter that already has it
    if python is None:
        subprocess.run([sys.executable, "-m", "venv", folder / "sky"], check=True)
        python = str(folder / "sky/bin/python")
        made = subprocess.run(
            [python, "-m", "pip", "install", "-q", SKYPILOT], capture_output=True, text=True
        )
        if made.returncode:
            pytest.skip(f"{SKYPILOT} cannot be installed here: {made.stderr.strip().splitlines()[-1]}")
    for more in ([], ["--cloud-runs", "s3://mine/runs", "--cloud-wheel", "deskside-1-py3-none-any.whl"]):
        _, task = planned(capsys, *more)
        done = subprocess.run(
            [python, "-c", PARSE, "task.yaml"],
            env={**os.environ, "HOME": str(folder), "SKYPILOT_DISABLE_USAGE_COLLECTION": "1"},
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr
        name, setup, run, accelerators, spot, files, buckets = json.loads(done.stdout.splitlines()[-1])
        assert (name, setup, run) == (task["name"], task["setup"], task["run"])
        assert (accelerators, spot) == ({"RTX4090": 1}, bool(more))
        mounts = {**(files or {}), **buckets}
        assert mounts == {k: v if isinstance(v, str) else v["source"] for k, v in task["file_mounts"].items()}
