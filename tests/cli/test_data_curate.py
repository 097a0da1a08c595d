from __future__ import annotations

import json
from pathlib import Path

import pytest

from deskside.cli.data import run
from deskside.cli.main import main
from tests.data.curation.test_quality import varied

QUESTION = "Which of these twelve entirely ordinary words makes this question longer than thirteen of them?"


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    texts = [varied("en", 9), varied("en", 9) + "\n", f"{QUESTION} {varied('en', 12)}", varied("hi", 9)]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return tmp_path / "a.jsonl"


def test_curated_text_is_prepared(corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tasks = tmp_path / "tasks"
    tasks.mkdir()
    item = {"query": QUESTION, "choices": ["yes", "no"], "gold": 0}
    (tasks / "arc_easy.jsonl").write_text(json.dumps(item) + "\n")
    (tmp_path / "held.txt").write_text(varied("hi", 9)[:300])
    out = str(tmp_path / "out")
    command = ["curate", str(corpus), "--out", out, "--workers", "1"]
    assert run([*command, "--tasks-dir", str(tasks), "--against", str(tmp_path / "held.txt"), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["documents"] == {"kept": 1, "exact duplicate": 1, "contaminated": 2}
    tasks_found = {sample["detail"].split(": ")[0] for sample in report["samples"]["contaminated"]}
    assert tasks_found == {"arc_easy", str(tmp_path / "held.txt")}
    assert run([*command, "--no-resume"]) == 0
    shown = capsys.readouterr().out
    assert "exact duplicate" in shown and "report.md" in shown
    prepare = [
        "prepare",
        f"{out}/kept",
        "--out",
        str(tmp_path / "data"),
        "--vocab-size",
        "300",
        "--workers",
        "1",
    ]
    assert run([*prepare, "--json"]) == 0
    assert sum(json.loads(capsys.readouterr().out)["documents"].values()) >= 2


@pytest.mark.parametrize(
    "arguments",
    [
        ["--similarity", "5"],
        ["--similarity", "x"],
        ["--filters", "gofer"],
        ["--workers", "0"],
        ["--tasks", "arc_easy"],
        ["--tasks-dir", "no-such-folder"],
        ["--against", "no-such-file.txt"],
        ["--on-bad", "maybe"],
        ["--max-line-mb", "0"],
        ["--simmilarity", "1"],
        ["--languages", "xx"],
    ],
)
def test_wrong_options_exit_with_two(
    corpus: Path, tmp_path: Path, arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["data", "curate", str(corpus), "--out", str(tmp_path / "out"), *arguments]) == 2
    assert len(capsys.readouterr().err.strip().splitlines()) <= 4
    assert not (tmp_path / "out").exists()


def test_if_nothing_is_left_there_is_nothing_to_prepare(
    corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["data", "curate", str(corpus), "--out", str(tmp_path / "out"), "--workers", "1"]
    assert main([*command, "--languages", "brx"]) == 0  # which documents could be labelled with
    shown = capsys.readouterr().out
    assert "4 documents" in shown and "data prepare" not in shown


def test_refused_input_exits_with_two(corpus: Path, tmp_path: Path) -> None:
    with corpus.open("a") as file:
        file.write("not json\n")
    command = ["data", "curate", str(corpus), "--out", str(tmp_path / "out"), "--workers", "1"]
    assert main([*command, "--on-bad", "refuse"]) == 2
    assert main(command) == 2  # its arguments differ from those of the curation in --out
    assert main([*command, "--no-resume"]) == 0
