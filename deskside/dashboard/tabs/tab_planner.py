"""Planner tab: `deskside plan` with controls, and its predictions against the measurements."""

from dataclasses import dataclass
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
from deskside.plan.request import PlanQuestion, ask
from deskside.utils.errors import RunError, UsageError
from deskside.utils.format import count, dollars, duration, gib, number, plural

HERE = "this machine"
SEARCH = "the best for the budget"
BUDGETS = {"hours": 24.0, "billion tokens": 3.0, "bits per byte to reach": 0.9}
MAX_RUNS = 200
MAX_DRAWN = 30


@dataclass(frozen=True)
class PlannerInput:
    """Values of the controls."""

    card: str
    kind: str
    amount: float
    model: str
    cards: int
    precision: str
    sequence: int
    price: float


def show(context: Context) -> None:
    """Draw the tab."""
    st.header("What can be trained")
    with st.form("planner"):
        asked = _controls()
        st.form_submit_button("Plan", type="primary")
    try:
        plan = _plan(asked, str(context.root / "probes"))
    except (UsageError, RunError) as error:
        st.error(str(error))
    else:
        _answer(plan)
    _accuracy(context)


def _controls() -> PlannerInput:
    first, second, third = st.columns(3)
    card = first.selectbox("card", [*(gpu.name for gpu in gpus()), HERE], index=_usual(), key="plan-card")
    kind = second.selectbox("budget in", list(BUDGETS), key="plan-kind")
    amount = third.number_input("budget", 0.01, 1e6, BUDGETS["hours"], key="plan-amount")
    model = first.selectbox("model", [SEARCH, *presets.names()], key="plan-model")
    cards = second.number_input("cards in one machine", 1, 64, 1, key="plan-cards")
    precision = third.selectbox("precision", ["automatic", *RECIPES], key="plan-precision")
    sequence = first.selectbox(
        "tokens per row", [0, 512, 1024, 2048, 4096, 8192], format_func=_sequence, key="plan-rows"
    )
    price = second.number_input("price of electricity, $ per kWh", 0.0, 10.0, 0.30, 0.01, key="plan-price")
    return PlannerInput(card, kind, amount, model, int(cards), precision, sequence, price)


def _sequence(tokens: int) -> str:
    return f"{tokens:,}" if tokens else "as in the preset"


def _usual() -> int:
    return next((i for i, gpu in enumerate(gpus()) if "4090" in gpu.name and "aptop" not in gpu.name), 0)


@st.cache_data(ttl=60, max_entries=32, show_spinner="planning")
def _plan(asked: PlannerInput, probes: str) -> dict[str, Any]:
    question = PlanQuestion(
        gpu=None if asked.card == HERE else asked.card,
        here=asked.card == HERE,
        hours=asked.amount if asked.kind == "hours" else None,
        tokens=asked.amount * 1e9 if asked.kind == "billion tokens" else None,
        loss=asked.amount if asked.kind == "bits per byte to reach" else None,
        preset=None if asked.model == SEARCH else asked.model,
        gpus=asked.cards,
        precision=None if asked.precision == "automatic" else asked.precision,
        sequence=asked.sequence or None,
        price_kwh=asked.price,
        probes=probes,
    )
    return make_plan(ask(question)).to_json()


def _answer(plan: dict[str, Any]) -> None:
    show = {"yes": st.success, "yes-if": st.warning, "no": st.error}[plan["verdict"]]
    show(f"**{plan['verdict']}** · {plan['request']['card']}")
    st.markdown("\n".join(f"- {reason}" for reason in plan["reasons"]).replace("$", "\\$"))
    if plan["bands"]:
        st.subheader("Bands (modelled)")
        st.dataframe(_bands(plan["bands"]), width="stretch")
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
    best = next((band for band in plan["bands"] if band["recommended"]), None)
    if best is not None:
        st.subheader("Command")
        st.code(best["command"], language="bash", wrap_lines=True)
        st.caption("DIR: what `deskside data prepare` wrote.")
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


def _bands(bands: list[dict[str, Any]]) -> dict[str, dict[str, str]]:
    return {band["name"] + (" (recommended)" if band["recommended"] else ""): _band(band) for band in bands}


def _band(band: dict[str, Any]) -> dict[str, str]:
    speed, memory, cost = (
        band["speed"]["tokens_per_second"],
        band["memory"]["needed"],
        band["cost"],
    )
    money = cost.get("electricity") or {}
    loss = band.get("loss")  # of pretraining alone
    return {
        "model": f"{band['model']['preset']} ({count(band['model']['params'])} parameters)",
        "tokens": count(band["tokens"]),
        **(
            {"bits per byte": f"{loss['expected']:.3f} ({loss['low']:.2f} to {loss['high']:.2f})"}
            if loss
            else {}
        ),
        "precision": band["precision"] + (", emulated" if band["speed"]["emulated"] else ""),
        "tokens/s": f"{speed['expected']:,.0f} ({speed['low']:,.0f} to {speed['high']:,.0f})",
        "memory": f"{gib(memory['expected'])} ({gib(memory['low'])} to {gib(memory['high'])})",
        "pretraining": duration(band["time"]["pretraining_seconds"]["expected"]),
        "electricity": dollars(money["usd"]) if money else "not known",
    }


def _accuracy(context: Context) -> None:
    st.header("Predicted and measured")
    runs = context.found.own_runs[-MAX_RUNS:]
    rows = run_predictions((file_cache.brief(run.path), file_cache.plan(run.path)) for run in runs)
    if context.selection is not None and context.selection.folder is not None:
        rows = trial_predictions(context.selection.results) + rows
    if not rows:
        st.caption("No run here has both a prediction and a measurement yet. `deskside go` records both.")
        return
    figure = plotly_charts.ratios(rows[:MAX_DRAWN])
    chart(figure, "predicted", "measured over predicted of each run; 1 is an exact prediction")
    st.caption(
        f"1 is an exact prediction; intervals are the range of the prediction. "
        f"{plural(len(rows), 'prediction')}" + (f", {MAX_DRAWN} drawn." if len(rows) > MAX_DRAWN else ".")
    )
    table = [
        {
            "run": row.name,
            "quantity": row.quantity,
            "predicted": number(row.predicted),
            "range": ""
            if row.low is None or row.high is None
            else f"{number(row.low)} to {number(row.high)}",
            "measured": number(row.measured),
            "off": f"{row.ratio - 1:+.1%}",
            "predicted by": row.source,
        }
        for row in rows
    ]
    st.dataframe(table, hide_index=True, width="stretch")
