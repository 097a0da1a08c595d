"""The sampling filters, compared with brute force in float64 and with transformers' own warpers."""

import math

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from scipy import stats
from transformers.generation.logits_process import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from deskside.engine.adjustments import penalise
from deskside.engine.counter_rng import stream_of
from deskside.engine.sampling import (
    ALL,
    GREEDY,
    GREEDY_ONLY,
    UNRANKED,
    Sampling,
    SamplingTensors,
    candidates,
    draw,
    ranked,
    ranking_width,
)
from deskside.kernels.decode_step import NOT_FINITE
from deskside.utils.errors import UsageError

# Coarse values, so that equal logits are common.
LOGITS = st.lists(st.integers(-30, 30).map(lambda n: n / 4), min_size=1, max_size=12)
SAMPLING = st.builds(
    Sampling,
    temperature=st.sampled_from([0.0, 0.25, 0.8, 1.0, 2.0]),
    top_k=st.none() | st.integers(1, 15),
    top_p=st.none() | st.sampled_from([0.1, 0.35, 0.61, 0.93, 1.0]),
    min_p=st.none() | st.sampled_from([0.013, 0.11, 0.57, 1.0]),
)


def brute_force(logits: list[float], sampling: Sampling) -> dict[int, float]:
    """Return the distribution as the docstring describes it, computed by loops over Python floats."""
    order = sorted(range(len(logits)), key=lambda token: (-logits[token], token))
    if sampling.temperature == 0:
        return {order[0]: 1.0}
    weight = {token: math.exp((logits[token] - max(logits)) / sampling.temperature) for token in order}
    kept = order[: sampling.top_k]
    if sampling.top_p is not None:
        total, held, nucleus = sum(weight[token] for token in kept), 0.0, []
        for token in kept:
            if nucleus and held / total >= sampling.top_p - 1e-9:
                break
            nucleus.append(token)
            held += weight[token]
        kept = nucleus
    if sampling.min_p is not None:
        kept = [token for token in kept if weight[token] >= sampling.min_p * weight[kept[0]] * (1 - 1e-6)]
    total = sum(weight[token] for token in kept)
    return {token: weight[token] / total for token in kept}


def boundary(logits: list[float], sampling: Sampling) -> bool:
    """Return True if a filter's limit is within rounding of a token, so that either result is right."""
    if sampling.temperature == 0:
        return False
    first = brute_force(logits, Sampling(sampling.temperature, sampling.top_k))
    held = 0.0
    for share in first.values():
        if sampling.min_p is not None and abs(share / max(first.values()) - sampling.min_p) < 1e-5:
            return sampling.min_p < 1
        held += share
        if sampling.top_p is not None and abs(held - sampling.top_p) < 1e-5:
            return True
    return False


def settings_of(sampling: Sampling, rows: int = 1, seed: int = 0) -> SamplingTensors:
    return SamplingTensors.of([sampling] * rows, [stream_of(seed, row) for row in range(rows)], "cpu")


def distribution(logits: list[float], sampling: Sampling, width: int = ALL) -> dict[int, float]:
    log_p_BW, token_BW = candidates(torch.tensor([logits]), settings_of(sampling), width)
    pairs = zip(token_BW[0], log_p_BW[0].exp(), strict=True)
    return {int(t): float(p) for t, p in pairs if p > 0}


@given(LOGITS, SAMPLING)
@settings(max_examples=300, deadline=None)
def test_filters_equal_brute_force(logits: list[float], sampling: Sampling) -> None:
    assume(not boundary(logits, sampling))
    ours, wanted = distribution(logits, sampling), brute_force(logits, sampling)
    # top_p = 1 may drop a token whose share is lost in float32.
    wanted = {token: share for token, share in wanted.items() if share > 1e-6}
    ours = {token: share for token, share in ours.items() if share > 1e-6}
    assert list(ours) == list(wanted)
    for token, share in wanted.items():
        assert ours[token] == pytest.approx(share, abs=1e-5)


@given(LOGITS, SAMPLING)
@settings(max_examples=200, deadline=None)
def test_every_width_that_is_wide_enough_gives_the_same(logits: list[float], sampling: Sampling) -> None:
    """Rows are computed with the width that the widest row of their batch needs."""
    assume(not boundary(logits, sampling))
    wanted = distribution(logits, sampling)
    need = ranking_width([sampling], len(logits))
    if sampling.temperature == 0 or (sampling.top_k is None and sampling.top_p is None):
        assert need in (UNRANKED, GREEDY_ONLY)
        assert distribution(logits, sampling, UNRANKED) == pytest.approx(wanted, abs=1e-6)
    if sampling.temperature == 0:
        assert distribution(logits, sampling, 1) == wanted
    elif sampling.top_k is not None and sampling.top_k < len(logits):
        assert distribution(logits, sampling, sampling.top_k) == pytest.approx(wanted, abs=1e-6)


