"""Places for labels beside the points of a chart, so that no label covers a point or another label."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

GAP = 3.0  # pixels between a mark and its label
# Horizontal or vertical; ends as fractions, as in `Mark`.
Line = tuple[tuple[float, float], tuple[float, float]]
# (horizontal, vertical) side of the mark for a label, the best first. y points down, as on a screen.
SIDES = ((1, 0), (-1, 0), (0, -1), (0, 1), (1, -1), (1, 1), (-1, -1), (-1, 1))


@dataclass(frozen=True)
class Mark:
    """A mark and the size of its label.

    Attributes:
        x, y: Position as fractions of the plot's width and height, from its left upper corner.
        radius: Of the mark, in pixels.
        width, height: Of the label, in pixels.
    """

    x: float
    y: float
    radius: float
    width: float
    height: float


@dataclass(frozen=True)
class Box:
    """A rectangle in pixels."""

    left: float
    top: float
    right: float
    bottom: float

    def overlaps(self, other: "Box") -> bool:
        """Return True if the two rectangles have a common area."""
        return (
            self.left < other.right
            and other.left < self.right
            and self.top < other.bottom
            and other.top < self.bottom
        )


def mark_box(mark: Mark, width: float, height: float) -> Box:
    """Return the square around a mark in a plot of this size."""
    x, y, r = mark.x * width, mark.y * height, mark.radius
    return Box(x - r, y - r, x + r, y + r)


def label_offset(mark: Mark, side: tuple[int, int]) -> tuple[float, float]:
    """Return the distance in pixels from the center of a mark to the center of its label."""
    across, down = side
    diagonal = 0.75 if across and down else 1.0  # a corner of the label may come nearer to a round mark
    reach = mark.radius * diagonal + GAP
    return across * (reach + mark.width / 2), down * (reach + mark.height / 2)


def label_box(mark: Mark, side: tuple[int, int], width: float, height: float) -> Box:
    """Return the rectangle of a mark's label in a plot of this size."""
    right, down = label_offset(mark, side)
    x, y = mark.x * width + right, mark.y * height + down
    return Box(x - mark.width / 2, y - mark.height / 2, x + mark.width / 2, y + mark.height / 2)


def place_labels(
    marks: Sequence[Mark],
    order: Sequence[int],
    sizes: Sequence[tuple[float, float]],
    placed: Mapping[int, tuple[int, int]] | None = None,
    lines: Sequence[Line] = (),
) -> dict[int, tuple[int, int]]:
    """Return the side of each mark's label, by the mark's index. A mark without a free side is left out.

    A side is free if, at every one of the plot `sizes` (width and height in pixels), the label lies within the plot and
    covers no mark, none of the `lines`, and no label that is already placed. `order` has the indices of the marks to
    label, the most important first, and `placed` the labels that are there already.
    """
    sides = dict(placed or {})
    for index in order:
        if index in sides:
            continue
        side = next(
            (
                side
                for side in SIDES
                if all(_is_free(marks, lines, sides, index, side, *size) for size in sizes)
            ),
            None,
        )
        if side is not None:
            sides[index] = side
    return sides


def _is_free(
    marks: Sequence[Mark],
    lines: Sequence[Line],
    sides: Mapping[int, tuple[int, int]],
    index: int,
    side: tuple[int, int],
    width: float,
    height: float,
) -> bool:
    box = label_box(marks[index], side, width, height)
    if box.left < 0 or box.right > width or box.top < 0 or box.bottom > height:
        return False
    others = [
        Box(min(x0, x1) * width, min(y0, y1) * height, max(x0, x1) * width, max(y0, y1) * height)
        for (x0, y0), (x1, y1) in lines
    ]
    others += [mark_box(mark, width, height) for place, mark in enumerate(marks) if place != index]
    labels = [label_box(marks[place], other_side, width, height) for place, other_side in sides.items()]
    return not any(box.overlaps(other) for other in (*others, *labels))
