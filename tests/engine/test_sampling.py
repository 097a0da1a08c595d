"""The filters against brute force in float64 and against transformers' own warpers."""

import math

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from transformers.generation.logits_process import MinPLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from deskside.engine.sampling import Sampling, Uniforms, candidates, choose
from deskside.errors import UsageError

LOGITS = st.lists(
    st.integers(-30, 30).map(lambda n: n / 4), min_size=1, max_size=12
)  # coarse, so that equal logits are common
SAMPLING = st.builds(
    Sampling,
    temperature=st.sampled_from([0.0, 0.25, 0.8, 1.0, 2.0]),
    top_k=st.none() | st.integers(1, 15),
    top_p=st.none() | st.sampled_from([0.1, 0.35, 0.61, 0.93, 1.0]),
    min_p=st.none() | st.sampled_from([0.013, 0.11, 0.57, 1.0]),
)


def brute_force(logits: list[float], sampling: Sampling) -> dict[int, float]:
    """The distribution as the docstring words it, by loops over Python floats."""
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
    """True where a filter's limit falls on a token to within rounding, so that either answer is right."""
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


def distribution(logits: list[float], sampling: Sampling) -> dict[int, float]:
    p_BV, token_BV = candidates(torch.tensor([logits]), sampling)
    return {int(t): float(p) for t, p in zip(token_BV[0], p_BV[0], strict=True) if p > 0}


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


@pytest.mark.parametrize(
    ("sampling", "warper"),
    [
        (Sampling(top_k=7), TopKLogitsWarper(7)),
        (Sampling(top_p=0.7), TopPLogitsWarper(0.7)),
        (Sampling(min_p=0.08), MinPLogitsWarper(0.08)),
    ],
)
def test_each_filter_equals_transformers(sampling: Sampling, warper: object) -> None:
    logits_BV = torch.randn(16, 300, generator=torch.Generator().manual_seed(3)) * 2
    expected_BV = warper(None, logits_BV.clone()).softmax(-1)  # type: ignore[operator]
    p_BV, token_BV = candidates(logits_BV, sampling)
    torch.testing.assert_close(torch.zeros_like(p_BV).scatter(1, token_BV, p_BV), expected_BV)


@given(LOGITS, SAMPLING, st.floats(0, 1, exclude_max=True))
@settings(max_examples=200, deadline=None)
def test_a_draw_is_always_a_candidate(logits: list[float], sampling: Sampling, u: float) -> None:
    token = int(choose(torch.tensor([logits]), sampling, torch.tensor([u], dtype=torch.float64))[0])
    assert token in distribution(logits, sampling)


def test_draws_invert_the_cumulative_distribution() -> None:
    """A fine grid of uniforms must hit each token in proportion to its probability."""
    logits, sampling, grid = [0.5, 2.0, -1.0, 1.0, 0.5], Sampling(temperature=0.9, top_k=4), 20_000
    u_B = (torch.arange(grid, dtype=torch.float64) + 0.5) / grid
    tokens_B = choose(torch.tensor([logits]).expand(grid, -1), sampling, u_B)
    for token, share in brute_force(logits, sampling).items():
        assert int((tokens_B == token).sum()) / grid == pytest.approx(share, abs=1 / grid + 1e-6)


def test_extreme_values() -> None:
    u_B = torch.tensor([1 - 2**-53], dtype=torch.float64)
    cold = Sampling(temperature=1e-30)
    assert int(choose(torch.tensor([[3.0, 5.0, 4.999]]), cold, u_B)[0]) == 1
    forbidden = torch.tensor([[-torch.inf, 1.0, -torch.inf]])
    assert int(choose(forbidden, Sampling(), u_B)[0]) == 1
    assert int(choose(torch.tensor([[9.0, 9.0]]), Sampling(temperature=0), u_B)[0]) == 0


def test_a_rows_numbers_do_not_depend_on_its_neighbours() -> None:
    wide, narrow = Uniforms(5, 8), Uniforms(5, 3)
    assert wide.draw(list(range(8)))[2] == narrow.draw([2])[0]
    assert wide.draw([2])[0] == narrow.draw([2])[0]
    assert len(set(Uniforms(5, 50).draw(list(range(50))).tolist())) == 50
    assert Uniforms(6, 1).draw([0])[0] != Uniforms(5, 1).draw([0])[0]


@pytest.mark.parametrize(
    "values",
    [
        {"temperature": -0.1},
        {"temperature": math.nan},
        {"top_k": 0},
        {"top_p": 0.0},
        {"top_p": 1.5},
        {"min_p": -1.0},
    ],
)
def test_values_out_of_range_are_named(values: dict[str, float]) -> None:
    with pytest.raises(UsageError, match=next(iter(values))):
        Sampling(**values)  # type: ignore[arg-type]
