"""Labels cover no mark, no line and no other label, at any requested width."""

from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deskside.dashboard.label_places import Box, Mark, label_box, mark_box, place_labels

SIZES = ((270.0, 350.0), (700.0, 400.0))
SHARE = st.floats(0, 1)
MARKS = st.lists(
    st.builds(Mark, SHARE, SHARE, st.floats(4, 14), st.floats(20, 150), st.just(15.0)), max_size=12
)


@given(MARKS)
def test_no_label_covers_anything(marks: list[Mark]) -> None:
    sides = place_labels(marks, range(len(marks)), SIZES)
    for width, height in SIZES:
        labels = {place: label_box(marks[place], side, width, height) for place, side in sides.items()}
        for first, second in combinations(labels.values(), 2):
            assert not first.overlaps(second)
        for place, box in labels.items():
            assert box.left >= 0 and box.right <= width and box.top >= 0 and box.bottom <= height
            others = [mark_box(mark, width, height) for i, mark in enumerate(marks) if i != place]
            assert not any(box.overlaps(other) for other in others)


def test_a_lonely_mark_has_its_label_on_the_right() -> None:
    assert place_labels([Mark(0.5, 0.5, 5, 50, 15)], [0], SIZES) == {0: (1, 0)}


def test_a_line_is_not_covered() -> None:
    mark, line = Mark(0.3, 0.5, 5, 50, 15), ((0.3, 0.5), (1.0, 0.5))
    assert place_labels([mark], [0], SIZES, lines=[line]) == {0: (-1, 0)}


def test_the_most_important_label_comes_first() -> None:
    marks = [Mark(0.04, 0.5, 5, 100, 390), Mark(0.96, 0.5, 5, 100, 390)]
    assert set(place_labels(marks, [0, 1], ((130, 400),))) == {0}
    assert set(place_labels(marks, [1, 0], ((130, 400),))) == {1}


def test_labels_that_are_there_stay() -> None:
    mark = Mark(0.5, 0.5, 5, 50, 15)
    assert place_labels([mark], [0], SIZES, {0: (0, 1)}) == {0: (0, 1)}


@pytest.mark.parametrize("other, overlaps", [(Box(5, 5, 15, 15), True), (Box(10, 0, 20, 10), False)])
def test_boxes_overlap_if_they_have_a_common_area(other: Box, overlaps: bool) -> None:
    assert Box(0, 0, 10, 10).overlaps(other) is overlaps
