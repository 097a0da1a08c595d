"""The plan as a phase of the pipeline."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import deskside.measurements.store as probe_store
from deskside.budget.loss import TextBaselines, bounded
from deskside.config import merge, presets
from deskside.pipeline import planning
from deskside.pipeline.planning import PipelineRequest
from deskside.plan.planner import make_plan
from deskside.utils.errors import RunError, UsageError
from deskside.utils.machine import Machine
from tests.pipeline.machines import CARD, CPU
from tests.plan import made


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> Machine:
    """Make the planner find an RTX 4090 in this machine and a billion tokens in the data."""
    monkeypatch.setattr(probe_store, "this_machine", lambda: CARD)
    # A few thousand tokens would be too few to learn from.
    monkeypatch.setattr(planning, "unique_tokens", lambda data: 10**9)
    return CARD


def make_request(data: Path | None, tmp_path: Path, **changes: Any) -> PipelineRequest:
    values: dict[str, Any] = {
        "hours": 2.0,
        "preset": None,
        "data": None if data is None else str(data),
        "given": {},
        "memory_gib": None,
        "probes": str(tmp_path / "probes"),
    }
    return PipelineRequest(**{**values, **changes})


def test_the_plan_chooses_a_model(card: Machine, data: Path, tmp_path: Path) -> None:
    result, whole = planning.plan(make_request(data, tmp_path, given={"seed": "5"}), 6900.0)
    assert whole is not None and result["status"] == "made" and whole.best is not None
    assert [band["name"] for band in result["bands"]] == [band.name for band in whole.bands]
    assert result["name"] == whole.recommended and result["weights"] == whole.best.candidate.weights
    low, expected, high = result["memory_gib"]
    assert low < expected < high < 23.5
    config = planning.final_config(result["config"], 7200.0)
    assert config.seed == 5 and config.data.path == str(data) and config.schedule.clock == "wall"
    assert config.schedule.length is not None and config.schedule.length.value == 7200
    assert config.model.vocab_size == 320  # the tokenizer's 300, rounded up
    # The numbers are those of the run that would be trained.
    assert config.model == whole.best.candidate.setting.model
    lines = planning.plan_lines(result)
    assert lines[0].startswith("plan, modelled from published rates")
    assert sum(line.startswith("->") for line in lines) == 1


def test_a_preset_that_fits_is_trained_as_it_is(card: Machine, data: Path, tmp_path: Path) -> None:
    result, _ = planning.plan(
        make_request(data, tmp_path, preset="124m", given={"optim": {"lr": "0.03"}}), 6900.0
    )
    assert result["bands"] == [] and result["preset"] == "124m"
    own = merge.build(
        [*presets.layers("124m"), {"data": {"path": str(data), "sources": []}, "optim": {"lr": "0.03"}}]
    )
    built = merge.build([result["config"]])
    assert built == own and built.model.vocab_size == 32768


def test_a_preset_that_fits_keeps_its_best_checkpoint_in_many_epochs(
    card: Machine, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(planning, "unique_tokens", lambda _: 30_000_000)
    request = make_request(data, tmp_path, preset="124m")
    result, whole = planning.plan(request, 6900.0)
    config = result["config"]
    assert whole is not None and whole.verdict == "yes" and config["checkpoint"] == {"keep_best": True}
    changed = ("checkpoint", "evaluate")
    assert {key: value for key, value in config.items() if key not in changed} == {
        key: value for key, value in planning.preset_config(request).items() if key not in changed
    }


@pytest.mark.parametrize("length", ["100M tokens", "200 steps"])
def test_a_length_is_planned_within_the_hours(length: str, card: Machine, data: Path, tmp_path: Path) -> None:
    request = make_request(data, tmp_path, preset="124m", length=length)
    result, _ = planning.plan(request, 6900.0)
    config = planning.final_config(result["config"], 7200.0, length)
    assert config.schedule.length is not None
    tokens = 1e8 if "tokens" in length else 200 * config.mean_step_tokens()
    assert (config.schedule.length.value, config.schedule.length.unit) == tuple(
        [1e8, "tokens"] if "tokens" in length else [200, "steps"]
    )
    assert result["tokens"] == [tokens] * 3
    full, _ = planning.plan(make_request(data, tmp_path, preset="124m"), 6900.0)
    assert result["bpb"][1] > full["bpb"][1]
    with pytest.raises(RunError, match=f"{length} takes about .* but only 60 s"):
        planning.plan(request, 60.0)


@pytest.mark.parametrize(
    ("changes", "native", "precision"),
    [
        ({"preset": "124m"}, ["fp8-delayed"], "fp8"),
        ({"preset": "124m", "length": "100M tokens"}, ["fp8-delayed"], "fp8"),
        ({"preset": "124m"}, [], "auto"),  # the doctor found it wrong, or did not look
        ({"preset": "124m"}, ["fp8-rowwise"], "auto"),
        ({"preset": "124m", "given": {"precision": {"name": "bf16"}}}, ["fp8-delayed"], "bf16"),
        ({"preset": "124m", "own_corpus": True}, ["fp8-delayed"], "auto"),
        ({"preset": "124m", "given": {"precision": {"name": "auto"}}}, ["fp8-delayed"], "auto"),
        ({"preset": "124m", "hours": 20.0}, ["fp8-delayed"], "auto"),  # more than three epochs
        ({"preset": "indicmoe-60m"}, ["fp8-delayed"], "auto"),  # a quick doctor does not check experts
        # The plan's model for this vocabulary is too narrow to gain from FP8.
        ({}, ["fp8-delayed"], "auto"),
    ],
)
def test_fp8_is_used_where_the_doctor_found_it_right(
    changes: dict[str, Any], native: list[str], precision: str, card: Machine, data: Path, tmp_path: Path
) -> None:
    request = make_request(data, tmp_path, **changes)
    seconds = 3450 * request.hours
    result, plan = planning.plan(request, seconds, native)
    assert merge.build([result["config"]]).precision.name == precision
    assert plan is not None and (plan.best is not None) == (result["status"] == "made")
    told = [reason for reason in result["reasons"] if reason.startswith("trains in FP8: ")]
    assert len(told) == (precision == "fp8")
    if precision == "fp8":
        in_bf16, _ = planning.plan(request, seconds)
        assert result["tokens_per_second"][1] > 1.02 * in_bf16["tokens_per_second"][1]


@pytest.mark.parametrize("memory_gib", [7.0, 8.0, 20.0])
def test_fp8_never_changes_what_else_determines_the_loss(
    memory_gib: float, card: Machine, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In 7 GiB, the plan in FP8 goes back to BF16, and in 8 it needs weights in BF16."""
    monkeypatch.setattr(planning, "unique_tokens", lambda data: 10**12)
    request = make_request(data, tmp_path, preset="1.3b", memory_gib=memory_gib, hours=200.0)
    plans = [planning.plan(request, 7e5, native)[0] for native in ([], ["fp8-delayed"])]
    without, found = (merge.build([plan["config"]]) for plan in plans)
    assert (found.precision.name == "fp8") == (memory_gib == 20.0)
    for key in ("weights", "states", "name"):
        assert getattr(found.optim, key) == getattr(without.optim, key)


