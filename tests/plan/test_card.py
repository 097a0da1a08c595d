"""The card of a plan: its memory and formats, and which probe results count for it."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import deskside.measurements.store as probe_store
from deskside.measurements.store import Machine
from deskside.plan.card import DRIVER_SHARE
from deskside.utils.errors import UsageError
from tests.plan.made import ask


def test_a_card_of_the_table_offers_less_than_it_was_sold_with(tmp_path: Path) -> None:
    asked = ask(gpu="rtx4090", hours=24, probes=str(tmp_path))
    # torch reports 23.5 to 23.6 GiB for an RTX 4090.
    assert 23.4 < asked.card.memory_bytes / 2**30 < 23.7
    assert asked.card.memory_bytes == int(24 * 2**30 * (1 - DRIVER_SHARE))


@pytest.mark.parametrize(
    ("card", "formats"),
    [("rtx3090", set()), ("a100 80gb sxm", set()), ("rtx4090", {"fp8"}), ("h200", {"fp8", "fp8-grouped"}),
     ("rtx5090", {"fp8"}), ("b200", {"fp8"})],
)  # fmt: skip
def test_what_training_runs_on_tensor_cores(card: str, formats: set[str], tmp_path: Path) -> None:
    assert ask(gpu=card, hours=1, probes=str(tmp_path)).card.native == formats


def test_host_memory_of_another_machine() -> None:
    asked = {"gpu": "rtx5090", "preset": "indicmoe-3b", "hours": 24}
    assert ask(**asked).card.host_bytes is None
    assert ask(**asked, host_gib=24).card.host_bytes == 24 * 2**30
    for wrong in (0, -1, float("nan"), float("inf")):
        with pytest.raises(UsageError, match="--host-gib"):
            ask(**asked, host_gib=wrong)


@pytest.mark.parametrize(("given", "found"), [(None, 64), (16, 16), (100, 64)])
def test_host_memory_of_this_machine_is_at_most_what_is_free(
    given: float | None, found: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("deskside.plan.card.usable_bytes", lambda: 64 * 2**30)
    monkeypatch.setattr(probe_store, "this_machine", machine)
    asked = ask(here=True, hours=1, host_gib=given, probes=store(tmp_path, point(machine())))
    assert asked.card.host_bytes == found * 2**30


@pytest.mark.parametrize("model", [{"preset": "124m", "tokens": "1B"}, {"hours": 3}])
def test_a_plan_keeps_to_the_memory_that_a_run_may_use(model: dict[str, Any]) -> None:
    card, small, ample = (
        ask(gpu="rtx4090", overrides={"compute": {"gpu_budget": gib}} if gib else None, **model).card
        for gib in (None, 6.0, 100.0)
    )
    assert small.memory_bytes == 6 * 2**30 and "gpu_budget" in small.memory_source
    assert ample == card


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


@pytest.mark.parametrize("gpus", [0, 1, 2])
def test_more_gpus_than_here_are_refused(gpus: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    of = replace(machine(), gpus=gpus) if gpus else CPU
    monkeypatch.setattr(probe_store, "this_machine", lambda: of)
    folder = store(tmp_path, point(machine()))
    with pytest.raises(UsageError, match=f"--gpus: 3 are more than the {gpus} "):
        ask(here=True, hours=24, probes=folder, gpus=3)
    assert ask(gpu="rtx4090", hours=24, probes=folder, gpus=3).gpus == 3
    if gpus:
        assert ask(here=True, hours=24, probes=folder, gpus=gpus).gpus == gpus


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
    # A GPU that is given by name is planned as it is sold.
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


def test_a_card_without_a_data_sheet_has_no_known_rate_in_fp32(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On an H100 of the table, 124m in FP32 has a tenth of BF16's speed."""
    unlisted = machine(card="NVIDIA H100 NVL", gib=93.0)
    monkeypatch.setattr(probe_store, "this_machine", lambda: unlisted)
    rates = {"copy_bandwidth": 3e12, "matmul_peak": 6e14}
    benchmark = probe_store.make_row("card", probe_store.make_key(unlisted, {}), "ok", rates)
    options = {"here": True, "hours": 3, "probes": store(tmp_path, benchmark, point(unlisted))}
    assert ask(**options).card.gpu is None
    with pytest.raises(UsageError, match=r"^--precision: fp32 .*H100 NVL"):
        ask(precision="fp32", **options)


def test_a_cpu_that_was_not_measured_is_no_card(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    laptop = Machine("some CPU", "cpu", 2**34, 8, None, None, "2.13.0", None, None, "0.1.0+aaaa")
    monkeypatch.setattr(probe_store, "this_machine", lambda: laptop)
    with pytest.raises(UsageError, match="measure it first"):
        ask(here=True, hours=24, probes=str(tmp_path))


CPU = Machine("some CPU", "cpu", 2**34, 8, None, None, "2.13.0", None, None, "0.1.0+aaaa")


def test_a_run_on_the_cpu_is_planned_for_the_cpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The machine has a GPU too. The device is given as an option or by the preset."""
    monkeypatch.setattr(probe_store, "this_machine", machine)
    monkeypatch.setattr(probe_store, "this_cpu", lambda: CPU)
    cpu = {"compute": {"device": "cpu"}}
    preset = tmp_path / "small.toml"
    preset.write_text('base = "demo"\n[compute]\ndevice = "cpu"\n')
    with pytest.raises(UsageError, match="measure it first with: deskside probe --device cpu"):
        ask(cpu, here=True, hours=24, probes=str(tmp_path / "probes"))
    speeds = {"matmul_peak": 1e12, "copy_bandwidth": 1e10}
    benchmark = probe_store.make_row("card", probe_store.make_key(CPU, {}), "ok", speeds)
    probes = store(tmp_path / "probes", point(machine()), benchmark, point(CPU))
    for asked in (
        ask(cpu, here=True, hours=24, probes=probes),
        ask(here=True, hours=24, preset=str(preset), probes=probes),
    ):
        assert (asked.card.name, asked.card.is_cpu) == ("some CPU", True)
    on_gpu = ask({"compute": {"device": "cuda"}}, here=True, hours=24, preset=str(preset), probes=probes)
    assert on_gpu.card.name == "NVIDIA GeForce RTX 4090"
    with pytest.raises(UsageError, match="cpu contradicts --gpu"):
        ask(gpu="rtx4090", hours=24, preset=str(preset))
    monkeypatch.setattr(probe_store, "this_machine", lambda: CPU)
    with pytest.raises(UsageError, match="cuda is set, but this machine has no GPU"):
        ask({"compute": {"device": "cuda"}}, here=True, hours=24, probes=probes)


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
