"""Fronts compared with brute force, and the arms that the intervals leave undecided."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from deskside.study.results import Arm, Front, Results, Trial
from deskside.study.stats.compare import compare
from tests.study.made import results as made
from tests.study.small import study

AXES = ("tokens_per_second", "peak_memory_gib", "val_bpb")
rows = st.lists(st.tuples(*(st.sampled_from([1.0, 2.0, 3.0, 4.0]) for _ in AXES)), min_size=1, max_size=10)


def built(numbers: list[list[tuple[float, ...]]]) -> Results:
    """Return arms whose trials have (speed, memory, loss)."""
    arms = [
        Arm(
            f"arm{n}", f"arm{n}", "main", {}, "arm0",
            trials=[Trial(s, "finished", metrics=dict(zip(AXES, row, strict=True))) for s, row in enumerate(trials)],
        )
        for n, trials in enumerate(numbers)
    ]  # fmt: skip
    return compare(study(arms))


def front(results: Results, axes: tuple[str, ...] = AXES) -> Front:
    return next(f for f in results.fronts if tuple(f.metrics) == axes)


@given(rows)
def test_the_front_is_that_of_brute_force(numbers: list[tuple[float, ...]]) -> None:
    results = built([[row] for row in numbers])
    for axes in (AXES, ("tokens_per_second", "val_bpb"), ("peak_memory_gib", "val_bpb")):
        places = [AXES.index(key) for key in axes]
        table = np.array(numbers)[:, places] * [-1 if key == "tokens_per_second" else 1 for key in axes]
        beaten = (table[None] <= table[:, None]).all(-1) & (table[None] < table[:, None]).any(-1)
        found = front(results, axes)
        assert found.arms == [f"arm{n}" for n in np.flatnonzero(~beaten.any(1))]
        # One seed proves nothing: everything that is not on the front may be.
        assert found.unclear == [f"arm{n}" for n in np.flatnonzero(beaten.any(1))]


@given(rows, st.integers(2, 4))
def test_what_no_seed_changes_is_clear(numbers: list[tuple[float, ...]], seeds: int) -> None:
    assert front(built([[row] * seeds for row in numbers])).unclear == []


def test_an_arm_is_unclear_until_another_is_shown_to_beat_it() -> None:
    best = [(10.0, 1.0, 1.00), (10.1, 1.0, 1.01), (10.2, 1.0, 1.02)]
    close = [(9.0, 2.0, 1.002), (9.1, 2.0, 1.008), (9.2, 2.0, 1.024)]
    far = [(9.0, 2.0, 1.1), (9.1, 2.0, 1.112), (9.2, 2.0, 1.12)]
    found = front(built([best, close, far]))
    assert found.arms == ["arm0"] and found.unclear == ["arm1"]


def test_only_arms_that_have_every_number_take_part() -> None:
    results = made()
    found = front(compare(results))
    assert set(found.arms).isdisjoint(found.unclear) and set(found.arms) <= {arm.id for arm in results.arms}
    assert front(built([[(1.0, 1.0, 1.0)], []])).arms == ["arm0"]
    assert built([[], []]).fronts == []
