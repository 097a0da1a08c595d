"""The sidebar, in which the user selects a study and filters its arms."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import streamlit as st

from deskside.dashboard import file_cache
from deskside.dashboard.level_labels import level_labels
from deskside.dashboard.scan import ScanResult, name_below
from deskside.dashboard.word_filter import contains
from deskside.run.record import machine_name
from deskside.study.results import INTERRUPTED, Arm, Results, status_text
from deskside.utils.format import plural, printable

MARKDOWN_SPECIAL = re.compile(r"([\\`*_{}\[\]<>#!|~$:&^=])")
MAX_OPEN_FILTERS = 6  # with more factors, the filters are folded


@dataclass(frozen=True)
class Filters:
    """The values that pass each filter: all if it is None, the factor is not in `levels`, or `search` is empty."""

    groups: frozenset[str] | None = None
    levels: dict[str, frozenset[str]] = field(default_factory=dict)
    statuses: frozenset[str] | None = None
    seeds: frozenset[int] | None = None
    search: str = ""


@dataclass(frozen=True)
class StudySelection:
    """The study that the pages show.

    Attributes:
        name: Name of the study in the sidebar.
        folder: Its directory.
        results: The study with only the arms that pass the filters.
        unfiltered: The study with all arms.
    """

    name: str
    folder: Path
    results: Results
    unfiltered: Results

    @property
    def card(self) -> str:
        """Name of the GPU or CPU."""
        return machine_name(self.unfiltered.machine)

    @property
    def hidden(self) -> int:
        """Number of arms that the filters hide."""
        return len(self.unfiltered.arms) - len(self.results.arms)

    def of_group(self, group: str) -> "StudySelection":
        """Return the selection as if the study had only this group."""
        only_group = Filters(groups=frozenset({group}))
        return replace(
            self, results=select(self.results, only_group), unfiltered=select(self.unfiltered, only_group)
        )


@dataclass(frozen=True)
class Context:
    """The input of every page.

    Attributes:
        selection: The study of a page of studies; None if there is no readable study.
        pages: Streamlit's page of each name in `page.PAGES`, for links; "study" is the first page of studies.
    """

    root: Path
    scan: ScanResult
    selection: StudySelection | None
    pages: Mapping[str, Any] = field(default_factory=dict)


def show(root: Path, scan: ScanResult, filters_arms: bool = True) -> StudySelection | None:
    """Draw the sidebar, with the filters of arms or without, and return the selected study; None if there is none."""
    with st.sidebar:
        studies, own = file_cache.readable_studies(scan), scan.standalone_studies
        names = {
            name_below(path, root): path
            for path in sorted(studies, key=lambda path: (path in own, studies[path].updated), reverse=True)
        }
        if not names:
            st.caption("No readable study was found.")
            st.button("Look again")
            return None
        name = st.selectbox("study", list(names), key="study", bind="query-params", persist_state="session")
        folder = names[name]
        unfiltered = studies[folder]
        if not filters_arms:
            return StudySelection(name, folder, unfiltered, unfiltered)
        results = _apply_filters(name, unfiltered, _filters(unfiltered, name))
        _persist_group(results, name)
        groups = f", in {len(unfiltered.groups)} groups" if len(unfiltered.groups) > 1 else ""
        st.caption(f"{len(results.arms)} of {plural(len(unfiltered.arms), 'arm')} shown{groups}")
        st.button("Read again")
    return StudySelection(name, folder, results, unfiltered)


def group_key(study: str) -> str:
    """Return the session-state key of the selected group of a study."""
    return f"{study}: group"


def all_groups_key(study: str) -> str:
    """Return the session-state key of the toggle that shows all groups of a study."""
    return f"{study}: all groups"


def _persist_group(results: Results, study: str) -> None:
    """Keep the selected group in the session state; initially, select the first group with a finished trial.

    The widgets that select a group are drawn in pages, and Streamlit deletes the state of a widget that is not drawn.
    Writing the state at every rerun keeps it.
    """
    names = [group.name for group in results.groups]
    if len(names) < 2:
        return
    groups_with_results = [arm.group for arm in results.arms if arm.finished()]
    first = next((name for name in names if name in groups_with_results), names[0])
    selected = st.session_state.get(group_key(study))
    st.session_state[group_key(study)] = selected if selected in names else first
    st.session_state[all_groups_key(study)] = st.session_state.get(all_groups_key(study), False)


def _filters(unfiltered: Results, study: str) -> Filters:
    """Draw the filters of a study and return their values. Each study has its own filter state."""

    def multiselect(
        name: str, label: str, options: list[str], texts: dict[str, str] | None = None
    ) -> frozenset[str] | None:
        if len(options) < 2:
            return None
        option_texts = texts or {}
        chosen = st.multiselect(
            literal(label),
            options,
            placeholder="all",
            key=f"{study}: {name}",
            persist_state="session",
            format_func=lambda option: option_texts.get(option, option),
        )
        return frozenset(chosen) or None

    search = st.text_input(
        "arm contains", key=f"{study}: search", placeholder="part of its name", persist_state="session"
    )
    levels: dict[str, frozenset[str]] = {}
    factors: dict[str, tuple[str, list[str]]] = {}
    for group in unfiltered.groups:
        for factor in group.factors:
            label, factor_levels = factors.setdefault(factor.name, (factor.label, []))
            factor_levels += [level for level in factor.levels if level not in factor_levels]
    varied = {name: factor for name, factor in factors.items() if len(factor[1]) > 1}
    folded = len(varied) > MAX_OPEN_FILTERS
    with st.expander(f"{len(varied)} options", expanded=False) if folded else st.container():
        for name, (label, factor_levels) in varied.items():
            names = level_labels(unfiltered.arms, name, factor_levels)
            chosen = multiselect(f"factor {name}", label, factor_levels, names)
            if chosen is not None:
                levels[name] = chosen
    all_statuses = sorted({status for arm in unfiltered.arms for status in statuses(arm)})
    chosen_statuses = multiselect(
        "status", "status", all_statuses, {name: status_text(name) for name in all_statuses}
    )
    seeds = (
        multiselect("seed", "seed", [str(seed) for seed in unfiltered.seeds]) if unfiltered.machine else None
    )
    chosen_seeds = None if seeds is None else frozenset(int(seed) for seed in seeds)
    return Filters(levels=levels, statuses=chosen_statuses, seeds=chosen_seeds, search=search)


def _apply_filters(name: str, unfiltered: Results, filters: Filters) -> Results:
    """Apply the filters. A filter by seed compares all arms again, so its result is cached."""
    if filters.seeds is None:
        return select(unfiltered, filters)
    interrupted = sum(trial.status == INTERRUPTED for arm in unfiltered.arms for trial in arm.trials)
    return file_cache.filtered(
        name, (unfiltered.updated, interrupted, filters), lambda: select(unfiltered, filters)
    )


def statuses(arm: Arm) -> set[str]:
    """Return every status of an arm's trials."""
    return {trial.status for trial in arm.trials} or {"pending"}


