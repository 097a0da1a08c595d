"""Memory of the host that this process may use, in bytes, as Linux reports it in files."""

from contextlib import suppress
from pathlib import Path

MEMORY_FACTS = Path("/proc/meminfo")
CGROUP = Path("/sys/fs/cgroup")  # of a container (cgroup v2)


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
        text = (CGROUP / "memory.max").read_text("utf-8").strip()
        return int(text) if text.isdecimal() else None
    return None


def limit_left_bytes() -> int | None:
    """Return the container's memory limit minus the memory in use; None if there is no limit.

    Pages of files that were not read or written lately do not count as used, because the kernel frees them first.
    """
    limit = limit_bytes()
    if limit is None:
        return None
    used = 0
    with suppress(OSError):
        used = int((CGROUP / "memory.current").read_text("utf-8"))
        for line in (CGROUP / "memory.stat").read_text("utf-8").splitlines():
            if line.startswith("inactive_file "):
                used -= int(line.split()[1])
    return max(0, limit - used)


def usable_bytes() -> int | None:
    """Return the smaller of `available_bytes` and `limit_left_bytes`; None if neither is known."""
    return min((size for size in (available_bytes(), limit_left_bytes()) if size is not None), default=None)
