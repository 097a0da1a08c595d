"""Tokens and masks of tricky conversations, compared with TRL's training templates.

TRL has marked copies of some templates, in which {% generation %} surrounds the assistant's turns. We are given the
model's own template, without marks, and must find the same turns. `EXPLAINED` lists every conversation that differs,
with the reason; `docs/alignment.md` explains the reasons.
"""

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from jinja2 import TemplateError
from tokenizers import AddedToken
from transformers import AutoTokenizer

from deskside.data import tokenizer as bpe
from deskside.data.chat import chat_template
from deskside.data.chat.chat_template import ChatTemplate
from deskside.data.chat.messages import NotRendered, checked_conversation
from tests.data import chat_tokenizer
from tests.data.chat.tricky import CONVERSATIONS, Record


@dataclass(frozen=True)
class Family:
    """A template in TRL's package (by its name there), its special tokens, and its start token."""

    template: str
    special: tuple[str, ...]
    start: str | None = None
    line_break: bool = False  # TRL also learns the line break after the end of a turn
    parts: bool = False  # the template renders contents only as lists of parts


FAMILIES = {
    "Qwen3": Family("qwen3", ("<|im_start|>", "<|im_end|>"), line_break=True),
    "Llama 3": Family(
        "llama3",
        ("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
        start="<|begin_of_text|>",
    ),
    "Gemma 2": Family("gemma", ("<bos>", "<start_of_turn>", "<end_of_turn>"), start="<bos>", line_break=True),
    "Gemma 3": Family(
        "gemma3", ("<bos>", "<start_of_turn>", "<end_of_turn>"), start="<bos>", line_break=True
    ),
    "Mistral": Family("llava_next", ("<s>", "</s>"), start="<s>", parts=True),  # of llava-v1.6-mistral-7b
}
PLAIN_TOKENS = ("<think>", "</think>", "<tool_call>", "</tool_call>")  # added tokens that are not special
CALLS = {name for name, record in CONVERSATIONS.items() if any("tool_calls" in m for m in record["messages"])}
REASONING = {"reasoning", "reasoning in all answers", "reasoning in the first answer"}
TOOLS = {"tools", "tools and system"}
# Reasons for differences: those for which we refuse a record that TRL renders incompletely ...
REFUSED = {
    "calls": "does not write the (tool_calls|reasoning_content)",
    "reasoning": "does not write the reasoning_content",
    "tools": "does not write tools",
    "name": "does not write the name",
    "variable": "has no variable 'enable_thinking'",
    "text": "leaves out some of its content",
    "role": "does not know the role 'developer'",
}
# ... and those for which both render it.
FORGED = {"forged question": "forged", "forged answer": "forged"}
WITHOUT_TOOLS = (
    dict.fromkeys(CALLS, "calls")
    | dict.fromkeys(REASONING, "reasoning")
    | dict.fromkeys(TOOLS, "tools")
    | {"name": "name", "no thinking": "variable", "lists of text parts": "parts"}
    | FORGED
)
EMPTY_THOUGHT = "<think>\n\n</think>\n\n"
EXPLAINED: dict[str, dict[str, str]] = {
    "Qwen3": FORGED
    | {
        "assistant first": "no question",
        "assistant first after system": "no question",
        "only the assistant": "no question",
        "question like a result": "no question",
        "text before a thought": "text",
        "arguments as text": "arguments",
        "results in another order": "order",
        "lists of text parts": "parts",
        "developer": "role",
        "name": "name",
        "no thinking": "prompt",
    },
    "Llama 3": WITHOUT_TOOLS,
    "Gemma 2": WITHOUT_TOOLS,
    "Gemma 3": WITHOUT_TOOLS,
    "Mistral": {name: reason for name, reason in WITHOUT_TOOLS.items() if reason != "parts"},
}
# Counts of conversations: equal, refused by both, explained. They are the table in docs/alignment.md.
COUNTS = {
    "Qwen3": (52, 0, 13),
    "Llama 3": (44, 0, 21),
    "Gemma 2": (30, 26, 9),
    "Gemma 3": (34, 21, 10),
    "Mistral": (43, 13, 9),
}


@pytest.fixture(scope="module", params=FAMILIES)
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def folder(name: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer with the model's own template."""
    folder, family = tmp_path_factory.mktemp("chat"), FAMILIES[name]
    tokenizer = bpe.train(chat_tokenizer.TEXT, 420)
    tokenizer.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in family.special])
    tokenizer.add_tokens([AddedToken(t, special=False, normalized=False) for t in PLAIN_TOKENS])
    bpe.save(tokenizer, folder / "plain")
    config = folder / "plain" / "tokenizer_config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "bos_token": family.start}))
    own = trl_template(family.template)
    chat_template.make_chat_tokenizer(folder / "plain", folder / "chat", own)
    return folder / "chat"


@pytest.fixture(scope="module")
def template(folder: Path) -> ChatTemplate:
    return ChatTemplate(folder)


def trl_template(name: str) -> str:
    utils = pytest.importorskip("trl.chat_template_utils")
    return str(getattr(utils, f"{name}_chat_template"))