def test_a_plan_in_fp8_that_cannot_be_made_leaves_that_in_bf16(
    card: Machine, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = planning.make_plan

    def plan(request: Any) -> Any:
        if request.precision == "fp8":
            raise UsageError("a width that is not a multiple of 16")
        return made(request)

    monkeypatch.setattr(planning, "make_plan", plan)
    result, whole = planning.plan(make_request(data, tmp_path, preset="124m"), 6900.0, ["fp8-delayed"])
    assert whole is not None and merge.build([result["config"]]).precision.name == "auto"


def test_less_memory_than_the_card_has(card: Machine, data: Path, tmp_path: Path) -> None:
    whole, _ = planning.plan(make_request(data, tmp_path), 6900.0)
    part, _ = planning.plan(make_request(data, tmp_path, memory_gib=2.0), 6900.0)
    assert part["memory_gib"][1] < 2.0 < whole["memory_gib"][1]


def test_a_plan_that_says_no(card: Machine, data: Path, tmp_path: Path) -> None:
    with pytest.raises(RunError, match="as requested, it needs"):
        planning.plan(make_request(data, tmp_path, preset="1.3b", memory_gib=2.0), 6900.0)


def test_a_plan_that_says_no_gives_only_the_reasons_for_that(
    card: Machine, data: Path, tmp_path: Path
) -> None:
    """The time is too short. Whether the model fits, and how fast it would be, does not matter."""
    for memory_gib in (None, 4.0):  # with less memory, it fits with other options
        with pytest.raises(RunError, match="the time is too short") as error:
            planning.plan(make_request(data, tmp_path, preset="340m", memory_gib=memory_gib), 20.0)
        assert "fit" not in str(error.value) and "as requested" not in str(error.value)


def test_nothing_measured_on_a_cpu(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A preset is trained without a plan, with the reason. Without a preset, there is nothing to choose from."""
    monkeypatch.setattr(probe_store, "this_machine", lambda: CPU)
    result, whole = planning.plan(make_request(data, tmp_path, preset="124m"), 6900.0)
    assert whole is None and result["status"] == "skipped" and "this is the CPU" in result["reason"]
    assert merge.build([result["config"]]).data.path == str(data)
    skipped, trains = planning.plan_lines(result)
    assert skipped.startswith("plan: skipped: Some CPU: this is the CPU")
    assert trains.startswith("trains the preset without a plan: 125M parameters, sequence length 2048;")
    for changes in ({}, {"preset": "124m", "own_corpus": True}):  # the mode needs a plan
        with pytest.raises(UsageError, match="this is the CPU"):
            planning.plan(make_request(data, tmp_path, **changes), 6900.0)


def test_a_vocabulary_that_is_too_small_for_the_data(data: Path, tmp_path: Path) -> None:
    small = tmp_path / "small.toml"
    small.write_text('base = "demo"\n[model]\nvocab_size = 100\n', "utf-8")
    assert planning.given_layer(make_request(data, tmp_path, preset=str(small)))["model"] == {
        "vocab_size": 320
    }
    assert "model" not in planning.given_layer(make_request(data, tmp_path, preset="demo"))
    by_hand = planning.given_layer(make_request(data, tmp_path, given={"model": {"vocab_size": "512"}}))
    assert by_hand["model"] == {"vocab_size": "512"}


def test_too_little_data_is_said_before_anything_is_trained(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(probe_store, "this_machine", lambda: CARD)
    assert planning.unique_tokens(str(data)) < 100_000
    with pytest.raises(RunError, match="the text is too small"):
        planning.plan(make_request(data, tmp_path), 6900.0)


@pytest.mark.parametrize(
    "loss", [(1.0, 1.1, 1.2), (1.8, 4.1, 6.4), (1.8, 2.0, 3.5), (3.5, 4.0, 5.0), (1.2, 7.9, 15.0)]
)
def test_no_model_is_expected_above_the_unigram_baseline(loss: tuple[float, float, float]) -> None:
    """The plan's forecast, as stored in go.json, is ordered and always has a width."""
    request = replace(made.request(value=1.0), text=TextBaselines(unigram=3.0, gzip=2.9))
    plan = make_plan(request)
    assert plan.best is not None
    candidate = replace(plan.best.candidate, loss=loss, forecast=bounded(loss, request.text))
    low, expected, high = planning._band_result(replace(plan.best, candidate=candidate), plan)["bpb"]
    assert low < expected < high <= 3.0
    assert expected <= 0.75 * 3.0
    if loss[2] < 2.0:
        assert (low, expected, high) == loss
