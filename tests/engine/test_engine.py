"""The engine while requests come and go: every answer equals the request's answer alone, and nothing leaks."""

from functools import cache
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from deskside.data.tokenizer import train
from deskside.engine.engine import Engine
from deskside.engine.requests import Request, SampleOutput
from deskside.engine.sampling import GREEDY, Sampling
from deskside.engine.text import REPLACEMENT
from deskside.model.transformer import Transformer
from deskside.utils.errors import UsageError
from tests.engine.test_generate import PROMPTS, SHAPE, VARIANTS, make, plain
from tests.examples import examples

SAMPLINGS = (
    GREEDY,
    Sampling(0.8),
    Sampling(0.9, top_k=5),
    Sampling(1.1, top_p=0.9, min_p=0.02),
    Sampling(0.7, min_p=0.05, repetition_penalty=1.3),
    Sampling(0.0, repetition_penalty=1.2),
    Sampling(0.0, presence_penalty=0.4, frequency_penalty=0.7),
    Sampling(0.9, frequency_penalty=-0.3, logit_bias=((5, 1.5), (90, -100.0), (3, 0.25))),
)
# small, so that a few tokens cross every boundary
SMALL: dict[str, Any] = {"page_size": 4, "prefill_tokens": 8}


@cache
def model() -> Transformer:
    return make(num_hidden_layers=2)


def request(prompt: list[int], new: int = 8, sampling: Sampling = GREEDY, **other: Any) -> Request:
    return Request(tuple(prompt), new, sampling, **other)


@cache
def alone(prompt: tuple[int, ...], new: int, sampling: Sampling, seed: int, sample: int) -> list[int]:
    return plain(model(), list(prompt), new, sampling, sample, seed)


def expected(request: Request, sample: int = 0) -> list[int]:
    return alone(request.prompt, request.max_new_tokens, request.sampling, request.seed, sample)


REQUESTS = st.builds(
    request,
    prompt=st.one_of(
        st.lists(st.integers(0, 96), min_size=1, max_size=20),
        st.integers(1, 14).map(lambda n: [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7][:n]),  # common prefixes
    ),
    new=st.integers(0, 7),
    sampling=st.sampled_from(SAMPLINGS),
    seed=st.integers(0, 2),
    samples=st.sampled_from([1, 1, 1, 2, 5]),
)


@given(st.data())
@settings(max_examples=examples(15, 40), deadline=None)
def test_any_order_of_arrivals_and_cancellations(data: st.DataObject) -> None:
    """Random requests are submitted and cancelled between steps. Those that end
    normally equal the same request alone.
    """
    drawn = data.draw
    engine = Engine(
        model(),
        max_batch=drawn(st.integers(1, 4)),
        max_tokens=drawn(st.sampled_from([32, 48, 200])),
        page_size=4,
        prefill_tokens=drawn(st.sampled_from([3, 8, 64])),
    )
    engine._run_ahead = drawn(st.booleans())  # as on a GPU
    several = drawn(st.sampled_from([1, 3]))
    engine._tokens_per_replay = lambda rows, prefilled: several  # type: ignore[method-assign]
    free = engine.free_tokens
    taken: dict[int, Request] = {}
    answers: dict[tuple[int, int], SampleOutput] = {}
    cancelled: set[int] = set()
    for _ in range(drawn(st.integers(1, 8))):
        for asked in drawn(st.lists(REQUESTS, max_size=3)):
            number = engine.submit(asked)
            taken[number] = asked
            for sample in range(asked.samples):
                answers[number, sample] = SampleOutput(len(asked.prompt))
        if taken and drawn(st.integers(0, 3)) == 0:
            number = drawn(st.sampled_from(sorted(taken)))
            engine.cancel(number)
            cancelled.add(number)
        for _ in range(drawn(st.integers(0, 4))):
            for event in engine.step():
                assert answers[event.request, event.sample].reason is None
                answers[event.request, event.sample].add(event)
    for event in engine.events():
        answers[event.request, event.sample].add(event)
    assert engine.idle and engine.free_tokens == free
    assert engine.step() == []
    for (number, sample), answer in answers.items():
        wanted = expected(taken[number], sample)
        if answer.reason == "cancelled":
            assert number in cancelled
            assert answer.tokens == wanted[: len(answer.tokens)]
        else:
            assert answer.reason == "length"
            assert answer.tokens == wanted


@pytest.mark.parametrize("name", VARIANTS)
def test_architectures_in_pages_and_parts(name: str) -> None:
    """Prompts of unequal length are computed in parts, with small pages, and there are more prompts than rows."""
    made = make(**VARIANTS[name])
    engine = Engine(made, max_batch=3, max_tokens=160, **SMALL)
    answers = engine.run([request(prompt, 20) for prompt in PROMPTS])
    for prompt, (answer,) in zip(PROMPTS, answers, strict=True):
        assert answer.tokens == plain(made, prompt, 20)


