"""A damaged go.json leads to one line or to a pipeline that can continue; never to a traceback or an endless run."""

import copy
import json
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import deskside
from deskside.cli.main import main
from deskside.config import merge
from deskside.pipeline import planning
from deskside.pipeline.pilot import Pilot, better_band
from deskside.pipeline.pipeline_state import PipelineState
from deskside.run.directory import RunDirectory
from deskside.utils.errors import RunError, UsageError
from tests.pipeline.test_planning import card, make_request

__all__ = ["card"]  # a fixture
OTHERS: list[Any] = [None, "x", [], {}, 0, -1, float("nan"), 1e308]
# Values that may be replaced without being wrong: texts, options that are not required, and explanations.
FREE = (
    "command",
    "probes",
    "data",
    "preset",
    "given",
    "target_loss",
    "gpu_budget",
    "reason",
    "source",
    "basis",
)


@pytest.fixture
def good(card: Any, data: Path, tmp_path: Path) -> dict[str, Any]:
    """The state of a pipeline that trains the planner's choice, with another band beside it."""
    del card
    plan, _ = planning.plan(make_request(data, tmp_path), 6900.0)
    bands = [band for band in plan["bands"] if band["name"] == plan["name"]]
    bands.append({**bands[0], "name": "other", "config": {}})
    return {
        "schema_version": 1,
        "hours": 2.0,
        "spent_seconds": 12.0,
        "phase": "train",
        "command": "a test",
        "options": {
            "preset": None, "data": str(data), "given": {"seed": "5"}, "gpu_budget": 4.0, "target_loss": 1.0,
            "probes": "probes",
        },
        "results": {
            "doctor": {"status": "fit", "reason": "5 of 5 checks work"},
            "probe": {"status": "stored", "stored": 3, "measured": 0},
            "plan": {**plan, "bands": bands, "pretrain_seconds": 6900.0},
        },
        "continued_in": None,
    }  # fmt: skip


def written(folder: Path, state: Any) -> Path:
    (folder / "checkpoints").mkdir(parents=True, exist_ok=True)
    (folder / "go.json").write_text(json.dumps(state), "utf-8")
    return folder


