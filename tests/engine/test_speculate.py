"""Speculative decoding has the model's own distribution, compared with exact enumeration, and equal greedy tokens."""

import itertools
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats

from deskside.engine.engine import Draft, Engine
from deskside.engine.requests import Request
from deskside.engine.sampling import ALL, GREEDY, Sampling, SamplingTensors, candidates
from deskside.model.transformer import Transformer
from deskside.utils.errors import UsageError
from tests.engine.test_generate import PROMPTS, VARIANTS, adjusted, make, plain

V, NEW = 5, 3
TINY: dict[str, Any] = {"vocab_size": V, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
TINY |= {"num_key_value_heads": 1, "head_dim": 8, "intermediate_size": 16, "max_position_embeddings": 16}


def make_draft(model: Transformer, noise: float) -> Transformer:
    """Return a slightly different model: its drafts are accepted often, but not always."""
    draft = Transformer(model.config)
    draft.load_state_dict(model.state_dict())
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for parameter in draft.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * noise)
    return draft


@torch.no_grad()
def probability(model: Transformer, prompt: list[int], text: tuple[int, ...], sampling: Sampling) -> float:
    """Return the probability of exactly this continuation, computed token by token with the whole model."""
    settings, total, tokens = SamplingTensors.of([sampling], [0], "cpu"), 1.0, list(prompt)
    for token in text:
        logits_BV = model(torch.tensor([tokens]))[:, -1]
        adjusted_BV = adjusted(logits_BV, sampling, prompt, tokens[len(prompt) :])
        log_p, order = candidates(adjusted_BV, settings, ALL)
        total *= float(log_p[0, order[0] == token].exp())
        tokens.append(token)
    return total


@pytest.mark.parametrize(
    ("sampling", "drafts"),
    [
        pytest.param(Sampling(1.0), 2, marks=pytest.mark.full),
        (Sampling(0.8, top_k=3, repetition_penalty=1.5, frequency_penalty=0.6), 4),
        pytest.param(Sampling(1.3, top_p=0.8, min_p=0.05), 1, marks=pytest.mark.full),
    ],
)
def test_sequences_have_the_models_distribution(sampling: Sampling, drafts: int) -> None:
    model = make(**TINY)
    draft = make_draft(model, 0.3)
    prompt, n = [1, 3], 3_000
    engine = Engine(model, max_batch=500, max_tokens=10_000, draft=Draft(draft, drafts), page_size=4)
    (answers,) = engine.run([Request(tuple(prompt), NEW, sampling, seed=11, samples=n)])
    found: dict[tuple[int, ...], int] = {}
    for answer in answers:
        found[tuple(answer.tokens)] = found.get(tuple(answer.tokens), 0) + 1
        assert len(answer.tokens) == NEW
    texts = list(itertools.product(range(V), repeat=NEW))
    exact = np.array([probability(model, prompt, text, sampling) for text in texts])
    counts = np.array([found.pop(text, 0) for text in texts])
    assert not found and exact.sum() == pytest.approx(1, abs=1e-5)
    assert counts[exact == 0].sum() == 0
    rare = n * exact < 5  # merged into one class, as the chi-square test requires
    observed = np.append(counts[~rare], counts[rare].sum())
    wanted = np.append(n * exact[~rare], n * exact[rare].sum())
    keep = wanted > 0
    assert stats.chisquare(observed[keep], wanted[keep] * n / wanted.sum()).pvalue > 0.01
    # The draft model's own distribution would not have passed.
    other = np.array([probability(draft, prompt, text, sampling) for text in texts])
    assert np.abs(other - exact).sum() > 0.1


@cache
def pair(name: str) -> tuple[Transformer, Transformer]:
    model = make(**VARIANTS[name])
    return model, make_draft(model, 0.05)


