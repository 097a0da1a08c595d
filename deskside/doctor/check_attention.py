"""Check attention backends against float64: output and gradients of q, k and v, with and without a sliding window."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from deskside.doctor.check_tools import Result, compare, median_seconds, speed
from deskside.kernels.attention import (
    BACKENDS,
    AttentionBackend,
    AttentionContext,
    Requirements,
    backend_named,
    choose,
    prepare,
)
from deskside.kernels.attention.choose import TOLERANCE, flops

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]

DTYPE = {"cuda": torch.bfloat16, "cpu": torch.float32}
CHECKED = Requirements(2, 384, 6, 2, 64, torch.bfloat16, torch.device("cpu"))
TIMED = {
    "cuda": replace(CHECKED, batch=8, tokens=2048, heads=12, kv_heads=3),
    "cpu": replace(CHECKED, batch=1, tokens=1024),
}
CHECKED_WINDOW, TIMED_WINDOW = 100, 256


def list_backends(device: str) -> list[dict[str, Any]]:
    """Return every backend and why it does not support full and windowed attention, None where it does."""
    return [
        {
            "name": backend.name,
            "full": backend.unsupported_reason(_problem_for(CHECKED, backend, device, None)),
            "window": backend.unsupported_reason(_problem_for(CHECKED, backend, device, CHECKED_WINDOW)),
        }
        for backend in BACKENDS.values()
    ]


def check(backend: str, window: bool, device: str) -> Result:
    """Check a backend: errors on a small problem, FLOP/s of forward and backward on a large one."""
    chosen = backend_named(backend)

    def attend(need: Requirements) -> Attend:
        context = prepare(AttentionContext(window=need.window, backend=backend), need)
        return lambda q, k, v: chosen.function(q, k, v, context)

    return measure(attend, chosen, window, device)


def measure(
    attend: Callable[[Requirements], Attend], backend: AttentionBackend, window: bool, device: str
) -> Result:
    """Check and time the function that `attend(problem)` returns. Also used for libraries that are not backends."""
    checked = _problem_for(CHECKED, backend, device, CHECKED_WINDOW if window else None)
    inputs = _inputs(checked)
    result = compare(
        _output_and_gradients(attend(checked), inputs),
        _float64_reference(inputs, checked),
        TOLERANCE[checked.dtype],
    )
    timed = _problem_for(TIMED[torch.device(device).type], backend, device, TIMED_WINDOW if window else None)
    result["details"] = {"heads": timed.heads, "kv_heads": timed.kv_heads, "head_dim": timed.head_dim}
    # Some backends keep the whole score matrix; if it does not fit, time one row.
    for rows in dict.fromkeys((timed.batch, 1)):
        timed = replace(timed, batch=rows)
        try:
            inputs, function = _inputs(timed), attend(timed)
            seconds = median_seconds(lambda: _output_and_gradients(function, inputs), timed.device)  # noqa: B023 (used at once)
        except torch.OutOfMemoryError:
            continue
        result["details"] |= {"rows": rows, "tokens": timed.tokens, "milliseconds": round(seconds * 1e3, 3)}
        return result | {"speed": speed(flops(timed) / seconds, "FLOP/s")}
    return result


def quick_choice(device: str) -> Result:
    """Choose a backend for full attention as a run does, by errors against float32. details: its name, all times."""
    need = replace(TIMED[torch.device(device).type], device=torch.device(device))
    need = replace(need, dtype=DTYPE[need.device.type])
    choice = choose(need)
    return {
        "verdict": "works",
        "reason": "",
        "errors": {choice.name: float(f"{choice.errors[choice.name]:.3e}")},
        "tolerance": TOLERANCE[need.dtype],
        "speed": speed(flops(need) / choice.seconds[choice.name], "FLOP/s"),
        "details": {
            "chosen": choice.name,
            "milliseconds": {name: round(s * 1e3, 3) for name, s in choice.seconds.items()},
            "rejected": choice.rejected,
        },
    }


def _problem_for(
    need: Requirements, backend: AttentionBackend, device: str, window: int | None
) -> Requirements:
    where = torch.device(device)
    heads = need.kv_heads if backend.grouped else need.heads
    return replace(need, device=where, dtype=DTYPE[where.type], window=window, kv_heads=heads)


def _inputs(need: Requirements) -> list[Tensor]:
    """Return q, k, v and the gradient of the output."""
    generator = torch.Generator(need.device).manual_seed(0)
    return [
        torch.randn(
            need.batch, need.tokens, heads, need.head_dim, generator=generator, device=need.device
        ).to(need.dtype)
        for heads in (need.heads, need.kv_heads, need.kv_heads, need.heads)
    ]


def _output_and_gradients(attend: Attend, inputs: list[Tensor]) -> dict[str, Tensor]:
    *qkv, grad = inputs
    leaves = [tensor.detach().requires_grad_() for tensor in qkv]
    output = attend(*leaves)
    dq, dk, dv = torch.autograd.grad(output, leaves, grad)
    return {"output": output.detach(), "dq": dq, "dk": dk, "dv": dv}


def _float64_reference(inputs: list[Tensor], need: Requirements) -> dict[str, Tensor]:
    """Return the output and gradients of the reference backend in float64 on the CPU."""
    exact = replace(need, dtype=torch.float64, device=torch.device("cpu"))
    context = prepare(AttentionContext(window=need.window, backend="reference"), exact)
    function = backend_named("reference").function
    return _output_and_gradients(
        lambda q, k, v: function(q, k, v, context), [t.cpu().double() for t in inputs]
    )
