"""Expansion of a study into arms: every combination that its design asks for, each with a whole configuration.

The layers of an arm's configuration, lowest first: the base preset, the presets of its levels, the evaluation
interval, the study's `set` (and the command line), its levels' keys in the order of the factors, its own keys if it
was written by hand, and the budget. Every arm has a baseline in the same group: the arm with the same levels of the
`within` factors and the baseline's level of the others.
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
from deskside.study.spec.expressions import resolve
from deskside.study.spec.parse_spec import check_seeds
from deskside.study.spec.spec import ArmSpec, Budget, GroupSpec, Layer, StudySpec, suggestion
from deskside.utils.errors import UsageError

BASELINE = "baseline"
MAX_ARMS = 1000
MAX_NAME = 200  # characters of an arm's name; a file system allows 255, and the seed is appended


@dataclass(frozen=True)
class PlannedArm:
    """One configuration to run. levels: factor -> level. baseline: an arm's id. config: resolved. budget: as text."""

    id: str
    label: str
    group: str
    levels: dict[str, str]
    baseline: str
    config: RunConfig
    budget: str


@dataclass(frozen=True)
class Expansion:
    """The arms of a study. excluded: a line with the reason per excluded combination. seeds: their number by group."""

    groups: list[Group]
    arms: list[PlannedArm]
    excluded: list[str]
    seeds: dict[str, int]


def expand(
    study: StudySpec, *, seeds: int | None = None, budget: Budget | None = None, only: Sequence[str] = ()
) -> Expansion:
    """Return all arms, group by group.

    seeds, budget: replace those of every group. only: filters by levels (factor=level[,level]; all must match) and
    by names (of arms, with * and ?, or of groups; any may match); the baselines of the selected arms are kept as
    well. Raises UsageError for an invalid configuration, duplicate arms, an excluded baseline, or a filter without
    matches.
    """
    if seeds is not None:
        check_seeds(seeds, "--seeds")
    arms: list[PlannedArm] = []
    excluded: dict[str, list[str]] = {}
    for group in study.groups:
        found, excluded[group.name] = _expand_group(study, group, budget or group.budget)
        arms += found
    _check_ids(arms)
    if only:
        arms = _select(study, arms, only)
    present = {arm.group for arm in arms}
    groups = []
    for group in study.groups:
        if group.name in present:
            factors = [Factor(f.name, f.label, [level.name for level in f.levels]) for f in group.factors]
            given = budget or group.budget
            words = given.words if given is not None else ""
            groups.append(
                Group(group.name, group.title, group.base, group.design, words, factors, list(group.within))
            )
    left_out = [line for group in groups for line in excluded[group.name]]
    return Expansion(
        groups, arms, left_out, {g.name: seeds or g.seeds for g in study.groups if g.name in present}
    )


def trials(
    arms: Sequence[PlannedArm], seeds: Mapping[str, int], name: str = ""
) -> list[tuple[PlannedArm, int]]:
    """Return every trial in the order of execution: blocks by seed, and within a block a random order of the arms.

    So drift of the machine favors no arm, and a study that is stopped early has whole blocks. The order depends
    only on the study's name and the arms' ids: it is the same after a resume, and removing arms does not reorder
    the others. Seeds are 1, 2, ...
    """

    def place(arm: PlannedArm, seed: int) -> bytes:
        return hashlib.sha256(f"{name}/{seed}/{arm.id}".encode()).digest()

    most = max((seeds[arm.group] for arm in arms), default=0)
    return [
        (arm, seed)
        for seed in range(1, most + 1)
        for arm in sorted(arms, key=lambda arm: place(arm, seed))
        if seed <= seeds[arm.group]
    ]


@dataclass(frozen=True)
class _Combination:
    """An arm before its configuration is built."""

    id: str
    label: str
    levels: dict[str, str]
    baseline: str
    extra: ArmSpec | None = None


def _expand_group(
    study: StudySpec, group: GroupSpec, budget: Budget | None
) -> tuple[list[PlannedArm], list[str]]:
    where = f"{study.name}: group {group.name}" if study.grouped else study.name
    if budget is None:
        raise UsageError(
            f"{where}: it has no budget; write [budget] with minutes_per_arm, or give --minutes-per-arm"
        )
    count = _count(group)
    if count > MAX_ARMS:  # checked first: a dozen factors would not fit into memory
        raise UsageError(f"{where}: {count:,} arms are more than {MAX_ARMS:,}; use fewer levels or factors")
    wanted = _combinations(study, group)
    kept, excluded = [], []
    for combination in wanted:
        reasons = [
            e.why for e in group.exclusions if e.covers(combination.levels) and combination.extra is None
        ]
        if reasons:
            excluded.append(f"{combination.label}: {reasons[0]}")
        else:
            kept.append(combination)
    for exclusion in group.exclusions:
        if not any(exclusion.covers(c.levels) for c in wanted if c.extra is None):
            what = ", ".join(f"{factor} {' or '.join(names)}" for factor, names in exclusion.where.items())
            raise UsageError(f"{where}: exclude: there is no arm with {what}; remove it")
    present = {combination.id for combination in kept}
    for combination in kept:
        if combination.baseline not in present:
            raise UsageError(
                f"{where}: {combination.id}: its baseline {combination.baseline} is excluded; exclude it too, or "
                f"choose another [baseline]"
            )
    arms = [_build(study, group, budget, combination) for combination in kept]
    _check_distinct(where, arms)
    return arms, excluded


def _count(group: GroupSpec) -> int:
    """Return the number of combinations before exclusions."""
    full = group.design == "full"
    outer = math.prod(len(f.levels) for f in group.factors if full or f.name in group.within)
    inner = 0 if full else sum(len(f.levels) - 1 for f in group.factors if f.name not in group.within)
    return outer * (1 + inner) + len(group.arms)


