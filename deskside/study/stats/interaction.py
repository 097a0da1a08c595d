"""Interactions between two factors of a study.

Two factors, each at its baseline level and at one other level, make four cells. The interaction is the difference of
differences of logarithms: (both - first) - (second - neither). If it is zero, the first factor multiplies the metric
by the same number with and without the second. It is computed for each seed and for each setting (one level of every
remaining factor), and averaged over the settings with equal weights.

If a trial failed, its setting lacks a cell in that seed. Every seed must average over the same settings, so the setting
that is complete in the most seeds (the first of them) is used, and all others that are complete in the same seeds.
"""

import itertools
import math
from collections.abc import Iterator, Mapping

from deskside.study.metrics import PRIMARY
from deskside.study.results import EXACT, TOO_FEW, Arm, Group, Interaction, Results
from deskside.study.stats.statistics import LOG_ROUNDING, mean_interval, relative_difference, values_by_seed

Levels = tuple[str, ...]  # one level of every factor, in the order of the group's factors
Cells = tuple[float, float, float, float]  # a metric of one seed with: neither, second only, first only, both


def interactions(results: Results) -> list[tuple[Interaction, float | None]]:
    """Return (interaction, p-value) of every interaction that has all four cells.

    If there is a p-value, the verdict is preliminary and decided later among all interactions of the group in this
    metric. If it is None, the verdict is final: "exact" or "too few seeds".
    """
    found = []
    for group in results.groups:
        arms = _arms_by_levels(results, group)
        baseline = _baseline_levels(group, arms)
        if baseline is None:
            continue
        for metric in PRIMARY:
            values = {levels: values_by_seed(arm, metric) for levels, arm in arms.items()}
            for factors, changed in _pairs(group, baseline):
                interaction = _interaction(group, metric, values, baseline, factors, changed)
                if interaction is not None:
                    found.append(interaction)
    return found


def _arms_by_levels(results: Results, group: Group) -> dict[Levels, Arm]:
    """Return {levels: arm} for the arms of a group that were not written by hand."""
    names = [factor.name for factor in group.factors]
    return {
        tuple(arm.levels[name] for name in names): arm
        for arm in results.arms
        if arm.group == group.name and set(arm.levels) == set(names)
    }


def _baseline_levels(group: Group, arms: Mapping[Levels, Arm]) -> Levels | None:
    """Return the levels of the baseline. If `within` factors lead to several baselines, it is the first."""
    for levels in itertools.product(*(factor.levels for factor in group.factors)):
        if levels in arms and arms[levels].baseline == arms[levels].id:
            return levels
    return None


def _pairs(group: Group, baseline: Levels) -> Iterator[tuple[tuple[int, int], tuple[str, str]]]:
    """Yield the indices of two factors, and a level of each that is not the baseline's."""
    for i, j in itertools.combinations(range(len(group.factors)), 2):
        for first, second in itertools.product(group.factors[i].levels, group.factors[j].levels):
            if first != baseline[i] and second != baseline[j]:
                yield (i, j), (first, second)


def _interaction(
    group: Group,
    metric: str,
    values: Mapping[Levels, Mapping[int, float]],
    baseline: Levels,
    factors: tuple[int, int],
    changed: tuple[str, str],
) -> tuple[Interaction, float | None] | None:
    """Return (interaction, p-value) of two factors, or None if no seed has all four cells of any setting.

    Args:
        values: {levels: {seed: value of the metric}} of the arms.
        baseline: The baseline's level of every factor.
        factors: Indices of the two factors.
        changed: The level of each of the two factors that differs from the baseline.
    """
    settings = _settings(group, values, baseline, factors, changed)
    if not settings:
        return None
    most = max(len(setting) for setting in settings)
    seeds = next(list(setting) for setting in settings if len(setting) == most)
    used = [setting for setting in settings if list(setting) == seeds]

    def effect_of(cells: Cells) -> float:
        neither, second_only, first_only, both = (math.log(cell) for cell in cells)
        return (both - first_only) - (second_only - neither)

    effects = [math.fsum(effect_of(setting[seed]) for setting in used) / len(used) for seed in seeds]
    size = mean_interval(effects, LOG_ROUNDING)
    exact = len(seeds) > 1 and all(len(set(setting.values())) == 1 for setting in used)
    effect = 0.0 if abs(size.mean) < LOG_ROUNDING else relative_difference(size.mean)
    names = [group.factors[index].name for index in factors]
    interaction = Interaction(
        group=group.name,
        metric=metric,
        first=names[0],
        second=names[1],
        levels=dict(zip(names, changed, strict=True)),
        effect=effect,
        low=effect if exact else None if size.low is None else relative_difference(size.low),
        high=effect if exact else None if size.high is None else relative_difference(size.high),
        n=size.n,
        verdict=EXACT if exact else TOO_FEW,
    )
    return interaction, None if exact else size.p


def _settings(
    group: Group,
    values: Mapping[Levels, Mapping[int, float]],
    baseline: Levels,
    factors: tuple[int, int],
    changed: tuple[str, str],
) -> list[dict[int, Cells]]:
    """Return {seed: four cells} for each setting of the other factors, without seeds that lack a cell.

    The arguments are those of `_interaction`.
    """
    i, j = factors
    other_levels = [factor.levels for factor in group.factors]
    other_levels[i] = other_levels[j] = [""]  # placeholder, replaced in each cell
    settings = []
    for setting in itertools.product(*other_levels):
        four = []
        for first, second in itertools.product((baseline[i], changed[0]), (baseline[j], changed[1])):
            levels = list(setting)
            levels[i], levels[j] = first, second
            four.append(values.get(tuple(levels), {}))
        complete = {
            seed: (four[0][seed], four[1][seed], four[2][seed], four[3][seed])
            for seed in sorted(four[0])
            if all(cell.get(seed, 0.0) > 0 for cell in four)
        }
        if complete:
            settings.append(complete)
    return settings
