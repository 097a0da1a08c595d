"""Every page, drawn without a browser, for directories in every state."""

import json
import shlex
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from streamlit.testing.v1 import AppTest
from streamlit.util import calc_hash

import deskside.dashboard
from deskside.dashboard.page import FIRST_PAGE, PAGES
from deskside.dashboard.sidebar import StudySelection, literal
from deskside.dashboard.views import summary
from deskside.study.stats.compare import compare
from tests.dashboard import made_up

APP = Path(deskside.dashboard.__file__).with_name("page.py")
Draw = Callable[..., AppTest]
NAMES = [spec.name for spec in PAGES]
SOME_NAMES = [
    pytest.param(name, marks=[pytest.mark.full] if number % 3 else []) for number, name in enumerate(NAMES)
]
STUDY_PAGES = [spec.name for spec in PAGES if spec.of_study]
FILTERED_PAGES = [spec.name for spec in PAGES if spec.of_study and spec.filters_arms]


@pytest.fixture
def draw(monkeypatch: pytest.MonkeyPatch) -> Draw:
    """Return a function that draws a page of a directory and checks that nothing was raised."""

    def drawn(root: Path, name: str, **query: str | list[str]) -> AppTest:
        monkeypatch.setattr(sys, "argv", [str(APP), str(root)])
        page = AppTest.from_file(str(APP), default_timeout=60)
        for key, value in query.items():
            page.query_params[key] = value
        return checked(moved(page, name).run())

    return drawn


def moved(page: AppTest, name: str) -> AppTest:
    """Use the page of another address in the next run. AppTest can only switch to pages that are files."""
    page._page_hash = calc_hash("" if name == FIRST_PAGE.name else name)
    return page


def checked(page: AppTest) -> AppTest:
    assert not page.exception, [f"{e.message} {e.stack_trace}" for e in page.exception]
    return page


def text(page: AppTest) -> str:
    """Return all text on the page."""
    kinds = (
        page.markdown,
        page.caption,
        page.info,
        page.header,
        page.subheader,
        page.code,
        page.error,
        page.success,
    )
    return "\n".join(str(element.value) for kind in kinds for element in kind)


@pytest.mark.parametrize("name", SOME_NAMES)
def test_an_empty_directory_says_what_to_run(tmp_path: Path, draw: Draw, name: str) -> None:
    said = text(draw(tmp_path, name))
    if name == "learning":  # the same for every directory
        assert "Grouped-query attention" in said
        return
    assert "deskside plan" in said or "deskside go" in said
    if name != "planner":
        assert "deskside study matrix16-quick" in said


@pytest.mark.parametrize("name", STUDY_PAGES)
def test_a_study_beside_broken_ones(tmp_path: Path, draw: Draw, name: str) -> None:
    made_up.study(tmp_path / "studies/made")
    made_up.broken(tmp_path)
    page = draw(tmp_path, name)
    assert page.selectbox(key="study").value == "studies/made"
    if name in ("summary", "tables"):
        frames = [frame.value for frame in page.dataframe]
        told = next(frame for frame in frames if list(frame.columns) == ["directory", "why"])
        assert {"studies/broken", "studies/odd", "studies/begun", "runs/garbage"} == set(told["directory"])


@pytest.mark.parametrize("name", SOME_NAMES)
def test_only_broken_ones(tmp_path: Path, draw: Draw, name: str) -> None:
    made_up.broken(tmp_path)
    draw(tmp_path, name)


@pytest.mark.parametrize("name", STUDY_PAGES)
def test_a_study_in_which_nothing_has_finished(tmp_path: Path, draw: Draw, name: str) -> None:
    from deskside.study.results import Trial
    from tests.study import made

    arms = [replace(arm, trials=[Trial(1, "pending")], estimates={}) for arm in made.results().arms]
    made_up.study(tmp_path / "s", arms=arms, complete=False, interactions=[], fronts=[], claims=[])
    draw(tmp_path, name)


