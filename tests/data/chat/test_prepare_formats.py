"""Preparation of records in several formats, with tools and calls: what is learned and counted."""

import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from deskside.align.samples import read_conversations
from deskside.data import tokenizer as bpe
from deskside.data.chat.formats import conversation_of
from deskside.data.chat.prepare_chat import (
    MAX_REASONS,
    NO_CONVERSATION,
    REFUSED,
    SAMPLES_FILE,
    ChatSpec,
    describe_data,
    prepare_chat,
)
from deskside.data.corpus.bad_input import NO_COLUMN
from deskside.data.reading.index import read_index
from deskside.data.reading.rows import IGNORE, PackedDataset
from tests.data import chat_tokenizer
from tests.data.chat.tricky import ASK, SUNNY, WEATHER, assistant, call, calling, result
from tests.data.chat_tokenizer import FORGETFUL, talk

ZONE = {"type": "object", "properties": {"zone": {"type": "integer"}}}
OTHER = {"type": "function", "function": {"name": "clock", "parameters": ZONE}}
NOON = [calling(call('{"zone": 5}', name="clock")), result("noon"), assistant("Noon.")]
MIXED: list[dict[str, Any]] = [
    {"messages": [ASK, calling(call(["Pune"])), result("sun"), SUNNY], "tools": [WEATHER]},
    {"messages": [ASK, *NOON], "tools": [OTHER]},
    {"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}], "system": "s"},
    {"instruction": "a", "input": "b", "output": "c"},
    {"messages": [ASK, assistant("No.", reasoning_content="dry"), ASK, SUNNY]},
]
BAD = [
    {"messages": [{"role": "user", "content": [{"type": "image", "image": "a.png"}]}, SUNNY]},
    {"messages": [{**ASK, "name": "Ada"}, SUNNY]},
    {"messages": [ASK, SUNNY, {**ASK, "name": "Ada"}, SUNNY]},
]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    utils = pytest.importorskip("trl.chat_template_utils")
    return chat_tokenizer.make(tmp_path_factory.mktemp("tokenizer"), utils.qwen3_chat_template)


def write(path: Path, records: list[dict[str, Any]]) -> str:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return str(path)


def learnt(folder: Path, split: str) -> list[str]:
    """Return the learned text of every document."""
    tokenizer, dataset = bpe.load(folder), PackedDataset(folder, split, 2048)
    rows = dataset.rows_by_number(np.arange(dataset.num_rows))
    targets, edges = rows.targets.ravel(), [*rows.boundaries.tolist(), rows.targets.size]
    parts = [targets[a:b] for a, b in itertools.pairwise(edges)]
    texts = [tokenizer.decode(p[p != IGNORE].tolist(), skip_special_tokens=False) for p in parts]
    return sorted(text for text in texts if text)


def test_formats_and_what_is_not_learnt_are_counted(tmp_path: Path, tokenizer: Path) -> None:
    val = write(tmp_path / "val.jsonl", MIXED)
    questions = [{**record, "extra": n} for n, record in enumerate(MIXED)]
    train = [{"messages": talk(f"question {n}", "a", "b", "c")} for n in range(10)]
    spec = ChatSpec((write(tmp_path / "a.jsonl", train + questions + BAD),), (val,))
    index = prepare_chat(spec, tokenizer, tmp_path / "data", quiet=True)
    assert index.chat is not None
    assert index.chat.formats == {"OpenAI": 13, "ShareGPT": 1, "Alpaca": 1}
    # all of them have two questions or a call
    assert index.chat.unlearnt_turns == 0 and index.chat.rewritten == 13
    # Other fields of a record are not part of the conversation.
    assert index.duplicates_of_validation == len(MIXED)
    left = list(index.bad_input["train"].items())
    assert [(reason.split(":")[0], found["count"]) for reason, found in left] == [
        (NO_CONVERSATION, 1),
        (REFUSED, 2),
    ]
    assert left[1][1]["first"][0].endswith("(message 1)") and left[1][1]["first"][1].endswith("(message 3)")
    thought = "<think>\n\n</think>\n\n"
    weather, clock = (
        f'{thought}<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call><|im_end|>'
        for name, arguments in (("weather", '{"place": ["Pune"]}'), ("clock", '{"zone": 5}'))
    )
    assert learnt(tmp_path / "data", "val") == sorted(
        [
            f"{weather}{thought}{SUNNY['content']}<|im_end|>",
            f"{clock}{thought}Noon.<|im_end|>",
            f"{thought}b<|im_end|>",
            f"{thought}c<|im_end|>",
            f"<think>\ndry\n</think>\n\nNo.<|im_end|>{thought}{SUNNY['content']}<|im_end|>",
        ]
    )
    samples = read_conversations(tmp_path / "data" / SAMPLES_FILE)
    assert samples == [conversation_of(record)[1] for record in MIXED[:4]]
    lines: list[str] = []
    describe_data(index, lines.append)
    assert any("13 x OpenAI" in line and "1 x ShareGPT" in line for line in lines)


def test_parquet_with_tools_is_read_like_jsonl(tmp_path: Path, tokenizer: Path) -> None:
    """In a parquet file, every call has the arguments of all calls, with null for those that it lacks."""
    records = MIXED[:2] * 20
    for n, record in enumerate(records):
        records[n] = {**record, "messages": [{"role": "system", "content": str(n)}, *record["messages"]]}
        calls = [m["tool_calls"][0]["function"] for m in records[n]["messages"] if "tool_calls" in m]
        calls[0]["arguments"] = {"place": ["Pune"]} if n % 2 == 0 else {"zone": 5}
    table = pa.Table.from_pylist(records)
    pq.write_table(table, tmp_path / "a.parquet")
    assert "null" in json.dumps(table.to_pylist()[0]["tools"])
    write(tmp_path / "a.jsonl", records)
    for kind in ("parquet", "jsonl"):
        prepare_chat(ChatSpec((str(tmp_path / f"a.{kind}"),)), tokenizer, tmp_path / kind, quiet=True)
    for split in ("train", "val"):
        assert learnt(tmp_path / "parquet", split) == learnt(tmp_path / "jsonl", split) != []


def test_a_parquet_file_without_conversations_is_named(tmp_path: Path, tokenizer: Path) -> None:
    pq.write_table(pa.table({"text": ["a"]}), tmp_path / "a.parquet")
    source = write(tmp_path / "a.jsonl", [{"messages": talk(str(n), "a")} for n in range(20)])
    index = prepare_chat(
        ChatSpec((source, str(tmp_path / "a.parquet"))), tokenizer, tmp_path / "data", quiet=True
    )
    assert list(index.bad_input["train"]) == [NO_COLUMN]


def test_only_the_last_turn(tmp_path: Path) -> None:
    tokenizer = chat_tokenizer.make(tmp_path, FORGETFUL)
    source = write(tmp_path / "a.jsonl", [{"messages": talk(f"{n}", "a", "b", "c")} for n in range(20)])
    index = prepare_chat(ChatSpec((source,), turns="last"), tokenizer, tmp_path / "data", quiet=True)
    assert index.chat is not None and index.chat.unlearnt_turns == 20


def test_an_index_of_an_earlier_version_is_read(tmp_path: Path, tokenizer: Path) -> None:
    source = write(tmp_path / "a.jsonl", [{"messages": talk(f"{n}", "a")} for n in range(20)])
    prepare_chat(ChatSpec((source,)), tokenizer, tmp_path / "data", quiet=True)
    file = tmp_path / "data" / "index.json"
    index = json.loads(file.read_text())
    for name in ("formats", "unlearnt_turns", "rewritten"):
        del index["chat"][name]
    file.write_text(json.dumps({**index, "chat": {**index["chat"], "last_turn_only": 3}}))
    found = read_index(tmp_path / "data")
    assert found.chat is not None and found.chat.formats == {}
    describe_data(found, lambda line: None)
    (tmp_path / "samples.json").write_text(json.dumps([talk("a", "b")]))
    assert read_conversations(tmp_path / "samples.json")[0].messages == talk("a", "b")


def test_many_reasons_are_counted_together(tmp_path: Path, tokenizer: Path) -> None:
    bad = [{"messages": [{"role": f"role{n}", "content": "a"}, SUNNY]} for n in range(MAX_REASONS + 5)]
    good = [{"messages": talk(str(n), "a")} for n in range(20)]
    spec = ChatSpec((write(tmp_path / "a.jsonl", bad + good),))
    index = prepare_chat(spec, tokenizer, tmp_path / "data", quiet=True)
    left = index.bad_input["train"]
    assert left.pop(REFUSED)["count"] == 5 and len(left) == MAX_REASONS
