"""The parts of answers, given whole and in pieces, compared with transformers' parser and TRL's response templates."""

import json
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast
from trl.chat_template_utils import llama3_template, qwen3_template

from deskside.data.chat.answer_parser import AnswerParser, Thinking
from deskside.data.chat.tool_formats import ToolFormat
from deskside.data.tokenizer import train

TAGGED = ToolFormat("<tool_call>", "</tool_call>")
BARE = ToolFormat("", key="parameters")
LISTED = ToolFormat("[TOOL_CALLS]", listed=True)
ENDED = ToolFormat("<call>", "</call>", listed=True)
NAMED = ToolFormat("[TOOL_CALLS]", named="[ARGS]")
FUNCTIONS = ("add", "get_x")
ADD, GET = ("add", '{"a": 1, "b": [2, {}]}'), ("get_x", "{}")


def call(function: tuple[str, str], key: str = "arguments") -> str:
    return f'{{"name": "{function[0]}", "{key}": {function[1]}}}'


def tagged(*functions: tuple[str, str]) -> str:
    return "\n".join(f"<tool_call>\n{call(function)}\n</tool_call>" for function in functions)


Parts = tuple[str, str, list[tuple[str, str]]]


def parts(text: str, thinking: Thinking, form: ToolFormat | None, size: int) -> Parts:
    """Return content, reasoning and calls of an answer that arrives in pieces of this many characters."""
    parser = AnswerParser(thinking, form, FUNCTIONS)
    found = [parser.push(text[at : at + size]) for at in range(0, len(text), size)] + [parser.finish()]
    calls: dict[int, list[str]] = {}
    for part in found:
        assert part.text == "".join(text[begin:end] for begin, end in part.text_places)
        for place, piece in part.calls.items():
            assert bool(piece.id) == bool(piece.name) == (place not in calls)
            calls.setdefault(place, [piece.name, ""])[1] += piece.arguments
    assert list(calls) == list(range(parser.num_calls))
    content, reasoning = ("".join(getattr(part, name) for part in found) for name in ("text", "reasoning"))
    return content, reasoning, [(name, arguments) for name, arguments in calls.values()]


