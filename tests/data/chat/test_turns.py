"""The assistant's turns in unmarked templates: tools, templates that rewrite earlier turns, and first turns."""

from pathlib import Path
from typing import Any

import pytest

from deskside.data import tokenizer as bpe
from deskside.data.chat.chat_template import ChatTemplate
from deskside.data.chat.messages import NotRendered, checked_conversation
from tests.data import chat_tokenizer
from tests.data.chat.tricky import ASK, DELHI, PUNE, SUNNY, WEATHER, assistant, calling, result
from tests.data.chat_tokenizer import talk

# The format of Mistral's third tokenizer: tools are written before the last question, and calls as a JSON list.
MISTRAL = (
    "{{ '<s>' }}{% set last = messages | selectattr('role', 'equalto', 'user') | list | last %}"
    "{% for m in messages %}{% if m.role == 'user' %}"
    "{% if tools and m == last %}[AVAILABLE_TOOLS] {{ tools | tojson }}[/AVAILABLE_TOOLS]{% endif %}"
    "[INST] {{ m.content }}[/INST]"
    "{% elif m.role == 'tool' %}"
    "[TOOL_RESULTS] {{ {'content': m.content, 'call_id': m.tool_call_id} | tojson }}[/TOOL_RESULTS]"
    "{% elif m.role == 'assistant' %}{% if m.tool_calls %}[TOOL_CALLS] ["
    "{% for call in m.tool_calls %}{% set f = call.function %}"
    "{{ {'name': f.name, 'arguments': f.arguments, 'id': call.id} | tojson }}"
    "{{ '' if loop.last else ', ' }}{% endfor %}]</s>{% else %} {{ m.content }}</s>{% endif %}"
    "{% else %}{{ raise_exception('no ' + m.role) }}{% endif %}{% endfor %}"
)


def learnt(
    tmp_path: Path, template: str, messages: list[dict[str, Any]], tools: Any = None
) -> tuple[str, list[str], int]:
    """Return the text, the learned turns, and the number of turns that are not learned."""
    folder = chat_tokenizer.make(tmp_path, template)
    found = ChatTemplate(folder).conversation(checked_conversation(messages, tools))
    tokenizer = bpe.load(folder)
    turns: list[list[int]] = []
    for before, token, mark in zip([0, *found.mask[:-1]], found.ids.tolist(), found.mask, strict=True):
        if mark:
            turns += [] if before else [[]]
            turns[-1].append(token)
    text = tokenizer.decode(found.ids.tolist(), skip_special_tokens=False)
    return text, [tokenizer.decode(turn, skip_special_tokens=False) for turn in turns], found.unlearnt_turns


def trl_template(name: str) -> str:
    return str(getattr(pytest.importorskip("trl.chat_template_utils"), f"{name}_chat_template"))


def test_calls_of_llama(tmp_path: Path) -> None:
    _, turns, unlearnt = learnt(
        tmp_path, trl_template("llama3_2"), [ASK, calling(PUNE), result("sun"), SUNNY], [WEATHER]
    )
    call = '{"name": "weather", "parameters": {"place": ["Pune"]}}<|eot_id|>'
    # <|eot_id|> is not a special token of this tokenizer.
    assert turns == [call, "No, the sun shines.<|eot_id|>"] and unlearnt == 0


def test_calls_of_mistral(tmp_path: Path) -> None:
    """A question with tools is written as it would be if it were the last one."""
    two = [ASK, calling(PUNE, DELHI), result("sun"), result("rain", 2), SUNNY, ASK, SUNNY]
    text, turns, unlearnt = learnt(tmp_path, MISTRAL, two, [WEATHER])
    assert [turn[:14] for turn in turns] == [
        "[TOOL_CALLS] [",
        " No, the sun s",
        " No, the sun s",
    ] and unlearnt == 0
    assert all(turn.endswith("</s>") for turn in turns)
    assert text.count("[AVAILABLE_TOOLS]") == 2 and text.count("[TOOL_RESULTS]") == 2
    alone, *_ = learnt(tmp_path / "alone", MISTRAL, two[:5], [WEATHER])
    assert text.startswith(alone)


@pytest.mark.parametrize("template", ["qwen3", "qwen2_5", "llama3", "llama3_2", "lfm2_v2", "phi3"])
def test_the_header_of_a_first_turn_is_not_learnt(template: str, tmp_path: Path) -> None:
    _, turns, unlearnt = learnt(tmp_path, trl_template(template), [assistant("Welcome."), ASK, SUNNY])
    assert turns[0].startswith("Welcome.") and SUNNY["content"] in turns[1] and unlearnt == 0


def test_turns_whose_end_depends_on_what_follows_are_counted(tmp_path: Path) -> None:
    """The template of gpt-oss ends a turn with <|end|>, but the last one with <|return|>."""
    _, turns, unlearnt = learnt(tmp_path, trl_template("gptoss"), talk("a", "one", "b", "two"))
    assert turns == ["<|channel|>final<|message|>two<|return|>"] and unlearnt == 1


def test_an_end_of_text_wherever_no_prompt_follows(tmp_path: Path) -> None:
    """Uses Phi-3's template. Its <|end|> is not a special token of this tokenizer."""
    text, turns, unlearnt = learnt(tmp_path, trl_template("phi3"), talk("a", "one", "b", "two"))
    assert turns == ["one<|end|>\n", "two<|end|>\n<|endoftext|>"] and unlearnt == 0
    assert text.count("<|endoftext|>") == 1


@pytest.mark.parametrize("ending", [[], [ASK], [ASK, ASK]])
def test_what_follows_a_rewritten_turn_is_kept(ending: list[dict[str, Any]], tmp_path: Path) -> None:
    said = [assistant("one", reasoning_content="hm"), ASK, calling(PUNE, content="so"), result("sun"), SUNNY]
    text, turns, _ = learnt(tmp_path, trl_template("qwen3"), [ASK, *said, *ending])
    thought, empty = "<think>\nhm\n</think>\n\n", "<think>\n\n</think>\n\n"
    call = 'so\n<tool_call>\n{"name": "weather", "arguments": {"place": ["Pune"]}}\n</tool_call>'
    assert turns == [
        f"{part}<|im_end|>" for part in (f"{thought}one", empty + call, empty + SUNNY["content"])
    ]
    assert text.endswith(f"<|im_start|>user\n{ASK['content']}<|im_end|>\n" * len(ending))
    assert text.count(f"user\n{ASK['content']}<|im_end|>\n") == 2 + len(ending)


def test_a_thought_that_the_template_removes_everywhere_is_refused(tmp_path: Path) -> None:
    template = chat_tokenizer.MARKED.replace(
        "m['content'] }}<|im_end|>{% endg", "m['content'].split('>')[-1] }}<|im_end|>{% endg"
    )
    assert template != chat_tokenizer.MARKED
    assert learnt(tmp_path, template, talk("a>b", "c"))[1] == ["c<|im_end|>"]
    with pytest.raises(NotRendered, match="message 2: the chat template leaves out some of its content"):
        learnt(tmp_path, template, talk("a", "b>c"))
