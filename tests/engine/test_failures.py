"""Failures in the engine stay isolated: non-finite output fails one sample, a failing step
one batch, and invalid values one request.
"""

import copy
from typing import Any

import pytest
import torch

from deskside.engine.engine import Draft, Engine
from deskside.engine.requests import Event, Request, SampleOutput
from deskside.engine.sampling import GREEDY, Sampling, SamplingValues
from deskside.engine.steps import CachedModel
from deskside.model.transformer import Transformer
from deskside.utils.errors import RunError
from tests.engine.test_generate import make, plain

POISON = 77  # a token whose embedding is NaN; no answer to GOOD contains it
GOOD = [[5, 17, 3, 8, 9], [1], [88, 4, 4, 61, 30, 2, 9, 11, 12, 13]]


def poisoned() -> Transformer:
    model = make(num_hidden_layers=2, tie_word_embeddings=False)
    with torch.no_grad():
        model.embed.weight[POISON] = torch.nan
    return model


def answers(events: list[Event]) -> dict[int, SampleOutput]:
    found: dict[int, SampleOutput] = {}
    for event in events:
        found.setdefault(event.request, SampleOutput(0)).add(event)
    return found


def all_events(engine: Engine) -> list[Event]:
    events = []
    while not engine.idle:
        events += engine.step()
    return events


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("drafted", [False, True])
@pytest.mark.parametrize("sampling", [GREEDY, Sampling(0.9, top_k=5, repetition_penalty=1.2)])
def test_output_that_is_not_finite_fails_its_sample_alone(
    ahead: bool, drafted: bool, sampling: Sampling
) -> None:
    """NaN stays in the pages of the failed rows and in the padding page. It must not reach other rows."""
    model = poisoned()
    other: dict[str, Any] = {"draft": Draft(model, 2)} if drafted else {}
    engine = Engine(model, max_batch=4, max_tokens=160, page_size=4, prefill_tokens=8, **other)
    engine._run_ahead = ahead
    free = engine.free_tokens
    bad = [[POISON], [5, 17, 3, 8, 9, POISON], [POISON, *range(1, 12)]]
    for _ in range(3):
        wrong = [engine.submit(Request(tuple(p), 6, sampling, logprobs=True)) for p in bad]
        right = [engine.submit(Request(tuple(p), 6, sampling, logprobs=True)) for p in GOOD]
        found = answers(all_events(engine))
        assert [found[n].reason for n in wrong] == ["failed"] * 3 and not any(found[n].tokens for n in wrong)
        for number, prompt in zip(right, GOOD, strict=True):
            assert found[number].reason == "length"
            if not drafted or sampling == GREEDY:
                assert found[number].tokens == plain(model, prompt, 6, sampling)
    assert engine.idle and engine.free_tokens == free


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("steps", [0, 1, 2])
def test_pages_of_a_prompt_that_fails_are_not_shared(ahead: bool, steps: int) -> None:
    """NaN of a later token reaches earlier ones in the same pass, because NaN times a weight of zero is NaN."""
    model, prefix = poisoned(), [5, 17, 3, 8, 9, 1, 2, 3]
    engine = Engine(model, max_batch=4, max_tokens=160, page_size=4, prefill_tokens=64)
    engine._run_ahead = ahead
    wrong = [engine.submit(Request((*prefix, POISON, 7), 6))]
    events = [event for _ in range(steps) for event in engine.step()]
    right = engine.submit(Request((*prefix, 9, 2), 6))
    wrong.append(engine.submit(Request((*prefix, POISON, 7, 4), 6)))
    found = answers(events + all_events(engine))
    assert [found[number].reason for number in wrong] == ["failed", "failed"]
    assert found[right].tokens == plain(model, [*prefix, 9, 2], 6)


