"""Records of hub data sets, prepared as by lm-eval's own task files."""

import importlib.util
from pathlib import Path
from types import ModuleType
from typing import Any

import datasets
import lm_eval
import pytest

from deskside.data.corpus.bad_input import BadInputLog
from deskside.evaluate.datasets import READERS
from deskside.evaluate.items import read_items
from deskside.evaluate.tasks import select


def of_lm_eval(name: str) -> ModuleType:
    """Return a module that belongs to one of lm-eval's task descriptions."""
    path = Path(lm_eval.__file__).parent / "tasks" / name
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def converted(reader: str, record: dict[str, Any]) -> dict[str, Any]:
    fields, function = READERS[reader]
    assert set(fields) <= set(record)
    return function(record)


def test_hellaswag() -> None:
    rows = [
        {
            "activity_label": "Health",
            "ctx_a": "[header] How to rest [title] Lie down. [step] Close  the eyes.",
            "ctx_b": "then SHE",
            "endings": [" sleeps. [substeps] a lot.", "wakes up", "goes  away", "[x]"],
            "label": "2",
        },
        {"activity_label": "Sport", "ctx_a": "A man runs.", "ctx_b": "", "endings": ["a", "b"], "label": "0"},
    ]
    expected = of_lm_eval("hellaswag/utils.py").process_docs(datasets.Dataset.from_list(rows))
    for row, their in zip(rows, expected, strict=True):
        mine = converted("hellaswag", row)
        assert mine == {key: their[key] for key in ("query", "choices", "gold")}


def test_winogrande() -> None:
    theirs = of_lm_eval("winogrande/preprocess_winogrande.py")
    row = {"sentence": "Ann met Bea so _ was glad.", "option1": "Ann", "option2": "Bea", "answer": "2"}
    mine = converted("winogrande", row)
    assert mine["context_options"] == theirs.doc_to_choice(row)
    assert mine["continuation"] == theirs.doc_to_target(row)
    assert mine["gold"] == theirs.doc_to_text(row) == 1


def test_copa() -> None:
    theirs = of_lm_eval("super_glue/copa/utils.py")
    for question in ("cause", "effect"):
        row = {
            "premise": "The man turned on the faucet. ",
            "question": question,
            "choice1": "The toilet filled.",
            "choice2": "Water flowed.",
            "label": 1,
        }
        mine = converted("copa", row)
        assert mine["query"] == theirs.doc_to_text(row)
        assert [f" {choice}" for choice in mine["choices"]][1] == theirs.doc_to_target(row)


def test_the_others() -> None:
    arc = {
        "question": "Why?",
        "choices": {"text": ["x", "y", "z"], "label": ["1", "2", "3"]},
        "answerKey": "3",
    }
    assert converted("arc", arc) == {"query": "Question: Why?", "choices": ["x", "y", "z"], "gold": 2}
    book = {"question_stem": "Why", "choices": {"text": ["x", "y"], "label": ["A", "B"]}, "answerKey": "B "}
    assert converted("openbookqa", book) == {"query": "Why", "choices": ["x", "y"], "gold": 1}
    piqa = {"goal": "rest", "sol1": "a", "sol2": "b", "label": 1}
    assert converted("piqa", piqa) == {"query": "Question: rest", "choices": ["a", "b"], "gold": 1}
    boolq = {"passage": "P.", "question": "is it", "label": 0}
    assert converted("boolq", boolq)["query"] == "P.\nQuestion: is it?"
    assert converted("lambada", {"text": "a b c"}) == {"context": "a b", "continuation": "c"}
    gsm8k = converted("gsm8k", {"question": "Q", "answer": "1+1=2\n#### 2"})
    assert gsm8k == {"prompt": "Q", "solution": "1+1=2", "answer": "2"}


def test_a_hub_task_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """The task is read through datasets' interface. Checks the arguments, and that a wrong record is counted."""
    asked: list[Any] = []

    def load_dataset(name: str, config: str | None, *, split: str, streaming: bool) -> list[dict[str, Any]]:
        asked.append((name, config, split, streaming))
        choices = {"text": ["x", "y"], "label": ["A", "B"]}
        return [
            {"question": f"q{n}", "choices": choices, "answerKey": key, "id": n}
            for n, key in enumerate("ABE")
        ]

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    bad = BadInputLog()
    (chosen,) = select(["arc_easy"], "hf:").chosen
    items = read_items(chosen, bad)
    assert asked == [("allenai/ai2_arc", "ARC-Easy", "test", True)]
    assert [item.gold for item in items] == [0, 1] and bad.total == 1
    assert items[1].pairs(chosen.task, "")[0] == ("Question: q1\nAnswer:", " x")