def _combinations(study: StudySpec, group: GroupSpec) -> list[_Combination]:
    """Return every arm before exclusions: those of the design, then those written by hand."""
    full = group.design == "full"
    outer = [factor for factor in group.factors if full or factor.name in group.within]
    inner = [] if full else [factor for factor in group.factors if factor.name not in group.within]
    result = []
    for names in itertools.product(*([level.name for level in factor.levels] for factor in outer)):
        chosen = dict(zip((factor.name for factor in outer), names, strict=True))
        start = _in_order(group, group.baseline | chosen)
        result.append(_combination(study, group, start))
        for factor in inner:
            result += [
                _combination(study, group, start | {factor.name: level.name})
                for level in factor.levels
                if level.name != start[factor.name]
            ]
    first = {factor.name: factor.levels[0].name for factor in group.factors if factor.name in group.within}
    prefix = f"{group.name}-" if study.grouped else ""
    for extra in group.arms:
        levels = _in_order(group, group.baseline | first | extra.levels)
        baseline, _ = _name(study, group, levels | group.baseline)
        result.append(
            _Combination(f"{prefix}{extra.name}", extra.label, {**levels, "arm": extra.name}, baseline, extra)
        )
    return result


def _combination(study: StudySpec, group: GroupSpec, levels: dict[str, str]) -> _Combination:
    baseline, _ = _name(study, group, levels | group.baseline)
    name, label = _name(study, group, levels)
    return _Combination(name, label, levels, baseline)


def _in_order(group: GroupSpec, levels: Mapping[str, str]) -> dict[str, str]:
    return {factor.name: levels[factor.name] for factor in group.factors}


def _name(study: StudySpec, group: GroupSpec, levels: Mapping[str, str]) -> tuple[str, str]:
    """Return an arm's id and label, made of all its levels, or with one-at-a-time of those that are changed."""
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
    levels = [factor.level(combination.levels[factor.name]) for factor in group.factors]
    layers: list[Layer] = [*presets.layers(group.base)]
    for level in levels:
        layers += presets.layers(level.preset) if level.preset is not None else []
    layers += [budget.default_layer, *group.set, *(level.set for level in levels)]
    if combination.extra is not None:
        layers.append(combination.extra.set)
    layers.append(budget.layer)
    try:
        config = merge.build(resolve(layers))
    except UsageError as error:
        raise UsageError(f"{study.name}: arm {combination.id}: {error}") from None
    return PlannedArm(
        **{key: value for key, value in vars(combination).items() if key != "extra"},
        group=group.name,
        config=config,
        budget=budget.words,
    )


def _check_distinct(where: str, arms: Sequence[PlannedArm]) -> None:
    seen: dict[str, str] = {}
    for arm in arms:
        first = seen.setdefault(arm.config.model_dump_json(), arm.id)
        if first != arm.id:
            raise UsageError(
                f"{where}: arms {first} and {arm.id} have the same configuration; give each level a different key"
            )


def _check_ids(arms: Sequence[PlannedArm]) -> None:
    seen: set[str] = set()
    for arm in arms:
        if len(arm.id) > MAX_NAME:
            raise UsageError(
                f"arm {arm.id[:40]}...: its name has {len(arm.id)} characters, more than {MAX_NAME}; "
                f"give its levels shorter names (a label may be long)"
            )
        # Some file systems ignore the case of folder names.
        if arm.id.lower() in seen:
            raise UsageError(f"two arms are called {arm.id}; give a level, arm or group another name")
        seen.add(arm.id.lower())


def _select(study: StudySpec, arms: list[PlannedArm], only: Sequence[str]) -> list[PlannedArm]:
    """Return the arms that the filters select, and their baselines, in the same order."""
    kept = arms
    named: set[str] | None = None
    for text in only:
        name, sign, values = text.partition("=")
        if sign:
            wanted = _levels(study, name.strip(), values.split(","))
            kept = [arm for arm in kept if arm.levels.get(name.strip()) in wanted]
        else:
            named = (named or set()) | _named(arms, text)
    kept = [arm for arm in kept if named is None or arm.id in named]
    if not kept:
        raise UsageError(f"--only {' '.join(only)}: selects no arm; list them with --dry-run")
    needed = {arm.id for arm in kept} | {arm.baseline for arm in kept}
    return [arm for arm in arms if arm.id in needed]


def _levels(study: StudySpec, name: str, values: Sequence[str]) -> set[str]:
    known: dict[str, dict[str, None]] = {}
    for group in study.groups:
        for factor in group.factors:
            known.setdefault(factor.name, {}).update(dict.fromkeys(level.name for level in factor.levels))
        if group.arms:
            known.setdefault("arm", {}).update(dict.fromkeys(arm.name for arm in group.arms))
    if name not in known:
        raise UsageError(f"--only {name}: unknown factor; {suggestion(name, list(known))}")
    wanted = {value.strip() for value in values}
    for value in sorted(wanted - set(known[name])):
        raise UsageError(f"--only {name}={value}: unknown level; {suggestion(value, list(known[name]))}")
    return wanted


def _named(arms: Sequence[PlannedArm], text: str) -> set[str]:
    found = {arm.id for arm in arms if arm.group == text or fnmatch.fnmatchcase(arm.id, text)}
    if not found:
        names = [arm.id for arm in arms] + [arm.group for arm in arms]
        near = difflib.get_close_matches(text, names, n=1)
        hint = f"did you mean {near[0]}?" if near else "list them with --dry-run"
        raise UsageError(f"--only {text}: unknown arm or group; {hint}")
    return found
