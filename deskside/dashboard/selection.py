"""What a person picked in the sidebar, applied to a study: the arms and trials that every tab then shows."""

import re
from dataclasses import dataclass, field, replace
from pathlib import Path

from deskside.study.results import Arm, Results


@dataclass(frozen=True)
class Picked:
    """The filters. None or a missing factor: everything."""

    groups: frozenset[str] | None = None
    levels: dict[str, frozenset[str]] = field(default_factory=dict)
    statuses: frozenset[str] | None = None
    seeds: frozenset[int] | None = None
    words: str = ""


@dataclass(frozen=True)
class Selection:
    """A study as the tabs show it, filtered (`results`) and `whole`.

    name: of the study in the sidebar. folder: None for the runs that are no part of a study; card: in words.
    """

    name: str
    folder: Path | None
    results: Results
    whole: Results
    card: str

    @property
    def left_out(self) -> int:
        """Arms that the filters hide."""
        return len(self.whole.arms) - len(self.results.arms)

    def of(self, group: str) -> "Selection":
        """One group of it, as if the study had no other."""
        one = Picked(groups=frozenset({group}))
        return replace(self, results=select(self.results, one), whole=select(self.whole, one))


def statuses(arm: Arm) -> set[str]:
    """Every status of an arm's trials."""
    return {trial.status for trial in arm.trials} or {"pending"}


def select(results: Results, picked: Picked) -> Results:
    """The study with the arms that match all filters.

    Fewer seeds are a smaller study: everything that was estimated is estimated again from them, by study/compare.py.
    """
    if picked.seeds is not None and picked.seeds != frozenset(results.seeds):
        from deskside.study.stats.compare import compare  # scipy takes half a second, and few pick seeds

        arms = [
            replace(
                arm,
                trials=[t for t in arm.trials if t.seed in picked.seeds],
                estimates={},
                comparisons=[],
            )
            for arm in results.arms
        ]
        seeds = [seed for seed in results.seeds if seed in picked.seeds]
        results = compare(replace(results, seeds=seeds, arms=arms, interactions=[], fronts=[]))
    shown = [arm for arm in results.arms if _matches(arm, picked)]
    names = {arm.id for arm in shown}
    groups = [g for g in results.groups if picked.groups is None or g.name in picked.groups]
    kept = {group.name for group in groups}
    fronts = [
        replace(
            front,
            arms=[name for name in front.arms if name in names],
            unclear=[name for name in front.unclear if name in names],
        )
        for front in results.fronts
        if front.group in kept
    ]
    interactions = [found for found in results.interactions if found.group in kept]
    return replace(results, arms=shown, fronts=fronts, groups=groups, interactions=interactions)


def _matches(arm: Arm, picked: Picked) -> bool:
    if picked.groups is not None and arm.group not in picked.groups:
        return False
    if picked.statuses is not None and not statuses(arm) & picked.statuses:
        return False
    # A factor that an arm's group does not vary says nothing about it.
    if any(
        arm.levels.get(factor, next(iter(levels), "")) not in levels
        for factor, levels in picked.levels.items()
    ):
        return False
    return any(_plain(picked.words) in _plain(name) for name in (arm.label, arm.id))


def _plain(name: str) -> str:
    """Letters and digits alone, so that "medium gqa on" finds "medium, GQA on" and "medium-gqa_on"."""
    return " ".join(re.findall(r"\w+", name.casefold().replace("_", " ")))
