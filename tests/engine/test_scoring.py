"""Log-probabilities of prompts and answers, and sums of hidden states, compared with the whole model."""

from typing import Any

import pytest
import torch

from deskside.engine import scoring
from deskside.engine.engine import Draft, Engine
from deskside.engine.requests import Request, SampleOutput
from deskside.engine.sampling import TOP_LOGPROBS, Sampling
from deskside.model.transformer import Transformer
from tests.engine.test_generate import PROMPTS, make
from tests.engine.test_speculate import make_draft

LONG = tuple(range(1, 41))


@torch.no_grad()
def log_probabilities(model: Transformer, tokens: list[int], temperature: float = 1.0) -> torch.Tensor:
    return (model(torch.tensor([tokens]))[0].double() / temperature).log_softmax(-1)


def check_prompt_scores(model: Transformer, prompt: tuple[int, ...], answer: SampleOutput, top: int) -> None:
    assert answer.prompt is not None
    expected = log_probabilities(model, list(prompt))[:-1]
    given = expected.gather(1, torch.tensor(prompt[1:])[:, None])[:, 0].tolist() if len(prompt) > 1 else []
    assert answer.prompt.logprobs == pytest.approx(given, abs=1e-4)
    best = expected.topk(top)
    assert [[token for token, _ in place] for place in answer.prompt.tops] == best.indices.tolist()
    assert [p for place in answer.prompt.tops for _, p in place] == pytest.approx(
        best.values.flatten().tolist(), abs=1e-4
    )


@pytest.mark.parametrize("prefill_tokens", [7, 64])
@pytest.mark.parametrize("drafts", [False, True])
def test_prompts_are_scored_beside_other_requests(
    prefill_tokens: int, drafts: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompts are scored in parts, in small pieces of logits, after a request has
    left the same prompt in the cache.
    """
    monkeypatch.setattr(scoring, "LOGIT_BYTES", 4 * 97 * 3)
    model = make()
    draft = Draft(make_draft(model, 0.1), 2) if drafts else None
    engine = Engine(
        model, max_batch=3, max_tokens=512, page_size=4, prefill_tokens=prefill_tokens, draft=draft
    )
    plain = [Request(tuple(prompt), 4) for prompt in (*PROMPTS, LONG)]
    before = engine.run(plain)
    free = engine.free_tokens
    scored = [Request(r.prompt, new, prompt_logprobs=3) for r in plain for new in (0, 4)]
    found = engine.run(
        [request for pair in zip(plain, scored[::2], scored[1::2], strict=True) for request in pair]
    )
    for number, request in enumerate(plain):
        (again,), (only,), (both,) = found[3 * number : 3 * number + 3]
        assert again.tokens == both.tokens == before[number][0].tokens and again.prompt is None
        assert only.tokens == [] and only.reason == both.reason == "length"
        check_prompt_scores(model, request.prompt, only, 3)
        check_prompt_scores(model, request.prompt, both, 3)
    assert engine.idle and engine.free_tokens == free


def test_prompts_of_a_model_that_scales_its_logits() -> None:
    """As Granite's. The mean of hidden states is not scaled, as in transformers' last_hidden_state."""
    model = make(logits_scaling=4.0)
    engine = Engine(model, max_batch=2, max_tokens=256)
    ((answer,),) = engine.run([Request(LONG, 0, prompt_logprobs=3, embed=True)])
    check_prompt_scores(model, LONG, answer, 3)
    with torch.no_grad():
        hidden_BTD = 4 * model.hidden(torch.tensor([LONG]))
    assert answer.prompt is not None and answer.prompt.hidden_sum is not None
    torch.testing.assert_close(answer.prompt.hidden_sum, hidden_BTD[0].double().sum(0), atol=1e-4, rtol=1e-4)


def test_a_prompt_is_scored_once_for_all_samples() -> None:
    engine = Engine(make(), max_batch=4, max_tokens=512, page_size=4)
    for new in (0, 3):
        request = Request(LONG, new, Sampling(), samples=3, prompt_logprobs=0)
        first, *others = engine.run([request])[0]
        assert first.prompt is not None and first.prompt.tops == [()] * (len(LONG) - 1)
        assert [other.prompt for other in others] == [None, None]
        assert [len(answer.tokens) for answer in (first, *others)] == [new] * 3


def test_hidden_states_are_summed_over_the_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    model = make()
    kept: list[torch.Tensor] = []
    logits = Transformer.logits

    def keep(self: Transformer, hidden_BTD: torch.Tensor) -> torch.Tensor:
        kept.append(hidden_BTD)
        return logits(self, hidden_BTD)

    engine = Engine(model, max_batch=2, max_tokens=256, page_size=4, prefill_tokens=16)
    found = engine.run([Request(tuple(p), 0, embed=True) for p in (*PROMPTS, LONG)])
    monkeypatch.setattr(Transformer, "logits", keep)
    for prompt, (answer,) in zip((*PROMPTS, LONG), found, strict=True):
        with torch.no_grad():
            model(torch.tensor([prompt]))
        assert answer.prompt is not None and answer.prompt.hidden_sum is not None
        torch.testing.assert_close(
            answer.prompt.hidden_sum, kept[-1][0].double().sum(0), atol=1e-4, rtol=1e-4
        )


@pytest.mark.parametrize("drafts", [False, True])
def test_top_logprobs_of_answers(drafts: bool) -> None:
    model = make()
    draft = Draft(make_draft(model, 0.1), 2) if drafts else None
    engine = Engine(model, max_batch=3, max_tokens=512, draft=draft)
    samplings: list[tuple[Sampling, int]] = [
        (Sampling(0.0), 5),
        (Sampling(0.7), TOP_LOGPROBS),
        (Sampling(), 0),
    ]
    asked = [Request(LONG, 6, s, logprobs=True, top_logprobs=top) for s, top in samplings]
    for request, (answer,) in zip(asked, engine.run(asked), strict=True):
        expected = log_probabilities(model, [*LONG, *answer.tokens], request.sampling.temperature or 1.0)
        for place, top in enumerate(answer.tops, len(LONG) - 1):
            best = expected[place].topk(request.top_logprobs)
            assert [token for token, _ in top] == best.indices.tolist()
            assert [p for _, p in top] == pytest.approx(best.values.tolist(), abs=1e-4)
    # A greedy token is the most probable one, with exactly the same log-probability.
    greedy: Any = engine.run(asked[:1])[0][0]
    assert [(t, p) for t, p in zip(greedy.tokens, greedy.logprobs, strict=True)] == [
        top[0] for top in greedy.tops
    ]
