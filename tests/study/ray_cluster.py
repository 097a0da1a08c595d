"""A Ray cluster on this machine, and the progress of a study on it."""

import contextlib
import json
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from deskside.study.execute.study_folder import StudyFolder
from tests.study.fake_trials import ROOT

NODE = {"num_cpus": 1, "num_gpus": 0, "include_dashboard": False}
# Ray checks every half second whether a node is alive.
HEALTH = {
    "health_check_period_ms": 500,
    "health_check_failure_threshold": 3,
    "health_check_initial_delay_ms": 0,
}


@contextlib.contextmanager
def new_cluster() -> Iterator[Any]:
    """Start a cluster with one node, at $RAY_ADDRESS."""
    ray_cluster = pytest.importorskip("ray.cluster_utils")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        patch.setenv("PYTHONPATH", str(ROOT))
        made = ray_cluster.Cluster(initialize_head=True, head_node_args={**NODE, "_system_config": HEALTH})
        patch.setenv("RAY_ADDRESS", made.address)
        try:
            yield made
        finally:
            made.shutdown()


def wait_for(condition: Any, seconds: float = 240.0) -> Any:
    """Wait until a condition returns a true value, and return it."""
    deadline = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.2)
    return value


def events(study: Path, kind: str) -> list[dict[str, Any]]:
    path = study / "journal.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    return [event for event in map(json.loads, lines) if event["event"] == kind]


def checkpoints(study: Path, event: dict[str, Any]) -> list[Path]:
    """Return the checkpoints of a trial that has begun to train."""
    run = StudyFolder(study).run(event["arm"], event["seed"])
    return [
        path for path in (run / "checkpoints").glob("step-*") if re.fullmatch(r"step-0*[1-9]\d+", path.name)
    ]
