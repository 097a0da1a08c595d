"""One arm of the step benchmark: deskside's own training step, built and timed in a process of its own.

What is built is what `deskside train` builds (train/setup, optim/build, train/step), and what times it is what the
probe uses (probe/point). The batch lies on the device before the clock starts: `benchmarks/loader.py` times the loader.
"""

import statistics
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from benchmarks import step_floor, step_profile
from benchmarks.step_config import configuration
from deskside.budget.scaling import scales
from deskside.budget.shape import flops_per_token, num_params
from deskside.config.run import RunConfig
from deskside.data.loader import Batch, Loader
from deskside.kernels.matmul_peak import measure_matmul_peak
from deskside.optim.build import build
from deskside.probe.doctor_nvml import Card, ask
from deskside.probe.point import (
    BATCHES,
    RandomRows,
    RandomStage,
    _batches,
    _memory,
    _optimizer_seconds,
    _quantile,
    _Timer,
    _to,
)
from deskside.train import machine, parallel, setup
from deskside.train.fit import Fit, rows_per_rank
from deskside.train.guard import Guard
from deskside.train.planning import modelled_memory_gib
from deskside.train.settle import Settler
from deskside.train.step import Stepper

PROFILED_STEPS = 3
HOT_STEPS = 5  # at least, however slow


@dataclass
class Built:
    """A step that is ready to run. `marks`: seconds since the command when each part of the start was done."""

    config: RunConfig
    recipe: str
    stepper: Stepper
    timer: _Timer
    fit: Fit
    peak_flops: float
    attention: dict[str, Any]
    native: bool
    mode: str
    notes: list[str]
    marks: dict[str, float]


def measure(spec: dict[str, Any]) -> dict[str, Any]:
    """Numbers of one arm. For a process of its own.

    spec: as in `step_config.configuration`, and `steps`, `warmup`, `hot_seconds`, `profile`, `data` (None or the path
    of a prepared dataset) and `began`, what time.monotonic() said when the command was given.
    """
    built = _build(spec)
    timer, device, config = built.timer, built.stepper.world.device, built.config
    machine.reset_peak_memory(device)
    timer._read(timer._launch())
    built.marks["first step done"] = _since(spec)
    if spec["warmup"] > 1:
        timer.run(0.0, spec["warmup"] - 1)
    flops = flops_per_token(config.model, config.batch.sequence_length)
    phases = {"short": _phase(timer.run(0.0, spec["steps"]), built, flops)}
    if spec.get("hot_seconds"):
        phases["hot"] = _phase(timer.run(spec["hot_seconds"], HOT_STEPS), built, flops)
    # The card's state at work, not the one that it falls back to between two phases.
    card = _card(device, timer)
    memory = _memory(device)
    result: dict[str, Any] = {
        "preset": spec["preset"],
        "precision": built.recipe,
        "optimizer": config.optim.name,
        "params": num_params(config.model),
        "sequence_length": config.batch.sequence_length,
        "tokens": config.batch.tokens,
        "micro_tokens": built.fit.micro_rows * config.batch.sequence_length,
        "accumulation": built.fit.accumulation,
        "attention": built.attention,
        "compile": built.mode,
        "native": built.native,
        "data": spec.get("data") or "zipf",
        "phases": phases,
        "flops_per_token": flops,
        "matmul_peak_tflops": built.peak_flops / 1e12,
        "peak_allocated_gib": _gib(memory["peak_allocated_bytes"]),
        "peak_reserved_gib": _gib(memory["peak_reserved_bytes"]),
        "cold_start": built.marks,
        "optimizer_ms": 1e3 * _optimizer_seconds(built.stepper, timer.batches[0]),
        "loss_first": timer.losses[0],
        "loss_last": timer.losses[-1],
        "finite": timer.finite,
        "card": card,
        "device": device.type,
        "torch": torch.__version__,
        "notes": built.notes,
    }
    if spec.get("profile"):
        result["profile"] = _profile(built, phases["short"]["step_ms"]["median"])
    return result


