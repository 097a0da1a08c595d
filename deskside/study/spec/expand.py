"""Expansion of a study into arms: every combination of its design, each with a complete configuration.

An arm's configuration is merged from layers. From lowest to highest priority: the base preset, the presets of its
levels, the evaluation interval, the study's `set` (and the command line), the `set` of its levels in the order of the
factors, the arm's own `set` if it was written by hand, and the budget.

Every arm has a baseline in the same group: the arm with the same levels of the `within` factors, and the levels that
[baseline] gives (by default the first) of the other factors.
"""

import difflib
import fnmatch
import hashlib
import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from deskside.config import merge, presets
from deskside.config.run import RunConfig
from deskside.study.results import Factor, Group
from deskside.study.spec.expressions import leaf_paths, resolve
from deskside.study.spec.parse_spec import check_seeds
from deskside.study.spec.spec import ArmSpec, Budget, FactorSpec, GroupSpec, Layer, StudySpec, suggestion
from deskside.utils.errors import UsageError

BASELINE = "baseline"
MAX_ARMS = 1000
MAX_ID_LENGTH = 200  # characters of an arm's id; a file system allows 255, and the seed is appended


@dataclass(frozen=True)
class PlannedArm:
    """One configuration to run.

    Attributes:
        levels: Factor -> level.
        baseline: Id of the baseline, which is the arm's own id for a baseline.
        config: Complete configuration of a trial, except for the seed.
        budget: Text such as "30 minutes of training".
    """

    id: str
    label: str
    group: str
    levels: dict[str, str]
    baseline: str
    config: RunConfig
    budget: str


@dataclass(frozen=True)
class Expansion:
    """The arms of a study.

    Attributes:
        excluded: "LABEL: REASON" of each excluded combination.
        seeds: Group -> number of seeds.
    """

    groups: list[Group]
    arms: list[PlannedArm]
    excluded: list[str]
    seeds: dict[str, int]


def expand(
    study: StudySpec, *, seeds: int | None = None, budget: Budget | None = None, only: Sequence[str] = ()
) -> Expansion:
    """Return the arms of a study, group by group.

    Raises UsageError for an invalid configuration, duplicate arms, an excluded baseline, or a filter without matches.

    Args:
        seeds, budget: Replace those of every group.
        only: Filters. "FACTOR=LEVEL[,LEVEL]" keeps the arms with one of these levels; an arm must match all filters of
            this form. "NAME" is a group, or an arm's id with the wildcards * and ?; an arm must match one filter of
            this form. The baselines of the selected arms are kept as well.
    """
    if seeds is not None:
        check_seeds(seeds, "--seeds")
    arms: list[PlannedArm] = []
    excluded_by_group: dict[str, list[str]] = {}
    for group in study.groups:
        group_arms, excluded_by_group[group.name] = _expand_group(study, group, budget or group.budget)
        arms += group_arms
    _check_ids(arms)
    if only:
        arms = _select(study, arms, only)
    _check_overrides(study, arms)
    _check_distinct(study, arms)
    present = {arm.group for arm in arms}
    groups: list[Group] = []
    excluded: list[str] = []
    seeds_by_group: dict[str, int] = {}
    for group in study.groups:
        if group.name in present:
            factors = [Factor(f.name, f.label, [level.name for level in f.levels]) for f in group.factors]
            group_budget = budget or group.budget
            budget_text = group_budget.text if group_budget is not None else ""
            groups.append(
                Group(
                    group.name,
                    group.title,
                    group.base,
                    group.design,
                    budget_text,
                    factors,
                    list(group.within),
                )
            )
            excluded += excluded_by_group[group.name]
            seeds_by_group[group.name] = seeds or group.seeds
    return Expansion(groups, arms, excluded, seeds_by_group)


def ordered_trials(
    arms: Sequence[PlannedArm], seeds: Mapping[str, int], name: str = ""
) -> list[tuple[PlannedArm, int]]:
    """Return every trial as (arm, seed) in the order of execution: seed by seed, with the arms shuffled.

    So a change of the machine's speed over time favors no arm, and a study that is stopped early has complete seeds.
    The order depends only on the study's name and the arms' ids, so it is the same after a resume, and removing arms
    does not reorder the others. Seeds are 1, 2, ...

    Args:
        seeds: Group -> number of seeds.
        name: The study's name.
    """

    def sort_key(arm: PlannedArm, seed: int) -> bytes:
        return hashlib.sha256(f"{name}/{seed}/{arm.id}".encode()).digest()

    most_seeds = max((seeds[arm.group] for arm in arms), default=0)
    return [
        (arm, seed)
        for seed in range(1, most_seeds + 1)
        for arm in sorted(arms, key=lambda arm: sort_key(arm, seed))
        if seed <= seeds[arm.group]
    ]


@dataclass(frozen=True)
class _Combination:
    """An arm before its configuration is built. spec: its entry in the study's file if it was written by hand."""

    id: str
    label: str
    levels: dict[str, str]
    baseline: str
    spec: ArmSpec | None = None


