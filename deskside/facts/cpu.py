"""Number of CPU cores that this process may use."""

import math
import os
from pathlib import Path

CGROUP = Path("/sys/fs/cgroup")


def cpu_cores(cgroup: Path = CGROUP) -> int:
    """Cores that the scheduler gives this process, and no more than the container's quota of CPU time comes to.

    cgroup: where control groups are mounted, which in a container shows the container's own. Where the system tells
    neither, all the cores there are.
    """
    if hasattr(os, "sched_getaffinity"):
        cores = len(os.sched_getaffinity(0))
    else:
        cores = os.cpu_count() or 1
    quota = _quota(cgroup)
    return cores if quota is None else max(1, min(cores, math.ceil(quota)))


def _quota(cgroup: Path) -> float | None:
    """CPU seconds that a second has (cgroup v2: "max 100000" or "150000 100000"; v1: two files). None: no limit."""
    try:
        limit, period = (cgroup / "cpu.max").read_text("ascii").split()
    except (OSError, ValueError):
        try:
            limit, period = (
                (cgroup / "cpu" / f"cpu.cfs_{what}_us").read_text("ascii") for what in ("quota", "period")
            )
        except OSError:
            return None
    try:
        share = int(limit) / int(period)
    except (ValueError, ZeroDivisionError):  # "max"
        return None
    return share if share > 0 else None
