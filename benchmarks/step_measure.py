"""Measurement of one arm of the step benchmark: deskside's training step, built and timed in its own process.

The step is built as by `deskside train` (train/prepare/setup, optim/build, train/loop/step) and timed like a point of
the probe (probe/point). Batches are on the device before the timing starts: `benchmarks/loader.py` times the loader.
"""

import statistics
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from benchmarks import step_floor, step_profile
from benchmarks.step_config import configuration
from deskside.budget.shape import flops_per_token, num_params
from deskside.config.run import RunConfig
from deskside.data.reading.loader import Batch, Loader, LoaderOptions
from deskside.kernels.compile_ahead import count_compilations
from deskside.probe.point import (
    BATCHES,
    PreparedStep,
    StepTimer,
    memory_peaks,
    optimizer_seconds,
    prepare_step,
    quantile,
    random_batches,
)
from deskside.train import environment_record
from deskside.train.next_token import NextToken
from deskside.train.nvml import NvmlDevice, query
from deskside.train.prepare.batch_size_finder import MicroBatch

PROFILED_STEPS = 3
HOT_STEPS = 5  # minimum number of steps, however slow


def measure(spec: dict[str, Any]) -> dict[str, Any]:
    """Measure one arm and return its results. Runs in its own process.

    spec: as in `step_config.configuration`, and `steps`, `warmup`, `hot_seconds`, `profile`, `data` (None or the path
    of a prepared dataset) and `began`, the value of time.monotonic() when the command was started.
    """
    marks = {"imported": _since(spec)}  # seconds from the command to the end of each part of the start-up
    compilations = count_compilations() if torch.cuda.is_available() else None
    prepared, timer = _build(spec, marks)
    device, config = prepared.stepper.world.device, prepared.config
    environment_record.reset_peak_memory(device)
    timer.read(timer.launch())
    marks["first step done"] = _since(spec)
    at_first_step = compilations.to_json() if compilations is not None else None
    if spec["warmup"] > 1:
        timer.run(0.0, spec["warmup"] - 1)
    flops = flops_per_token(config.model, config.batch.sequence_length)
    phases = {"short": _phase(timer.run(0.0, spec["steps"]), prepared, flops)}
    if spec.get("hot_seconds"):
        phases["hot"] = _phase(timer.run(spec["hot_seconds"], HOT_STEPS), prepared, flops)
    # The state of the GPU under load, not the idle state between two phases.
    card = _card(device, timer)
    memory = memory_peaks(device)
    result: dict[str, Any] = {
        "preset": spec["preset"],
        "precision": prepared.recipe,
        "optimizer": config.optim.name,
        "params": num_params(config.model),
        "sequence_length": config.batch.sequence_length,
        "tokens": config.batch.tokens,
        "micro_tokens": prepared.fit.micro_rows * config.batch.sequence_length,
        "accumulation": prepared.fit.accumulation,
        "attention": prepared.attention,
        "compile": prepared.mode,
        "cuda_graph": config.compute.cuda_graph,
        "matmul": config.compute.matmul,
        "native": prepared.native,
        "native_formats": sorted(prepared.native_formats),
        "data": spec.get("data") or "zipf",
        "phases": phases,
        "flops_per_token": flops,
        "matmul_peak_tflops": prepared.peak_flops / 1e12,
        "peak_allocated_gib": _gib(memory["peak_allocated_bytes"]),
        "peak_reserved_gib": _gib(memory["peak_reserved_bytes"]),
        "cold_start": marks,
        "compilations": at_first_step,
        "optimizer_ms": 1e3 * optimizer_seconds(prepared.stepper, timer.batches[0]),
        "loss_first": timer.losses[0],
        "loss_last": timer.losses[-1],
        "finite": timer.finite,
        "card": card,
        "device": device.type,
        "torch": torch.__version__,
        "notes": prepared.notes,
    }
    if spec.get("profile"):
        result["profile"] = _profile(prepared, timer, phases["short"]["step_ms"]["median"])
    return result


def _build(spec: Mapping[str, Any], marks: dict[str, float]) -> tuple[PreparedStep, StepTimer]:
    def report(part: str) -> None:
        marks[part] = _since(spec)

    prepared = prepare_step(configuration(spec), report)
    world, rows = prepared.stepper.world, prepared.rows_per_step
    device = world.device
    if spec.get("data"):
        batches = _real_batches(spec["data"], prepared.config, prepared.fit, rows, device)
    else:
        batches = random_batches(prepared.rows, prepared.fit.micro_rows, rows, world)
    return prepared, StepTimer(
        prepared.stepper, batches, prepared.fit.accumulation, environment_record.Sensors(device)
    )