def test_width_of() -> None:
    plain, greedy = Sampling(0.7, min_p=0.1), GREEDY
    assert ranking_width([greedy], 50_000) == GREEDY_ONLY
    assert ranking_width([greedy, plain], 50_000) == UNRANKED
    assert ranking_width([greedy, Sampling(top_k=50)], 50_000) == 64
    assert ranking_width([Sampling(top_k=50), Sampling(top_k=65, top_p=0.9)], 50_000) == 256
    assert ranking_width([Sampling(top_k=50)], 64) == ALL
    assert ranking_width([Sampling(top_p=0.9), plain], 50_000) == ALL
    assert ranking_width([Sampling(top_k=50), plain], 50_000) == ALL


TRANSFORMERS = [
    (Sampling(top_k=7), [TopKLogitsWarper(7)]),
    (Sampling(top_p=0.7), [TopPLogitsWarper(0.7)]),
    (Sampling(min_p=0.08), [MinPLogitsWarper(0.08)]),
    (
        Sampling(0.7, 40, 0.9, 0.02),
        [TemperatureLogitsWarper(0.7), TopKLogitsWarper(40), TopPLogitsWarper(0.9), MinPLogitsWarper(0.02)],
    ),
    (
        Sampling(1.3, 40, 0.9, repetition_penalty=1.4),
        [
            RepetitionPenaltyLogitsProcessor(1.4),
            TemperatureLogitsWarper(1.3),
            TopKLogitsWarper(40),
            TopPLogitsWarper(0.9),
        ],
    ),
    (Sampling(repetition_penalty=0.6), [RepetitionPenaltyLogitsProcessor(0.6)]),
]


@pytest.mark.parametrize(("sampling", "warpers"), TRANSFORMERS)
def test_filters_equal_transformers(sampling: Sampling, warpers: list[object]) -> None:
    generator = torch.Generator().manual_seed(3)
    logits_BV = torch.randn(16, 300, generator=generator) * 2
    text_BT = torch.randint(0, 300, (16, 40), generator=generator)
    expected_BV = LogitsProcessorList(warpers)(text_BT, logits_BV.clone()).softmax(-1)  # type: ignore[arg-type]
    seen_BV = torch.zeros(16, 300, dtype=torch.bool).scatter_(1, text_BT, True)
    rows = settings_of(sampling, 16)
    penalised_BV = penalise(logits_BV, seen_BV, rows.repetition_penalty_B)
    for width in {ranking_width([sampling], 300), ALL}:
        log_p_BW, token_BW = candidates(penalised_BV, rows, width)
        ours_BV = torch.zeros(16, 300).scatter(1, token_BW, log_p_BW.exp())
        torch.testing.assert_close(ours_BV, expected_BV)


def test_greedy_takes_the_penalty_as_transformers_does() -> None:
    logits_BV = torch.randn(8, 50, generator=torch.Generator().manual_seed(0))
    text_BT = logits_BV.topk(3).indices
    expected = RepetitionPenaltyLogitsProcessor(2.5)(text_BT, logits_BV.clone()).argmax(-1)
    seen_BV = torch.zeros(8, 50, dtype=torch.bool).scatter_(1, text_BT, True)
    rows = settings_of(Sampling(0.0, repetition_penalty=2.5), 8)
    for width in (GREEDY_ONLY, UNRANKED, ALL, 8):
        adjusted_BV = penalise(logits_BV, seen_BV, rows.repetition_penalty_B)
        drawn = draw(logits_BV, rows, width, torch.zeros(8, dtype=torch.int64), adjusted_BV)
        assert torch.equal(drawn.token_B, expected)
        assert torch.equal(drawn.sampled_logprob_B, torch.zeros(8))


def test_ranking_keeps_token_order_among_equals() -> None:
    logits_BV = torch.tensor([[0.0, -0.0, 3.0, -torch.inf, 3.0, -1.0]])
    for width in (6, 4):
        assert ranked(logits_BV, width)[0].tolist() == [2, 4, 0, 1, 5, 3][:width]
    random_BV = torch.randn(5, 2000).bfloat16()
    order_BV = random_BV.float().argsort(dim=-1, descending=True, stable=True)
    assert torch.equal(ranked(random_BV, 2000), order_BV)
    assert torch.equal(ranked(random_BV, 700), order_BV[:, :700])


@given(LOGITS, SAMPLING, st.integers(0, 2**40))
@settings(max_examples=200, deadline=None)
def test_a_draw_is_always_a_candidate(logits: list[float], sampling: Sampling, seed: int) -> None:
    drawn = draw(torch.tensor([logits]), settings_of(sampling, seed=seed), ALL, torch.tensor([seed % 7]))
    assert int(drawn.token_B[0]) in distribution(logits, sampling)