def test_the_command_that_continues_a_study_can_be_pasted(tmp_path: Path) -> None:
    folder = tmp_path / "my studies/s"
    results = made_up.study(folder, complete=False)
    command = summary._state(StudySelection("s", folder, results, results)).partition("continue it: ")[2]
    assert shlex.split(command) == ["deskside", "study", str(folder), "--resume"]


def test_a_filter_changes_the_table(tmp_path: Path, draw: Draw) -> None:
    made_up.study(tmp_path / "s")
    page = draw(tmp_path, "tables")
    assert len(page.dataframe[0].value) == 8
    checked(page.multiselect(key="s: factor size").set_value(["small"]).run())
    assert set(page.dataframe[0].value["size"]) == {"small"} and len(page.dataframe[0].value) == 4
    checked(page.text_input(key="s: search").set_value("gqa on").run())
    assert len(page.dataframe[0].value) == 2
    checked(page.text_input(key="s: search").set_value("no such arm").run())
    assert "Clear one of them" in text(page)


@pytest.mark.parametrize("name", FILTERED_PAGES)
def test_several_groups_whose_factors_have_the_same_words(tmp_path: Path, draw: Draw, name: str) -> None:
    from deskside.study.results import Factor

    names = [f"f{number}" for number in range(8)]
    factors = [Factor(name, "status", ["off", "on"]) for name in names]  # a word for another filter
    levels = [dict.fromkeys(names, "on" if number else "off") for number in range(8)]
    made_up.two_groups(tmp_path / "s", factors, levels)
    page = draw(tmp_path, name)
    checked(page.multiselect(key="s: factor f0").set_value(["off"]).run())
    assert any("9 of 16 arms shown, in 2 groups" in caption.value for caption in page.caption)
    if name in ("metrics", "trade_offs"):
        checked(page.selectbox(key="s: group").set_value("second").run())
        assert any("1 of 8 arms shown" in caption.value for caption in page.caption)


def test_a_group_is_picked_and_stays_picked_in_other_tabs(tmp_path: Path, draw: Draw) -> None:
    made_up.two_groups(tmp_path / "s")
    page = draw(tmp_path, "trade_offs")
    assert page.selectbox(key="s: group").value == "main"
    assert page.selectbox(key="s: group").options == ["A matrix", "A second"]
    checked(page.selectbox(key="s: group").set_value("second").run())
    moved(page, "summary")  # draws no picker
    checked(page.run())
    moved(page, "metrics")
    checked(page.run())
    assert page.selectbox(key="s: group").value == "second"


def test_the_first_group_that_has_numbers_is_shown_first(tmp_path: Path, draw: Draw) -> None:
    made_up.two_groups(tmp_path / "s", finished=("second",))
    assert draw(tmp_path, "metrics").selectbox(key="s: group").value == "second"


@pytest.mark.parametrize("name", FILTERED_PAGES)
def test_a_filter_leaves_no_trace_of_a_group_without_arms(tmp_path: Path, draw: Draw, name: str) -> None:
    made_up.two_groups(tmp_path / "s", finished=("main",))
    page = draw(tmp_path, name)
    checked(page.multiselect(key="s: status").set_value(["finished"]).run())
    assert "A second" not in text(page)
    assert not any(box.label.startswith("group") for box in page.selectbox)


def test_tables_hold_one_group_until_all_are_asked_for(tmp_path: Path, draw: Draw) -> None:
    made_up.two_groups(tmp_path / "s")
    page = draw(tmp_path, "tables")
    assert len(page.dataframe[0].value) == 8 and "group" not in page.dataframe[0].value.columns
    checked(page.toggle(key="s: all groups").set_value(True).run())
    frame = page.dataframe[0].value
    assert frame.columns[0] == "arm" and len(frame) == 16
    assert set(frame["group"]) == {"A matrix", "A second"}
    moved(page, "summary")
    checked(page.run())
    moved(page, "tables")
    assert checked(page.run()).toggle(key="s: all groups").value is True


