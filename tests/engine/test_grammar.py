"""Grammars: the tokens they allow, compared with the regex package's partial matches, and answers that follow them."""

import json
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
import regex
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from deskside.data.tokenizer import train
from deskside.engine.engine import Draft, Engine
from deskside.engine.grammar import MAX_CHARACTERS, GrammarKind, Grammars, MaskBuilder, forbid, lark_literal
from deskside.engine.json_schema import lark_json
from deskside.engine.requests import Request, SampleOutput
from deskside.engine.sampling import GREEDY, Sampling
from deskside.model.transformer import Transformer
from deskside.utils.errors import UsageError
from tests.engine.test_generate import make
from tests.engine.test_steps import as_on_a_gpu

TEXTS = ['{"name": "ships", "values": [1, 20, true, null]} the sea 😀 नमस्ते\n'] * 3
EOS = 0
PADDED = 7  # tokens that only the model's vocabulary contains


@cache
def tokenizer() -> Tokenizer:
    return train(TEXTS, 300)


def vocabulary() -> int:
    return tokenizer().get_vocab_size() + PADDED


@cache
def grammars() -> Grammars:
    return Grammars(tokenizer(), vocabulary(), [EOS])


@cache
def model(layers: int = 2) -> Transformer:
    return make(vocab_size=vocabulary(), num_hidden_layers=layers, max_position_embeddings=512)


def asked(kind: GrammarKind, text: str, **other: Any) -> Request:
    given = {"sampling": Sampling(), "eos_tokens": frozenset({EOS}), "max_new_tokens": 400, **other}
    return Request((5, 17, 3), grammar=grammars().compile(kind, text), **given)


def answers(engine: Engine, *requests: Request) -> list[SampleOutput]:
    return [answer for (answer,) in engine.run(requests)]


@pytest.mark.parametrize(
    "pattern", ["[0-9]{2,4}(-[0-9]+)?", "(the|three) ships?", r"\{\"n[a-z]+\": (1|20)\}"]
)
def test_masks_are_the_tokens_after_which_the_pattern_can_still_match(pattern: str) -> None:
    matcher = grammars().compile("regex", pattern).matcher()
    builder, text, generator = MaskBuilder(vocabulary()), "", np.random.default_rng(0)
    pieces = {n: tokenizer().decode([n]) for n in range(1, tokenizer().get_vocab_size())}
    for _ in range(12):
        (mask_W,) = builder.masks([matcher]).numpy()
        allowed = np.flatnonzero(np.unpackbits(mask_W.view(np.uint8), bitorder="little")[: vocabulary()])
        expected = {n for n, p in pieces.items() if p and regex.fullmatch(pattern, text + p, partial=True)}
        complete = regex.fullmatch(pattern, text) is not None
        assert set(allowed) <= expected | ({EOS} if complete else set())
        # Where the next bytes are certain, only the tokenizer's own token for them is allowed.
        assert len(allowed) == len(expected) + complete or len(allowed) == 1
        if not expected:
            break
        token = int(generator.choice(sorted(expected)))
        assert matcher.consume_token(token)
        text += pieces[token]
    else:
        assert complete or len(text) >= 12


