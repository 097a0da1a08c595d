"""Progress under any revisions, the estimate of remaining steps compared with counting them, and the clock."""

import itertools
import math
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deskside.train.loop.clock import Clock, Revision, StepPlan, remaining_steps, should_revise

REVISIONS = st.lists(st.tuples(st.floats(0.01, 1.0), st.integers(0, 300)), max_size=8)


def made(first: int, changes: list[tuple[float, int]]) -> StepPlan:
    """Return a plan that is revised repeatedly, each time after a share of its remaining length."""
    plan = StepPlan([Revision(0, 0.0, first, 0.0, None, "first")])
    step = 0
    for share, remaining in changes:
        left = plan.total_steps(step) - step
        if left < 2:
            break
        step += max(1, int(share * (left - 1)))
        plan.revise(step, remaining, 0.0, 1.0, "test")
    return plan


@given(st.integers(1, 300), REVISIONS)
def test_progress_is_continuous_and_monotone_and_ends_at_one(
    first: int, changes: list[tuple[float, int]]
) -> None:
    plan = made(first, changes)
    last = plan.total_steps(plan.last_revision_step)
    values = [plan.progress(step) for step in range(last + 1)]
    assert values[0] == 0.0 or plan.revisions[0].remaining == 0
    assert values[-1] == 1.0 and plan.done(last) and not any(plan.done(s) for s in range(last))
    assert all(a < b or math.isclose(a, b, abs_tol=1e-12) for a, b in itertools.pairwise(values))
    assert all(0.0 <= v <= 1.0 for v in values)
    for before, revision in zip(plan.revisions, plan.revisions[1:], strict=False):
        # A revision continues from what the previous plan gave for that step, without a jump.
        assert revision.progress == StepPlan(plan.revisions[: plan.revisions.index(revision)]).progress(
            revision.step
        )
        if revision.remaining:
            assert plan.progress(revision.step) == pytest.approx(revision.progress, abs=1e-12)
        assert before.step < revision.step


@given(st.integers(1, 300), REVISIONS)
def test_the_past_never_changes_and_the_journal_comes_back(
    first: int, changes: list[tuple[float, int]]
) -> None:
    plan = made(first, changes)
    for count in range(1, len(plan.revisions)):
        earlier = StepPlan(plan.revisions[:count])
        for step in range(plan.revisions[count].step):
            assert plan.progress(step) == earlier.progress(step)
            assert plan.total_steps(step) == earlier.total_steps(step)
    again = StepPlan.from_json(plan.to_json())
    assert again.revisions == plan.revisions
    assert again.last_revision_step == plan.revisions[-1].step


@given(
    st.floats(0.1, 500.0),
    st.floats(0.0, 0.999),
    st.lists(st.tuples(st.floats(0.05, 1.0), st.floats(0.01, 2.0)), min_size=1, max_size=4),
)
def test_remaining_steps_by_counting_them_out(
    left: float, progress: float, raw: list[tuple[float, float]]
) -> None:
    total = sum(share for share, _ in raw)
    ends, end = [], 0.0
    for share, _ in raw:
        end += share / total
        ends.append(end)
    ends[-1] = 1.0
    seconds = [s for _, s in raw]

    def needed(steps: int) -> float:
        """Return the seconds of this many steps, each assigned to the stage that contains its middle."""
        spent = 0.0
        for i in range(steps):
            at = progress + (1 - progress) * (i + 0.5) / steps
            spent += seconds[next((k for k, e in enumerate(ends) if at < e), len(ends) - 1)]
        return spent

    steps = remaining_steps(left, progress, ends, seconds)
    # A stage may end within a step, so the result is off by less than one step per stage.
    slack = sum(seconds) + 1e-6 * left
    if steps:
        assert needed(steps) <= left + slack
    assert needed(steps + 1) > left - slack


def test_remaining_steps_at_the_end_of_time_and_of_the_run() -> None:
    assert remaining_steps(0.0, 0.5, [1.0], [1.0]) == 0
    assert remaining_steps(-3.0, 0.5, [1.0], [1.0]) == 0
    assert remaining_steps(10.0, 1.0, [1.0], [1.0]) == 0
    assert remaining_steps(10.0, 0.25, [0.5, 1.0], [1.0, 4.0]) == int(10 / (1 / 3 + 4 * 2 / 3))


@given(st.integers(0, 10_000), st.integers(0, 10_000))
def test_a_plan_is_revised_when_it_is_off(planned: int, estimated: int) -> None:
    off = abs(planned - estimated)
    assert should_revise(planned, estimated, 10.0, 100.0) == (off > 1 and off > 0.02 * planned)
    assert not should_revise(planned, estimated, 0.4, 100.0)


def test_the_training_clock_counts_training_alone() -> None:
    clock = Clock("training", time.perf_counter() - 100)
    assert clock.seconds() == 0.0
    clock.restore(5.0)
    clock.start()
    time.sleep(0.02)
    clock.stop()
    stopped = clock.seconds()
    time.sleep(0.02)
    clock.stop()
    assert 5.02 <= stopped == clock.seconds() < 6


def test_the_wall_clock_counts_everything_of_every_process() -> None:
    clock = Clock("wall", time.perf_counter() - 100)
    assert 100 <= clock.seconds() < 101
    clock.restore(50.0)  # an earlier process's time
    assert 150 <= clock.seconds() < 151
    clock.stop()
    assert clock.seconds() >= 150
    clock.set_after_rollback(clock.seconds())  # a rollback: time spent on lost steps is spent
    assert 150 <= clock.seconds() < 152
