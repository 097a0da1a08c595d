"""Grammars on a GPU: masks in CUDA graphs give the CPU's answers, and leave other answers unchanged."""

import pytest
import regex

from deskside.engine.engine import Engine
from deskside.engine.requests import Request
from deskside.engine.sampling import GREEDY, Sampling
from tests.engine.test_grammar import asked, model, tokenizer
from tests.gpu.card import DEVICE, NEEDS_CARD

pytestmark = NEEDS_CARD


@pytest.mark.parametrize("sampling", [GREEDY, Sampling(0.9, top_k=5)])
def test_answers_equal_those_of_the_cpu(sampling: Sampling) -> None:
    patterns = ["[a-z]{3,9}", "(yes|no), (sir|madam)", "[0-9]{12}"] * 3
    bound = [asked("regex", pattern, sampling=sampling, seed=n) for n, pattern in enumerate(patterns)]
    plain = [Request((n, 2), 30, sampling, seed=n) for n in range(1, 10)]
    mixed = [request for pair in zip(bound, plain, strict=True) for request in pair]
    options = {"max_batch": 4, "max_tokens": 2048, "tokenizer": tokenizer()}
    on_cpu, on_card = model(), model.__wrapped__().to(DEVICE)
    expected = Engine(on_cpu, **options).run(mixed)
    engine = Engine(on_card, **options)
    got = engine.run(mixed)
    assert [answer.tokens for (answer,) in got] == [answer.tokens for (answer,) in expected]
    for pattern, (answer,) in zip(patterns, got[::2], strict=True):
        assert answer.reason == "eos" and regex.fullmatch(pattern, answer.text)
    assert engine._graphs is not None
    kinds = {kind[-1].constrained for kind in engine._graphs._captured if kind[0] == "decode"}
    assert kinds == {True, False}
