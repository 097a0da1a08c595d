"""FP8 is offered by name where it is faster, emulation is named as such, and neither is ever chosen silently."""

from pathlib import Path
from typing import Any

import pytest

from deskside.config import merge
from deskside.config.gpu_batch import build_on_gpus
from deskside.plan.calibrate import measured_fp8_speedup
from deskside.plan.planner import make_plan
from deskside.plan.published import Speedup
from deskside.plan.render import show
from tests.plan import made
from tests.plan.made import ask


def planned(preset: str = "340m", **options: Any) -> Any:
    given = made.given(preset, **options.pop("overrides", {}))
    return make_plan(made.request("tokens", 1e9, given=given, **options))


def test_bf16_stays_the_default_and_fp8_is_offered_with_its_gain() -> None:
    plan = planned()
    assert plan.best.candidate.setting.precision == "bf16"
    (offer,) = plan.alternatives
    assert (offer["precision"], offer["option"], offer["source"]) == ("fp8", "--precision fp8", "modelled")
    told = f"--precision fp8 is an alternative: {offer['speed']:.2f} times the speed of BF16 (modelled"
    (reason,) = [reason for reason in plan.reason_texts() if "alternative" in reason]
    assert reason.startswith(told) and reason.endswith("docs/precision.md")
    assert "llmq" in reason  # the published pairs are given too
    # Choosing the offer gives the plan that was offered.
    fp8 = planned(precision="fp8").best.estimate
    assert fp8.tokens_per_second[1] == pytest.approx(offer["tokens_per_second"], rel=0.02)


def test_a_measured_gain_goes_before_the_model() -> None:
    plan = planned(
        measured_fp8=Speedup(1.61, "measured: one pair of points on this card with deskside probe")
    )
    (offer,) = plan.alternatives
    assert offer["speed"] == 1.61 and offer["modelled_speed"] != 1.61
    assert any("1.61 times the speed of BF16 (measured: one pair" in reason for reason in plan.reason_texts())
    assert planned(measured_fp8=Speedup(0.97, "measured: one pair")).alternatives == ()


@pytest.mark.parametrize(
    ("what", "options"),
    [
        ("a card without FP8", {"card": made.card(24, "rtx3090")}),
        ("sizes that do not divide", {"overrides": {"model": {"intermediate_size": 2818}}}),
        ("FP8 already", {"precision": "fp8"}),
        ("FP32", {"precision": "fp32"}),
    ],
)
def test_where_it_is_not_offered(what: str, options: dict[str, Any]) -> None:
    given = made.given("340m", **options.pop("overrides", {}))
    request = made.request("tokens", 1e9, given=given)
    plan = make_plan(type(request)(**{**vars(request), **options}))
    assert plan.alternatives == () and not any("offered" in reason for reason in plan.reason_texts()), what


@pytest.mark.parametrize("precision", ["fp8", "fp8-rowwise", "nvfp4", "nvfp4-eden", "fp8-nvfp4"])
def test_what_is_planned_can_be_carried_out(precision: str) -> None:
    plan = make_plan(made.request("hours", 10.0, precision=precision))
    for band in plan.bands:
        assert f"--precision.name {precision}" in band.command
        built = merge.build([band.config])
        assert built.precision.name == precision
        assert built.parallel.mode != "shard"


def test_quantised_runs_are_never_sharded() -> None:
    plan = make_plan(made.request("tokens", 1e9, gpus=4, precision="fp8"))
    assert plan.bands and not any(band.candidate.setting.sharded for band in plan.bands)
    tight = make_plan(
        made.request("tokens", 1e9, memory_gib=8, gpus=4, given=made.given("d30"), precision="fp8")
    )
    assert not any("shard" in remedy.what for remedy in tight.remedies)


def test_emulated_is_said_wherever_speed_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    plan = planned(precision="nvfp4")
    assert any(
        "nvfp4 is emulated" in reason and "of BF16's speed" in reason for reason in plan.reason_texts()
    )
    assert plan.to_json()["speed"]["emulated"] is True
    show(plan, details=True)
    out = " ".join(capsys.readouterr().out.split())
    assert "nvfp4, emulated" in out and "(modelled, emulated)" in out
    slower = plan.best.estimate.tokens_per_second[1] / planned().best.estimate.tokens_per_second[1]
    assert 0.5 < slower < 1

    native = planned(precision="fp8")
    assert native.to_json()["speed"]["emulated"] is False
    assert not any("emulated" in reason for reason in native.reason_texts())
    never = planned(precision="fp8", overrides={"precision": {"name": "fp8", "native": "never"}})
    assert never.best.estimate.setting.emulated


def test_native_nvfp4_would_be_priced_and_said_to_be_unseen(monkeypatch: pytest.MonkeyPatch) -> None:
    card = made.card(32, "rtx5090")
    calibration = made.calibration()
    rates = type(calibration.rates)(160e12, 1e12, 320e12, 640e12)
    request = made.request(
        "tokens", 1e9, given=made.given("710m"), precision="nvfp4",
        calibration=type(calibration)(**{**vars(calibration), "rates": rates}),
    )  # fmt: skip
    request = type(request)(**{**vars(request), "card": card})
    planned_ = make_plan(request)
    assert any(
        "nvfp4 is planned as emulated" in why and "has FP4 units" in why for why in planned_.reason_texts()
    )
    emulated = planned_.best
    monkeypatch.setattr("deskside.plan.card.TRAINED_NATIVELY", ("fp8", "nvfp4"))
    plan = make_plan(request)
    assert any("has not run them on such a card" in reason for reason in plan.reason_texts())
    assert any(
        "how close nvfp4 comes to it is in docs/precision.md" in reason for reason in plan.reason_texts()
    )
    assert plan.best is not None and emulated is not None
    assert emulated.estimate.setting.emulated and not plan.best.estimate.setting.emulated
    assert plan.best.estimate.tokens_per_second[1] > emulated.estimate.tokens_per_second[1]