def test_the_summary_has_the_answers_of_every_group(tmp_path: Path, draw: Draw) -> None:
    from deskside.study.metrics import metric_named
    from deskside.study.narrative.findings import GOALS, insights
    from deskside.study.narrative.headline import headlines

    whole = made_up.two_groups(tmp_path / "s")
    page = draw(tmp_path, "summary")
    for goal, key in GOALS.items():
        checked(page.segmented_control(key="summary-goal").set_value(goal).run())
        assert [heading.value for heading in page.subheader] == ["A matrix", "A second"]
        rows = html(page)
        for group in whole.groups:
            for headline in headlines(whole, group, metric_named(key)):
                assert f"{headline.best.label}: {headline.value}" in rows
        for sentence in insights(whole, goal):
            of_group = next((g for g in whole.groups if sentence.startswith(f"{g.heading}: ")), None)
            shown = sentence.removeprefix(f"{of_group.heading}: ") if of_group else sentence
            assert literal(shown) in text(page)


def test_claims_are_filtered_by_verdict_and_words(tmp_path: Path, draw: Draw) -> None:
    claims = [
        replace(made_up.CLAIM, id="a", text="FP8 is <b>faster</b>", verdict="holds"),
        replace(made_up.CLAIM, id="b", text="GQA is slower", verdict="contradicted", source="another guide"),
        replace(made_up.CLAIM, id="c", text="a GPU is warm", verdict="not measured", measured=None),
    ]
    made_up.study(tmp_path / "s", claims=claims)
    page = draw(tmp_path, "claims")
    assert listed(page) == ["GQA is slower", "FP8 is <b>faster</b>"]  # most important first
    checked(page.pills(key="s: claims verdict").set_value(["not measured"]).run())
    assert listed(page) == ["a GPU is warm"]
    checked(page.pills(key="s: claims verdict").set_value([]).run())
    checked(page.text_input(key="s: claims search").set_value("guide gpu").run())
    assert listed(page) == ["a GPU is warm"]  # a search covers all of them
    checked(page.text_input(key="s: claims search").set_value("ANOTHER").run())
    assert listed(page) == ["GQA is slower"]
    checked(page.text_input(key="s: claims search").set_value("").run())
    checked(page.multiselect(key="s: claims source").set_value(["another guide"]).run())
    assert listed(page) == ["GQA is slower"]


def html(page: AppTest) -> str:
    """Return everything that was drawn by `st.html`."""
    return "\n".join(element.proto.body for element in page.get("html"))


def listed(page: AppTest) -> list[str]:
    """Return the titles in a list of verdicts."""
    (table,) = [c.proto for c in page.get("bidi_component") if c.proto.component_name == "deskside_claims"]
    return [row["texts"]["claim"] for row in json.loads(table.mixed.json or table.json)["rows"]]


def test_trade_offs_list_the_arms_that_have_both_metrics(tmp_path: Path, draw: Draw) -> None:
    first, second, *others = made_up.study(tmp_path / "whole").arms
    without = {key: value for key, value in second.estimates.items() if key != "val_bpb"}
    made_up.study(tmp_path / "s", name="s", arms=[first, replace(second, estimates=without), *others])
    page = draw(tmp_path, "trade_offs")
    page = checked(page.selectbox(key="study").set_value("s").run())
    assert set(page.dataframe[0].value["arm"]) == {arm.label for arm in (first, *others)}
    checked(page.segmented_control(key="trade-off-axes").set_value("memory and speed").run())
    assert len(page.dataframe[0].value) == 8


def test_it_is_said_what_the_baseline_is(tmp_path: Path, draw: Draw) -> None:
    from tests.study import made

    first, *rest = made.results().arms
    made_up.study(tmp_path / "s", arms=[replace(first, label="baseline"), *rest])
    assert "baseline: size small, grouped-query attention off, NVFP4 products off" in text(
        draw(tmp_path, "metrics")
    )


