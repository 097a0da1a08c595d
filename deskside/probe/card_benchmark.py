"""Device benchmark: speeds of the operations of a training step, which are matmuls, attention and copies.

It needs no model and no compiler, and takes some seconds. The planner estimates the time of a step from these speeds
(`budget/speed.py`) and corrects the estimate with measured points. Before the first timing the device computes large
matmuls for a while: an idle GPU is below its power limit, and at first faster than it is under a constant load.
"""

import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from deskside.kernels.attention import Requirements, choose
from deskside.kernels.matmul_peak import measure_matmul_peak
from deskside.train.loop.step import DeviceEvent
from deskside.utils.errors import RunError

TOKENS = {"cuda": 16384, "cpu": 512}  # rows of the matmuls, as in a micro-batch
# (in, out) features of the weights: layers of models with hidden sizes from 512 to 4096, and heads.
WEIGHTS = {
    "cuda": (
        (512, 512), (768, 768), (768, 1152), (768, 4096), (2048, 768), (1024, 1536), (1024, 5632), (2816, 1024),
        (1536, 8192), (2048, 2048), (2048, 11008), (4096, 4096), (4096, 12288), (768, 32768), (2048, 32768),
    ),
    "cpu": ((128, 192), (128, 768), (384, 128), (256, 256), (256, 1536), (128, 1024)),
}  # fmt: skip
# Attention: (heads, key-value heads, head dim), and the sequence lengths.
HEADS = {"cuda": ((12, 3, 64), (8, 2, 128), (12, 12, 64)), "cpu": ((4, 1, 32), (4, 4, 64))}
LENGTHS = {"cuda": (512, 1024, 2048, 4096, 8192), "cpu": (128, 512)}
ATTENTION_TOKENS = {"cuda": 16384, "cpu": 512}
COPY_BYTES = {"cuda": 2**30, "cpu": 2**27}
SETTLE_SECONDS = {"cuda": 2.0, "cpu": 0.5}
RUNS = 8
LAUNCHES = 2000


def measure_card(device: str = "auto") -> dict[str, Any]:
    """Return speeds of this device in FLOP/s and bytes/s, and its launch seconds. Runs in its own process."""
    chosen = ("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else device
    where = torch.device(chosen)
    dtype = torch.bfloat16 if chosen == "cuda" else torch.float32
    began = time.perf_counter()
    while time.perf_counter() - began < SETTLE_SECONDS[chosen]:
        measure_matmul_peak(where, dtype)
    return {
        "device": chosen,
        "dtype": str(dtype).removeprefix("torch."),
        "matmul_peak": measure_matmul_peak(where, dtype),
        "matmul": _matmuls(where, dtype),
        "copy_bandwidth": _copy_bandwidth(where),
        "attention": _attention(where, dtype),
        "launch_seconds": _launch_seconds(where),
    }


def _matmuls(device: torch.device, dtype: torch.dtype) -> list[dict[str, Any]]:
    """Return FLOP/s of the three matmuls of each linear layer: output, input gradient, weight gradient."""
    found = []
    generator = torch.Generator(device).manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device=device).to(dtype)

    N = TOKENS[device.type]
    for columns, rows in WEIGHTS[device.type]:
        x_NK, w_MK, g_NM = random(N, columns), random(rows, columns), random(N, rows)
        flops = 2.0 * N * columns * rows
        found.append(
            {
                "tokens": N,
                "in": columns,
                "out": rows,
                "forward": flops / _seconds(partial(torch.mm, x_NK, w_MK.t()), device),
                "input_gradient": flops / _seconds(partial(torch.mm, g_NM, w_MK), device),
                "weight_gradient": flops / _seconds(partial(torch.mm, g_NM.t(), x_NK), device),
            }
        )
    return found


def _copy_bandwidth(device: torch.device) -> float:
    """Return the bytes read and written per second by a large copy."""
    source = torch.zeros(COPY_BYTES[device.type], dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2.0 * source.numel() / _seconds(lambda: target.copy_(source), device)


def _attention(device: torch.device, dtype: torch.dtype) -> list[dict[str, Any]]:
    """Return FLOP/s of causal attention, forward and backward, with the backend that a run would choose."""
    rows = []
    for heads, kv_heads, head_dim in HEADS[device.type]:
        for tokens in LENGTHS[device.type]:
            batch = ATTENTION_TOKENS[device.type] // tokens
            need = Requirements(batch, tokens, heads, kv_heads, head_dim, dtype, device)
            row: dict[str, Any] = {
                "tokens": tokens, "batch": batch, "heads": heads, "kv_heads": kv_heads, "head_dim": head_dim,
            }  # fmt: skip
            try:
                choice = choose(need)
            except (RunError, torch.OutOfMemoryError) as error:  # not possible on this device
                rows.append({**row, "backend": None, "flops": None, "error": str(error)[:200]})
                continue
            # Two matmuls in the forward and four in the backward, over half of the score matrix (causal).
            flops = 12.0 * batch * heads * head_dim * tokens * tokens / 2
            rows.append({**row, "backend": choice.name, "flops": flops / choice.seconds[choice.name]})
    return rows


def _launch_seconds(device: torch.device) -> float:
    """Return the seconds per small operation: the larger of the host's launch time and the least time of a kernel."""
    x = torch.zeros(16, device=device)
    for runs in (1, LAUNCHES):  # the single run is the warm-up
        began = time.perf_counter()
        for _ in range(runs):
            x.add_(1)
        if device.type == "cuda":
            torch.cuda.synchronize()
    return (time.perf_counter() - began) / LAUNCHES


def _seconds(work: Callable[[], Tensor], device: torch.device) -> float:
    """Return the median seconds of a call after one warm-up call."""
    work()
    times = []
    for _ in range(RUNS):
        begin = DeviceEvent(device)
        work()
        times.append(DeviceEvent(device).seconds_since(begin))
    return statistics.median(times)
