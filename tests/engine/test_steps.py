"""Behaviour that is specific to a GPU, as far as a CPU can run it: fused blocks, padded lanes, one step ahead."""

from typing import Any

import pytest
import torch

from deskside.engine.engine import (
    MAX_STEP_SECONDS,
    MAX_WAIT_SECONDS,
    PREFILL_BESIDE,
    TOKENS_PER_REPLAY,
    Draft,
    Engine,
)
from deskside.engine.fused import FusedBlocks, covers_attention, covers_mlp
from deskside.engine.graphs import bucket
from deskside.engine.requests import Request
from deskside.engine.sampling import GREEDY, Sampling
from deskside.kernels import few_tokens
from deskside.model.block import DEFAULT_BLOCKS, MLP, Block
from deskside.model.transformer import Transformer
from tests.engine.test_generate import PROMPTS, VARIANTS, make, plain

FUSED = VARIANTS | {
    "apart": {"fused_qkv": False, "fused_gate_up": False},
    "bias": {"attention_bias": True, "mlp_bias": True},
    "relu2": {"gated_mlp": False, "hidden_act": "relu2"},
    "gelu": {"hidden_act": "gelu_new"},
    "parallel, covered": {"parallel_residual": True},
    "sandwich, covered": {"norm_position": "sandwich"},
    "multiplier": {"residual_multiplier": 0.3},
    "some uncovered": {"fused_gate_up": False},
}