def test_cached_weights_are_given_up_where_memory_is_short() -> None:
    """BF16 copies of d26's blocks are 1.6 GB. Without them, weights are cast at
    each use; the change is named and works.
    """
    roomy_, short = (
        made.request("tokens", 1e9, memory_gib=gib, given=made.given("d26")) for gib in (80.0, 8.5)
    )
    plenty, plan = make_plan(roomy_), make_plan(short)
    assert plenty.best is not None and plenty.best.candidate.setting.copies == "step"
    assert plenty.best.estimate.memory.items["copies"] > 0
    assert plan.best is not None and plan.best.candidate.setting.copies == "use"
    assert any("--precision.weight_cache false" in reason for reason in plan.reason_texts())
    assert any("weights converted at each use" in remedy.what for remedy in plan.remedies)
    assert "--precision.weight_cache false" in plan.best.command
    assert merge.build([plan.best.config]).precision.weight_cache is False


def point(precision: str, seconds: float, tokens: int = 65536) -> dict[str, Any]:
    return {
        "kind": "point",
        "status": "ok",
        "key": {"spec": {"tokens": tokens, "precision": "auto" if precision == "bf16" else precision}},
        "result": {"precision": precision, "micro_tokens": tokens, "step_seconds": {"median": seconds}},
    }


def test_pairs_of_probe_points() -> None:
    rows = [point("bf16", 0.12), point("fp8-delayed", 0.08), point("bf16", 0.2, 131072), point("fp32", 0.9)]
    found = measured_fp8_speedup(rows)
    assert found is not None
    assert found.speed == pytest.approx(1.5) and found.source.startswith("measured: one pair of points")
    assert measured_fp8_speedup([*rows, point("fp8-rowwise", 0.3), point("fp8-nvfp4", 0.3)]) == found
    assert measured_fp8_speedup(rows[2:]) is None
    failed = {**point("fp8-delayed", 0.1, 131072), "status": "oom"}
    assert measured_fp8_speedup([rows[2], failed]) is None


@pytest.mark.parametrize(
    ("align", "told"),
    [('name = "sft"', 0), ('name = "kto"', 1), ('name = "dpo"', 1), ('name = "dpo", loss = "simpo"', 0)],
)
def test_the_pass_of_a_reference_model_is_not_planned_and_said_to_be(
    align: str, told: int, tmp_path: Path
) -> None:
    preset = tmp_path / "mine.toml"
    preset.write_text(
        f'base = "124m"\nalign = {{{align}, data = ["x.jsonl"]}}\ndata = {{document_mask = true}}\n'
    )
    found = make_plan(ask(gpu="rtx4090", preset=str(preset), tokens="10M"))
    assert sum("reference model" in note for note in found.notes) == told


@pytest.mark.parametrize(
    ("gpu", "precision", "notes"),
    [
        ("h200", "bf16", 0),
        ("h200", "fp8", 1),  # another scaling
        ("rtx4090", "fp8", 2),  # it is emulated for experts, and native for attention
        ("h200", "nvfp4", 0),
    ],
)
def test_what_experts_are_computed_in_is_said(gpu: str, precision: str, notes: int, tmp_path: Path) -> None:
    asked = ask(gpu=gpu, preset="indicmoe-60m", tokens="1B", precision=precision, probes=str(tmp_path))
    plan = make_plan(asked)
    said = [reason for reason in plan.reason_texts() if "experts" in reason]
    assert len(said) == notes
    assert not said or "fp8-rowwise" in said[0]


@pytest.mark.parametrize("gpus", [2, 4, 8])
def test_the_batch_of_several_gpus_is_near_the_best(gpus: int) -> None:
    """By the models of speed and loss, half or twice the planner's batch is
    hardly better, nor is training's default.
    """

    def expected(tokens: int | None) -> tuple[int, float]:
        overrides = None if tokens is None else {"batch": {"tokens": tokens}}
        best = make_plan(ask(overrides, gpu="rtx4090", hours=1, preset="124m", gpus=gpus)).best
        assert best is not None
        return best.candidate.setting.stages[-1].tokens, best.loss[1]

    alone = make_plan(ask(gpu="rtx4090", hours=1, preset="124m")).best
    assert alone is not None
    batch, loss = expected(None)
    assert batch >= alone.candidate.setting.stages[-1].tokens and batch % gpus == 0 and loss < alone.loss[1]
    for other in (batch // 2, 2 * batch):
        assert loss < 1.002 * expected(other)[1]
    default = build_on_gpus([], gpus).batch.tokens
    assert expected(default)[1] < 1.003 * min(loss, expected(batch // 2)[1], expected(2 * batch)[1])
    assert expected(2**15)[1] > 1.005 * loss


def test_the_plan_says_what_a_large_batch_costs() -> None:
    eight = make_plan(ask(gpu="rtx4090", hours=1, preset="124m", gpus=8))
    assert sum(note.startswith("batch: ") for note in eight.notes) == 1
    assert eight.best is not None and eight.best.command.endswith(" --gpus 8")
    alone = make_plan(ask(gpu="rtx4090", hours=1, preset="124m"))
    assert not any(note.startswith("batch: ") for note in alone.notes)
    large = make_plan(ask({"batch": {"tokens": 2**20}}, gpu="rtx4090", hours=1, preset="124m"))
    assert any(note.startswith("batch: 1,048,576 tokens per step; ") for note in large.notes)
    assert large.best.loss[1] > alone.best.loss[1]
