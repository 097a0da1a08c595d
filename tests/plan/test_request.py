"""What a person may ask, and what is refused in one line."""

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import pytest

import deskside.measurements.store as probe_store
from deskside.budget.shape import num_params
from deskside.config import presets
from deskside.config.model import ModelConfig
from deskside.config.sections import PrecisionName
from deskside.measurements.store import Machine
from deskside.plan.candidates import setting_on_card
from deskside.plan.estimate import estimate, mean_step_seconds
from deskside.plan.request import DRIVER_SHARE, TIME_SHARES, count
from deskside.utils.errors import UsageError
from tests.plan.made import ask


@pytest.mark.parametrize(
    ("text", "value"),
    [("3B", 3e9), ("1.5b", 1.5e9), ("350M", 3.5e8), ("2e9", 2e9), ("1,000", 1000), ("7k", 7000), (5, 5.0)],
)
def test_counts_are_read(text: Any, value: float) -> None:
    assert count("--tokens", text) == value


@pytest.mark.parametrize("text", ["", "B", "three", "-3", "0", "nan", "inf", "1.5", "1e40", "3Q"])
def test_counts_that_are_none_are_refused(text: str) -> None:
    with pytest.raises(UsageError, match=r"^--tokens: .*") as error:
        count("--tokens", text)
    assert "\n" not in str(error.value)


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
        ({"gpu": "rtx4090", "hours": 3, "price_kwh": -1.0}, "--price_kwh"),
        ({"gpu": "rtx4090", "hours": 3, "rent_per_hour": float("inf")}, "--rent_per_hour"),
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


def test_a_card_of_the_table_offers_less_than_it_was_sold_with(tmp_path: Path) -> None:
    asked = ask(gpu="rtx4090", hours=24, probes=str(tmp_path))
    # torch sees 23.5 to 23.6 GiB of an RTX 4090.
    assert 23.4 < asked.card.memory_bytes / 2**30 < 23.7
    assert asked.card.memory_bytes == int(24 * 2**30 * (1 - DRIVER_SHARE))


@pytest.mark.parametrize("written", ["124M", "350M", "1.5B", "3B", "7B"])
def test_params_are_the_nearest_depth(written: str, tmp_path: Path) -> None:
    given = ask(gpu="rtx4090", params=written, probes=str(tmp_path)).given
    assert given is not None
    wanted, found = count("", written), num_params(given.config.model)
    depth = given.config.model.num_hidden_layers
    for other in (depth - 2, depth + 2):
        size = num_params(ModelConfig(**presets.depth(other)["model"]))
        assert max(found / wanted, wanted / found) <= max(size / wanted, wanted / size)


def test_a_longer_sequence_raises_the_positions_and_keeps_the_batch_whole(tmp_path: Path) -> None:
    given = ask(gpu="rtx4090", preset="124m", sequence=3000, probes=str(tmp_path)).given
    assert given is not None
    assert given.config.model.max_position_embeddings == 3000
    assert given.config.batch.sequence_length == 3000
    assert given.config.batch.tokens % 3000 == 0


def test_a_batch_by_hand_that_does_not_divide_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="not a multiple of the sequence length"):
        ask(
            gpu="rtx4090",
            preset="124m",
            sequence=3000,
            overrides={"batch": {"tokens": 65536}},
            probes=str(tmp_path),
        )


@pytest.mark.parametrize("model", [{"preset": "124m"}, {"hours": 5}])
def test_a_sequence_beside_stages_is_refused(model: dict[str, Any], tmp_path: Path) -> None:
    """The stages would win, silently."""
    stages = {"schedule": {"stages": [{"until": 1.0, "sequence_length": 1024}]}}
    with pytest.raises(UsageError, match=r"^--sequence: .*schedule.stages") as error:
        ask(gpu="rtx4090", sequence=4096, overrides=stages, probes=str(tmp_path), **model)
    assert "\n" not in str(error.value)
    kept = ask(gpu="rtx4090", overrides=stages, probes=str(tmp_path), **model)
    assert kept.sequence_length is None


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


def test_a_model_that_does_not_divide_is_refused_before_anything_is_planned(tmp_path: Path) -> None:
    model = {"model": {"intermediate_size": 2050}}
    with pytest.raises(
        UsageError, match=r"^model.intermediate_size: 2050 is not a multiple of 16.* use 2048$"
    ):
        ask(gpu="rtx4090", preset="124m", precision="fp8", overrides=model, probes=str(tmp_path))


@pytest.mark.parametrize(
    ("card", "formats"),
    [("rtx3090", set()), ("a100 80gb sxm", set()), ("rtx4090", {"fp8"}), ("h200", {"fp8", "fp8-grouped"}),
     ("rtx5090", {"fp8"}), ("b200", {"fp8"})],
)  # fmt: skip
def test_what_training_runs_on_tensor_cores(card: str, formats: set[str], tmp_path: Path) -> None:
    assert ask(gpu=card, hours=1, probes=str(tmp_path)).card.native == formats


# What was measured


def machine(driver: str = "580.1", card: str = "NVIDIA GeForce RTX 4090", gib: float = 23.6) -> Machine:
    return Machine(card, "cuda", int(gib * 2**30), 0, driver, 450, "2.11.0", "13.0", "3.6", "0.1.0+aaaa")


