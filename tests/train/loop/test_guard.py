"""Tests of the loss and gradient guard: which steps it skips, its limit, and when it reports too many skips."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from deskside.config.sections import MIN_NORMS, GuardConfig
from deskside.train.loop.guard import Guard

NORMS = st.lists(st.floats(0.1, 10.0), min_size=1, max_size=120)


def skip(guard: Guard, loss: float, norm: float, step: int) -> bool:
    return bool(guard.skip(torch.tensor(loss), torch.tensor(norm), step))


def filled(steps: int, norm: float = 1.0, config: GuardConfig | None = None) -> Guard:
    guard = Guard(config or GuardConfig())
    for step in range(1, steps + 1):
        guard.record(step, 2.0, norm, False)
    return guard


@given(NORMS, st.integers(MIN_NORMS, 64))
def test_the_limit_does_not_depend_on_when_the_host_looks(norms: list[float], window: int) -> None:
    """A host that knows all earlier steps and one that lacks the newest give a step the same limit."""
    config = GuardConfig(window=window)
    prompt, late = Guard(config), Guard(config)
    for step, norm in enumerate(norms, 1):
        assert late.limit(step) == prompt.limit(step)
        usable = sorted(norms[: max(0, step - 2)][-window:])
        if len(usable) < MIN_NORMS:
            assert prompt.limit(step) == math.inf
        else:
            percentile = np.percentile(usable, 90, method="lower")
            assert prompt.limit(step) == pytest.approx(10 * percentile)
        prompt.record(step, 1.0, norm, False)
        if step > 1:
            late.record(step - 1, 1.0, norms[step - 2], False)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_step_that_is_not_finite_is_skipped(bad: float) -> None:
    guard = Guard(GuardConfig())
    assert not skip(guard, 5.0, 1e30, 1)  # no history yet, so anything finite passes
    assert skip(guard, bad, 1.0, 1) and skip(guard, 5.0, bad, 1)
    assert "not finite" in str(guard.record(1, bad, 1.0, True))


def test_a_spike_is_skipped_and_does_not_move_the_limit() -> None:
    guard = filled(30)
    assert not skip(guard, 1.0, 9.9, 31) and skip(guard, 1.0, 10.1, 31)
    assert "10 times" in str(guard.record(31, 1.0, 1e6, True))
    for step in range(32, 40):
        assert guard.limit(step) == 10.0


def test_every_window_detects_spikes() -> None:
    """A window that holds too few norms would detect none, whatever the run does."""
    with pytest.raises(ValidationError, match=f"window\\n.*{MIN_NORMS}"):
        GuardConfig(window=MIN_NORMS - 1)
    assert filled(MIN_NORMS + 1, config=GuardConfig(window=MIN_NORMS)).limit(MIN_NORMS + 2) == 10.0


def test_steps_without_a_gradient_take_no_place_in_the_window() -> None:
    """In GRPO, a step has none if all answers to its questions earned the same reward."""
    guard = Guard(GuardConfig(window=MIN_NORMS))
    for step in range(1, 5 * MIN_NORMS):
        guard.record(step, 1.0, 1.0 if step % 4 == 0 else 0.0, False)
    assert guard.limit(5 * MIN_NORMS + 1) == 10.0
    again = Guard(GuardConfig(window=MIN_NORMS))
    again.restore({"norms": [[1, 0.0]] * MIN_NORMS, "in_a_row": 0})  # of a checkpoint that recorded them
    assert again.limit(MIN_NORMS + 3) == math.inf


def test_norms_with_a_heavy_tail_are_not_all_spikes() -> None:
    """In DPO that has learned most pairs, most batches have a norm of 0.05, and one in six has 3 to 60."""
    random = np.random.default_rng(0)
    guard, skipped = Guard(GuardConfig()), 0
    for step in range(1, 601):
        norm = float(random.uniform(3, 60) if random.random() < 1 / 6 else 0.05)
        bad = skip(guard, 0.01, norm, step)
        guard.record(step, 0.01, norm, bad)
        skipped += bad
        assert not guard.too_many_skips
    assert skipped < 20


def test_too_many_in_a_row() -> None:
    guard = filled(3, config=GuardConfig(max_skips=3))
    seen = []
    for step in range(4, 10):
        guard.record(step, 1.0 if step == 6 else math.nan, 1.0, step != 6)
        seen.append(guard.too_many_skips)
    assert seen == [False, False, False, False, False, True]


@given(NORMS, st.integers(0, 5))
def test_the_state_comes_back(norms: list[float], bad: int) -> None:
    guard = Guard(GuardConfig(window=20))
    for step, norm in enumerate(norms, 1):
        guard.record(step, 1.0, norm, False)
    for step in range(len(norms) + 1, len(norms) + 1 + bad):
        guard.record(step, math.nan, 1.0, True)
    again = Guard(GuardConfig(window=20))
    again.restore(guard.state())
    assert again.state() == guard.state()
    for step in range(len(norms) + bad, len(norms) + bad + 3):
        assert again.limit(step) == guard.limit(step)
    end = len(norms) + bad + 1
    assert again.record(end, math.nan, 1.0, True) == guard.record(end, math.nan, 1.0, True)
