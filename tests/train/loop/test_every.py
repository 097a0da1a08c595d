"""Intervals in steps, tokens and seconds."""

from hypothesis import given
from hypothesis import strategies as st

from deskside.config.duration import Duration
from deskside.train.loop.clock import Every, Position


def at(step: int) -> Position:
    return Position(step, step * 256, step * 0.5)


@given(st.integers(1, 40), st.integers(0, 100))
def test_steps_are_due_at_multiples_and_the_same_after_a_resume(every: int, resumed: int) -> None:
    straight = Every(Duration(every, "steps"), at(0))
    due = [s for s in range(1, 200) if straight.due(at(s))]
    assert due == list(range(every, 200, every))
    again = Every(Duration(every, "steps"), at(resumed))
    assert [s for s in range(resumed + 1, 200) if again.due(at(s))] == [s for s in due if s > resumed]


@given(st.integers(1, 5000))
def test_tokens_are_due_with_the_step_that_crosses(every: int) -> None:
    interval = Every(Duration(every, "tokens"), at(0))
    due = [s for s in range(1, 60) if interval.due(at(s))]
    assert due == [s for s in range(1, 60) if (s * 256) // every > ((s - 1) * 256) // every]


def test_seconds_are_due_after_so_many_and_counted_from_the_last() -> None:
    interval = Every(Duration(2.0, "seconds"), at(3))
    assert [s for s in range(4, 20) if interval.due(at(s))] == [7, 11, 15, 19]
    late = Every(Duration(2.0, "seconds"), at(0))
    assert [s for s in (3, 5, 8, 9, 12) if late.due(at(s))] == [5, 9]


def test_none_is_never() -> None:
    assert not any(Every(None, at(0)).due(at(s)) for s in range(50))
