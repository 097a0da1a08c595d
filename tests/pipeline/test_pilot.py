"""The pilot: what it measures, when it stops a run, when it prefers another model, and its part of the summary."""

import json
import math
import time
from pathlib import Path
from typing import Any

import pytest

import deskside
from deskside.budget.loss import LAW, expected_bpb, fit_curve
from deskside.budget.shape import matmul_params
from deskside.config.run import RunConfig
from deskside.data.reading.rows import PackedDataset
from deskside.pipeline.pilot import OTHER_BAND_IS_BETTER, TARGET_OUT_OF_REACH, Pilot, better_band
from deskside.pipeline.pipeline_state import PipelineState
from deskside.run.directory import RunDirectory
from deskside.train import training_run
from deskside.utils.signals import StopSignal
from tests.train import tiny_run
from tests.train.tiny_run import rows

pytestmark = pytest.mark.usefixtures("quiet_machine")
STEPS = 400


def begin_pipeline(folder: Path, hours: float = 1.0) -> PipelineState:
    deskside.STARTED = time.perf_counter()
    return PipelineState.begin(RunDirectory.create(folder, "run", "run"), hours, {}, "a test")


def train(
    folder: Path,
    data: Path,
    plan: dict[str, Any] | None = None,
    target: float | None = None,
    hours: float = 1.0,
    **changes: Any,
) -> tuple[Pilot, training_run.RunOutcome]:
    state = begin_pipeline(folder, hours)
    config = tiny_run.config(data, **{"schedule": {"length": f"{STEPS} steps"}, **changes})
    pilot = Pilot(state, config, plan or {}, target)
    outcome = training_run.start(config, state.run, "a test", watch=pilot)
    return pilot, outcome


def band(name: str, **changes: Any) -> dict[str, Any]:
    return {
        "name": name,
        "preset": name,
        "weights": 1e8,
        "tokens": [0.9e9, 1e9, 1.1e9],
        "tokens_per_second": [0.9e5, 1e5, 1.1e5],
        "bpb": [0.85, 0.92, 1.0],
        "fits": "fits",
        **changes,
    }


@pytest.fixture(scope="module")
def finished(data: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Pilot, Path, dict[str, Any]]:
    plan = {
        "tokens": [9e4, 1e5, 1.1e5],
        "tokens_per_second": [1e4, 2e4, 3e4],
        "bpb": [1.0, 2.0, 3.0],
        "source": "it",
    }
    folder = tmp_path_factory.mktemp("finished")
    pilot, outcome = train(folder, data, plan, evaluate={"every": None})
    assert outcome.status == "finished"
    return pilot, folder / "run", outcome.summary


@pytest.mark.full
def test_what_it_finds(finished: tuple[Pilot, Path, dict[str, Any]]) -> None:
    pilot, run, summary = finished
    found = json.loads((run / "pilot.json").read_text("utf-8"))
    assert found == pilot.result and found["decision"] == "go on"
    assert found["step"] == pytest.approx(0.05 * STEPS, abs=8) and found["share"] <= 0.1
    assert found["end_tokens"] == summary["tokens"] == STEPS * 256
    measured = [r["tokens_per_second"] for r in rows(run)[: found["step"]] if r["tokens_per_second"]]
    assert min(measured) < found["tokens_per_second"] < max(measured)
    per_token = math.log(2) * summary["val_bytes"] / (summary["val_tokens"] + 1)  # the split's closing token
    by_hand = fit_curve(
        [row["tokens"] for row in pilot.full_lr_rows()],
        [row["loss"] / per_token for row in pilot.full_lr_rows()],
        STEPS * 256,
        params=matmul_params(pilot.config.model),
        unique_tokens=pilot.unique_tokens,
    )
    assert found["bpb"]["expected"] == pytest.approx(by_hand.expected, rel=0.02)
    assert found["bpb"]["low"] < by_hand.expected < found["bpb"]["high"]
    events = tiny_run.events(run)
    assert "pilot, " in events and "tokens/s (planned 20,000, 10,000 to 30,000)" in events


@pytest.mark.full
def test_only_the_steps_at_full_rate_are_its_curve(finished: tuple[Pilot, Path, dict[str, Any]]) -> None:
    pilot, run, _ = finished
    kept = [row["step"] for row in pilot.full_lr_rows()]
    logged = {row["step"]: row["lr"] for row in rows(run)}
    assert kept[0] > 1 and min(logged[step] for step in kept) >= 0.98 * max(logged.values())


@pytest.mark.full
def test_predicted_against_measured(finished: tuple[Pilot, Path, dict[str, Any]]) -> None:
    _, run, summary = finished
    stored = json.loads((run / "summary.json").read_text("utf-8"))
    predicted = stored["predicted"]
    assert predicted["bpb"]["plan"] == [1.0, 2.0, 3.0] and predicted["bpb"]["measured"] == summary["val_bpb"]
    assert predicted["tokens_per_second"]["plan"] == [1e4, 2e4, 3e4]
    assert predicted["tokens_per_second"]["measured"] == summary["tokens_per_second"]
    assert predicted["memory_gib"] == {
        "plan": None,
        "pilot": pytest.approx(summary["peak_memory_gib"], rel=0.5),
        "measured": summary["peak_memory_gib"],
    }
    assert stored["plan_source"] == "it" and stored["budget_hours"] == 1.0


