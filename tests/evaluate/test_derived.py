"""Fields that a task derives: XCOPA as lm-eval renders it, conditional texts, and refused definitions."""

import json
from pathlib import Path
from typing import Any

import pytest

from deskside.data.corpus.bad_input import BadInputLog
from deskside.evaluate.items import Item, read_items
from deskside.evaluate.tasks import select
from deskside.utils.errors import UsageError

XCOPA = ("et", "ht", "id", "it", "qu", "sw", "ta", "th", "tr", "vi", "zh")
ROWS: list[dict[str, Any]] = [
    {
        "premise": "La donna uscì. ",
        "question": "cause",
        "choice1": "Era tardi.",
        "choice2": "Pioveva.",
        "label": 0,
    },
    {
        "premise": "Il cane abbaiò.",
        "question": "effect",
        "choice1": "Fuggì.",
        "choice2": "Dormì.",
        "label": 1,
    },
]


def items(folder: Path, name: str, rows: list[dict[str, Any]], toml: str = "") -> list[Item]:
    (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")
    if toml:
        (folder / "tasks.toml").write_text(f'[{name}]\nfiles = ["{name}.jsonl"]\n{toml}', "utf-8")
    return read_items(select([name], str(folder)).chosen[0], BadInputLog())


@pytest.mark.parametrize("language", XCOPA)
def test_xcopa_is_lm_evals(language: str, tmp_path: Path) -> None:
    utils = pytest.importorskip("lm_eval.tasks.xcopa.utils")
    made = items(tmp_path, f"xcopa_{language}", ROWS)
    for item, row in zip(made, ROWS, strict=True):
        assert item.contexts == (getattr(utils, f"doc_to_text_{language}")(row),)
        assert list(item.answers) == utils.doc_to_choice(row) and item.gold == row["label"]


CONDITIONAL = """
kind = "match"
references = "answer"
derived.hint = { of = "context", map = { "" = "", null = "" }, default = "Context: {context}\\n" }
derived.kind = { of = "easy", map = { true = "easy", false = "hard" } }
derived.head = { of = "id", default = "{hint}This is {kind}.\\n" }
prompt = "{head}{question}"
"""


def test_conditional_texts(tmp_path: Path) -> None:
    rows = [
        {"id": 1, "context": "It rains.", "easy": True, "question": "Wet?", "answer": "yes"},
        {"id": 2, "context": "", "easy": False, "question": "Dry?", "answer": ["no", "nope"]},
        {"id": 3, "easy": False, "question": "Hot?", "answer": "no"},
        {"id": 4, "easy": "perhaps", "question": "Damaged?", "answer": "no"},
        {"id": 5, "easy": True, "question": "Damaged, too?", "answer": 5},
    ]
    made = items(tmp_path, "mine", rows, CONDITIONAL)
    assert [item.contexts[0] for item in made] == [
        "Context: It rains.\nThis is easy.\nWet?",
        "This is hard.\nDry?",
        "This is hard.\nHot?",
    ]
    assert [item.answers for item in made] == [("yes",), ("no", "nope"), ("no",)]


@pytest.mark.parametrize(
    ("key", "message"),
    [
        ('derived.a = { of = "x" }', "neither map nor default"),
        ('derived.a = { of = "x", default = "{" }', "not a valid template"),
        ('derived.a = { map = { b = "c" } }', "derived.a.of"),
    ],
)
def test_refused(key: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=message):
        items(tmp_path, "mine", [{}], f'kind = "match"\nreferences = "r"\nprompt = "p"\n{key}\n')
