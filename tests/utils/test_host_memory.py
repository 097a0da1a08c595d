"""Memory left to a container, from files as Linux writes them."""

from pathlib import Path

import pytest

from deskside.utils import host_memory

GIB = 2**30


@pytest.mark.parametrize(
    ("limit", "current", "inactive", "left"),
    [
        ("max", 5, 1, None),
        (str(10 * GIB), 6, 2, 6),
        (str(10 * GIB), 12, 1, 0),
        (str(10 * GIB), None, None, 10),
    ],
)
def test_a_containers_limit_leaves_what_is_not_in_use(
    limit: str,
    current: int | None,
    inactive: int | None,
    left: int | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (tmp_path / "memory.max").write_text(f"{limit}\n")
    if current is not None and inactive is not None:
        (tmp_path / "memory.current").write_text(f"{current * GIB}\n")
        (tmp_path / "memory.stat").write_text(
            f"anon 77\nfile 88\ninactive_anon 99\ninactive_file {inactive * GIB}\nactive_file 11\n"
        )
    facts = tmp_path / "meminfo"
    facts.write_text(f"MemTotal:       {32 * 2**20} kB\nMemAvailable:   {8 * 2**20} kB\n")
    monkeypatch.setattr(host_memory, "CGROUP", tmp_path)
    monkeypatch.setattr(host_memory, "MEMORY_FACTS", facts)
    assert host_memory.limit_left_bytes() == (None if left is None else left * GIB)
    assert host_memory.usable_bytes() == (8 if left is None else min(8, left)) * GIB
