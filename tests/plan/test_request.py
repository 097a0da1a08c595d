"""Requests for a plan: what can be asked, and what is refused in one line."""

import contextlib
import re
from pathlib import Path
from typing import Any, get_args

import pytest

from deskside.config.sections import PrecisionName
from deskside.plan.candidates import setting_on_card
from deskside.plan.estimate import estimate, mean_step_seconds
from deskside.plan.request import TIME_SHARES
from deskside.utils.errors import UsageError
from tests.plan.made import ask


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"gpu": "RTX 9999", "hours": 3}, "no such card"),
        ({"hours": 3}, "--gpu rtx4090"),
        ({"gpu": "rtx4090", "here": True, "hours": 3}, "one of them"),
        ({"gpu": "rtx4090"}, "--hours, --tokens, --flops or --loss"),
        ({"gpu": "rtx4090", "hours": -3}, "--hours: must be a number above zero"),
        ({"gpu": "rtx4090", "hours": float("nan")}, "--hours"),
        ({"gpu": "rtx4090", "loss": 0.0}, "--loss"),
        ({"gpu": "rtx4090", "hours": 3, "tokens": "3B"}, "--hours and --tokens"),
        ({"gpu": "rtx4090", "preset": "124m", "depth": 12}, "--preset and --depth"),
        ({"gpu": "rtx4090", "params": "0"}, "--params: must be above zero"),
        ({"gpu": "rtx4090", "params": "10"}, "--params: no depth has"),
        ({"gpu": "rtx4090", "params": "900T"}, "--params: no depth has"),
        ({"gpu": "rtx4090", "depth": 7}, "depth 7: must be even"),
        ({"gpu": "rtx4090", "depth": 4000}, "beyond what can be planned"),
        ({"gpu": "rtx4090", "preset": "nope"}, "no such preset"),
        ({"gpu": "rtx4090", "hours": 3, "gpus": 0}, "--gpus"),
        ({"gpu": "rtx4090", "hours": 3, "sequence": 0}, "--sequence"),
        ({"gpu": "rtx4090", "hours": 3, "price_kwh": -1.0}, "--price-kwh"),
        ({"gpu": "rtx4090", "hours": 3, "rent_per_hour": float("inf")}, "--rent-per-hour"),
        ({"gpu": "rtx4090", "hours": 3, "precision": "fp4"}, "--precision"),
        (
            {"gpu": "rtx4090", "preset": "124m", "overrides": {"model": {"num_key_value_heads": 5}}},
            "shared evenly",
        ),
        *(
            ({"gpu": "rtx4090", "gpus": 2, "overrides": {"optim": {"gradients": "host"}}, **model}, "one GPU")
            for model in ({"preset": "124m"}, {"hours": 3})
        ),
    ],
)
def test_one_line_for_what_cannot_be(options: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=message) as error:
        ask(probes=str(tmp_path / "probes"), **options)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("name", [name for name in get_args(PrecisionName) if name != "auto"])
def test_every_precision_can_be_planned_and_reaches_the_configuration(name: str, tmp_path: Path) -> None:
    for options in ({"precision": name}, {"overrides": {"precision": {"name": name}}}):
        found = ask(gpu="rtx4090", preset="124m", probes=str(tmp_path), **options)  # type: ignore[arg-type]
        assert found.precision == name
        assert found.given is not None and found.given.config.precision.name == name


def test_two_precisions_contradict(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"^--precision: fp8 contradicts --precision.name nvfp4"):
        ask(
            gpu="rtx4090",
            preset="124m",
            precision="fp8",
            overrides={"precision": {"name": "nvfp4"}},
            probes=str(tmp_path),
        )


def test_shares_of_a_budget_sum_to_one() -> None:
    assert min(TIME_SHARES.values()) >= 0 and sum(TIME_SHARES.values()) == pytest.approx(1)


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        ({"hours": 1e308}, "--hours: 1e+308 is too large"),
        ({"flops": 1e40}, "--flops: 1e+40 is too large"),
        ({"loss": 100.0}, "100 bits per byte"),
        ({"hours": 1.0, "price_kwh": 1e308}, "a price is a number of dollars"),
        ({"hours": 1.0, "overrides": {"schedule": {"hours": "3"}}}, "--schedule.hours"),
        ({"hours": 1.0, "overrides": {"parallel": {"context": 2}}}, "parallel.context: 2 GPUs share a row"),
        ({"hours": 1.0, "overrides": {"parallel": {"context": 0}}}, "parallel.context: "),
        (
            {"hours": 1.0, "overrides": {"compute": {"device": "cpu"}}},
            "--compute.device: cpu contradicts --gpu",
        ),
    ],
)
def test_what_is_beyond_any_plan_or_contradicts_it(wrong: dict[str, Any], named: str) -> None:
    with pytest.raises(UsageError, match=re.escape(named)):
        ask(gpu="rtx4090", **wrong)


def test_gpus_that_share_rows_hold_parts_of_them() -> None:
    """If two of four GPUs share a row, they read two rows at a time, hold less, and exchange keys and values."""
    rows = {"sequence_length": 32768, "tokens": 524288, "micro_tokens": 32768}
    estimates = []
    for context in (1, 2):
        overrides = {
            "batch": rows,
            "parallel": {"context": context},
            "model": {"max_position_embeddings": 32768},
        }
        asked = ask(overrides, gpu="rtx4090", gpus=4, hours=24.0, preset="124m")
        assert asked.given is not None and asked.readers == 4 // context
        estimates.append(estimate(setting_on_card(asked, asked.given.config), asked.calibration, 24 << 30))
    whole, shared = estimates
    assert shared.memory_bytes[1] < 0.8 * whole.memory_bytes[1]
    _, spec = shared.setting.step_spec(shared.setting.stages[0])
    assert (spec.micro_tokens, spec.accumulation) == (16384, 8)
    exchanged = [mean_step_seconds(e.setting, asked.calibration.rates)["communication"] for e in estimates]
    assert exchanged[1] > exchanged[0]


@pytest.mark.parametrize(("name", "refused"), [("sft", False), ("dpo", False), ("grpo", True)])
def test_what_samples_is_not_planned_as_if_it_did_not(name: str, refused: bool, tmp_path: Path) -> None:
    """GRPO keeps a copy of the weights and a cache on the card, and generates for most of its time."""
    preset = tmp_path / "mine.toml"
    preset.write_text(
        f'base = "124m"\nalign = {{name = "{name}", data = ["x.jsonl"]}}\ndata = {{document_mask = true}}\n'
    )
    with pytest.raises(UsageError, match=r"^align\.name: grpo") if refused else contextlib.nullcontext():
        ask(gpu="rtx4090", preset=str(preset), tokens="10M")