def test_forbid_is_minus_infinity_where_a_bit_is_zero() -> None:
    logits_BV = torch.randn(3, 75)
    allowed_BW = torch.randint(-(2**31), 2**31, (3, 3), dtype=torch.int32)
    bits_BV = np.unpackbits(allowed_BW.numpy().view(np.uint8), axis=1, bitorder="little")[:, :75]
    expected_BV = np.where(bits_BV, logits_BV.numpy(), -np.inf)
    np.testing.assert_array_equal(forbid(logits_BV, allowed_BW).numpy(), expected_BV)


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize(
    "sampling",
    [
        GREEDY,
        pytest.param(Sampling(), marks=pytest.mark.full),
        Sampling(0.9, top_k=5, repetition_penalty=1.3),
    ],
)
def test_answers_follow_their_grammars_and_leave_others_alone(sampling: Sampling, ahead: bool) -> None:
    """There are more requests than slots, so requests without a grammar reuse slots."""
    plain = [Request((n, 2), 30, sampling, seed=n) for n in range(1, 7)]
    build = as_on_a_gpu if ahead else Engine
    alone = [build(model(), max_batch=3, tokenizer=tokenizer()).run([request])[0][0] for request in plain]
    patterns = ["[a-z]{3,9}", "(yes|no), (sir|madam)", "[0-9]{5}"]
    bound = [asked("regex", pattern, sampling=sampling, seed=9) for pattern in patterns * 2]
    mixed = [request for pair in zip(bound, plain, strict=True) for request in pair]
    got = answers(build(model(), max_batch=3, max_tokens=2048, tokenizer=tokenizer()), *mixed)
    assert [answer.tokens for answer in got[1::2]] == [answer.tokens for answer in alone]
    for pattern, answer in zip(patterns * 2, got[::2], strict=True):
        assert answer.reason == "eos" and regex.fullmatch(pattern, answer.text)
    assert [a.tokens for a in got[0:6:2]] == [a.tokens for a in got[6::2]]  # equal seeds


def test_a_draft_model_does_not_change_that() -> None:
    engine = Engine(model(), max_tokens=2048, tokenizer=tokenizer(), draft=Draft(model(1)))
    plain = Request((1, 2), 30)
    (expected,) = answers(Engine(model()), plain)
    bound, free = answers(engine, asked("regex", "[a-z]{40}"), plain)
    assert bound.reason == "eos" and regex.fullmatch("[a-z]{40}", bound.text)
    assert free.tokens == expected.tokens


def test_kinds() -> None:
    engine = Engine(model(), max_batch=8, max_tokens=4096, tokenizer=tokenizer())
    choices = ['a "b"\n', "😀", "नमस्ते, sea", "\\d"]
    fields = {"properties": {"n": {"type": "integer"}}, "required": ["n"], "additionalProperties": False}
    schema = {"type": "object", **fields}
    gbnf, lark = 'root ::= "a" ("b" | "c")+ "d"', 'start: "a" ("b" | "c")+ "d"'
    texts = [
        answer.text
        for answer in answers(
            engine,
            asked("choice", json.dumps(choices)),
            asked("json", json.dumps(schema)),
            asked("grammar", gbnf),
            asked("grammar", lark),
            asked(
                "lark", f"start: {lark_literal(choices[0])} {lark_json(schema)} {lark_literal(choices[2])}"
            ),
        )
    ]
    assert texts[0] in choices
    assert isinstance(json.loads(texts[1])["n"], int)
    assert all(regex.fullmatch("a[bc]+d", text) for text in texts[2:4])
    inner = texts[4].removeprefix(choices[0]).removesuffix(choices[2])
    assert len(inner) < len(texts[4]) and isinstance(json.loads(inner)["n"], int)


def test_white_space_in_json_is_bounded() -> None:
    tokens = [tokenizer().encode(text).ids for text in ('{"a"', " " * 40, " ", ": 1}")]
    matcher = grammars().compile("json", '{"properties": {"a": {}}}').matcher()
    assert matcher.consume_tokens(tokens[0] + tokens[1])
    assert matcher.validate_tokens(tokens[3]) == len(tokens[3]) and not matcher.validate_tokens(tokens[2])


def test_a_complete_answer_may_go_on_until_the_end_token() -> None:
    """The pattern has no longest match, so only the model's end token ends the answer."""
    (answer,) = answers(Engine(model(), tokenizer=tokenizer()), asked("regex", "[ab]*"))
    assert answer.reason == "eos" and set(answer.text) <= {"a", "b"}


