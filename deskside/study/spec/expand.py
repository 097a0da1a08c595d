"""From a study to its arms: every combination that its design asks for, each as a whole configuration.

The layers of an arm, lowest first: the base preset, the presets of its levels, how often it is evaluated, the study's
`set` (and the command line), its levels' keys in the order of the factors, its own keys if it was written by hand, and
the budget. Every arm has a baseline in the same group: the arm with the same levels of the `within` factors and the
baseline's level of the others.
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
from deskside.study.spec.spec import ArmSpec, Budget, GroupSpec, Layer, StudySpec
from deskside.utils.errors import UsageError

BASELINE = "baseline"
MOST_ARMS = 1000
LONGEST = 200  # letters of an arm's name; a file system takes 255, and the seed follows


@dataclass(frozen=True)
class PlannedArm:
    """One configuration to be run. levels: factor -> level; baseline: the id of the arm that it is compared with, its
    own for one; config: resolved, with no seed of its own; budget: in words."""

    id: str
    label: str
    group: str
    levels: dict[str, str]
    baseline: str
    config: RunConfig
    budget: str


@dataclass(frozen=True)
class Expansion:
    """A study's arms. excluded: one line per combination of its groups that is left out, with why; seeds: how many, by
    group."""

    groups: list[Group]
    arms: list[PlannedArm]
    excluded: list[str]
    seeds: dict[str, int]


def expand(
    study: StudySpec, *, seeds: int | None = None, budget: Budget | None = None, only: Sequence[str] = ()
) -> Expansion:
    """All arms, group by group. seeds, budget: in the place of every group's own.

    only: keeps the arms of these levels (factor=level[,level]; each must hold) and names (of arms, with * and ?, or of
    groups; any may hold), and the baselines that they need. Raises UsageError with one line: for a configuration that
    cannot be, two arms that are the same, a baseline that is excluded, a filter that keeps nothing.
    """
    if seeds is not None:
        check_seeds(seeds, "--seeds")
    arms: list[PlannedArm] = []
    excluded: dict[str, list[str]] = {}
    for group in study.groups:
        found, excluded[group.name] = _expand_group(study, group, budget or group.budget)
        arms += found
    _refuse_bad_ids(arms)
    if only:
        arms = _kept(study, arms, only)
    present = {arm.group for arm in arms}
    groups = [_described(group, budget or group.budget) for group in study.groups if group.name in present]
    left_out = [line for group in groups for line in excluded[group.name]]
    return Expansion(
        groups, arms, left_out, {g.name: seeds or g.seeds for g in study.groups if g.name in present}
    )


def trials(
    arms: Sequence[PlannedArm], seeds: Mapping[str, int], name: str = ""
) -> list[tuple[PlannedArm, int]]:
    """Every trial in the order in which they are run: blocks by seed, and within a block a random order of the arms.

    So a machine that drifts favours no arm, and a study that is stopped half-way has whole blocks. The order is a
    function of the study's name and the arms' ids alone: it is the same on a resume, and leaving arms out does not
    change the order of the rest. Seeds are 1, 2, ...
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
    if count > MOST_ARMS:  # before any is made: a dozen factors are more than memory holds
        raise UsageError(f"{where}: {count:,} arms are more than {MOST_ARMS:,}; use fewer levels or factors")
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
    _refuse_same(where, arms)
    return arms, excluded


def _count(group: GroupSpec) -> int:
    """How many combinations a group has, exclusions not yet applied."""
    full = group.design == "full"
    outer = math.prod(len(f.levels) for f in group.factors if full or f.name in group.within)
    inner = 0 if full else sum(len(f.levels) - 1 for f in group.factors if f.name not in group.within)
    return outer * (1 + inner) + len(group.arms)


def _combinations(study: StudySpec, group: GroupSpec) -> list[_Combination]:
    """Every arm of the design, exclusions not yet applied: first the design's own, then those written by hand."""
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
        baseline = _id(study, group, levels | group.baseline)
        result.append(
            _Combination(f"{prefix}{extra.name}", extra.label, {**levels, "arm": extra.name}, baseline, extra)
        )
    return result


