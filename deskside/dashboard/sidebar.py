"""The sidebar: which study is shown, and the filters that select some of its arms."""

import re
from dataclasses import dataclass, field, replace
from pathlib import Path

import streamlit as st

from deskside.dashboard import file_cache
from deskside.dashboard.scan import Found
from deskside.run.record import machine_name
from deskside.study.results import INTERRUPTED, Arm, Results, status_text
from deskside.utils.format import plural, printable

SPECIAL = re.compile(r"([\\`*_{}\[\]<>#!|~$:&^=])")
MAX_OPEN_FILTERS = 6  # a study with more factors gets its filters folded


@dataclass(frozen=True)
class Filters:
    """Values that pass each filter. None, or a factor that is not in `levels`, lets everything pass."""

    groups: frozenset[str] | None = None
    levels: dict[str, frozenset[str]] = field(default_factory=dict)
    statuses: frozenset[str] | None = None
    seeds: frozenset[int] | None = None
    search: str = ""


@dataclass(frozen=True)
class StudySelection:
    """The study that the tabs show.

    Attributes:
        name: Name of the study in the sidebar.
        folder: Its directory, None for the runs that belong to no study.
        results: The study after filtering.
        whole: The study before filtering.
        card: Name of the GPU or CPU.
    """

    name: str
    folder: Path | None
    results: Results
    whole: Results
    card: str

    @property
    def hidden(self) -> int:
        """Number of arms that the filters hide."""
        return len(self.whole.arms) - len(self.results.arms)

    def of_group(self, group: str) -> "StudySelection":
        """Return the selection as if the study had only this group."""
        one = Filters(groups=frozenset({group}))
        return replace(self, results=select(self.results, one), whole=select(self.whole, one))


@dataclass(frozen=True)
class Context:
    """Input of every tab. `selection` is None if there is neither a readable study nor a run."""

    root: Path
    found: Found
    selection: StudySelection | None


def show(root: Path, found: Found) -> StudySelection | None:
    """Draw the sidebar and return what it selects, or None if there is nothing to select."""
    with st.sidebar:
        st.title("deskside")
        st.caption(f"studies and runs below `{root.name or root}`", help=str(root))
        studies = file_cache.readable(found)
        names = {
            _name(path, root): path
            for path in sorted(studies, key=lambda path: studies[path].updated, reverse=True)
        }
        outside = f"runs outside of studies ({len(found.own_runs):,})"
        choices = [*names, *([outside] if found.own_runs else [])]
        if not choices:
            st.caption("No study or run was found.")
            st.button("Look again")
            return None
        name = st.selectbox("study", choices, key="study")
        folder = names.get(name)
        if folder is not None:
            whole = studies[folder]
        else:
            whole = file_cache.runs(found.own_runs, file_cache.live_runs(found.own_runs), root)
        _keep_group(whole, name)
        results = _selected(name, whole, _filters(whole, name))
        groups = f", in {len(whole.groups)} groups" if len(whole.groups) > 1 else ""
        st.caption(
            f"{len(results.arms)} of {plural(len(whole.arms), 'arm' if folder else 'run')} shown{groups}"
        )
        st.button("Read again")
    card = (
        machine_name(whole.machine) if folder else ", ".join(sorted({a.levels["card"] for a in whole.arms}))
    )
    return StudySelection(name, folder, results, whole, card)


def group_key(study: str) -> str:
    """Return the session-state key of the group that is shown of a study."""
    return f"{study}: group"


def all_groups_key(study: str) -> str:
    """Return the session-state key of the toggle that shows all groups of a study."""
    return f"{study}: all groups"


def _keep_group(whole: Results, study: str) -> None:
    """Keep the selected group in the session; at first it is the first group with a finished trial.

    The group pickers are drawn inside tabs, and Streamlit drops the state of a widget that is not drawn. Writing the
    state in every run keeps it.
    """
    names = [group.name for group in whole.groups]
    if len(names) < 2:
        return
    begun = [arm.group for arm in whole.arms if arm.finished()]
    first = next((name for name in names if name in begun), names[0])
    kept = st.session_state.get(group_key(study))
    st.session_state[group_key(study)] = kept if kept in names else first
    st.session_state[all_groups_key(study)] = st.session_state.get(all_groups_key(study), True)


