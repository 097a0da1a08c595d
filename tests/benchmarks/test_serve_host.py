"""The benchmark of the server's host time, for a moment on a tiny model."""

import json
from pathlib import Path

import pytest

from benchmarks.serve_host import main
from tests.serve.made_run import make


@pytest.mark.full
def test_the_results_count_the_answers_of_all_clients(tmp_path: Path) -> None:
    run, file = make(tmp_path / "run").path, tmp_path / "host.json"
    assert main([str(run), "--seconds", "2", "--clients", "4", "--json", str(file)]) == 0
    results = json.loads(file.read_text())
    assert results["clients"] == 4 and results["answers_per_second"] > 1
    assert 0 < results["p50"] <= results["p99"] and results["chunks_per_stream"] >= 2
    assert results["event_loop_ms"] > 0 and results["engine_ms"] > 0