def test_callers_that_want_answers_hear_of_it() -> None:
    with pytest.raises(RunError, match="not finite"):
        Engine(poisoned()).run([Request((POISON,), 3)])


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("fails", ["sample", "submit", "step"])
def test_a_run_that_fails_leaves_no_request_behind(
    ahead: bool, fails: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = poisoned()
    engine = Engine(model, max_batch=2, max_tokens=128, page_size=4)
    engine._run_ahead = ahead
    free = engine.free_tokens

    def broken(*_: Any) -> Any:
        raise ValueError("broken")

    bad = Request((POISON,), 6) if fails == "sample" else Request((3, 1), 6, Sampling(top_k=7))
    requests = [Request(tuple(prompt), 6) for prompt in GOOD]
    with monkeypatch.context() as patch, pytest.raises((RunError, ValueError), match=r"finite|broken"):
        if fails == "submit":
            original = SamplingValues.of
            patch.setattr(
                SamplingValues,
                "of",
                staticmethod(lambda s, stream: broken() if s.top_k == 7 else original(s, stream)),
            )
        elif fails == "step":
            patch.setattr(CachedModel, "decode", broken)
        engine.run([requests[0], bad, *requests[1:]])
    assert engine.idle and engine.free_tokens == free
    if fails == "step":
        engine.restart()
    outputs = engine.run(requests)
    assert [samples[0].tokens for samples in outputs] == [plain(model, prompt, 6) for prompt in GOOD]


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("where", ["decode", "prefill"])
def test_a_step_that_raises_ends_those_that_ran_and_nobody_else(
    ahead: bool, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make(num_hidden_layers=2)
    engine = Engine(model, max_batch=2, max_tokens=128, page_size=4)
    engine._run_ahead = ahead
    free = engine.free_tokens
    real, calls = getattr(CachedModel, where), []

    def broken(self: CachedModel, *rest: Any) -> Any:
        calls.append(1)
        if len(calls) == (3 if where == "decode" else 1):
            for part in (self.cache.k, self.cache.v):
                part.fill_(torch.nan)  # any state that a device may leave behind
            raise torch.OutOfMemoryError("CUDA out of memory")
        return real(self, *rest)

    monkeypatch.setattr(CachedModel, where, broken)
    short = engine.submit(Request((9,), 0))  # the failing step has not yet reported its end
    prompts = [*GOOD, [3, 1, 4, 1, 5]]
    numbers = [engine.submit(Request(tuple(prompt), 6)) for prompt in prompts]
    events: list[Event] = []
    with pytest.raises(torch.OutOfMemoryError):
        while not engine.idle:
            events += engine.step()
    events += engine.abandon("out of memory")
    engine.restart()
    events += all_events(engine)
    found = answers(events)
    assert found[short].reason == "length"
    assert [found[n].reason for n in numbers] == ["failed", "failed", "length", "length"]
    assert {e.error for e in events if e.reason == "failed"} == {"out of memory"}
    for number, prompt in zip(numbers[2:], prompts[2:], strict=True):
        assert found[number].tokens == plain(model, prompt, 6)
    assert engine.free_tokens == free


def test_what_is_raised_while_a_request_is_taken_in_leaves_nothing_behind(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = make(num_hidden_layers=2)
    engine = Engine(model, max_batch=2, max_tokens=128)
    real = SamplingValues.of

    def broken(sampling: Any, stream: Any) -> SamplingValues:
        if sampling.top_k == 7:
            raise ValueError("broken")
        return real(sampling, stream)

    monkeypatch.setattr(SamplingValues, "of", staticmethod(broken))
    number = engine.submit(Request((5, 17, 3), 4))
    events = engine.step()
    with pytest.raises(ValueError):
        engine.submit(Request((5, 17, 3), 4, Sampling(top_k=7), samples=3))
    found = answers(events + all_events(engine))
    assert found.keys() == {number} and found[number].tokens == plain(model, [5, 17, 3], 4)


def test_text_that_cannot_be_made_fails_its_sample_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    model = make(num_hidden_layers=2)
    engine = Engine(model, max_batch=2, max_tokens=128)
    expected = copy.copy(plain(model, [1], 4))

    class Broken:
        stopped = False

        def push(self, token: int) -> str:
            raise OverflowError("no such character")

        def finish(self) -> str:
            raise OverflowError("no such character")

    first, second = engine.submit(Request((5, 17, 3), 4)), engine.submit(Request((1,), 4))
    engine._rows.waiting[0].stream = Broken()  # type: ignore[assignment]
    found = answers(all_events(engine))
    assert (found[first].reason, found[second].reason) == ("failed", "length")
    assert found[second].tokens == expected
