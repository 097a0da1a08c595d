"""Exit codes of every command for a directory that is damaged (1), missing, or something else (2)."""

import json
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest

from deskside.cli.main import main
from tests.serve import made_run
from tests.test_hostile_files import begin_pipeline, commands


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return made_run.make(tmp_path_factory.mktemp("good")).path


@pytest.fixture(scope="module")
def hugging_face(good: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("exported") / "hf"
    assert main(["export", str(good), "--out", str(out)]) == 0
    return out


def edited(name: str, *keys: str, value: Any) -> Callable[[Path], None]:
    """Return a function that sets one value of a JSON file."""

    def edit(folder: Path) -> None:
        content = place = json.loads((folder / name).read_text())
        for key in keys[:-1]:
            place = place[key]
        place[keys[-1]] = value
        (folder / name).write_text(json.dumps(content))

    return edit


def cut(pattern: str) -> Callable[[Path], None]:
    """Return a function that keeps the first half of every file that a pattern names."""

    def cut_files(folder: Path) -> None:
        files = list(folder.glob(pattern))
        assert files
        for file in files:
            file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])

    return cut_files


RUN: dict[str, Callable[[Path], None]] = {
    "cut run.json": cut("run.json"),
    "no model": edited("run.json", "config", "model", value=None),
    "impossible model": edited("run.json", "config", "model", "hidden_size", value=-1),
    "schema version": edited("run.json", "schema_version", value=99),
    "tokenizer": cut("tokenizer.json"),
    "checkpoints": cut("checkpoints/*/model.safetensors"),
    "manifests": cut("checkpoints/*/manifest.json"),
}
HUGGING_FACE: dict[str, Callable[[Path], None]] = {
    "cut config.json": cut("config.json"),
    "impossible model": edited("config.json", "hidden_size", value=-1),
    "another shape": edited("config.json", "intermediate_size", value=80),
    "weights": cut("model.safetensors"),
    "tokenizer": cut("tokenizer.json"),
    "tokenizer_config": cut("tokenizer_config.json"),
    "generation_config": cut("generation_config.json"),
}


def quick(names: Iterable[str], *chosen: str) -> list[Any]:
    """Return the names as parameters of a test. All but the chosen ones belong to the long form."""
    return [name if name in chosen else pytest.param(name, marks=pytest.mark.full) for name in names]


def check(path: Path, folder: Path, is_run: bool, capsys: Any) -> None:
    """Check that every command that needs the damaged part exits with 1 and prints one line."""
    for argv in commands(path, folder, is_run):
        if argv[0] in ("report", "data"):  # they report what can still be read, and read no weights
            continue
        code = main(argv)
        said = capsys.readouterr().err
        assert code == 1 and "unexpected" not in said and "Traceback" not in said, (argv, code, said)


@pytest.mark.parametrize("harm", quick(RUN, "cut run.json", "checkpoints"))
def test_a_damaged_run_ends_with_1(
    harm: str, good: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "runs" / "damaged"
    shutil.copytree(good, path)
    begin_pipeline(path)
    RUN[harm](path)
    # A damaged checkpoint or tokenizer only matters for --resume: tests/test_hostile_files.py, tests/train.
    check(path, tmp_path, "run.json" in harm or "model" in harm or "version" in harm, capsys)


@pytest.mark.parametrize("harm", quick(HUGGING_FACE, "cut config.json", "weights"))
def test_a_damaged_hugging_face_directory_ends_with_1(
    harm: str, hugging_face: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "hf"
    shutil.copytree(hugging_face, path)
    HUGGING_FACE[harm](path)
    check(path, tmp_path, False, capsys)


@pytest.mark.parametrize("kind", quick(["nothing", "file", "empty folder"], "empty folder"))
def test_a_path_that_is_no_model_ends_with_2(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "path"
    if kind == "file":
        path.write_text("words")
    elif kind == "empty folder":
        path.mkdir()
    for argv in commands(path, tmp_path, True):
        if argv[0] != "data":  # a file may be a tokenizer
            assert main(argv) == 2, (argv, capsys.readouterr().err)


def test_damaged_data_and_studies_end_with_1(good: Path, tmp_path: Path, capsys: Any) -> None:
    data, study = tmp_path / "data", tmp_path / "study"
    shutil.copytree(json.loads((good / "run.json").read_text())["config"]["data"]["path"], data)
    options = ["--data.path", str(data), "--schedule.steps", "2", "--runs", str(tmp_path / "runs")]
    reading = [["data", "verify", str(data)], ["data", "show", str(data)], ["train", "demo", *options]]
    study.mkdir()
    for harm, argvs in (
        (edited("index.json", "schema_version", value=99), reading[1:2]),
        (cut("index.json"), reading),
    ):
        harm(data)
        for argv in argvs:
            assert main(argv) == 1, (argv, capsys.readouterr().err)
    for name in ("results.json", "study.json"):
        (study / name).write_text("{")
    for argv in (["report", str(study)], ["study", str(study), "--resume"]):
        assert main(argv) == 1, (argv, capsys.readouterr().err)
    shutil.rmtree(data)
    shutil.rmtree(study)
    for argv in (*reading[:2], ["report", str(study)], ["study", str(study), "--resume"]):
        assert main(argv) == 2, (argv, capsys.readouterr().err)
