"""Whether two factors act independently of each other.

For two factors, each at its baseline level and at one other level, there are four cells. The interaction is the
difference of differences of logarithms: (both - one) - (the other - neither). Zero says that what one factor does to a
metric, as a factor of it, is the same with and without the other. It is taken seed by seed, and averaged over the
levels of the remaining factors (a mean of means: every setting of those counts the same).

Where cells are missing, because a trial failed, only those settings are used that are whole in the most seeds, the same
ones for every seed: otherwise seeds would differ by which settings they average over.
"""

import itertools
import math
from collections.abc import Iterator, Mapping

from deskside.study.results import Arm, Group, Interaction, Results
from deskside.study.stats.pairing import by_seed, relative
from deskside.study.stats.statistics import LOG_ROUNDING, student

CROSSED_METRICS = ("val_bpb", "tokens_per_second", "peak_memory_gib")

Levels = tuple[str, ...]  # of the factors, in the group's order
Cells = tuple[float, float, float, float]  # of one seed: neither, the second alone, the first alone, both


def interactions(results: Results) -> list[tuple[Interaction, float | None]]:
    """(without its verdict, p) of every pair of factors and of levels that has all four cells; where p is None, with
    its verdict: "exact", or "too few seeds"."""
    found = []
    for group in results.groups:
        cells, first = _cells(results, group)
        for metric in CROSSED_METRICS if first is not None else ():
            numbers = {levels: by_seed(arm, metric) for levels, arm in cells.items()}
            for here, there, levels in _pairs(group, first or ()):
                made = _interaction(group, metric, numbers, first or (), (here, there), levels)
                if made is not None:
                    found.append(made)
    return found


def _cells(results: Results, group: Group) -> tuple[dict[Levels, Arm], Levels | None]:
    """(levels -> arm, the baseline's levels): of the arms that the factors alone describe, not those made by hand."""
    names = [factor.name for factor in group.factors]
    cells = {
        tuple(arm.levels[name] for name in names): arm
        for arm in results.arms
        if arm.group == group.name and set(arm.levels) == set(names)
    }
    # A factor in `within` has a baseline at each of its levels: the first one counts.
    for levels in itertools.product(*(factor.levels for factor in group.factors)):
        if levels in cells and cells[levels].baseline == cells[levels].id:
            return cells, levels
    return cells, None


def _pairs(group: Group, first: Levels) -> Iterator[tuple[int, int, tuple[str, str]]]:
    """(place of one factor, place of another, their levels), none of these the baseline's."""
    for here, there in itertools.combinations(range(len(group.factors)), 2):
        for one in group.factors[here].levels:
            for other in group.factors[there].levels:
                if one != first[here] and other != first[there]:
                    yield here, there, (one, other)


def _interaction(
    group: Group,
    metric: str,
    numbers: Mapping[Levels, Mapping[int, float]],
    first: Levels,
    places: tuple[int, int],
    levels: tuple[str, str],
) -> tuple[Interaction, float | None] | None:
    settings = _settings(group, numbers, first, places, levels)
    if not settings:
        return None
    most = max(len(setting) for setting in settings)
    seeds = next(list(setting) for setting in settings if len(setting) == most)
    used = [setting for setting in settings if list(setting) == seeds]
    values = [math.fsum(_effect(setting[seed]) for setting in used) / len(used) for seed in seeds]
    size = student(values, LOG_ROUNDING)
    exact = len(seeds) > 1 and all(len(set(setting.values())) == 1 for setting in used)
    effect = 0.0 if abs(size.mean) < LOG_ROUNDING else relative(size.mean)
    low = None if size.low is None else relative(size.low)
    high = None if size.high is None else relative(size.high)
    names = [group.factors[place].name for place in places]
    made = Interaction(
        group=group.name,
        metric=metric,
        first=names[0],
        second=names[1],
        levels=dict(zip(names, levels, strict=True)),
        effect=effect,
        low=effect if exact else low,
        high=effect if exact else high,
        n=size.n,
        verdict="exact" if exact else "too few seeds",
    )
    return made, None if exact else size.p


def _settings(
    group: Group,
    numbers: Mapping[Levels, Mapping[int, float]],
    first: Levels,
    places: tuple[int, int],
    levels: tuple[str, str],
) -> list[dict[int, Cells]]:
    """Of each setting of the other factors: seed -> its four cells, for the seeds that have them all."""
    others = [["-"] if place in places else factor.levels for place, factor in enumerate(group.factors)]
    one, other = (first[places[0]], levels[0]), (first[places[1]], levels[1])
    found = []
    for setting in itertools.product(*others):
        four = []
        for pair in itertools.product(one, other):
            changed = dict(zip(places, pair, strict=True))
            four.append(numbers.get(tuple(changed.get(at, level) for at, level in enumerate(setting)), {}))
        whole = {
            seed: (four[0][seed], four[1][seed], four[2][seed], four[3][seed])
            for seed in sorted(four[0])
            if all(cell.get(seed, 0.0) > 0 for cell in four)
        }
        if whole:
            found.append(whole)
    return found


def _effect(cells: Cells) -> float:
    neither, second, first, both = (math.log(cell) for cell in cells)
    return (both - first) - (second - neither)
