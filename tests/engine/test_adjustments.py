"""Logit bias, minimum length and penalties, compared with transformers' processors and OpenAI's formula."""

from collections import Counter

import pytest
import torch
from transformers.generation.logits_process import (
    MinNewTokensLengthLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
)

from deskside.engine.adjustments import MAX_BIASES, MAX_END_TOKENS, MAX_STOP_TOKENS, Adjustments
from deskside.engine.engine import Draft, Engine
from deskside.engine.requests import Request
from deskside.engine.sampling import Sampling, SamplingTensors
from deskside.engine.text import TextStream
from deskside.utils.errors import UsageError
from tests.engine.test_generate import make, plain
from tests.engine.test_speculate import make_draft
from tests.engine.test_text import tokenizer as byte_tokenizer

V = 60
PROMPT, ANSWER = [3, 7, 7, 1], [7, 9, 9, 9, 2]


def applied(
    sampling: Sampling, logits_1V: torch.Tensor, ends: tuple[int, ...] = (), minimum: int = 0
) -> torch.Tensor:
    rows = Adjustments.empty(3, V, torch.device("cpu"))
    rows.start(1, torch.tensor(PROMPT), sampling, ends, minimum)
    slot_B = torch.tensor([1])
    for token in ANSWER[:-1]:
        rows.count(slot_B, torch.tensor([token]))
    now = rows[slot_B].after(torch.tensor(ANSWER[-1:]))
    settings = SamplingTensors.of([sampling], [0], "cpu")
    return now.apply(logits_1V, settings, torch.tensor([len(ANSWER)]))


@pytest.fixture
def logits_1V() -> torch.Tensor:
    return torch.randn(1, V, generator=torch.Generator().manual_seed(0)) * 3


def test_bias_minimum_and_repetition_equal_transformers(logits_1V: torch.Tensor) -> None:
    text = torch.tensor([PROMPT + ANSWER])
    biases = ((7, -2.5), (0, 1.25), (59, 100.0))
    sampling = Sampling(repetition_penalty=1.7, logit_bias=biases)
    for minimum in (len(ANSWER), len(ANSWER) + 1):
        expected = SequenceBiasLogitsProcessor([[[t], b] for t, b in biases])(text, logits_1V.clone())
        processor = MinNewTokensLengthLogitsProcessor(len(PROMPT), minimum, [4, 9], device="cpu")
        expected = RepetitionPenaltyLogitsProcessor(1.7)(text, processor(text, expected))
        torch.testing.assert_close(applied(sampling, logits_1V, (4, 9), minimum), expected)


@pytest.mark.parametrize(("presence", "frequency"), [(0.7, 0.0), (0.0, -1.2), (-2.0, 2.0)])
def test_presence_and_frequency_follow_openais_formula(
    logits_1V: torch.Tensor, presence: float, frequency: float
) -> None:
    """mu[j] - c[j] * alpha_frequency - float(c[j] > 0) * alpha_presence, where c counts tokens of the answer only."""
    counts = Counter(ANSWER)
    expected = [
        x - counts[j] * frequency - (counts[j] > 0) * presence for j, x in enumerate(logits_1V[0].tolist())
    ]
    found = applied(Sampling(presence_penalty=presence, frequency_penalty=frequency), logits_1V)
    assert found[0].tolist() == pytest.approx(expected, abs=1e-5)


def test_a_slot_starts_anew_and_full_tables_work(logits_1V: torch.Tensor) -> None:
    rows = Adjustments.empty(1, 4096, torch.device("cpu"))
    slot, logits = torch.tensor([0]), torch.zeros(1, 4096)
    full = Sampling(logit_bias=tuple((token, 1.0) for token in range(MAX_BIASES)))
    rows.start(0, torch.tensor([1]), full, tuple(range(2000, 2000 + MAX_END_TOKENS)), 1)
    rows.count(slot, torch.tensor([5]))
    found = rows[slot].apply(logits, SamplingTensors.of([full], [0], "cpu"), torch.tensor([0]))[0]
    assert int((found == 1).sum()) == MAX_BIASES and int(found.isinf().sum()) == MAX_END_TOKENS
    free = Sampling(frequency_penalty=1.0)
    rows.start(0, torch.tensor([1]), free, (), 5)
    assert torch.equal(
        rows[slot].apply(logits, SamplingTensors.of([free], [0], "cpu"), torch.tensor([0])), logits
    )


@pytest.mark.parametrize("speculative", [False, True])
def test_min_tokens_keeps_an_answer_going(speculative: bool) -> None:
    model = make()
    draft = Draft(make_draft(model, 0.05), 3) if speculative else None
    engine = Engine(model, max_batch=2, max_tokens=256, draft=draft)
    prompt = [5, 17, 3]
    free = plain(model, prompt, 12)
    end = free[4]
    first = free.index(end)
    request = Request(tuple(prompt), 12, eos_tokens=frozenset({end}))
    (ended,), (longer,) = engine.run(
        [request, Request(tuple(prompt), 12, eos_tokens=frozenset({end}), min_tokens=9)]
    )
    assert ended.reason == "eos" and ended.tokens == free[:first]
    assert len(longer.tokens) >= 9 and end not in longer.tokens and longer.tokens[:first] == free[:first]


def test_a_stop_string_does_not_end_an_answer_before_its_minimum() -> None:
    tokenizer = byte_tokenizer()
    stream = TextStream(tokenizer, ("ab",), min_tokens=4)
    text = "".join(stream.push(token) for token in tokenizer.encode("xabyzab!").ids)
    assert text + stream.finish() == "xabyz"


@pytest.mark.parametrize(
    ("field", "options"),
    [
        ("logit_bias", {"sampling": Sampling(logit_bias=((97, 1.0),))}),
        ("logit_bias", {"sampling": Sampling(logit_bias=tuple((0, 1.0) for _ in range(MAX_BIASES + 1)))}),
        ("stop_token_ids", {"stop_tokens": frozenset({97})}),
        ("stop_token_ids", {"stop_tokens": frozenset(range(MAX_STOP_TOKENS + 1))}),
    ],
)
def test_what_does_not_fit_is_refused_on_submission(field: str, options: dict) -> None:
    engine = Engine(make(), max_batch=1, max_tokens=64)
    with pytest.raises(UsageError, match=f"^{field}: "):
        engine.submit(Request((1,), 4, **options))
    assert engine.idle


@pytest.mark.parametrize(
    ("field", "options"),
    [
        ("presence_penalty", {"presence_penalty": 2.1}),
        ("frequency_penalty", {"frequency_penalty": float("nan")}),
        ("logit_bias", {"logit_bias": ((1, 101.0),)}),
    ],
)
def test_settings_out_of_range_are_refused(field: str, options: dict) -> None:
    with pytest.raises(UsageError, match=f"^{field}: "):
        Sampling(**options)
    with pytest.raises(UsageError, match=r"^min_tokens: "):
        Request((1,), 4, min_tokens=5)
