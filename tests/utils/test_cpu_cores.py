import os
from pathlib import Path

import pytest

from deskside.utils.child_process import cpu_cores


@pytest.fixture(autouse=True)
def eight_of_64_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let this process use eight of 64 cores."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)), raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: 64)


def write_cgroup(folder: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder


@pytest.mark.parametrize(
    ("files", "cores"),
    [
        ({}, 8),
        ({"cpu.max": "max 100000\n"}, 8),
        ({"cpu.max": "150000 100000\n"}, 2),
        ({"cpu.max": "1000 100000\n"}, 1),
        ({"cpu.max": "1600000 100000\n"}, 8),
        ({"cpu.max": "\n"}, 8),
        ({"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"}, 8),
        ({"cpu/cpu.cfs_quota_us": "400000\n", "cpu/cpu.cfs_period_us": "100000\n"}, 4),
    ],
)
def test_cores_are_limited_by_affinity_and_quota(files: dict[str, str], cores: int, tmp_path: Path) -> None:
    assert cpu_cores(write_cgroup(tmp_path, files)) == cores


def test_all_cores_without_affinity_support(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "sched_getaffinity", raising=False)
    assert cpu_cores(tmp_path) == 64
