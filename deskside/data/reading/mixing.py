"""Mixtures: the component and the row within it for any position of the data order.

Rows are dealt in periods of 1024. Weights are rounded to whole rows of a period (largest remainder; a component
with a positive weight gets at least one), each component's rows are spread evenly over the period, and all periods
are equal. So the proportions are exact in each period, and a small or heavily weighted component repeats its epochs
more often.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from deskside.data.reading.shards import TagInfo
from deskside.utils.errors import UsageError

PERIOD = 1024


@dataclass(frozen=True)
class Mixture:
    """component [period]: owner of each row; rank [period]: its index among them; count [components]: their rows."""

    component: NDArray[np.int64]
    rank: NDArray[np.int64]
    count: NDArray[np.int64]

    @classmethod
    def of(cls, weights: Sequence[float]) -> Mixture:
        """Return the mixture of these weights.

        Raises ValueError for no weights, more weights than rows of a period, or a weight that is not positive and
        finite.
        """
        share = np.asarray(weights, dtype=np.float64)
        if not 0 < len(share) <= PERIOD or not np.all(np.isfinite(share)) or np.any(share <= 0):
            raise ValueError(f"weights must be 1 to {PERIOD} positive numbers")
        if len(share) == 1:
            return cls(*(np.array([n], dtype=np.int64) for n in (0, 0, 1)))
        share = share / share.sum() * PERIOD
        count = np.maximum(np.floor(share).astype(np.int64), 1)
        while count.sum() > PERIOD:  # only when several tiny weights were lifted to one row
            count[np.argmax(np.where(count > 1, count - share, -np.inf))] -= 1
        missing = PERIOD - int(count.sum())
        count[np.argsort(-(share - count), kind="stable")[:missing]] += 1
        component = np.repeat(np.arange(len(share)), count)
        rank = np.concatenate([np.arange(c) for c in count.tolist()])
        when = (rank + 0.5) / count[component]
        order = np.lexsort((component, when))
        return cls(component[order], rank[order], count)

    def locate(self, position: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return (component, number of its earlier rows), each of position's shape."""
        period, offset = np.divmod(position, len(self.component))
        component = self.component[offset]
        return component, period * self.count[component] + self.rank[offset]


def assign_components(
    tags: Sequence[TagInfo], present: Sequence[int], weights: dict[str, float]
) -> tuple[list[str], list[float], NDArray[np.int64]]:
    """Sorts tags into the components that `weights` names.

    A name is a source or a language; `source:x` and `lang:x` say which where one word is both. Weight 0 leaves a
    component out. Every tag that is present must have a weight, so that nothing is left out unsaid.

    Returns (names, weights, component of each tag: [tags], -1 where left out).

    Raises:
        UsageError: an unknown or ambiguous name, a tag without or with two weights, or a wrong weight.
    """
    known = {f"source:{t.source}" for t in tags if t.source} | {f"lang:{t.lang}" for t in tags if t.lang}
    owner = np.full(len(tags), -1, dtype=np.int64)
    named: dict[int, str] = {}
    names, values = [], []
    for name, weight in weights.items():
        if not (np.isfinite(weight) and weight >= 0):
            raise UsageError(f"weight {name} = {weight}: give a number of 0 or more.")
        full = [k for k in (name, f"source:{name}", f"lang:{name}") if k in known]
        if len(full) != 1:
            what = (
                "is a source and a language; write source: or lang: before it"
                if full
                else "is not in the data"
            )
            raise UsageError(f"weight {name}: {what}. In the data: {', '.join(sorted(known)[:20])}.")
        kind, value = full[0].split(":", 1)
        if weight > 0:
            names.append(name)
            values.append(float(weight))
        for i, tag in enumerate(tags):
            if getattr(tag, kind) == value:
                if i in named:
                    raise UsageError(
                        f"weights {named[i]} and {name} both take {tag.source} {tag.lang}. Keep one."
                    )
                named[i] = name
                owner[i] = len(names) - 1 if weight > 0 else -1
    missing = [i for i in present if i not in named]
    if missing:
        example = tags[missing[0]]
        label = f"source:{example.source}" if example.source else f"lang:{example.lang}"
        raise UsageError(
            f"{label} has no weight (and {len(missing) - 1} more). Give it one; 0 leaves it out."
        )
    if not names:
        raise UsageError("every weight is 0. Give at least one component a weight.")
    return names, values, owner