def _expand_group(
    study: StudySpec, group: GroupSpec, budget: Budget | None
) -> tuple[list[PlannedArm], list[str]]:
    """Return (arms, "LABEL: REASON" of each excluded combination) of a group."""
    where = _where(study, group.name)
    if budget is None:
        raise UsageError(
            f"{where}: it has no budget; write [budget] with minutes_per_arm, or give --minutes-per-arm"
        )
    count = _count(group)
    if count > MAX_ARMS:  # checked before they are listed: those of a dozen factors would not fit into memory
        raise UsageError(f"{where}: {count:,} arms are more than {MAX_ARMS:,}; use fewer levels or factors")
    combinations = _combinations(study, group)
    included, excluded = [], []
    used_exclusions = set()
    for combination in combinations:
        # Arms written by hand are never excluded.
        matches = [
            index
            for index, exclusion in enumerate(group.exclusions)
            if combination.spec is None and exclusion.covers(combination.levels)
        ]
        used_exclusions.update(matches)
        if matches:
            excluded.append(f"{combination.label}: {group.exclusions[matches[0]].why}")
        else:
            included.append(combination)
    for index, exclusion in enumerate(group.exclusions):
        if index not in used_exclusions:
            levels = ", ".join(f"{factor} {' or '.join(names)}" for factor, names in exclusion.where.items())
            raise UsageError(f"{where}: exclude: there is no arm with {levels}; remove this [[exclude]]")
    present = {combination.id for combination in included}
    for combination in included:
        if combination.baseline not in present:
            raise UsageError(
                f"{where}: {combination.id}: its baseline {combination.baseline} is excluded; exclude this arm too, "
                f"or choose another [baseline]"
            )
    return [_build(study, group, budget, combination) for combination in included], excluded


def _where(study: StudySpec, group: str) -> str:
    """Return the beginning of an error message about a group."""
    return f"{study.name}: group {group}" if study.grouped else study.name


def _split_factors(group: GroupSpec) -> tuple[list[FactorSpec], list[FactorSpec]]:
    """Return (the factors of which every combination is run, the factors that are varied one at a time)."""
    if group.design == "full":
        return list(group.factors), []
    combined = [factor for factor in group.factors if factor.name in group.within]
    return combined, [factor for factor in group.factors if factor.name not in group.within]


def _count(group: GroupSpec) -> int:
    """Return the number of combinations before exclusions."""
    combined, one_at_a_time = _split_factors(group)
    changes = sum(len(factor.levels) - 1 for factor in one_at_a_time)
    return math.prod(len(factor.levels) for factor in combined) * (1 + changes) + len(group.arms)


def _combinations(study: StudySpec, group: GroupSpec) -> list[_Combination]:
    """Return every arm before exclusions: those of the design, then those written by hand."""
    combined, one_at_a_time = _split_factors(group)
    result = []
    for names in itertools.product(*([level.name for level in factor.levels] for factor in combined)):
        levels = group.baseline | dict(zip((factor.name for factor in combined), names, strict=True))
        levels = _in_order(group, levels)
        result.append(_combination(study, group, levels))
        for factor in one_at_a_time:
            result += [
                _combination(study, group, levels | {factor.name: level.name})
                for level in factor.levels
                if level.name != levels[factor.name]
            ]
    first_within = {
        factor.name: factor.levels[0].name for factor in group.factors if factor.name in group.within
    }
    prefix = f"{group.name}-" if study.grouped else ""
    for arm in group.arms:
        levels = _in_order(group, group.baseline | first_within | arm.levels)
        baseline, _ = _id_and_label(study, group, levels | group.baseline)
        result.append(
            _Combination(f"{prefix}{arm.name}", arm.label, {**levels, "arm": arm.name}, baseline, arm)
        )
    return result


def _combination(study: StudySpec, group: GroupSpec, levels: dict[str, str]) -> _Combination:
    baseline, _ = _id_and_label(study, group, levels | group.baseline)
    arm_id, label = _id_and_label(study, group, levels)
    return _Combination(arm_id, label, levels, baseline)


def _in_order(group: GroupSpec, levels: Mapping[str, str]) -> dict[str, str]:
    """Return the levels in the order of the group's factors."""
    return {factor.name: levels[factor.name] for factor in group.factors}


def _id_and_label(study: StudySpec, group: GroupSpec, levels: Mapping[str, str]) -> tuple[str, str]:
    """Return an arm's id and label. In a one-at-a-time design they name only `within` factors and changes."""
    named = [
        factor
        for factor in group.factors
        if group.design == "full"
        or factor.name in group.within
        or levels[factor.name] != group.baseline[factor.name]
    ]
    ids = [group.name] if study.grouped else []
    ids += [f"{factor.name}_{levels[factor.name]}" for factor in named]
    labels = [factor.level(levels[factor.name]).label for factor in named]
    if all(factor.name in group.within for factor in named):
        ids.append(BASELINE)
        labels.append(BASELINE)
    return "-".join(ids), ", ".join(label for label in labels if label)