def select(results: Results, filters: Filters) -> Results:
    """Return the study with only the arms that pass all filters.

    With fewer seeds, all estimates and comparisons are computed again from the remaining seeds.
    """
    if filters.seeds is not None and filters.seeds != frozenset(results.seeds):
        from deskside.study.stats.compare import compare  # imports scipy, which takes half a second

        arms = [
            replace(
                arm, trials=[t for t in arm.trials if t.seed in filters.seeds], estimates={}, comparisons=[]
            )
            for arm in results.arms
        ]
        seeds = [seed for seed in results.seeds if seed in filters.seeds]
        results = compare(replace(results, seeds=seeds, arms=arms, interactions=[], fronts=[]))
    shown = [arm for arm in results.arms if _matches(arm, filters)]
    ids = {arm.id for arm in shown}
    shown_groups = {arm.group for arm in shown} if filters != Filters(seeds=filters.seeds) else None
    groups = [group for group in results.groups if shown_groups is None or group.name in shown_groups]
    names = {group.name for group in groups}
    fronts = [
        replace(
            front,
            arms=[arm for arm in front.arms if arm in ids],
            unclear=[arm for arm in front.unclear if arm in ids],
        )
        for front in results.fronts
        if front.group in names
    ]
    interactions = [
        interaction
        for interaction in results.interactions
        if any(
            arm.group == interaction.group and interaction.levels.items() <= arm.levels.items()
            for arm in shown
        )
    ]
    return replace(results, arms=shown, fronts=fronts, groups=groups, interactions=interactions)


def _matches(arm: Arm, filters: Filters) -> bool:
    if filters.groups is not None and arm.group not in filters.groups:
        return False
    if filters.statuses is not None and not statuses(arm) & filters.statuses:
        return False
    # Filters on factors that the arm's group does not vary are ignored.
    if any(name in arm.levels and arm.levels[name] not in levels for name, levels in filters.levels.items()):
        return False
    return contains(arm.label, filters.search)  # not the id, which is not shown


def literal(text: str) -> str:
    """Return the text on one line, with the characters escaped that start Markdown's inline formatting.

    A study may come from another person. As Markdown, a label could embed an image, which the browser would fetch from
    any address, or show a link that looks like one of the page's own. Streamlit still turns a bare address into a link
    and the name of an icon into the icon, because it looks for both after unescaping. Neither fetches anything.
    """
    return MARKDOWN_SPECIAL.sub(r"\\\1", " ".join(printable(text).split()))
