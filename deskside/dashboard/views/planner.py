"""Planner page: `deskside plan` with controls, what fits on the card, and predictions against measurements."""

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from math import log
from statistics import median
from typing import Any

import streamlit as st

from deskside.config import presets
from deskside.config.recipes import RECIPES
from deskside.dashboard import file_cache, planner_charts
from deskside.dashboard.components import chart
from deskside.dashboard.live import rerun_when_changed
from deskside.dashboard.planner_charts import FAIR, GOOD
from deskside.dashboard.runs import (
    Accuracy,
    Prediction,
    accuracies,
    run_predictions,
    trial_predictions,
)
from deskside.dashboard.scan import name_below
from deskside.dashboard.sidebar import Context, literal
from deskside.facts.gpus import gpus
from deskside.facts.power_and_prices import default_electricity_price
from deskside.plan.headline import headline
from deskside.plan.planner import make_plan
from deskside.plan.question import PlanQuestion
from deskside.plan.request import make_request
from deskside.plan.run_length import SETUP_SECONDS
from deskside.plan.what_fits import HOURS, FitRow, what_fits
from deskside.study.results import Results
from deskside.utils.console import command_lines
from deskside.utils.errors import RunError, UsageError
from deskside.utils.format import count, dollars, duration, gib, number, percent, plural

THIS_MACHINE = "this machine"
SEARCH_MODEL = "the best for the budget"
DEFAULT_BUDGETS = {"hours": 24.0, "billion tokens": 3.0, "bits per byte to reach": 0.9}
COMMAND_COLUMNS = 88
MAX_RUNS = 200  # runs whose predictions are read
MAX_DRAWN = 20


def show(context: Context) -> None:
    """Draw the page."""
    st.title("What can be trained")
    question = _draw_controls(str(context.root / "probes"))
    try:
        sentence, plan = _cached_plan(question)
    except (UsageError, RunError) as error:
        st.error(literal(str(error)))
    else:
        _draw_plan(sentence, plan)
    _draw_what_fits(question)
    _draw_accuracy(context)


def _draw_controls(probes: str) -> PlanQuestion:
    # Columns of one row: on a phone, the columns stand below one another, and each control stays beside its neighbors.
    first, second, third = st.columns(3)
    names = [gpu.name for gpu in gpus()]
    card = first.selectbox(
        "card",
        [*names, THIS_MACHINE],
        index=names.index("RTX 4090"),
        key="plan-card",
        persist_state="session",
    )
    kind = second.selectbox("budget in", list(DEFAULT_BUDGETS), key="plan-kind", persist_state="session")
    amount = third.number_input(
        "budget",
        0.01,
        1e6,
        DEFAULT_BUDGETS[kind],
        format="%g",
        key=f"plan-amount-{kind}",
        persist_state="session",
    )
    with st.expander("model, precision, number of cards, price"):
        first, second, third = st.columns(3)
        model = first.selectbox("model", [SEARCH_MODEL, *presets.names()], key="plan-model")
        precision = second.selectbox("precision", ["automatic", *RECIPES], key="plan-precision")
        rows = third.selectbox(
            "tokens per row",
            [0, 512, 1024, 2048, 4096, 8192],
            format_func=lambda row: f"{row:,}" if row else "as in the preset",
            key="plan-rows",
        )
        first, second, _ = st.columns(3)
        cards = first.number_input("cards in one machine", 1, 64, 1, key="plan-cards")
        published = default_electricity_price()
        price = second.number_input(
            "price of electricity, $ per kWh",
            0.0,
            10.0,
            published.usd,
            0.01,
            key="plan-price",
            help=f"The default is that of `deskside plan`: {published.label}",
        )
    return PlanQuestion(
        gpu=None if card == THIS_MACHINE else card,
        here=card == THIS_MACHINE,
        hours=amount if kind == "hours" else None,
        tokens=amount * 1e9 if kind == "billion tokens" else None,
        loss=amount if kind == "bits per byte to reach" else None,
        preset=None if model == SEARCH_MODEL else model,
        gpus=int(cards),
        precision=None if precision == "automatic" else precision,
        sequence=rows or None,
        price_kwh=None if price == published.usd else price,
        probes=probes,
    )