def places(value: Any, prefix: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    inside = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in inside:
        yield (*prefix, key)
        yield from places(item, (*prefix, key))


def replaced(state: dict[str, Any], place: tuple[Any, ...], value: Any) -> dict[str, Any]:
    changed: Any = copy.deepcopy(state)
    inner = changed
    for key in place[:-1]:
        inner = inner[key]
    inner[place[-1]] = value
    return dict(changed)


def used(state: PipelineState) -> None:
    """Use the state as a resumed pipeline does."""
    plan, options = state.result("plan"), state.data["options"]
    config = planning.final_config(plan["config"], state.hours * 3600)
    pilot = Pilot(state, config, plan, options["target_loss"])
    assert pilot.band_share_left() >= 0 and state.seconds_left() < 1e10 and isinstance(pilot.planned(), dict)
    better_band(plan, 2 * plan["tokens"][1], 1.0, 10**9, 0.9)
    planning.plan_lines(plan)
    assert state.continued_in is None or state.continued_in.name
    if options["data"] not in (None, "x"):
        try:
            merge.build(
                [planning.given_layer(make_request(Path(options["data"]), Path(), given=options["given"]))]
            )
        except UsageError as error:  # of an option set by hand, as on the command line
            assert "seed" in str(error) or "there is no such option" in str(error)


def test_a_good_one(good: dict[str, Any], tmp_path: Path) -> None:
    used(PipelineState.open(written(tmp_path / "run", good)))


def test_every_value_in_turn(good: dict[str, Any], tmp_path: Path) -> None:
    passed: set[tuple[Any, ...]] = set()
    count = 0
    for place in places(good):
        for value in OTHERS:
            count += 1
            run = written(tmp_path / "run", replaced(good, place, value))
            try:
                state = PipelineState.open(run)
            except RunError as error:
                assert str(error).startswith(
                    f"{run / 'go.json'}: is damaged or was written by another version ("
                )
                assert str(error).endswith("); restore it, or start again") and "\n" not in str(error)
                continue
            passed.add((place, repr(value)))
            used(state)
    assert count > 500
    # Every number that is not finite is found, and no value that decides anything may change its kind.
    assert not [place for place, value in passed if value == "nan"]
    unread = ("probe", "reasons", "verdict")  # only shown to people
    deciding = {
        (place, value)
        for place, value in passed
        if not {"config", "given", *unread} & set(place) and place[-1] not in FREE
    }
    plan = ("results", "plan")
    assert deciding == {
        (("continued_in",), "None"),
        (("continued_in",), "'x'"),
        (("spent_seconds",), "0"),
        ((*plan, "bands"), "[]"),
        ((*plan, "bands", 1, "name"), "'x'"),
        ((*plan, "memory_gib", 0), "0"),
        ((*plan, "bands", 0, "memory_gib", 0), "0"),
        ((*plan, "bands", 1, "memory_gib", 0), "0"),
    }


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda s: s.update(continued_in="run"), "continued_in: is this run itself"),
        (lambda s: s.update(continued_in="../run"), "continued_in: is not a folder"),
        (lambda s: s.update(continued_in=5), "continued_in: "),
        (lambda s: s.update(hours=True), "hours: must be a number, not true or false"),
        (lambda s: s.update(hours="2"), "hours: "),
        (lambda s: s.update(hours=10**400), "more than 64 bits"),
        (lambda s: s.update(hours=0), "hours: "),
        (lambda s: s.update(options={}), "options.preset: "),
        (lambda s: s.update(results={}), "phase: train, but there is no result of doctor"),
        (lambda s: s["results"].update(plan=5), "results.plan: "),
        (lambda s: s["results"]["plan"].update(config={"x": 1}), "config: x: there is no such option"),
        (lambda s: s["results"]["plan"].update(name="third"), "bands: must be empty, or list each band once"),
        (
            lambda s: s["results"]["plan"].update(tokens=[3.0, 2.0, 1.0]),
            "tokens: low, expected and high are not in order",
        ),
        (
            lambda s: s["results"]["plan"].update(pretrain_seconds=9e9),
            "pretrain_seconds: longer than",
        ),
        (lambda s: s["options"].update(given="x"), "options.given: "),
        (lambda s: s.update(phase="report"), "phase: report, but there is no run.json"),
        (lambda s: s.update(phase="done"), "phase: done, but there is no run.json"),
        (lambda s: s.update(phase="sleep"), "phase: "),
        (lambda s: s.pop("continued_in"), "continued_in: field required"),
        (lambda s: s.update(more=1), "more: "),
    ],
)
def test_what_is_told(
    change: Callable[[dict[str, Any]], Any],
    why: str,
    good: dict[str, Any],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    change(good)
    run = written(tmp_path / "run", good)
    before = (run / "go.json").read_text("utf-8")
    assert main(["go", "--resume", str(run), "--yes"]) == 1
    shown = capsys.readouterr()
    assert shown.out == "" and shown.err.count("\n") == 1
    assert f"{run / 'go.json'}: is damaged" in shown.err
    assert why.lower() in shown.err.lower()
    assert "--help" not in shown.err
    assert (run / "go.json").read_text("utf-8") == before


def test_runs_that_lead_in_a_circle(
    good: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    written(tmp_path / "a", {**good, "continued_in": "b"})
    written(tmp_path / "b", {**good, "continued_in": "a"})
    assert main(["go", "--resume", str(tmp_path / "a")]) == 1
    assert (
        "b/go.json: is damaged or was written by another version (continued_in: a leads back here)"
        in capsys.readouterr().err
    )


def test_a_run_that_is_none_of_this_road_is_not_written_into(
    good: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    RunDirectory.create(tmp_path, "other", "other").write_json("run.json", {})
    assert main(["go", "--resume", str(written(tmp_path / "run", {**good, "continued_in": "other"}))]) == 1
    assert "continued_in: other was not started by deskside go" in capsys.readouterr().err
    assert sorted(path.name for path in (tmp_path / "other").iterdir()) == ["checkpoints", "run.json"]


@pytest.mark.parametrize("phase", ["doctor", "plan", "train"])
def test_hours_that_are_over(
    phase: str, good: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    deskside.STARTED = time.perf_counter()
    run = written(tmp_path / "run", {**good, "phase": phase, "spent_seconds": 1e9})
    assert main(["go", "--resume", str(run), "--yes"]) == 1
    line = capsys.readouterr().err
    # The time of this process is added, so the last digits are unknown.
    assert (
        re.match(r"deskside: the time budget is used up: 1000000\d\d\d of 7200 s are spent", line)
        and run.exists()
    )


def test_a_band_that_the_pilot_chose_is_gone(good: dict[str, Any], tmp_path: Path) -> None:
    run = written(tmp_path / "run", replaced(good, ("results", "plan", "bands"), []))
    decided = {"decision": "another model is better at this speed", "better": {"name": "other", "bpb": 1.0}}
    (run / "pilot.json").write_text(json.dumps(decided), "utf-8")
    state = PipelineState.open(run)
    plan = state.result("plan")
    with pytest.raises(RunError, match=r"is damaged .*other is missing"):
        _ = Pilot(state, merge.build([plan["config"]]), plan, None).chosen_band