@pytest.mark.full
def test_a_target_out_of_reach_stops_the_run(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pilot, outcome = train(tmp_path, data, target=0.01)
    assert outcome.status == TARGET_OUT_OF_REACH and pilot.result is not None
    assert pilot.result["decision"] == TARGET_OUT_OF_REACH and pilot.result["bpb"]["low"] > 0.01
    last = rows(tmp_path / "run")[-1]["step"]
    assert pilot.result["step"] <= last <= pilot.result["step"] + 2
    told = capsys.readouterr().err
    assert "0.01 bits per byte is out of reach: its pilot leads to" in told
    # The run is saved, so a user who continues it anyway loses nothing.
    assert (
        training_run.resume(tmp_path / "run", Pilot(pilot.state, pilot.config, {}, None)).status == "finished"
    )


def test_a_target_within_the_range_does_not(data: Path, tmp_path: Path) -> None:
    pilot, outcome = train(tmp_path, data, target=6.0, schedule={"length": "120 steps"})
    assert outcome.status == "finished" and pilot.result is not None and pilot.result["decision"] == "go on"


@pytest.mark.full
def test_a_pilot_that_was_broken_off_ends_in_the_next_process(data: Path, tmp_path: Path) -> None:
    """The rows of the first process count, so the end and the numbers are the same."""

    class Stopping(Pilot):
        def on_step(self, row: dict[str, Any], total_steps: int) -> None:
            super().on_step(row, total_steps)
            if row["step"] == 12:
                self.stop.requested = "enough"

    state = begin_pipeline(tmp_path)
    config = tiny_run.config(data, schedule={"length": "200 steps"}, checkpoint={"every": "5 steps"})
    first = Stopping(state, config, {}, None)
    assert training_run.start(config, state.run, "t", watch=first).status == "enough"
    assert first.result is None and not (tmp_path / "run" / "pilot.json").exists()
    second = Pilot(state, config, {}, None)
    assert training_run.resume(tmp_path / "run", second).status == "finished"
    assert second.result is not None and second.rows[0]["step"] == 1
    straight, _ = train(tmp_path / "straight", data, schedule={"length": "200 steps"})
    assert straight.result is not None
    assert second.result["step"] == straight.result["step"]
    assert second.result["bpb"]["expected"] == pytest.approx(straight.result["bpb"]["expected"])


def test_a_run_too_short_for_a_curve_says_nothing_about_its_loss(data: Path, tmp_path: Path) -> None:
    pilot, outcome = train(tmp_path, data, target=0.01, schedule={"length": "12 steps"})
    assert outcome.status == "finished" and pilot.result is not None
    assert pilot.result["bpb"] is None and pilot.result["decision"] == "go on"
    assert pilot.loss_text() == "its pilot was too short to extrapolate the loss"


@pytest.mark.full
def test_half_the_throughput_from_the_middle_on(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run ends on time, with time for the later phases, and its decay is complete."""
    limit = 20.0
    virtual = tiny_run.VirtualTime(monkeypatch, lambda step: 0.03 * (2.0 if virtual.now > limit / 2 else 1.0))
    schedule = {"length": f"{limit}s", "warmup": 0.02, "decay": 0.5, "final_lr_fraction": 0.1}
    pilot, outcome = train(
        tmp_path,
        data,
        hours=limit / 3600,
        schedule=schedule,
        checkpoint={"every": "100 steps"},
        optim={"name": "adamw"},
    )
    assert outcome.status == "finished"
    end = limit - pilot.reserve(limit)
    assert 0.97 * end <= outcome.summary["seconds"] <= end
    lrs = [r["lr"] for r in rows(tmp_path / "run")]
    assert lrs[-1] / max(lrs) <= 0.1 + 3 * 0.9 / (0.5 * len(lrs))


# Another band


def plan_of(**speed: Any) -> dict[str, Any]:
    small, large = (
        band("small", weights=5e7, tokens=[1.8e9, 2e9, 2.2e9]),
        band("large", weights=3e8, tokens=[4e8, 5e8, 6e8]),
    )
    target = band("target", tokens=[0.9e9, 1e9, 1.1e9])
    return {**target, "bands": [small, target, large], **speed}


UNIQUE = 10**12


def test_at_the_planned_speed_nothing_changes() -> None:
    plan = plan_of()
    for share in (0.7, 1.0, 1.4):
        tokens = share * 1e9
        bpb = LAW.at(1e8, tokens)
        assert better_band(plan, tokens, bpb, UNIQUE, 0.95) is None


def test_at_a_tenth_of_the_speed_the_smaller_model_is_better() -> None:
    plan = plan_of()
    tokens = 0.05e9
    bpb = LAW.at(1e8, tokens) + 0.1  # another corpus
    found = better_band(plan, tokens, bpb, UNIQUE, 0.9)
    assert found is not None and found.band["name"] == "small"
    assert found.bpb == pytest.approx(expected_bpb(LAW, 5e7, 2e9 * 0.05 * 0.9, UNIQUE)[1] + 0.1)
    assert found.bpb < 0.985 * bpb


def test_at_ten_times_the_speed_the_larger_model_is_better() -> None:
    tokens = 10e9
    found = better_band(plan_of(), tokens, LAW.at(1e8, tokens), UNIQUE, 0.9)
    assert found is not None and found.band["name"] == "large"


def test_a_band_that_may_not_fit_is_never_the_better_one() -> None:
    plan, tokens = plan_of(), 10e9
    bands = [{**band, "fits": "tight" if band["name"] == "large" else "fits"} for band in plan["bands"]]
    bpb = LAW.at(1e8, tokens)
    found = better_band(plan, tokens, bpb, UNIQUE, 0.9)
    assert found is not None and found.band["name"] == "large"
    assert better_band({**plan, "bands": bands}, tokens, bpb, UNIQUE, 0.9) is None
    alone = [{**band, "fits": "no"} for band in plan["bands"]]
    assert better_band({**plan, "bands": alone}, tokens, bpb, UNIQUE, 0.9) is None


def test_what_a_new_start_would_have_left(data: Path, tmp_path: Path) -> None:
    """Neither the time reserved for the end nor a second set-up is training, and a plan's tokens include neither."""
    state = begin_pipeline(tmp_path, hours=1.0)
    pilot = Pilot(state, tiny_run.config(data), {"pretrain_seconds": 3500.0}, None)
    deskside.STARTED -= 100.0  # setting up
    validation = PackedDataset(data, split="val", sequence_length=32)
    pilot.begin(state.run, StopSignal(), validation)
    assert pilot.setup_seconds == pytest.approx(100.0, abs=0.5)
    deskside.STARTED -= 200.0  # the time of the first steps
    left = 3600 - 300 - (6 + 0.005 * 3600) - 100
    assert pilot.band_share_left() == pytest.approx(left / (3500 - 100), abs=1e-3)
    deskside.STARTED -= 4000.0
    assert pilot.band_share_left() == 0.0


def test_who_has_asked_for_a_stop_gets_it(data: Path, tmp_path: Path) -> None:
    """The decision made in the same step stays in the file."""

    class Stopped(Pilot):
        def end(self, total_steps: int) -> None:
            self.stop.requested = "SIGTERM"
            super().end(total_steps)

    state = begin_pipeline(tmp_path)
    config = tiny_run.config(data, schedule={"length": f"{STEPS} steps"})
    outcome = training_run.start(config, state.run, "t", watch=Stopped(state, config, {}, 0.01))
    assert outcome.status == "SIGTERM" and Pilot(state, config, {}, 0.01).decision == TARGET_OUT_OF_REACH


def test_what_a_person_chose_or_is_short_of_time_stays() -> None:
    tokens, bpb = 0.05e9, LAW.at(1e8, 0.05e9)
    plan = plan_of()
    assert better_band({}, tokens, bpb, UNIQUE, 0.9) is None
    assert better_band({**plan, "bands": []}, tokens, bpb, UNIQUE, 0.9) is None
    assert better_band(plan, tokens, bpb, UNIQUE, 0.5) is None
    assert better_band(plan, tokens, None, UNIQUE, 0.9) is None


def test_the_run_stops_for_a_better_band(data: Path, tmp_path: Path) -> None:
    """The plan expected a thousand times the tokens, and offers a band that is far better according to the law."""
    weights = 30_000.0
    tokens = STEPS * 256 * 1000.0
    target = band("target", weights=weights, tokens=[tokens, tokens, tokens])
    other = band("small", weights=1e9, tokens=[1e12, 1e12, 1e12])
    pilot, outcome = train(tmp_path, data, {**target, "bands": [target, other]})
    assert (
        outcome.status == OTHER_BAND_IS_BETTER
        and pilot.projection is not None
        and pilot.projection.band["name"] == "small"
    )
    assert pilot.result is not None and pilot.result["better"]["name"] == "small"
    assert math.isfinite(pilot.result["better"]["bpb"])
    assert "at this speed small would reach" in tiny_run.events(tmp_path / "run")


def test_mean_tokens_over_stages() -> None:
    stages = [
        {"until": 0.25, "sequence_length": 512, "batch_tokens": 65536},
        {"until": 1.0, "sequence_length": 2048},
    ]
    config = RunConfig.model_validate(
        {"schedule": {"name": "wsd", "stages": stages}, "batch": {"tokens": 131072}}
    )
    assert config.mean_step_tokens() == 0.25 * 65536 + 0.75 * 131072