@st.cache_data(ttl=60, max_entries=32, show_spinner="planning")
def _cached_plan(question: PlanQuestion) -> tuple[str, dict[str, Any]]:
    """Return the plan in one sentence, and the plan as JSON."""
    plan = make_plan(make_request(question))
    return headline(plan), plan.to_json()


def _draw_plan(sentence: str, plan: dict[str, Any]) -> None:
    show_verdict = {"yes": st.success, "yes-if": st.warning, "no": st.error}[plan["verdict"]]
    show_verdict(f"**{literal(sentence)}.**")
    with st.expander("why"):
        st.markdown("\n".join(f"- {literal(reason)}" for reason in plan["reasons"]))
    if plan["bands"]:
        st.subheader("Bands (modelled)")
        columns = {
            f"{b['name']}{' (recommended)' if b['recommended'] else ''}": _band_column(b)
            for b in plan["bands"]
        }
        st.dataframe(columns, width="stretch")
    recommended = next((band for band in plan["bands"] if band["recommended"]), None)
    if recommended is not None:
        command = "\n".join(command_lines(recommended["command"], COMMAND_COLUMNS, indent=0))
        st.code(command, language=None, wrap_lines=True)
        st.caption("DIR: the directory that `deskside data prepare` wrote.")
    memory, speed = plan["memory"], plan["speed"]
    first, second = st.columns(2)
    if memory:
        with first:
            st.subheader("Memory (modelled)")
            parts = {name: size / 2**30 for name, size in memory["items"].items()}
            needed = memory["needed"]
            chart(
                planner_charts.breakdown(parts, "memory, GiB"),
                "plan-memory",
                f"memory of the plan by item; {gib(needed['expected'])} needed",
            )
            st.caption(
                f"Needed on the card, including fragmentation and context: {gib(needed['expected'])} "
                f"({gib(needed['low'])} to {gib(needed['high'])}); it has {gib(memory['capacity'])}. The items do "
                f"not all exist at the same time."
            )
    if speed:
        with second:
            st.subheader("A step (modelled" + (", emulated)" if speed["emulated"] else ")"))
            chart(
                planner_charts.breakdown(speed["items"], "time of a step, s"),
                "plan-step",
                "time of a step of the plan by item",
            )
            rate = speed["tokens_per_second"]
            st.caption(
                f"{rate['expected']:,.0f} tokens/s ({rate['low']:,.0f} to {rate['high']:,.0f}); {speed['basis']}."
            )
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


def _draw_what_fits(question: PlanQuestion) -> None:
    """Draw which models fit on the card and how far they get, by hours. The budget and the model are not used."""
    card = question.gpu or THIS_MACHINE
    st.header(f"What fits on {'this machine' if question.here else literal(card)}")
    any_budget = replace(question, hours=HOURS[0], tokens=None, loss=None, preset=None, price_kwh=None)
    try:
        rows, seconds = _cached_fits(any_budget)
    except (UsageError, RunError) as error:
        st.error(literal(str(error)))
        return
    figure = planner_charts.fit_map(rows, HOURS)
    chart(figure, "what-fits", f"which model sizes fit on {card}, and their bits per byte by hours")
    st.caption(
        "Numbers: expected bits per byte; modelled, less is better. A frame marks the lowest "
        "of a column. Compute-optimal: with the same arithmetic, no other size has a lower loss. Point at a cell for "
        f"its tokens, speed and memory. {sum(len(row.cells) for row in rows)} plans, computed in {seconds:.1f} s."
    )


@st.cache_data(ttl=3600, max_entries=32, show_spinner="planning every size")
def _cached_fits(question: PlanQuestion) -> tuple[list[FitRow], float]:
    """Return the table and the seconds that it took."""
    started = time.perf_counter()
    rows = what_fits(make_request(question))
    return rows, time.perf_counter() - started


