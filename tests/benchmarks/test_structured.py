"""The benchmark of constrained generation, run as a command on a CPU."""

import json
from pathlib import Path

from benchmarks import structured


def test_command(tmp_path: Path) -> None:
    file = tmp_path / "structured.json"
    words = "--preset demo --batch 1,2 --new 6 --vocabulary 400 --device cpu --dtype float32 --runs 1"
    assert structured.main([*words.split(), "--json", str(file)]) == 0
    speeds = json.loads(file.read_text())
    assert [(s["arm"], s["batch"]) for s in speeds] == [
        (a, b) for b in (1, 2) for a in ("free", "one", "all")
    ]
    assert all((s["masks_ms"] > 0) == (s["arm"] != "free") for s in speeds)
