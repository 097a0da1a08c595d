"""Records become items or are counted as bad; examples are put before a question."""

import json
from pathlib import Path
from typing import Any

import pytest

from deskside.data.corpus.bad_input import BadInputLog
from deskside.evaluate.items import Examples, read_items, select_indices
from deskside.evaluate.tasks import SelectedTask, select
from deskside.utils.errors import UsageError

GOOD = {"query": "Question: which?", "choices": ["this", "that"], "gold": 1}


def chosen(folder: Path, name: str, rows: list[Any], file: str, shots: int | None = None) -> SelectedTask:
    lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
    (folder / file).write_text("\n".join(lines) + "\n", encoding="utf-8")
    return select([name], str(folder), shots).chosen[0]


def test_damaged_records_are_counted_with_their_places(tmp_path: Path) -> None:
    damaged: list[Any] = [
        "{",
        {"query": "a"},
        {**GOOD, "gold": 2},
        {**GOOD, "gold": -1},
        {**GOOD, "gold": "1"},
        {**GOOD, "choices": []},
        {**GOOD, "choices": ["a", 2]},
        {**GOOD, "choices": ["a", ""]},
        {**GOOD, "choices": "ab"},
        {**GOOD, "choices": None},
        '{"query": "\\ud800", "choices": ["a", "b"], "gold": 0}',
        [1],
    ]
    bad = BadInputLog()
    items = read_items(chosen(tmp_path, "arc_easy", [GOOD, *damaged, GOOD], "arc_easy.jsonl"), bad)
    assert len(items) == 2
    assert bad.total == len(damaged)
    assert [place for places in bad.examples.values() for place in places if ":4 " in place]
    with pytest.raises(
        UsageError,
        match=r"arc_easy\.jsonl: holds no item of the task arc_easy \(.*:1 .*: JSON that does not parse\)",
    ):
        read_items(chosen(tmp_path, "arc_easy", damaged, "arc_easy.jsonl"), BadInputLog())


def test_pairs_of_each_kind(tmp_path: Path) -> None:
    def pairs(name: str, file: str, row: dict[str, Any]) -> list[tuple[str, str]]:
        task = chosen(tmp_path, name, [row], file)
        (item,) = read_items(task, BadInputLog())
        return item.pairs(task.task, "before ")

    assert pairs("arc_easy", "arc_easy.jsonl", GOOD) == [
        ("before Question: which?\nAnswer:", " this"),
        ("before Question: which?\nAnswer:", " that"),
    ]
    schema = {"context_options": ["Ann", "Bob"], "continuation": "ran.", "gold": 0}
    assert pairs("winogrande", "winogrande.jsonl", schema) == [
        ("before Ann", " ran."),
        ("before Bob", " ran."),
    ]
    lambada = {"context": "a long", "continuation": "way"}
    assert pairs("lambada", "lambada_openai.jsonl", lambada) == [("before a long", " way")]
    question = {"subject": "law", "question": "Q {x}?", "choices": ["k", "l", "m", "n"], "answer": 3}
    assert pairs("mmlu", "mmlu_test.jsonl", question)[2] == (
        "before Q {x}?\nA. k\nB. l\nC. m\nD. n\nAnswer:",
        " C",
    )


def test_examples_are_others_and_solved(tmp_path: Path) -> None:
    rows = [{"query": f"Q{n}", "choices": [f"no{n}", f"yes{n}"], "gold": 1} for n in range(12)]
    task = chosen(tmp_path, "arc_easy", [*rows, rows[0]], "arc_easy.jsonl", shots=5)
    items = read_items(task, BadInputLog())
    examples = Examples(task, items)
    seen = set()
    for number in range(len(items)):
        before = examples.prefix(number)
        assert before == Examples(task, items).prefix(number)  # the choice depends only on the number
        shown = before.split("\n\n")
        assert shown.pop() == ""
        assert len(set(shown)) == len(shown) == 5
        for one in shown:
            n = int(one.split("\n")[0][1:])
            assert one == f"Q{n}\nAnswer: yes{n}"
            assert n != number % 12  # neither the item nor its duplicate
            seen.add(n)
    assert len(seen) == 12
    # One of the first item's twelve other items is its duplicate.
    with pytest.raises(UsageError, match=r"has 11 examples .* but 12 are needed; give --shots 11"):
        Examples(chosen(tmp_path, "arc_easy", [*rows, rows[0]], "arc_easy.jsonl", shots=12), items)
    task = chosen(tmp_path, "arc_easy", [*rows, rows[0]], "arc_easy.jsonl", shots=11)
    assert all(Examples(task, items).prefix(n).count("Answer:") == 11 for n in range(13))


def test_examples_of_the_same_subject(tmp_path: Path) -> None:
    rows = [
        {
            "subject": "abc"[n % 3],
            "question": f"{'abc'[n % 3]}{n}",
            "choices": ["k", "l", "m", "n"],
            "answer": 0,
        }
        for n in range(30)
    ]
    task = chosen(tmp_path, "mmlu", rows, "mmlu_test.jsonl", shots=4)
    items = read_items(task, BadInputLog())
    for number in range(30):
        shown = Examples(task, items).prefix(number).split("\n\n")[:-1]
        assert {one[0] for one in shown} == {"abc"[number % 3]}
    assert select_indices(items, 3, task.task.spread) == [0, 10, 20]
    assert select_indices(items, 3, False) == [0, 1, 2]
    assert select_indices(items, None, True) == select_indices(items, 99, False) == list(range(30))
