"""Generated answers: the engine's greedy text up to a stop, and the functions that judge it, the sandbox included."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from deskside.data.corpus.bad_input import BadInputLog
from deskside.engine import device
from deskside.engine.engine import PAGE_SIZE, Engine
from deskside.engine.generate import generate
from deskside.engine.rows import Rows
from deskside.engine.sampling import GREEDY
from deskside.evaluate import generated
from deskside.evaluate.generated import generate_answers, judge_answers
from deskside.evaluate.items import Item, read_items
from deskside.evaluate.tasks import CodeTask, Generated, Match, Number, builtin_tasks, select
from tests.engine.sentencepiece import make_sentencepiece
from tests.evaluate.made_model import POSITIONS, Made, make

PROMPT = 'import math\n\n\ndef area(r):\n    """Of a circle.\n    """\n'
TESTS = "def check(candidate):\n    assert abs(candidate(2) - 12.566) < 1e-3\n    assert candidate(0) == 0\n"


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    return make(tmp_path_factory.mktemp("generated"))


def of(name: str) -> Generated:
    task = builtin_tasks()[name]
    assert isinstance(task, Generated)
    return task


def test_written_text_is_the_engines_up_to_a_stop(made: Made) -> None:
    task = of("svamp").model_copy(update={"stop": (" w", "12"), "max_new_tokens": 40})
    prompts = [made.tokenizer.encode(text).ids for text in ("the sea", "sailors sang", "7 days went")]
    done: list[int] = []
    for chat, length in ((False, 40), (True, POSITIONS // 2)):
        plain = generate(made.model, prompts, max_new_tokens=length, sampling=GREEDY, eos_tokens=[made.end])
        found = generate_answers(
            made.model, made.tokenizer, prompts, task, eos_tokens=[made.end], chat=chat, tick=done.append
        )
        for text, whole in zip(found, plain, strict=True):
            expected = made.tokenizer.decode(whole.tokens)
            for string in () if chat else task.stop:
                expected = expected.split(string)[0]
            assert text == expected
    assert done == [1] * 6


def test_a_full_card_writes_the_same_with_a_smaller_cache(
    made: Made, monkeypatch: pytest.MonkeyPatch
) -> None:
    task = of("svamp").model_copy(update={"stop": (), "max_new_tokens": 8})
    prompts = [made.tokenizer.encode(text).ids for text in ("the sea", "sailors sang", "7 days went")] * 4
    sizes: list[int] = []

    class Noted(Engine):
        def __init__(self, *given: Any, **options: Any) -> None:
            super().__init__(*given, **options)
            sizes.append(self.free_tokens)

    monkeypatch.setattr(generated, "Engine", Noted)
    found = generate_answers(made.model, made.tokenizer, prompts, task, eos_tokens=[])
    pages = 2 * PAGE_SIZE * made.model.kv_bytes_per_token(torch.float32)
    prefill = 2 * device.prefill_bytes(made.model.config, 4, device.prefill_tokens(made.model))
    monkeypatch.setattr(device, "free_bytes", lambda device: pages + prefill + 10)
    assert generate_answers(made.model, made.tokenizer, prompts, task, eos_tokens=[]) == found
    assert sizes == [12 * PAGE_SIZE, 2 * PAGE_SIZE]


def test_a_long_prompt_loses_its_beginning(made: Made) -> None:
    """Half of the positions are reserved for the answer, and the prompt keeps what fits into the rest."""
    ids = made.tokenizer.encode("the sea went to the ships, " * 30).ids
    task = of("svamp").model_copy(update={"stop": (), "max_new_tokens": 1000})
    assert len(ids) > POSITIONS
    assert generate_answers(made.model, made.tokenizer, [ids], task, eos_tokens=[]) == generate_answers(
        made.model, made.tokenizer, [ids[-POSITIONS // 2 :]], task, eos_tokens=[]
    )


def item(answers: tuple[str, ...], tests: str = "") -> Item:
    return Item("here:1", ("question",), answers, 0, "", check=(tests, "", ""))


def test_numbers_and_words_are_judged() -> None:
    number, match = of("gsm8k"), of("triviaqa")
    assert isinstance(number, Number) and isinstance(match, Match)
    items = [item(("1,200",))] * 4
    texts = [" 600 * 2\n#### 1200", "The answer is 1200.00.", "1,201", "none"]
    assert [v.passed for v in judge_answers(number, items, texts, False)] == [True, True, False, False]
    words = [item(("Onion", "the bulb onion"))] * 3
    assert [v.passed for v in judge_answers(match, words, ["onion.", "Bulb Onion", "leek"], False)] == [
        True,
        True,
        False,
    ]


def test_code_is_judged_in_the_sandbox(tmp_path: Path) -> None:
    record = {"prompt": PROMPT, "test": TESTS, "entry_point": "area"}
    (tmp_path / "HumanEval.jsonl").write_text(json.dumps(record) + "\n")
    (chosen,) = select(["humaneval"], str(tmp_path)).chosen
    assert isinstance(chosen.task, CodeTask)
    (base,) = read_items(chosen, BadInputLog())
    assert base.contexts == (PROMPT,)
    texts = ["    return math.pi * r * r\n", "    return r\n", "    return 'as\n", "```python\nx\n```"]
    verdicts = judge_answers(chosen.task, [base] * 4, texts, False)
    assert [verdict.passed for verdict in verdicts] == [True, False, False, False]
    (asked,) = read_items(chosen, BadInputLog(), chat=True)
    assert asked.contexts[0].endswith(f"```python\n{PROMPT}```")
    block = "def area(r):\n    return math.pi * r * r\n"
    texts = [
        f"Here it is:\n```python\n{block}```\nIt works.",
        f"```python\n{block.replace('* r', '', 1)}```",
        "No.",
    ]
    verdicts = judge_answers(chosen.task, [asked] * 3, texts, True)
    assert [verdict.passed for verdict in verdicts] == [True, False, False]


def test_the_answer_to_a_code_task_keeps_its_indentation(made: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    """SentencePiece's decoders drop the first space of a text, so the first line would not fit the others."""
    pieces = make_sentencepiece()
    prompt = (1, *pieces.encode("the\n", add_special_tokens=False).ids)
    said = pieces.encode("the\n    cat", add_special_tokens=False).ids[len(prompt) - 1 :]
    rows = iter(said)
    original = Rows.append
    monkeypatch.setattr(
        Rows, "append", lambda self, row, output: original(self, row, output._replace(token=next(rows)))
    )
    task = of("humaneval").model_copy(update={"max_new_tokens": len(said), "stop": ("\ndef",)})
    assert generate_answers(made.model, pieces, [prompt], task, eos_tokens=()) == ["    cat"]