STRINGS = ("add", '{"s": "}\\"]</tool_call>{", "n": -1.5e3}')
CASES: list[tuple[Thinking, ToolFormat | None, str, Parts]] = [
    ("no", None, "  Hello <think>\n", ("  Hello <think>\n", "", [])),
    ("no", TAGGED, "", ("", "", [])),
    # A regular expression that tries every way to divide this would not terminate.
    ("no", NAMED, f"[TOOL_CALLS]x{'[AAAA' * 40}!", (f"[TOOL_CALLS]x{'[AAAA' * 40}!", "", [])),
    ("no", TAGGED, " a <tool b ", (" a <tool b ", "", [])),
    ("no", TAGGED, tagged(ADD), ("", "", [ADD])),
    ("no", TAGGED, "Sure.\n" + tagged(ADD, GET, STRINGS), ("Sure.", "", [ADD, GET, STRINGS])),
    ("no", TAGGED, tagged(GET) + "\nDone. ", ("Done. ", "", [GET])),
    (
        "no",
        TAGGED,
        '<tool_call>{"arguments": {"a": 1}, "name": "add"}</tool_call>',
        ("", "", [("add", '{"a": 1}')]),
    ),
    (
        "no",
        TAGGED,
        '<tool_call>{"name": "add", "arguments": "{\\"a\\": 1}"}',
        ("", "", [("add", '{"a": 1}')]),
    ),
    ("no", TAGGED, '<tool_call>\n{"name": "get_x"}\n</tool_call>', ("", "", [GET])),
    # what is not a call is text
    ("no", TAGGED, tagged(("other", "{}")), (tagged(("other", "{}")), "", [])),
    ("no", TAGGED, "<tool_call>no", ("<tool_call>no", "", [])),
    ("no", TAGGED, "<tool_call>{]}</tool_call>", ("<tool_call>{]}</tool_call>", "", [])),
    ("no", TAGGED, '<tool_call>{"name": {"add": []}}', ('<tool_call>{"name": {"add": []}}', "", [])),
    # cut off by the maximum length
    ("no", TAGGED, tagged(ADD)[:-3], ("", "", [ADD])),
    ("no", TAGGED, tagged(ADD)[:30], (tagged(ADD)[:30], "", [])),
    ("no", TAGGED, '<tool_call>\n{"name": "add", "arguments": {"a": 1', ("", "", [("add", '{"a": 1')])),
    ("no", BARE, call(ADD, "parameters"), ("", "", [ADD])),
    ("no", BARE, f" {call(ADD, 'parameters')}; {call(GET, 'parameters')}", ("", "", [ADD, GET])),
    ("no", BARE, '{"x": {"name": "add"}} and', ('{"x": {"name": "add"}} and', "", [])),
    ("no", BARE, "See " + call(ADD, "parameters"), ("See " + call(ADD, "parameters"), "", [])),
    ("no", BARE, "  ", ("  ", "", [])),
    ("no", LISTED, f"[TOOL_CALLS] [{call(ADD)}, {call(GET)}]", ("", "", [ADD, GET])),
    ("no", LISTED, f'a[TOOL_CALLS][{call(ADD)[:-1]}, "id": "123456789"}}]', ("a", "", [ADD])),
    ("no", ENDED, f"a<call>[{call(ADD)}, {call(GET)}]</call>b", ("ab", "", [ADD, GET])),
    ("no", LISTED, "[TOOL_CALLS] [{}]", ("[TOOL_CALLS] [{}]", "", [])),
    (
        "no",
        NAMED,
        f"[TOOL_CALLS]add[ARGS]{ADD[1]}[TOOL_CALLS]get_x[CALL_ID]1a[ARGS] {{}}",
        ("", "", [ADD, GET]),
    ),
    ("no", NAMED, "[TOOL_CALLS]add and", ("[TOOL_CALLS]add and", "", [])),
    ("no", NAMED, "[TOOL_CALLS]other[ARGS]{}", ("[TOOL_CALLS]other[ARGS]{}", "", [])),
    ("may", None, "<think>\nhm\n</think>\n\nHi. ", ("Hi. ", "hm", [])),
    ("may", None, "\n<think>hm", ("", "hm", [])),
    ("may", None, "Hi <think>a</think>", ("Hi <think>a</think>", "", [])),
    ("may", None, "<thi", ("<thi", "", [])),
    ("may", TAGGED, "<think>\n\n</think>\n\n" + tagged(GET), ("", "", [GET])),
    ("must", TAGGED, f"hm {tagged(ADD)}\n</think>{tagged(GET)}", ("", f"hm {tagged(ADD)}", [GET])),
    ("must", None, "hm </thin", ("", "hm </thin", [])),
]


@pytest.mark.parametrize("case", CASES, ids=[f"{n}" for n in range(len(CASES))])
@pytest.mark.parametrize("size", [1, 2, 7, 10_000])
def test_parts(case: tuple[Thinking, ToolFormat | None, str, Parts], size: int) -> None:
    thinking, form, text, expected = case
    assert parts(text, thinking, form, size) == expected


def by_transformers(text: str, template: dict[str, Any], prefix: str) -> Parts:
    """Return the parts that transformers finds. It parses arguments, so they are serialized again."""
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=train(["text"], 270))
    found = tokenizer.parse_response(text, schema=template, prefix=prefix)
    calls = [call["function"] for call in found.get("tool_calls", [])]
    return (
        found.get("content", "").strip(),
        found.get("reasoning_content", "").strip(),
        [(call["name"], json.dumps(call["arguments"])) for call in calls],
    )


@pytest.mark.parametrize(
    ("form", "text"),
    [
        (TAGGED, "Hi."),
        (TAGGED, tagged(ADD)),
        (TAGGED, tagged(ADD, GET, ("add", '{"s": "}\\"]{", "n": -1.5}'))),
        (TAGGED, "Sure.\n" + tagged(GET)),
        (TAGGED, "<think>\nwhy { not\n</think>\n\nHi."),
        (TAGGED, "<think>\nhm\n</think>\n\n" + tagged(ADD, GET)),
        (BARE, "Hi."),
        (BARE, call(ADD, "parameters")),
        (BARE, call(GET, "parameters")),
    ],
)
def test_the_same_as_transformers(form: ToolFormat, text: str) -> None:
    template = qwen3_template if form is TAGGED else llama3_template
    end = "<|im_end|>" if form is TAGGED else "<|eot_id|>"
    expected = by_transformers(text + end, template, template["start_anchor"])
    content, reasoning, calls = parts(text, "may", form, 3)
    rewritten = [(name, json.dumps(json.loads(arguments))) for name, arguments in calls]
    assert (content, reasoning, rewritten) == expected