def test_samples_of_a_prompt_equal_separate_prompts_and_share_its_pages() -> None:
    prompt = [5, 17, 3, 88, 4, 61, 30, 2, 9, 11, 12, 13, 21, 8]
    asked = request(prompt, 6, Sampling(1.0), seed=3, samples=6)
    engine = Engine(model(), max_batch=6, max_tokens=400, **SMALL)
    computed = counted(engine)
    (answers,) = engine.run([asked])
    assert [answer.tokens for answer in answers] == [expected(asked, sample) for sample in range(6)]
    assert len({tuple(answer.tokens) for answer in answers}) > 3
    # 12 of 14 tokens fill three pages, which are computed once. The last two are computed for every sample.
    assert sum(computed) == 14 + 5 * 2
    separate = [request(prompt, 6, Sampling(1.0), seed=3, first_sample=sample) for sample in range(6)]
    assert [answer.tokens for (answer,) in engine.run(separate)] == [a.tokens for a in answers]


def counted(engine: Engine) -> list[int]:
    """Return a list that records the number of real prompt tokens of every later prefill."""
    computed: list[int] = []
    forward = engine._models[0]
    prefill = forward.prefill

    def count(*arguments: torch.Tensor) -> torch.Tensor:
        computed.append(int(arguments[-1][-1]))  # the end of the last row
        return prefill(*arguments)

    forward.prefill = count  # type: ignore[method-assign]
    return computed


def test_a_conversation_goes_on_from_what_was_computed() -> None:
    engine = Engine(model(), max_batch=1, max_tokens=64, **SMALL)
    ((first,),) = engine.run([request([1, 2, 3, 4, 5, 6], 7)])
    computed = counted(engine)
    longer = [1, 2, 3, 4, 5, 6, *first.tokens, 50, 51]
    ((second,),) = engine.run([request(longer, 5)])
    assert second.tokens == plain(model(), longer, 5)
    assert sum(computed) == 15 - 12
    engine.weights_changed()
    engine.run([request(longer, 5)])
    assert sum(computed) == 15 - 12 + 15


def test_other_weights_after_weights_changed() -> None:
    made = make(num_hidden_layers=2)
    engine = Engine(made, max_batch=2, max_tokens=64, **SMALL)
    prompt = PROMPTS[2]
    before = engine.run([request(prompt, 9)])[0][0].tokens
    with torch.no_grad():
        made.embed.weight.mul_(-1)
    engine.weights_changed()
    after = engine.run([request(prompt, 9)])[0][0].tokens
    assert after == plain(made, prompt, 9) != before
    engine.submit(request(prompt, 9))
    engine.step()
    with pytest.raises(UsageError, match="weights changed while"):
        engine.weights_changed()


def test_a_long_prompt_does_not_stall_the_others() -> None:
    engine = Engine(model(), max_batch=2, max_tokens=120, **SMALL)
    engine.submit(request([1, 2], 20))
    engine.step()
    long = engine.submit(request(list(range(40)), 3))
    for step in range(5):  # 40 tokens, 8 a step
        events = engine.step()
        assert {event.request for event in events} == ({0} if step < 4 else {0, long})


def test_a_pass_beside_decoding_is_small_unless_it_completes_as_many_prompts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("deskside.engine.engine.PREFILL_BESIDE", 4)
    engine = Engine(model(), max_batch=4, max_tokens=400, page_size=4, prefill_tokens=16)
    computed = counted(engine)
    engine.submit(request([1, 2], 40))
    engine.step()
    engine.submit(request(list(range(40)), 3))
    engine.step()
    engine.step()
    assert computed == [2, 4, 4]
    engine.submit(request([9, 8, 7], 3))  # completed together with 13 tokens of the long one
    assert {event.request for event in engine.step()} == {0, 2}
    assert computed == [2, 4, 4, 16]
    list(engine.events())
    assert computed[4:] == [4, 4, 11]  # the last part, which one row waits for, and another row begins after


def test_waiting_for_memory_and_never_fitting() -> None:
    engine = Engine(model(), max_batch=4, max_tokens=16, **SMALL)
    assert engine.free_tokens == 16
    kv = 2 * 2 * 2 * 8 * 4  # k and v, layers, heads, channels, bytes
    assert engine.nbytes == (16 + 4) * kv  # and one page that belongs to no row
    first, second = engine.submit(request([1], 11)), engine.submit(request([2], 7))
    engine.step()
    assert engine.free_tokens == 4
    order = [event.request for event in engine.events()]
    assert order == sorted(order) and set(order) == {first, second}
    with pytest.raises(UsageError, match="10 tokens and 7 new ones do not fit the cache of 16"):
        engine.submit(request([1] * 10, 7))
    assert engine.idle


