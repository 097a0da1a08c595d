"""Interactions between two factors of a study.

Two factors, each at its baseline level and at one other level, make four cells. The interaction is the difference of
differences of logarithms: (both - first) - (second - neither). If it is zero, the first factor multiplies the metric
by the same number with and without the second. It is computed for each seed, and averaged over the settings of the
remaining factors with equal weights.

If cells are missing because a trial failed, only the settings that are complete in the most seeds are used, the same
settings for every seed. Otherwise seeds would differ in which settings they average over.
"""

import itertools
import math
from collections.abc import Iterator, Mapping

from deskside.study.results import EXACT, TOO_FEW, Arm, Group, Interaction, Results
from deskside.study.stats.statistics import LOG_ROUNDING, mean_interval, relative_difference, values_by_seed

CROSSED_METRICS = ("val_bpb", "tokens_per_second", "peak_memory_gib")

Levels = tuple[str, ...]  # one level of every factor, in the order of the group's factors
Cells = tuple[float, float, float, float]  # of one seed: neither, second only, first only, both


def interactions(results: Results) -> list[tuple[Interaction, float | None]]:
    """Return every interaction that has all four cells, with its p-value.

    The verdict of one with a p-value is still to be decided among all of them. p is None if the verdict is final:
    "exact" or "too few seeds".
    """
    found = []
    for group in results.groups:
        cells, first = _cells(results, group)
        for metric in CROSSED_METRICS if first is not None else ():
            numbers = {levels: values_by_seed(arm, metric) for levels, arm in cells.items()}
            for here, there, levels in _pairs(group, first or ()):
                made = _interaction(group, metric, numbers, first or (), (here, there), levels)
                if made is not None:
                    found.append(made)
    return found


def _cells(results: Results, group: Group) -> tuple[dict[Levels, Arm], Levels | None]:
    """Return (levels -> arm, the levels of the baseline), without the arms written by hand."""
    names = [factor.name for factor in group.factors]
    cells = {
        tuple(arm.levels[name] for name in names): arm
        for arm in results.arms
        if arm.group == group.name and set(arm.levels) == set(names)
    }
    # A factor in `within` has a baseline at each of its levels; the first one is used.
    for levels in itertools.product(*(factor.levels for factor in group.factors)):
        if levels in cells and cells[levels].baseline == cells[levels].id:
            return cells, levels
    return cells, None


def _pairs(group: Group, first: Levels) -> Iterator[tuple[int, int, tuple[str, str]]]:
    """Yield the indices of two factors and one level of each, neither of which is the baseline's."""
    for i, j in itertools.combinations(range(len(group.factors)), 2):
        for one, other in itertools.product(group.factors[i].levels, group.factors[j].levels):
            if one != first[i] and other != first[j]:
                yield i, j, (one, other)


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

    def effect_of(cells: Cells) -> float:
        neither, second, first_only, both = (math.log(cell) for cell in cells)
        return (both - first_only) - (second - neither)

    values = [math.fsum(effect_of(setting[seed]) for setting in used) / len(used) for seed in seeds]
    size = mean_interval(values, LOG_ROUNDING)
    exact = len(seeds) > 1 and all(len(set(setting.values())) == 1 for setting in used)
    effect = 0.0 if abs(size.mean) < LOG_ROUNDING else relative_difference(size.mean)
    names = [group.factors[place].name for place in places]
    made = Interaction(
        group=group.name,
        metric=metric,
        first=names[0],
        second=names[1],
        levels=dict(zip(names, levels, strict=True)),
        effect=effect,
        low=effect if exact else None if size.low is None else relative_difference(size.low),
        high=effect if exact else None if size.high is None else relative_difference(size.high),
        n=size.n,
        verdict=EXACT if exact else TOO_FEW,
    )
    return made, None if exact else size.p


def _settings(
    group: Group,
    numbers: Mapping[Levels, Mapping[int, float]],
    first: Levels,
    places: tuple[int, int],
    levels: tuple[str, str],
) -> list[dict[int, Cells]]:
    """Return seed -> four cells for each setting of the other factors, leaving out seeds with a missing cell."""
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
