"""Preparation of pairs and questions by several processes."""

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from deskside.align.grpo_data import QuestionForm, Questions, prepare_questions
from deskside.align.preference_data import PairRows, prepare_pairs
from deskside.align.prepared import FolderSpec, open_index
from deskside.data.chat.prepare_chat import ChatSpec, prepare_chat
from deskside.data.corpus import process_pool
from deskside.utils.errors import UsageError
from tests.align import tiny
from tests.data import chat_tokenizer
from tests.data.chat.tricky import ASK, PUNE, WEATHER, assistant, call, calling, result


@pytest.mark.full
@pytest.mark.parametrize("kind", ["preference", "questions"])
def test_the_same_from_one_process_and_from_several(
    kind: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The output is identical to the last byte, also with a record that cannot be used."""
    tokenizer = chat_tokenizer.make(tmp_path / "tokenizer")
    rows = [{**pair, "answer": n} for n, pair in enumerate(tiny.pairs(60))]
    rows.insert(30, {**rows[0], "prompt": 7})
    spec = FolderSpec(kind, (str(tiny.jsonl(tmp_path / "a.jsonl", rows)),), val_fraction=0.2)
    found = []
    for count in (1, 2):
        with monkeypatch.context() as patch:
            patch.setattr(process_pool, "cpu_cores", lambda count=count: count)
            patch.setattr(process_pool, "MIN_PARALLEL_ITEMS", 8)
            patch.setattr(process_pool, "ITEMS_PER_TASK", 4)
            out = tmp_path / str(count)
            if kind == "preference":
                index = prepare_pairs(spec, tokenizer, out)
            else:
                index = prepare_questions(spec, QuestionForm("Be brief."), tokenizer, out)
        (left,) = index["left_out"].values()
        assert left["count"] == 1 and "a.jsonl:31" in left["first"][0]
        found.append({path.name: path.read_bytes() for path in out.iterdir()})
    assert found[0] == found[1] and len(found[0]) >= 7


def test_a_question_is_in_one_split_only(tmp_path: Path) -> None:
    """Holds also if there are so few pairs that the last question must be held out."""
    tokenizer = chat_tokenizer.make(tmp_path / "tokenizer")
    rows = [
        {**pair, "prompt": prompt} for pair, prompt in zip(tiny.pairs(3), ("one", "two", "two"), strict=True)
    ]
    data = str(tiny.jsonl(tmp_path / "a.jsonl", rows))
    spec = FolderSpec("preference", (data,), val_fraction=1e-9)
    splits = prepare_pairs(spec, tokenizer, tmp_path / "out")["splits"]
    assert (splits["train"]["count"], splits["val"]["count"]) == (1, 2)


def test_unusable_held_out_pairs_are_not_replaced_by_a_share_of_the_others(tmp_path: Path) -> None:
    tokenizer = chat_tokenizer.make(tmp_path / "tokenizer")
    data = str(tiny.jsonl(tmp_path / "a.jsonl", tiny.pairs(60)))
    bad = str(tiny.jsonl(tmp_path / "b.jsonl", [{**tiny.pairs(1)[0], "prompt": 7}]))
    with pytest.raises(UsageError, match=r"--align\.val: no usable pairs for the val split.*b\.jsonl:1"):
        prepare_pairs(FolderSpec("preference", (data,), (bad,)), tokenizer, tmp_path / "out")


def test_a_pair_with_half_of_a_surrogate_pair_is_left_out(tmp_path: Path) -> None:
    tokenizer = chat_tokenizer.make(tmp_path / "tokenizer")
    rows = [*tiny.pairs(20), {**tiny.pairs(1)[0], "chosen": "\ud800"}]
    data = str(tiny.jsonl(tmp_path / "a.jsonl", rows))
    index = prepare_pairs(FolderSpec("preference", (data,), val_fraction=0.2), tokenizer, tmp_path / "out")
    (left,) = index["left_out"].values()
    assert left["count"] == 1 and "a.jsonl:21" in left["first"][0]


def test_the_kind_of_another_folder_is_named(tmp_path: Path) -> None:
    tokenizer = chat_tokenizer.make(tmp_path / "tokenizer")
    chats = [
        {"messages": [{"role": "user", "content": f"q{n}"}, {"role": "assistant", "content": "a"}]}
        for n in range(9)
    ]
    data = str(tiny.jsonl(tmp_path / "a.jsonl", chats))
    prepare_chat(ChatSpec((data,)), tokenizer, tmp_path / "out")
    index = json.loads((tmp_path / "out" / "index.json").read_text())
    (tmp_path / "out" / "index.json").write_text(json.dumps({**index, "vocab_size": 9}))
    with pytest.raises(
        UsageError, match="holds conversations, not preference pairs; give preference pairs with"
    ):
        open_index(tmp_path / "out", "preference", 512)


def test_questions_and_answers_with_tools_are_as_in_a_chat(tmp_path: Path) -> None:
    """The tokens of a question equal transformers' prompt. Earlier reasoning is left out, as in a chat."""
    utils = pytest.importorskip("trl.chat_template_utils")
    tokenizer = chat_tokenizer.make(tmp_path / "tokenizer", utils.qwen3_chat_template)
    theirs = AutoTokenizer.from_pretrained(tokenizer)
    prompt = [ASK, assistant("No.", reasoning_content="dry"), ASK, calling(PUNE), result("sun")]
    chosen, rejected = calling(call(["Pune"]), reasoning_content="again"), assistant("I do not know.")
    record = {
        "prompt": prompt,
        "tools": [WEATHER],
        "answer": "sun",
        "chosen": [chosen],
        "rejected": [rejected],
    }
    rows = [{**record, "prompt": [{"role": "system", "content": str(n)}, *prompt]} for n in range(20)]
    data = str(tiny.jsonl(tmp_path / "a.jsonl", rows))
    prepare_pairs(FolderSpec("preference", (data,), val_fraction=0.1), tokenizer, tmp_path / "pairs")
    prepare_questions(FolderSpec("questions", (data,)), QuestionForm(), tokenizer, tmp_path / "questions")
    render = partial(theirs.apply_chat_template, tools=[WEATHER], return_dict=False)
    prompts = {tuple(render(row["prompt"], add_generation_prompt=True)) for row in rows}
    questions = [
        question
        for split in ("train", "val")
        for question in Questions(tmp_path / "questions", split, 4096, 1, 8, 1000).questions
    ]
    assert {question.tokens for question in questions} == prompts and len(questions) == 20
    pairs = PairRows(tmp_path / "pairs", "train", 4096, 1000)
    line_break = theirs.encode("\n")
    expected = {tuple(render([*row["prompt"], answer])) for row in rows for answer in (chosen, rejected)}
    found = [pairs.text(index) for index in range(2 * sum(len(row) for row in pairs.rows))]
    assert {(*text.tokens.tolist(), *line_break) for text in found} <= expected and len(found) >= 20
    assert {tuple(text.tokens[: text.answer_start].tolist()) for text in found} <= prompts
