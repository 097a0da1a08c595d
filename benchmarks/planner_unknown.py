"""Leave-one-architecture-out test: the planner's error on a card whose architecture has no calibrating row.

    python -m benchmarks.planner_unknown

For each architecture in `deskside/facts/measurements.csv`, its rows are removed, the factors of the trainers and of the
other architectures are fitted to all remaining rows, and the removed rows are predicted without a factor of their own.
Trainers that then have no row are excluded, because this test does not ask for their factor. UNKNOWN_SPREAD, the range
for unknown architectures in `plan/calibrate.py`, comes from these errors.
"""

from dataclasses import dataclass

from benchmarks.planner_tables import HEADINGS, Errors, summary, table
from deskside.facts.measurements import Measurement, published
from deskside.plan.published import ANCHOR, fit, modelled, usable


@dataclass(frozen=True)
class LeftOut:
    """An architecture and the relative errors of its rows when it is held out."""

    architecture: str
    errors: Errors


def left_out() -> list[LeftOut]:
    """Return the errors of each architecture, predicted from the others. BF16 rows."""
    rows = [row for row in published() if usable(row) and row.precision == "bf16"]
    found = []
    for architecture in sorted({_architecture(row) for row in rows}):
        parts = fit(row for row in rows if _architecture(row) != architecture)
        # Without the rows of the anchor, the other factors are relative to their own mean.
        mean = 1.0
        if architecture == ANCHOR:
            mean = sum(parts.architectures.values()) / len(parts.architectures)
        own = [row for row in rows if _architecture(row) == architecture and row.framework in parts.trainers]
        pairs = [(modelled(row) * parts.trainers[row.framework] * mean, _speed(row)) for row in own]
        if pairs:
            found.append(LeftOut(architecture, Errors(pairs)))
    return found


def together(found: list[LeftOut]) -> Errors:
    """Return the errors of all rows."""
    return Errors((1 + error, 1.0) for one in found for error in one.errors.signed)


def _architecture(row: Measurement) -> str:
    gpu = row.data_sheet()
    assert gpu is not None
    return gpu.architecture


def _speed(row: Measurement) -> float:
    assert row.tokens_per_second is not None
    return row.tokens_per_second


def lines() -> list[str]:
    """Return a Markdown table with one line per architecture."""
    found = left_out()
    return table(
        HEADINGS,
        [*(summary(one.architecture, one.errors) for one in found), summary("All", together(found))],
    )


if __name__ == "__main__":
    print("\n".join(lines()))
