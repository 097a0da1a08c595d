"""Breakdown of the device time of a step by kind of work, from torch.profiler's trace of a few steps.

A trace contains device activity (kernels, copies) and host activity. Each kernel has the correlation id of the host
call that launched it; the operators and annotations that enclose this call tell what the kernel is for. On a CPU the
operators themselves are the work: each counts its time without that of its children.

The profiler hardly changes the times of kernels, but it changes the gaps between them, because it slows down the host.
The gaps are therefore given twice: as in the trace, and as the time of an unprofiled step beyond its busy time.
"""

import json
import tempfile
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.step_kinds import KINDS, OPTIMIZER_MARK, kind_of

ON_DEVICE = {"kernel", "gpu_memcpy", "gpu_memset"}
LAUNCH = {"cuda_runtime", "cuda_driver"}
ENCLOSING = {"cpu_op", "user_annotation"}
STEP_MARK = "deskside: step"
SHOWN_NAMES = 12


@dataclass(frozen=True)
class Piece:
    """One kernel, or one operator on a CPU without its children. Microseconds; `inside`: outermost first."""

    name: str
    start: float
    duration: float
    inside: tuple[str, ...]
    operator: bool = False  # of a CPU

    @property
    def kind(self) -> str:
        return kind_of(self.name, self.inside, self.operator)


class MarkedOptimizer:
    """Wrapper that annotates the work of an optimizer as `OPTIMIZER_MARK` in the trace and forwards everything else."""

    def __init__(self, optimizer: Any):
        self._optimizer = optimizer

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._optimizer, name)
        return _marked(value) if name in ("step", "clip_and_norm") else value


def _marked(function: Callable[..., Any]) -> Callable[..., Any]:
    def call(*arguments: Any, **options: Any) -> Any:
        with torch.profiler.record_function(OPTIMIZER_MARK):
            return function(*arguments, **options)

    return call


def record(run: Callable[[], object], steps: int, device: torch.device) -> list[dict[str, Any]]:
    """Return the trace events of `steps` calls of `run`, after one call that is not recorded."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    if device.type == "cuda":
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    run()
    _synchronize(device)
    with torch.profiler.profile(activities=activities) as profiler, torch.profiler.record_function(STEP_MARK):
        for _ in range(steps):
            run()
        _synchronize(device)
    with tempfile.TemporaryDirectory(prefix="deskside-") as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        events: list[dict[str, Any]] = json.loads(path.read_text(encoding="utf-8"))["traceEvents"]
    return events


def pieces(events: Iterable[dict[str, Any]], device: str) -> list[Piece]:
    """Return the activity of the device ("cuda" or "cpu"), in order of time."""
    complete = [e for e in events if e.get("ph") == "X"]
    hosts: dict[Any, list[dict[str, Any]]] = defaultdict(list)
    for event in complete:
        if event.get("cat") in ENCLOSING:
            hosts[event["tid"]].append(event)
    if device == "cpu":
        return sorted((p for rows in hosts.values() for p in _own_time(rows)), key=lambda p: p.start)
    stacks = {tid: _Stacks(rows) for tid, rows in hosts.items()}
    launches = {
        e["args"]["correlation"]: e
        for e in complete
        if e.get("cat") in LAUNCH and "correlation" in e.get("args", {})
    }
    found = []
    for event in complete:
        if event.get("cat") not in ON_DEVICE:
            continue
        launch = launches.get(event.get("args", {}).get("correlation"))
        inside: tuple[str, ...] = ()
        if launch is not None and launch["tid"] in stacks:
            inside = stacks[launch["tid"]].at(float(launch["ts"]))
        found.append(Piece(event["name"], float(event["ts"]), float(event["dur"]), inside))
    return sorted(found, key=lambda p: p.start)


def split(found: list[Piece], steps: int, step_ms: float, device: str) -> dict[str, Any]:
    """Return the milliseconds per step of each kind with its largest names, and the gaps.

    `step_ms`: time of an unprofiled step. Kernels that overlap on two streams count fully in their kinds, but once in
    `busy_ms`.
    """
    kinds: dict[str, dict[str, Any]] = {}
    for kind in KINDS:
        mine = [p for p in found if p.kind == kind]
        if not mine:
            continue
        names: dict[str, list[float]] = defaultdict(list)
        for piece in mine:
            names[piece.name].append(piece.duration)
        largest = sorted(names.items(), key=lambda item: -sum(item[1]))
        shown = largest if kind == "unclassified" else largest[:SHOWN_NAMES]
        kinds[kind] = {
            "ms": sum(p.duration for p in mine) / steps / 1e3,
            "kernels": len(mine) / steps,
            "names": {name: sum(times) / steps / 1e3 for name, times in shown},
        }
    # On a CPU, pieces are operators without their children: they do not overlap, but their ends are unknown.
    taken = sum(p.duration for p in found) if device == "cpu" else _busy(found)
    busy = taken / steps / 1e3
    span = (max(p.start + p.duration for p in found) - found[0].start) / steps / 1e3 if found else 0.0
    return {
        "kinds": kinds,
        "busy_ms": busy,
        "step_ms": step_ms,
        "idle_ms": step_ms - busy,
        "traced_step_ms": span,
        "traced_idle_ms": span - busy,
    }


def _busy(found: list[Piece]) -> float:
    """Return the microseconds in which at least one piece ran; `found` is in order of time."""
    total, end = 0.0, float("-inf")
    for piece in found:
        stop = piece.start + piece.duration
        if stop > end:
            total += stop - max(piece.start, end)
            end = stop
    return total


class _Stacks:
    """Lookup of the host intervals of one thread that enclose a point in time. Intervals of a thread are nested."""

    def __init__(self, events: list[dict[str, Any]]):
        rows = sorted(events, key=lambda e: (float(e["ts"]), -float(e["dur"])))
        self._starts = [float(e["ts"]) for e in rows]
        self._ends = [float(e["ts"]) + float(e["dur"]) for e in rows]
        self._names = [str(e["name"]) for e in rows]
        self._parents: list[int] = []
        stack: list[int] = []
        for i, start in enumerate(self._starts):
            while stack and self._ends[stack[-1]] <= start:
                stack.pop()
            self._parents.append(stack[-1] if stack else -1)
            stack.append(i)

    def at(self, moment: float) -> tuple[str, ...]:
        """Return the names, outermost first."""
        names = []
        i = bisect_right(self._starts, moment) - 1
        while i >= 0:
            if self._ends[i] >= moment:
                names.append(self._names[i])
            i = self._parents[i]
        return tuple(reversed(names))


def _own_time(events: list[dict[str, Any]]) -> list[Piece]:
    """Return the operators of one thread with the time that their children did not take; annotations only enclose."""
    rows = sorted(events, key=lambda e: (float(e["ts"]), -float(e["dur"])))
    own = [float(e["dur"]) for e in rows]
    inside: list[tuple[str, ...]] = []
    stack: list[int] = []
    for i, event in enumerate(rows):
        start = float(event["ts"])
        while stack and float(rows[stack[-1]]["ts"]) + float(rows[stack[-1]]["dur"]) <= start:
            stack.pop()
        inside.append(tuple(str(rows[j]["name"]) for j in stack))
        if stack:
            own[stack[-1]] -= float(event["dur"])
        stack.append(i)
    return [
        Piece(str(event["name"]), float(event["ts"]), max(0.0, time), around, operator=True)
        for event, time, around in zip(rows, own, inside, strict=True)
        if event["cat"] == "cpu_op"
    ]


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