def test_log_probabilities_come_with_the_tokens() -> None:
    asked = request([5, 6, 7], 6, Sampling(0.7, top_k=3), samples=2, logprobs=True)
    engine = Engine(model(), max_batch=2, max_tokens=64, **SMALL)
    for answer in engine.run([asked])[0]:
        tokens = torch.tensor([[5, 6, 7, *answer.tokens]])
        with torch.no_grad():
            logits = model()(tokens)[0, 2:-1] / 0.7
        at = tokens[0, 3:, None]
        raw = logits.log_softmax(-1).gather(1, at)[:, 0]
        torch.testing.assert_close(torch.tensor(answer.logprobs), raw, atol=1e-4, rtol=1e-4)
        best = logits.topk(3)
        kept = torch.full_like(logits, -torch.inf).scatter(1, best.indices, best.values)
        filtered = kept.log_softmax(-1).gather(1, at)[:, 0]
        torch.testing.assert_close(torch.tensor(answer.sampled_logprobs), filtered, atol=1e-4, rtol=1e-4)


@cache
def tokenizer() -> Tokenizer:
    return train(["hello world, hello there"] * 3, vocab_size=270)


@pytest.mark.parametrize("several", [1, 4])
def test_text_and_stop_strings(several: int) -> None:
    made = make(vocab_size=270, num_hidden_layers=2)
    engine = Engine(made, max_batch=2, max_tokens=128, tokenizer=tokenizer())
    engine._run_ahead, engine._tokens_per_replay = several > 1, lambda rows, prefilled: several  # type: ignore[method-assign]
    sampling = Sampling(1.0, top_k=100)
    prompt = tokenizer().encode("hello", add_special_tokens=False).ids
    asked = [request(prompt, 30, sampling, seed=seed) for seed in range(6)]
    whole = [answer for (answer,) in engine.run(asked)]
    for answer in whole:
        assert answer.text == tokenizer().decode(answer.tokens)
    seed, text, at = next(
        (seed, answer.text, at)
        for seed, answer in enumerate(whole)
        for at in range(4, len(answer.text) - 2)
        if REPLACEMENT not in answer.text[at : at + 2]
    )
    stop = text[at : at + 2]
    ((stopped,),) = engine.run([request(prompt, 30, sampling, seed=seed, stop_strings=(stop, "\n\n\n"))])
    assert stopped.reason == "stop"
    assert stopped.text == text[: text.index(stop)]
    assert stopped.tokens == whole[seed].tokens[: len(stopped.tokens)]
    assert stop in tokenizer().decode(stopped.tokens)
    with pytest.raises(UsageError, match="stop strings need"):
        Engine(made, max_batch=1).submit(request(prompt, stop_strings=("x",)))


def test_ends() -> None:
    engine = Engine(model(), max_batch=3, max_tokens=256, **SMALL)
    tokens = plain(model(), [5, 17, 3], 12)
    last = tokens[6]
    length = tokens.index(last)
    for kind, reason in (("eos_tokens", "eos"), ("stop_tokens", "stop")):
        ((answer,),) = engine.run([request([5, 17, 3], 12, **{kind: frozenset({last})})])
        assert (answer.tokens, answer.reason) == (tokens[:length], reason)
    full = [3] * SHAPE["max_position_embeddings"]
    (one,), (two,), (none,) = engine.run([request(full, 5), request(full[:-1], 5), request([1], 0)])
    assert (one.tokens, one.reason) == ([], "length")
    assert (two.tokens, two.reason) == (plain(model(), full[:-1], 1), "length")
    assert (none.tokens, none.reason) == ([], "length")


def test_wrong_use_is_named() -> None:
    engine = Engine(model(), max_batch=1, max_tokens=64, **SMALL)
    for asked, said in (
        (([],), "prompt: is empty"),
        (([97],), "token 97 is outside"),
        (([1, -1],), "token -1 is outside"),
        (([1, 2**70],), f"token {2**70} is outside"),
        (([1] * 65,), "65 tokens do not fit"),
    ):
        with pytest.raises(UsageError, match=said):
            engine.submit(request(*asked))
    for values, said in (
        ({"new": -1}, "max_new_tokens"),
        ({"samples": 0}, "samples"),
        ({"seed": -1}, "seed"),
        ({"stop_strings": ("",)}, "stop"),
    ):
        with pytest.raises(UsageError, match=said):
            request([1], **values)
    with pytest.raises(UsageError, match="max_batch"):
        Engine(model(), max_batch=0)
    with pytest.raises(UsageError, match="max_tokens"):
        Engine(model(), max_tokens=8)
    engine.submit(request([1]))
    with pytest.raises(UsageError, match=r"run\(\) would lose"):
        engine.run([request([1])])
    engine.cancel(0)
    engine.cancel(99)
    assert [event.reason for event in engine.events()] == ["cancelled"]
