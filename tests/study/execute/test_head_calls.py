"""Calls that a dead head of a Ray cluster leaves unanswered, tested without Ray."""

import threading
import time

import pytest

from deskside.study.execute.head_calls import HeadCalls
from deskside.utils.errors import RunError

LIMIT = 0.3


def test_answers_come_in_the_order_of_the_calls() -> None:
    head, order = HeadCalls("host:6379", 30.0), list[int]()
    for number in range(5):
        head.begin(lambda number=number: order.append(number))  # type: ignore[misc]
    assert head.get(lambda: len(order)) == 5 and order == [*range(5)]
    with pytest.raises(ZeroDivisionError):
        head.get(lambda: 1 // 0)
    head.check()
    assert head.get(lambda: 7) == 7 and not head.dead


def test_slow_answers_are_not_a_dead_head() -> None:
    """Each call may take as long as the limit, and the time between calls does not count."""
    head = HeadCalls("host:6379", LIMIT)
    waiting = [head.begin(lambda: time.sleep(LIMIT / 3)) for _ in range(6)]
    while not all(future.done() for future in waiting):
        head.check()
        time.sleep(0.01)
    time.sleep(2 * LIMIT)
    head.check()
    assert not head.dead


def test_a_call_without_answer_ends_the_study() -> None:
    """Waiting callers get the error, and so do later ones, even if the head answers at last."""
    head, answer = HeadCalls("host:6379", LIMIT), threading.Event()
    silent = head.begin(answer.wait)
    head.check()
    with pytest.raises(RunError, match="host:6379") as raised:
        head.get(lambda: 7)
    assert head.dead and raised.value.exit_code == 1 and "\n" not in str(raised.value)
    answer.set()
    assert silent.result(timeout=60)
    with pytest.raises(RunError, match="host:6379"):
        head.check()
