"""Planner page: `deskside plan` with controls, and its predictions against the measurements."""

from collections.abc import Callable
from typing import Any

import streamlit as st

from deskside.config import presets
from deskside.config.recipes import RECIPES
from deskside.dashboard import file_cache, plotly_charts
from deskside.dashboard.components import chart
from deskside.dashboard.runs import run_predictions, trial_predictions
from deskside.dashboard.sidebar import Context
from deskside.facts.gpus import gpus
from deskside.plan.planner import make_plan
from deskside.plan.request import PlanQuestion, make_request
from deskside.utils.errors import RunError, UsageError
from deskside.utils.format import count, dollars, duration, gib, number, plural

THIS_MACHINE = "this machine"
SEARCH_MODEL = "the best for the budget"
DEFAULT_BUDGETS = {"hours": 24.0, "billion tokens": 3.0, "bits per byte to reach": 0.9}
MAX_RUNS = 200  # runs whose predictions are read
MAX_DRAWN = 30


def show(context: Context) -> None:
    """Draw the page."""
    st.header("What can be trained")
    with st.form("planner"):
        question = _draw_controls(str(context.root / "probes"))
        st.form_submit_button("Plan", type="primary")
    try:
        plan = _cached_plan(question)
    except (UsageError, RunError) as error:
        st.error(str(error))
    else:
        _draw_plan(plan)
    _draw_accuracy(context)


def _draw_controls(probes: str) -> PlanQuestion:
    first, second, third = st.columns(3)
    names = [gpu.name for gpu in gpus()]
    default_card = next(
        (i for i, name in enumerate(names) if "4090" in name and "laptop" not in name.lower()), 0
    )
    card = first.selectbox("card", [*names, THIS_MACHINE], index=default_card, key="plan-card")
    kind = second.selectbox("budget in", list(DEFAULT_BUDGETS), key="plan-kind")
    amount = third.number_input("budget", 0.01, 1e6, DEFAULT_BUDGETS["hours"], key="plan-amount")
    model = first.selectbox("model", [SEARCH_MODEL, *presets.names()], key="plan-model")
    cards = second.number_input("cards in one machine", 1, 64, 1, key="plan-cards")
    precision = third.selectbox("precision", ["automatic", *RECIPES], key="plan-precision")
    rows = [0, 512, 1024, 2048, 4096, 8192]
    sequence = first.selectbox(
        "tokens per row",
        rows,
        format_func=lambda row: f"{row:,}" if row else "as in the preset",
        key="plan-rows",
    )
    price = second.number_input("price of electricity, $ per kWh", 0.0, 10.0, 0.30, 0.01, key="plan-price")
    return PlanQuestion(
        gpu=None if card == THIS_MACHINE else card,
        here=card == THIS_MACHINE,
        hours=amount if kind == "hours" else None,
        tokens=amount * 1e9 if kind == "billion tokens" else None,
        loss=amount if kind == "bits per byte to reach" else None,
        preset=None if model == SEARCH_MODEL else model,
        gpus=int(cards),
        precision=None if precision == "automatic" else precision,
        sequence=sequence or None,
        price_kwh=price,
        probes=probes,
    )


@st.cache_data(ttl=60, max_entries=32, show_spinner="planning")
def _cached_plan(question: PlanQuestion) -> dict[str, Any]:
    return make_plan(make_request(question)).to_json()