def theirs(family: Family, tokenizer: Any, record: Record) -> tuple[list[int], list[int]] | None:
    """Return TRL's ids and mask, or None if its template refuses the record."""
    messages = record["messages"]
    if family.parts:
        messages = [
            {**message, "content": [{"type": "text", "text": text_of(message)}]} for message in messages
        ]
    try:
        found = tokenizer.apply_chat_template(
            messages,
            tools=record.get("tools"),
            chat_template=trl_template(f"{family.template}_training"),
            return_assistant_tokens_mask=True,
            return_dict=True,
            **record.get("chat_template_kwargs", {}),
        )
    except TemplateError:
        return None
    ids, mask = found["input_ids"], found["assistant_masks"]
    if family.line_break:
        line_break = tokenizer.encode("\n", add_special_tokens=False)
        end = tokenizer.convert_tokens_to_ids(family.special[-1])
        after_turn = [
            n for n in range(1, len(ids)) if [ids[n]] == line_break and mask[n] and ids[n - 1] == end
        ]
        mask = [0 if n in after_turn else m for n, m in enumerate(mask)]
    return ids, mask


def text_of(message: Any) -> str:
    content = message["content"] or ""
    return content if isinstance(content, str) else "".join(part["text"] for part in content)


def ours(template: ChatTemplate, record: Record) -> tuple[list[int], list[int]] | str:
    """Return our ids and mask, or the reason for the refusal."""
    tools, kwargs = record.get("tools"), record.get("chat_template_kwargs")
    try:
        found = template.conversation(checked_conversation(record["messages"], tools, kwargs))
    except NotRendered as error:
        return str(error)
    assert found.unlearnt_turns == 0
    return found.ids.tolist(), found.mask.tolist()


def as_we_read_it(record: Record, reason: str) -> Record:
    """Return the record for which TRL's template renders what ours renders for
    the original, or what we refuse to drop.
    """
    messages = [dict(message) for message in record["messages"]]
    record = {**record, "messages": messages}
    for message in messages:
        if reason in ("calls", "reasoning", "name"):
            fields = {"name": ["name"]}.get(reason, ["tool_calls", "reasoning_content", "thinking"])
            for field in fields:
                message.pop(field, None)
        if reason == "parts":
            message["content"] = text_of(message)
        if reason == "arguments":
            for call in message.get("tool_calls", []):
                call["function"] = {
                    **call["function"],
                    "arguments": json.loads(call["function"]["arguments"]),
                }
        if reason == "text":
            message["content"] = message["content"].removeprefix("one ")
    if reason == "role":
        del messages[0]
    if reason == "order":
        messages[2:4] = messages[3], messages[2]
    if reason in ("tools", "variable"):
        record.pop({"tools": "tools", "variable": "chat_template_kwargs"}[reason])
    return record


@pytest.mark.parametrize("conversation", CONVERSATIONS)
def test_tokens_and_mask_equal_those_of_trl(
    conversation: str, name: str, folder: Path, template: ChatTemplate
) -> None:
    family, record, tokenizer = (
        FAMILIES[name],
        CONVERSATIONS[conversation],
        AutoTokenizer.from_pretrained(folder),
    )
    expected, found = theirs(family, tokenizer, record), ours(template, record)
    reason = EXPLAINED[name].get(conversation)
    if expected is None:
        assert isinstance(found, str)
    elif reason is None:
        assert found == expected
    elif reason in REFUSED:
        assert isinstance(found, str) and re.search(REFUSED[reason], found)
        assert theirs(family, tokenizer, as_we_read_it(record, reason)) == expected  # TRL drops it
    else:
        assert not isinstance(found, str) and found != expected
        if reason in ("parts", "arguments", "order"):
            assert theirs(family, tokenizer, as_we_read_it(record, reason)) == found
            return
        texts = [
            (tokenizer.decode(ids), learnt_text(tokenizer, ids, mask)) for ids, mask in (found, expected)
        ]
        if reason == "forged":
            special = set(tokenizer.convert_tokens_to_ids([*family.special, "<|endoftext|>"]))
            ours_special, their_special = (sum(n in special for n in ids) for ids, _ in (found, expected))
            assert texts[0][0] == texts[1][0] and ours_special < their_special
        else:  # an empty thought that is not written, or not learned
            assert [text.replace(EMPTY_THOUGHT, "") for text in texts[0]] == [
                text.replace(EMPTY_THOUGHT, "") for text in texts[1]
            ]
            assert (texts[0][0] == texts[1][0]) == (reason == "prompt")


def learnt_text(tokenizer: Any, ids: list[int], mask: list[int]) -> str:
    return str(tokenizer.decode([token for token, learnt in zip(ids, mask, strict=True) if learnt]))


def test_counts(name: str, folder: Path) -> None:
    family, tokenizer = FAMILIES[name], AutoTokenizer.from_pretrained(folder)
    refused = {n for n, record in CONVERSATIONS.items() if theirs(family, tokenizer, record) is None}
    explained = EXPLAINED[name].keys() - refused
    assert (len(CONVERSATIONS) - len(refused | explained), len(refused), len(explained)) == COUNTS[name]
