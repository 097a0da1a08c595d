"""Helpers of a check inside its child process: report failures, compare numbers, measure times.

A library that refuses raises, and its own words are the result. One that returns wrong numbers is found by comparison
with float64, computed on the CPU so that a GPU never vouches for itself. An all-zero result is named as such: libraries
have reported support for a format while every gradient they gave was zero. A poisoned CUDA context ends the child, so
that no later check in it is blamed for an earlier one.
"""

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from deskside.kernels.functional import create_autograd_context
from deskside.train.loop.step import DeviceEvent
from deskside.utils.child_process import is_out_of_memory
from deskside.utils.errors import RunError, UsageError

Result = dict[str, Any]  # verdict, reason, errors, tolerance, speed, details; plain JSON

# What libraries raise to say that they cannot. Anything else ends the child, whose parent reports it.
REFUSALS = (
    RuntimeError,  # NotImplementedError and torch.OutOfMemoryError are kinds of it
    ValueError,
    TypeError,
    AssertionError,
    ImportError,
    AttributeError,
    OSError,
    UsageError,
    RunError,
)
TIMED_RUNS = {"cuda": 20, "cpu": 3}
WARM_SECONDS = {"cuda": 0.3, "cpu": 0.0}  # a card at rest first has to raise its clocks
LONGEST_REASON = 300


def several(calls: Sequence[Mapping[str, Any]]) -> list[Result]:
    """Run checks one after the other, each {"target": "module:function", "arguments": {...}}."""
    return [attempt(call["target"], call["arguments"]) for call in calls]


def attempt(target: str, arguments: Mapping[str, Any]) -> Result:
    """Return the check's result, or why a library refused. Other errors are raised, as is a broken CUDA context."""
    began = time.perf_counter()
    module, function = target.split(":")
    try:
        create_autograd_context(arguments.get("device", "cpu"))
        result: Result = getattr(import_module(module), function)(**arguments)
    except REFUSALS as error:
        verdict = "out of memory" if is_out_of_memory(error) else "unsupported"
        result = {"verdict": verdict, "reason": words(error)}
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
    return {**result, "seconds": round(time.perf_counter() - began, 2)}


def words(error: BaseException) -> str:
    """Return the first line of an error's message."""
    first = next(iter(str(error).strip().splitlines()), "") or type(error).__name__
    return first[:LONGEST_REASON]


def compare(got: Mapping[str, Tensor], truth: Mapping[str, Tensor], tolerance: float) -> Result:
    """Compare tensors with float64: {"verdict", "reason", "errors", "tolerance"}.

    errors: name -> relative Frobenius error, None where something is not finite. A tensor that is all zero where the
    truth is not is wrong whatever the tolerance.
    """
    errors: dict[str, float | None] = {}
    problems = []
    for name, expected in truth.items():
        ours, expected = got[name].detach().cpu().double(), expected.detach().cpu().double()
        if not bool(torch.isfinite(ours).all()):
            errors[name] = None
            problems.append(f"{name} is not finite")
            continue
        size = float(expected.norm())
        error = float((ours - expected).norm()) / size if size else float(ours.norm())
        errors[name] = float(f"{error:.3e}")
        if size and not bool(ours.any()):
            problems.append(f"{name} is all zero")
        elif error > tolerance:
            problems.append(f"{name} is off by {error:.1e}, allowed {tolerance:.0e}")
    return {
        "verdict": "wrong numbers" if problems else "works",
        "reason": "; ".join(problems),
        "errors": errors,
        "tolerance": tolerance,
    }


def wrong(result: Result, reason: str) -> Result:
    """Return the result with another error added."""
    return {
        **result,
        "verdict": "wrong numbers",
        "reason": "; ".join(filter(None, (result["reason"], reason))),
    }


def median_seconds(call: Callable[[], object], device: torch.device, runs: int | None = None) -> float:
    """Return the median seconds of a call, after at least one warm-up call."""
    warm_up(call, device)
    times = []
    for _ in range(runs or TIMED_RUNS[device.type]):
        begin = DeviceEvent(device)
        call()
        times.append(DeviceEvent(device).seconds_since(begin))
    return statistics.median(times)


def warm_up(call: Callable[[], object], device: torch.device) -> None:
    """Call until the device has left its idle clocks."""
    began = time.perf_counter()
    while True:
        call()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        if time.perf_counter() - began >= WARM_SECONDS[device.type]:
            return


def speed(value: float, unit: str) -> dict[str, Any]:
    """Return a measured rate; the unit is FLOP/s, B/s or tokens/s."""
    return {"value": value, "unit": unit, "source": "measured"}