def point(of: Machine, tokens_per_second: float = 100_000.0) -> probe_store.Row:
    model = {"num_hidden_layers": 12}
    spec = {"model": model, "sequence_length": 2048, "tokens": 65536, "micro_tokens": 16384}
    result = {
        "tokens_per_second": tokens_per_second,
        "step_seconds": {"median": 65536 / tokens_per_second, "p10": 0.6, "p90": 0.7},
        "mfu": 0.5,
        "matmul_peak_tflops": 160.0,
        "micro_tokens": 16384,
        "accumulation": 4,
        "precision": "bf16",
        "compile": "block",
        "device": "cuda",
        "watts": 430.0,
        "setup_seconds": 33.0,
        "peak_allocated_bytes": 8 * 2**30,
        "peak_reserved_bytes": 9 * 2**30,
        "device_used_bytes": 10 * 2**30,
    }
    return probe_store.make_row("point", probe_store.make_key(of, spec), "ok", result)


def store(folder: Path, *rows: probe_store.Row) -> str:
    opened = probe_store.open_store(folder)
    for row in rows:
        opened.add(row)
    return str(folder)


def test_measured_here_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe_store, "this_machine", machine)
    asked = ask(here=True, hours=24, probes=store(tmp_path, point(machine())))
    assert asked.calibration.source == "measured"
    assert asked.card.gpu is not None and asked.card.gpu.name == "RTX 4090"
    assert asked.card.memory_bytes == machine().memory_bytes
    assert (asked.setup_seconds, asked.measured_watts) == (33.0, 430.0)


@pytest.mark.parametrize(("used_mib", "told"), [(0, False), (200, False), (1536, True)])
def test_here_only_what_is_free_is_planned_with(
    used_mib: int, told: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    free = machine().memory_bytes - used_mib * 2**20
    busy = replace(machine(), free_bytes=free)
    monkeypatch.setattr(probe_store, "this_machine", lambda: busy)
    folder = store(tmp_path, point(machine()))
    here = ask(here=True, hours=24, probes=folder)
    assert here.card.memory_bytes == free
    assert here.calibration.source == "measured"  # the same machine, however busy
    assert any("1.5 GiB of the card's 23.6 GiB are in use" in note for note in here.notes) == told
    assert ("free" in here.card.memory_source) == (used_mib > 0)
    # A card that is named is planned as it is sold.
    named = ask(gpu="rtx4090", hours=24, probes=folder)
    assert named.card.memory_bytes == int(24 * 2**30 * (1 - DRIVER_SHARE))
    assert not any("in use" in note for note in named.notes)


@pytest.mark.parametrize("which", [{"here": True}, {"gpu": "rtx4090"}])
def test_another_driver_is_refused_and_nothing_is_written(
    which: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(probe_store, "this_machine", machine)
    folder = store(tmp_path, point(machine(driver="570.9")))
    before = {path: path.read_bytes() for path in tmp_path.iterdir()}
    with pytest.raises(UsageError, match="driver 570") as error:
        ask(**which, hours=24, probes=folder)
    assert "\n" not in str(error.value) and "deskside probe" in str(error.value)
    assert {path: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_elsewhere_the_newest_machine_counts_and_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    laptop = Machine("some CPU", "cpu", 2**34, 8, None, None, "2.13.0", None, None, "0.1.0+aaaa")
    monkeypatch.setattr(probe_store, "this_machine", lambda: laptop)
    folder = store(tmp_path, point(machine(driver="570.9")), point(machine(driver="580.1")))
    asked = ask(gpu="rtx4090", hours=24, probes=folder)
    assert asked.calibration.source == "measured"
    assert any("580.1" in note for note in asked.notes)
    assert any("not used" in note for note in asked.notes)


def test_another_card_in_the_store_does_not_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = store(tmp_path, point(machine(card="NVIDIA GeForce RTX 4090 Laptop GPU", gib=15.6)))
    assert ask(gpu="rtx4090", hours=24, probes=folder).calibration.source == "published"


def test_a_cpu_that_was_not_measured_is_no_card(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    laptop = Machine("some CPU", "cpu", 2**34, 8, None, None, "2.13.0", None, None, "0.1.0+aaaa")
    monkeypatch.setattr(probe_store, "this_machine", lambda: laptop)
    with pytest.raises(UsageError, match="measure it first"):
        ask(here=True, hours=24, probes=str(tmp_path))


def test_a_damaged_store_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe_store, "this_machine", machine)
    folder = store(tmp_path, point(machine()))
    for path in tmp_path.iterdir():
        path.write_text(json.dumps({"what": "is this"}) + "\n")
    with pytest.raises(UsageError) as error:
        ask(here=True, hours=24, probes=folder)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("good", [0, 1])
def test_a_named_card_is_planned_beside_damaged_lines_and_they_are_told(
    good: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    laptop = Machine("some CPU", "cpu", 2**34, 8, None, None, "2.13.0", None, None, "0.1.0+aaaa")
    monkeypatch.setattr(probe_store, "this_machine", lambda: laptop)
    folder = store(tmp_path, *[point(machine())] * good)
    with (tmp_path / "geforce-rtx-4090.jsonl").open("a") as file:
        file.write("half a li\n{}\n")
    asked = ask(gpu="rtx4090", hours=24, probes=folder)
    assert asked.calibration.source == ("measured" if good else "published")
    (note,) = [note for note in asked.notes if "skipped" in note]
    assert note.startswith(
        f"{tmp_path / 'geforce-rtx-4090.jsonl'}: 2 lines are skipped (line {good + 1}: this is"
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
    """Four cards of which two share a row read two rows at a time, hold less, and exchange keys and values."""
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


@pytest.mark.parametrize("model", [{"preset": "124m", "tokens": "1B"}, {"hours": 3}])
def test_a_plan_keeps_to_the_memory_that_a_run_may_use(model: dict[str, Any]) -> None:
    card, small, ample = (
        ask(gpu="rtx4090", overrides={"compute": {"gpu_budget": gib}} if gib else None, **model).card
        for gib in (None, 6.0, 100.0)
    )
    assert small.memory_bytes == 6 * 2**30 and "gpu_budget" in small.memory_source
    assert ample == card
