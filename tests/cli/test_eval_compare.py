"""`deskside eval`: translations scored as in sacrebleu, and two models compared on the same items."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy.stats import binomtest, ttest_rel

from deskside.cli.eval import run as run_eval
from deskside.model.init import InitOptions, initialize
from deskside.model.transformer import Transformer
from deskside.utils.errors import UsageError
from deskside.weights.hf import save_hf
from tests.evaluate.made_model import Made, make, sentence

sacrebleu = pytest.importorskip("sacrebleu")
TOML = """
[to_sea]
kind = "translation"
files = ["to_sea.jsonl"]
prompt = "{en}\\n"
references = "sea"
answer = "{sea[0]}"
max_new_tokens = 12
"""
Eval = Callable[..., dict[str, Any]]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    return make(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def other(made: Made, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of the same shape with other weights."""
    model = Transformer(made.model.config)
    initialize(model, seed=9, options=InitOptions(head_std=0.4, output="fan_in"))
    return save_hf(model, made.model.config, made.folder, tmp_path_factory.mktemp("other") / "other")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    rng = np.random.default_rng(0)
    rows = [
        {"en": sentence(rng, 3, 6), "sea": [sentence(rng, 4, 9) for _ in range(1 + n % 2)]} for n in range(24)
    ]
    choices = [
        {"query": sentence(rng, 3, 9), "choices": [sentence(rng, 1, 4) for _ in range(2)], "gold": n % 2}
        for n in range(300)
    ]
    (folder / "to_sea.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")
    (folder / "arc_easy.jsonl").write_text("".join(json.dumps(row) + "\n" for row in choices), "utf-8")
    (folder / "tasks.toml").write_text(TOML, "utf-8")
    return folder


@pytest.fixture
def evaluated(made: Made, data: Path, capsys: pytest.CaptureFixture[str]) -> Eval:
    def run(*arguments: str) -> dict[str, Any]:
        common = ["--tasks", "to_sea,arc_easy", "--tasks-dir", str(data), "--shots", "1", "--json"]
        assert run_eval([str(made.folder), *common, *arguments]) == 0
        result: dict[str, Any] = json.loads(capsys.readouterr().out)
        return result

    return run


def records(path: Path, task: str) -> list[dict[str, Any]]:
    rows = [json.loads(line) for line in path.read_text("utf-8").splitlines()]
    return [row for row in rows if row["task"] == task]


def test_scores_are_sacrebleus(evaluated: Eval, data: Path, tmp_path: Path) -> None:
    found = evaluated("--items", str(tmp_path / "items.jsonl"))["tasks"]["to_sea"]
    rows = [json.loads(line) for line in (data / "to_sea.jsonl").read_text("utf-8").splitlines()]
    texts = [record["text"] for record in records(tmp_path / "items.jsonl", "to_sea")]
    streams = [[row["sea"][n] if n < len(row["sea"]) else None for row in rows] for n in range(2)]
    assert len(set(texts)) > 3
    assert found["chrf"] == pytest.approx(sacrebleu.corpus_chrf(texts, streams).score, abs=1e-3)
    assert found["chrf++"] == pytest.approx(sacrebleu.corpus_chrf(texts, streams, word_order=2).score)
    assert found["bleu"] == pytest.approx(sacrebleu.corpus_bleu(texts, streams).score)
    assert found["low"] < found["chrf"] < found["high"] and found["n"] == 24
    assert "accuracy" not in found and any("nrefs:var" in text for text in found["signatures"])


def test_two_models(evaluated: Eval, other: Path, tmp_path: Path) -> None:
    """A comparison with the other model and with the file of its items gives the same numbers, and scipy's."""
    mine, theirs = tmp_path / "mine.jsonl", tmp_path / "theirs.jsonl"
    compared = evaluated("--compare", str(other), "--items", str(mine))["compare"]["tasks"]
    back = evaluated("--compare", str(mine))["compare"]["tasks"]
    assert all(each["difference"] == 0 for each in back.values())
    arguments = ["--tasks", "to_sea,arc_easy", "--tasks-dir", str(data_of(mine)), "--shots", "1"]
    assert run_eval([str(other), *arguments, "--items", str(theirs), "--json"]) == 0
    a, b = ([r["right"] for r in records(file, "arc_easy")] for file in (mine, theirs))
    found = compared["arc_easy"]
    assert found["difference"] == pytest.approx(np.mean(a) - np.mean(b)) and found["low"] < found["high"]
    only = (
        sum(x and not y for x, y in zip(a, b, strict=True)),
        sum(y and not x for x, y in zip(a, b, strict=True)),
    )
    assert sum(only) > 4 and found["p"] == pytest.approx(binomtest(only[0], sum(only)).pvalue)
    a, b = ([r["chrf"] for r in records(file, "to_sea")] for file in (mine, theirs))
    assert compared["to_sea"]["p"] == pytest.approx(ttest_rel(a, b).pvalue)


def test_chrf_is_printed_as_it_is(
    made: Made, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also below 1, where it could be mistaken for a share of right answers."""
    items = tmp_path / "items.jsonl"
    arguments = [
        str(made.folder),
        "--tasks",
        "to_sea",
        "--tasks-dir",
        str(data),
        "--limit",
        "4",
        "--shots",
        "1",
    ]
    assert run_eval([*arguments, "--items", str(items)]) == 0
    assert re.search(r"chrF2 \d+\.\d in 1\s+translation\.", capsys.readouterr().out)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("deskside.evaluate.run_task.sentence_chrf", lambda text, answers: 0.5)
        rows = [{**row, "chrf": 0.25} for row in records(items, "to_sea")]
        items.write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")
        capsys.readouterr()
        assert run_eval([*arguments, "--compare", str(items)]) == 0
    line = next(x for x in reversed(capsys.readouterr().out.splitlines()) if x.startswith("to_sea"))
    assert [float(number) for number in line.split()[1:4]] == pytest.approx([0.5, 0.2, 0.2], abs=0.11)


def data_of(items: Path) -> Path:
    """Return the folder of the data, from the origin of an item."""
    return Path(json.loads(items.read_text("utf-8").splitlines()[0])["origin"].rsplit(":", 1)[0]).parent


def test_refused(made: Made, data: Path, tmp_path: Path) -> None:
    items = tmp_path / "items.jsonl"
    arguments = [str(made.folder), "--tasks", "arc_easy", "--tasks-dir", str(data), "--shots", "0"]
    assert run_eval([*arguments, "--items", str(items)]) == 0
    damaged = tmp_path / "damaged.jsonl"
    damaged.write_text("{}\n")
    foreign = tmp_path / "foreign.jsonl"
    foreign.write_text(items.read_text("utf-8").replace('"right":', '"wrong":'), "utf-8")
    for wrong, message in (
        ([*arguments, "--limit", "5", "--compare", str(items)], "--limit"),
        ([*arguments, "--compare", str(damaged)], "line 1"),
        (["runs/none", *arguments[1:], "--compare", str(foreign)], "another kind"),
        ([*arguments, "--compare", "runs/none"], "no such directory"),
        ([str(made.folder), "--compare", str(items)], "without --tasks"),
    ):
        with pytest.raises(UsageError, match=message) as error:
            run_eval(wrong)
        assert "\n" not in str(error.value)


def test_without_sacrebleu(made: Made, data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "sacrebleu", None)
    with pytest.raises(UsageError, match="deskside\\[bleu\\]"):
        run_eval([str(made.folder), "--tasks", "to_sea", "--tasks-dir", str(data)])