def test_log_probabilities_are_those_of_model_and_mask() -> None:
    request = asked("regex", "[ab]{6}", logprobs=True)
    (answer,) = answers(Engine(model(), tokenizer=tokenizer()), request)
    ids = torch.tensor([[*request.prompt, *answer.tokens]])
    log_p_TV = model()(ids)[0, 2:-1].log_softmax(-1)
    chosen = log_p_TV[range(len(answer.tokens)), answer.tokens]
    torch.testing.assert_close(torch.tensor(answer.logprobs), chosen, atol=1e-4, rtol=1e-4)
    assert all(one <= other for one, other in zip(answer.logprobs, answer.sampled_logprobs, strict=True))
    assert sum(answer.sampled_logprobs) > sum(answer.logprobs) + 1


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("json", '{"not": {"type": "string"}}'),
        ("json", '{"type": "array", "uniqueItems": true, "x-guidance": {"lenient": true}}'),
        ("json", '{"type": "strin"}'),
        ("json", '{"type"'),
        ("json", "[1]"),
        ("json", '{"$ref": "http://example.org/schema.json"}'),
        ("json", '{"$ref": "#"}'),
        ("json", '{"items": {"type": "number", "exclusiveMinimum": 10, "maximum": 10.5}}'),
        ("json", '{"type": "number", "minimum": -0.5, "exclusiveMaximum": 0}'),
        ("json", '{"type": "number", "exclusiveMinimum": 1e999}'),
        ("json", '{"type": "number", "minimum": 0.5, "maximum": 1' + "0" * 400 + "}"),
        ("json", "[" * 100_000),
        ("regex", "(a"),
        ("regex", "(?!a)b"),
        ("grammar", "nothing"),
        ("grammar", "root ::= other"),
        ("lark", "start: other"),
        ("json", f'{{"enum": ["{"a" * MAX_CHARACTERS}"]}}'),
    ],
)
def test_what_is_not_supported_is_one_line(kind: GrammarKind, text: str) -> None:
    with pytest.raises(UsageError) as caught:
        grammars().compile(kind, text)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 450


def test_other_tokenizers_are_refused() -> None:
    words = Tokenizer(WordLevel({"a": 0, "b": 1}, unk_token="a"))
    with pytest.raises(UsageError, match="tokenizer"):
        Grammars(words, 2, [0])
    Grammars(tokenizer(), vocabulary(), [])  # the tokenizer's own end token


def test_a_grammar_that_fails_ends_only_its_answer() -> None:
    engine = Engine(model(), tokenizer=tokenizer())
    number = engine.submit(asked("regex", "[a-z]{30}"))
    other = engine.submit(Request((1, 2), 20))
    engine.step()
    assert not engine._rows.running[0].matcher.consume_token(vocabulary() - 1)
    events = []
    while not engine.idle:
        events += engine.step()
    ends = {event.request: (event.reason, event.unfulfillable) for event in events if event.reason}
    assert ends == {number: ("failed", True), other: ("length", False)}


def test_thousands_of_choices() -> None:
    choices = [f"ship {number}" for number in range(4096)]
    (answer,) = answers(Engine(model(), tokenizer=tokenizer()), asked("choice", json.dumps(choices)))
    assert answer.reason == "eos" and answer.text in choices


def test_a_choice_may_begin_with_another_one() -> None:
    request = asked("choice", '["the", "the sea"]', seed=1)
    found = {
        answers(Engine(model(), tokenizer=tokenizer()), replace(request, seed=seed))[0].text
        for seed in range(40)
    }
    assert found == {"the", "the sea"}


@pytest.mark.parametrize(
    ("kind", "text", "other"),
    [
        ("regex", "(?:a?){500}a{500}", {}),  # more states than llguidance's limit
        ("regex", "[a-z]{20}", {"stop_tokens": frozenset(range(300)), "min_tokens": 9}),
    ],
)
def test_a_request_that_no_answer_fulfils_is_refused(
    kind: GrammarKind, text: str, other: dict[str, Any]
) -> None:
    engine = Engine(model(), tokenizer=tokenizer())
    with pytest.raises(UsageError):
        engine.run([asked(kind, text, **other)])
