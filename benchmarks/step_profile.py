"""Breakdown of the device time of a step by kind of work, from torch.profiler's trace of a few steps.

A trace contains device activity (kernels, copies) and host activity. Each kernel has the correlation id of the host
call that launched it; the operators and annotations that enclose this call show the purpose of the kernel. On a CPU the
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
class Activity:
    """One kernel, or one operator on a CPU without its children.

    start, duration: microseconds. inside: names of the enclosing operators and annotations, outermost first.
    """

    name: str
    start: float
    duration: float
    inside: tuple[str, ...]
    operator: bool = False  # True for an operator on a CPU

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
    recorded = [torch.profiler.ProfilerActivity.CPU]
    if device.type == "cuda":
        recorded.append(torch.profiler.ProfilerActivity.CUDA)
    run()
    _synchronize(device)
    with torch.profiler.profile(activities=recorded) as profiler, torch.profiler.record_function(STEP_MARK):
        for _ in range(steps):
            run()
        _synchronize(device)
    with tempfile.TemporaryDirectory(prefix="deskside-") as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        events: list[dict[str, Any]] = json.loads(path.read_text(encoding="utf-8"))["traceEvents"]
    return events


def activities(events: Iterable[dict[str, Any]], device: str) -> list[Activity]:
    """Return the activities of the device ("cuda" or "cpu") in a trace, in order of time."""
    complete = [e for e in events if e.get("ph") == "X"]
    hosts: dict[Any, list[dict[str, Any]]] = defaultdict(list)
    for event in complete:
        if event.get("cat") in ENCLOSING:
            hosts[event["tid"]].append(event)
    if device == "cpu":
        return sorted((p for rows in hosts.values() for p in _self_time(rows)), key=lambda p: p.start)
    stacks = {tid: _Stacks(rows) for tid, rows in hosts.items()}
    launches = {
        e["args"]["correlation"]: e
        for e in complete
        if e.get("cat") in LAUNCH and "correlation" in e.get("args", {})
    }
    kernels = []
    for event in complete:
        if event.get("cat") not in ON_DEVICE:
            continue
        launch = launches.get(event.get("args", {}).get("correlation"))
        inside: tuple[str, ...] = ()
        if launch is not None and launch["tid"] in stacks:
            inside = stacks[launch["tid"]].enclosing(float(launch["ts"]))
        kernels.append(Activity(event["name"], float(event["ts"]), float(event["dur"]), inside))
    return sorted(kernels, key=lambda p: p.start)


def split(activities: list[Activity], steps: int, step_ms: float, device: str) -> dict[str, Any]:
    """Return the milliseconds per step of each kind with its largest names, and the gaps.

    `step_ms`: time of an unprofiled step. Kernels that overlap on two streams count fully in their kinds, but once in
    `busy_ms`.
    """
    kinds: dict[str, dict[str, Any]] = {}
    for kind in KINDS:
        of_kind = [p for p in activities if p.kind == kind]
        if not of_kind:
            continue
        names: dict[str, list[float]] = defaultdict(list)
        for activity in of_kind:
            names[activity.name].append(activity.duration)
        largest = sorted(names.items(), key=lambda item: -sum(item[1]))
        shown = largest if kind == "unclassified" else largest[:SHOWN_NAMES]
        kinds[kind] = {
            "ms": sum(p.duration for p in of_kind) / steps / 1e3,
            "kernels": len(of_kind) / steps,
            "names": {name: sum(times) / steps / 1e3 for name, times in shown},
        }
    # On a CPU, activities are operators without their children: they do not overlap, but their ends are unknown.
    busy_us = sum(p.duration for p in activities) if device == "cpu" else busy_microseconds(activities)
    busy = busy_us / steps / 1e3
    span = 0.0
    if activities:
        span = (max(p.start + p.duration for p in activities) - activities[0].start) / steps / 1e3
    return {
        "kinds": kinds,
        "busy_ms": busy,
        "step_ms": step_ms,
        "idle_ms": step_ms - busy,
        "traced_step_ms": span,
        "traced_idle_ms": span - busy,
    }


def busy_microseconds(activities: list[Activity]) -> float:
    """Return the microseconds in which at least one activity ran; `activities` are in order of time."""
    total, end = 0.0, float("-inf")
    for activity in activities:
        stop = activity.start + activity.duration
        if stop > end:
            total += stop - max(activity.start, end)
            end = stop
    return total


class _Stacks:
    """Lookup of the events of one host thread that enclose a point in time. Events of a thread are nested."""

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

    def enclosing(self, moment: float) -> tuple[str, ...]:
        """Return the names of the events that enclose a moment (microseconds), outermost first."""
        names = []
        i = bisect_right(self._starts, moment) - 1
        while i >= 0:
            if self._ends[i] >= moment:
                names.append(self._names[i])
            i = self._parents[i]
        return tuple(reversed(names))


def _self_time(events: list[dict[str, Any]]) -> list[Activity]:
    """Return the operators of one thread (not its annotations), each with its time outside of child operators."""
    rows = sorted(events, key=lambda e: (float(e["ts"]), -float(e["dur"])))
    self_time = [float(e["dur"]) for e in rows]
    inside: list[tuple[str, ...]] = []
    stack: list[int] = []
    for i, event in enumerate(rows):
        start = float(event["ts"])
        while stack and float(rows[stack[-1]]["ts"]) + float(rows[stack[-1]]["dur"]) <= start:
            stack.pop()
        inside.append(tuple(str(rows[j]["name"]) for j in stack))
        if stack:
            self_time[stack[-1]] -= float(event["dur"])
        stack.append(i)
    return [
        Activity(str(event["name"]), float(event["ts"]), max(0.0, time), around, operator=True)
        for event, time, around in zip(rows, self_time, inside, strict=True)
        if event["cat"] == "cpu_op"
    ]


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