def _draw_accuracy(context: Context) -> None:
    st.header("Predicted and measured")
    rerun_when_changed(lambda: _predictions(context)[0])
    predictions, studies, others = _predictions(context)
    if others > 0:
        st.caption(f"Of the runs, the last {MAX_RUNS} by name are read, without {plural(others, 'other')}.")
    found = accuracies(predictions)
    if not found:
        st.caption("No run here has both a prediction and a measurement yet. `deskside go` records both.")
        return
    st.markdown("\n".join(f"- {_accuracy_text(accuracy)}" for accuracy in found))
    if note := _trial_time_note(studies):
        st.caption(note)
    titles = {f"{accuracy.quantity}, {accuracy.source}": accuracy for accuracy in found}
    title = (
        st.selectbox("predictions of", list(titles), key="plan-accuracy")
        if len(titles) > 1
        else next(iter(titles))
    )
    chosen = sorted(titles[title].predictions, key=lambda prediction: -abs(log(prediction.ratio)))
    chart(planner_charts.errors(chosen[:MAX_DRAWN]), "predicted", f"measured against predicted: {title}")
    left_out = (
        f" The {MAX_DRAWN} of {len(chosen)} that are furthest off are drawn."
        if len(chosen) > MAX_DRAWN
        else ""
    )
    st.caption(
        f"Gray: within {percent(GOOD, 0)} of the prediction. Lines: the prediction's range, if it has one.{left_out}"
    )
    # The number of predictions is not in the label, because the expander would fold when it changes.
    with st.expander("all predictions as a table"):
        rows = [
            {
                "run": prediction.name,
                "quantity": prediction.quantity,
                "predicted": number(prediction.predicted),
                "range": ""
                if prediction.low is None or prediction.high is None
                else f"{number(prediction.low)} to {number(prediction.high)}",
                "measured": number(prediction.measured),
                "off": percent(prediction.ratio - 1, 1, signed=True),
                "predicted by": prediction.source,
            }
            for prediction in predictions
        ]
        st.dataframe(rows, hide_index=True, width="stretch")


def _predictions(context: Context) -> tuple[list[Prediction], list[Results], int]:
    """Return the predictions of runs and studies, the studies, and the number of runs that were not read."""
    scan = file_cache.scan_result(str(context.root))
    runs = scan.standalone_runs[-MAX_RUNS:]
    predictions = run_predictions((file_cache.brief(run.path), file_cache.plan(run.path)) for run in runs)
    studies = file_cache.readable_studies(scan)
    for path, results in studies.items():
        predictions += trial_predictions(name_below(path, context.root), results)
    return predictions, list(studies.values()), len(scan.standalone_runs) - len(runs)


def _accuracy_text(accuracy: Accuracy) -> str:
    """Return one line of Markdown: how far the predictions of a quantity are off."""
    error = abs(accuracy.error)
    color, word = (
        ("blue", "good") if error <= GOOD else ("orange", "fair") if error <= FAIR else ("red", "poor")
    )
    amount = (
        "exact"
        if round(error, 3) == 0
        else f"{percent(error, 0)} {'less' if accuracy.error < 0 else 'more'} than predicted"
    )
    text = f":{color}-badge[{word}] **{literal(accuracy.quantity)}** by {literal(accuracy.source)}: "
    if len(accuracy.predictions) == 1:
        text += f"{number(accuracy.predicted)} predicted, {number(accuracy.measured)} measured: {amount}"
    else:
        worst = accuracy.worst
        text += (
            f"{amount} in the median of {len(accuracy.predictions)} "
            f"({number(accuracy.predicted)} predicted, {number(accuracy.measured)} measured); "
            f"the worst is {literal(worst.name)}, {percent(worst.ratio - 1, 0, signed=True)}"
        )
    if accuracy.within_range is not None and len(accuracy.predictions) == 1:
        text += f", {'within' if accuracy.within_range else 'outside'} the predicted range"
    elif accuracy.within_range is not None:
        text += f"; {accuracy.within_range} within the predicted range"
    return text + "."


def _trial_time_note(studies: Sequence[Results]) -> str:
    """Return of which parts the time of the trials consists, because set-up may be most of it; "" if unknown."""
    pairs = [
        (training.mean, whole.mean)
        for results in studies
        for arm in results.arms
        if (training := arm.estimate("seconds")) is not None
        and (whole := arm.estimate("total_seconds")) is not None
    ]
    if not pairs:
        return ""
    training_seconds, total = (median(values) for values in zip(*pairs, strict=True))
    return (
        f"Of the {duration(total)} of a trial, {duration(training_seconds)} were training; the others are set-up, "
        f"evaluation and saving. For a card whose set-up `deskside probe` has not timed, the forecast takes "
        f"{duration(SETUP_SECONDS)} of set-up, so short trials take less than it says."
    )