def _real_batches(
    path: str, config: RunConfig, fit: MicroBatch, step_rows: int, device: torch.device
) -> list[Batch]:
    """Return the first micro-batches of a run on a prepared dataset, to be used in turn. Raises UsageError."""
    dataset = NextToken().open(config, Path(path), "train", config.batch.sequence_length)
    batches: list[Batch] = []
    masked = config.data.document_mask
    options = LoaderOptions(
        config.seed, 0, step_rows, fit.micro_rows, device=torch.device(device), document_mask=masked
    )
    with Loader(dataset, options) as loader:
        while len(batches) < BATCHES:
            # Copy, because the loader reuses its buffers, and micro-batches of different steps are mixed here.
            batches += [
                replace(b, num_valid_step=b.num_valid * fit.accumulation) for b in _copies(next(loader))
            ]
    return batches


def _copies(batches: list[Batch]) -> list[Batch]:
    def copy(x: torch.Tensor | None) -> torch.Tensor | None:
        return None if x is None else x.clone()

    return [
        replace(
            b,
            tokens_BT=b.tokens_BT.clone(),
            targets_BT=b.targets_BT.clone(),
            cu_seqlens=copy(b.cu_seqlens),
            positions_BT=copy(b.positions_BT),
        )
        for b in batches
    ]


def _phase(
    run: tuple[list[float], list[dict[str, Any]]], prepared: PreparedStep, flops: float
) -> dict[str, Any]:
    """Return the speed of a phase, with a summary of its sensor readings."""
    seconds, sensor_readings = run
    median = statistics.median(seconds)
    speed = prepared.config.batch.tokens / median
    watts = [float(s["watts"]) for s in sensor_readings if s["watts"] is not None]
    celsius = [float(s["celsius"]) for s in sensor_readings if s["celsius"] is not None]
    return {
        "steps": len(seconds),
        "step_ms": {
            "median": 1e3 * median,
            "p10": 1e3 * quantile(seconds, 0.1),
            "p90": 1e3 * quantile(seconds, 0.9),
        },
        "tokens_per_second": speed,
        "mfu": speed * flops / prepared.peak_flops,
        "watts": statistics.fmean(watts) if watts else None,
        "celsius": max(celsius, default=None),
        "throttled": any(bool(s["throttled"]) for s in sensor_readings) if watts else None,
    }


def _card(device: torch.device, timer: StepTimer) -> dict[str, Any]:
    """Return name, power limit and clocks in MHz, read while a step is running. {} on a CPU or without NVML."""
    if device.type != "cuda":
        return {}
    facts: dict[str, Any] = {"name": torch.cuda.get_device_name(device)}
    card = NvmlDevice.from_torch(device)
    if card is None:
        return facts
    import pynvml

    pending = timer.launch()
    facts |= {
        "sm_mhz": query(pynvml.nvmlDeviceGetClockInfo, card.handle, pynvml.NVML_CLOCK_SM),
        "highest_sm_mhz": query(pynvml.nvmlDeviceGetMaxClockInfo, card.handle, pynvml.NVML_CLOCK_SM),
        "memory_mhz": query(pynvml.nvmlDeviceGetClockInfo, card.handle, pynvml.NVML_CLOCK_MEM),
        "limit_watts": card.power()["limit_watts"],
    }
    timer.read(pending)
    return facts


def _profile(prepared: PreparedStep, timer: StepTimer, step_ms: float) -> dict[str, Any]:
    """Return the time of a step by kind, with the floors of the same work measured on this device now."""
    stepper, device = prepared.stepper, prepared.stepper.world.device
    optimizer = stepper.optimizer
    stepper.optimizer = step_profile.MarkedOptimizer(optimizer)  # type: ignore[assignment]
    try:
        events = step_profile.record(timer.launch, PROFILED_STEPS, device)
    finally:
        stepper.optimizer = optimizer
    activities = step_profile.activities(events, device.type)
    split = step_profile.split(activities, PROFILED_STEPS, step_ms, device.type)
    optimizer.zero_grad()
    micro_tokens = prepared.fit.micro_rows * prepared.config.batch.sequence_length
    floor = step_floor.measure(
        prepared.config,
        prepared.recipe,
        prepared.native,
        stepper.context.attention,
        micro_tokens,
        stepper.model.activation_dtype,
        device,
    )
    return {**split, "floor": floor}


def _since(spec: Mapping[str, Any]) -> float:
    """Return the seconds since the command was started; time.monotonic() is the same in all processes of a machine."""
    return time.monotonic() - float(spec["began"])


def _gib(size: int | None) -> float | None:
    return None if size is None else size / 2**30
