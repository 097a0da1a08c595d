"""The sidebar: which study is looked at, and which of its arms. An empty filter means everything."""

from pathlib import Path

import streamlit as st

from deskside.dashboard import cached
from deskside.dashboard.literal import literal
from deskside.dashboard.reading import Study, card_words
from deskside.dashboard.scan import Found
from deskside.dashboard.selection import Picked, Selection, statuses
from deskside.report import study_words as words
from deskside.study.results import Results

MOST_OPEN = 6  # factors; with more their filters are folded away


def show(root: Path, found: Found) -> Selection | None:
    """Draw the sidebar; returns what was picked, None when there is nothing to pick from."""
    with st.sidebar:
        st.title("deskside")
        st.caption(f"studies and runs below `{root.name or root}`", help=str(root))
        studies = [study for path in found.studies if (study := cached.study(path)) and study.results]
        choices: list[Study | None] = sorted(studies, key=_updated, reverse=True)
        if found.own_runs:
            choices.append(None)
        if not choices:
            st.caption("Nothing was found yet.")
            st.button("Look again")
            return None
        names = [_name(choice, root, len(found.own_runs)) for choice in choices]
        place = names.index(st.selectbox("study", names, key="study"))
        chosen = choices[place]
        if chosen is not None and chosen.results is not None:
            whole, folder = chosen.results, chosen.path
        else:
            whole, folder = cached.runs(found.own_runs, cached.live_runs(found.own_runs), root), None
        _keep_group(whole, names[place])
        picked = _filters(whole, names[place])
        results = cached.selected(names[place], whole, picked)
        st.caption(
            f"{len(results.arms)} of {words.several(len(whole.arms), 'arm' if folder else 'run')} shown"
            + (f", in {len(whole.groups)} groups" if len(whole.groups) > 1 else "")
        )
        st.button("Read again")
    card = card_words(whole.machine) if folder else ", ".join(sorted({a.levels["card"] for a in whole.arms}))
    return Selection(names[place], folder, results, whole, card)


def group_key(study: str) -> str:
    """Under which streamlit keeps the group that is looked at in this study."""
    return f"{study}: group"


def all_groups_key(study: str) -> str:
    """Under which streamlit keeps whether a tab that can shows all groups of this study."""
    return f"{study}: all groups"


def _keep_group(whole: Results, study: str) -> None:
    """See that a group is picked: at first the first one in which a trial has finished.

    The pickers stand in the tabs that draw groups, and streamlit forgets a widget that is not drawn; so what they hold
    is written anew each time.
    """
    names = [group.name for group in whole.groups]
    if len(names) < 2:
        return
    begun = [arm.group for arm in whole.arms if arm.finished()]
    first = next((name for name in names if name in begun), names[0])
    key = group_key(study)
    kept = st.session_state.get(key)
    st.session_state[key] = kept if kept in names else first
    st.session_state[all_groups_key(study)] = st.session_state.get(all_groups_key(study), True)


def _updated(study: Study | None) -> str:
    return study.results.updated if study and study.results else ""


def _name(study: Study | None, root: Path, runs: int) -> str:
    if study is None:
        return f"runs outside of studies ({runs:,})"
    path = study.path
    return str(path.relative_to(root)) if path != root and path.is_relative_to(root) else path.resolve().name


def _filters(whole: Results, study: str) -> Picked:
    """The filters of a study; their state belongs to that study."""

    def several(
        name: str, label: str, options: list[str], shown: dict[str, str] | None = None
    ) -> frozenset[str] | None:
        if len(options) < 2:
            return None
        words_of = shown or {}
        chosen = st.multiselect(
            literal(label),
            options,
            placeholder="all",
            key=f"{study}: {name}",
            format_func=lambda option: words_of.get(option, option),
        )
        return frozenset(chosen) or None

    search = st.text_input("arm contains", key=f"{study}: search", placeholder="words of its name")
    levels: dict[str, frozenset[str]] = {}
    factors: dict[str, tuple[str, list[str]]] = {}
    for group in whole.groups:
        for factor in group.factors:
            label, known = factors.setdefault(factor.name, (factor.label, []))
            known += [level for level in factor.levels if level not in known]
    varied = {name: found for name, found in factors.items() if len(found[1]) > 1}
    with st.expander(f"{len(varied)} options", expanded=False) if len(varied) > MOST_OPEN else st.container():
        for name, (label, known) in varied.items():
            chosen = several(f"factor {name}", label, known)
            if chosen is not None:
                levels[name] = chosen
    present = sorted({status for arm in whole.arms for status in statuses(arm)})
    status = several("status", "status", present, {name: words.status(name) for name in present})
    seeds = several("seed", "seed", [str(seed) for seed in whole.seeds]) if whole.machine else None
    return Picked(
        levels=levels,
        statuses=status,
        seeds=None if seeds is None else frozenset(int(seed) for seed in seeds),
        words=search,
    )