@pytest.mark.parametrize(
    "name, sampling",
    [(name, GREEDY) for name in ("window", "moe")]
    + [pytest.param(name, GREEDY, marks=pytest.mark.full) for name in ("gqa", "learned", "capped")]
    + [
        pytest.param("gqa", Sampling(0.0, repetition_penalty=1.3), marks=pytest.mark.full),
        ("gqa", Sampling(0.0, presence_penalty=0.5, frequency_penalty=0.4, logit_bias=((7, 1.0),))),
    ],
)
def test_greedy_equals_plain_decoding(name: str, sampling: Sampling) -> None:
    """Prompts of unequal lengths run up to the last position, with fewer rows than prompts."""
    model, draft = pair(name)
    engine = Engine(model, max_batch=3, max_tokens=256, draft=Draft(draft, 3), page_size=4, prefill_tokens=16)
    free = engine.free_tokens
    prompts = [*PROMPTS, [7] * 58]
    answers = engine.run([Request(tuple(prompt), 25, sampling) for prompt in prompts])
    for prompt, (answer,) in zip(prompts, answers, strict=True):
        assert answer.tokens == plain(model, prompt, 25, sampling)
        assert answer.reason == "length"
    assert engine.free_tokens == free


def test_fewer_steps_than_tokens_and_all_drafts_of_the_model_itself_are_taken() -> None:
    model, _ = pair("gqa")
    for proposer, most in ((model, 6), (make_draft(model, 0.005), 15)):
        engine = Engine(model, max_batch=1, max_tokens=64, draft=Draft(proposer, 4))
        engine.submit(Request((5, 17, 3), 25))
        steps = 0
        while not engine.idle:
            engine.step()
            steps += 1
        assert steps <= most  # one token for the prompt, then 1 to 5 tokens per step


def test_a_row_is_the_same_alone_and_in_company_and_log_probabilities_are_the_models() -> None:
    model, draft = pair("gqa")
    sampling = Sampling(0.9, top_k=20)
    asked = [Request(tuple(prompt), 12, sampling, seed=4, logprobs=True) for prompt in PROMPTS]
    together = Engine(model, max_batch=4, max_tokens=256, draft=Draft(draft, 3)).run(asked)
    for request, (answer,) in zip(asked, together, strict=True):
        engine = Engine(model, max_batch=1, max_tokens=64, draft=Draft(draft, 3))
        ((alone,),) = engine.run([request])
        assert alone.tokens == answer.tokens
        tokens = torch.tensor([[*request.prompt, *answer.tokens]])
        with torch.no_grad():
            logits = model(tokens)[0, len(request.prompt) - 1 : -1] / 0.9
        at = tokens[0, len(request.prompt) :, None]
        raw = logits.log_softmax(-1).gather(1, at)[:, 0]
        torch.testing.assert_close(torch.tensor(answer.logprobs), raw, atol=1e-4, rtol=1e-4)
        kept = logits.masked_fill(logits < logits.topk(20).values[:, -1:], -torch.inf)
        filtered = kept.log_softmax(-1).gather(1, at)[:, 0]
        torch.testing.assert_close(torch.tensor(answer.sampled_logprobs), filtered, atol=1e-4, rtol=1e-4)


def test_ends_within_what_was_drafted() -> None:
    model, _ = pair("gqa")
    tokens = plain(model, [5, 17, 3], 20)
    engine = Engine(model, max_batch=1, max_tokens=64, draft=Draft(model, 6))
    for length in (1, 2, 5, 8):
        ((answer,),) = engine.run([Request((5, 17, 3), length)])
        assert answer.tokens == tokens[:length]
    ((answer,),) = engine.run([Request((5, 17, 3), 20, eos_tokens=frozenset({tokens[9]}))])
    assert answer.tokens == tokens[: tokens.index(tokens[9])] and answer.reason == "eos"


def test_a_row_that_fills_the_whole_cache() -> None:
    """The last drafts would exceed its last page, and the cache has no other one."""
    model, draft = pair("gqa")
    engine = Engine(model, max_batch=2, max_tokens=32, draft=Draft(draft, 5), page_size=4)
    ((answer,),) = engine.run([Request((5, 17, 3), 29)])
    assert answer.tokens == plain(model, [5, 17, 3], 29)


def test_another_vocabulary_is_refused() -> None:
    with pytest.raises(UsageError, match="vocabulary has 90 tokens, but the model's has 97"):
        Engine(make(), draft=Draft(make(vocab_size=90)))
