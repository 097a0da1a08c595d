"""The experts in the report of a made-up run."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from deskside.cli.main import main
from deskside.report.write import write_report
from deskside.run.expert_load import load_by_language, newest_load
from deskside.run.record import read_run
from tests.report.test_run_report import make_run, metric

LOAD = [[0.25, 0.25, 0.25, 0.25], [0.5, 0.125, 0.25, 0.125]]


def add_experts(folder: Path, by_language: dict[str, Any] | None = None) -> None:
    """Give every step an imbalance, and step 100 and 200 the loads by layer."""
    rows = [metric(step) for step in range(1, 201)]
    for row in rows:
        row |= {"load_imbalance": 1 + 1 / row["step"], "router_entropy": 1.0}
        if row["step"] % 100 == 0:
            row["experts"] = {"load": LOAD, "entropy": [1.38, 1.2], "dropped_tokens": [0, 3]}
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    summary = json.loads((folder / "summary.json").read_text())
    summary["val_expert_load"] = by_language or {}
    (folder / "summary.json").write_text(json.dumps(summary))


@pytest.mark.usefixtures("no_figures")
def test_table_and_plots(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "demo")
    add_experts(folder, {"hi": LOAD, "ta": LOAD[::-1], "<b>": LOAD})
    page = write_report(folder).read_text("utf-8")
    markdown = (folder / "report.md").read_text("utf-8")
    assert "| 0 | 1.00 | 1.00 | 1.380 | 0 |" in markdown and "| 1 | 2.00 | 0.50 | 1.200 | 3 |" in markdown
    assert "<b>" not in page
    load = newest_load(read_run(folder).metrics)
    assert load is not None and (load.step, load.imbalance) == (200, 1.5)
    assert "no token" in replace(load, dropped_L=[0, 0]).dropped_text and "3" in load.dropped_text
    for name in ("expert_load", "load_imbalance", "expert_languages"):
        assert (folder / "plots" / f"{name}.svg").stat().st_size > 2000
    make_run(folder)
    write_report(folder)
    assert "## Experts" not in (folder / "report.md").read_text("utf-8")
    assert not (folder / "plots" / "expert_load.svg").exists()


@pytest.mark.usefixtures("no_figures")
def test_many_experts_and_layers_are_drawn_without_numbers(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "demo")
    add_experts(folder)
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    experts = {"load": [[1 / 128] * 128] * 61, "entropy": [4.0] * 61, "dropped_tokens": [0] * 61}
    row = json.loads(lines[-1]) | {"experts": experts}
    (folder / "metrics.jsonl").write_text("\n".join([*lines[:-1], json.dumps(row)]) + "\n")
    write_report(folder)
    assert (folder / "plots" / "expert_load.svg").stat().st_size > 2000


@pytest.mark.parametrize(
    "damaged",
    [3, {}, {"load": [[0.5, 0.5], [1.0]], "entropy": [1, 1]}, {"load": [[None, 1]], "entropy": [1]},
     {"load": LOAD, "entropy": [1]}, {"load": LOAD}, {"load": "x", "entropy": "x"}, {"load": [[]], "entropy": []}],
)  # fmt: skip
def test_damaged_loads_are_left_out(damaged: object, tmp_path: Path) -> None:
    folder = make_run(tmp_path / "demo")
    add_experts(folder, {"hi": damaged, "ta": LOAD, "te": [[0.5, 0.5]]})
    assert newest_load([{"step": 1, "experts": damaged}]) is None
    assert load_by_language(read_run(folder)) == {}


@pytest.mark.usefixtures("no_figures")
def test_the_command_has_a_line_about_experts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = make_run(tmp_path / "demo")
    add_experts(folder)
    assert main(["report", str(folder)]) == 0
    streams = capsys.readouterr()
    assert streams.out.strip().endswith("report.html") and streams.out.count("\n") == 1
    assert "1.50" in streams.err and "2 layers" in " ".join(streams.err.split())
    assert "3 tokens dropped" in streams.err
    assert main(["report", str(folder), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["experts"] == {"step": 200, "load_imbalance": 1.5}