def _name(path: Path, root: Path) -> str:
    return str(path.relative_to(root)) if path != root and path.is_relative_to(root) else path.resolve().name


def _filters(whole: Results, study: str) -> Filters:
    """Draw the filters of a study. Their state belongs to that study."""

    def pick(
        name: str, label: str, options: list[str], shown: dict[str, str] | None = None
    ) -> frozenset[str] | None:
        if len(options) < 2:
            return None
        names = shown or {}
        chosen = st.multiselect(
            literal(label),
            options,
            placeholder="all",
            key=f"{study}: {name}",
            format_func=lambda option: names.get(option, option),
        )
        return frozenset(chosen) or None

    search = st.text_input("arm contains", key=f"{study}: search", placeholder="part of its name")
    levels: dict[str, frozenset[str]] = {}
    factors: dict[str, tuple[str, list[str]]] = {}
    for group in whole.groups:
        for factor in group.factors:
            label, known = factors.setdefault(factor.name, (factor.label, []))
            known += [level for level in factor.levels if level not in known]
    varied = {name: found for name, found in factors.items() if len(found[1]) > 1}
    folded = len(varied) > MAX_OPEN_FILTERS
    with st.expander(f"{len(varied)} options", expanded=False) if folded else st.container():
        for name, (label, known) in varied.items():
            chosen = pick(f"factor {name}", label, known)
            if chosen is not None:
                levels[name] = chosen
    present = sorted({status for arm in whole.arms for status in statuses(arm)})
    status = pick("status", "status", present, {name: status_text(name) for name in present})
    seeds = pick("seed", "seed", [str(seed) for seed in whole.seeds]) if whole.machine else None
    chosen_seeds = None if seeds is None else frozenset(int(seed) for seed in seeds)
    return Filters(levels=levels, statuses=status, seeds=chosen_seeds, search=search)


def _selected(name: str, whole: Results, filters: Filters) -> Results:
    """Apply the filters. Fewer seeds take a comparison of all arms, so that result is cached."""
    if filters.seeds is None:
        return select(whole, filters)
    interrupted = sum(trial.status == INTERRUPTED for arm in whole.arms for trial in arm.trials)
    return file_cache.selected(name, (whole.updated, interrupted, filters), lambda: select(whole, filters))


def statuses(arm: Arm) -> set[str]:
    """Return every status of an arm's trials."""
    return {trial.status for trial in arm.trials} or {"pending"}


def select(results: Results, filters: Filters) -> Results:
    """Return the study with the arms that pass all filters.

    Fewer seeds make a smaller study, so all estimates and comparisons are computed again from those seeds.
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
    groups = [g for g in results.groups if filters.groups is None or g.name in filters.groups]
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
    interactions = [found for found in results.interactions if found.group in names]
    return replace(results, arms=shown, fronts=fronts, groups=groups, interactions=interactions)


def _matches(arm: Arm, filters: Filters) -> bool:
    if filters.groups is not None and arm.group not in filters.groups:
        return False
    if filters.statuses is not None and not statuses(arm) & filters.statuses:
        return False
    # A factor that an arm's group does not vary does not filter the arm.
    if any(name in arm.levels and arm.levels[name] not in levels for name, levels in filters.levels.items()):
        return False
    return any(_normalized(filters.search) in _normalized(name) for name in (arm.label, arm.id))


def _normalized(name: str) -> str:
    """Return letters and digits alone, so that "medium gqa on" finds "medium, GQA on" and "medium-gqa_on"."""
    return " ".join(re.findall(r"\w+", name.casefold().replace("_", " ")))


def literal(text: str) -> str:
    """Return the text on one line with every character escaped that CommonMark gives a meaning.

    A study may come from another person. Read as Markdown, a label could embed an image, which the browser would fetch
    from any address, or show a link that looks like one of the page's own.
    Streamlit still turns a bare address into a link to that address, and the name of an icon into the icon, because it
    looks for both after unescaping. Neither fetches anything by itself.
    """
    return SPECIAL.sub(r"\\\1", " ".join(printable(text).split()))
