"""Trade-offs page: speed against memory, quality and energy, with the Pareto fronts."""

import pandas as pd
import streamlit as st

from deskside.dashboard import trade_off_chart
from deskside.dashboard.components import chart, pick_group, seeds_note
from deskside.dashboard.sidebar import Context
from deskside.report import study_text
from deskside.study.metrics import metric_named
from deskside.study.results import Arm, Factor, Results
from deskside.utils.format import plural

AXIS_KEYS = {
    "speed and quality": ("tokens_per_second", "val_bpb"),
    "memory and quality": ("peak_memory_gib", "val_bpb"),
    "memory and speed": ("peak_memory_gib", "tokens_per_second"),
    "energy and quality": ("joules_per_token", "val_bpb"),
}
NO_FACTOR = "nothing"


def show(context: Context) -> None:
    """Draw the page."""
    selection = pick_group(context)
    if selection is None:
        return
    results = selection.results
    st.title("Trade-offs")
    choice = st.segmented_control(
        "axes",
        list(AXIS_KEYS),
        default=next(iter(AXIS_KEYS)),
        required=True,
        key="trade-off-axes",
        persist_state="session",
        label_visibility="collapsed",
    )
    x_key, y_key = AXIS_KEYS[choice]
    factors = {factor.label: factor for factor in _varied_factors(results)}
    name = NO_FACTOR
    if factors:
        name = st.selectbox("color by", [*factors, NO_FACTOR], key=f"{selection.name}: color", width=320)
    figure = trade_off_chart.trade_off(results, x_key, y_key, factors.get(name))
    if figure is None:
        missing = [
            metric_named(key).label
            for key in (x_key, y_key)
            if not study_text.measured_arms(results.arms, key)
        ]
        st.info(f"{' and '.join(missing) or choice}: {study_text.NOT_MEASURED} for these arms.")
        return
    with st.container(key="trade-off"):
        chart(figure, choice.replace(" ", "-"), f"{choice} of {plural(len(results.arms), 'arm')}")
        st.html(trade_off_chart.screen_style(figure, "trade-off") + trade_off_chart.number_list(figure))
    st.caption(" ".join([seeds_note(selection, y_key), *_legend_notes(results, x_key, y_key)]))
    st.dataframe(_table(results, x_key, y_key), hide_index=True, width="stretch")


def _varied_factors(results: Results) -> list[Factor]:
    """Return the factors of which at least two levels are shown, those with the fewest levels first."""
    shown = [
        (len({arm.levels.get(factor.name) for arm in results.arms}), factor)
        for group in results.groups
        for factor in group.factors
    ]
    return [factor for count, factor in sorted(shown, key=lambda pair: pair[0]) if count > 1]


def _legend_notes(results: Results, x_key: str, y_key: str) -> list[str]:
    """Return sentences on the sizes, the open marks and the rings of the chart."""
    sizes = {estimate.mean for arm in results.arms if (estimate := arm.estimate("parameters")) is not None}
    notes = ["Larger marks have more parameters."] if len(sizes) > 1 else []
    if any(arm.emulated for arm in results.arms):
        notes.append(
            "Open marks are emulated: their speed and energy are not those of hardware with the format."
        )
    if fronts := trade_off_chart.fronts_in(results, x_key, y_key):
        notes.append(f"A ring: no other arm beats it in {_metric_names(fronts[0].metrics)}.")
    return notes


def _table(results: Results, x_key: str, y_key: str) -> pd.DataFrame:
    """Return a row for each arm with both metrics, those on the Pareto front first."""
    fronts = trade_off_chart.fronts_in(results, x_key, y_key)
    on_front = {name for front in fronts for name in front.arms}
    unclear = {name for front in fronts for name in front.unclear}

    def place(arm: Arm) -> int:
        return 0 if arm.id in on_front else 1 if arm.id in unclear else 2

    words = ("on the front", "the intervals leave it open", "beaten by another arm")
    measured = [arm for arm in results.arms if arm.estimate(x_key) and arm.estimate(y_key)]
    return pd.DataFrame(
        [
            {
                "arm": arm.label,
                **{
                    metric_named(key).heading: study_text.estimate_text(metric_named(key), arm.estimate(key))
                    for key in (x_key, y_key)
                },
                **({"Pareto front": words[place(arm)]} if fronts else {}),
            }
            for arm in sorted(measured, key=place)
        ]
    )


def _metric_names(keys: list[str]) -> str:
    names = [metric_named(key).label for key in keys]
    return " and ".join([", ".join(names[:-1]), names[-1]]) if len(names) > 1 else "".join(names)
