"""Helpers of the checks inside their child process: report failures, compare numbers, measure times.

If a library raises, its message becomes the result. Wrong numbers are found by a comparison with float64. An all-zero
result is reported as such, because libraries have reported support for a format although all their gradients were zero.
A broken CUDA context ends the child, so that its later checks do not fail because of an earlier one.
"""

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from deskside.kernels.functional import create_cuda_context_for_autograd
from deskside.train.loop.step import DeviceEvent
from deskside.utils.child_process import is_out_of_memory
from deskside.utils.errors import RunError, UsageError, first_line

Result = dict[str, Any]  # verdict, reason, errors, tolerance, speed, details; plain JSON

# Errors that mean that a library does not support something. Any other ends the child, and the parent reports it.
UNSUPPORTED_ERRORS = (
    RuntimeError,  # includes NotImplementedError and torch.OutOfMemoryError
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
WARMUP_SECONDS = {"cuda": 0.3, "cpu": 0.0}  # an idle GPU first has to raise its clocks
MAX_REASON_LENGTH = 300


def run_checks(calls: Sequence[Mapping[str, Any]]) -> list[Result]:
    """Run checks one after the other, each {"target": "module:function", "arguments": {...}}."""
    return [run_check(call["target"], call["arguments"]) for call in calls]


def run_check(target: str, arguments: Mapping[str, Any]) -> Result:
    """Run a check and return its result, also if it raises one of `UNSUPPORTED_ERRORS`; all other errors propagate."""
    began = time.perf_counter()
    module, function = target.split(":")
    try:
        create_cuda_context_for_autograd(arguments.get("device", "cpu"))
        result: Result = getattr(import_module(module), function)(**arguments)
    except UNSUPPORTED_ERRORS as error:
        verdict = "out of memory" if is_out_of_memory(error) else "unsupported"
        result = {"verdict": verdict, "reason": first_line(error)[:MAX_REASON_LENGTH]}
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
    return {**result, "seconds": round(time.perf_counter() - began, 2)}


def compare(got: Mapping[str, Tensor], truth: Mapping[str, Tensor], tolerance: float) -> Result:
    """Compare tensors with their float64 reference: {"verdict", "reason", "errors", "tolerance"}.

    errors: name -> relative Frobenius error, None for a tensor that is not finite. An all-zero tensor is wrong at any
    tolerance, unless its reference is zero.
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
            problems.append(f"{name} is off by {error:.1e}, allowed {tolerance:.1e}")
    return {
        "verdict": "wrong numbers" if problems else "works",
        "reason": "; ".join(problems),
        "errors": errors,
        "tolerance": tolerance,
    }


def add_error(result: Result, reason: str) -> Result:
    """Return the result with the verdict "wrong numbers" and another reason."""
    return {
        **result,
        "verdict": "wrong numbers",
        "reason": f"{result['reason']}; {reason}" if result["reason"] else reason,
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
    """Call at least once, and on a GPU until it has had time to raise its clocks."""
    began = time.perf_counter()
    while True:
        call()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        if time.perf_counter() - began >= WARMUP_SECONDS[device.type]:
            return


def speed(value: float, unit: str) -> dict[str, Any]:
    """Return a measured rate; the unit is FLOP/s, B/s or tokens/s."""
    return {"value": value, "unit": unit, "source": "measured"}
