"""Memory of the host that this process may use, in bytes, as Linux reports it in files."""

from contextlib import suppress
from pathlib import Path

MEMORY_FACTS = Path("/proc/meminfo")
CGROUP_LIMIT = Path("/sys/fs/cgroup/memory.max")


def available_bytes() -> int | None:
    """Return the memory that can be used without swapping; None if the system does not say."""
    with suppress(OSError):
        for line in MEMORY_FACTS.read_text("utf-8").splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return None


def limit_bytes() -> int | None:
    """Return the container's memory limit (cgroup v2); None if there is none."""
    with suppress(OSError):
        text = CGROUP_LIMIT.read_text("utf-8").strip()
        return int(text) if text.isdecimal() else None
    return None


def usable_bytes() -> int | None:
    """Return the smaller of `available_bytes` and `limit_bytes`; None if neither is known."""
    return min((size for size in (available_bytes(), limit_bytes()) if size is not None), default=None)