def test_a_study_of_one_group_asks_for_none(tmp_path: Path, draw: Draw) -> None:
    made_up.study(tmp_path / "s")
    page = draw(tmp_path, "tables")
    assert [box.label for box in page.selectbox] == ["study"] and not page.toggle
    assert {box.label for box in draw(tmp_path, "metrics").selectbox} == {"study", "metric"}


def test_fewer_seeds_change_the_numbers(tmp_path: Path, draw: Draw) -> None:
    whole = made_up.study(tmp_path / "s")
    page = draw(tmp_path, "tables")
    column = "validation loss, bits per byte"
    before = page.dataframe[0].value[column].tolist()
    checked(page.multiselect(key="s: seed").set_value(["1"]).run())
    after = page.dataframe[0].value[column].tolist()
    assert before != after
    assert after[0] == pytest.approx(whole.arms[0].trials[0].metrics["val_bpb"])


def test_a_trial_that_shows_no_life_is_not_said_to_run(tmp_path: Path, draw: Draw) -> None:
    from deskside.study.results import Trial
    from tests.study import made

    first, *rest = made.results().arms
    begun = [*first.trials[:2], Trial(3, "running", run="runs/begun")]
    made_up.study(tmp_path / "s", arms=[replace(first, trials=begun), *rest], complete=False)
    with made_up.running(tmp_path / "s/runs/begun"):
        said = text(draw(tmp_path, "summary"))
        assert "1 still running" in said and "interrupted" not in said
    made_up.old(tmp_path / "s/runs/begun")
    page = draw(tmp_path, "summary")
    assert "1 interrupted" in text(page) and "still running" not in text(page)


def test_what_was_written_meanwhile_is_seen(tmp_path: Path, draw: Draw) -> None:
    import shutil

    made_up.study(tmp_path / "s", question="Before?")
    page = draw(tmp_path, "summary")
    assert "Before?" in text(page)
    shutil.rmtree(tmp_path / "s")
    made_up.study(tmp_path / "s", question="And after it?")
    assert "And after it?" in text(checked(page.run()))


def test_a_running_run_shows_its_step_its_numbers_and_the_time_left(tmp_path: Path, draw: Draw) -> None:
    with made_up.running(tmp_path / "runs/now", steps=40):
        page = draw(tmp_path, "run", run="runs/now")
        shown = {metric.label: metric.value for metric in page.metric}
        assert shown["training loss"] == "3.1951" and shown["power, W"] == "310"
    assert page.main.children  # it was drawn
    made_up.run(tmp_path / "runs/cpu", steps=3, of=9, finished=False)


