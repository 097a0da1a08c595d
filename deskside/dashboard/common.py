"""What tabs share: showing a chart, saying that there is nothing, the list of what could not be read."""

import streamlit as st

from deskside.dashboard import cached, charts
from deskside.dashboard.cached import Context
from deskside.dashboard.literal import literal
from deskside.dashboard.selection import Selection
from deskside.dashboard.sidebar import all_groups_key, group_key
from deskside.report import study_words as words
from deskside.run.record import number

COMMANDS = """deskside go --preset demo --hours 0.05     # three minutes on a CPU, from bundled text
deskside study matrix16-quick              # sixteen arms: GQA and FP4 at four sizes, on a CPU
deskside train 124m --data.path DIR        # a run of its own"""


def chart(figure: charts.go.Figure, key: str, told: str) -> None:
    """A chart with the sentence that a screen reader says; its mode bar saves it as PNG."""
    setup = {
        **charts.MODE_BAR,
        "toImageButtonOptions": {**charts.MODE_BAR["toImageButtonOptions"], "filename": key},
    }
    st.plotly_chart(figure, key=f"chart-{key}", config=setup, alt=told)


def nothing(context: Context) -> None:
    """Told in place of a tab that has nothing to show: what to run, or that the filters leave nothing."""
    if context.selection is not None:
        st.info("The filters in the sidebar leave no arm. Clear one of them.")
        return
    st.info(f"There is no study and no run below `{context.root}` yet. One of these makes some:")
    st.code(COMMANDS, language="bash")
    st.caption(
        "This page finds them by itself while they are going on. Another directory: deskside dashboard DIR"
    )


def usable(context: Context, groups: bool = False) -> Selection | None:
    """What a tab shows when it has arms, under its heading; else tells what to do and returns None.

    Groups have budgets, batches and baselines of their own, so of several one is shown at a time: the one that is
    picked here, in the page, where a phone shows it too. groups: the tab can show all of them together, and does
    unless it is told otherwise.
    """
    whole = context.selection
    if whole is None or not whole.results.arms:
        nothing(context)
        return None
    known = whole.whole.groups
    if len(known) < 2:
        _heading(whole)
        return whole
    if groups and st.toggle("all groups", key=all_groups_key(whole.name)):
        _heading(whole)
        return whole
    titles = {group.name: words.group_title(group) for group in known}
    name = st.selectbox(
        f"group, one of {len(known)}", list(titles), key=group_key(whole.name), format_func=titles.__getitem__
    )
    one = whole.of(name)
    _heading(one)
    if not one.results.arms:
        st.info(
            "The filters in the sidebar leave no arm of this group. Clear one of them, or pick another group."
        )
        return None
    return one


def _heading(selection: Selection) -> None:
    """Which study, on what, how far."""
    results = selection.results
    told = [f"**{literal(results.name)}** on {literal(selection.card)}"]
    if len(results.groups) == 1 and results.groups[0].budget:
        told.append(f"{literal(results.groups[0].budget)} per trial")
    if selection.left_out:
        told.append(f"{len(results.arms)} of {len(selection.whole.arms)} arms shown")
    if selection.folder is not None and not results.complete:
        told.append("not complete")
    if (base := _baseline(selection)) is not None:
        told.append(f"baseline: {literal(base)}")
    st.caption(" · ".join(told))


def _baseline(selection: Selection) -> str | None:
    """What an arm that is called just "baseline" is, in the words of its group's factors."""
    groups, arms = selection.whole.groups, selection.whole.arms
    base = next((arm for arm in arms if arm.label == "baseline"), None)
    if len(groups) != 1 or base is None:
        return None
    said = [f"{f.label} {base.levels[f.name]}" for f in groups[0].factors if f.name in base.levels]
    return ", ".join(said) or None


def problems(context: Context) -> list[tuple[str, str]]:
    """(directory, reason) of everything that could not be read, or not whole."""
    found = [(str(path), reason) for path, reason in context.found.problems]
    for path in context.found.studies:
        study = cached.study(path)
        if study is not None and study.problem:
            found.append((_shown(context, str(path)), study.problem))
    for run in context.found.own_runs:
        brief = cached.brief(run.path)
        if brief.problems:
            found.append((_shown(context, str(run.path)), "; ".join(brief.problems)))
    return found


def _shown(context: Context, path: str) -> str:
    return path.removeprefix(f"{context.root}/")


def memory_limit(selection: Selection) -> tuple[float, str] | None:
    """The card's memory in GiB and its name, where the study says so."""
    gpu = selection.results.machine.get("gpu")
    size = number(gpu.get("memory_gib")) if isinstance(gpu, dict) else None
    return None if size is None else (size, f"the card: {size:.0f} GiB")


def seeds_told(selection: Selection, key: str) -> str:
    """Behind how many seeds the intervals of a chart stand."""
    if selection.folder is None:
        return "One run each, so no interval."
    seeds = words.seeds(selection.results.arms, key)
    return f"Measured, {seeds}." if "no " in seeds else f"Measured; means with their intervals, {seeds}."


def sentence(words_: str) -> str:
    """Words as a sentence of their own; nothing stays nothing."""
    return f"{words_[:1].upper()}{words_[1:]}." if words_ else ""