@pytest.mark.parametrize("sampling", [Sampling(0.9, top_k=4), Sampling(1.5), Sampling(0.8, min_p=0.1)])
def test_draws_follow_the_distribution(sampling: Sampling) -> None:
    """A chi-square test over many draws of one stream."""
    logits, n = [0.5, 2.0, -1.0, 1.0, 0.5], 20_000
    rows = SamplingTensors.of([sampling] * n, [stream_of(8)] * n, "cpu")
    logits_BV = torch.tensor([logits]).expand(n, -1)
    width = ranking_width([sampling], 5)
    drawn = draw(logits_BV, rows, width, torch.arange(n))
    wanted = brute_force(logits, sampling)
    counts = np.bincount(drawn.token_B.numpy(), minlength=5)
    assert counts.sum() == n and set(np.flatnonzero(counts)) <= set(wanted)
    found = [counts[token] for token in wanted]
    assert stats.chisquare(found, [n * share for share in wanted.values()]).pvalue > 0.01
    # The tokens are the same whichever way the candidates are ranked.
    assert torch.equal(drawn.token_B, draw(logits_BV, rows, ALL, torch.arange(n)).token_B)


def test_log_probabilities_of_what_was_drawn() -> None:
    logits_BV = torch.randn(30, 80, generator=torch.Generator().manual_seed(5)) * 3
    sampling = Sampling(0.6, top_k=9, top_p=0.8, repetition_penalty=1.2)
    seen_BV = torch.rand(30, 80) < 0.2
    rows = settings_of(sampling, 30)
    adjusted_BV = penalise(logits_BV, seen_BV, rows.repetition_penalty_B)
    drawn = draw(logits_BV, rows, 64, torch.zeros(30, dtype=torch.int64), adjusted_BV)
    raw_BV = (logits_BV.double() / 0.6).log_softmax(-1)
    log_p_BW, token_BW = candidates(adjusted_BV, rows, ALL)
    filtered_BV = torch.full((30, 80), -torch.inf).scatter(1, token_BW, log_p_BW)
    at = drawn.token_B[:, None]
    torch.testing.assert_close(drawn.logprob_B.double(), raw_BV.gather(1, at)[:, 0], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(drawn.sampled_logprob_B, filtered_BV.gather(1, at)[:, 0], atol=1e-6, rtol=1e-5)
    greedy = draw(logits_BV, settings_of(GREEDY, 30), GREEDY_ONLY, torch.zeros(30, dtype=torch.int64))
    torch.testing.assert_close(greedy.logprob_B, logits_BV.log_softmax(-1).amax(-1))


@pytest.mark.parametrize(
    "sampling", [GREEDY, Sampling(), Sampling(top_k=2), Sampling(repetition_penalty=10.0)]
)
@pytest.mark.parametrize(
    "logits", [[math.nan, 1.0, 2.0], [1.0, math.inf, 2.0], [-math.inf] * 3, [3e38, -3e38, 2.0]]
)
def test_logits_that_are_not_finite_draw_no_token(logits: list[float], sampling: Sampling) -> None:
    """They also leave the row beside them unaffected."""
    both = torch.tensor([logits, [0.0, 50.0, 0.0]])
    widths = [ranking_width([sampling], 3), ALL] if sampling.temperature else [GREEDY_ONLY]
    for width in widths:
        rows = settings_of(sampling, 2)
        adjusted_BV = penalise(both, torch.ones(2, 3, dtype=torch.bool), rows.repetition_penalty_B)
        drawn = draw(both, rows, width, torch.zeros(2, dtype=torch.int64), adjusted_BV)
        assert drawn.token_B.tolist() == [0 if logits[0] == 3e38 else NOT_FINITE, 1]
        assert drawn.safe_token_B.tolist() == [0, 1]


def test_extreme_values() -> None:
    zero = torch.zeros(1, dtype=torch.int64)
    for width in (UNRANKED, ALL):
        cold = draw(torch.tensor([[3.0, 5.0, 4.999]]), settings_of(Sampling(temperature=1e-30)), width, zero)
        assert int(cold.token_B[0]) == 1
        forbidden = torch.tensor([[-torch.inf, 1.0, -torch.inf]])
        assert int(draw(forbidden, settings_of(Sampling()), width, zero).token_B[0]) == 1
        assert int(draw(torch.tensor([[9.0, 9.0]]), settings_of(GREEDY), width, zero).token_B[0]) == 0


@pytest.mark.parametrize(
    "values",
    [
        {"temperature": -0.1},
        {"temperature": math.nan},
        {"temperature": 1e39},
        {"top_k": 0},
        {"top_k": 2**63},
        {"top_p": 0.0},
        {"top_p": 1.5},
        {"min_p": -1.0},
        {"repetition_penalty": 0.0},
        {"repetition_penalty": 1e-300},
        {"repetition_penalty": 1e-39},
        {"repetition_penalty": 1e30},
        {"repetition_penalty": math.nan},
    ],
)
def test_values_out_of_range_are_named(values: dict[str, float]) -> None:
    with pytest.raises(UsageError, match=next(iter(values))):
        Sampling(**values)  # type: ignore[arg-type]