def _build(study: StudySpec, group: GroupSpec, budget: Budget, combination: _Combination) -> PlannedArm:
    """Merge the layers of an arm's configuration."""
    levels = [factor.level(combination.levels[factor.name]) for factor in group.factors]
    layers: list[Layer] = [*presets.layers(group.base)]
    for level in levels:
        layers += presets.layers(level.preset) if level.preset is not None else []
    layers += [budget.default_layer, *group.set, *(level.set for level in levels)]
    if combination.spec is not None:
        layers.append(combination.spec.set)
    layers.append(budget.layer)
    try:
        config = merge.build(resolve(layers))
    except UsageError as error:
        raise UsageError(f"{study.name}: arm {combination.id}: {error}") from None
    return PlannedArm(
        id=combination.id,
        label=combination.label,
        group=group.name,
        levels=combination.levels,
        baseline=combination.baseline,
        config=config,
        budget=budget.text,
    )


def _check_overrides(study: StudySpec, arms: Sequence[PlannedArm]) -> None:
    """Refuse an option of the command line whose key one of these arms sets itself, where it would have no effect."""
    by_name = {(group.name, arm.name): arm for group in study.groups for arm in group.arms}
    for path in leaf_paths(study.overrides):
        for arm in arms:
            spec = by_name.get((arm.group, arm.levels.get("arm", "")))
            if spec is not None and path in leaf_paths(spec.set):
                raise UsageError(
                    f"--{'.'.join(path)}: arm {arm.id} of the study sets this key; leave the arm out with --only, "
                    "remove the option, or edit the study's file"
                )


def _check_distinct(study: StudySpec, arms: Sequence[PlannedArm]) -> None:
    """Refuse two arms of a group with the same configuration."""
    seen: dict[tuple[str, str], str] = {}
    for arm in arms:
        first = seen.setdefault((arm.group, arm.config.model_dump_json()), arm.id)
        if first != arm.id:
            raise UsageError(
                f"{_where(study, arm.group)}: arms {first} and {arm.id} have the same configuration; change a key in "
                "one of their levels"
            )


def _check_ids(arms: Sequence[PlannedArm]) -> None:
    """Refuse ids that are too long or not unique."""
    seen: set[str] = set()
    for arm in arms:
        if len(arm.id) > MAX_ID_LENGTH:
            raise UsageError(
                f"arm {arm.id[:40]}...: its name has {len(arm.id)} characters, more than {MAX_ID_LENGTH}; "
                f"give its levels shorter names (a label may be long)"
            )
        # Some file systems ignore the case of folder names.
        if arm.id.lower() in seen:
            raise UsageError(f"two arms are called {arm.id}; give a level, arm or group another name")
        seen.add(arm.id.lower())


def _select(study: StudySpec, arms: list[PlannedArm], only: Sequence[str]) -> list[PlannedArm]:
    """Return the arms that the filters select, and their baselines, in the same order."""
    selected = arms
    ids: set[str] | None = None  # of the arms that match a filter by name; None without such filters
    for text in only:
        name, sign, values = text.partition("=")
        if sign:
            levels = _parse_levels(study, name.strip(), values.split(","))
            selected = [arm for arm in selected if arm.levels.get(name.strip()) in levels]
        else:
            ids = (ids or set()) | _matching_ids(arms, text)
    selected = [arm for arm in selected if ids is None or arm.id in ids]
    if not selected:
        raise UsageError(f"--only {' '.join(only)}: selects no arm; list the arms with --dry-run")
    needed = {arm.id for arm in selected} | {arm.baseline for arm in selected}
    return [arm for arm in arms if arm.id in needed]


def _parse_levels(study: StudySpec, factor_name: str, values: Sequence[str]) -> set[str]:
    """Return the levels of a filter. Raises UsageError for an unknown factor or level."""
    known: dict[str, list[str]] = {}
    for group in study.groups:
        for factor in group.factors:
            known.setdefault(factor.name, []).extend(level.name for level in factor.levels)
        if group.arms:
            known.setdefault("arm", []).extend(arm.name for arm in group.arms)
    if factor_name not in known:
        raise UsageError(f"--only {factor_name}: unknown factor; {suggestion(factor_name, list(known))}")
    levels = {value.strip() for value in values}
    for level in sorted(levels - set(known[factor_name])):
        hint = suggestion(level, list(dict.fromkeys(known[factor_name])))
        raise UsageError(f"--only {factor_name}={level}: unknown level; {hint}")
    return levels


def _matching_ids(arms: Sequence[PlannedArm], pattern: str) -> set[str]:
    """Return the ids of the arms that match a pattern, or are in the group of this name."""
    ids = {arm.id for arm in arms if arm.group == pattern or fnmatch.fnmatchcase(arm.id, pattern)}
    if not ids:
        names = [arm.id for arm in arms] + [arm.group for arm in arms]
        near = difflib.get_close_matches(pattern, names, n=1)
        hint = f"did you mean {near[0]}?" if near else "list them with --dry-run"
        raise UsageError(f"--only {pattern}: unknown arm or group; {hint}")
    return ids