def _draw_plan(plan: dict[str, Any]) -> None:
    show_verdict = {"yes": st.success, "yes-if": st.warning, "no": st.error}[plan["verdict"]]
    show_verdict(f"**{plan['verdict']}** · {plan['request']['card']}")
    st.markdown("\n".join(f"- {reason}" for reason in plan["reasons"]).replace("$", "\\$"))
    if plan["bands"]:
        st.subheader("Bands (modelled)")
        columns = {
            f"{b['name']}{' (recommended)' if b['recommended'] else ''}": _band_column(b)
            for b in plan["bands"]
        }
        st.dataframe(columns, width="stretch")
    memory, speed = plan["memory"], plan["speed"]
    first, second = st.columns(2)
    if memory:
        with first:
            st.subheader("Memory (modelled)")
            parts = {name: size / 2**30 for name, size in memory["items"].items()}
            chart(
                plotly_charts.breakdown(parts, "memory, GiB"),
                "plan-memory",
                f"memory of the plan by item; {gib(memory['needed']['expected'])} needed",
            )
            needed = memory["needed"]
            st.caption(
                f"Needed on the card, including fragmentation and context: {gib(needed['expected'])} "
                f"({gib(needed['low'])} to {gib(needed['high'])}); it has {gib(memory['capacity'])}. The items do "
                f"not all exist at the same time."
            )
    if speed:
        with second:
            st.subheader("A step (modelled" + (", emulated)" if speed["emulated"] else ")"))
            chart(
                plotly_charts.breakdown(speed["items"], "time of a step, s"),
                "plan-step",
                "time of a step of the plan by item",
            )
            rate = speed["tokens_per_second"]
            st.caption(
                f"{rate['expected']:,.0f} tokens/s ({rate['low']:,.0f} to {rate['high']:,.0f}); {speed['basis']}."
            )
    recommended = next((band for band in plan["bands"] if band["recommended"]), None)
    if recommended is not None:
        st.subheader("Command")
        st.code(recommended["command"], language="bash", wrap_lines=True)
        st.caption("DIR: the directory that `deskside data prepare` wrote.")
    if plan["remedies"]:
        st.subheader("What would help (modelled)")
        rows = [
            {
                "what": remedy["what"],
                "saves": gib(remedy["saves_bytes"]) if remedy["saves_bytes"] else "",
                "costs": remedy["costs"],
            }
            for remedy in plan["remedies"]
        ]
        st.dataframe(rows, hide_index=True, width="stretch")


def _band_column(band: dict[str, Any]) -> dict[str, str]:
    """Return the table column of one band."""

    def ranged(value: dict[str, float], to_text: Callable[[float], str]) -> str:
        return f"{to_text(value['expected'])} ({to_text(value['low'])} to {to_text(value['high'])})"

    electricity = band["cost"].get("electricity") or {}
    loss = band.get("loss")  # of pretraining alone
    quality = f"{loss['expected']:.3f} ({loss['low']:.2f} to {loss['high']:.2f})" if loss else ""
    return {
        "model": f"{band['model']['preset']} ({count(band['model']['params'])} parameters)",
        "tokens": count(band["tokens"]),
        **({"bits per byte": quality} if loss else {}),
        "precision": band["precision"] + (", emulated" if band["speed"]["emulated"] else ""),
        "tokens/s": ranged(band["speed"]["tokens_per_second"], "{:,.0f}".format),
        "memory": ranged(band["memory"]["needed"], gib),
        "pretraining": duration(band["time"]["pretraining_seconds"]["expected"]),
        "electricity": dollars(electricity["usd"]) if electricity else "not known",
    }


def _draw_accuracy(context: Context) -> None:
    st.header("Predicted and measured")
    runs = context.scan.standalone_runs[-MAX_RUNS:]
    predictions = run_predictions((file_cache.brief(run.path), file_cache.plan(run.path)) for run in runs)
    if context.selection is not None and context.selection.folder is not None:
        predictions = trial_predictions(context.selection.results) + predictions
    if not predictions:
        st.caption("No run here has both a prediction and a measurement yet. `deskside go` records both.")
        return
    figure = plotly_charts.ratios(predictions[:MAX_DRAWN])
    chart(figure, "predicted", "measured over predicted of each run; 1 is an exact prediction")
    st.caption(
        f"1 is an exact prediction; intervals are the range of the prediction. "
        f"{plural(len(predictions), 'prediction')}"
        + (f", {MAX_DRAWN} drawn." if len(predictions) > MAX_DRAWN else ".")
    )
    table = [
        {
            "run": prediction.name,
            "quantity": prediction.quantity,
            "predicted": number(prediction.predicted),
            "range": ""
            if prediction.low is None or prediction.high is None
            else f"{number(prediction.low)} to {number(prediction.high)}",
            "measured": number(prediction.measured),
            "off": f"{prediction.ratio - 1:+.1%}",
            "predicted by": prediction.source,
        }
        for prediction in predictions
    ]
    st.dataframe(table, hide_index=True, width="stretch")