def test_what_a_live_run_did_not_measure_is_said(tmp_path: Path, draw: Draw) -> None:
    made_up.run(tmp_path / "r", steps=3, of=9, finished=False)
    rows = [{**made_up.row(step), "watts": None, "celsius": None} for step in (1, 2, 3)]
    (tmp_path / "r/metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    page = draw(tmp_path, "run", run="r")
    assert "power, W" not in {metric.label for metric in page.metric}
    assert "Not measured: best bits per byte, MFU, power, electricity." in text(page)


@pytest.mark.parametrize(("result", "shown"), [("val_bpb", True), (None, False)])
def test_the_mark_of_the_end_is_explained(
    result: str | None, shown: bool, tmp_path: Path, draw: Draw
) -> None:
    made_up.run(tmp_path / "r", val_share=0.06, **{"val_bpb": None, **({result: 0.9} if result else {})})
    said = text(draw(tmp_path, "run", run="r"))
    assert ("Square" in said) is shown and "of the whole validation text" not in said


def test_languages_of_a_live_run(tmp_path: Path, draw: Draw) -> None:
    """They cover every evaluation of the run, not only those in its last steps."""
    made_up.run(tmp_path / "r", steps=3, of=900, finished=False)
    plan = json.loads((tmp_path / "r/plan.json").read_text())
    (tmp_path / "r/plan.json").write_text(json.dumps({**plan, "languages": ["hi", "ta"]}))
    rows = [made_up.row(step) for step in range(1, 801)]
    for row in (rows[9], rows[19]):
        row |= {"val_bpb": 1.0, "val_bpb/hi": 10.0 / row["step"], "val_bpb/ta": 20.0 / row["step"]}
    (tmp_path / "r/metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (table,) = [
        frame.value for frame in draw(tmp_path, "run", run="r").dataframe if "language" in frame.value
    ]
    assert table.to_dict("list") == {"language": ["hi", "ta"], "bits per byte": [0.5, 1.0]}


def test_the_planner_answers_as_the_command_does(tmp_path: Path, draw: Draw) -> None:
    from deskside.plan.headline import headline
    from deskside.plan.planner import make_plan
    from deskside.utils.format import dollars
    from tests.plan.made import ask

    page = draw(tmp_path, "planner")
    page.selectbox(key="plan-card").set_value("RTX 5090")
    checked(page.number_input(key="plan-amount-hours").set_value(8.0).run())
    plan = make_plan(ask(gpu="RTX 5090", hours=8.0, probes=str(tmp_path / "probes")))
    assert plan.best is not None
    shown = next(str(code.value) for code in page.code if "deskside train" in str(code.value))
    words = ["".join(word.split()) for word in shlex.split(shown.replace("\\\n", ""))]
    assert words == shlex.split(plan.best.command)  # a list may continue in the next line
    assert any(literal(reason) in text(page) for reason in plan.reason_texts())
    assert literal(headline(plan)) in text(page)
    money = plan.best.cost.electricity
    assert money is not None and page.number_input(key="plan-price").value == money.price
    bands = page.dataframe[0].value
    assert dollars(money.amount[1]) in bands.loc["electricity"].tolist()
    checked(page.number_input(key="plan-price").set_value(2 * money.price).run())
    assert dollars(2 * money.amount[1]) in page.dataframe[0].value.loc["electricity"].tolist()


def test_what_the_planner_refuses_is_one_line(tmp_path: Path, draw: Draw) -> None:
    page = draw(tmp_path, "planner")
    checked(page.selectbox(key="plan-kind").set_value("bits per byte to reach").run())
    checked(page.number_input(key="plan-amount-bits per byte to reach").set_value(1e6).run())
    assert len(page.error) == 1


def test_the_planner_says_how_far_predictions_are_off(tmp_path: Path, draw: Draw) -> None:
    from tests.study import made

    whole = made.results()
    arms = [replace(arm, forecast_seconds=540.0) for arm in whole.arms]  # a trial takes 270 s
    made_up.study(tmp_path / "s", arms=compare(replace(whole, arms=arms)).arms)
    said = text(draw(tmp_path, "planner"))
    assert "50 % less than predicted" in said and "-50 %" in said


def test_the_first_page_waits_for_no_slow_import() -> None:
    slow = "{'matplotlib', 'pandas', 'scipy', 'torch'}"
    code = f"import sys, deskside.dashboard.views.runs; print(*sorted({slow} & set(sys.modules)))"
    command = [sys.executable, "-c", code]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout.split() == []


@pytest.mark.parametrize(("objective", "unit"), [("sft", True), ("dpo", False), ("grpo", False)])
def test_only_a_mean_over_tokens_has_the_unit_of_one(
    tmp_path: Path, draw: Draw, objective: str, unit: bool
) -> None:
    made_up.run(tmp_path / "runs/one", objective=objective)
    page = draw(tmp_path, "run", run="runs/one")
    assert ("nats per token" in "".join(str(chart.proto) for chart in page.get("plotly_chart"))) == unit