@pytest.mark.parametrize("few", [False, True])
@pytest.mark.parametrize("name", FUSED)
def test_fused_blocks_equal_the_models(name: str, few: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """few: products of few tokens as on a GPU, in their torch form."""
    model = make(**FUSED[name])
    if few:
        monkeypatch.setattr(few_tokens, "supports", lambda x, weight: len(x) <= few_tokens.MAX_TOKENS)
    prompt, new = torch.arange(2 * 9).view(2, 9) * 5 % 97, torch.tensor([[3, 4], [60, 1]])
    caches = [model.new_cache(2, 32) for _ in range(2)]
    counts, blocks = torch.tensor([9, 6]), FusedBlocks(model)
    firsts = [
        model.forward_cached(prompt, cache, counts, "last", how)
        for cache, how in zip(caches, (DEFAULT_BLOCKS, blocks), strict=True)
    ]
    torch.testing.assert_close(firsts[1], firsts[0], atol=1e-3, rtol=1e-3)
    expected = model.forward_cached(new, caches[0])
    got = model.forward_cached(new, caches[1], blocks=blocks)
    torch.testing.assert_close(got, expected, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(caches[1].k, caches[0].k, atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(caches[1].v, caches[0].v, atol=1e-5, rtol=1e-4)


def test_what_is_covered() -> None:
    def covered(**changes: Any) -> tuple[bool, bool]:
        block = make(**changes).layers[0]
        assert isinstance(block, Block)
        return covers_attention(block.attn), isinstance(block.mlp, MLP) and covers_mlp(block.mlp)

    assert covered() == covered(**FUSED["bias"]) == covered(**FUSED["relu2"]) == (True, True)
    assert covered(**FUSED["moe"]) == (True, False)
    assert (
        covered(**FUSED["apart"])
        == covered(**FUSED["capped"])
        == covered(**FUSED["learned"])
        == (False, False)
    )
    assert covered(fused_gate_up=False) == (True, False)


def as_on_a_gpu(model: Transformer, **options: Any) -> Engine:
    engine = Engine(model, **options)
    engine._run_ahead = True
    for forward in engine._models:
        forward.blocks = FusedBlocks(forward.model)
    return engine


@pytest.mark.parametrize(("drafted", "several"), [(False, 1), (False, 4), (True, 1)])
def test_one_step_ahead_gives_the_same(drafted: bool, several: int) -> None:
    """Rows end by length, by a token that the host learns about a step late, and by cancellation."""
    model = make(num_hidden_layers=2)
    draft = Draft(make(num_hidden_layers=1)) if drafted else None
    engine = as_on_a_gpu(model, max_batch=3, max_tokens=200, page_size=4, prefill_tokens=16, draft=draft)
    engine._tokens_per_replay = lambda rows, prefilled: several  # type: ignore[method-assign]
    free = engine.free_tokens
    prompts = [*PROMPTS, [9, 9, 4], [33], [5, 17, 3, 8]]
    alone = [plain(model, prompt, 14) for prompt in prompts]
    eos = [tokens[4] if number % 2 else 96 for number, tokens in enumerate(alone)]
    numbers = [
        engine.submit(Request(tuple(prompt), 14, GREEDY, eos_tokens=frozenset({end})))
        for prompt, end in zip(prompts, eos, strict=True)
    ]
    gone = engine.submit(Request((1, 2, 3), 40))
    answers: dict[int, list[int]] = {number: [] for number in [*numbers, gone]}
    reasons: dict[int, str] = {}
    while not engine.idle:
        for event in engine.step():
            assert event.request not in reasons
            if event.token is not None:
                answers[event.request].append(event.token)
            if event.reason is not None:
                reasons[event.request] = event.reason
        if len(answers[gone]) >= 5 and gone not in reasons:
            engine.cancel(gone)
    for number, tokens, end in zip(numbers, alone, eos, strict=True):
        stop = tokens.index(end) if end in tokens else len(tokens)
        assert answers[number] == tokens[:stop]
        assert reasons[number] == ("eos" if end in tokens else "length")
    assert reasons[gone] == "cancelled"
    assert engine.free_tokens == free


def test_a_slot_is_used_again_while_its_last_step_still_runs() -> None:
    """There is one slot, and rows end by a token: each next row is admitted while a dropped step is in flight."""
    model = make(num_hidden_layers=2)
    engine = as_on_a_gpu(model, max_batch=1, max_tokens=64, page_size=4)
    sampling = Sampling(0.9, repetition_penalty=1.2)
    asked = []
    for seed, prompt in enumerate(PROMPTS):
        tokens = plain(model, prompt, 10, sampling, seed=seed)
        asked.append(Request(tuple(prompt), 10, sampling, seed, eos_tokens=frozenset({tokens[5]})))
    for request, (answer,) in zip(asked, engine.run(asked), strict=True):
        tokens = plain(model, list(request.prompt), 10, sampling, seed=request.seed)
        (end,) = request.eos_tokens
        assert answer.tokens == tokens[: tokens.index(end)]


def test_buckets_rise_and_hold_their_lanes() -> None:
    sizes = [bucket(lanes) for lanes in range(1, 300)]
    assert sizes == sorted(sizes)
    assert all(lanes <= size <= max(2 * lanes, lanes + 31) for lanes, size in enumerate(sizes, 1))
    assert len(set(sizes)) < 20


@pytest.mark.parametrize("sampling", [Sampling(0.9, repetition_penalty=1.3), Sampling(0.8, top_k=20)])
def test_several_tokens_a_step_draw_and_weigh_as_one_by_one(sampling: Sampling) -> None:
    model = make(num_hidden_layers=2)
    asked = [
        Request(tuple(p), 10, sampling, seed=2, first_sample=n, logprobs=True) for n, p in enumerate(PROMPTS)
    ]
    answers = []
    for several in (1, 4):
        engine = as_on_a_gpu(model, max_batch=3, max_tokens=200, page_size=4)
        engine._tokens_per_replay = lambda rows, prefilled, several=several: several  # type: ignore[misc, method-assign]
        answers.append([answer for (answer,) in engine.run(asked)])
    for one, four in zip(*answers, strict=True):
        assert one.tokens == four.tokens
        torch.testing.assert_close(
            torch.tensor(one.logprobs), torch.tensor(four.logprobs), atol=1e-5, rtol=1e-5
        )
        assert len(four.sampled_logprobs) == 10


def test_when_a_step_has_several_tokens() -> None:
    engine = as_on_a_gpu(make(num_hidden_layers=1), max_batch=2, max_tokens=400, page_size=4)

    def tokens(prefilled: int = 0) -> int:
        return engine._tokens_per_replay([row for row in engine._rows.running if row.prefill_done], prefilled)

    engine.submit(Request((1, 2, 3), 40))
    engine.step()
    assert tokens() == 1  # no graphs
    engine._graphs = object()  # type: ignore[assignment]
    assert tokens() == 1  # the device's time is unknown
    engine._step_seconds = MAX_STEP_SECONDS / 2
    assert tokens() == tokens(PREFILL_BESIDE) == TOKENS_PER_REPLAY
    assert tokens(PREFILL_BESIDE + 1) == 1  # the device has enough to do
    engine._step_seconds = 2 * MAX_STEP_SECONDS
    assert tokens() == 1
    engine._step_seconds = MAX_STEP_SECONDS
    assert tokens() == TOKENS_PER_REPLAY
    engine.submit(Request((4,), 40))
    assert tokens() == 1  # a row would wait too long
    engine._admit()
    assert tokens() == 1  # so would its prompt
    engine._step_seconds = MAX_WAIT_SECONDS / TOKENS_PER_REPLAY
    assert tokens() == TOKENS_PER_REPLAY
    for row in engine._rows.running:
        row.prefilled = len(row.prompt_tokens)
    assert tokens() == TOKENS_PER_REPLAY
    for row in engine._rows.running:
        row.tokens_in_flight = 40 - TOKENS_PER_REPLAY + 1
    assert tokens() == 1  # no row needs so many
