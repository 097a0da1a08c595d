"""The scaling rules are neutral at their reference, and have the invariants that they are derived from."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deskside.budget.loss import LAW
from deskside.budget.scaling import (
    MIN_TOKENS_PER_GPU,
    REFERENCES,
    batch_on_gpus,
    batch_token_factor,
    best_batch_tokens,
    scales,
)


@pytest.mark.parametrize("name", ["muon", "adamw"])
def test_neutral_at_the_reference(name: str) -> None:
    r = REFERENCES[name]
    s = scales(r.hidden_size, r.batch_tokens, r.total_tokens, name)  # type: ignore[arg-type]
    assert (s.lr, s.embedding_lr, s.weight_decay) == (1, 1, 1)


@given(st.integers(64, 8192), st.integers(1024, 2**24), st.integers(10**6, 10**13))
def test_decay_over_the_whole_run_is_invariant(hidden: int, batch: int, tokens: int) -> None:
    """lr x decay x steps, the number of times that weights are forgotten, is the same for every run."""
    r = REFERENCES["muon"]
    s = scales(hidden, batch, tokens)
    assert s.lr * s.weight_decay * tokens / batch == pytest.approx(r.total_tokens / r.batch_tokens)
    assert s.embedding_lr == pytest.approx(s.lr * math.sqrt(768 / hidden))


def test_known_batches() -> None:
    def rounded(total_tokens: float) -> int:
        return 2 ** round(math.log2(best_batch_tokens(total_tokens)))

    # The best values of our own arms (docs/log.md), at their horizon and at that of the 300 s runs.
    assert rounded(82_000_000) == rounded(170_000_000) == 2**16
    # nanochat trains with 2^19 tokens per step at 1.2 billion tokens and with 2^20 at 8.76 billion. We stay below.
    assert rounded(1_200_000_000) == 2**17
    assert rounded(8_760_000_000) == 2**19
    assert best_batch_tokens(82_000_000 * 2**10) == pytest.approx(2**16 * 2**3.83)


@pytest.mark.parametrize("batch, measured", [(2**16, 1.206), (2**17, 1.215), (2**18, 1.249)])
def test_a_larger_batch_needs_more_tokens(batch: int, measured: float) -> None:
    """Uses the three runs that the critical batch was fitted to (docs/log.md): 124m, 82 million tokens."""
    weights, tokens = 99_500_000, 82_000_000
    lost = LAW.at(weights, tokens / batch_token_factor(batch, tokens)) - LAW.at(weights, tokens)
    assert lost == pytest.approx(measured - 1.206, abs=0.01)


@given(st.integers(10**6, 10**13), st.integers(0, 8))
def test_tokens_grow_with_the_batch_beyond_the_best(tokens: int, doublings: int) -> None:
    best = 2 ** round(math.log2(best_batch_tokens(tokens)))
    factors = [batch_token_factor(best * 2**n, tokens) for n in (-1, 0, doublings, doublings + 1)]
    assert factors[:2] == [1, 1] and factors[2] < factors[3] <= 2 ** (doublings + 1)
    # A longer run has a larger critical batch and a larger best batch.
    assert batch_token_factor(best * 2**9, 8 * tokens) < batch_token_factor(best * 2**9, tokens)


@given(st.floats(1e3, 1e8), st.integers(1, 64), st.integers(1, 2**16), st.floats(1e3, 1e9))
def test_batch_on_gpus(tokens: float, gpus: int, unit: int, most: float) -> None:
    batch = batch_on_gpus(tokens, gpus, unit, most)
    units = batch // (gpus * unit)
    assert units * gpus * unit == batch and units & (units - 1) == 0
    if units > 1:
        wanted = min(max(tokens, gpus * min(tokens, MIN_TOKENS_PER_GPU)), most)
        assert 2**-0.501 < batch / wanted < 2**0.501


def test_bad_input() -> None:
    with pytest.raises(ValueError, match="total_tokens must be above zero"):
        scales(768, 1024, 0)
    with pytest.raises(ValueError, match="above zero"):
        best_batch_tokens(0)
