"""Functions that run in the probe's child processes in place of training, with a fake GPU of 2 GiB."""

import os
import time
from typing import Any

from deskside.budget.shape import flops_per_token, num_params
from deskside.config.model import ModelConfig

MEMORY = 2 * 2**30
RATE = 1e13  # FLOP/s


def answer(spec: dict[str, Any]) -> dict[str, Any]:
    """Return a result with the fields of `probe.point.measure_point`. Raises MemoryError if a row does not fit."""
    model = ModelConfig(**spec["model"])
    length, tokens = spec["sequence_length"], spec["tokens"]
    row = length * model.num_hidden_layers * model.hidden_size * 36
    if spec["activation_checkpointing"] == "block":
        row //= 8
    states = (16 if spec["optimizer"] == "adamw" else 12) * num_params(model)
    micro = tokens
    while states + row * micro // length > MEMORY:
        if micro == length:
            raise MemoryError("CUDA out of memory: tried to allocate too much")
        micro = max(length, micro // 2 // length * length)
    step = tokens * flops_per_token(model, length) / RATE
    used = states + row * micro // length
    return {
        "tokens_per_second": tokens / step,
        "step_seconds": {"median": step, "p10": 0.98 * step, "p90": 1.03 * step},
        "mfu": 0.5,
        "matmul_peak_tflops": 2 * RATE / 1e12,
        "peak_allocated_bytes": used,
        "peak_reserved_bytes": int(1.1 * used),
        "device_used_bytes": int(1.1 * used) + 2**28,
        "micro_tokens": micro,
        "accumulation": tokens // micro,
        "watts": 321.5,
        "celsius": 61,
        "throttled": False,
        "loss_first": 10.4,
        "loss_last": 9.9,
        "finite": True,
        "setup_seconds": 3.0,
        "attention": {},
        "compile": "block",
        "params": num_params(model),
        "steps": 12,
        "precision": "bf16",
    }


def measure_point(spec: dict[str, Any]) -> dict[str, Any]:
    """Call `answer` in a child process."""
    return answer(spec)


def measure_point_slowly(spec: dict[str, Any]) -> dict[str, Any]:
    """Never end by itself, and write its process id to where the test reads it."""
    with open(os.environ["DESKSIDE_TEST_PID"], "w", encoding="utf-8") as file:
        file.write(str(os.getpid()))
    time.sleep(600)
    return answer(spec)


def crash(spec: dict[str, Any]) -> dict[str, Any]:
    """End without an answer, as after an illegal memory access."""
    os.abort()


def measure_card(device: str) -> dict[str, Any]:
    """Return the part of a GPU's measurement that the probe reads."""
    return {"device": device, "matmul_peak": 2 * RATE, "copy_bandwidth": 1e12}
