"""The warning of collapsed routers: in the measured runs with and without a collapse, and in a run."""

from pathlib import Path
from typing import Any

import pytest

from deskside.config.model import ModelConfig
from deskside.train.loop import router_collapse
from deskside.train.loop.router_collapse import ROWS, RouterCollapseWatch
from tests.train import tiny_run
from tests.train.loop import watches
from tests.train.loop.watches import measured_runs
from tests.train.tiny_run import events

CONFIG = ModelConfig(num_experts=8, num_experts_per_tok=2, moe_intermediate_size=64)


def warnings(rows: list[dict[str, Any]], folder: Path, config: ModelConfig = CONFIG) -> list[str]:
    return watches.warnings(RouterCollapseWatch(config), rows, folder)


def loads(*first_two: float) -> dict[str, Any]:
    """Return a row whose layers give these shares to their first two experts together."""
    layers = [[share / 2] * 2 + [(1 - share) / 6] * 6 for share in first_two]
    return {"experts": {"load": layers}}


@pytest.mark.parametrize(
    ("archive", "mixtures", "collapsed"),
    [
        ("2026-11-29-upcycling/collapsed.tar.zst", 2, {"upcycled-1"}),
        ("2026-11-29-upcycling/balanced.tar.zst", 5, set()),
        ("2026-11-29-languages/languages.tar.zst", 3, set()),
        ("2026-11-28-experts/expert-formats.tar.zst", 9, set()),
    ],
)
def test_measured_runs(archive: str, mixtures: int, collapsed: set[str], tmp_path: Path) -> None:
    found, count = set(), 0
    for name, rows in measured_runs(archive, "experts"):
        count += bool(rows)
        if warnings(rows, tmp_path / name):
            found.add(name)
    assert (count, found) == (mixtures, collapsed)


def test_it_takes_half_of_the_layers_in_consecutive_rows(tmp_path: Path) -> None:
    collapsed, one_layer = loads(0.95, 0.95, 0.5, 0.5), loads(0.95, 0.5, 0.5, 0.5)
    assert len(warnings([collapsed] * 3 * ROWS, tmp_path / "once")) == 1
    assert warnings([collapsed, {"loss": 1.0}] * ROWS, tmp_path / "between")
    assert not warnings([one_layer] * 3 * ROWS, tmp_path / "one")
    assert not warnings([*[collapsed] * (ROWS - 1), one_layer] * 3, tmp_path / "interrupted")


@pytest.mark.parametrize(
    ("options", "remedy"),
    [
        ({}, "--model.router_aux_loss_coef 0.1"),
        ({"router_aux_loss_coef": 0.001}, "--model.router_aux_loss_coef 0.01"),
        ({"router_aux_loss_coef": 0.02}, "--model.router_aux_loss_coef 0.2"),
        (
            {"scoring_func": "sigmoid", "router_bias_update_rate": 0.001},
            "--model.router_bias_update_rate 0.01",
        ),
    ],
)
def test_the_warning_names_an_option(options: dict[str, Any], remedy: str, tmp_path: Path) -> None:
    (warning,) = warnings([loads(0.99)] * ROWS, tmp_path / "run", CONFIG.model_copy(update=options))
    assert warning.endswith(remedy)


def test_a_run_warns_once(monkeypatch: pytest.MonkeyPatch, data: Path, tmp_path: Path) -> None:
    monkeypatch.setattr(router_collapse, "LARGEST_SHARE", 0.0)
    monkeypatch.setattr(router_collapse, "ROWS", 1)
    model = {**tiny_run.SHAPE, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    tiny_run.train(tmp_path, tiny_run.config(data, model=model, schedule={"length": "20 steps"}))
    assert events(tmp_path / "run").count("the routers have collapsed") == 1