def _build(spec: Mapping[str, Any]) -> Built:
    marks = {"imported": _since(spec)}
    config = configuration(spec)
    world = parallel.join(config.compute.device, "auto")
    torch.manual_seed(config.seed)
    notes: list[str] = []
    recipe, precision = setup.choose_recipe(config.precision, world.device, notes.append)
    marks["recipe checked"] = _since(spec)
    model = setup.build_model(config, world, recipe)
    marks["model built"] = _since(spec)
    attention, facts = setup.choose_attention(config, model, world, config.batch.sequence_length, None)
    marks["attention chosen"] = _since(spec)
    execution = setup.prepare_execution(config, model, world, recipe, precision["native"])
    peak = measure_matmul_peak(world.device, model.activation_dtype)
    scaling = scales(
        config.model.hidden_size, config.batch.tokens, 1000 * config.batch.tokens, config.optim.name
    )
    stepper = Stepper(
        model,
        build(model, config.optim, scaling),
        Guard(config.guard),
        world,
        config.compute,
        attention,
        config.optim.grad_clip,
        list(model.parameters()),
        execution.precision,
        config.precision,
    )
    settler = Settler(
        config,
        stepper,
        lambda tokens: modelled_memory_gib(config, tokens, recipe, execution.mode, precision["native"]),
        notes.append,
    )
    rows = RandomRows(config.batch.sequence_length, config.model.vocab_size)
    (fit,), _ = settler.settle([RandomStage(config.stages()[0], config.batch.tokens, rows)], None)
    marks["compiled and fitted"] = _since(spec)
    step_rows = rows_per_rank(config.batch.tokens, rows.sequence_length, world)
    if spec.get("data"):
        batches = _real_batches(spec["data"], config, fit, step_rows, world.device)
    else:
        batches = [_to(b, world.device) for b in _batches(rows, fit.micro_rows, step_rows)]
    timer = _Timer(stepper, batches, fit.accumulation, machine.Sensors(world.device))
    return Built(
        config, recipe, stepper, timer, fit, peak, facts, precision["native"], execution.mode, notes, marks
    )


def _real_batches(
    path: str, config: RunConfig, fit: Fit, step_rows: int, device: torch.device
) -> list[Batch]:
    """The first micro-batches of a run on a prepared dataset; they are used in turn. Raises UsageError."""
    dataset = setup.open_split(config, Path(path), "train", config.batch.sequence_length)
    kept: list[Batch] = []
    masked = config.data.document_mask
    with Loader(
        dataset, config.seed, 0, step_rows, fit.micro_rows, device=device, document_mask=masked
    ) as loader:
        while len(kept) < BATCHES:
            # The loader's buffers are used again, and micro-batches of different steps are mixed here.
            kept += [replace(b, num_valid_step=b.num_valid * fit.accumulation) for b in _copies(next(loader))]
    return kept


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


def _phase(run: tuple[list[float], list[dict[str, Any]]], built: Built, flops: float) -> dict[str, Any]:
    """Speed, and what the sensors said meanwhile."""
    seconds, sensed = run
    median = statistics.median(seconds)
    speed = built.config.batch.tokens / median
    watts = [float(s["watts"]) for s in sensed if s["watts"] is not None]
    celsius = [float(s["celsius"]) for s in sensed if s["celsius"] is not None]
    return {
        "steps": len(seconds),
        "step_ms": {
            "median": 1e3 * median,
            "p10": 1e3 * _quantile(seconds, 0.1),
            "p90": 1e3 * _quantile(seconds, 0.9),
        },
        "tokens_per_second": speed,
        "mfu": speed * flops / built.peak_flops,
        "watts": statistics.fmean(watts) if watts else None,
        "celsius": max(celsius, default=None),
        "throttled": any(bool(s["throttled"]) for s in sensed) if watts else None,
    }


def _card(device: torch.device, timer: _Timer) -> dict[str, Any]:
    """Name, power limit and clocks in MHz; the clocks while a step is running. {} on a CPU or where NVML is silent."""
    if device.type != "cuda":
        return {}
    facts: dict[str, Any] = {"name": torch.cuda.get_device_name(device)}
    card = Card.of(device)
    if card is None:
        return facts
    import pynvml

    pending = timer._launch()
    facts |= {
        "sm_mhz": ask(pynvml.nvmlDeviceGetClockInfo, card.handle, pynvml.NVML_CLOCK_SM),
        "highest_sm_mhz": ask(pynvml.nvmlDeviceGetMaxClockInfo, card.handle, pynvml.NVML_CLOCK_SM),
        "memory_mhz": ask(pynvml.nvmlDeviceGetClockInfo, card.handle, pynvml.NVML_CLOCK_MEM),
        "limit_watts": card.power()["limit_watts"],
    }
    timer._read(pending)
    return facts


def _profile(built: Built, step_ms: float) -> dict[str, Any]:
    """The split of a step by kind, and beside it the floors of the same work, measured on this device now."""
    stepper, timer, device = built.stepper, built.timer, built.stepper.world.device
    own = stepper.optimizer
    stepper.optimizer = step_profile.MarkedOptimizer(own)  # type: ignore[assignment]
    try:
        events = step_profile.record(timer._launch, PROFILED_STEPS, device)
    finally:
        stepper.optimizer = own
    found = step_profile.pieces(events, device.type)
    split = step_profile.split(found, PROFILED_STEPS, step_ms, device.type)
    own.zero_grad()
    micro_tokens = built.fit.micro_rows * built.config.batch.sequence_length
    floor = step_floor.measure(
        built.config,
        built.recipe,
        built.native,
        stepper.attention,
        micro_tokens,
        built.stepper.model.activation_dtype,
        device,
    )
    return {**split, "floor": floor}


def _since(spec: Mapping[str, Any]) -> float:
    """Seconds since the command; the clock is the system's, the same in every process."""
    return time.monotonic() - float(spec["began"])


def _gib(size: int | None) -> float | None:
    return None if size is None else size / 2**30