def _combination(study: StudySpec, group: GroupSpec, levels: dict[str, str]) -> _Combination:
    return _Combination(
        _id(study, group, levels), _label(group, levels), levels, _id(study, group, levels | group.baseline)
    )


def _in_order(group: GroupSpec, levels: Mapping[str, str]) -> dict[str, str]:
    return {factor.name: levels[factor.name] for factor in group.factors}


def _named_factors(group: GroupSpec, levels: Mapping[str, str]) -> list[str]:
    """The factors that tell this arm from the others: all of them, or where one is changed at a time, that one."""
    if group.design == "full":
        return [factor.name for factor in group.factors]
    return [
        factor.name
        for factor in group.factors
        if factor.name in group.within or levels[factor.name] != group.baseline[factor.name]
    ]


def _id(study: StudySpec, group: GroupSpec, levels: Mapping[str, str]) -> str:
    parts = [f"{name}_{levels[name]}" for name in _named_factors(group, levels)]
    if not set(_named_factors(group, levels)) - set(group.within):
        parts.append(BASELINE)
    return "-".join([group.name, *parts] if study.grouped else parts)


def _label(group: GroupSpec, levels: Mapping[str, str]) -> str:
    named = _named_factors(group, levels)
    parts = [factor.level(levels[factor.name]).label for factor in group.factors if factor.name in named]
    if not set(named) - set(group.within):
        parts.append(BASELINE)
    return ", ".join(part for part in parts if part)


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
        id=combination.id,
        label=combination.label,
        group=group.name,
        levels=combination.levels,
        baseline=combination.baseline,
        config=config,
        budget=budget.words,
    )


def _refuse_same(where: str, arms: Sequence[PlannedArm]) -> None:
    seen: dict[str, str] = {}
    for arm in arms:
        first = seen.setdefault(arm.config.model_dump_json(), arm.id)
        if first != arm.id:
            raise UsageError(
                f"{where}: arms {first} and {arm.id} are the same configuration; give each level a key of its own"
            )


def _refuse_bad_ids(arms: Sequence[PlannedArm]) -> None:
    seen: set[str] = set()
    for arm in arms:
        if len(arm.id) > LONGEST:
            raise UsageError(
                f"arm {arm.id[:40]}...: its name has {len(arm.id)} letters, and a folder's has {LONGEST} at most; "
                f"give its levels shorter names (a label may be long)"
            )
        # Folders: two that differ in case only are one on some file systems.
        if arm.id.lower() in seen:
            raise UsageError(f"two arms are called {arm.id}; give a level, arm or group another name")
        seen.add(arm.id.lower())


def _kept(study: StudySpec, arms: list[PlannedArm], only: Sequence[str]) -> list[PlannedArm]:
    """The arms that the filters keep, in the same order, and the baselines that those are compared with."""
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
        raise UsageError(f"--only {' '.join(only)}: no arm is left; see them all with --dry-run")
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
        raise UsageError(f"--only {name}: there is no such factor; {_near(name, list(known))}")
    wanted = {value.strip() for value in values}
    for value in sorted(wanted - set(known[name])):
        raise UsageError(f"--only {name}={value}: there is no such level; {_near(value, list(known[name]))}")
    return wanted


def _named(arms: Sequence[PlannedArm], text: str) -> set[str]:
    found = {arm.id for arm in arms if arm.group == text or fnmatch.fnmatchcase(arm.id, text)}
    if not found:
        names = [arm.id for arm in arms] + [arm.group for arm in arms]
        near = difflib.get_close_matches(text, names, n=1)
        hint = f"did you mean {near[0]}?" if near else "see them all with --dry-run"
        raise UsageError(f"--only {text}: there is no such arm or group; {hint}")
    return found


def _near(given: str, known: list[str]) -> str:
    near = difflib.get_close_matches(given, known, n=1)
    return f"did you mean {near[0]}?" if near else f"there is {', '.join(known) or 'none'}"


def _described(group: GroupSpec, budget: Budget | None) -> Group:
    """The group as results.json has it."""
    factors = [Factor(f.name, f.label, [level.name for level in f.levels]) for f in group.factors]
    words = budget.words if budget is not None else ""
    return Group(group.name, group.title, group.base, group.design, words, factors, list(group.within))
