"""Grammars of complete answers, with markers that are special tokens and with markers that are plain text."""

from functools import cache

import pytest
from tokenizers import AddedToken, Tokenizer

from deskside.data.chat.answer_parser import Thinking
from deskside.data.tokenizer import train
from deskside.engine.grammar import Grammars
from deskside.serve.answer_grammar import Calls, answer_grammar
from tests.data.chat.test_answer_parser import BARE, ENDED, LISTED, NAMED, TAGGED, call, tagged

MARKERS = ("<tool_call>", "</tool_call>", "<think>", "</think>", "[TOOL_CALLS]", "[ARGS]")
FUNCTIONS = [
    {
        "name": "add",
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "integer"}},
            "required": ["a"],
            "additionalProperties": False,
        },
    },
    {"name": "get_x"},
]
ADD, GET, WRONG = ("add", '{"a": 1}'), ("get_x", "{}"), ("add", "{}")
THOUGHT = "why {</think>\n\n"


@cache
def made(special: bool) -> tuple[Tokenizer, Grammars]:
    tokenizer = train(["the sea"], 270)
    if special:
        tokenizer.add_special_tokens([AddedToken(marker, normalized=False) for marker in MARKERS])
    return tokenizer, Grammars(tokenizer, tokenizer.get_vocab_size() + 5, [0])


CASES: list[tuple[Thinking, Calls | None, bool, list[str], list[str]]] = [
    # thinking, calls, whether the text is an integer, allowed answers, forbidden answers
    (
        "no",
        Calls(TAGGED, FUNCTIONS, required=True, several=True),
        False,
        [tagged(ADD), tagged(GET, ADD)],
        ["", "Hi", "Hi" + tagged(ADD), tagged(WRONG), tagged(("other", "{}")), tagged(ADD) + "Hi"],
    ),
    ("no", Calls(TAGGED, FUNCTIONS, True, several=False), False, [tagged(ADD)], [tagged(ADD, GET)]),
    (
        "no",
        Calls(TAGGED, FUNCTIONS, False, True),
        False,
        ["", "Hi", "Hi\n" + tagged(ADD, GET)],
        ["Hi" + tagged(WRONG)],
    ),
    ("no", Calls(TAGGED, FUNCTIONS, False, True), True, ["12", tagged(GET)], ["", "Hi"]),
    ("may", None, True, ["12", "<think>" + THOUGHT + "12"], ["Hi", "<think>why", THOUGHT + "12"]),
    ("must", None, True, [THOUGHT + "12"], ["12", THOUGHT + "Hi"]),
    (
        "may",
        Calls(TAGGED, FUNCTIONS, True, True),
        False,
        [tagged(ADD), "<think>" + THOUGHT + tagged(ADD)],
        ["Hi"],
    ),
    ("must", Calls(TAGGED, FUNCTIONS, True, True), False, [THOUGHT + tagged(ADD)], [tagged(ADD), THOUGHT]),
    (
        "no",
        Calls(BARE, FUNCTIONS, True, True),
        False,
        [call(ADD, "parameters")],
        ["Hi", call(ADD), call(WRONG, "parameters"), call(ADD, "parameters") * 2],
    ),
    ("no", Calls(BARE, FUNCTIONS, False, True), False, ["", "Hi {", call(GET, "parameters")], ["{Hi"]),
    (
        "no",
        Calls(LISTED, FUNCTIONS, True, True),
        False,
        [f"[TOOL_CALLS] [{call(ADD)}, {call(GET)}]", f"[TOOL_CALLS][{call(GET)}]"],
        ["[TOOL_CALLS][]", f"[TOOL_CALLS][{call(WRONG)}]"],
    ),
    ("no", Calls(LISTED, FUNCTIONS, False, False), False, ["Hi"], [f"[TOOL_CALLS][{call(ADD)},{call(GET)}]"]),
    (
        "no",
        Calls(ENDED, FUNCTIONS, True, True),
        False,
        [f"<call>[{call(ADD)}, {call(GET)}]</call>"],
        [f"<call>[{call(ADD)}]", f"<call>{call(ADD)}</call>"],
    ),
    (
        "no",
        Calls(NAMED, FUNCTIONS, True, True),
        False,
        ['[TOOL_CALLS]add[ARGS]{"a": 1}[TOOL_CALLS]get_x[ARGS]{}'],
        ["[TOOL_CALLS]add[ARGS]{}", "[TOOL_CALLS]other[ARGS]{}"],
    ),
]


@pytest.mark.parametrize("special", [False, True])
@pytest.mark.parametrize("case", CASES, ids=[f"{n}" for n in range(len(CASES))])
def test_answers(case: tuple[Thinking, Calls | None, bool, list[str], list[str]], special: bool) -> None:
    thinking, calls, integer, allowed, forbidden = case
    tokenizer, grammars = made(special)
    outer = answer_grammar(thinking, calls, integer, grammars.special_token)
    inner = ("json", '{"type": "integer"}') if integer else None
    grammar = grammars.compile(*inner, outer) if inner else grammars.compile("lark", outer)
    for texts, expected in ((allowed, True), (forbidden, False)):
        for text in texts:
            matcher = grammar.matcher()
            tokens = tokenizer.encode(text).ids
            assert (matcher.consume_tokens(tokens) and matcher.is_accepting()) == expected, text
