"""The warning of too large updates at the start: in measured runs, and in runs of a tiny model."""

import math
from pathlib import Path

import pytest

from deskside.config.run import RunConfig
from deskside.train.loop.unstable_start import UnstableStartWatch
from tests.train import tiny_run
from tests.train.loop import watches
from tests.train.loop.watches import measured_runs
from tests.train.tiny_run import events


def warnings(
    losses: list[float | None], folder: Path, first_step: int = 1, vocab_size: int = 32768
) -> list[str]:
    """Return the warnings of a watch that sees steps with these losses."""
    rows = [{"step": step, "loss": loss} for step, loss in enumerate(losses, first_step)]
    config = RunConfig.model_validate({"model": {"vocab_size": vocab_size}, "data": {"path": "data"}})
    return watches.warnings(UnstableStartWatch(config), rows, folder)


@pytest.mark.parametrize(
    ("archive", "vocab_size", "rising"),
    [
        (
            "2026-11-28-memory/memory-head.tar.zst",
            32768,
            {f"formats-formats_{x}" for x in ("4bit-s1", "4bit-s2", "4bit-s3", "8bit-s1", "8bit-s2")}
            | {f"formats-formats_weights-s{seed}" for seed in (1, 2, 3)},
        ),
        ("2026-11-28-memory/memory-muon.tar.zst", 32768, set()),
        ("2026-11-29-languages/languages.tar.zst", 50304, set()),
        ("2026-11-30-prices/steps-prices-scores.tar.zst", 50304, {"limit-15", "limit-22.5", "limit-28"}),
    ],
)
def test_measured_runs(archive: str, vocab_size: int, rising: set[str], tmp_path: Path) -> None:
    found = set()
    for name, rows in measured_runs(archive, "grad_norm"):
        if warnings([row["loss"] for row in rows], tmp_path / name, vocab_size=vocab_size):
            found.add(name)
    assert found == rising


def test_it_is_said_once_and_only_of_new_models(tmp_path: Path) -> None:
    new = math.log(32768)
    assert len(warnings([new, None, 12.0, math.nan, 13.0], tmp_path / "once")) == 1
    assert not warnings([new, 1.05 * new, math.nan, math.inf, None, 5.0], tmp_path / "noise")
    assert not warnings([2.0, 5.0, 20.0], tmp_path / "trained")
    assert not warnings([9.0, 20.0], tmp_path / "resumed", first_step=30)


def test_a_skipped_step_counts_only_if_its_norm_spikes_during_the_warmup(tmp_path: Path) -> None:
    schedule = {"name": "wsd", "length": "100 steps", "warmup": "10 steps"}
    config = RunConfig.model_validate({"data": {"path": "data"}, "schedule": schedule})
    first = {"step": 1, "loss": math.log(32768)}

    def warned(name: str, step: int, norm: float | None) -> bool:
        later = [{"step": i, "loss": None} for i in range(step + 1, 101)]
        rows = [first, {"step": step, "loss": 50.0, "skipped": True, "grad_norm": norm}, *later]
        return bool(watches.warnings(UnstableStartWatch(config), rows, tmp_path / name))

    assert warned("warm-up", 10, 300.0)
    assert not warned("later", 11, 300.0)
    assert not warned("not a number", 10, None) and not warned("infinite", 10, math.inf)


def test_a_run_with_too_high_a_rate(data: Path, tmp_path: Path) -> None:
    schedule = {"length": "12 steps", "warmup": 0.0}
    config = tiny_run.config(data, schedule=schedule, optim={"name": "adamw", "lr": 0.3, "scale": False})
    assert "--schedule.warmup" in events(tiny_run.train(tmp_path, config, "high").run.path)
    config = tiny_run.config(data, schedule=schedule, optim={"name": "adamw", "lr": 1e-3, "scale": False})
    assert "--schedule.warmup" not in events(tiny_run.train(tmp_path, config, "low").run.path)
